"""Which software a node has, and whether it is the image's."""

import platform
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from training.checks.finding import Finding
from training.checks.machine import Machine

ABSENT: Final = "absent"
IMAGE: Final = "/etc/castra/image.json"
"""Written when the image was baked (ansible, role image_facts): flavour, roles, software."""
ONE: Final = (
    "kernel", "nvidia_driver", "cuda", "cudnn", "nccl", "torch_nccl", "efa_driver", "efa_installer", "libfabric",
    "aws_ofi_nccl", "torch", "deepspeed", "transformers", "python", "lustre_client", "slurm", "neuron_driver",
)  # fmt: skip
"""What all nodes of a job must have in one version: peers that differ hang, or fail when they first talk."""
CRITICAL: Final = ("kernel", "nvidia_driver", "cuda", "nccl", "efa_installer", "libfabric", "lustre_client", "slurm")
"""What nobody may have changed since the image was proven."""
OFI_PACKAGES: Final = ("libnccl-ofi-ngc", "libnccl-ofi", "libnccl-ofi-aws", "aws-ofi-nccl")


def versions(machine: Machine) -> dict[str, str]:
    """Every version, `ABSENT` for what is not there."""
    here = {name: find(machine) for name, find in SOURCES.items()}
    return {name: told or ABSENT for name, told in here.items()} | _python()


def image(machine: Machine) -> dict[str, Any]:
    """What the image says of itself, {} where it says nothing."""
    return machine.facts(IMAGE)


def against_image(here: dict[str, str], told: dict[str, Any]) -> list[Finding]:
    """Compare what both know, by name."""
    baked = told.get("software")
    if not isinstance(baked, dict):
        return []
    changed = [
        (name, str(was)) for name, was in sorted(baked.items()) if name in here and not alike(here[name], str(was))
    ]
    return [
        Finding(
            "refuse" if name in CRITICAL else "warn",
            f"{name} is {here[name]}, the image was proven with {was}",
            device=name,
            todo="boot a node from the image, or bake a new one",
        )
        for name, was in changed
    ]


def alike(one: str, other: str) -> bool:
    """Whether two versions are one, as far as the coarser of them says: 2.30.4 is 2.30.4-1, Debian 12 is Debian 12.11.

    "none" and `ABSENT` are one too.
    """
    parts = [_parts(version) for version in (one, other)]
    shorter, longer = sorted(parts, key=len)
    return longer[: len(shorter)] == shorter


def _parts(version: str) -> list[str]:
    word = version.strip().lower()
    return [ABSENT] if word in ("", "none", ABSENT) else re.findall(r"[a-z]+|\d+", word.removeprefix("v"))


def _python() -> dict[str, str]:
    """Versions of packages of the Python that trains, without importing them."""
    found = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers"):
        found[name] = _package(name)
    for name, package in (("torch_nccl", "nvidia-nccl-cu"), ("cudnn", "nvidia-cudnn-cu"), ("torch_cuda", "")):
        found[name] = _wheel(package) if package else _built_for(found["torch"])
    return found


def _package(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ABSENT


def _wheel(package: str) -> str:
    """The version of one of NVIDIA's wheels, which are named for a CUDA: nvidia-nccl-cu13."""
    return next((told for cuda in (14, 13, 12, 11) if (told := _package(f"{package}{cuda}")) != ABSENT), ABSENT)


def _built_for(torch: str) -> str:
    """The CUDA, or what else, that torch was built for: 2.13.0+cu130 tells."""
    return torch.partition("+")[2] or ABSENT


def _os(machine: Machine) -> str:
    lines = dict(line.partition("=")[::2] for line in machine.read("/etc/os-release").splitlines())
    name, number = (lines.get(key, "").strip('"') for key in ("NAME", "VERSION_ID"))
    return f"{name.partition(' ')[0]} {number}".strip()  # as Ansible writes it: Debian, not Debian GNU/Linux


def _kernel(machine: Machine) -> str:
    return machine.read("/proc/sys/kernel/osrelease")


def _module(name: str) -> Callable[[Machine], str]:
    """The version of a kernel's module: the one that is loaded, or the one that would be."""

    def find(machine: Machine) -> str:
        return (
            machine.read(f"/sys/module/{name}/version") or machine.text("modinfo", "--field", "version", name).strip()
        )

    return find


def _says(pattern: str, *commands: str) -> Callable[[Machine], str]:
    """What a pattern finds in the answer of the first tool that has one."""

    def find(machine: Machine) -> str:
        answers = (re.search(pattern, machine.text(*command.split())) for command in commands)
        return next((found[1] for found in answers if found), "")

    return find


def _cuda(machine: Machine) -> str:
    told = machine.facts("/usr/local/cuda/version.json").get("cuda", {}).get("version", "")
    return str(told) or _says(r"release ([0-9.]+)", "nvcc --version")(machine)


def _library(name: str) -> Callable[[Machine], str]:
    """The version that a shared library's file name ends with."""
    folders = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/cuda/lib64")

    def find(machine: Machine) -> str:
        names = [Path(file).name for folder in folders for file in machine.names(folder, f"{name}.so.*.*")]
        return next((file.partition(".so.")[2] for file in names), "")

    return find


def _efa_installer(machine: Machine) -> str:
    found = re.search(r"EFA installer version: (\S+)", machine.read("/opt/amazon/efa_installed_packages"))
    return found[1] if found else ""


def _ofi(machine: Machine) -> str:
    """aws-ofi-nccl is a package of its own, of one name or another."""
    found = re.search(
        r"(?:libnccl-ofi\w*|aws-ofi-nccl)[-_ ]v?(\d[\w.]*)", machine.read("/opt/amazon/efa_installed_packages")
    )
    if found:
        return found[1]
    for package in OFI_PACKAGES:
        told = machine.text("dpkg-query", "--show", "--showformat=${Version}", package) or machine.text(
            "rpm", "--query", "--queryformat=%{VERSION}", package
        )
        if told:
            return told.strip()
    return ""


SOURCES: Final[dict[str, Callable[[Machine], str]]] = {
    "os": _os,
    "kernel": _kernel,
    "nvidia_driver": _module("nvidia"),
    "cuda": _cuda,
    "nccl": _library("libnccl"),
    "efa_driver": _module("efa"),
    "efa_installer": _efa_installer,
    "libfabric": _says(r"libfabric: (\S+)", "fi_info --version"),
    "aws_ofi_nccl": _ofi,
    "gdrcopy": _module("gdrdrv"),
    "lustre_client": _module("lustre"),
    "neuron_driver": _module("neuron"),
    "slurm": _says(r"slurm\S* ([0-9.]+)", "slurmd -V", "sinfo --version"),
    "dcgm": _says(r"version: ([0-9.]+)", "dcgmi --version"),
    "openmpi": _says(r"v?([0-9]+\.[0-9.]+)", "ompi_info --version"),
}
