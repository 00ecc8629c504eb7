"""Another framework's program as a job of ours: its command, its log, its end."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from recipes.load import load
from tests.clusters.yard import ROOT, wait_until
from tests.training.nursery import free_port
from training import cases
from training.cases.base import CaseError, Paths
from training.cases.flags import laid_over
from training.cases.run import Figures

LINE = (
    " [2025-05-27 15:23:07] iteration {step:8d}/       4 | consumed samples: {samples:12d} | elapsed time per iteration"
    " (ms): {ms:.1f} | throughput per GPU (TFLOP/s/GPU): 40.4 | learning rate: 1.500000E-06 | global batch size:     8"
    " | lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 5.960 |"
)
PROGRAM = f"""
import json, os, sys
import helper                                    # of the framework's own folder
told = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ)}}
rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
json.dump(told, open(os.path.join(os.environ["SEEN"], f"rank{{rank}}.json"), "w"))
if rank == ranks - 1:                            # Megatron's last rank logs
    for step in range(1, 5):
        ms = 500.0 if step == 1 else 100.0
        print({LINE!r}.format(step=step, samples=8 * step, ms=ms, loss=10 / step), flush=True)
{{end}}
"""


class Case:
    """A framework's folder with a stand-in for its program, and the job that runs it."""

    def __init__(self, folder: Path, end: str = "") -> None:
        self.folder, self.out = folder / "framework", folder / "out"
        self.folder.mkdir()
        self.out.mkdir()
        (self.folder / "pretrain_gpt.py").write_text(PROGRAM.replace("{end}", end))
        (self.folder / "helper.py").touch()
        self.job = folder / "job.json"
        self.env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "SEEN": str(folder)}
        self.write()

    def write(self, *sets: str) -> None:
        """Write job.json anew."""
        job = {
            "spec": spec(f"case.folder={self.folder}", *sets),
            "inputs": {"dataset": "/data"},
            "output": str(self.out),
        }
        self.job.write_text(json.dumps(job))

    def start(self) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "training.cases.run", str(self.job)]
        return subprocess.Popen(words, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self) -> tuple[int, str]:
        process = self.start()
        told, _ = process.communicate(timeout=60)
        return process.returncode, told

    def result(self) -> dict[str, Any]:
        return dict(json.loads((self.out / "result.json").read_text()))


def spec(*sets: str) -> dict[str, Any]:
    """A recipe of Megatron-LM for one node, its plan settled."""
    sizes = ["tp=1", "pp=1", "vpp=1", "cp=1", "ep=1", "shard=1", "micro_batch_size=1", "strategy=ddp"]
    own = [f"parallel.{size}" for size in sizes] + [
        "train.global_batch_size=8",
        "train.steps=4",
        "train.warmup_steps=1",
    ]
    recipe = load(ROOT / "recipes" / "cases" / "megatron-gpt3-7b.yaml", ["cluster.nodes=1", *own, *sets])
    return recipe.model_dump(mode="json") | {"ranks_per_node": 1}


def error(told: str) -> str:
    """The one sentence a job was refused with."""
    assert "Traceback" not in told
    (line,) = [line for line in told.splitlines() if line.startswith("@castra ")]
    return str(json.loads(line[8:])["message"])


