"""A life whose training is another framework's: from text to its own checkpoints, and no further."""

import json

import pytest

from tests.camp import Camp
from tests.training.cases.test_case_run import LINE

pytestmark = [pytest.mark.torch]

PROGRAM = f"""
import pathlib, sys
told = dict(zip(sys.argv[1:], sys.argv[2:]))
tokens = pathlib.Path(told["--data-path"])
assert tokens.with_name("train.bin").stat().st_size > 0 and tokens.with_name("train.idx").exists()
kept = pathlib.Path(told["--save"]) / "iter_0000003"
kept.mkdir(parents=True)
(kept / "weights").write_text("learned")
for step in range(1, 4):
    print({LINE!r}.format(step=step, samples=step, ms=100.0, loss=9 / step), flush=True)
"""
"""Looks at what Megatron would read, writes where it would save, and logs as it does."""


def test_it_ends_with_the_training_and_says_so(user_camp: Camp) -> None:
    theirs = user_camp.folder / "Megatron-LM"
    theirs.mkdir()
    (theirs / "pretrain_gpt.py").write_text(PROGRAM)
    recipe = user_camp.folder / "recipe.yaml"
    told = {
        "name": "theirs",
        "store": str(user_camp.folder / "store"),
        "case": {"framework": "megatron-lm", "folder": str(theirs)},
        "model": {"family": "gpt2", "hidden_size": 32, "heads": 2, "kv_heads": 2, "ffn_size": 64, "vocab_size": 512},
        "data": {"max_documents": 30, "sequence_length": 64},
        "cluster": {"kind": "local", "nodes": 1, "processes_per_node": 1},
        "parallel": {"strategy": "ddp", "tp": 1, "pp": 1},
        "train": {"steps": 3, "warmup_steps": 1, "global_batch_size": 4, "checkpoint_every": 3},
    }
    recipe.write_text(json.dumps(told))
    code, said = user_camp.run("lifecycle", recipe)
    assert code == 0, said
    assert "theirs: loss 9.00 to 3.00 by megatron-lm; theirs is trained by megatron-lm, and score, export and" in said
    (kept,) = (user_camp.folder / "store").rglob("iter_0000003/weights")
    assert kept.read_text() == "learned"
    assert user_camp.processes() == []
