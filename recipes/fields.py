"""Every field of a recipe as data: where it is, what it takes, and whether it changes a result or only how a run goes.

All of it is read from the models in `recipes.spec`, so that errors, reference, editor schema and fingerprints agree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from recipes.spec import Recipe

EXECUTION = "Execution. "
"""A description that opens with this marks a field, or a whole section, that never enters a fingerprint."""

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One field a person can write in a recipe."""

    path: tuple[str, ...]
    """("train", "steps")."""
    schema: Schema
    """Its JSON schema."""
    execution: bool
    """Whether it, or the section it is in, is marked as execution."""
    kinds: tuple[str, ...] = ()
    """The kinds of cluster that have it; empty outside of `cluster`."""

    @property
    def name(self) -> str:
        """As people write it: train.steps."""
        return ".".join(self.path)

    @property
    def description(self) -> str:
        """What it means, without the mark."""
        return str(self.schema.get("description", "")).removeprefix(EXECUTION)


@dataclass(frozen=True, slots=True)
class Section:
    """A named group of fields."""

    name: str
    schema: Schema
    execution: bool
    kinds: tuple[str, ...] = ()


@cache
def schema() -> dict[str, Any]:
    """The JSON schema pydantic derives from `Recipe`."""
    return Recipe.model_json_schema()


@cache
def sections() -> tuple[Section, ...]:
    """The sections in the order of the spec; a cluster is one section per kind."""
    return tuple(_sections())


@cache
def fields() -> tuple[Field, ...]:
    """All fields in the order of the spec: those of the recipe itself first, then section by section."""
    leaves = [
        Field((name,), leaf, _execution(leaf))
        for name, leaf in schema()["properties"].items()
        if "$ref" not in leaf and "oneOf" not in leaf
    ]
    for section in sections():
        for name, leaf in section.schema["properties"].items():
            leaves.append(Field((section.name, name), leaf, section.execution or _execution(leaf), section.kinds))
    return tuple(leaves)


def find(path: tuple[str, ...], kind: str = "") -> Field | None:
    """The field at `path`, where `kind` says which kind of cluster is meant; None where there is none."""
    return next((field for field in fields() if field.path == path and _belongs(field, kind)), None)


def names(section: tuple[str, ...], kind: str = "") -> list[str]:
    """What may be written in a section; with the empty path, at the top of a recipe."""
    if not section:
        return list(schema()["properties"])
    return [field.path[-1] for field in fields() if field.path[:-1] == section and _belongs(field, kind)]


def choices(leaf: Schema) -> list[str]:
    """The words a field can be set to, where it can be set to words only from a list."""
    found = [str(leaf["const"])] if "const" in leaf else [str(choice) for choice in leaf.get("enum", ())]
    for option in leaf.get("anyOf", ()):
        found += choices(option)
    return found


def bounds(leaf: Schema) -> str:
    """The limits of a number, in words: "at least 1", "above 0 and below 0.5"; empty where there are none."""
    whole = leaf.get("type") == "integer"
    low, high = leaf.get("minimum"), leaf.get("maximum")
    above, below = leaf.get("exclusiveMinimum"), leaf.get("exclusiveMaximum")
    if whole and above is not None:
        low, above = max(above + 1, above + 1 if low is None else low), None
    told = (("at least", low), ("above", above), ("at most", high), ("below", below))
    here = " and ".join(f"{word} {limit:g}" for word, limit in told if limit is not None)
    return here or next(filter(None, map(bounds, leaf.get("anyOf", ()))), "")


def takes(leaf: Schema) -> str:
    """What a field can be set to, in words: "a whole number, at least 1, or auto"."""
    if "anyOf" in leaf:
        return ", or ".join(takes(option) for option in leaf["anyOf"])
    if listed := choices(leaf):
        return ", ".join(listed)
    plain = {
        "integer": "a whole number",
        "number": "a number",
        "string": "text",
        "boolean": "true or false",
        "null": "empty",
        "array": "a list",
    }[leaf["type"]]
    if leaf["type"] == "array":
        inside = choices(leaf["items"])
        least = ", at least one" if leaf.get("minItems") else ""
        return f"{plain} of {', '.join(inside) if inside else takes(leaf['items'])}{least}"
    limits = bounds(leaf)
    return f"{plain}, {limits}" if limits else plain


def _sections() -> Iterator[Section]:
    defined = schema()["$defs"]
    for name, leaf in schema()["properties"].items():
        if "$ref" in leaf:
            yield Section(name, defined[_target(leaf["$ref"])], _execution(leaf))
        elif "oneOf" in leaf:
            for option in leaf["oneOf"]:
                cluster = defined[_target(option["$ref"])]
                yield Section(name, cluster, _execution(leaf), (cluster["properties"]["kind"]["const"],))


def _belongs(field: Field, kind: str) -> bool:
    return not kind or not field.kinds or kind in field.kinds


def _execution(leaf: Schema) -> bool:
    return str(leaf.get("description", "")).startswith(EXECUTION)


def _target(reference: str) -> str:
    return reference.rpartition("/")[2]
