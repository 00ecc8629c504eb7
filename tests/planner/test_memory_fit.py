"""Calibrated memory: it finds what programs really take, forgives single rows, and knows when to refuse."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from planner.memory import MemoryConstants, peak
from planner.memory_fit import MemoryFit, ancestors, fit, leanest
from planner.rows import Row, Steps, steps

KEY = "A100-80|Megatron-DeepSpeed|fp16"
LLAMA = {"hidden": 4096, "ffn": 14336, "gated_mlp": 1, "layers": 32, "heads": 32, "kv_heads": 8, "head_dim": 128}
PLAIN = {"quality": "A", "gpus_per_node": 8, "inter_node_gbps": 800, "vocab": 128256, "tied_emb": 0, "flash_attn": 1}
NONE = (
    "n_experts",
    "topk",
    "moe_ffn",
    "shared_experts",
    "dense_layers",
    "mla",
    "seq_parallel",
    "tp_overlap",
    "compile",
)
ONE = ("tp", "pp", "vpp", "cp", "ep", "mbs", "ga")


def row(**changes: Any) -> Row:
    """A step of Llama 3 8B on eight accelerators, whose time is known and whose memory is not."""
    cells = dict.fromkeys(NONE, 0) | dict.fromkeys(ONE, 1) | PLAIN | LLAMA
    cells |= {"id": "a", "hw": "A100-80", "framework": "Megatron-DeepSpeed", "precision": "fp16", "seq": 4096}
    cells |= {"n_gpus": 8, "dp": 8, "zero": 1, "shard_size": 8, "gbs": 8, "recompute": "full", "offload": "none"}
    cells |= {"iter_s": 1.0, "mem_gib": "", "mem_kind": "", "usable": "", "group": ""}
    return {name: str(value) for name, value in (cells | changes).items()}


def rows(**changes: Any) -> list[dict[str, Any]]:
    """Twelve layouts that differ in what each factor scales."""
    shapes = [(layers, micro, tp) for layers in (16, 32, 48) for micro in (1, 4) for tp in (1, 2)]
    return [
        dict(row(layers=layers, mbs=micro, tp=tp, dp=8 // tp, shard_size=8 // tp, gbs=micro * 8 // tp, **changes))
        for layers, micro, tp in shapes
    ]


def key_of(one: Row) -> str:
    return f"{one['hw']}|{one['framework']}|{one['precision']}"


def measured(table: Sequence[Row], **factors: float) -> Steps:
    """The rows with what a program that takes these factors would have shown."""
    arrays = {name: np.asarray(value) for name, value in factors.items()}
    gib = peak(steps(table).configs, MemoryConstants(**arrays))
    return steps([{**one, "mem_gib": str(size)} for one, size in zip(table, gib, strict=True)])


def learn(table: Steps) -> MemoryFit:
    return fit(table, [key_of(one) for one in table.rows])


def predicted(known: MemoryFit, table: Steps) -> Any:
    return known.predict(table.configs, [key_of(table.rows[own]) for own in table.own])


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (2.0, 1.1, 1.2), (0.7, 1.2, 0.8)])
def test_it_finds_what_a_program_takes(factors: tuple[float, float, float]) -> None:
    names = ("runtime", "states", "activations")
    table = measured(rows(), **dict(zip(names, factors, strict=True)))
    assert predicted(learn(table), table) == pytest.approx(table.memory_gib, rel=0.03)


def test_a_profile_without_rows_has_its_family_s_factors_and_else_everybody_s() -> None:
    known = learn(measured(rows(), runtime=2.0, states=1.2, activations=1.3))
    assert known.level("A100-40|Megatron-DeepSpeed|bf16") == known.levels["Ampere|megatron"]
    assert known.level("H100-80|torchtitan|bf16") == known.levels["all"]
    assert known.level("cpu|castra-fsdp2|fp32").factors == (1.0, 1.0, 1.0)
    assert ancestors(KEY) == ("all", "Ampere|megatron", KEY)


def test_processors_learn_nothing_from_accelerators() -> None:
    table = measured(rows(), runtime=3.0, states=1.5)
    keys = [key_of(one) for one in table.rows]
    alone = fit(table, keys)
    own = fit(table, [key.replace("A100-80", "cpu") for key in keys])
    assert "cpu" not in alone.levels
    assert "all" not in own.levels
    assert own.at("cpu|another|fp32").runtime > 1


def test_one_wrong_row_moves_little() -> None:
    table = measured(rows(), runtime=2.0)
    right = predicted(learn(table), table)
    broken = [dict(one) for one in table.rows]
    broken[3]["mem_gib"] = str(3 * table.memory_gib[3])
    assert predicted(learn(steps(broken)), table) == pytest.approx(right, rel=0.1)


def test_a_profile_with_one_row_stays_near_its_family() -> None:
    table = measured([*rows(), row(precision="bf16")])
    cells = [dict(one) for one in table.rows]
    cells[-1]["mem_gib"] = str(1.6 * table.memory_gib[-1])
    share = predicted(learn(steps(cells)), table)[-1] / table.memory_gib[-1]
    assert 1.0 < share < 1.4


@pytest.mark.parametrize(
    "change",
    [
        lambda at: {"id": f"x{at}", "source": "elsewhere", "notes": "other", "group": f"g{at}"},
        lambda at: {"id": str(-at), "tok_s_gpu": "", "model": "unknown"},
    ],
)
def test_names_and_order_change_nothing(change: Callable[[int], dict[str, str]]) -> None:
    table = measured(rows(), runtime=1.5, activations=1.2)
    other = steps([{**one, **change(at)} for at, one in enumerate(table.rows)][::-1])
    assert learn(other).to_json() == learn(table).to_json()


def test_it_survives_json() -> None:
    table = measured(rows(), runtime=1.5)
    known = learn(table)
    again = MemoryFit.from_json(json.loads(json.dumps(known.to_json())))
    assert np.array_equal(predicted(again, table), predicted(known, table))
    assert again.margin == known.margin


def test_a_report_of_the_allocator_alone_is_predicted_as_such_and_judged_with_the_rest() -> None:
    table = measured(rows(mem_kind="max_memory_reserved"))
    known, key = learn(table), [KEY] * len(table.rows)
    assert predicted(known, table) == pytest.approx(table.memory_gib, rel=0.03)
    assert known.level(KEY).outside > 0
    assert peak(table.configs, known.constants(key)) == pytest.approx(
        predicted(known, table) + known.level(KEY).outside
    )


def test_runs_without_a_figure_teach_that_they_fitted() -> None:
    """The formulas say a tenth more than there is; ten such runs ended well all the same."""
    table = steps([row(recompute="none", seq=8000, id=str(at)) for at in range(10)])
    assert 84 < float(peak(table.configs)[0]) < 92
    assert learn(table).fits(table.configs, [KEY] * 10).all()


def test_a_run_that_ended_for_want_of_memory_is_refused_afterwards() -> None:
    cells = row(recompute="none", seq=4400, iter_s="", usable="oom")
    table = steps([{**cells, "id": str(at)} for at in range(10)])
    assert 68 < float(peak(table.configs)[0]) < 78
    assert not learn(table).fits(table.configs, [KEY] * 10).any()


def test_an_unstated_micro_batch_is_the_one_that_needs_least() -> None:
    table = steps([row(), row(mbs="", gbs=32), row()])
    chosen = leanest(table, peak(table.configs))
    assert table.own[chosen].tolist() == [0, 1, 2]
    assert table.configs.layout.mbs[chosen].tolist() == [1, 1, 1]


def test_nothing_measured_leaves_the_formulas() -> None:
    table = steps([row(iter_s="")])
    known = learn(table)
    assert known.level(KEY).factors == (1.0, 1.0, 1.0)
    assert known.margin > 1
    assert predicted(known, table) == pytest.approx(peak(table.configs))
