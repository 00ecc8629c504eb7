"""What pip installs into a container, from `uv.lock`: each package at its locked version, with its files' hashes."""

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from packaging.markers import Marker, default_environment

from ami.base import ImageError
from ami.flavour import OS

LOCK = Path(__file__).parents[1] / "uv.lock"
PYTHON: Mapping[OS, str] = {"debian-12": "3.11", "ubuntu-24.04": "3.12"}
"""The version that a system has."""
CUDA = ("cuda-", "nvidia-", "triton")
"""How the packages begin that torch's build for GPUs alone needs."""
Package = Mapping[str, Any]


def locked(os: OS, names: Iterable[str], *, cpu: bool = False) -> tuple[str, str]:
    """Requirements files of the packages and of all that they need: those that have wheels, and those to be built.

    A name is a package's, or one of our extras as `castra[train]`. With `cpu`, torch itself and what only its build for
    GPUs needs are left out. Raises `ImageError` for what is not in the lock.
    """
    found: dict[str, Package] = {}
    for name in names:
        _follow(name, found, _environment(os), cpu=cpu)
    rows = [row for name, row in sorted(found.items()) if name != "castra"]
    return "".join(_lines(row for row in rows if row.get("wheels"))), "".join(
        _lines(row for row in rows if not row.get("wheels"))
    )


@cache
def _lock() -> Mapping[str, list[Package]]:
    rows: dict[str, list[Package]] = {}
    for row in tomllib.loads(LOCK.read_text())["package"]:
        rows.setdefault(row["name"], []).append(row)
    return rows


def _environment(os: OS) -> dict[str, str]:
    here = {name: str(value) for name, value in default_environment().items()}
    python = {"python_version": PYTHON[os], "python_full_version": f"{PYTHON[os]}.0"}
    linux = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    cpython = {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    return here | python | linux | cpython


def _follow(asked: str, found: dict[str, Package], environment: dict[str, str], *, cpu: bool) -> None:
    """Take a package and all that it needs."""
    name, _, extra = asked.rstrip("]").partition("[")
    if cpu and name.startswith(CUDA):
        return
    row = _version(name, environment)
    known = name in found
    if not (cpu and name == "torch"):
        found[name] = row
    needs = list(row.get("dependencies", [])) if name != "castra" and not (known and not extra) else []
    needs += row.get("optional-dependencies", {}).get(extra, [])
    for need in needs:
        if "marker" in need and not Marker(need["marker"]).evaluate(environment):
            continue
        for more in need.get("extra", [""]):
            _follow(f"{need['name']}[{more}]" if more else need["name"], found, environment, cpu=cpu)


def _version(name: str, environment: dict[str, str]) -> Package:
    """The row of a package that is meant for that Python."""
    for row in _lock().get(name, []):
        markers = row.get("resolution-markers", [])
        if not markers or any(Marker(one).evaluate(environment) for one in markers):
            return row
    raise ImageError(f"{name} is not in {LOCK}: lock it first (uv lock)")


def _lines(rows: Iterable[Package]) -> Iterator[str]:
    for row in rows:
        files = [*row.get("wheels", []), *([row["sdist"]] if "sdist" in row else [])]
        hashes = "".join(f" \\\n  --hash={file['hash']}" for file in files)
        yield f"{row['name']}=={row['version']}{hashes}\n"
