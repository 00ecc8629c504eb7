"""Sources: the same list and digest anywhere, and one helpful sentence for everything that is not there."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path
from subprocess import run

import pytest

from training.data.files import whole
from training.data.sources import SourceError, documents, inventory


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    root = tmp_path / "corpus"
    for name in ("b.py", "a.txt", "deep/c.py", "deep/er/d.py", "__pycache__/e.py", "site-packages/f.py", ".hidden.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"this is {name}\n")
    return root


def test_documents_are_sorted_matching_files_without_caches_packages_and_hidden_ones(corpus: Path) -> None:
    found = documents(str(corpus), ["*.py"])
    assert [one.name for one in found] == ["b.py", "deep/c.py", "deep/er/d.py"]
    assert [one.size for one in found] == [len(whole(one, 1000)) for one in found]


def test_a_pattern_with_a_slash_is_compared_with_the_whole_name(corpus: Path) -> None:
    assert [one.name for one in documents(str(corpus), ["deep/c*", "*.txt"])] == ["a.txt", "deep/c.py"]


@pytest.mark.parametrize(("most", "expected"), [(1, [0]), (2, [0, 5]), (5, [0, 2, 4, 6, 8]), (99, list(range(10)))])
def test_max_documents_are_taken_evenly(tmp_path: Path, most: int, expected: list[int]) -> None:
    for i in range(10):
        (tmp_path / f"{i}.txt").write_text("text")
    assert [one.name for one in documents(str(tmp_path), ["*"], most)] == [f"{i}.txt" for i in expected]


def test_links_to_folders_do_not_loop_and_links_to_files_count(corpus: Path) -> None:
    (corpus / "deep" / "again").symlink_to(corpus)
    (corpus / "linked.py").symlink_to(corpus / "b.py")
    (corpus / "broken.py").symlink_to(corpus / "nowhere")
    assert [one.name for one in documents(str(corpus), ["*.py"])] == ["b.py", "deep/c.py", "deep/er/d.py", "linked.py"]


def test_the_inventory_ignores_place_and_time_but_no_name_and_no_byte(corpus: Path, tmp_path: Path) -> None:
    first = inventory(documents(str(corpus), ["*.py"]))
    copy = Path(shutil.copytree(corpus, tmp_path / "elsewhere"))
    os.utime(copy / "b.py", (1, 1))
    assert inventory(documents(str(copy), ["*.py"])) == first
    assert (first["documents"], first["bytes"]) == (3, sum(one.size for one in documents(str(corpus), ["*.py"])))
    (copy / "b.py").write_text("this is B.py\n")
    changed = inventory(documents(str(copy), ["*.py"]))
    (copy / "b.py").write_text("this is b.py\n")
    (copy / "b.py").rename(copy / "z.py")
    renamed = inventory(documents(str(copy), ["*.py"]))
    assert len({first["digest"], changed["digest"], renamed["digest"]}) == 3


def test_text_cannot_move_from_one_file_to_the_next_unnoticed(tmp_path: Path) -> None:
    for folder, texts in (("one", ("ab", "c")), ("two", ("a", "bc"))):
        (tmp_path / folder).mkdir()
        for name, text in zip("xy", texts, strict=True):
            (tmp_path / folder / name).write_text(text)
    digests = {inventory(documents(str(tmp_path / folder), ["*"]))["digest"] for folder in ("one", "two")}
    assert len(digests) == 2


def test_the_standard_library_is_a_source_without_installed_packages() -> None:
    found = documents("python-stdlib", ["*.py"])
    assert {"os.py", "json/__init__.py"} <= {one.name for one in found}
    assert not any("site-packages" in one.name for one in found)
    assert Path(found[0].place).is_relative_to(sysconfig.get_paths()["stdlib"])


@pytest.mark.parametrize(
    ("source", "include", "words"),
    [
        ("{}/corpsu", ["*"], "did you mean {}/corpus?"),
        ("{}/corpus/x/y", ["*"], "the nearest one that exists is {}/corpus"),
        ("https://host/corpus", ["*"], "is no address that can be read"),
        ("{}/corpus", ["*.md"], "most files there end in .py"),
        ("{}/empty", ["*"], "there are no files at all"),
    ],
)
def test_what_is_not_there_is_told_in_one_sentence(corpus: Path, source: str, include: list[str], words: str) -> None:
    (corpus.parent / "empty").mkdir()
    with pytest.raises(SourceError) as told:
        documents(source.format(corpus.parent), include)
    assert words.format(corpus.parent) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_file_that_goes_away_is_named(corpus: Path) -> None:
    found = documents(str(corpus), ["*.py"])
    Path(found[1].place).unlink()
    with pytest.raises(SourceError, match=r"deep/c\.py cannot be read"):
        inventory(found)


def test_several_sources_come_one_after_the_other_and_a_file_is_one(corpus: Path) -> None:
    found = documents([str(corpus / "a.txt"), str(corpus / "deep")], ["*.py"])
    assert [(one.source, one.name) for one in found] == [
        (str(corpus / "a.txt"), "a.txt"),
        (str(corpus / "deep"), "c.py"),
        (str(corpus / "deep"), "er/d.py"),
    ]


def test_a_second_inventory_reads_nothing(corpus: Path, tmp_path: Path) -> None:
    for path in corpus.rglob("*.py"):
        os.utime(path, (1, 1))
    cache = tmp_path / "cache" / "digests"
    found = documents(str(corpus), ["*.py"])
    first = inventory(found, cache)
    assert first == inventory(found)
    for path in corpus.rglob("*.py"):
        path.write_text(path.read_text().upper())  # unseen, for its size and time stay
        os.utime(path, (1, 1))
    assert inventory(documents(str(corpus), ["*.py"]), cache) == first
    os.utime(corpus / "b.py", (2, 2))
    assert inventory(documents(str(corpus), ["*.py"]), cache) != first


def test_a_cache_that_cannot_be_used_costs_time_only(corpus: Path, tmp_path: Path) -> None:
    found = documents(str(corpus), ["*.py"])
    (tmp_path / "broken").write_text("this is no database, " * 100)
    assert inventory(found, tmp_path / "broken") == inventory(found) == inventory(found, tmp_path / "broken" / "x")


def test_what_changed_since_it_was_listed_is_told(corpus: Path) -> None:
    found = documents(str(corpus), ["*.py"])
    (corpus / "b.py").write_text("longer than before, and so another file\n")
    with pytest.raises(SourceError, match=r"b\.py changed while it was being"):
        inventory(found)
    with pytest.raises(SourceError, match=r"b\.py changed while it was being"):
        whole(found[0], 1000)


def test_the_control_plane_can_read_it_without_numpy_or_torch() -> None:
    code = "import sys, training.data.sources; print([m for m in ('numpy', 'torch', 'tokenizers') if m in sys.modules])"
    root = Path(__file__).parents[2]
    assert run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root).stdout == "[]\n"
