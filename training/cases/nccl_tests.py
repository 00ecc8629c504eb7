"""nccl-tests: a collective's time and bandwidth by size, on every GPU of all nodes at once.

Started by mpirun, see `training.cases.mpi`; `case.program` names the collective. Its table is read by
`training.checks.nccl_log`.
"""

from collections.abc import Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.flags import laid_over, words
from training.checks import nccl_log

UPSTREAM: Final = Upstream(
    repository="NVIDIA/nccl-tests",
    version="v2.18.3",
    licence="BSD-3-Clause",
    folder="/opt/nccl-tests",
    container="public.ecr.aws/hpc-cloud/nccl-tests:cuda13.0.2-efa1.48.0-ofiv1.19.0-ncclv2.30.4-1-testsv2.18.3",
)
PROGRAMS: Final = (
    "all_gather",
    "all_reduce",
    "alltoall",
    "broadcast",
    "gather",
    "hypercube",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sendrecv",
)
"""Of src/ at that version, without their ending _perf."""
LARGEST_MIB: Final = 8192
"""Messages up to this size where the recipe does not say: bandwidth has levelled off there."""


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """One GPU per rank, sizes doubling from 8 bytes, results checked; raises `CaseError` for no such program."""
    del nodes, processes_per_node, paths
    program = spec["case"]["program"] or "all_reduce"
    if program not in PROGRAMS:
        raise CaseError(f"case.program {program!r} is none of nccl-tests: take {', '.join(PROGRAMS)}")
    largest = spec["checks"]["largest_mib"]
    sizes = ("--minbytes 8", f"--maxbytes {LARGEST_MIB if largest == 'auto' else largest}M", "--stepfactor 2")
    told = (*sizes, "--ngpus 1", "--warmup_iters 5", "--iters 20", "--check 1")
    # as awslabs/awsome-distributed-ai starts them: NCCL's own lines say which network it took
    env = {"NCCL_DEBUG": "INFO"}
    return Command((f"build/{program}_perf", *laid_over(words(told), spec["case"]["arguments"])), env, per="mpi")


def measure(line: str) -> dict[str, float] | None:
    """A row of the table: the operation out of place."""
    rows = [row for run in nccl_log.read(line).runs for row in run.rows if not row.get("in_place")]
    if not rows:
        return None
    return {name: float(rows[0][name]) for name in ("bytes", "seconds", "algbw_gbps", "busbw_gbps")}
