"""An export goes up once, its index last, and a refusal is one sentence that loses nothing."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters.aws import Site
from tests.sky import client
from tests.training.nursery import free_port
from training import remote
from training.export import upload
from training.export.upload import main, push
from training.process import JobError

BUCKET = "exports"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "hf"
    (place / "adapter").mkdir(parents=True)
    names = ("config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "adapter/a.safetensors")
    for name in names:
        (place / name).write_bytes(name.encode() * 1000)
    return place


@pytest.fixture
def s3(site: Site) -> Any:
    s3 = client("s3", site.endpoint)
    s3.create_bucket(Bucket=BUCKET)
    return s3


def there(s3: Any, prefix: str) -> dict[str, Any]:
    found = s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", [])
    return {one["Key"].removeprefix(prefix): one["LastModified"] for one in found}


def test_a_second_upload_sends_nothing_and_a_changed_file_alone_goes_again(s3: Any, folder: Path) -> None:
    target = f"s3://{BUCKET}/models/one"
    assert push(folder, target) == {"target": target, "sent": 4, "kept": 0}
    first = there(s3, "models/one/")
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert sorted(first) == sorted([*names, upload.LEDGER])
    assert push(folder, target) == {"target": target, "sent": 0, "kept": 4}
    (folder / "config.json").write_bytes(b"C" + b"x" * (len("config.json") * 1000 - 1))  # of the same size
    assert push(folder, target) == {"target": target, "sent": 1, "kept": 3}
    body = s3.get_object(Bucket=BUCKET, Key="models/one/config.json")["Body"].read()
    assert body == (folder / "config.json").read_bytes()
    s3.put_object(Bucket=BUCKET, Key="models/one/config.json", Body=b"y" * len(body))  # somebody else's
    assert push(folder, target)["sent"] == 1


def test_large_files_go_in_parts_and_what_makes_it_load_goes_last(s3: Any, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "PART", 5 << 20)
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"w" * (12 << 20))
    order: list[str] = []
    put = upload._Shelf.put

    def follow(self: Any, path: Path, name: str) -> bool:
        done = put(self, path, name)
        order.append(name)
        return done

    monkeypatch.setattr(upload._Shelf, "put", follow)
    push(folder, f"s3://{BUCKET}/large")
    assert order[-2:] == ["config.json", "model.safetensors.index.json"]
    head = s3.head_object(Bucket=BUCKET, Key="large/model-00001-of-00002.safetensors")
    assert head["ContentLength"] == 12 << 20
    assert head["ETag"].strip('"').endswith("-3")


def test_a_bucket_that_is_not_there_is_one_sentence(site: Site, folder: Path) -> None:
    with pytest.raises(
        JobError, match=r"s3://no-such-bucket-here/x: S3 answers NoSuchBucket .*; the export itself is whole"
    ):
        push(folder, "s3://no-such-bucket-here/x")


class Denies(http.server.BaseHTTPRequestHandler):
    """What S3 says to somebody who may not write."""

    def do_GET(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def denied(monkeypatch: Any) -> Iterator[None]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denies) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "castra")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("denied")
def test_a_refusal_of_s3_is_one_sentence(folder: Path) -> None:
    with pytest.raises(JobError, match=r"s3://bucket/x: S3 answers AccessDenied .*; the export itself is whole"):
        push(folder, "s3://bucket/x")


def test_a_hub_needs_a_token_and_a_network(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(
        JobError, match=r"hf://me/model needs a token: put one .* into the environment variable HF_TOKEN"
    ):
        push(folder, "hf://me/model")
    monkeypatch.setenv("HF_TOKEN", "hf_nothing")
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(JobError, match=r"^hf://me/model: .*; the export itself is whole, start again to upload it$"):
        push(folder, "hf://me/model")
    with pytest.raises(JobError, match="ftp://x is neither s3://bucket/prefix nor hf://name"):
        push(folder, "ftp://x")
    assert main([str(folder / "gone"), "s3://a/b"]) == 2
    assert "gone is no folder" in capsys.readouterr().err
