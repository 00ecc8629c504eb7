"""What picotron is told, held against its own template and against what its train.py reads."""

import json
from typing import Any

import pytest

from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import command, lines, of, spec
from tests.training.cases.upstream_parsers import Refused
from tests.training.cases.upstream_schemas import hold, read
from training.cases import picotron
from training.cases.base import CaseError, Command, Paths

UPSTREAM = read(f"picotron-{picotron.UPSTREAM.version[:7]}")
NAME = "picotron-smollm-1b7"


def checked(told: Command) -> dict[str, Any]:
    """The configuration, if picotron would take it: nothing it does not know, all that it reads."""
    found: dict[str, Any] = json.loads(told.files["picotron.json"])
    hold(found, UPSTREAM["classes"], "Config")
    given = {f"{section}.{name}" for section, values in found.items() for name in values}
    assert set(UPSTREAM["needed"]) <= given
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("picotron"))
def test_every_kind_tells_it_what_its_template_has(name: str, kind: str) -> None:
    told = command(name, kind=kind)
    assert told.argv == ("/opt/theirs/train.py", "--config", "/fsx/out/picotron.json")
    assert told.per == "rank"
    checked(told)
    record(name, kind, "rendered", f"arguments parsed against picotron {picotron.UPSTREAM.version[:7]}")


def test_the_recipe_is_the_published_one() -> None:
    """create_config.py --dp 2 --tp 2 --pp 2 --num_hidden_layers 5 --grad_acc_steps 2 --mbs 4 --seq_len 128."""
    told = checked(command(NAME))
    assert told["distributed"] == {"tp_size": 2, "cp_size": 1, "pp_size": 2, "dp_size": 2, "pp_engine": "1f1b",
                                   "backend": "nccl", "use_cpu": False}  # fmt: skip
    assert told["model"]["name"] == "HuggingFaceTB/SmolLM-1.7B"
    assert told["model"]["num_hidden_layers"] == 5
    training = told["training"]
    assert (training["micro_batch_size"], training["gradient_accumulation_steps"]) == (4, 2)
    assert (training["seq_length"], training["total_train_steps"]) == (128, 5000)
    assert told["dataset"]["name"] == "roneneldan/TinyStories"


def test_no_secret_is_written() -> None:
    assert checked(command(NAME))["environment"]["HF_TOKEN"] is None


@pytest.mark.parametrize(
    "argument", ["training.step=5", "nowhere.x=1", 'training.seq_length="128"', "distributed.use_cpu=0"]
)
def test_what_it_would_not_take_is_seen(argument: str) -> None:
    with pytest.raises(Refused):
        checked(command(NAME, f"case.arguments=['model.name=x/y', {argument!r}]"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"experts": 8, "topk": 2}}, "no mixture of experts"),
        ({"model": {"family": "gpt2"}}, "Llama's architecture"),
        ({"parallel": {"vpp": 2}}, "interleaved"),
        ({"parallel": {"strategy": "zero1"}}, "whole states"),
        ({"train": {"activation_checkpointing": True}}, "keeps all activations"),
        ({"train": {"schedule": "cosine"}}, "train.schedule: constant"),
        ({"train": {"grad_clip": 1.0}}, "does not clip"),
        ({"train": {"precision": "fp32"}}, "bf16"),
        ({"train": {"weight_decay": 0.1}}, "train.weight_decay: 0.01"),
        ({"case": {"arguments": []}}, "model.name"),
        ({"data": {"source": "python-stdlib"}}, "reads text itself"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(change: dict[str, dict[str, Any]], sentence: str) -> None:
    wrong = spec(NAME)
    for section, values in change.items():
        wrong[section] |= values
    with pytest.raises(CaseError, match=sentence) as told:
        picotron.command(wrong, 1, 8, Paths("/out", "/picotron"))
    assert "\n" not in str(told.value)


def test_figures_of_a_recorded_log() -> None:
    found = [figures for line in lines("picotron") if (figures := picotron.measure(line))]
    assert [(row["step"], row["loss"], row["tokens_per_second"], row["mfu"]) for row in found] == [
        (1, 10.9062, 199.02, 0.01), (2, 8.5469, 1680, 0.07), (3, 8.9219, 10610, 0.43),
    ]  # fmt: skip
    assert found[0]["memory_gib"] == pytest.approx(1.63, abs=0.01)
