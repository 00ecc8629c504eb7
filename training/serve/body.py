"""What a request asks for, and the shape of its answer: plain inputs, or OpenAI's completions and chat completions."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from training.data.chat import Chat, checked, whole_text
from training.data.sources import SourceError
from training.serve.answer import Answer, Wish

PARAMETERS: Final = {
    "max_new_tokens": "limit",
    "max_tokens": "limit",
    "max_completion_tokens": "limit",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "stop": "stop",
    "stop_sequences": "stop",
}
"""The names of Hugging Face's and OpenAI's interfaces, and ours."""
RANGES: Final = {
    "limit": (int, 1, 10**9),
    "temperature": (float, 0, 100),
    "top_p": (float, 1e-9, 1),
    "top_k": (int, 0, 10**9),
    "seed": (int, 0, 2**63 - 1),
}
NOTED: Final = ("model", "user", "stream_options", "metadata", "store")
"""Said by OpenAI's clients; without meaning here."""


class BadRequest(Exception):
    """The request cannot be answered; the text is one sentence for who asked."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: its form (inputs, completion or chat), its prompts, and how the answer is wanted."""

    form: str
    wishes: list[Wish]
    several: bool
    stream: bool
    echo: list[str] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"castra-{uuid.uuid4().hex[:24]}")

    def whole(self, answers: Sequence[Answer], texts: Sequence[str]) -> Any:
        """Return the whole answer as JSON values."""
        if self.form == "inputs":
            told = [{"generated_text": before + text} for before, text in zip(self.echo, texts, strict=True)]
            return told if self.several else told[0]
        read, written = (sum(len(ids) for ids in found) for found in
                         ([one.ids for one in self.wishes], [one.tokens for one in answers]))  # fmt: skip
        choices = [self._choice(i, text, answers[i].reason) for i, text in enumerate(texts)]
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return self._envelope("", choices) | {"usage": usage}

    def piece(self, text: str, reason: str | None) -> Any:
        """Return one piece of a streamed answer as JSON values; `reason` with the last, whose text is empty."""
        if self.form == "inputs":
            return {"token": {"text": text}} if reason is None else {"finish_reason": reason}
        if self.form == "completion":
            return self._envelope("", [{"index": 0, "text": text, "finish_reason": reason}])
        delta = {"role": "assistant", "content": text} if reason is None else {}
        return self._envelope(".chunk", [{"index": 0, "delta": delta, "finish_reason": reason}])

    def _choice(self, index: int, text: str, reason: str) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}} if self.form == "chat" else {"text": text}
        return {"index": index, "finish_reason": reason} | said

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        known = "chat.completion" if self.form == "chat" else "text_completion"
        made = int(time.time())
        return {"id": self.name, "object": known + kind, "created": made, "model": "castra", "choices": choices}


@dataclass(frozen=True, slots=True)
class Reader:
    """What is needed to understand a request: the tokenizer, the chat template or why there is none, and limits.

    context: tokens of prompt and answer together. limit: new tokens where the request does not say.
    """

    tokenizer: Any
    chat: Chat | str
    context: int
    limit: int

    def read(self, body: Any) -> Asked:
        """Return what a JSON body asks for. Raises BadRequest."""
        if not isinstance(body, Mapping):
            raise BadRequest("the body is no JSON object; send inputs, prompt or messages")
        forms = [name for name in ("inputs", "prompt", "messages") if name in body]
        if len(forms) != 1:
            raise BadRequest("the body must have exactly one of inputs, prompt and messages")
        options = dict(body)
        told = options.pop(forms[0])
        stream = _flag(options, "stream")
        if forms[0] == "inputs":
            options = self._parameters(options)
        echo = _flag(options, "return_full_text")
        greedy = forms[0] == "inputs" and not _flag(options, "do_sample")
        chosen = {"temperature": 0.0 if greedy else 1.0} | _options(options)
        if forms[0] == "messages":
            prompts, ids = [""], [self._conversation(told)]
        else:
            prompts = _texts(told, forms[0])
            ids = [self.tokenizer.encode(text).ids for text in prompts]
        if stream and len(ids) > 1:
            raise BadRequest("only one prompt can be streamed; send several requests")
        wishes = [self._wish(one, chosen) for one in ids]
        form = {"inputs": "inputs", "prompt": "completion", "messages": "chat"}[forms[0]]
        return Asked(form, wishes, isinstance(told, list), stream, [text if echo else "" for text in prompts])

    def _parameters(self, options: dict[str, Any]) -> dict[str, Any]:
        inner = options.pop("parameters", None)
        if inner is None:
            inner = {}
        if not isinstance(inner, Mapping) or options:
            unknown = ", ".join(options) or "parameters"
            raise BadRequest(f"beside inputs stand parameters, an object, and stream; {unknown} is something else")
        return dict(inner)

    def _conversation(self, told: Any) -> list[int]:
        if isinstance(self.chat, str):
            raise BadRequest(f"this model cannot chat: {self.chat}")
        try:
            messages = checked(told, "messages")
            if messages[-1]["role"] == "assistant":
                raise BadRequest("messages: the last turn is the assistant's; end with what it is to answer")
            return self.chat.prompt(messages, "messages")
        except SourceError as problem:
            raise BadRequest(str(problem)) from None

    def _wish(self, ids: list[int], chosen: dict[str, Any]) -> Wish:
        room = self.context - len(ids)
        if not ids or room < 1:
            raise BadRequest(f"the prompt has {len(ids)} tokens, and 1 to {self.context - 1} can be read; change it")
        limit = chosen.get("limit", min(self.limit, room))
        if limit > room:
            raise BadRequest(
                f"{limit} new tokens after {len(ids)} are more than the {self.context} that fit; ask fewer"
            )
        return Wish(ids, **(chosen | {"limit": limit}))


def _options(told: dict[str, Any]) -> dict[str, Any]:
    """Return parameters by our names, in their ranges. Raises BadRequest for one that would change the answer."""
    found: dict[str, Any] = {}
    for name, value in told.items():
        ours = PARAMETERS.get(name)
        if value is None or name in NOTED:
            continue
        if ours is None:
            if value in (0, [], {}) or (name == "n" and value == 1):
                continue
            raise BadRequest(f"{name} is no parameter that this server knows; it knows {', '.join(PARAMETERS)}")
        found[ours] = _stops(value) if ours == "stop" else _number(name, value, *RANGES[ours])
    return found


def _number(name: str, value: Any, kind: type, least: float, most: float) -> Any:
    number = isinstance(value, int) or (kind is float and isinstance(value, float))
    if isinstance(value, bool) or not number or not least <= value <= most:
        what = "a whole number" if kind is int else "a number"
        raise BadRequest(f"{name} must be {what} from {least:g} to {most:g}")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or len(texts) > 16 or not all(isinstance(one, str) and one for one in texts):
        raise BadRequest("stop must be a text, or a list of at most 16, none of them empty")
    return tuple(texts)


def _texts(told: Any, name: str) -> list[str]:
    texts = [told] if isinstance(told, str) else told
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise BadRequest(f"{name} must be a text, or a list of texts")
    if not all(map(whole_text, texts)):
        raise BadRequest(f"{name} holds half a character (a lone surrogate); take it out")
    return texts


def _flag(options: dict[str, Any], name: str) -> bool:
    value = options.pop(name, None)
    if value not in (None, True, False):
        raise BadRequest(f"{name} must be true or false")
    return bool(value)
