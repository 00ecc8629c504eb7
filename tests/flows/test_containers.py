"""Containers, end to end: podman, Ansible and a real registry behind an emulated ECR, as a person types it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from emulator import machines, registry
from emulator.aws import Emulator
from recipes import Recipe
from tests.camp import Camp, alive
from tests.flows.oven import Watch, camp, sky
from tests.sky import client

__all__ = ["camp", "sky"]
READY = machines.possible() and registry.possible() and shutil.which("podman")
pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not READY and not os.environ.get("CI"),
        reason="needs root, podman, runc, docker-registry and what the emulator's machines need",
    ),
]
FLAVOUR = """
description: As little as a container can be.
os: debian-12
base: rootfs
deadline_minutes: 20
roles: {{image_facts: install, verify: install, clean: install}}
variables: {{mark: {mark}, {more}}}
environment: {{GREETING: hello}}
"""
SPEC = {
    "name": "tiny",
    "data": {"max_documents": 100, "sequence_length": 64},
    "model": {"hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 128, "vocab_size": 512},
    "train": {"steps": 6, "global_batch_size": 8, "warmup_steps": 2, "checkpoint_every": 3},
    "parallel": {"strategy": "zero1", "micro_batch_size": 2},
}
TOKEN = registry.PASSWORD


def flavour(camp: Camp, name: str, more: str = "") -> Path:
    return camp.recipe(FLAVOUR.format(mark=name, more=more), f"{name}.yaml")


def ecr(camp: Camp) -> Any:
    return client("ecr", camp.env["AWS_ENDPOINT_URL"])


def mounts(camp: Camp) -> list[str]:
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if str(camp.folder) in line]


def pull(camp: Camp, reference: str, folder: Path) -> list[str]:
    """Fetch a container as a node would; returns the words that run something in it."""
    (folder / "short").mkdir(parents=True)
    podman = [
        "unshare",
        "--mount",
        "podman",
        f"--root={folder / 'root'}",
        "--runtime=runc",
        "--cgroup-manager=cgroupfs",
    ]
    podman += [f"--runroot={folder / 'short' / 'r'}", f"--tmpdir={folder / 'short' / 't'}"]
    how = ["--tls-verify=false", f"--creds={registry.USER}:{TOKEN}"]
    subprocess.run([*podman, "pull", "--quiet", *how, reference], check=True, capture_output=True)
    limits = ["--ulimit=nofile=1024:1024", "--ulimit=nproc=4096:4096", "--network=none"]
    return [*podman, "run", "--rm", *limits, f"--volume={camp.folder}:{camp.folder}"]


def ended(camp: Camp, path: Path, sign: signal.Signals) -> None:
    """Start a build and end it while podman is at work; nothing of it works on, and nothing stays mounted."""
    build = camp.start("build_image", "--container", path)
    camp.wait_for(".castra/images/*/context/playbook.json", 120)
    build.send_signal(sign)
    build.communicate(timeout=60)
    assert build.returncode != 0
    assert camp.processes(10) == []
    assert mounts(camp) == []


@pytest.fixture
def short() -> Any:
    """A folder whose name podman can bear."""
    place = Path(f"/tmp/castra-{os.getpid()}")
    place.mkdir()
    yield place
    shutil.rmtree(place)


def test_a_container_is_built_after_a_kill_then_found_and_pushed_where_it_is_missing(camp: Camp, short: Path) -> None:
    words = ("--container", flavour(camp, "once"))
    ended(camp, flavour(camp, "once"), signal.SIGKILL)  # what it left, the next build removes
    with Watch(TOKEN, camp) as watch:
        code, told = camp.run("build_image", *words)
    assert code == 0, told
    reference = told.splitlines()[-1]
    tag = reference.rpartition(":")[2]
    assert watch.seen <= {"login.json"}, "podman keeps the password while the build lasts, and nobody else does"
    assert TOKEN not in told
    kept = [path for path in camp.folder.rglob("*") if path.is_file() and "emulator-" not in str(path)]
    assert [path for path in kept if TOKEN.encode() in path.read_bytes()] == []
    (image,) = ecr(camp).describe_images(repositoryName="castra/once", imageIds=[{"imageTag": tag}])["imageDetails"]
    (made,) = ecr(camp).describe_repositories(repositoryNames=["castra/once"])["repositories"]
    assert image["imageDigest"].startswith("sha256:")
    assert made["imageTagMutability"] == "IMMUTABLE"
    assert list(camp.folder.glob(".castra/images/*")) == []
    assert mounts(camp) == []

    begun = time.monotonic()
    code, told = camp.run("build_image", *words)
    assert (code, told.splitlines()[-1]) == (0, reference), "found, not built again"
    assert "watch:" not in told, f"nor was Prefect needed, in {time.monotonic() - begun} s"
    code, told = camp.run("build_image", *words, "--region", "us-east-1", "--region", "us-west-2")
    assert code == 0, told
    assert told.splitlines()[-1] == f"{reference}, {reference}", "the emulator has one registry for all regions"

    run = pull(camp, reference, short)
    said = subprocess.run(
        [
            *run,
            reference,
            "sh",
            "-c",
            "echo $GREETING; cat /etc/castra/image.json; ls /run/castra /opt /run/certificates",
        ],
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    facts = json.loads(said.partition("\n")[2].rpartition("}")[0] + "}")
    assert said.startswith("hello")
    assert (facts["flavour"], facts["kind"]) == ("once", "container")
    assert "ansible" not in said, "what baked it is not in it"


def test_a_role_that_fails_is_named_and_nothing_is_pushed(camp: Camp) -> None:
    code, told = camp.run("build_image", "--container", flavour(camp, "broken", "verify_roles: missing"))
    assert code == 1
    assert "of role verify failed on the container" in told
    assert "fix ansible/roles/verify, then run again" in told
    assert "Traceback" not in told
    assert "castra/broken" not in [row["repositoryName"] for row in ecr(camp).describe_repositories()["repositories"]]
    assert list(camp.folder.glob(".castra/images/*")) == []


def test_a_build_that_is_cancelled_leaves_nothing(camp: Camp) -> None:
    ended(camp, flavour(camp, "cancelled"), signal.SIGTERM)
    assert list(camp.folder.glob(".castra/images/*")) == []


def test_a_mistake_is_one_sentence(camp: Camp) -> None:
    code, told = camp.run("build_image", "--container", "loca")
    sentence = "there is no container 'loca' among gpu, local, and no such file; did you mean 'local'?"
    assert (code, sentence in told.replace("\n", " ")) == (2, True), told
    camp.env["PATH"] = str(Path(sys.executable).parent)
    code, told = camp.run("build_image", "--container", "local")
    sentence = "podman is not on PATH, and a container is built with it: apt-get install podman"
    assert (code, sentence in told.replace("\n", " ")) == (2, True), told


@pytest.mark.torch
def test_programs_of_training_run_in_the_container_that_was_built(
    camp: Camp, sky: tuple[Emulator, dict[str, str]], short: Path
) -> None:
    """The whole chain with the real flavour: roles, locked packages, a push, a pull, data, two ranks of DeepSpeed."""
    build = camp.start("build_image", "--container", "local")
    told, _ = build.communicate(timeout=800)
    assert build.returncode == 0, told
    reference = told.splitlines()[-1]
    code = Path(__file__).parents[2] / "training"
    run = [*pull(camp, reference, short), f"--volume={code}:/code/training:ro", "--env=PYTHONPATH=/code"]
    run += ["--env=OMP_NUM_THREADS=1", reference]
    spec = Recipe(**SPEC).model_dump(mode="json")
    for name, program, inputs in (
        ("data", ["python", "-m", "training.data.prepare"], {}),
        ("model", ["torchrun", "--nproc-per-node=2", "-m", "training.run"], {"dataset": str(camp.folder / "data")}),
    ):
        job = camp.folder / f"{name}.json"
        job.write_text(json.dumps({"spec": spec, "inputs": inputs, "output": str(camp.folder / name)}))
        done = subprocess.run([*run, *program, str(job)], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((camp.folder / "model" / "result.json").read_text())
    assert (result["world_size"], result["strategy"], result["steps"]) == (2, "zero1", 6)
    assert alive(camp.mark) == []
