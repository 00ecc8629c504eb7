"""What nccl-tests are told, held against the options of their own source, and what they print."""

import json

import pytest

from clusters.base import Refused
from tests.training.cases.matrix import KINDS, record
from tests.training.cases.renderings import command, of
from tests.training.cases.upstream_parsers import UPSTREAM, parse
from tests.training.cases.upstream_parsers import Refused as Unparsed
from training.cases import nccl_tests

TABLE = "nccl_tests-v2.18.3"
# awslabs/awsome-distributed-ai, micro-benchmarks/nccl-tests/README: two p5.48xlarge
LINES = """
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
 17179869184    4294967296     float     sum      -1    66131  259.79  487.09      0    66134  259.77  487.07      0
"""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", of("nccl-tests"))
def test_every_kind_tells_it_options_that_it_has(name: str, kind: str) -> None:
    told = command(name, kind=kind)
    assert (told.argv[0], told.per) == ("build/all_reduce_perf", "mpi")
    parsed = parse(TABLE, told.argv[1:])
    assert (parsed["minbytes"], parsed["maxbytes"], parsed["ngpus"], parsed["check"]) == ("8", "8192M", 1, 1)
    record(name, kind, "rendered", "options held against nccl-tests v2.18.3; mpirun without ssh by test_mpi")


def test_all_its_programs_can_be_asked_for_and_no_other() -> None:
    there = set(json.loads((UPSTREAM / f"{TABLE}.json").read_text())["upstream"]["programs"].split())
    assert there - set(nccl_tests.PROGRAMS) == {"common", "util"}
    assert set(nccl_tests.PROGRAMS) <= there
    assert command("nccl-tests", "case.program=sendrecv").argv[0] == "build/sendrecv_perf"
    with pytest.raises(Refused, match="none of nccl-tests"):
        command("nccl-tests", "case.program=barrier")


def test_sizes_and_arguments_of_the_recipe_are_told() -> None:
    told = command("nccl-tests", "checks.largest_mib=64", 'case.arguments=["iters=100", "datatype=bfloat16"]')
    parsed = parse(TABLE, told.argv[1:])
    assert (parsed["maxbytes"], parsed["iters"], parsed["datatype"]) == ("64M", 100, "bfloat16")


@pytest.mark.parametrize("argument", ["iterations=5", "iters=many"])
def test_a_wrong_argument_is_seen(argument: str) -> None:
    told = command("nccl-tests", f'case.arguments=["{argument}"]')
    with pytest.raises(Unparsed):
        parse(TABLE, told.argv[1:])


def test_recorded_rows_are_read() -> None:
    rows = [found for line in LINES.splitlines() if (found := nccl_tests.measure(line))]
    assert rows == [{"bytes": 17179869184, "seconds": 0.066131, "algbw_gbps": 259.79, "busbw_gbps": 487.09}]