def test_the_program_gets_its_exact_command_and_its_figures_become_the_result(tmp_path: Path) -> None:
    case = Case(tmp_path)
    code, told = case.run()
    assert code == 0, told
    seen = json.loads((tmp_path / "rank0.json").read_text())
    shown = cases.command(spec(), 1, 1, Paths(str(case.out), str(case.folder), "/data"))
    assert seen["argv"] == list(shown.argv[1:])
    assert seen["cwd"] == str(case.folder)
    assert seen["env"]["PYTHONPATH"] == "", "the framework must not import our code for its own"
    assert seen["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    result = case.result()
    assert result.pop("seconds") > 0
    assert result.pop("program")[1:] == [str(case.folder / "pretrain_gpt.py"), *shown.argv[1:]]
    assert result == {
        "framework": "megatron-lm",
        "version": "core_v0.16.1",
        "world_size": 1,
        "steps": 4,
        "loss_first": 10.0,
        "loss_last": 2.5,
        "tokens": 4 * 8 * 2048,
        "tokens_per_second": pytest.approx(8 * 2048 / 0.1),  # the first step has the start in it
        "tflops": pytest.approx(40.4),
    }
    steps = [json.loads(line[8:]) for line in told.splitlines() if line.startswith("@castra ")]
    assert [(step["done"], step["total"]) for step in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert steps[0]["metrics"]["loss"] == 10.0


def test_a_job_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (case.out / "result.json").write_text("{}")
    assert case.run() == (0, "")


@pytest.mark.torch
def test_rank_0_tells_what_the_last_rank_logged(tmp_path: Path) -> None:
    case = Case(tmp_path)
    words = [sys.executable, "-m", "training.launch", "--nnodes=1", "--node-rank=0", "--nproc-per-node=2"]
    words += ["--master-addr=127.0.0.1", f"--master-port={free_port()}", "-m", "training.cases.run", str(case.job)]
    env = case.env | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert told.returncode == 0, told.stdout + told.stderr
    assert {path.name for path in tmp_path.glob("rank*.json")} == {"rank0.json", "rank1.json"}
    assert (case.result()["steps"], case.result()["loss_last"], case.result()["world_size"]) == (4, 2.5, 2)


def test_its_last_words_and_its_exit_code_are_heard(tmp_path: Path) -> None:
    case = Case(tmp_path, "sys.stderr.write('the end is here'); sys.stderr.flush(); os._exit(3)")
    code, told = case.run()
    assert code == 3
    assert told.endswith("the end is here\n")
    assert not (case.out / "result.json").exists()


def test_a_killed_program_ends_with_128_and_the_signal(tmp_path: Path) -> None:
    assert Case(tmp_path, "os.kill(os.getpid(), 9)").run()[0] == 137


def test_a_stop_signal_reaches_the_program_and_it_may_save(tmp_path: Path) -> None:
    saves = (
        "import signal, time; signal.signal(15, lambda *_: (open(os.environ['SEEN'] + '/saved', 'w'), sys.exit(0)));"
    )
    case = Case(tmp_path, saves + "open(os.environ['SEEN'] + '/up', 'w'); time.sleep(60)")
    process = case.start()
    wait_until((tmp_path / "up").exists, 30)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 143
    assert (tmp_path / "saved").exists()
    assert not (case.out / "result.json").exists(), "what was stopped is not done"


def test_the_program_ends_with_who_started_it(tmp_path: Path) -> None:
    case = Case(tmp_path, "import time; open(os.environ['SEEN'] + '/pid', 'w').write(str(os.getpid())); time.sleep(60)")
    process = case.start()
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "", 30)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.communicate()
    wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10)


def test_what_is_not_installed_is_told_with_what_brings_it(tmp_path: Path) -> None:
    case = Case(tmp_path)
    (case.folder / "pretrain_gpt.py").unlink()
    code, told = case.run()
    assert code == 2
    assert "pretrain_gpt.py is not in" in error(told)
    assert "nvcr.io/nvidia/pytorch:25.11-py3" in error(told)
    assert "NVIDIA/Megatron-LM at core_v0.16.1" in error(told)


def test_a_plan_the_framework_cannot_carry_out_is_one_sentence(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.write("model.pretrained=/models/x")
    code, told = case.run()
    assert (code, "model.pretrained" in error(told)) == (2, True)


@pytest.mark.parametrize(
    ("sets", "says"),
    [
        (["case.program=bert"], "case.program 'bert'"),
        (["train.lora_rank=8", "model.family=llama", "model.gated=true"], "train.lora_rank"),
        (["train.rehearse_failure_at=2"], "train.rehearse_failure_at"),
        (['case.arguments=["log-interval"]'], "name=value"),
        (["parallel.tp=auto"], "parallel.tp is auto"),
    ],
)
def test_what_cannot_be_told_is_refused(sets: list[str], says: str) -> None:
    with pytest.raises(CaseError, match=says):
        cases.command(spec(*sets), 1, 1)


def test_a_framework_without_a_launcher_is_refused() -> None:
    with pytest.raises(CaseError, match="no launcher"):
        cases.launcher("jax")


def test_arguments_are_laid_over_what_the_plan_says() -> None:
    told = ["run", "--lr", "1", "--bf16", "--data-path", "a", "b", "--seed=3"]
    more = ["lr=2", "bf16=false", "data-path=c d", "log-throughput=true", "eval-iters=0", "seed=4"]
    wanted = ["run", "--lr", "2", "--data-path", "c", "d", "--seed", "4", "--log-throughput", "--eval-iters", "0"]
    assert list(laid_over(told, more)) == wanted


def test_speeds_of_one_gpu_and_of_sequences_are_told_in_tokens_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    figures = Figures(steps=2, tokens=4096, ranks=8, length=128)
    figures.take({"step": 1, "loss": 3.0, "tokens_per_second_per_gpu": 100.0})
    figures.take({"step": 2, "loss": 2.0, "sequences_per_second": 10.0})
    assert [row["tokens_per_second"] for row in figures.rows] == [800.0, 1280.0]
    assert '"tokens_per_second": 800.0' in capsys.readouterr().out
