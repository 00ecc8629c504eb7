"""The local cluster and its keeper: whoever dies, nothing is left behind, and nothing runs twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clusters import keeper, warden
from clusters.base import ClusterError, Job, Refused, State
from clusters.local import LocalCluster
from tests.clusters.yard import Yard, finished, gone, ready, wait_until

RUDE = "cluster.submit(yard.job('rude', deaf=True, daemons=True, sleep=600))"


@pytest.fixture
def cluster(yard: Yard) -> LocalCluster:
    return LocalCluster(yard.folder / "jobs", grace_s=0.5)


def keepers(folder: Path) -> dict[str, int]:
    """The pids of a running job's keeper and of its watch."""
    told = keeper.started(folder)
    assert told
    stat = Path(f"/proc/{told['pid']}/stat").read_text()
    return {"keeper": told["pid"], "watch": int(stat.rpartition(")")[2].split()[1])}


def test_a_job_ends_with_the_process_that_submitted_it(yard: Yard, cluster: LocalCluster) -> None:
    owner = subprocess.Popen(yard.owner(f"{RUDE}; time.sleep(600)"))
    wait_until(lambda: cluster.find("rude"))
    ready(cluster, "rude")
    owner.kill()
    owner.wait()
    status = finished(cluster, "rude", 5)
    assert (status.state, status.reason) == (State.FAILED, keeper.OWNER_GONE)
    wait_until(lambda: not yard.processes(), 2)


def test_a_fork_of_the_owner_does_not_keep_its_jobs(yard: Yard, cluster: LocalCluster) -> None:
    told = yard.folder / "fork"
    text = f"{RUDE}\npid = os.fork()\nif pid: Path({str(told)!r}).write_text(str(pid))\ntime.sleep(600)"
    owner = subprocess.Popen(yard.owner(text))
    wait_until(lambda: told.exists() and told.read_text())
    ready(cluster, "rude")
    owner.kill()
    owner.wait()
    assert finished(cluster, "rude", 5).reason == keeper.OWNER_GONE
    os.kill(int(told.read_text()), signal.SIGKILL)


@pytest.mark.parametrize("victim", ["keeper", "watch"])
def test_a_killed_keeper_takes_everything_with_it(yard: Yard, cluster: LocalCluster, victim: str) -> None:
    cluster.submit(yard.job("rude", deaf=True, daemons=True, sleep=600))
    ready(cluster, "rude")
    pids = keepers(cluster.workdir / "rude")
    os.kill(pids[victim], signal.SIGKILL)
    status = finished(cluster, "rude", 5)
    assert status.state is State.LOST
    assert "keeper was killed" in status.reason
    wait_until(lambda: not yard.processes() and all(map(gone, pids.values())), 5)


def test_a_job_whose_keepers_left_no_word_is_lost(yard: Yard, cluster: LocalCluster) -> None:
    cluster.submit(yard.job("lost", sleep=600))
    ready(cluster, "lost")
    pids = keepers(cluster.workdir / "lost")
    os.kill(pids["watch"], signal.SIGSTOP)
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    status = finished(cluster, "lost", 5)
    assert status.state is State.LOST
    assert "left no word" in status.reason
    assert cluster.submit(yard.job("lost", sleep=600)) == "lost"
    assert yard.runs("lost") == 1, "it may have done its work: a new attempt has a new name"


def test_sigterm_to_the_keeper_is_a_cancel(yard: Yard, cluster: LocalCluster) -> None:
    for victim in ("keeper", "watch"):
        cluster.submit(yard.job(victim, sleep=600))
        ready(cluster, victim)
        os.kill(keepers(cluster.workdir / victim)[victim], signal.SIGTERM)
        assert finished(cluster, victim, 5).state is State.CANCELLED


def test_many_submitters_at_the_same_moment_start_one_run(yard: Yard, cluster: LocalCluster) -> None:
    start = yard.folder / "start"
    text = (
        f"while not Path({str(start)!r}).exists(): time.sleep(0.001)\n"
        "cluster.submit(yard.job('raced', sleep=0.5))\n"
        "while not cluster.status('raced').state.done: time.sleep(0.01)\n"
        "print(cluster.status('raced').state)"
    )
    owners = [subprocess.Popen(yard.owner(text), stdout=subprocess.PIPE, text=True) for _ in range(6)]
    start.touch()
    told = {owner.communicate(timeout=60)[0].strip() for owner in owners}
    assert told == {"succeeded"}
    assert yard.runs("raced") == 1


def test_a_submitter_killed_before_the_start_leaves_nothing_in_the_way(yard: Yard, cluster: LocalCluster) -> None:
    folder = cluster.workdir / "begun"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text("{")
    (folder / "plan.json").write_text("{")
    assert cluster.find("begun") is None
    finished(cluster, cluster.submit(yard.job("begun")))
    assert yard.runs("begun") == 1


def test_nodes_share_one_log_of_whole_lines(yard: Yard) -> None:
    talk = "import sys\nfor i in range(300): sys.stdout.write(f'{i:03}' + 'y' * 997 + '\\n')\nsys.stdout.write('end')"
    keeper.start(yard.folder, [keeper.Node([sys.executable, "-c", talk]) for _ in range(2)])
    wait_until(lambda: keeper.ended(yard.folder))
    lines = (yard.folder / "log").read_text().split("\n")
    for node in ("[node0] ", "[node1] "):
        own = [line.removeprefix(node) for line in lines if line.startswith(node)]
        assert own == [f"{i:03}" + "y" * 997 for i in range(300)] + ["end"]
    assert len(lines) == 603


