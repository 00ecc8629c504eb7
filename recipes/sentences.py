"""What pydantic found wrong with a recipe, in our own sentences: field, value, what is allowed, the nearest name."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import groupby
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from recipes.fields import bounds, choices, fields, find, names, takes
from recipes.reading import Path, dotted

_NOT = {
    "int": "is not a whole number",
    "float": "is not a number",
    "string": "is not text; put it in quotes",
    "bool": "is neither true nor false",
    "tuple": "is not a list; write it as [one, two]",
}
_BOUNDS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal", "number"}


class Mistake(NamedTuple):
    """One mistake: the path in the values as written, and the sentence."""

    path: Path
    sentence: str


def mistakes(wrong: ValidationError, values: Any) -> Iterator[Mistake]:
    """Every mistake pydantic found in `values`, each field once."""
    found = sorted(((_written(error["loc"], values), error) for error in wrong.errors()), key=lambda pair: str(pair[0]))
    for path, group in groupby(found, key=lambda pair: pair[0]):
        errors = [error for _, error in group]
        for sentence in _sentences(path, errors, values):
            yield Mistake(path, sentence)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'steps'?` where something known is near, else nothing."""
    near = get_close_matches(str(word).lower()[:60], list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: object) -> str:
    """A value as it fits into a sentence."""
    match value:
        case None:
            return "empty"
        case bool():
            return str(value).lower()
        case dict():
            return "a mapping"
        case list() | tuple():
            return "a list"
        case int() if abs(value) >= 10**20:
            return "a number of more than 20 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}…{text[0]}"


def _written(location: tuple[int | str, ...], values: Any) -> Path:
    """Pydantic's location without what nobody wrote: the kind of cluster, and the branch of a union."""
    path: Path = ()
    steps = location[:1] + location[2:] if location[:1] == ("cluster",) else location
    for step in steps:
        if isinstance(values, dict) and (step in values or not path):
            values = values.get(step)
        elif isinstance(values, list | tuple) and isinstance(step, int) and step < len(values):
            values = values[step]
        else:
            break
        path = (*path, step)
    return path


def _sentences(path: Path, errors: list[ErrorDetails], values: Any) -> list[str]:
    error = errors[0]
    kind = error["type"]
    if kind == "value_error":
        section = f"in {dotted(path)}, " if path else ""
        return [section + told for told in str(error["ctx"]["error"]).splitlines()]
    if kind.startswith("union_tag"):
        return [_no_such_kind(values.get("cluster"))]
    if kind in ("extra_forbidden", "invalid_key"):
        return [_no_such_field(path, values)]
    if len(path) <= 1 and kind.startswith(("model", "dict", "dataclass")):
        return [_no_section(path, error["input"])]
    return [_bad_value(path, errors, values)]


def _no_such_kind(cluster: Any) -> str:
    kinds = [kind for field in fields() if field.name == "cluster.kind" for kind in field.kinds]
    if not isinstance(cluster, dict):
        return _no_section(("cluster",), cluster)
    allowed = f"allowed: {', '.join(kinds)}"
    if "kind" not in cluster:
        return f"cluster.kind is missing; {allowed}"
    return f"cluster.kind is {shown(cluster['kind'])}; {allowed}{did_you_mean(cluster['kind'], kinds)}"


def _no_such_field(path: Path, values: Any) -> str:
    section, name = tuple(map(str, path[:-1])), str(path[-1])
    kind = _kind(values) if section == ("cluster",) else ""
    known = names(section, kind)
    where = f"a cluster of kind {kind}" if kind else ".".join(section) or "the recipe itself"
    elsewhere = [field for field in fields() if field.path[-1] == name]
    kinds = [kind for field in elsewhere if field.path[:-1] == section for kind in field.kinds]
    if kinds:
        more = f"; clusters of kind {', '.join(kinds)} have it"
    elif elsewhere:
        more = f"; did you mean {elsewhere[0].name!r}?"
    else:
        more = did_you_mean(name, known) or f"; its fields are {', '.join(known)}"
    return f"{dotted(path)} is not a field of {where}{more}"


def _no_section(path: Path, value: Any) -> str:
    if not path:
        return f"a recipe is a mapping of fields (name: …, train: …), this is {shown(value)}"
    within = ", ".join(names(tuple(map(str, path)))[:3])
    return f"{dotted(path)} is {shown(value)}, but it is a section: write its fields ({within}, …) below it, indented"


def _bad_value(path: Path, errors: list[ErrorDetails], values: Any) -> str:
    """A value of the wrong type, outside of its bounds, or not among those allowed."""
    value, leaf = errors[0]["input"], _leaf(path, values)
    # Several errors for one value are the branches of a union, of which none took it.
    kind = "none_of" if len(errors) > 1 else errors[0]["type"].removeprefix("finite_")
    if value is None:
        clause = f"empty; it takes {takes(leaf)}"
    elif kind == "literal_error":
        clause = f"{shown(value)}; allowed: {', '.join(choices(leaf))}{did_you_mean(value, choices(leaf))}"
    elif kind in _BOUNDS and bounds(leaf):
        clause = f"{shown(value)}, it must be {bounds(leaf)}"
    elif kind == "string_pattern_mismatch":
        clause = f"{shown(value)}, which does not fit; it takes {_form(leaf)}"
    elif kind == "too_short":
        clause = "empty, it needs at least one entry"
    elif (plain := kind.partition("_")[0]) in _NOT:
        clause = f"{shown(value)}, which {_NOT[plain]}"
    else:
        clause = f"{shown(value)}, which does not fit; it takes {takes(leaf)}{did_you_mean(value, choices(leaf))}"
    return f"{dotted(path)} is {clause}"


def _leaf(path: Path, values: Any) -> dict[str, Any]:
    """The JSON schema of the field at `path`, or of the entries of a list."""
    field = find(tuple(part for part in path if isinstance(part, str)), _kind(values))
    leaf = dict(field.schema) if field else {}
    return leaf["items"] if isinstance(path[-1], int) and "items" in leaf else leaf


def _form(leaf: dict[str, Any]) -> str:
    """The form of a text, which its description gives after the last colon."""
    return str(leaf["description"]).rpartition(": ")[2].rstrip(".")


def _kind(values: Any) -> str:
    cluster = values.get("cluster") if isinstance(values, dict) else None
    kind = cluster.get("kind") if isinstance(cluster, dict) else None
    return kind if isinstance(kind, str) else ""
