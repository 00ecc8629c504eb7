"""Conversations to token ids, and which of these are learned: what the assistant says and the token that ends its turn.

A template is one of those known here by name, or the tokenizer's own (Jinja). Of the known ones the text of a turn is
encoded as text even where it spells a special token out, and an answer apart from what stands before it, as when a
model is asked; a tokenizer's own template mixes all, so that a turn that spells one out is refused. Templates that
print the day get one day, the one Llama 3.1's prints, so that the same data give the same ids.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training.data.jinja import JinjaTemplate, TemplateProblem
from training.data.sources import SourceError

Message = dict[str, str]
Encoded = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]

FOLLOWS: Final = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
"""Whose turn may follow whose."""
ROLES: Final = tuple(role for role in FOLLOWS if role)
SPACES: Final = ("\u2581", "\u0120")
"""How tokens spell a space: SentencePiece's, and that of byte-level vocabularies."""
TEXT: Final = "\0"
"""Stands before what people wrote, so that it is never taken for a special token."""


class Chat(Protocol):
    """A template together with the tokenizer it is for."""

    def encode(self, messages: Sequence[Message], name: str) -> Encoded:
        """Return a conversation's ids and which of them are learned. Raises SourceError that begins with `name`."""

    def prompt(self, messages: Sequence[Message], name: str) -> list[int]:
        """Return the ids after which a model answers. Raises SourceError that begins with `name`."""


@dataclass(frozen=True, slots=True)
class Template:
    """A template known by name: what stands before a conversation, before a turn, and after it.

    Source: the chat_template of the published tokenizers; of gemma2, which knows no system role, Gemma's documentation:
    what the system says begins the first user turn (as Gemma 3's own template has it). `always` begins a system turn,
    also where a conversation has none.
    """

    begin: tuple[str, ...]
    before: tuple[str, ...]
    end: str
    after: str
    trims: bool
    names: Mapping[str, str] = field(default_factory=dict)
    system: bool = True
    always: str = ""

    @property
    def special(self) -> tuple[str, ...]:
        """The tokens it needs."""
        return tuple(dict.fromkeys(one for one in (*self.begin, *self.before, self.end) if one.startswith("<")))


TEMPLATES: Final = {
    "llama3.1": Template(
        begin=("<|begin_of_text|>",),
        before=("<|start_header_id|>", "{role}", "<|end_header_id|>", "\n\n"),
        end="<|eot_id|>",
        after="",
        trims=True,
        always="Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n",
    ),
    "gemma2": Template(
        begin=("<bos>",),
        before=("<start_of_turn>", "{role}\n"),
        end="<end_of_turn>",
        after="\n",
        trims=True,
        names={"assistant": "model"},
        system=False,
    ),
    "chatml": Template(begin=(), before=("<|im_start|>", "{role}\n"), end="<|im_end|>", after="\n", trims=False),
}


def chat_of(template: str, tokenizer: Tokenizer, folder: Path | None = None) -> Chat:
    """Return a template by its name in data.chat_template; "tokenizer" is the one of the tokenizer's folder.

    Raises SourceError where there is none, or where the tokenizer lacks a token that it needs.
    """
    own = Tokenizer.from_str(tokenizer.to_str())
    if template != "tokenizer":
        return _Known(template, own)
    found = None
    try:
        found = JinjaTemplate.of(folder) if folder else None
    except TemplateProblem as problem:
        raise SourceError(f"data.chat_template: {folder} has a template that cannot be used: {problem}") from problem
    if found is None:
        raise SourceError(
            f"data.chat_template: the tokenizer{f' in {folder}' if folder else ''} has no chat template "
            f"(chat_template.jinja, or one in tokenizer_config.json); name one of {', '.join(TEMPLATES)}"
        )
    return _Own(found, own)


