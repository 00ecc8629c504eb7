"""An upstream's argument parser as data: what an extracting script writes, and what our tests parse commands with."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

UPSTREAM = Path(__file__).parent / "upstream"
TYPES = {"int": int, "float": float, "str": str}


class Refused(Exception):
    """An upstream's parser does not take an argument."""


class Strict(argparse.ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise Refused(message)


def rows(parser: argparse.ArgumentParser) -> list[dict[str, Any]]:
    """A parser's options as data: names, kind, type, choices and number of values."""
    told = []
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            kind = re.sub(r"(?<!^)(?=[A-Z])", "_", type(action).__name__.strip("_").removesuffix("Action")).lower()
            row = {
                "names": list(action.option_strings),
                "dest": action.dest,
                "kind": kind,
                "type": getattr(action.type, "__name__", None),
                "choices": None
                if action.choices is None
                else [str(getattr(one, "name", one)) for one in action.choices],
                "nargs": action.nargs,
                "required": action.required,
            }
            told.append({name: value for name, value in row.items() if value not in (None, False)})
    return told


def write(path: Path, upstream: dict[str, str], options: list[dict[str, Any]]) -> None:
    """Write the table, an option a line."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in options)
    path.write_text(f'{{\n "upstream": {json.dumps(upstream)},\n "options": [\n{lines}\n ]\n}}\n')


def parser(name: str) -> Strict:
    """The parser whose table is upstream/<name>.json."""
    made = Strict(allow_abbrev=False, add_help=False, exit_on_error=False)
    for row in json.loads((UPSTREAM / f"{name}.json").read_text())["options"]:
        _add(made, row)
    return made


def parse(name: str, words: Sequence[str]) -> dict[str, Any]:
    """What an upstream's parser makes of words; raises `Refused` where it would end with an error."""
    try:
        return vars(parser(name).parse_args(list(words)))
    except argparse.ArgumentError as error:
        raise Refused(str(error)) from None


def _add(made: Strict, row: dict[str, Any]) -> None:
    kind = row["kind"]
    told: dict[str, Any] = {"dest": row["dest"], "required": row.get("required", False)}
    if kind in ("store_true", "store_false", "boolean_optional"):
        # its names are all there already, the negative ones too
        action: Any = argparse.BooleanOptionalAction if kind == "boolean_optional" else kind
        names = [name for name in row["names"] if kind != "boolean_optional" or not name.startswith("--no-")]
        made.add_argument(*names, action=action, **told)
        return
    if kind in ("store_const", "append_const"):
        made.add_argument(*row["names"], action=kind, const=True, **told)
        return
    convert = TYPES.get(row.get("type", "str"), str)
    choices = [convert(one) for one in row["choices"]] if "choices" in row else None
    action = "append" if kind == "append" else "store"
    made.add_argument(*row["names"], action=action, type=convert, choices=choices, nargs=row.get("nargs"), **told)
