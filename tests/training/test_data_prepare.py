"""Preparing data: from real files to packed tokens, the same bytes every time, also after a kill."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, processors

from training.data import tokens
from training.data.format import ids_of, read_facts, verify
from training.data.loader import TokenBatches
from training.data.prepare import prepare
from training.data.sources import SourceError
from training.job import NodeJob

ROOT = Path(__file__).parents[2]
WORDS = ["def", "return", "import", "self", "value", "for", "in", "range", "class", "yield", "print", "lambda", "name"]


def write_corpus(folder: Path, documents: int, seed: int = 1) -> Path:
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(documents):
        text = " ".join(rng.choice(WORDS) + str(rng.randint(0, 99)) for _ in range(rng.randint(80, 300)))
        (folder / f"{i:04d}.py").write_text(f"# {i}\n{text}\n    <|endoftext|> naïve 日本\n")
    return folder


def spec(source: Path | str, **data: Any) -> dict[str, Any]:
    usual = {
        "source": str(source),
        "include": ["*.py"],
        "min_chars": 50,
        "max_chars": 100_000,
        "max_documents": None,
        "near_duplicate": 0.8,
        "held_out": 0.1,
        "sequence_length": 32,
        "tokenizer": "train",
    }
    return {"data": usual | data, "model": {"vocab_size": 512}}


def made(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def start(job: Path, **env: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "training.data.prepare", str(job)]
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | env, stdout=subprocess.PIPE, text=True)


def write_job(path: Path, asked: dict[str, Any], output: Path) -> Path:
    path.write_text(json.dumps({"spec": asked, "output": str(output)}))
    return path


def test_tokens_decode_to_exactly_the_clean_documents(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 60)
    (corpus / "0003.py").write_bytes((corpus / "0003.py").read_bytes().replace(b"\n", b"\r\n"))
    (corpus / "9990.py").write_text((corpus / "0001.py").read_text())
    (corpus / "9991.py").write_text((corpus / "0002.py").read_text() + "one more line\n")
    (corpus / "9992.py").write_text("x = 1\n")
    (corpus / "9993.py").write_bytes(b"caf\xe9 " * 100)
    prepare(NodeJob(spec(corpus), tmp_path / "out"))
    facts = read_facts(tmp_path / "out")
    assert facts["dropped"] == {"exact_duplicate": 1, "near_duplicate": 1, "not_utf8": 1, "too_short": 1}
    assert facts["train"]["documents"] + facts["held_out"]["documents"] == 60
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert facts["vocab_size"] == tokenizer.get_vocab_size() <= 512
    assert facts["eos_id"] == tokenizer.token_to_id("<|endoftext|>")
    told = [json.loads(line) for line in (tmp_path / "out" / "held_out.jsonl").read_text().splitlines()]
    held = {one["name"] for one in told}
    assert decoded(tmp_path / "out", "held_out", facts, tokenizer) == [one["text"] for one in told]
    names = sorted(path.name for path in corpus.iterdir() if path.name < "9990" and path.name not in held)
    expected = [(corpus / name).read_bytes().decode().replace("\r\n", "\n") for name in names]
    assert decoded(tmp_path / "out", "train", facts, tokenizer) == expected
    assert facts["train"]["bytes"] == sum(len(text.encode()) for text in expected)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["bytes_per_token"] == pytest.approx(result["bytes"] / result["tokens"], abs=1e-4)
    assert TokenBatches(tmp_path / "out", 4, 1).batch(0).tokens.shape == (4, 33)
    assert verify(tmp_path / "out") == facts
    assert facts["encoded_by"]["library"].startswith("fastokens")


def decoded(folder: Path, part: str, facts: dict[str, Any], tokenizer: Tokenizer) -> list[str]:
    tokens = np.concatenate(list(ids_of(folder, facts, part)))
    ends = np.flatnonzero(tokens == facts["eos_id"])
    assert ends[-1] == len(tokens) - 1
    assert len(ends) == facts[part]["documents"]
    pieces = np.split(tokens, ends + 1)[:-1]
    return [tokenizer.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces]


def test_the_split_follows_names_so_new_files_move_no_old_one(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 80)
    first = held_out_names(corpus, tmp_path / "first")
    write_corpus(corpus, 160)
    second = held_out_names(corpus, tmp_path / "second")
    assert first == [name for name in second if name < "0080"]
    assert 4 <= len(second) <= 32


def held_out_names(corpus: Path, output: Path) -> list[str]:
    prepare(NodeJob(spec(corpus), output))
    return [json.loads(line)["name"] for line in (output / "held_out.jsonl").read_text().splitlines()]


def test_a_finished_job_is_not_done_again(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.json", spec(tmp_path / "nowhere"), tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "result.json").write_text("{}")
    done = start(job)
    out, _ = done.communicate(timeout=60)
    assert (done.returncode, out) == (0, "")


def test_a_mistake_ends_the_program_with_one_sentence_and_code_2(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.json", spec(tmp_path / "nowhere"), tmp_path / "out")
    refused = start(job)
    out, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert out.count("\n") == 1
    assert "there is no folder or file" in out


def test_a_tokenizer_that_exists_is_used_as_it_is(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    prepare(NodeJob(spec(corpus), tmp_path / "first"))
    given = tmp_path / "first" / "tokenizer.json"
    prepare(NodeJob(spec(corpus, tokenizer=str(given)), tmp_path / "named"))
    prepare(NodeJob(spec(write_corpus(tmp_path / "new", 30, seed=2)), tmp_path / "kept", {"tokenizer": given}))
    assert made(tmp_path / "named") == made(tmp_path / "first")
    assert made(tmp_path / "kept")["tokenizer.json"] == made(tmp_path / "first")["tokenizer.json"]
    assert made(tmp_path / "kept")["train/00000.bin"] != made(tmp_path / "first")["train/00000.bin"]


def test_tokenizers_that_do_not_fit_are_told(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    prepare(NodeJob(spec(corpus), tmp_path / "out"))
    given = tmp_path / "out" / "tokenizer.json"
    small = spec(corpus, tokenizer=str(given)) | {"model": {"vocab_size": 300}}
    with pytest.raises(
        SourceError, match=r"has \d+ tokens, more than model.vocab_size \(300\); set model.vocab_size to"
    ):
        prepare(NodeJob(small, tmp_path / "small"))
    with pytest.raises(SourceError, match=r"there is no file .*nothing\.json"):
        prepare(NodeJob(spec(corpus, tokenizer=str(tmp_path / "nothing.json")), tmp_path / "a"))
    (tmp_path / "text.json").write_text("{}")
    with pytest.raises(SourceError, match=r"text\.json is not a tokenizer\.json"):
        prepare(NodeJob(spec(corpus, tokenizer=str(tmp_path / "text.json")), tmp_path / "b"))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "endless.json"))
    with pytest.raises(SourceError, match="has no token that ends a text"):
        prepare(NodeJob(spec(corpus, tokenizer=str(tmp_path / "endless.json")), tmp_path / "c"))


def test_a_big_vocabulary_takes_four_bytes_a_token(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    prepare(NodeJob(spec(corpus), tmp_path / "out"))
    told = json.loads((tmp_path / "out" / "tokenizer.json").read_text())
    told["model"]["vocab"] |= {f"unused{i}": i for i in range(len(told["model"]["vocab"]), 70_000)}
    (tmp_path / "big.json").write_text(json.dumps(told))
    asked = spec(corpus, tokenizer=str(tmp_path / "big.json")) | {"model": {"vocab_size": 70_016}}
    prepare(NodeJob(asked, tmp_path / "big"))
    assert read_facts(tmp_path / "big")["dtype"] == "uint32"
    big, small = (tmp_path / name / "train" / "00000.bin" for name in ("big", "out"))
    assert big.stat().st_size == 2 * small.stat().st_size
    same = TokenBatches(tmp_path / "big", 4, 1).batch(3).tokens == TokenBatches(tmp_path / "out", 4, 1).batch(3).tokens
    assert same.all()


def test_too_little_data_is_told_with_what_was_dropped(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name in "ab":
        (tmp_path / "corpus" / f"{name}.py").write_text("the very same words in both files, but enough of them to pass")
    with pytest.raises(SourceError, match=r"of 2 documents 1 passed \(exact_duplicate: 1\)"):
        prepare(NodeJob(spec(tmp_path / "corpus"), tmp_path / "out"))


def test_two_documents_are_enough_for_both_sides(tmp_path: Path) -> None:
    prepare(NodeJob(spec(write_corpus(tmp_path / "corpus", 2)), tmp_path / "out"))
    facts = read_facts(tmp_path / "out")
    assert (facts["train"]["documents"], facts["held_out"]["documents"]) == (1, 1)


def test_a_document_that_changes_underway_is_told(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 1500)
    job = write_job(tmp_path / "job.json", spec(corpus), tmp_path / "out")
    program = start(job)
    assert program.stdout is not None
    next(line for line in program.stdout if '"selected"' in line)
    for path in corpus.iterdir():
        path.write_text(path.read_text() + "changed")
    out, _ = program.communicate(timeout=60)
    assert program.returncode == 2
    assert "changed while it was being prepared" in out


def test_a_full_disk_is_told_in_one_sentence(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.json", spec(write_corpus(tmp_path / "corpus", 10)), tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".held_out.jsonl.partial").symlink_to("/dev/full")
    refused = start(job)
    out, _ = refused.communicate(timeout=60)
    assert refused.returncode == 2
    assert "No space left on device; make room" in out.splitlines()[-1]
    assert not (tmp_path / "out" / "result.json").exists()
    (tmp_path / "out" / ".held_out.jsonl.partial").unlink()
    again = start(job)
    again.communicate(timeout=60)
    assert again.returncode == 0


def test_a_tokenizer_that_the_faster_library_reads_otherwise_is_left_to_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Otherwise:
        def __init__(self, path: str) -> None:
            del path

        def encode_batch_flat(self, texts: list[str], split_special_tokens: bool) -> tuple[bytes, bytes]:
            assert split_special_tokens
            return b"", bytes(8 * (len(texts) + 1))

    corpus = write_corpus(tmp_path / "corpus", 30)
    prepare(NodeJob(spec(corpus), tmp_path / "first"))
    monkeypatch.setattr(tokens, "_fast", Otherwise)
    prepare(NodeJob(spec(corpus), tmp_path / "second"))
    facts = [read_facts(tmp_path / name) for name in ("first", "second")]
    assert [one["encoded_by"]["library"].split()[0] for one in facts] == ["fastokens", "tokenizers"]
    assert facts[0]["train"] == facts[1]["train"]


def test_a_tokenizer_that_begins_texts_itself_has_them_begun(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 30)
    prepare(NodeJob(spec(corpus), tmp_path / "first"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "first" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>"])
    number = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", number)])
    (tmp_path / "given").mkdir()
    tokenizer.save(str(tmp_path / "given" / "tokenizer.json"))
    (tmp_path / "given" / "tokenizer_config.json").write_text("{}")
    asked = spec(corpus, tokenizer=str(tmp_path / "given")) | {"model": {"vocab_size": 1024}}
    prepare(NodeJob(asked, tmp_path / "second"))
    facts = read_facts(tmp_path / "second")
    assert facts["bos_id"] == number
    found = np.concatenate(list(ids_of(tmp_path / "second", facts, "train")))
    assert found[0] == number
    assert (found[1:][found[:-1] == facts["eos_id"]] == number).all()
    assert (found == number).sum() == facts["train"]["documents"]
    assert (tmp_path / "second" / "tokenizer_config.json").read_text() == "{}"
