"""YAML text as plain values that remember where each was written, with a list of what is wrong with the text.

PyYAML parses; what a plain word means is decided here, because YAML 1.1 takes `no` for false, 1e-4 for text, 010 for
eight and 1:30 for ninety. Words stay text (the spec turns true and no into a truth value where it wants one), decimal
numbers are numbers, and a number with a leading zero is refused. Nothing is ever constructed from a tag.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import yaml

MAX_BYTES = 100_000
MAX_VALUES = 10_000
MAX_DEPTH = 20

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_FLOAT = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}

# What PyYAML says → what a person can do about it.
_ADVICE = {
    "mapping values are not allowed here": "a second ': ' on the line, or a line indented too far; put text in quotes",
    "cannot start any token": "indent with spaces, and put text that begins with a special character in quotes",
    "could not find expected ':'": "a field without its colon, or a line indented too little",
    "expected <block end>": "the indentation does not match the lines above",
    "expected ',' or": "a bracket is not closed, or a comma is missing",
    "unexpected end of stream": "a quotation mark or a bracket is not closed",
    "undefined alias": "the alias has no anchor above it",
}

Path = tuple[str | int, ...]


class Place(NamedTuple):
    """Where something was written, in words, with a rank to sort by."""

    rank: int
    text: str


class Problem(NamedTuple):
    """One mistake and where it is."""

    place: Place
    sentence: str

    def __str__(self) -> str:
        return f"{self.place.text}: {self.sentence}" if self.place.text else self.sentence


class Unreadable(Exception):
    """The text is no YAML a recipe can be; `problem` says where and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


@dataclass(slots=True)
class Draft:
    """Values before they are checked, and where each was written."""

    origin: str
    values: Any = None
    places: dict[Path, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: Path) -> Place:
        """Where `path`, or the nearest thing around it that was written, is."""
        around = (path[:length] for length in range(len(path), -1, -1))
        return next((self.places[part] for part in around if part in self.places), Place(0, self.origin))


def read_text(text: str, origin: str) -> Draft:
    """Parse the text of a file called `origin`. Raises Unreadable where it is no single YAML document."""
    draft = Draft(origin)
    node = _compose(text, origin)
    if node is not None:
        draft.values = _Walk(draft).value(node, ())
    return draft


def read_value(text: str, origin: str) -> tuple[Any, list[Problem]]:
    """Parse one value given on a command line. Raises Unreadable."""
    draft = Draft(origin)
    node = _compose(text, origin)
    value = None if node is None else _Walk(draft).value(node, ())
    return value, [Problem(Place(0, origin), problem.sentence) for problem in draft.problems]


def _compose(text: str, origin: str) -> yaml.Node | None:
    try:
        # BaseLoader resolves no plain word and constructs nothing, so that a tag in a node was written by the author.
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise Unreadable(_syntax(error, origin)) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        what = f"the character {error.character!r} cannot be part of a recipe"
        raise Unreadable(Problem(Place(line, f"{origin} line {line}"), what)) from None
    except RecursionError:
        raise Unreadable(Problem(Place(0, origin), "the brackets nest too deeply to be a recipe")) from None
    return node


def _syntax(error: yaml.MarkedYAMLError, origin: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    place = (
        Place(mark.line + 1, f"{origin} line {mark.line + 1}, column {mark.column + 1}") if mark else Place(0, origin)
    )
    said = error.problem or "cannot be read"
    if "single document" in (error.context or ""):
        return Problem(place, "a second document begins here, a recipe is one; remove the '---' line")
    advice = next((advice for known, advice in _ADVICE.items() if known in said), "")
    return Problem(place, f"not valid YAML ({said})" + (f": {advice}" if advice else ""))


class _Walk:
    """Turns nodes into values, noting places and problems in a draft."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.seen = 0

    def value(self, node: yaml.Node, path: Path) -> Any:
        self.draft.places.setdefault(path, self._at(node))
        self.seen += 1
        if self.seen > MAX_VALUES or len(path) > MAX_DEPTH:
            limit = f"more than {MAX_VALUES:,} values" if self.seen > MAX_VALUES else f"more than {MAX_DEPTH} levels"
            raise Unreadable(Problem(self._at(node), f"with its aliases written out, this has {limit}"))
        if node.tag not in _PLAIN_TAGS:
            self._note(node, f"the tag {node.tag!r} is not allowed in a recipe; write the plain value")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(cast("yaml.ScalarNode", node), path)

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, item in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self._note(key, "a field's name must be a word, not a list or a mapping")
                continue
            here = (*path, key.value)
            if key.value in found:
                first = self.draft.places[here].text.removeprefix(f"{self.draft.origin} ")
                self._note(key, f"{dotted(here)} was given already in {first}; keep one of the two")
                continue
            self.draft.places[here] = self._at(key)
            found[key.value] = self.value(item, here)
        return found

    def _scalar(self, node: yaml.ScalarNode, path: Path) -> Any:
        text: str = node.value
        if node.style or len(text) > 100:
            return text
        if text in ("", "~", "null", "Null", "NULL"):
            return None
        if _LEADING_ZERO.fullmatch(text):
            self._note(
                node,
                f"{dotted(path) or 'the value'} is {text}, which some programs read as an octal number; "
                f"write {text.replace('0', '', 1) or 0} or, if it is text, '{text}'",
            )
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    def _at(self, node: yaml.Node) -> Place:
        line = node.start_mark.line + 1
        return Place(line, f"{self.draft.origin} line {line}")

    def _note(self, node: yaml.Node, sentence: str) -> None:
        self.draft.problems.append(Problem(self._at(node), sentence))


def dotted(path: Path) -> str:
    """A path as people write it: serve.prompts[0]."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
