"""PARAM: the exact arguments of its collectives and kernels, at commit 1e115ff.

Source of the names: train/comms/pt/comms.py with comms_utils.py, and train/compute/pt/driver.py there; sizes and
number of iterations are those of the published test case (aws-samples/awsome-distributed-training b31557a).
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from training.cases.base import CaseError, Command, Paths, Upstream
from training.cases.flags import laid_over

UPSTREAM: Final = Upstream(
    repository="facebookresearch/param",
    version="1e115ffc62c6d048405d9b963191736c13811b1d",
    licence="MIT",
    folder="/param",
)
"""No release and no container: it needs torch alone; its comms are imported as param_bench.train.comms.pt."""

KERNELS: Final = {"gemm": "gemm", "mlp": "linear", "embedding": "emb"}
PROGRAMS: Final = ("comms", *KERNELS)
COLLECTIVE: Final = re.compile(
    r"COMMS-RES-(?P<collective>\w+)-(?P<type>\w+?)\s+(?P<figures>[\d.]+(?:\s+[\d.]+){9})\s*$"
)
GEMM: Final = re.compile(r"^ *(?P<m>\d+), +(?P<n>\d+), +(?P<k>\d+), +(?P<seconds>[\d.]+) +(?P<tflops>[\d.]+) *$")
MLP: Final = re.compile(
    r"^ *\d+, +\d+, +\d+, +\d+, +(?P<batch>\d+), +(?P<seconds>[\d.]+), +(?P<samples_per_second>[\d.]+), "
    r"+(?P<tflops>[\d.]+) *$"
)
EMBEDDING: Final = re.compile(
    r"^ *\d+, +\d+, +\d+, +(?P<batch>\d+), +(?P<seconds>[\d.]+), +[\d.]+, +(?P<gigabytes>[\d.]+) *$"
)


def command(spec: Mapping[str, Any], nodes: int, processes_per_node: int, paths: Paths) -> Command:
    """comms.py on every rank, or a kernel's driver once on each node; `case.program` names which."""
    del nodes, processes_per_node  # torchrun's variables tell comms.py of the ranks
    program, arguments = spec["case"]["program"] or "comms", spec["case"]["arguments"]
    if program not in PROGRAMS:
        raise CaseError(f"case.program {program!r} is none of PARAM's: take {', '.join(PROGRAMS)}.")
    if program == "comms":
        words = laid_over(_comms(spec), arguments)
        return Command(("-m", "param_bench.train.comms.pt.comms", *words))
    device = "cpu" if spec["cluster"]["kind"] == "local" else "gpu"
    whole = laid_over(("--steps", "100", "--warmups", "10", "--device", device), _of(arguments, kernel=False))
    kernel = laid_over(("--dataset", "A"), _of(arguments, kernel=True))
    driver = f"{paths.folder}/train/compute/pt/driver.py"
    return Command((driver, *whole, KERNELS[program], *kernel), per="node")


def measure(line: str) -> dict[str, float] | None:
    """A row of one of its tables: bytes, seconds, gbps and busbw_gbps of a collective, else sizes, seconds, a rate."""
    if found := COLLECTIVE.search(line):
        size, _, median, *_, algorithm, bus, _ = map(float, found["figures"].split())
        return {"bytes": size, "seconds": median / 1e6, "gbps": algorithm, "busbw_gbps": bus}
    if found := MLP.match(line) or GEMM.match(line) or EMBEDDING.match(line):
        told = {name: float(value) for name, value in found.groupdict().items()}
        return {"gbps" if name == "gigabytes" else name: value for name, value in told.items()}
    return None


def _comms(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The published sweep of all-reduces on GPUs, a smaller one over gloo on this machine's CPUs."""
    local = spec["cluster"]["kind"] == "local"
    there = ("--device", "cpu", "--backend", "gloo") if local else ("--device", "cuda", "--backend", "nccl")
    largest, iterations = ("16M", "5") if local else ("2G", "100")
    sweep = ("--begin-size", "8", "--end-size", largest, "--f", "2", "--num_iters", iterations)
    return (*sweep, "--collective", "all_reduce", *there)


KERNELS_OWN: Final = ("dataset", "dtype", "optimizer", "optimizer-type", "alpha", "randomseed", "usexlabag")
"""Options of driver.py that go after the kernel's name."""


def _of(arguments: tuple[str, ...] | list[str], *, kernel: bool) -> list[str]:
    return [one for one in arguments if (one.lstrip("-").partition("=")[0] in KERNELS_OWN) == kernel]