def conversation(record: Mapping[str, Any], messages_field: str, name: str) -> list[Message]:
    """Return the turns of a record: a list of {role, content} in a field, or {prompt, completion}.

    Raises SourceError, one sentence that begins with the document's name, for anything else, for an empty turn, for
    turns in an order that makes no sense and where the assistant says nothing.
    """
    if messages_field in record:
        turns = record[messages_field]
    elif "prompt" in record and "completion" in record:
        turns = _turns(record["prompt"], "user") + _turns(record["completion"], "assistant")
    else:
        raise SourceError(f"{name}: it has neither {messages_field} nor prompt and completion; see data.messages_field")
    found = checked(turns, name)
    if not any(message["role"] == "assistant" for message in found):
        raise SourceError(f"{name}: the assistant says nothing in it, so there is nothing to learn; take it out")
    return found


def checked(turns: Any, name: str) -> list[Message]:
    """Return turns as {role, content} texts in a sensible order. Raises SourceError, as `conversation`."""
    if not isinstance(turns, list | tuple) or not turns:
        raise SourceError(f"{name}: its messages are not a list of {{role, content}} with at least one turn")
    found = [_message(turn, f"{name}: turn {i}") for i, turn in enumerate(turns, 1)]
    before = ""
    for i, message in enumerate(found, 1):
        if message["role"] not in FOLLOWS[before]:
            raise SourceError(
                f"{name}: turn {i} is the {message['role']}'s and follows {f'the {before}' if before else 'nothing'}"
                f"{chr(39) + 's' if before else ''}, where one of the {' or the '.join(FOLLOWS[before])} belongs"
            )
        before = message["role"]
    return found


class _Known:
    """A template of TEMPLATES."""

    def __init__(self, name: str, tokenizer: Tokenizer) -> None:
        self._name, self._template, self._tokenizer = name, TEMPLATES[name], tokenizer
        self._special = {one: tokenizer.token_to_id(one) for one in self._template.special}
        if missing := [one for one, number in self._special.items() if number is None]:
            raise SourceError(
                f"data.chat_template: {name} needs {', '.join(missing)}, which the tokenizer does not have; "
                "take the tokenizer of such a model, or another template"
            )
        tokenizer.encode_special_tokens = True
        if tokenizer.encode("a", add_special_tokens=False).tokens[0].startswith(SPACES):
            raise SourceError(
                f"data.chat_template: the tokenizer puts a space before every text, which {name} cannot be used with; "
                "use the tokenizer's own template"
            )

    def encode(self, messages: Sequence[Message], name: str) -> Encoded:
        ids, learned = self._ids(self._parts(messages, name))
        return np.array(ids, np.int64), np.array(learned, np.bool_)

    def prompt(self, messages: Sequence[Message], name: str) -> list[int]:
        parts = [(text, False) for text, _ in self._parts(messages, name)]
        return self._ids(parts + self._before("assistant"))[0]

    def _parts(self, messages: Sequence[Message], name: str) -> list[tuple[str, bool]]:
        """Return the conversation as pieces of text or single special tokens, and whether each is learned."""
        parts = [(one, False) for one in self._template.begin]
        for message in self._arranged(messages, name):
            learned = message["role"] == "assistant"
            parts += self._before(message["role"])
            parts += [
                (TEXT + message["content"], learned),
                (self._template.end, learned),
                (self._template.after, False),
            ]
        return parts

    def _arranged(self, messages: Sequence[Message], name: str) -> list[Message]:
        """Return the turns as the template wants them: trimmed, and what the system says where it belongs."""
        if any(message["role"] == "tool" for message in messages):
            raise SourceError(f"{name}: it has a turn of a tool, which template {self._name} does not know")
        trims = self._template.trims
        turns = [one | {"content": one["content"].strip()} if trims else dict(one) for one in messages]
        system = turns.pop(0)["content"] if turns[0]["role"] == "system" else ""
        if self._template.system and (system or self._template.always):
            turns.insert(0, {"role": "system", "content": self._template.always + system})
        elif system and turns:
            turns[0]["content"] = f"{system}\n\n{turns[0]['content']}"
        return turns

    def _before(self, role: str) -> list[tuple[str, bool]]:
        named = self._template.names.get(role, role)
        return [(one.replace("{role}", named), False) for one in self._template.before]

    def _ids(self, parts: Sequence[tuple[str, bool]]) -> tuple[list[int], list[bool]]:
        """Encode pieces; text that stands together and is learned alike is encoded together."""
        ids: list[int] = []
        learned: list[bool] = []
        for (number, trained), run in groupby(parts, key=lambda part: (self._special.get(part[0]), part[1])):
            text = "".join(piece.removeprefix(TEXT) for piece, _ in run)
            found = [number] if number is not None else self._tokenizer.encode(text, add_special_tokens=False).ids
            ids += found
            learned += [trained] * len(found)
        return ids, learned


