"""The training loop: one mathematics whatever the strategy, and no crash that changes the result."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.nursery import ROOT, Nursery, free_port, losses, refused, result, spec, write_dataset, write_job
from training.model import build
from training.ranks import use_efa
from training.schedule import learning_rate

pytestmark = [pytest.mark.torch]

STRATEGIES = ["ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
Trained = Callable[[str], Path]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_learns_what_one_process_learns(strategy: str, trained: Trained) -> None:
    alone, spread = trained("single"), trained(strategy)
    assert losses(spread) == pytest.approx(losses(alone), rel=1e-5)
    assert losses(alone)[0] == pytest.approx(math.log(10_000), abs=0.3)  # chance, give or take the logits' variance
    assert losses(alone)[-1] < losses(alone)[0] - 0.5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero1", "zero3"])
def test_a_killed_run_resumes_to_the_same_bits(
    strategy: str, trained: Trained, nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    job = write_job(tmp_path, spec(strategy, micro=2, rehearse_failure_at=5), dataset=dataset)
    codes, first = nursery.run(job, 2)
    assert codes == [-signal.SIGKILL] * 2
    assert first.say("rehearsed-failure") == [{"event": "rehearsed-failure", "step": 5}]
    codes, second = nursery.run(job, 2)
    assert codes == [0, 0], second.log.read_text()
    assert second.say("resumed")[0]["step"] == 4
    whole = trained(strategy)
    assert losses(tmp_path / "out") == losses(whole)
    assert result(tmp_path / "out")["weights_sha256"] == result(whole)["weights_sha256"]
    assert result(tmp_path / "out")["resumed_from"] == 4


def test_three_ranks_killed_from_outside_resume_to_the_same_bits(
    nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    plan = spec("ddp", micro=1, global_batch_size=9, steps=8, checkpoint_every=3)
    whole = write_job(tmp_path / "whole", plan, dataset=dataset)
    cut = write_job(tmp_path / "cut", plan, dataset=dataset)
    assert nursery.run(whole, 3)[0] == [0, 0, 0]
    run = nursery.start(cut, 3)
    run.reach(4)
    for pid in run.pids:
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == [-signal.SIGKILL] * 3
    assert nursery.run(cut, 3)[0] == [0, 0, 0]
    assert losses(tmp_path / "cut/out") == losses(tmp_path / "whole/out")
    hashes = {result(tmp_path / name / "out")["weights_sha256"] for name in ("cut", "whole")}
    assert len(hashes) == 1


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "ddp"), (2, "fsdp2")])
def test_a_run_goes_on_with_other_ranks_or_sharding(
    ranks: int, strategy: str, trained: Trained, nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    whole = trained("zero2")
    shutil.copytree(whole / "checkpoints/step-00000004", tmp_path / "out/checkpoints/step-00000004")
    shutil.copy(whole / "progress.jsonl", tmp_path / "out")
    codes, run = nursery.run(write_job(tmp_path, spec(strategy, micro=4), dataset=dataset), ranks)
    assert set(codes) == {0}, run.log.read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(whole), rel=1e-5)
    assert result(tmp_path / "out")["resumed_from"] == 4


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero3"])
def test_bf16_and_recomputed_activations_follow_fp32(
    strategy: str, trained: Trained, nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    plan = spec(strategy, micro=2, precision="bf16", activation_checkpointing=True)
    codes, run = nursery.run(write_job(tmp_path, plan, dataset=dataset), 2)
    assert codes == [0, 0], run.log.read_text()
    assert losses(tmp_path / "out") == pytest.approx(losses(trained("single")), abs=2e-2)


def test_the_best_checkpoint_is_kept(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    plan = spec(micro=8, eval_every=1, keep_checkpoints=1, learning_rate=0.5, warmup_steps=4, steps=9)
    assert nursery.run(write_job(tmp_path, plan, dataset=dataset))[0] == [0]
    told = losses(tmp_path / "out", "eval_loss")
    best = min(range(9), key=told.__getitem__) + 1
    kept = sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir())
    assert best < 9
    assert kept == [f"step-{best:08d}", "step-00000009"]
    assert result(tmp_path / "out")["eval_loss_best"] == told[best - 1]


def test_a_bad_step_is_skipped_where_the_recipe_says_so(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    """Nothing is left of a skipped step's gradients, DeepSpeed's own included: the curves stay one."""
    curves = []
    for name, ranks in (("ddp", 1), ("zero0", 2), ("zero2", 2), ("zero3", 2)):
        bad: dict[str, Any] = {"on_bad_step": "skip", "loss_spike": 1.001, "max_bad_steps": 100}
        plan = spec(name, 4, learning_rate=1e-5, warmup_steps=0, steps=20, checkpoint_every=100, **bad)
        codes, run = nursery.run(write_job(tmp_path / name, plan, dataset=dataset), ranks)
        assert set(codes) == {0}, run.log.read_text()
        curves.append((losses(tmp_path / name / "out"), [fact["step"] for fact in run.say("bad-step")]))
    (first, skipped), *others = curves
    assert skipped
    for losses_of, skipped_too in others:
        assert skipped_too == skipped
        assert losses_of == pytest.approx(first, rel=1e-5)


@pytest.mark.parametrize(
    ("schedule", "rates"), [("cosine", (1.0, 0.55, 0.1)), ("linear", (1.0, 0.55, 0.1)), ("constant", (1.0, 1.0, 1.0))]
)
def test_schedules(schedule: str, rates: tuple[float, ...]) -> None:
    train = {"schedule": schedule, "learning_rate": 2.0, "warmup_steps": 10, "steps": 110, "min_lr_ratio": 0.1}
    train |= {"decay_ratio": 0.2}
    assert learning_rate(5, train) == 1.0
    assert [learning_rate(step, train) / 2 for step in (10, 60, 110)] == pytest.approx(rates)


def test_wsd_decays_over_the_last_steps_only() -> None:
    train = {"schedule": "wsd", "learning_rate": 1.0, "warmup_steps": 10, "steps": 100, "min_lr_ratio": 0.0}
    told = [learning_rate(step, train | {"decay_ratio": 0.2}) for step in (10, 80, 90, 100)]
    assert told == pytest.approx([1.0, 1.0, 0.5, 0.0])


def test_progress_and_result_agree(trained: Trained) -> None:
    out = trained("ddp")
    records = [json.loads(line) for line in (out / "progress.jsonl").read_text().splitlines()]
    told = result(out)
    assert set(records[0]) == {
        "step", "loss", "lr", "grad_norm", "tokens_per_second", "step_seconds", "memory_gib"
    }  # fmt: skip
    assert (told["loss_first"], told["loss_last"]) == (records[0]["loss"], records[-1]["loss"])
    assert told["tokens"] == 6 * 8 * 32
    assert told["seconds"] == pytest.approx(sum(record["step_seconds"] for record in records))
    assert (told["world_size"], told["strategy"], told["resumed_from"]) == (2, "ddp", None)
    assert (out / told["checkpoint"] / "manifest.json").is_file()


def test_a_finished_job_is_left_alone(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, spec(), dataset=dataset)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/result.json").write_text("{}")
    codes, run = nursery.run(job, 2)
    assert (codes, run.told) == ([0, 0], [])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["result.json"]


def test_mistakes_are_told_in_one_sentence(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    def told(name: str, plan: dict[str, Any], ranks: int = 1, **inputs: Path) -> str:
        return refused(nursery, write_job(tmp_path / name, plan, **inputs), ranks)

    small = write_dataset(tmp_path / "small", sequences=4)
    assert "(3 x 2 = 6)" in told("divide", spec(micro=3), 2, dataset=dataset)
    assert "names no inputs.dataset" in told("none", spec())
    assert "holds no dataset" in told("absent", spec(), 2, dataset=tmp_path / "nowhere")
    assert "has 4 sequences" in told("few", spec(), dataset=small)
    vocabulary = told("vocabulary", spec(model={"vocab_size": 400}), dataset=dataset)
    assert vocabulary == "the tokenizer has 10000 tokens and model.vocab_size is 400; raise it to as many"
    assert "cannot be read" in refused(nursery, tmp_path / "divide/absent.json")
    (tmp_path / "divide/torn.json").write_text('{"spec": {')
    assert "is not a job" in refused(nursery, tmp_path / "divide/torn.json")
    (tmp_path / "file").write_text("")
    job = json.loads((tmp_path / "none/job.json").read_text()) | {"output": str(tmp_path / "file/out")}
    (tmp_path / "none/job.json").write_text(json.dumps(job | {"inputs": {"dataset": str(dataset)}}))
    assert "cannot be made: Not a directory" in refused(nursery, tmp_path / "none/job.json")


def test_divergence_ends_the_run_before_a_checkpoint(nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    plan = spec()
    broken = build(plan["model"], 32)
    with torch.no_grad():
        broken.model.norm.weight.fill_(math.inf)
    broken.save_pretrained(tmp_path / "broken")
    told = refused(nursery, write_job(tmp_path, plan, dataset=dataset, initial=tmp_path / "broken"), 2)
    assert "at step 1: training diverged" in told
    assert not (tmp_path / "out/checkpoints").exists()


def test_training_starts_from_given_weights(trained: Trained, nursery: Nursery, dataset: Path, tmp_path: Path) -> None:
    plan = spec(micro=8, steps=3)
    build(plan["model"], 32, seed=plan["train"]["seed"]).save_pretrained(tmp_path / "initial")
    other = write_job(tmp_path, spec(micro=8, seed=1), dataset=dataset, initial=tmp_path / "initial")
    assert nursery.run(other)[0] == [0]
    assert losses(tmp_path / "out") == losses(trained("single"))


def torchrun(job: Path, node: int, port: int) -> subprocess.Popen[bytes]:
    """Start one node of two, as the local cluster does."""
    place = ["--nnodes=2", f"--node-rank={node}", "--master-addr=127.0.0.1", f"--master-port={port}"]
    command = [sys.executable, "-m", "torch.distributed.run", *place, "-m", "training.run", str(job)]
    with (job.parent / f"node{node}").open("ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def test_sigterm_to_one_node_of_torchrun_stops_both_and_keeps_the_step(
    nursery: Nursery, dataset: Path, tmp_path: Path
) -> None:
    plan = spec(steps=100_000, checkpoint_every=100_000)
    job, port = write_job(tmp_path, plan, dataset=dataset), free_port()
    agents = [torchrun(job, node, port) for node in range(2)]
    progress = tmp_path / "out/progress.jsonl"
    while not progress.exists() or progress.read_text().count("\n") < 3:
        assert [agent.poll() for agent in agents] == [None, None], (tmp_path / "node0").read_text()
        time.sleep(0.05)
    agents[1].send_signal(signal.SIGTERM)
    codes = [agent.wait(timeout=30) for agent in agents]
    assert 0 not in codes
    assert "exitcode  : 143" in (tmp_path / "node0").read_text()
    reached = len(losses(tmp_path / "out"))
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == [f"step-{reached:08d}"]
    job.write_text(job.read_text().replace("100000", str(reached + 2)))
    codes, run = nursery.run(job, 2)
    assert codes == [0, 0], run.log.read_text()
    assert run.say("resumed")[0]["step"] == reached
    assert len(losses(tmp_path / "out")) == reached + 2


def test_the_fabric_is_used_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FI_PROVIDER", "FI_EFA_USE_HUGE_PAGE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    use_efa(tmp_path)
    assert "FI_PROVIDER" not in os.environ
    (tmp_path / "rdmap0s26").mkdir()
    monkeypatch.setenv("FI_EFA_USE_HUGE_PAGE", "1")
    use_efa(tmp_path)
    assert (os.environ["FI_PROVIDER"], os.environ["FI_EFA_USE_HUGE_PAGE"]) == ("efa", "1")


def test_a_rank_dies_with_its_parent() -> None:
    child = (
        "from training.process import follow_parent; import time; follow_parent(); print(1, flush=True); time.sleep(60)"
    )
    parent = f"import subprocess, sys; c = subprocess.Popen([sys.executable, '-c', '{child}']); print(c.pid); c.wait()"
    with subprocess.Popen([sys.executable, "-uc", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert process.stdout.readline() == "1\n"
        process.kill()
        assert process.stdout.read() == ""  # returns once the child has closed its end
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()
