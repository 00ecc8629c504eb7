"""`python -m flows.train RECIPE --render` as it is typed: all of it is shown, and nothing is asked or made."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from recipes.convert import KINDS
from tests.camp import Camp
from tests.training.cases.upstream_parsers import parse

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "recipes" / "cases"
PRESET = GALLERY / "megatron-gpt3-7b.yaml"


def test_it_knows_neither_prefect_nor_aws() -> None:
    probe = (
        "import runpy, sys\n"
        f"sys.argv = ['train', {str(PRESET)!r}, '--render', '--kind', 'batch']\n"
        "try: runpy.run_module('flows.train', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'prefect', 'boto3', 'torch'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_plan_command_and_requests_are_shown_and_written(user_camp: Camp, kind: str) -> None:
    code, told = user_camp.run("train", PRESET, "--render", "--kind", kind, "--out", "shown")
    assert code == 0, told
    assert f"# megatron-gpt3-7b on {kind}: 16 x" in told
    assert "layout    tp4 dp32 zero1" in told
    assert "https://github.com/NVIDIA/Megatron-LM at core_v0.16.1" in told
    assert f"# {kind}/" in told
    written = (user_camp.folder / "shown" / "case" / "command.sh").read_text()
    assert written.rstrip() in told
    words = shlex.split(written.replace("\\\n", " "))
    assert parse("megatron_lm-core_v0.16.1", words[words.index("pretrain_gpt.py") + 1 :])["hidden_size"] == 4096
    job = json.loads((user_camp.folder / "shown" / "job.json").read_text())
    assert (job["module"], job["processes_per_node"]) == ("training.cases.run", 8)
    made = [path for path in user_camp.folder.rglob("*") if path.is_file() and "shown" not in path.parts]
    assert made == [], "nothing is asked, nothing is made"


def test_castra_s_own_program_is_shown_too(user_camp: Camp) -> None:
    code, told = user_camp.run("train", ROOT / "recipes" / "llama3-8b-p5.yaml", "--render", "--kind", "eks")
    assert code == 0, told
    assert "torchrun --nnodes=16 --nproc-per-node=8 --max-restarts=0 -m training.run job.json" in told


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--kind", "moon"], "'moon' is not a kind of cluster"),
        (["--set", "case.framework=jax"], "case.framework"),
        (["--set", "model.pretrained=/models/x"], "model.pretrained"),
        (["--set", "parallel.tp=3"], "parallel"),
        (["--set", "case.program=bert"], "case.program"),
    ],
)
def test_nonsense_is_one_sentence(user_camp: Camp, words: list[str], says: str) -> None:
    code, told = user_camp.run("train", PRESET, "--render", *words)
    assert (code, "Traceback" in told) == (2, False), told
    assert says in told
