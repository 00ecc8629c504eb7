"""What goes together and what does not, `compatibility.yaml`: checked before anything is launched."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from pydantic import Field

from ami import versions
from ami.base import ImageError
from ami.flavour import Made
from recipes.part import Part

RULES = Path(__file__).with_name("compatibility.yaml")


class Rule(Part):
    """Where all of `when` holds, all of `needs` must: words, or versions as in '>=580'."""

    when: dict[str, str]
    needs: dict[str, str]
    because: str
    fix: str
    source: str = Field(description="Who says so.")


@cache
def rules() -> tuple[Rule, ...]:
    """The table."""
    return tuple(Rule(**row) for row in yaml.safe_load(RULES.read_text()))


def facts(flavour: Made) -> dict[str, str]:
    """What an image of the flavour is made of: `role.name` → version; its system, its kernel, its ParallelCluster."""
    pins = versions.used(flavour).items()
    found = {f"{role}.{name}": pin.version for role, pins_of in pins for name, pin in pins_of.items()}
    manager = {name.partition(":")[0]: value for name, value in flavour.tags.items() if name.endswith(":version")}
    return found | manager | {"os": flavour.os} | ({"kernel": flavour.kernel} if flavour.kernel else {})


def check(flavour: Made) -> None:
    """Raise `ImageError` for the first rule that the flavour breaks, with the fix."""
    for problem in problems(facts(flavour)):
        raise ImageError(f"flavour {flavour.name}: {problem}")


def problems(made_of: Mapping[str, str]) -> Iterator[str]:
    """A sentence for every rule that is broken. A rule about something that is not there does not apply."""
    for rule in rules():
        if not all(name in made_of for name in {*rule.when, *rule.needs}):
            continue
        if all(_holds(made_of[name], wanted) for name, wanted in rule.when.items()):
            for name, wanted in rule.needs.items():
                if not _holds(made_of[name], wanted):
                    here = ", ".join(f"{one} {made_of[one]}" for one in rule.when)
                    yield f"{here} needs {name} {wanted}, not {made_of[name]} ({rule.because}): {rule.fix}"


def _holds(value: str, wanted: str) -> bool:
    if not wanted.startswith(("<", ">", "=", "!", "~")):
        return value in wanted.split("|")
    return Version(value) in SpecifierSet(wanted)
