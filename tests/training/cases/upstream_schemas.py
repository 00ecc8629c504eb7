"""An upstream's configuration as data: classes with their fields' types, read from its source without importing it.

An extracting script writes the table, and our tests hold a rendered configuration against it. Types are kept as they
are written there: `fits` reads numbers, texts, flags, lists, mappings, choices and unions; a function is told by name.
"""

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.training.cases.upstream_parsers import UPSTREAM, Refused

Classes = dict[str, dict[str, str]]
ANYTHING = ("Any", "object")
PLAIN = {"int": int, "str": str, "bool": bool, "dict": dict, "Dict": dict, "list": list, "List": list, "Path": str}


def classes(sources: Iterable[Path], wanted: Mapping[str, str]) -> Classes:
    """Fields of the wanted classes (name in the table → name in a source), with those they inherit.

    Later sources win over earlier ones; a class that is imported under another name is found by its own.
    """
    known: dict[str, ast.ClassDef] = {}
    alias: dict[str, str] = {}
    for source in sources:
        tree = ast.parse(source.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                alias |= {one.asname: one.name for one in node.names if one.asname}
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                known[f"{source}:{node.name}"] = known[node.name] = node
    return {name: _fields(known, alias, own) for name, own in wanted.items()}


def _fields(known: Mapping[str, ast.ClassDef], alias: Mapping[str, str], name: str) -> dict[str, str]:
    found: dict[str, str] = {}
    node = known[name]
    for base in node.bases:
        called = ast.unparse(base).split("[")[0].rpartition(".")[2]
        # a class may be named as the one it extends, which its module imports under another name
        original = alias.get(called, called)
        if others := [one for one in known if one.endswith(f":{original}") and known[one] is not node]:
            found |= _fields(known, alias, others[-1])
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            found[one.target.id] = ast.unparse(one.annotation)
    return found


def parameters(source: Path, name: str) -> dict[str, str]:
    """Parameters, with their types, of a function or of a class's __init__; **kwargs is a field named **."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.ClassDef) and node.name == name:
            made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
            return _parameters(made[0])
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _parameters(node)
    raise LookupError(f"{source} has no {name}")


def _parameters(function: ast.FunctionDef) -> dict[str, str]:
    told = [one for one in (*function.args.args, *function.args.kwonlyargs) if one.arg != "self"]
    found = {one.arg: ast.unparse(one.annotation) if one.annotation else "Any" for one in told}
    return found | ({"**": "Any"} if function.args.kwarg else {})


def options(source: Path, constants: Mapping[str, list[str]] | None = None) -> list[dict[str, Any]]:
    """Options of the parsers that a source makes, as `upstream_parsers.rows` has them; `constants` are its choices."""
    return [row for node in _calls(ast.parse(source.read_text())) if (row := _row(node, constants or {}))]


def _calls(tree: ast.Module) -> Iterator[ast.Call]:
    found = [one for one in ast.walk(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
    named = [one for one in found if isinstance(one.func, ast.Attribute) and one.func.attr == "add_argument"]
    yield from sorted(named, key=lambda one: one.lineno)


def _row(call: ast.Call, constants: Mapping[str, list[str]]) -> dict[str, Any] | None:
    names = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
    if not names or not names[0].startswith("-"):
        return None
    told = {one.arg: one.value for one in call.keywords if one.arg}
    action = ast.literal_eval(told["action"]) if "action" in told else "store"
    longest = next((one for one in names if one.startswith("--")), names[0]).lstrip("-").replace("-", "_")
    row: dict[str, Any] = {"names": names, "dest": ast.literal_eval(told["dest"]) if "dest" in told else longest,
                           "kind": action}  # fmt: skip
    if isinstance(told.get("type"), ast.Name):
        row["type"] = ast.unparse(told["type"])
    if "choices" in told:
        row["choices"] = _choices(told["choices"], constants)
    if "nargs" in told:
        row["nargs"] = ast.literal_eval(told["nargs"])
    if "required" in told and ast.literal_eval(told["required"]):
        row["required"] = True
    return row


def _choices(node: ast.expr, constants: Mapping[str, list[str]]) -> list[Any]:
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return list(ast.literal_eval(node))
    if isinstance(node, ast.BinOp):
        return _choices(node.left, constants) + _choices(node.right, constants)
    return list(constants.get(ast.unparse(node), []))


def write(name: str, upstream: Mapping[str, Any], **told: Any) -> None:
    """Write upstream/<name>.json: where it is from, and the tables."""
    (UPSTREAM / f"{name}.json").write_text(json.dumps({"upstream": upstream, **told}, indent=1) + "\n")


def read(name: str) -> dict[str, Any]:
    """The table upstream/<name>.json."""
    told: dict[str, Any] = json.loads((UPSTREAM / f"{name}.json").read_text())
    return told


def hold(config: Mapping[str, Any], schema: Classes, root: str, path: str = "") -> None:
    """Raise `Refused` for a key that a class of the table does not have, or a value that is not of its type."""
    known = schema[root]
    for name, value in config.items():
        where = f"{path}{name}"
        if name not in known:
            if "**" in known:
                continue
            raise Refused(f"{where} is no field of {root}")
        inner = [one for one in _names(known[name]) if one in schema]
        if inner and isinstance(value, Mapping):
            hold(value, schema, inner[0], f"{where}.")
        elif not fits(value, known[name]) and not (inner and value is None):
            raise Refused(f"{where} is {value!r}, and {root} wants {known[name]}")


def _names(annotation: str) -> list[str]:
    return [one.id for one in ast.walk(ast.parse(annotation, mode="eval")) if isinstance(one, ast.Name)]


def fits(value: Any, annotation: str) -> bool:
    """Whether a value of JSON is of an annotated type; a number without a point is a float too, a flag is no number."""
    return _fits(value, ast.parse(annotation, mode="eval").body)


def _fits(value: Any, kind: ast.expr) -> bool:
    if isinstance(kind, ast.Constant):
        return _fits(value, ast.parse(kind.value, mode="eval").body) if isinstance(kind.value, str) else value is None
    if isinstance(kind, ast.BinOp):
        return _fits(value, kind.left) or _fits(value, kind.right)
    if isinstance(kind, ast.Subscript):
        return _fits_subscript(value, kind)
    name = ast.unparse(kind).rpartition(".")[2]
    if name == "float":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if name == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    # a class of the upstream's own has no form here, but what is a mapping is held against its own table
    return isinstance(value, PLAIN[name]) if name in PLAIN else name in ANYTHING


def _fits_subscript(value: Any, kind: ast.Subscript) -> bool:
    name = ast.unparse(kind.value).rpartition(".")[2]
    inner = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
    if name in ("Optional", "Union"):
        return (name == "Optional" and value is None) or any(_fits(value, one) for one in inner)
    if name == "Literal":
        return value in [ast.literal_eval(one) for one in inner]
    if name in ("list", "List", "tuple", "Tuple"):
        return isinstance(value, list) and _fits_each(value, inner, as_many=name.lower() == "tuple")
    return isinstance(value, str if name == "Callable" else dict)


def _fits_each(values: list[Any], kinds: list[ast.expr], *, as_many: bool) -> bool:
    """Whether a list's values are of the types: one each of a tuple, all of one of a list, or of a tuple with dots."""
    if as_many and ast.unparse(kinds[-1]) != "...":
        return len(values) == len(kinds) and all(map(_fits, values, kinds))
    return all(_fits(one, kinds[0]) for one in values)
