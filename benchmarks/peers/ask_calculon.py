"""Ask calculon for the step times of rows; runs with its own source on PYTHONPATH (see benchmarks/planner_peer.py).

Rows (JSON, as in a table of measured steps) come on stdin; {"seconds": [number or null], "refused": [reason or null],
"per_second": configurations} goes to stdout. The first argument is the folder of its source.
"""

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

SYSTEMS = {"A100-80": "a100_80g", "H100-80": "h100_80g_nvl8"}
"""The systems that come along, which fit our rows' accelerators."""
RECOMPUTE = {"none": "none", "selective": "attn_only", "full": "full"}


def seconds(row: dict[str, str], source: Path) -> float:
    """Seconds per step; raises what the package raises, and ValueError for what it has no words for."""
    import calculon as package  # type: ignore[import-not-found]  # by PYTHONPATH, in a process of its own
    from calculon.llm import Llm  # type: ignore[import-not-found]

    if row["hw"] not in SYSTEMS or row["recompute"] not in RECOMPUTE or float(row["gated_mlp"]):
        raise ValueError("an accelerator, a way to recompute or a gated MLP that it has no words for")
    if float(row["zero"] or 0) > 1:
        raise ValueError("ZeRO above stage 1, which it has no words for")
    machine = json.loads((source / "systems" / f"{SYSTEMS[row['hw']]}.json").read_text())
    share = float(row["inter_node_gbps"]) / 8 / float(row["gpus_per_node"])
    machine["networks"][1]["bandwidth"] = share
    machine["mem1"]["GiB"] = 1 << 20  # the steps were run: whether they fit is not asked here
    names = {"hidden": "hidden", "feedforward": "ffn", "seq_size": "seq", "attn_heads": "heads"}
    names |= {"attn_size": "head_dim", "num_blocks": "layers"}
    shape = {theirs: int(float(row[ours])) for theirs, ours in names.items()}
    model = Llm(Llm.Application(shape), logging.getLogger("calculon"))
    model.compile(package.System(machine), Llm.Execution.from_json(_execution(row)))
    model.run(package.System(machine))
    return float(model.get_total_time())


def _execution(row: dict[str, str]) -> dict[str, Any]:
    """The row's layout in its words."""
    tp, pp, vpp, dp, mbs, ga = (int(float(row[name] or 1)) for name in ("tp", "pp", "vpp", "dp", "mbs", "ga"))
    inside = tp * dp <= float(row["gpus_per_node"])
    return {
        "num_procs": tp * pp * dp,
        "tensor_par": tp,
        "pipeline_par": pp,
        "data_par": dp,
        "tensor_par_net": 0,
        "pipeline_par_net": 1,
        "data_par_net": 0 if inside else 1,
        "batch_size": mbs * ga * dp,
        "microbatch_size": mbs,
        "datatype": "float16",
        "fused_activation": True,
        "attention_type": "multihead",
        "activation_recompute": RECOMPUTE[row["recompute"]],
        "pipeline_interleaving": max(vpp, 1),
        "optimizer_sharding": float(row["zero"] or 0) == 1 and dp > 1,
        "tensor_par_comm_type": "rs_ag" if float(row["seq_parallel"]) else "ar",
        "tensor_par_overlap": "none",
        "seq_par_ag_redo": False,
        "data_par_overlap": False,
        "weight_offload": False,
        "activations_offload": False,
        "optimizer_offload": False,
        "training": True,
    }


def main() -> None:
    """Answer for all rows."""
    rows, source = json.load(sys.stdin), Path(sys.argv[1])
    found: list[tuple[float | None, str | None]] = []
    began = time.perf_counter()
    for row in rows:
        try:
            found.append((seconds(row, source), None))
        except Exception as why:  # noqa: BLE001 - it raises its own, assertions and what its arithmetic does
            found.append((None, str(why).partition("(")[0].strip()[:80] or type(why).__name__))
    took = time.perf_counter() - began
    told = {"seconds": [one for one, _ in found], "refused": [why for _, why in found]}
    json.dump(told | {"per_second": sum(one is not None for one, _ in found) / took}, sys.stdout)


if __name__ == "__main__":
    main()
