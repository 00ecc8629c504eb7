"""Objects in a folder and in S3: whole, in order, and written by one at a time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from store import Conflict, Store, StoreError, open_store

ROOT = Path(__file__).parents[2]


def workers(count: int, text: str, *words: str) -> list[str]:
    """What `count` processes print that run `text` at the same time, with `store` at hand."""
    head = "import sys; from store import Conflict, open_store; store = open_store(sys.argv[1])\n"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", head + text, *words]
    started = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    told = [one.communicate(timeout=120)[0].strip() for one in started]
    assert [one.returncode for one in started] == [0] * count
    return told


def test_what_was_put_is_got_until_it_is_deleted(store: Store) -> None:
    assert store.get("a/b.json") is None
    first = store.put("a/b.json", b"one")
    found = store.get("a/b.json")
    assert found
    assert (found.data, found.etag) == (b"one", first)
    assert store.put("a/b.json", b"two") != first
    store.delete("a/b.json")
    assert store.get("a/b.json") is None
    store.delete("a/b.json")


def test_keys_are_those_of_a_prefix_in_order(store: Store) -> None:
    for key in ("run/b", "run/a/x", "run/a/y", "running", "other"):
        store.put(key, b"")
    assert store.keys("run/") == ["run/a/x", "run/a/y", "run/b"]
    assert store.keys("run/a") == ["run/a/x", "run/a/y"]
    assert store.keys("run") == ["run/a/x", "run/a/y", "run/b", "running"]
    assert store.keys("none/") == []


def test_a_conditional_write_loses_against_an_earlier_one(store: Store) -> None:
    etag = store.put("k", b"1", if_absent=True)
    with pytest.raises(Conflict):
        store.put("k", b"2", if_absent=True)
    store.put("k", b"3", if_match=etag)
    with pytest.raises(Conflict):
        store.put("k", b"4", if_match=etag)
    store.delete("k")
    with pytest.raises(Conflict):
        store.put("k", b"5", if_match=etag)
    assert store.get("k") is None


def test_of_many_processes_one_creates(store: Store, url: str) -> None:
    told = workers(
        4,
        "import os\ntry: store.put('one', str(os.getpid()).encode(), if_absent=True); print(os.getpid())\n"
        "except Conflict: print('lost')",
        url,
    )
    (winner,) = set(told) - {"lost"}
    assert told.count("lost") == 3
    found = store.get("one")
    assert found
    assert found.data.decode() == winner


def test_no_increment_of_many_processes_is_lost(store: Store, url: str) -> None:
    store.put("count", b"0")
    text = (
        "done = 0\nwhile done < 15:\n  there = store.get('count')\n"
        "  try: store.put('count', str(int(there.data) + 1).encode(), if_match=there.etag); done += 1\n"
        "  except Conflict: pass"
    )
    workers(3, text, url)
    found = store.get("count")
    assert found
    assert found.data == b"45"


@pytest.mark.parametrize("key", ["", "/a", "../a", "a/../../b", "a//b", "a b", "a\n"])
def test_a_key_stays_within_the_store(store: Store, key: str) -> None:
    with pytest.raises(StoreError, match="is not a key"):
        store.put(key, b"")


def test_a_workspace_is_published_and_fetched_elsewhere(store: Store, url: str, tmp_path: Path) -> None:
    folder = store.workspace("train/m@1")
    (folder / "deep").mkdir()
    (folder / "deep" / "weights").write_bytes(b"w" * 5000)
    (folder / "result.json").write_text("{}")
    store.publish("train/m@1")
    assert store.keys("train/") == ["train/m@1/deep/weights", "train/m@1/result.json"]
    text = "folder = store.fetch('train/m@1'); print((folder / 'deep' / 'weights').stat().st_size)"
    os.environ["CASTRA_STATE"] = str(tmp_path / "another")  # monkeypatch of the url fixture puts it back
    assert workers(1, text, url) == ["5000"]


def test_files_of_a_killed_run_are_replaced_even_if_they_have_the_same_size(store: Store) -> None:
    folder = store.workspace("train/m@1")
    (folder / "loss").write_text("1.25")
    store.publish("train/m@1")
    (folder / "loss").write_text("1.75")
    store.publish("train/m@1")
    found = store.get("train/m@1/loss")
    assert found
    assert found.data == b"1.75"
    (folder / "loss").write_text("9.99" if store.url.startswith("s3") else "1.75")
    assert (store.fetch("train/m@1") / "loss").read_text() == "1.75"


@pytest.mark.parametrize("url_", ["https://x/y", "gs://bucket", "file://host/folder"])
def test_another_kind_of_url_is_one_sentence(url_: str) -> None:
    with pytest.raises(StoreError, match="neither a folder, file:///folder nor s3://bucket/prefix: fix `store`"):
        open_store(url_)


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    open_store((tmp_path / "with space").as_uri()).put("k", b"v")
    assert (tmp_path / "with space" / "k").read_bytes() == b"v"


def test_a_store_under_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="is not a folder; point `store` at a folder"):
        open_store(str(tmp_path / "file" / "store"))


def test_a_bucket_that_does_not_exist_is_one_sentence(site: object, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"^store s3://nobody: S3 answers NoSuchBucket .*check the bucket's name"):
        open_store("s3://nobody")


def test_an_endpoint_that_is_gone_is_one_sentence(site: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreError, match=r"^store s3://b: Could not connect .*and the network$"):
        open_store("s3://b")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "castra", place], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.root
def test_a_full_disk_is_one_sentence_and_keeps_what_was_there(small_disk: Path) -> None:
    store = open_store(str(small_disk / "store"))
    store.put("k", b"old")
    with pytest.raises(StoreError, match="the disk is full; free some space"):
        store.put("k", b"n" * 100_000)
    found = store.get("k")
    assert found
    assert found.data == b"old"
    assert store.keys("") == ["k"]
    (small_disk / "ballast").write_bytes(b"b" * (os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    with pytest.raises(StoreError, match="the disk is full"):
        open_store(str(small_disk / "store"))


@pytest.mark.root
def test_a_read_only_folder_is_one_sentence(small_disk: Path) -> None:
    store = open_store(str(small_disk / "store"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for use in (lambda: store.put("k", b""), lambda: open_store(str(small_disk / "store"))):
        with pytest.raises(StoreError, match=r"cannot be written \(Read-only file system\); point `store` at a folder"):
            use()
