"""What neuronx-distributed's examples are told, parsed by their own options at the pinned tag."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import command, lines, of, spec
from tests.training.cases.upstream_parsers import Refused, parse
from training.cases import neuronx
from training.cases.base import CaseError, Command, Paths

VERSION = neuronx.UPSTREAM.version
SMALL, LARGE = "neuronx-llama3-8b", "neuronx-llama3-70b"


def checked(told: Command) -> dict[str, Any]:
    """What the example makes of its words; those before its name are torchrun's."""
    at = next(number for number, word in enumerate(told.argv) if word.startswith("/opt/theirs/"))
    program = "stages" if told.argv[at].endswith("run_llama_nxd.py") else "zero1"
    return parse(f"neuronx_{program}-{VERSION}", told.argv[at + 1 :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("neuronx"))
def test_every_kind_tells_it_what_its_parser_takes(name: str, kind: str) -> None:
    told = command(name, kind=kind)
    assert told.per == "node"
    assert checked(told)["tensor_parallel_size"] == 32
    record(name, kind, "rendered", f"arguments parsed against neuronx-distributed {VERSION}")


def test_8b_is_the_published_one() -> None:
    """tp_zero1_llama3_8B_hf_pretrain.sh on 4 nodes."""
    told = command(SMALL)
    assert told.argv[1:5] == ("--nproc_per_node", "32", "--nnodes", "4")
    words = checked(told)
    wanted = {
        "tensor_parallel_size": 32, "batch_size": 1, "grad_accum_usteps": 256, "max_steps": 10000, "warmup_steps": 100,
        "lr": 1.5e-4, "seq_len": 8192, "kv_replicator": 4, "use_flash_attention": 1, "use_zero_1": True,
        "use_mix_precision": True, "sequence_parallel_enabled": True, "selective_checkpoint_enabled": True,
        "qkv_linear": True, "weight_decay": 0.01, "beta2": 0.999, "seed": 12349,
    }  # fmt: skip
    assert {name: words[name] for name in wanted} == wanted
    assert told.env["NEURON_RT_NUM_CORES"] == told.env["TPU_NUM_DEVICES"] == "32"


def test_70b_is_the_published_one() -> None:
    """run_llama3_70B_tp_pp.sh on 16 nodes, as the published process list shows it."""
    words = checked(command(LARGE))
    wanted = {
        "train_batch_size": 512, "num_microbatches": 512, "max_steps": 30000, "seq_len": 8192,
        "pipeline_parallel_size": 8, "tensor_parallel_size": 32, "lr": 1.5e-5, "min_lr": 1e-6, "beta1": 0.9,
        "beta2": 0.95, "weight_decay": 0.1, "warmup_steps": 2000, "constant_steps": 0, "use_zero1_optimizer": 1,
        "use_selective_checkpoint": 1, "use_flash_attention": 1, "qkv_linear": 1, "kv_replicator": 4,
        "save_load_xser": 1, "use_meta_device_init": 1,
    }  # fmt: skip
    assert {name: words[name] for name in wanted} == wanted


def test_the_model_is_told_as_its_config_json() -> None:
    """tp_zero1_llama_hf_pretrain/8B_config_llama3/config.json."""
    told = json.loads(command(SMALL).files["model/config.json"])
    shape = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    assert tuple(told[name] for name in shape) == (4096, 14336, 32, 32, 8)
    assert (told["vocab_size"], told["rope_theta"], told["tie_word_embeddings"]) == (128256, 500000, False)


def test_its_torchrun_meets_the_others(tmp_path: Path) -> None:
    """Our one process of a node becomes the torchrun that starts the node's ranks."""
    told = command(SMALL, paths=Paths(str(tmp_path), "/opt/theirs"))
    (tmp_path / "start.py").write_text(told.files["start.py"])
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\necho "$@" "${TORCHELASTIC_RUN_ID-none}"\n')
    torchrun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "GROUP_RANK": "2", "MASTER_ADDR": "10.0.0.7",
           "TORCHELASTIC_RUN_ID": "ours"}  # fmt: skip
    ran = subprocess.run([sys.executable, *told.argv], env=env, capture_output=True, text=True, timeout=30, check=True)
    words = ran.stdout.split()
    assert words[:6] == ["--node_rank", "2", "--master_addr", "10.0.0.7", "--master_port", "44000"]
    assert tuple(words[6:-1]) == told.argv[1:]
    assert words[-1] == "none"


def test_arguments_are_laid_over_the_plan() -> None:
    words = checked(
        command(SMALL, "case.arguments=['logging_interval=10', 'print_grad_norm=true', 'use_zero_1=false']")
    )
    assert (words["logging_interval"], words["print_grad_norm"], words["use_zero_1"]) == (10, True, False)


@pytest.mark.parametrize("argument", ["tensor_parallel=8", "seq_len=long", "use_zero_1=1"])
def test_what_it_would_not_take_is_seen(argument: str) -> None:
    with pytest.raises(Refused):
        checked(command(SMALL, f"case.arguments=[{argument!r}]"))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model": {"experts": 8, "topk": 2}}, "no mixture of experts"),
        ({"model": {"family": "qwen2"}}, "Llama's architecture"),
        ({"model": {"kv_heads": 12}}, "key/value heads"),
        ({"parallel": {"strategy": "fsdp2"}}, "the optimizer only"),
        ({"parallel": {"vpp": 2}}, "parallel.vpp: 1"),
        ({"parallel": {"recompute": "none"}}, "at least the attention"),
        ({"parallel": {"tp": 24}}, "do not divide"),
        ({"train": {"precision": "fp32"}}, "bf16"),
        ({"train": {"grad_clip": 0.5}}, "norm of 1"),
        ({"train": {"schedule": "cosine"}}, "linear"),
        ({"data": {"source": "s3://data/tokens"}}, "get_dataset.py"),
    ],
)
def test_what_it_cannot_do_is_one_sentence(change: dict[str, dict[str, Any]], sentence: str) -> None:
    wrong = spec(SMALL)
    for section, values in change.items():
        wrong[section] |= values
    with pytest.raises(CaseError, match=sentence) as told:
        neuronx.command(wrong, 4, 16, Paths("/out", "/neuronx-distributed"))
    assert "\n" not in str(told.value)


def test_figures_of_a_recorded_log() -> None:
    found = [figures for line in lines("neuronx") if (figures := neuronx.measure(line))]
    assert len(found) == 9
    assert found[0] == {"step": 1, "seconds": 244.7649691104889, "sequences_per_second": 3.935193537274158,
                        "loss": 13.412860887125134, "grad_norm": 1.9788274765014648}  # fmt: skip


def test_figures_of_the_other_examples_logger() -> None:
    """Its format, for which no published log was found: logger.py of tp_zero1_llama_hf_pretrain."""
    line = (
        "LOG Fri Nov 20 19:00:00 2026 - (0, 14) step_loss : 11.2500 learning_rate : 2.80e-06 throughput : 6.50 seq/s "
    )
    assert neuronx.measure(line) == {"step": 14, "loss": 11.25, "sequences_per_second": 6.5}
