"""Megatron's files: the bytes its own builder writes, read back by document, damage named."""

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest

from training.data import tokens
from training.data.format import ids_of, verify
from training.data.loader import TokenBatches
from training.data.megatron import MegatronReader, MegatronWriter
from training.data.repack import repack
from training.data.sources import SourceError
from training.job import NodeJob

DOCUMENTS = [np.arange(start, start + count) for start, count in ((3, 4), (60, 1), (7, 9), (0, 2))]


def write(prefix: Path, vocab_size: int) -> Path:
    """Write the documents, two at a time."""
    out = MegatronWriter(prefix, vocab_size)
    for pair in (DOCUMENTS[:2], DOCUMENTS[2:]):
        out.write(np.concatenate(pair), np.array([len(one) for one in pair]))
    out.close()
    return prefix


@pytest.mark.parametrize(("vocab_size", "kind", "code"), [(65_499, "<u2", 8), (65_500, "<i4", 4)])
def test_the_bytes_are_megatrons(tmp_path: Path, vocab_size: int, kind: str, code: int) -> None:
    prefix = write(tmp_path / "corpus_text_document", vocab_size)
    ids = np.concatenate(DOCUMENTS).astype(kind)
    assert Path(f"{prefix}.bin").read_bytes() == ids.tobytes()
    size = ids.itemsize
    wanted = struct.pack(
        "<9sQBQQ4i4q5q", b"MMIDIDX\0\0", 1, code, 4, 5, 4, 1, 9, 2, 0, 4 * size, 5 * size, 14 * size, *range(5)
    )
    assert Path(f"{prefix}.idx").read_bytes() == wanted


def test_files_of_megatrons_own_builder_are_the_same(tmp_path: Path) -> None:
    """The digests are of what IndexedDatasetBuilder of Megatron-LM d98e8a64dd wrote for these documents."""
    random = np.random.default_rng(0)
    documents = [random.integers(0, 60_000, count) for count in random.integers(1, 50, 1000)]
    out = MegatronWriter(tmp_path / "our", 128_000)
    out.write(np.concatenate(documents), np.array([len(one) for one in documents]))
    out.close()
    found = [hashlib.sha256((tmp_path / f"our.{end}").read_bytes()).hexdigest() for end in ("bin", "idx")]
    assert found == REFERENCE


def test_documents_are_read_back(tmp_path: Path) -> None:
    reader = MegatronReader(write(tmp_path / "a.b", 100))
    assert reader.documents == 4
    for at_once in (1, 5, 100):
        found = [one for ids, lengths in reader.pieces(at_once) for one in np.split(ids, np.cumsum(lengths)[:-1])]
        assert [one.tolist() for one in found] == [one.tolist() for one in DOCUMENTS]


def test_damage_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"none\.idx or none\.bin is absent or empty"):
        MegatronReader(tmp_path / "none")
    prefix = write(tmp_path / "good", 100)
    index, ids = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    whole = index.read_bytes()
    index.write_bytes(whole[:-3])
    with pytest.raises(SourceError, match=r"good\.idx is truncated: it has"):
        MegatronReader(prefix)
    index.write_bytes(b"X" + whole[1:])
    with pytest.raises(SourceError, match="is not an index of Megatron-LM's version 1"):
        MegatronReader(prefix)
    index.write_bytes(whole)
    ids.write_bytes(ids.read_bytes()[:-2])
    with pytest.raises(SourceError, match=r"good\.bin is not what good\.idx tells of"):
        MegatronReader(prefix)


def test_a_prefix_becomes_a_dataset(tmp_path: Path) -> None:
    tokenizer = tokens.train(["def one():\n    return 1\n" * 9], 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [f"def f{i}():\n    return {i}\n" for i in range(40)]
    end = tokens.end_id(tokenizer)
    coded = [[*tokenizer.encode(text).ids, *[end] * (i % 2)] for i, text in enumerate(texts)]
    out = MegatronWriter(tmp_path / "corpus", 300)
    out.write(np.concatenate(coded), np.array([len(one) for one in coded]))
    out.close()
    spec = {"model": {"vocab_size": 300}, "data": {"sequence_length": 16, "held_out": 0.1}}
    inputs = {"megatron": tmp_path / "corpus", "tokenizer": tmp_path}
    repack(NodeJob(spec, tmp_path / "out", inputs))
    facts = verify(tmp_path / "out")
    names: dict[str, list[str]] = {part: [] for part in ("train", "held_out")}
    for part, found in names.items():
        ids = np.concatenate(list(ids_of(tmp_path / "out", facts, part)))
        pieces = np.split(ids, np.flatnonzero(ids == end) + 1)
        found += [tokenizer.decode(piece[:-1].tolist()) for piece in pieces[:-1]]
        assert not len(pieces[-1])
        assert facts[part]["documents"] == len(found)
        assert facts[part]["bytes"] == sum(map(len, found))
    assert sorted(names["train"] + names["held_out"]) == sorted(texts)
    lines = (tmp_path / "out/held_out.jsonl").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == names["held_out"]
    assert len(TokenBatches(tmp_path / "out", 4, 1).batch(0).tokens) == 4
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["documents"] == 40
    tokens.train(["x"], 260).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SourceError, match=r"corpus has the id \d+, and the tokenizer 257; name the one it is from"):
        repack(NodeJob(spec, tmp_path / "again", inputs))


REFERENCE = [
    "000cf7a751447cbe60d5a7edac0fa8218ad64ba6cf5359be1d92d71790d4422a",
    "b58af3d6436d3c5f2657bd079fc4be2d6cff54af19b3879fa418bd387967db90",
]
