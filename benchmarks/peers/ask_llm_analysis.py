"""Ask llm-analysis for the step times of rows; runs in an environment of its own (see benchmarks/planner_peer.py).

Rows (JSON, as in a table of measured steps) come on stdin; {"seconds": [number or null], "refused": [reason or null],
"per_second": configurations} goes to stdout.
"""

import json
import logging
import os
import sys
import time
from typing import Any

EFFICIENCY = 0.5
"""Of the peak: what the package's own documentation says Megatron-LM reaches. Its other settings stay as they are."""
GPUS = {"A100-40": "a100-sxm-40gb", "A100-80": "a100-sxm-80gb", "H100-80": "h100-sxm-80gb"}
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}


def seconds(row: dict[str, str]) -> float:
    """Seconds per step; raises what the package raises, and ValueError for what it has no words for."""
    from llm_analysis import analysis, config  # type: ignore[import-not-found]  # in an environment of its own

    if row["hw"] not in GPUS or row["recompute"] not in RECOMPUTE:
        raise ValueError("an accelerator or a way to recompute that it has no words for")

    def number(name: str) -> int:
        return int(float(row[name] or 1))

    model = config.ModelConfig(
        name="model",
        num_layers=number("layers"),
        n_head=number("heads"),
        hidden_dim=number("hidden"),
        vocab_size=number("vocab"),
        max_seq_len=number("seq"),
        num_key_value_heads=number("kv_heads"),
        ffn_embed_dim=number("ffn"),
    )
    tp, pp = number("tp"), number("pp")
    parallel = config.ParallelismConfig(
        tp_size=tp, pp_size=pp, dp_size=number("dp"), sp_size=tp if float(row["seq_parallel"]) else 1
    )
    told = analysis.LLMAnalysis(
        model,
        config.get_gpu_config_by_name(GPUS[row["hw"]]),
        config.get_dtype_config_by_name("w8a8e16" if "8" in row["precision"] else "w16a16e16"),
        parallel,
        flops_efficiency=EFFICIENCY,
        hbm_memory_efficiency=1,
    ).training(
        batch_size_per_gpu=number("mbs"),
        gradient_accumulation_steps=number("ga"),
        global_batch_size=number("mbs") * number("ga") * number("dp"),
        seq_len=number("seq"),
        activation_recomputation=analysis.ActivationRecomputation(RECOMPUTE[row["recompute"]]),
        ds_zero=analysis.DSZeRO(int(float(row["zero"] or 0))),
        flash_attn=bool(float(row["flash_attn"])),
        mlp_gated_linear_units=bool(float(row["gated_mlp"])),
    )
    return float(told["latency_per_iter"])


def main() -> None:
    """Answer for all rows, twice: the second time is timed."""
    rows = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115, PTH123 - it prints as it goes
    logging.disable(logging.CRITICAL)
    _answers(rows)
    began = time.perf_counter()
    found = _answers(rows)
    took = time.perf_counter() - began
    answered = sum(one is not None for one, _ in found)
    told = {"seconds": [one for one, _ in found], "refused": [why for _, why in found], "per_second": answered / took}
    json.dump(told, out)


def _answers(rows: list[dict[str, str]]) -> list[tuple[float | None, str | None]]:
    found: list[tuple[float | None, str | None]] = []
    for row in rows:
        try:
            found.append((seconds(row), None))
        except (AssertionError, ValueError, TypeError, ZeroDivisionError) as why:
            found.append((None, _reason(why)))
    return found


def _reason(why: Any) -> str:
    return str(why).partition("(")[0].strip()[:80] or type(why).__name__


if __name__ == "__main__":
    main()
