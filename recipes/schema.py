"""Writes what is derived from the spec: schema.json for editors and docs/recipe.md for people.

`python -m recipes.schema` writes both; a test asserts that the files in the repository are current.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import groupby
from pathlib import Path
from typing import Any

from recipes import fields

SCHEMA = Path(__file__).with_name("schema.json")
REFERENCE = Path(__file__).parent.parent / "docs" / "recipe.md"

_OPENING = """\
# The recipe

<!-- Written by `python -m recipes.schema` from recipes/spec.py and what it imports: change these, not this file. -->

A recipe is one YAML file that says everything a run needs to know. Every field has a default, and the defaults together
are the miniature, which runs on one machine in minutes: `name: my-model` alone is a whole recipe. The gallery is in
[recipes/](../recipes/README.md).

Every command that takes a recipe takes `--set section.field=value` too, as often as wanted, which lays a value over the
file: `--set train.steps=200`. What is wrong with a recipe is said in one sentence per mistake, with the line.

A field marked **execution** changes how a run goes and never what comes out of it. All others are the identity of a
result: change one, and the steps that depend on it run again; change none, and they are found done.
"""


def editor_schema() -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of a recipe file, also of what only YAML allows: `parallel: auto`."""
    schema = deepcopy(fields.schema())
    for part in schema["$defs"].values():
        if "const" in part["properties"].get("kind", {}):
            part["required"] = ["kind"]
    parallel = schema["properties"]["parallel"]
    parallel["anyOf"] = [{"$ref": parallel.pop("$ref")}, {"const": "auto"}]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def reference() -> str:
    """The reference of all fields, as Markdown."""
    top = [field for field in fields.fields() if len(field.path) == 1]
    return "\n".join([_OPENING, "## The recipe itself\n", *_table(top), *_sections()])


def write() -> list[Path]:
    """Write both files; returns them."""
    REFERENCE.parent.mkdir(exist_ok=True)
    REFERENCE.write_text(reference(), encoding="utf-8")
    SCHEMA.write_text(json.dumps(editor_schema(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return [SCHEMA, REFERENCE]


def _sections() -> Iterator[str]:
    inside = [field for field in fields.fields() if len(field.path) == 2]
    for name, group in groupby(inside, key=lambda field: field.path[0]):
        mine = [section for section in fields.sections() if section.name == name]
        yield f"## {name}\n"
        if mine[0].kinds:
            yield from _variants(mine)
        else:
            yield f"{mine[0].schema['description']}\n"
            yield from _table(list(group))


def _variants(variants: list[fields.Section]) -> Iterator[str]:
    """A section that is one of several kinds: which there are, then each field with the kinds that have it."""
    yield "Where the jobs run (**execution**, all of it). `kind` says which of these it is:\n"
    yield from (f"- `{variant.kinds[0]}`: {variant.schema['description']}" for variant in variants)
    yield ""
    shared = [field for field in fields.fields() if field.path[0] == variants[0].name and field.path[1] != "kind"]
    yield from _table(_merged(shared))


def _merged(variants: list[fields.Field]) -> list[fields.Field]:
    """One entry for a field that several kinds share word by word."""
    merged: list[fields.Field] = []
    for field in variants:
        same = next((other for other in merged if (other.path, other.schema) == (field.path, field.schema)), None)
        if same is None:
            merged.append(field)
        else:
            merged[merged.index(same)] = fields.Field(
                field.path, field.schema, field.execution, same.kinds + field.kinds
            )
    return merged


def _table(rows: list[fields.Field]) -> list[str]:
    lines = ["| field | takes | default | what it means |", "|---|---|---|---|"]
    for field in rows:
        cells = (f"`{field.name}`", fields.takes(field.schema), _default(field.schema["default"]), _meaning(field))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


def _default(value: object) -> str:
    return "empty" if value in (None, "") else f"`{json.dumps(value)}`" if not isinstance(value, str) else f"`{value}`"


def _meaning(field: fields.Field) -> str:
    told = field.description
    if examples := field.schema.get("examples"):
        told += " Example: " + ", ".join(_default(example) for example in examples) + "."
    if field.kinds:
        return f"{', '.join(field.kinds)}: {told}"
    return f"**Execution.** {told}" if field.execution else told


if __name__ == "__main__":
    for path in write():
        print(f"wrote {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