class _Own:
    """A tokenizer's own template."""

    def __init__(self, template: JinjaTemplate, tokenizer: Tokenizer) -> None:
        self._template, self._tokenizer = template, tokenizer
        self._special = [one.content for one in tokenizer.get_added_tokens_decoder().values() if one.special]

    def encode(self, messages: Sequence[Message], name: str) -> Encoded:
        text, spans = self._rendered(messages, name, prompt=False)
        encoded = self._tokenizer.encode(text, add_special_tokens=False)
        starts, ends = np.array(encoded.offsets, np.int64).reshape(-1, 2).T
        learned = np.zeros(len(starts), np.bool_)
        for begin, end in spans or self._answers(messages, text, name):
            learned |= (starts >= begin) & (ends <= end)
        return np.array(encoded.ids, np.int64), learned

    def prompt(self, messages: Sequence[Message], name: str) -> list[int]:
        text, _ = self._rendered(messages, name, prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _rendered(self, messages: Sequence[Message], name: str, *, prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        spelt = next((one for one in self._special for turn in messages if one in turn["content"]), None)
        if spelt is not None:
            raise SourceError(f"{name}: a turn spells the special token {spelt} out; take it out")
        try:
            return self._template.render(messages, prompt=prompt)
        except TemplateProblem as problem:
            raise SourceError(f"{name}: the tokenizer's chat template refuses it ({problem})") from problem

    def _answers(self, messages: Sequence[Message], text: str, name: str) -> list[tuple[int, int]]:
        """Find what the assistant says in a rendered text: each answer is what its turn adds to the prompt before it.

        White space that follows the token that ends a turn is not part of it. Raises SourceError where a template
        renders the beginning of a conversation otherwise than alone.
        """
        found = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                before, _ = self._rendered(messages[:i], name, prompt=True)
                whole, _ = self._rendered(messages[: i + 1], name, prompt=False)
                if not (whole.startswith(before) and text.startswith(whole)):
                    raise SourceError(
                        f"{name}: the tokenizer's chat template rewrites earlier turns, so that what turn {i + 1} adds "
                        "cannot be told; mark it with {% generation %} in the template, or name another template"
                    )
                bare = whole.rstrip()
                found.append((len(before), len(bare) if bare.endswith(tuple(self._special)) else len(whole)))
        return found


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping) or turn.get("role") not in ROLES:
        raise SourceError(f"{where} has no role, or one that is none of {', '.join(ROLES)}")
    content = turn.get("content")
    if isinstance(content, list) and all(isinstance(one, Mapping) and one.get("type") == "text" for one in content):
        content = "".join(str(one.get("text", "")) for one in content)
    if not isinstance(content, str) or not content.strip():
        raise SourceError(f"{where} (the {turn['role']}'s) has no text; fill it or take the conversation out")
    if not whole_text(content):
        raise SourceError(f"{where} (the {turn['role']}'s) holds half a character (a lone surrogate); take it out")
    return {"role": str(turn["role"]), "content": content}


def whole_text(text: str) -> bool:
    """Whether a text can be written: JSON may hold half a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _turns(told: Any, role: str) -> list[Any]:
    """Return a prompt or completion as turns: it is a text, or turns already."""
    return list(told) if isinstance(told, list) else [{"role": role, "content": told}]
