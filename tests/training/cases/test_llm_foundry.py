"""What llm-foundry is told, held against its own configuration, and its ranks' environment against Composer's."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import PATHS, command, lines, of, spec
from tests.training.cases.upstream_parsers import Refused, parse
from tests.training.cases.upstream_schemas import hold, read
from training.cases import llm_foundry
from training.cases.base import CaseError, Command, Paths

VERSION = llm_foundry.UPSTREAM.version
UPSTREAM = read(f"llm_foundry-{VERSION}")
CONVERTERS = {f"{PATHS.folder}/scripts/data_prep/convert_dataset_{name}.py": name for name in ("hf", "json")}


def checked(told: Command) -> dict[str, Any]:
    """The configuration, if llm-foundry would take it."""
    found: dict[str, Any] = yaml.safe_load(told.files["llm-foundry.yaml"])
    assert found == json.loads(told.files["llm-foundry.yaml"])
    classes = UPSTREAM["classes"]
    hold(found, classes, "TrainConfig")
    hold(found["scheduler"], classes, found["scheduler"]["name"], "scheduler.")
    assert found["model"]["name"] in UPSTREAM["models"]
    assert found["optimizer"]["name"] in UPSTREAM["optimizers"]
    assert found["scheduler"]["name"] in UPSTREAM["schedulers"]
    assert found["train_loader"]["name"] in UPSTREAM["loaders"]
    assert found["precision"] in UPSTREAM["precisions"]
    return found


def converted(told: Command) -> dict[str, Any]:
    """What its converter makes of the words."""
    return parse(f"llm_foundry_convert_{CONVERTERS[told.argv[0]]}-{VERSION}", told.argv[1:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("llm-foundry"))
def test_every_kind_tells_it_what_its_configuration_has(name: str, kind: str) -> None:
    told = command(name, kind=kind)
    if name == "mpt-c4":
        assert told.per == "node"
        assert converted(told)["concat_tokens"] == 2048
    else:
        assert told.argv[1:] == ("/opt/theirs/scripts/train/train.py", "/fsx/out/llm-foundry.yaml")
        checked(told)
    record(name, kind, "rendered", f"arguments parsed against llm-foundry {VERSION}")


@pytest.mark.parametrize(
    ("name", "shape", "batch", "rate"),
    [("mpt-7b", (4096, 32, 32), 1024, 1.2e-4), ("mpt-30b", (7168, 56, 48), 2048, 1e-4)],
)
def test_the_recipes_are_the_published_ones(name: str, shape: tuple[int, int, int], batch: int, rate: float) -> None:
    """scripts/train/yamls/pretrain/mpt-*.yaml, but for their length and what is written besides."""
    told = checked(command(name))
    model = told["model"]
    assert (model["d_model"], model["n_heads"], model["n_layers"]) == shape
    assert (model["expansion_ratio"], model["vocab_size"], model["max_seq_len"]) == (4, 50368, 2048)
    assert told["optimizer"] == {
        "name": "decoupled_adamw",
        "lr": rate,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0,
    }
    assert told["scheduler"] == {"name": "cosine_with_warmup", "t_warmup": "100ba", "alpha_f": 0.1}
    assert (told["global_train_batch_size"], told["device_train_microbatch_size"]) == (batch, 8)
    assert told["precision"] == "amp_bf16"
    assert told["fsdp_config"] == {
        "sharding_strategy": "FULL_SHARD", "mixed_precision": "PURE", "activation_checkpointing": True,
        "activation_checkpointing_reentrant": False, "activation_cpu_offload": False, "limit_all_gathers": True,
    }  # fmt: skip


def test_composers_decay_is_of_the_weights_alone() -> None:
    told = checked(command("mpt-7b", "train.weight_decay=0.1"))
    assert told["optimizer"]["weight_decay"] == pytest.approx(0.1 * 1.2e-4)


def test_sharding_among_some_ranks_is_hybrid_and_none_is_ddp() -> None:
    wide = command("mpt-7b", "parallel.strategy=fsdp2", "parallel.shard=8")
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "data_parallel_shard_degree": 8, "data_parallel_replicate_degree": 2}
    assert hybrid.items() <= checked(wide)["fsdp_config"].items()
    whole = spec("mpt-7b")
    whole["parallel"] |= {"strategy": "ddp"}
    assert checked(llm_foundry.command(whole, 2, 8, PATHS))["fsdp_config"] is None


@pytest.mark.parametrize(("schedule", "name"), llm_foundry.SCHEDULES.items())
def test_schedules(schedule: str, name: str) -> None:
    assert checked(command("mpt-7b", f"train.schedule={schedule}"))["scheduler"]["name"] == name


def test_shards_on_s3_are_fetched() -> None:
    told = checked(command("mpt-7b", "data.source=s3://my-data/c4-mds"))["train_loader"]["dataset"]
    assert (told["remote"], told["local"]) == ("s3://my-data/c4-mds", "/fsx/out/mds")


def test_json_lines_are_converted_too() -> None:
    told = converted(command("mpt-c4", "data.source=/fsx/corpus.jsonl"))
    assert (told["path"], told["tokenizer"]) == ("/fsx/corpus.jsonl", "EleutherAI/gpt-neox-20b")


@pytest.mark.parametrize(
    "argument",
    ["max_durations=5ba", "model.d_modle=5", 'max_seq_len="2048"', "fsdp_config.sharding=full", "callbacks.speed=1",
     "train_loader.dataset.x=1", "scheduler.t_warmup=100", "optimizer.betas=0.9"],
)  # fmt: skip
def test_what_it_would_not_take_is_seen(argument: str) -> None:
    with pytest.raises(Refused):
        checked(command("mpt-7b", f"case.arguments=[{argument!r}]"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"parallel": {"tp": 2}}, "no tensor parallel"),
        ({"parallel": {"pp": 2}}, "no pipeline stages"),
        ({"parallel": {"strategy": "zero1"}}, "everything or nothing"),
        ({"model": {"family": "llama"}}, "MPT"),
        ({"model": {"ffn_size": 5000}}, "whole multiple"),
        ({"train": {"schedule": "wsd"}}, "no schedule wsd"),
        ({"train": {"activation_checkpointing": "selective"}}, "whole blocks"),
        ({"data": {"source": "hf://allenai/c4"}}, "case.program: convert"),
        ({"data": {"tokenizer": "train"}}, "data.tokenizer"),
        ({"case": {"program": "finetune"}}, "case.program"),
        ({"case": {"program": "convert"}}, "one node"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(change: dict[str, dict[str, Any]], sentence: str) -> None:
    wrong = spec("mpt-7b")
    for section, values in change.items():
        wrong[section] |= values
    with pytest.raises(CaseError, match=sentence) as told:
        llm_foundry.command(wrong, 2, 8, Paths("/out", "/llm-foundry"))
    assert "\n" not in str(told.value)


def test_a_rank_of_torchrun_has_composers_variables(tmp_path: Path) -> None:
    """Composer reads NODE_RANK, which its own launcher sets and torchrun does not."""
    told = command("mpt-7b", paths=Paths(str(tmp_path), str(tmp_path)))
    (tmp_path / "start.py").write_text(told.files["start.py"])
    program = tmp_path / "scripts" / "train" / "train.py"
    program.parent.mkdir(parents=True)
    program.with_name("beside.py").write_text("")
    program.write_text("import os, sys, beside\nprint(__name__, os.environ['NODE_RANK'], *sys.argv)\n")
    env = {**os.environ, "GROUP_RANK": "3"}
    ran = subprocess.run([sys.executable, *told.argv], env=env, capture_output=True, text=True, timeout=30, check=True)
    assert ran.stdout.split() == ["__main__", "3", *told.argv[1:]]


def test_figures_of_recorded_logs() -> None:
    found = [figures for line in lines("llm_foundry") if (figures := llm_foundry.measure(line))]
    assert found == [
        {"step": 1, "loss": 12.0},
        {"step": 1, "loss": 10.9736},
        {"step": 2, "loss": 10.9724},
        {"step": 3, "loss": 10.9745},
        {"step": 4, "loss": 10.6459},
    ]
    assert llm_foundry.measure("\t Train throughput/tokens_per_sec: 51234.5") == {
        "step": 4,
        "tokens_per_second": 51234.5,
    }
