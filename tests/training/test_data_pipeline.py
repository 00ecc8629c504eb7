"""Preparing data from every kind of file: each document once, and one sentence for what cannot be read."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from tests.training.corpora import ids, lines, mixed, spec, start, straight, texts, write_table
from training.data import files, pack, records
from training.data.format import ids_of, read_facts, verify
from training.data.loader import TokenBatches
from training.data.prepare import prepare
from training.data.sources import SourceError, documents
from training.job import NodeJob

__all__ = ["mixed", "straight"]


def test_every_kind_of_file_gives_its_documents_once(mixed: Path, straight: Path) -> None:
    facts = verify(straight)
    assert facts["dropped"] == {"exact_duplicate": 20, "near_duplicate": 1}
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == 5 * 200 + 1
    assert facts["sources"] == {
        str(mixed): {name: facts["train"][name] + facts["held_out"][name] for name in ("documents", "tokens", "bytes")}
    }
    told = [json.loads(line) for line in (straight / "held_out.jsonl").read_text().splitlines()]
    assert len(told) == facts["held_out"]["documents"]
    files_named = {one["name"].rpartition(":")[0] for one in told if ":" in one["name"]}
    assert files_named == {"a.jsonl", "b.ndjson.gz", "c.json.zst", "d.parquet"}
    row = next(one for one in told if one["name"].startswith("d.parquet:"))
    assert texts(200, 3)[int(row["name"].rpartition(":")[2]) - 1] == row["text"]


def test_small_units_pages_and_shards_hold_the_same_tokens(
    mixed: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "UNIT_BYTES", 5000)
    monkeypatch.setattr(records, "TEXTS", 7)
    monkeypatch.setattr(files, "BLOCK", 1000)
    monkeypatch.setattr("training.data.survey.PAGE_BYTES", 3000)
    monkeypatch.setattr(pack, "STREAM_TOKENS", 999)
    prepare(NodeJob(spec(mixed, tokenizer=str(straight / "tokenizer.json")), tmp_path / "out"))
    facts, whole = verify(tmp_path / "out"), read_facts(straight)
    assert len(facts["train"]["shards"]) > 20
    for part in ("train", "held_out"):
        assert (np.concatenate(list(ids_of(tmp_path / "out", facts, part))) == ids(straight, whole, part)).all()
        assert {**facts[part], "shards": 0} == {**whole[part], "shards": 0}
    assert (tmp_path / "out" / "held_out.jsonl").read_bytes() == (straight / "held_out.jsonl").read_bytes()


def test_best_fit_keeps_every_token_and_masks_what_fills_up(
    mixed: Path, straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack, "BLOCK_TOKENS", 5000)
    asked = spec(mixed, packing="best-fit", sequence_length=256, megatron=True, documents_apart=True)
    prepare(NodeJob(asked, tmp_path / "out"))
    facts = verify(tmp_path / "out")
    assert facts["marks"]
    assert facts["stride"] == 257
    assert len(facts["train"]["shards"]) > 1
    assert facts["train"]["tokens"] == read_facts(straight)["train"]["tokens"]
    assert facts["train"]["targets"] < facts["train"]["sequences"] * 256
    batch = TokenBatches(tmp_path / "out", 4, 1).batch(0)
    assert batch.mask is not None
    assert batch.documents is not None
    raw = np.fromfile(tmp_path / "out" / "megatron" / "train.bin", "<u2")
    assert (raw == ids(straight, read_facts(straight), "train")).all()


def test_conversations_are_learned_only_where_the_assistant_speaks(tmp_path: Path) -> None:
    found = texts(60, 5)
    turns = [
        {"messages": [{"role": "user", "content": f"{text}?"}, {"role": "assistant", "content": f"Yes, {text}"}]}
        for text in found
    ]
    rows = [json.dumps(one) for one in turns] + [
        '{"messages": []}',
        "no json",
        '{"prompt": "why so", "completion": "because of that"}',
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(rows))
    prepare(NodeJob(spec(tmp_path / "chat.jsonl", kind="chat", packing="best-fit"), tmp_path / "out"))
    facts = verify(tmp_path / "out")
    assert facts["kind"] == "chat"
    assert facts["dropped"] == {"broken_record": 2}
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == 61
    assert 0 < facts["train"]["targets"] < facts["train"]["tokens"] * 0.7
    told = [json.loads(line) for line in (tmp_path / "out" / "held_out.jsonl").read_text().splitlines()]
    assert [one["messages"][-1]["role"] for one in told] == ["assistant"] * len(told)
    given = spec(tmp_path / "chat.jsonl", kind="chat", packing="best-fit", tokenizer=str(tmp_path / "out"))
    prepare(NodeJob(given, tmp_path / "again"))
    assert verify(tmp_path / "again")["train"] == facts["train"]


def test_rows_are_chosen_evenly_and_their_number_moves_no_other(mixed: Path, tmp_path: Path) -> None:
    prepare(NodeJob(spec(mixed / "a.jsonl", max_documents=50), tmp_path / "out"))
    facts = read_facts(tmp_path / "out")
    assert facts["dropped"] == {"beyond_max_documents": 150}
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == 50


def test_a_data_set_of_the_hub_library_is_a_source(
    tmp_path: Path, straight: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    write_table({"body": texts(50, 1)}, tmp_path / "set" / "train.parquet")
    asked = spec(
        f"hf://{tmp_path / 'set'}:train", text_field="body", tokenizer=str(straight / "tokenizer.json"), workers=1
    )
    program = start(tmp_path / "job.json", asked, tmp_path / "out", HF_HOME=str(tmp_path / "home"))
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 0, out
    facts = verify(tmp_path / "out")
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == 50


def half(raw: bytes) -> bytes:
    return raw[: len(raw) // 2]


def table_bytes(folder: Path) -> bytes:
    write_table({"text": texts(100, 1)}, folder / "made")
    return (folder / "made").read_bytes()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.jsonl.gz", lambda _: half(gzip.compress(lines(texts(100, 1)))), "x.jsonl.gz is truncated"),
        ("x.jsonl.zst", lambda _: half(zstandard.compress(lines(texts(100, 1)))), "x.jsonl.zst is truncated"),
        ("x.jsonl.zst", lambda _: b"plain text, not packed", "x.jsonl.zst is damaged"),
        ("x.jsonl.gz", lambda _: b"plain text, not packed", "x.jsonl.gz is damaged"),
        ("x.parquet", lambda folder: half(table_bytes(folder)), "x.parquet is no whole Parquet file"),
        ("x.parquet", lambda _: b"", "x.parquet is no whole Parquet file"),
        ("x.parquet.gz", lambda _: b"", "a Parquet file is compressed inside"),
        ("x.jsonl", lambda _: lines(texts(9, 1), "body"), "x.jsonl, line 1 has no text in 'text' (it has id, body)"),
        ("x.jsonl", lambda _: b"\n\nplain\ntext\n", "x.jsonl, line 3 is not a JSON object"),
        ("x.jsonl.gz", lambda _: gzip.compress(b"[]\n"), "x.jsonl.gz, record 1 is not a JSON object"),
        ("x.jsonl", lambda _: b"", "of 0 documents 0 passed"),
        ("x.txt", lambda _: b"caf\xe9 " * 100, "of 1 documents 0 passed (not_utf8: 1)"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_in_one_sentence(
    tmp_path: Path, name: str, content: Callable[[Path], bytes], words: str
) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / name).write_bytes(content(tmp_path))
    with pytest.raises(SourceError) as told:
        prepare(NodeJob(spec(tmp_path / "corpus"), tmp_path / "out"))
    assert words in str(told.value)
    assert "\n" not in str(told.value)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    write_table({"body": ["a"], "id": [1]}, tmp_path / "x.parquet")
    with pytest.raises(SourceError, match=r"has no column 'text' but body, id; set data.text_field"):
        prepare(NodeJob(spec(tmp_path / "x.parquet"), tmp_path / "out"))


def test_a_few_broken_records_are_dropped_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = lines(texts(30, 1)) + b'{"text": "half a \\ud800 pair of surrogates in it"}\nbroken\n{"text": 5}\n[1]\n'
    (tmp_path / "x.jsonl").write_bytes(raw)
    prepare(NodeJob(spec(tmp_path / "x.jsonl"), tmp_path / "out"))
    assert read_facts(tmp_path / "out")["dropped"] == {"broken_record": 2, "no_text": 1, "not_utf8": 1}
    assert "x.jsonl, line 32 is not a JSON object" in capsys.readouterr().out


@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50, 1000])
def test_ranges_of_bytes_have_each_line_once(tmp_path: Path, cut: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(cut)
    expected = [b"x" * rng.choice([0, 1, 2, 5, 30]) for _ in range(60)]
    monkeypatch.setattr(files, "BLOCK", rng.choice([1, 3, 10, 1000]))
    for end in (b"", b"\n"):
        path = tmp_path / f"x{len(end)}.jsonl"
        path.write_bytes(b"\n".join(expected) + end)
        (document,) = documents(str(path))
        ranges = [(begin, min(begin + cut, document.size)) for begin in range(0, document.size, cut)]
        found = [piece for begin, last in ranges for piece in files.lines(document, begin, last)]
        assert b"".join(piece for _, piece in found) == path.read_bytes()
        assert all(path.read_bytes()[at : at + len(piece)] == piece for at, piece in found)
