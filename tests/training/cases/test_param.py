"""What PARAM's programs are told, parsed by their own options at the pinned commit."""

from typing import Any

import pytest

from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import command, lines, of, spec
from tests.training.cases.upstream_parsers import Refused, parse
from training.cases import param
from training.cases.base import CaseError, Command, Paths

VERSION = param.UPSTREAM.version[:7]
UPSTREAMS = [name for name in of("param") if name.startswith("param-upstream-")]


def checked(told: Command) -> dict[str, Any]:
    """What the program makes of its words; the driver's kernels have parsers of their own."""
    if told.argv[0] == "-m":
        return parse(f"param_comms-{VERSION}", told.argv[2:])
    at = next(number for number, word in enumerate(told.argv) if word in param.KERNELS.values())
    whole = parse(f"param_driver-{VERSION}", told.argv[1:at])
    return whole | {"kernel": told.argv[at]} | parse(f"param_{told.argv[at]}-{VERSION}", told.argv[at + 1 :])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", UPSTREAMS)
def test_every_kind_tells_it_what_its_parser_takes(name: str, kind: str) -> None:
    told = checked(command(name, kind=kind))
    assert told["device"] == ("cpu" if kind == "local" else "cuda" if name.endswith("comms") else "gpu")
    record(name, kind, "rendered", f"arguments parsed against param {VERSION}")


def test_the_sweep_is_the_published_one() -> None:
    """--b=8 --e=2GB --f=2 --collective=all_reduce --num_iters=100, on every rank."""
    told = command("param-upstream-comms")
    assert told.per == "rank"
    words = checked(told)
    names = ("b", "e", "f", "collective", "n", "backend")
    assert [words[name] for name in names] == ["8", "2G", 2, "all_reduce", 100, "nccl"]


@pytest.mark.parametrize(("name", "kernel"), param.KERNELS.items())
def test_the_kernels_are_the_published_ones(name: str, kernel: str) -> None:
    told = command(f"param-upstream-{name}")
    assert told.per == "node"
    words = checked(told)
    assert (words["kernel"], words["steps"], words["dataset"]) == (kernel, 100, "A")


def test_arguments_go_where_their_parser_is() -> None:
    words = checked(command("param-upstream-gemm", "case.arguments=['steps=5', 'dataset=C', 'dtype=float16']"))
    assert (words["steps"], words["dataset"], words["dtype"]) == (5, "C", "float16")
    words = checked(command("param-upstream-comms", "case.arguments=['collective=all_to_all', 'c=1']"))
    assert (words["collective"], words["c"]) == ("all_to_all", 1)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("comms", "backend=mpich"),
        ("comms", "num_iters=many"),
        ("comms", "sweep=1"),
        ("gemm", "dataset=Z"),
        ("mlp", "layers=3"),
    ],
)
def test_what_it_would_not_take_is_seen(name: str, argument: str) -> None:
    with pytest.raises(Refused):
        checked(command(f"param-upstream-{name}", f"case.arguments=[{argument!r}]"))


def test_another_program_is_one_sentence() -> None:
    wrong = spec("param-upstream-comms")
    wrong["case"]["program"] = "dlrm"
    with pytest.raises(CaseError, match=r"none of PARAM's: take comms, gemm, mlp, embedding\.$"):
        param.command(wrong, 2, 8, Paths("/out", "/param"))


def test_figures_of_recorded_tables() -> None:
    found = [figures for line in lines("param") if (figures := param.measure(line))]
    assert found == [
        {"bytes": 4096, "seconds": pytest.approx(239e-6), "gbps": 0.017, "busbw_gbps": 0.017},
        {"bytes": 32768, "seconds": pytest.approx(492.6e-6), "gbps": 0.067, "busbw_gbps": 0.067},
        {"m": 1024, "n": 4096, "k": 1024, "seconds": 0.221772, "tflops": 0.039},
        {"batch": 512, "seconds": 1.102512, "samples_per_second": 464.4, "tflops": 0.1},
        {"batch": 2048, "seconds": 0.002067, "gbps": 15.222},
    ]