def test_invalid_and_endless_lines_are_told_in_pieces(yard: Yard) -> None:
    talk = "import sys\nsys.stdout.buffer.write(b'\\xff\\xfe ok\\n' + b'z' * 2_500_000 + b'\\nlast\\n')"
    keeper.start(yard.folder, [keeper.Node([sys.executable, "-c", talk])])
    wait_until(lambda: keeper.ended(yard.folder))
    first, *middle, last = (yard.folder / "log").read_text().splitlines()
    assert first == "\ufffd\ufffd ok"
    assert last == "last"
    assert "".join(middle) == "z" * 2_500_000
    assert max(map(len, middle)) <= warden.LONGEST_LINE + (1 << 16)


def test_one_failed_node_ends_the_others(yard: Yard) -> None:
    wait = [sys.executable, "-c", "import time; time.sleep(600)"]
    keeper.start(yard.folder, [keeper.Node(wait), keeper.Node([sys.executable, "-c", "raise SystemExit(7)"])])
    wait_until(lambda: keeper.ended(yard.folder))
    assert keeper.ended(yard.folder) == {"state": "failed", "reason": "node1 exited with code 7", "exit_code": 7}


def test_a_daemon_does_not_outlive_a_job_that_ended_well(yard: Yard, cluster: LocalCluster) -> None:
    assert finished(cluster, cluster.submit(yard.job("good", daemons=True))).state is State.SUCCEEDED
    assert not yard.processes()


def test_a_taken_port_is_left_for_another(yard: Yard) -> None:
    once = (
        "import pathlib, sys\nport, seen = sys.argv[1], pathlib.Path('ports')\n"
        "first = not seen.exists()\nwith seen.open('a') as out: out.write(port + '\\n')\n"
        "if first: sys.exit(f'bind: [Errno 98] Address already in use: {port}')\nprint('served on', port)"
    )
    keeper.start(yard.folder, [keeper.Node([sys.executable, "-c", once, keeper.PORT])])
    wait_until(lambda: keeper.ended(yard.folder))
    first, second = (yard.folder / "ports").read_text().split()
    assert first != second
    assert keeper.started(yard.folder).items() >= {"port": int(second)}.items()  # type: ignore[union-attr]  # it ran
    assert keeper.ended(yard.folder) == {"state": "succeeded", "reason": "", "exit_code": 0}


def test_a_full_disk_ends_the_job_with_a_sentence(yard: Yard, cluster: LocalCluster) -> None:
    text = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "cluster.submit(yard.job('chatty', say=['x' * 999], times=100, sleep=600))\n"
        "while not cluster.status('chatty').state.done: time.sleep(0.02)"
    )
    subprocess.run(yard.owner(text), check=True, timeout=60)
    status = cluster.status("chatty")
    assert status.state is State.FAILED
    assert "the disk is full" in status.reason


def test_a_folder_that_cannot_be_written_is_one_sentence(yard: Yard) -> None:
    (yard.folder / "file").write_text("")
    with pytest.raises(ClusterError, match=r"^job folder .*Not a directory; .*choose another folder$"):
        LocalCluster(yard.folder / "file" / "jobs").submit(yard.job("nowhere"))


def test_a_program_that_does_not_exist_fails_with_its_name(yard: Yard) -> None:
    keeper.start(yard.folder, [keeper.Node(["no-such-program"])])
    wait_until(lambda: keeper.ended(yard.folder))
    told = keeper.ended(yard.folder)
    assert told == {
        "state": "failed",
        "reason": "cannot start no-such-program: No such file or directory",
        "exit_code": 127,
    }


def test_the_rendered_job_is_a_torchrun_per_node(tmp_path: Path) -> None:
    job = Job("two", "training.run", {"spec": {}}, nodes=2, processes_per_node=3, env={"MINE": "1"}, timeout_s=60)
    told = LocalCluster(tmp_path, threads_per_process=2).render(job)
    assert json.dumps(told)
    config = str(tmp_path / "two" / "job.json")
    for rank, node in enumerate(told["nodes"]):
        assert node["argv"] == [
            sys.executable,
            "-m",
            "training.launch",
            "--nnodes=2",
            f"--node-rank={rank}",
            "--nproc-per-node=3",
            "--max-restarts=0",
            "--master-addr=127.0.0.1",
            "--master-port={port}",
            "-m",
            "training.run",
            config,
        ]
        assert node["env"].items() >= {"OMP_NUM_THREADS": "2", "MINE": "1", "PYTHONUNBUFFERED": "1"}.items()


def test_the_cores_are_shared_among_the_ranks(tmp_path: Path) -> None:
    job = Job("wide", "training.run", {}, nodes=1, processes_per_node=16)
    env = LocalCluster(tmp_path).render(job)["nodes"][0]["env"]
    assert int(env["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 16)


def test_one_process_on_two_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="give it 1 node, not 2"):
        LocalCluster(tmp_path).submit(Job("odd", "training.score", {}, nodes=2))


@pytest.mark.torch
def test_two_nodes_meet_over_torchrun(yard: Yard, cluster: LocalCluster) -> None:
    (yard.folder / "meet.py").write_text(
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\nseen = torch.ones(1)\ndist.all_reduce(seen)\n"
        "print('ranks', int(seen), flush=True)\n"
        "dist.barrier(); dist.destroy_process_group(); os._exit(0)\n"
    )
    job = yard.job("meeting", timeout_s=120)
    cluster.submit(Job("meeting", "meet", job.config, 2, 1, job.env, job.timeout_s))
    status = finished(cluster, "meeting", 120)
    lines = cluster.logs("meeting")[0]
    assert status.state is State.SUCCEEDED, lines
    assert {"[node0] ranks 2", "[node1] ranks 2"} <= set(lines)
