"""Scoring: exact log probabilities over whole documents, and baselines that are what they say."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from training.data.loader import read_facts
from training.data.prepare import prepare
from training.job import NodeJob
from training.process import JobError
from training.score import choose, gzip_bits, score, total_nats, unigram_bits

pytestmark = pytest.mark.torch

MODEL = {
    "family": "llama",
    "hidden_size": 32,
    "layers": 2,
    "heads": 2,
    "kv_heads": 1,
    "ffn_size": 64,
    "vocab_size": 384,
    "tie_embeddings": True,
    "rope_theta": 10000.0,
}
LENGTH = 24


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    (folder / "corpus").mkdir()
    for i in range(30):
        lines = "".join(f"value_{j} = compute({i * j}, name={i % 7})\n" for j in range(i % 5 + 3))
        (folder / "corpus" / f"{i}.py").write_text(f"# file {i}\n{lines}")
    data = {
        "source": str(folder / "corpus"),
        "include": ["*.py"],
        "min_chars": 10,
        "max_chars": 10_000,
        "max_documents": None,
        "near_duplicate": 1.0,
        "held_out": 0.4,
        "sequence_length": LENGTH,
        "tokenizer": "train",
    }
    prepare(NodeJob({"data": data, "model": MODEL}, folder / "data"))
    return folder / "data"


def held_out_texts(dataset: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (dataset / "held_out.jsonl").read_text().splitlines()]


def test_whole_documents_are_chosen_while_they_fit(dataset: Path) -> None:
    facts, texts = read_facts(dataset), held_out_texts(dataset)
    everything = choose(dataset, facts, 10**9)
    assert everything.documents == len(texts) == facts["held_out"]["documents"] > 5
    assert everything.text == "".join(texts).encode()
    assert len(everything.tokens) == facts["held_out"]["tokens"]
    ends = np.flatnonzero(everything.tokens == facts["eos_id"])
    some = choose(dataset, facts, int(ends[2]))
    assert (some.documents, some.text) == (2, "".join(texts[:2]).encode())
    assert choose(dataset, facts, int(ends[2]) + 1).documents == 3
    assert choose(dataset, facts, 1).documents == 1


def test_the_model_pays_for_every_token_once_whatever_the_windows(dataset: Path, monkeypatch: Any) -> None:
    import torch

    from training import model as network
    from training import score as module
    from training.model import build

    facts = read_facts(dataset)
    torch.manual_seed(0)
    model = build(MODEL, LENGTH).eval()
    tokens = choose(dataset, facts, 10**9).tokens
    assert len(tokens) % LENGTH
    whole = total_nats(model, tokens, facts, "fp32")
    stream = np.concatenate([[facts["eos_id"]], tokens])
    expected = 0.0
    for start in range(0, len(tokens), LENGTH):
        window = torch.from_numpy(stream[start : start + LENGTH + 1])
        with torch.inference_mode():
            chances = model(window[None, :-1]).logits.double().log_softmax(-1)[0]
        expected -= float(chances[torch.arange(len(window) - 1), window[1:]].sum())
    assert whole == pytest.approx(expected, rel=1e-5)
    monkeypatch.setattr(module, "TOKENS_AT_ONCE", LENGTH)
    monkeypatch.setitem(network.LOGITS_AT_ONCE, "cpu", 64 * 384)
    assert total_nats(model, tokens, facts, "fp32") == pytest.approx(whole, rel=1e-5)
    assert total_nats(model, tokens, facts, "bf16") == pytest.approx(whole, rel=1e-2)


def test_a_model_that_knows_nothing_pays_the_logarithm_of_the_vocabulary(dataset: Path) -> None:
    import torch

    from training.model import build

    facts = read_facts(dataset)
    model = build(MODEL, LENGTH).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    tokens = choose(dataset, facts, 500).tokens
    assert total_nats(model, tokens, facts, "fp32") == pytest.approx(len(tokens) * math.log(384), rel=1e-5)


def test_the_baselines_are_what_they_say(dataset: Path) -> None:
    facts = read_facts(dataset)
    held_out = choose(dataset, facts, 10**9)
    assert gzip.decompress(gzip.compress(held_out.text, 9)) == held_out.text
    assert gzip_bits(held_out.text) == 8 * len(gzip.compress("".join(held_out_texts(dataset)).encode(), 9))
    seen = np.fromfile(dataset / "train.bin", facts["dtype"]).tolist()
    bits = 0.0
    for token in np.fromfile(dataset / "held_out.bin", facts["dtype"]).tolist():
        bits -= math.log2((seen.count(token) + 1) / (len(seen) + facts["vocab_size"]))
    assert unigram_bits(dataset, facts, held_out) == pytest.approx(bits)


def test_without_a_checkpoint_or_with_too_small_a_vocabulary_it_says_so(dataset: Path, tmp_path: Path) -> None:
    spec = {"model": MODEL, "score": {"max_tokens": 100}, "train": {"precision": "fp32"}}
    inputs = {"dataset": dataset, "model": tmp_path}
    with pytest.raises(JobError, match="holds no complete checkpoint; run train first"):
        score(NodeJob(spec, tmp_path / "out", inputs))
    with pytest.raises(JobError, match=r"but model\.vocab_size is 300"):
        score(NodeJob(spec | {"model": MODEL | {"vocab_size": 300}}, tmp_path / "out", inputs))
    assert not (tmp_path / "out").exists()
