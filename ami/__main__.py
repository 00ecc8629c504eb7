"""Say what images are made of: `python -m ami` prints roles and flavours as a table, `python -m ami local` one of them.

    install   made so, then proven        assert   proven to be on the base image        –   not for this flavour

An asterisk is behind what runs for real in the tests; the rest is linted and loaded, for nothing here could run it.
"""

import sys

import yaml

from ami import container, flavour, versions
from ami.base import ImageError
from ami.flavour import ROLES, Made

REAL = "local"
"""What is baked in the tests, as a machine and as a container."""


def table() -> str:
    """Roles by flavours, as Markdown; containers behind machines."""
    kinds: dict[str, Made] = {name: flavour.load(name) for name in flavour.names()}
    kinds |= {f"container {name}": container.load(name) for name in container.names()}
    rows = [["role", *kinds], ["---"] * (len(kinds) + 1)]
    rows += [[role, *(_cell(kind, role) for kind in kinds.values())] for role in ROLES]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _cell(kind: Made, role: str) -> str:
    return kind.roles.get(role, "–") + ("*" if kind.name == REAL and role in kind.roles else "")


def main(argv: list[str]) -> int:
    """Print what is asked for; 2 if there is no such flavour."""
    try:
        print(_details(argv[0]) if argv else table(), end="")
    except ImageError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _details(name: str) -> str:
    kind = flavour.load(name)
    pins = {role: {one: pin.version for one, pin in found.items()} for role, found in versions.used(kind).items()}
    return str(yaml.safe_dump({**kind.model_dump(mode="json"), "versions": pins}, sort_keys=False))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
