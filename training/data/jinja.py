"""A tokenizer's own chat template: found in its folder, rendered as transformers renders it, but on one fixed day."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

if TYPE_CHECKING:
    import jinja2

Span = tuple[int, int]

DAY: Final = datetime(2024, 7, 26, tzinfo=UTC)
"""What a template that prints the date is told: the day that Llama 3.1's prints where it is told none."""
OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Put around what {% generation %} renders, and taken out again: two code points that Unicode gives no character."""
NAMES: Final = ("bos_token", "eos_token", "unk_token", "pad_token")


class TemplateProblem(Exception):
    """The template cannot be read, or refuses a conversation; the text says why, in a few words."""


class JinjaTemplate:
    """One template and the tokenizer's names that it may print."""

    def __init__(self, source: str, names: dict[str, str]) -> None:
        """Compile a template. Raises TemplateProblem."""
        import jinja2

        self._names = names
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as problem:
            raise TemplateProblem(_short(problem)) from problem

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Return the template of a tokenizer's folder, None where it has none. Raises TemplateProblem.

        It is chat_template.jinja, or chat_template in tokenizer_config.json: a text, or the one named "default".
        """
        try:
            path = folder / "tokenizer_config.json"
            config = json.loads(path.read_text()) if path.is_file() else {}
            path = folder / "chat_template.jinja"
            source = path.read_text() if path.is_file() else config.get("chat_template")
        except (OSError, ValueError) as problem:
            raise TemplateProblem(f"{path.name} cannot be read") from problem
        if isinstance(source, list):
            source = {one["name"]: one["template"] for one in source}.get("default")
        names = {name: _text(config.get(name)) for name in NAMES}
        return cls(source, {name: text for name, text in names.items() if text}) if source else None

    def render(self, messages: Sequence[dict[str, str]], *, prompt: bool) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and where {% generation %} marks in it begin and end, in characters.

        `prompt` adds what stands before an answer. Raises TemplateProblem.
        """
        import jinja2

        given = [dict(message) for message in messages]
        if any(mark in message["content"] for message in given for mark in (OPEN, CLOSE)):
            raise TemplateProblem("a turn holds U+FDD0 or U+FDD1, which are no characters")
        try:
            text = self._template.render(
                messages=given, tools=None, documents=None, add_generation_prompt=prompt, **self._names
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as problem:
            raise TemplateProblem(_short(problem)) from problem
        return text.replace(OPEN, "").replace(CLOSE, ""), list(_spans(text))


def _spans(text: str) -> Iterator[Span]:
    """Yield where marked stretches begin and end in a text once its marks are out."""
    place = begin = 0
    for i, piece in enumerate(text.replace(CLOSE, OPEN).split(OPEN)):
        begin, place = place, place + len(piece)
        if i % 2:
            yield begin, place


@cache
def _environment() -> "jinja2.Environment":
    """Return what templates of Hugging Face expect: its settings, functions and the tag {% generation %}."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

        def marked(self, caller: Any) -> str:
            return f"{OPEN}{caller()}{CLOSE}"

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **told: json.dumps(value, **{"ensure_ascii": False, **told})
    environment.globals |= {"raise_exception": _refuse, "strftime_now": DAY.strftime}
    return environment


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _text(token: Any) -> str:
    """Return a special token of tokenizer_config.json: a text, or an object that has it as its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _short(problem: Exception) -> str:
    return str(problem).splitlines()[0].rstrip(".") if str(problem) else type(problem).__name__
