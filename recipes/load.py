"""Reads a recipe from a YAML file and the command line, and tells all mistakes at once, each with its line.

recipe = load("recipes/rehearsal.yaml", ["train.steps=200"])
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from recipes.fields import sections
from recipes.reading import MAX_BYTES, Draft, Place, Problem, Unreadable, read_text, read_value
from recipes.sentences import did_you_mean, mistakes, shown
from recipes.spec import Recipe

_SET_RANK = 10 * MAX_BYTES
"""Above every line: what the command line says is told after what the file says."""


class RecipeError(Exception):
    """A recipe cannot be used; `problems` holds one sentence per mistake."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = list(problems)


def load(source: str | Path | Mapping[str, Any], sets: Sequence[str] = ()) -> Recipe:
    """The recipe in a file (or in a mapping), with assignments such as `train.steps=200` laid over it.

    Raises RecipeError with every mistake found: in the file, in the assignments, and in what they make together.
    """
    try:
        draft = Draft("", deepcopy(dict(source))) if isinstance(source, Mapping) else _read(Path(source))
        _drop_empty_sections(draft)
        for number, assignment in enumerate(sets):
            _assign(draft, assignment, Place(_SET_RANK + number, f"--set {assignment}"))
    except Unreadable as error:
        raise RecipeError([str(error.problem)]) from None
    recipe = _check(draft)
    if recipe is None or draft.problems:
        raise RecipeError(list(dict.fromkeys(map(str, sorted(draft.problems)))))
    return recipe


def _check(draft: Draft) -> Recipe | None:
    try:
        return Recipe.model_validate(draft.values)
    except ValidationError as wrong:
        for mistake in mistakes(wrong, draft.values):
            draft.problems.append(Problem(_blame(draft, mistake.path), mistake.sentence))
        return None


def _blame(draft: Draft, path: tuple[str | int, ...]) -> Place:
    """Where a mistake was made: a section is spoilt by what the command line set in it, if it did."""
    inside = (place for at, place in draft.places.items() if at[: len(path)] == path and place.rank >= _SET_RANK)
    return max(inside, default=draft.place(path))


def _read(path: Path) -> Draft:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise RecipeError([_no_file(path, error)]) from None
    if len(raw) > MAX_BYTES:
        raise RecipeError([f"{path} is larger than {MAX_BYTES:,} bytes, so it is no recipe"])
    try:
        draft = read_text(raw.decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise RecipeError([f"{path} line {line}: the file is not UTF-8 text"]) from None
    if draft.values is None:
        raise RecipeError([f"{path} is empty; `name: my-model` alone would be a whole recipe"])
    return draft


def _no_file(path: Path, error: OSError) -> str:
    if path.is_dir():
        return f"{path} is a folder, not a recipe; in it are: {', '.join(_neighbours(path)) or 'no recipes'}"
    if not isinstance(error, FileNotFoundError):
        return f"{path} cannot be read: {error.strerror}"
    there = _neighbours(path.parent)
    if near := did_you_mean(path.name, there) or did_you_mean(f"{path.name}.yaml", there):
        return f"{path} does not exist{near}"
    return f"{path} does not exist; the gallery of recipes is in {Path(__file__).parent}"


def _neighbours(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.y*ml")) if folder.is_dir() else []


def _drop_empty_sections(draft: Draft) -> None:
    """A section whose fields are all commented out has its defaults."""
    if isinstance(draft.values, dict):
        for section in {section.name for section in sections()}:
            if section in draft.values and draft.values[section] is None:
                del draft.values[section]


def _assign(draft: Draft, assignment: str, place: Place) -> None:
    """Lay `field=value` over the draft."""
    name, equals, text = assignment.partition("=")
    path = tuple(name.strip().split("."))
    if not equals or not all(path):
        draft.problems.append(Problem(place, "write it as field=value, such as train.steps=200"))
        return
    value, problems = read_value(text, place.text)
    draft.problems += [problem._replace(place=place) for problem in problems]
    if isinstance(draft.values, dict) and (section := _section(draft, path[:-1], place)) is not None:
        section[path[-1]] = value
        draft.places[path] = place


def _section(draft: Draft, path: tuple[str, ...], place: Place) -> dict[str, Any] | None:
    """The mapping at `path`, made where there is none; None, with a problem noted, where something else is there."""
    here: dict[str, Any] = draft.values
    for depth, key in enumerate(path):
        # `parallel: auto` is short for its defaults; a cluster nobody described is this machine.
        if here.get(key) in (None, "auto"):
            here[key] = {"kind": "local"} if path[: depth + 1] == ("cluster",) else {}
        if not isinstance(here[key], dict):
            told = f"{'.'.join(path[: depth + 1])} is {shown(here[key])}, it has no fields to set"
            draft.problems.append(Problem(place, told))
            return None
        here = here[key]
    return here
