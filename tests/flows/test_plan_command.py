"""`python -m flows.plan` as it is typed: quick, without Prefect, for people and programs, one sentence for nonsense."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.camp import Camp

ROOT = Path(__file__).parents[2]
LARGE = ROOT / "recipes" / "llama3-70b-p5.yaml"


def test_it_knows_neither_prefect_nor_aws() -> None:
    probe = (
        "import runpy, sys\n"
        f"sys.argv = ['plan', {str(LARGE)!r}, '--json']\n"
        "try: runpy.run_module('flows.plan', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'prefect', 'boto3', 'torch', 'scipy', 'pandas'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_people_see_tables_and_a_picture_and_nothing_is_created(user_camp: Camp) -> None:
    code, told = user_camp.run("plan", LARGE)
    assert code == 0, told
    assert "Layouts that fit" in told
    picture = user_camp.folder / ".castra" / "plans" / "llama3-70b-p5.svg"
    assert str(picture) in told
    assert picture.read_text().startswith("<?xml")
    left = [path for path in user_camp.folder.rglob("*") if path.is_file()]
    assert left == [picture]
    assert user_camp.processes() == []


def test_programs_get_one_json_document(user_camp: Camp) -> None:
    words = ["--json", "--top", "2", "--nodes", "8..16", "--picture", "here.svg", "--what-if", "efa=4x"]
    code, text = user_camp.run("plan", LARGE, *words)
    assert code == 0, text
    told = json.loads(text)
    assert told["nodes"] in (8, 16)
    assert told["picture"] == "here.svg"
    assert (user_camp.folder / "here.svg").exists()


def test_a_deadline_nobody_meets_is_told_and_is_no_success(user_camp: Camp) -> None:
    code, told = user_camp.run("plan", LARGE, "--nodes", "8", "--deadline", "1h")
    assert code == 1
    assert "no machines that were compared, the fastest is 8 x p5.48xlarge" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--instances", "p5.49xlarge"], "did you mean"),
        (["--nodes", "0"], "--nodes 0: take from 1"),
        (["--nodes", "many"], "write it as 8, as 4..64 or as 4,8,16"),
        (["--deadline", "soon"], "write it as 7d, 36h, 90min or 2w"),
        (["--what-if", "nvlink"], "write it as nvlink=2x,efa=0.5x"),
        (["--max-usd", "-1"], "give an amount above 0"),
        (["--set", "parallel.tp=3"], "256 ranks do not divide by parallel.tp"),
        (["--set", "cluster.nodes=0"], "it must be at least 1"),
        (["--set", "cluster.instance_type=g5.xlarge", "--set", "cluster.nodes=64"], "has no EFA"),
        (["--instances", "g5.xlarge", "--nodes", "64"], "no Elastic Fabric Adapter"),
        (["--set", "budget.max_usd=10"], "budget.max_usd is $10"),
        (["--picture", "/proc/plan.svg"], "--picture /proc/plan.svg cannot be written"),
        (["--set", "parallel.software=castra", "--set", "parallel.ep=2"], "write software: megatron"),
    ],
)
def test_nonsense_is_one_sentence(user_camp: Camp, words: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flows.plan", str(LARGE), *words],
        cwd=user_camp.folder,
        env=user_camp.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_a_life_can_be_planned_only(user_camp: Camp) -> None:
    code, told = user_camp.run("lifecycle", user_camp.recipe(), "--plan-only")
    assert code == 0, told
    assert "Layouts that fit" in told
    assert not (user_camp.folder / ".castra" / "store").exists()


def test_what_is_only_planned_is_not_launched(user_camp: Camp) -> None:
    path = user_camp.recipe(
        "name: big\nparallel: {software: megatron, tp: 8}\ncluster: {kind: eks, nodes: 2}\n"
        "image: {container: any}\nstore: s3://castra-big\n"
    )
    for verb in ("lifecycle", "provision", "train"):
        code, told = user_camp.run(verb, path)
        assert code == 2
        assert "big has parallel.software megatron, parallel.tp 8, which is planned, not yet run" in told
    assert [path.name for path in user_camp.folder.iterdir() if path.is_file()] == ["tiny.yaml"]
