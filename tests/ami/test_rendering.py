"""What roles that cannot run here would ask for, rendered with the facts of the systems that they are for."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from ami import container, flavour, packer, stage, versions
from ami.flavour import Made

UBUNTU = {"os_family": "Debian", "distribution_release": "noble", "kernel": "6.8.0-1040-aws", "processor_vcpus": 4}
AMAZON = {"os_family": "RedHat", "distribution_release": "NA", "kernel": "6.12.55-74.119.amzn2023.x86_64"}
PYTHON = {"ansible_python_interpreter": sys.executable}
CUDA = "https://developer.download.nvidia.com/compute/cuda/repos"
Rows = dict[str, tuple[str, Any]]
"""By role, file and task: which of its arguments, and what that should be."""
EXPECTED: dict[str, Rows] = {
    "base-gpu": {"nccl/install.yml/Build the tests": ("cmd", "make --jobs 4 MPI=1")},
    "pcluster-gpu": {
        "nccl/install.yml/Install NCCL": ("name", ["libnccl2=2.30.4-1+cuda*", "libnccl-dev=2.30.4-1+cuda*"]),
        "container_engine/install.yml/Install Docker": (
            "name",
            ["docker-ce=5:29.8.1-*", "docker-ce-cli=5:29.8.1-*", "containerd.io=2.2.6-*"],
        ),
        "nvidia_container_toolkit/install.yml/Install the toolkit": ("name", "nvidia-container-toolkit=1.20.1-*"),
        "observability/dcgm.yml/Install DCGM": ("name", "datacenter-gpu-manager-4-cuda13=1:4.7.0-*"),
        "observability/dcgm.yml/Install DCGM's exporter": ("name", "datacenter-gpu-manager-exporter=4.9.0-*"),
        "signed_repository/main.yml/Know the repository": (
            "content",
            f"deb [signed-by=/etc/apt/keyrings/cuda.asc] {CUDA}/ubuntu2404/x86_64/ /",
        ),
    },
    "batch-ecs-gpu": {
        "observability/dcgm.yml/Install DCGM": ("name", "datacenter-gpu-manager-4-cuda13-4.7.0-*"),
        "observability/dcgm.yml/Install DCGM's exporter": ("name", "datacenter-gpu-manager-exporter-4.9.0-*"),
        "efa/vendor.yml/Run the installer": ("cmd", "./efa_installer.sh --yes --skip-limit-conf --minimal"),
        "signed_repository/main.yml/Know the repository of RPMs": ("baseurl", f"{CUDA}/amzn2023/x86_64/"),
    },
    "container gpu": {
        "efa/vendor.yml/Run the installer": (
            "cmd",
            "./efa_installer.sh --yes --skip-limit-conf  --skip-kmod --no-verify",
        ),
        "nccl/install.yml/Install NCCL": ("name", ["libnccl2=2.30.4-1+cuda*", "libnccl-dev=2.30.4-1+cuda*"]),
        "packages/install.yml/Install packages": (
            "name",
            ["ca-certificates", "curl", "git", "gnupg", "jq", "numactl", "pciutils", "python3-venv", "rsync"],
        ),
        "training/install.yml/Make the environment": ("cmd", "python3 -m venv /opt/castra"),
    },
    "pcluster-neuron": {
        "neuron/install.yml/Install the driver, the runtime and the tools": (
            "name",
            [f"aws-neuronx-{name}=2.*" for name in ("collectives", "dkms", "runtime-lib", "tools")],
        ),
        "neuron/install.yml/Install the headers of the kernel, for the driver": (
            "name",
            "linux-headers-6.8.0-1040-aws",
        ),
    },
}


def tasks(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Tasks by name, those of blocks too."""
    named = {task["name"]: task for task in found}
    for task in found:
        named |= tasks(task.get("block", []))
    return named


def asked(where: str, key: str) -> Any:
    """What a task's module is given under a key, unrendered."""
    role, file, name = where.split("/")
    task = tasks(yaml.safe_load((stage.ANSIBLE / "roles" / role / "tasks" / file).read_text()))[name]
    (module,) = (value for word, value in task.items() if word.startswith("ansible.builtin."))
    return module[key], task.get("vars", {})


@pytest.mark.parametrize("name", EXPECTED)
def test_packages_and_repositories_are_named_as_their_owners_name_them(name: str, tmp_path: Path) -> None:
    contained = name.startswith("container ")
    kind: Made = container.load(name.partition(" ")[2]) if contained else flavour.load(name)
    rows = [(where, *told) for where, told in EXPECTED[name].items()]
    pin = {"signed_repository_name": "cuda", "signed_repository_pin": "{{ versions.observability.dcgm }}"}
    told: dict[str, Any] = {"versions": versions.told(kind), "image_os": kind.os, "image_roles": kind.roles}
    told["image_kind"] = "container" if contained else "machine"
    defaults = [
        str(path) for role in {where.split("/")[0] for where, *_ in rows}
        if (path := stage.ANSIBLE / "roles" / role / "defaults" / "main.yml").exists()
    ]  # fmt: skip
    shown = [
        {"ansible.builtin.copy": {"dest": f"{tmp_path}/{number}", "content": {"is": value}}, "vars": more}
        for number, (value, more) in enumerate(asked(where, key) for where, key, _ in rows)
    ]
    facts = UBUNTU if kind.os == "ubuntu-24.04" else AMAZON
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars_files": defaults, "tasks": shown}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    (tmp_path / "told.json").write_text(json.dumps({**told, **pin, "ansible_facts": facts, **kind.variables, **PYTHON}))
    (tmp_path / "tmp").mkdir()
    words = [str(Path(sys.executable).with_name("ansible-playbook")), "-i", "localhost,", "-e"]
    env = os.environ | packer.environment(tmp_path)
    done = subprocess.run(
        [*words, f"@{tmp_path}/told.json", str(tmp_path / "play.yml")],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for number, (where, _, wanted) in enumerate(rows):
        got = json.loads((tmp_path / str(number)).read_text())["is"]
        assert (got.strip() if isinstance(got, str) else got) == wanted, where
