"""Scoring: exact log probabilities over whole documents, and baselines that are what they say."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.exports import LENGTH, columns, job_of, network, recipe, result, write_checkpoint
from tests.training.exports import write_dataset as new_dataset
from training.data.format import BEGINS, TARGET, PartWriter, ids_of, layout_of, part_facts, read_facts, write_facts
from training.job import NodeJob
from training.process import JobError
from training.score import HeldOut, choose, folder_nats, gzip_bits, score, total_nats, unigram_bits

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return new_dataset(tmp_path_factory.mktemp("score") / "data")


def held_out_texts(dataset: Path) -> list[str]:
    return [json.loads(line)["text"] for line in (dataset / "held_out.jsonl").read_text().splitlines()]


def expected_nats(model: Any, held_out: HeldOut) -> float:
    """What a plain forward pass of each window says, in double precision."""
    import torch

    stream, total = np.concatenate([[0], held_out.tokens]), 0.0
    paid = np.ones(len(held_out.tokens), bool) if held_out.learned is None else held_out.learned
    for start in range(0, len(held_out.tokens), LENGTH):
        window = torch.from_numpy(stream[start : start + LENGTH + 1])
        with torch.inference_mode():
            chances = model(window[None, :-1]).logits.double().log_softmax(-1)[0]
        each = -chances[torch.arange(len(window) - 1), window[1:]].numpy()
        total += float(each[paid[start : start + LENGTH]].sum())
    return total


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


@pytest.mark.parametrize("model", [{}, {"family": "gemma2"}, {"family": "gpt2", "kv_heads": 2}])
def test_the_model_pays_for_every_token_once_whatever_the_windows(
    dataset: Path, monkeypatch: Any, model: dict[str, Any]
) -> None:
    from training.score import likelihood

    made = network(recipe(model=model))
    held_out = choose(dataset, read_facts(dataset), 10**9)
    assert len(held_out.tokens) % LENGTH
    whole = total_nats(made, held_out, LENGTH, 0)
    assert whole == pytest.approx(expected_nats(made, held_out), rel=1e-5)
    monkeypatch.setattr(likelihood, "TOKENS_AT_ONCE", LENGTH)
    assert total_nats(made, held_out, LENGTH, 0) == pytest.approx(whole, rel=1e-5)
    assert total_nats(made, held_out, LENGTH, 0, "bf16") == pytest.approx(whole, rel=1e-2)


def test_only_what_is_learned_is_paid_for_and_documents_may_be_apart(dataset: Path) -> None:
    made = network(recipe())
    held_out = choose(dataset, read_facts(dataset), 500)
    learned = np.arange(len(held_out.tokens)) % 3 == 1
    some = replace(held_out, learned=learned)
    assert total_nats(made, some, LENGTH, 0) == pytest.approx(expected_nats(made, some), rel=1e-5)
    begins = np.zeros(len(held_out.tokens), bool)
    apart = total_nats(made, replace(held_out, begins=begins), LENGTH, 0)
    assert apart == pytest.approx(total_nats(made, held_out, LENGTH, 0), rel=1e-5)
    begins[:] = True  # every token alone: what it follows is all that is known
    alone = total_nats(made, replace(held_out, begins=begins), LENGTH, 0)
    single = total_nats(made, held_out, 1, 0)
    assert alone == pytest.approx(single, rel=1e-5)


def test_of_conversations_the_assistants_turns_are_scored(dataset: Path, tmp_path: Path) -> None:
    facts = read_facts(dataset) | {"kind": "chat", "marks": True, "documents_apart": True}
    chats = [[("user", "ab"), ("assistant", f"yes {i}")] for i in range(4)]
    for part in ("train", "held_out"):
        with PartWriter(tmp_path, part, layout_of(facts, part), 100) as writer:
            for i in range(4):
                marks = np.array([BEGINS, 0, 0, TARGET, TARGET, TARGET], np.uint8)
                writer.write(np.array([5, 6, 7, 8 + i, 0, 0]), marks)
            facts[part] = part_facts(writer.close(), 24, 4, 24)
    write_facts(tmp_path, facts)
    lines = [json.dumps({"name": "x", "messages": [{"role": r, "content": c} for r, c in chat]}) for chat in chats]
    (tmp_path / "held_out.jsonl").write_text("\n".join(lines))
    held_out = choose(tmp_path, facts, 13)
    assert held_out.documents == 2
    assert held_out.text == b"yes 0yes 1"
    assert held_out.learned is not None
    assert held_out.begins is not None
    assert held_out.learned.tolist() == [False, False, False, True, True, True] * 2
    assert np.flatnonzero(held_out.begins).tolist() == [0, 6]
    with pytest.raises(JobError, match=r"score\.baseline compares text, not conversations"):
        folder_nats(tmp_path, held_out, LENGTH)


def test_a_model_that_knows_nothing_pays_the_logarithm_of_the_vocabulary(dataset: Path) -> None:
    import torch

    made = network(recipe())
    with torch.no_grad():
        made.lm_head.weight.zero_()
    held_out = choose(dataset, read_facts(dataset), 500)
    assert total_nats(made, held_out, LENGTH, 0) == pytest.approx(len(held_out.tokens) * math.log(400), rel=1e-5)


def test_the_baselines_are_what_they_say(dataset: Path) -> None:
    facts = read_facts(dataset)
    held_out = choose(dataset, facts, 10**9)
    assert gzip_bits(held_out.text) == 8 * len(gzip.compress("".join(held_out_texts(dataset)).encode(), 9))
    seen = np.concatenate(list(ids_of(dataset, facts, "train"))).tolist()
    bits = 0.0
    for token in held_out.tokens.tolist():
        bits -= math.log2((seen.count(token) + 1) / (len(seen) + facts["vocab_size"]))
    assert unigram_bits(dataset, facts, held_out) == pytest.approx(bits)


def test_a_score_tells_the_baseline_folder_on_the_same_text(dataset: Path, tmp_path: Path) -> None:
    """An export of the model itself needs as many bits as the model."""
    from training.export.hf import export

    spec = recipe(train={"lora_rank": 2})
    write_checkpoint(tmp_path / "run", spec, network(spec), columns)
    job = job_of(spec, tmp_path / "export", dataset=dataset, model=tmp_path / "run")
    export(job)
    spec["score"]["baseline"] = str(tmp_path / "export" / "hf")
    score(NodeJob(spec, tmp_path / "score", job.inputs))
    told = result(tmp_path / "score")
    assert told["baseline"]["bits_per_byte"] == pytest.approx(told["bits_per_byte"], rel=1e-4)
    assert told["baselines"].keys() == {"gzip", "unigram", "baseline"}
    assert told["perplexity"] == pytest.approx(math.exp(told["loss"]))
    assert told["targets"] == told["tokens"] <= 2000
    assert told["bytes"] == sum(len(text.encode()) for text in held_out_texts(dataset)[: told["documents"]])
    spec["score"]["baseline"] = str(tmp_path / "nothing")
    with pytest.raises(JobError, match=r"score\.baseline: .*nothing is not a Hugging Face folder that loads"):
        score(NodeJob(spec, tmp_path / "again", job.inputs))


def test_without_a_checkpoint_or_with_too_small_a_vocabulary_or_no_harness_it_says_so(
    dataset: Path, tmp_path: Path
) -> None:
    inputs = {"dataset": dataset, "model": tmp_path}
    with pytest.raises(JobError, match="holds no complete checkpoint; run train first"):
        score(job_of(recipe(), tmp_path / "out", **inputs))
    with pytest.raises(JobError, match=r"but model\.vocab_size is 300"):
        score(job_of(recipe(model={"vocab_size": 300}), tmp_path / "out", **inputs))
    with pytest.raises(JobError, match=r"score\.tasks asks for hellaswag and lm_eval is not installed on the nodes"):
        score(job_of(recipe(score={"tasks": ["hellaswag"]}), tmp_path / "out", **inputs))
    assert not (tmp_path / "out").exists()
