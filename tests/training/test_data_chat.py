"""Chat templates: the published renderings, only what the assistant says learned, every refusal naming its document."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from training.data import tokens
from training.data.chat import TEMPLATES, Chat, chat_of, checked, conversation
from training.data.sources import SourceError

CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": " What is\n\n2 + 2? "},
    {"role": "assistant", "content": "It is\n4."},
    {"role": "user", "content": "你好"},
    {"role": "assistant", "content": "Hello! "},
]
RENDERED = {
    "llama3.1": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n"
    "Today Date: 26 Jul 2024\n\nBe brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nWhat is\n\n2 + 2?"
    "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[It is\n4.<|eot_id|>]<|start_header_id|>user"
    "<|end_header_id|>\n\n你好<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n[Hello!<|eot_id|>]",
    "gemma2": "<bos><start_of_turn>user\nBe brief.\n\nWhat is\n\n2 + 2?<end_of_turn>\n<start_of_turn>model\n"
    "[It is\n4.<end_of_turn>]\n<start_of_turn>user\n你好<end_of_turn>\n<start_of_turn>model\n[Hello!<end_of_turn>]\n",
    "chatml": "<|im_start|>system\nBe brief. <|im_end|>\n<|im_start|>user\n What is\n\n2 + 2? <|im_end|>\n"
    "<|im_start|>assistant\n[It is\n4.<|im_end|>]\n<|im_start|>user\n你好<|im_end|>\n<|im_start|>assistant\n"
    "[Hello! <|im_end|>]\n",
}
"""The formats as Meta's, Google's and OpenAI's documentation show them; what is learned stands in brackets."""

PLAIN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A small byte-level vocabulary with every template's tokens."""
    made = tokens.train([Path(__file__).read_text()], 800)
    special = dict.fromkeys(one for template in TEMPLATES.values() for one in template.special)
    made.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in [*special, "</s>"]])
    return made


def own(folder: Path, template: Any, tokenizer: Tokenizer) -> Chat:
    """Return the template of a tokenizer's folder that has this one."""
    told = {"chat_template": template, "bos_token": {"content": "<bos>"}, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return chat_of("tokenizer", tokenizer, folder)


def shown(chat: Chat, tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    """Return the text of a conversation's ids, what is learned in brackets."""
    ids, learned = chat.encode(messages, "it")
    edges = np.flatnonzero(np.diff(learned, prepend=False, append=False))
    pieces = np.split(ids, edges)
    text = [tokenizer.decode(piece.tolist(), skip_special_tokens=False) for piece in pieces]
    return "".join(f"[{piece}]" if i % 2 else piece for i, piece in enumerate(text))


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_known_templates_are_the_published_ones(tokenizer: Tokenizer, name: str) -> None:
    chat = chat_of(name, tokenizer)
    assert shown(chat, tokenizer, CONVERSATION) == RENDERED[name]
    prompt = tokenizer.decode(chat.prompt(CONVERSATION[:4], "it"), skip_special_tokens=False)
    assert prompt == RENDERED[name].rpartition("[")[0].replace("[", "").replace("]", "")


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_tokenizers_own_template_gives_the_ids_of_transformers(
    tokenizer: Tokenizer, tmp_path: Path, template: str
) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="</s>")
    theirs.chat_template = template
    chat = own(tmp_path, template, tokenizer)
    wanted = theirs.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=template == MARKED)
    ids, learned = chat.encode(CONVERSATION, "it")
    assert ids.tolist() == wanted["input_ids"]
    if template == MARKED:
        assert learned.tolist() == [bool(one) for one in wanted["assistant_masks"]]
    assert shown(chat, tokenizer, CONVERSATION).removeprefix("<bos>") == RENDERED["chatml"]
    asked = theirs.apply_chat_template(CONVERSATION[:4], add_generation_prompt=True, return_dict=True)
    assert chat.prompt(CONVERSATION[:4], "it") == asked["input_ids"]


def test_a_folder_may_keep_its_template_in_a_file_or_by_name(tokenizer: Tokenizer, tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]
    assert shown(own(tmp_path, named, tokenizer), tokenizer, CONVERSATION) == RENDERED["chatml"]
    (tmp_path / "chat_template.jinja").write_text(MARKED)
    assert shown(chat_of("tokenizer", tokenizer, tmp_path), tokenizer, CONVERSATION) == "<bos>" + RENDERED["chatml"]


def test_a_template_that_prints_the_day_prints_one_day(tokenizer: Tokenizer, tmp_path: Path) -> None:
    chat = own(tmp_path, "{{ strftime_now('%d %b %Y') }}" + PLAIN, tokenizer)
    assert shown(chat, tokenizer, CONVERSATION).startswith("26 Jul 2024<|im_start|>")


def test_a_special_token_spelt_out_is_text_or_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "say <|im_end|>"}, {"role": "assistant", "content": "<|im_end|>"}]
    ids, learned = chat_of("chatml", tokenizer).encode(turns, "it")
    end = tokenizer.token_to_id("<|im_end|>")
    assert (ids == end).sum() == 2
    assert ids[learned][-1] == end
    with pytest.raises(SourceError, match=r"^line 7: a turn spells the special token <\|im_end\|> out"):
        own(tmp_path, PLAIN, tokenizer).encode(turns, "line 7")


def test_templates_that_cannot_be_used_are_told_in_one_sentence(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"has no chat template .* name one of llama3\.1, gemma2, chatml"):
        chat_of("tokenizer", tokenizer, tmp_path)
    with pytest.raises(SourceError, match="has no chat template"):
        chat_of("tokenizer", tokenizer)
    with pytest.raises(SourceError, match=r"has a template that cannot be used: Expected an expression"):
        own(tmp_path, "{% for %}", tokenizer)
    with pytest.raises(SourceError, match=r"gemma2 needs <bos>, <start_of_turn>, <end_of_turn>, which the tokenizer"):
        chat_of("gemma2", tokens.train(["some text"], 300))
    refusing = own(tmp_path, "{{ raise_exception('System role not supported') }}", tokenizer)
    with pytest.raises(
        SourceError, match=r"^a: the tokenizer's chat template refuses it \(System role not supported\)"
    ):
        refusing.encode(CONVERSATION, "a")
    forgetful = own(tmp_path, "{% for m in messages[-2:] %}<bos>{{ m.content }}{% endfor %}", tokenizer)
    with pytest.raises(SourceError, match=r"^a: the tokenizer's chat template rewrites earlier turns"):
        forgetful.encode(CONVERSATION, "a")
    with_tool = [*CONVERSATION, {"role": "tool", "content": "4"}]
    with pytest.raises(SourceError, match=r"^a: it has a turn of a tool"):
        chat_of("chatml", tokenizer).encode(with_tool, "a")


def test_records_are_conversations_or_a_prompt_with_its_completion() -> None:
    assert conversation({"messages": CONVERSATION}, "messages", "a") == CONVERSATION
    wanted = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert conversation({"prompt": "q", "completion": "a"}, "messages", "a") == wanted
    assert conversation({"prompt": wanted[:1], "completion": wanted[1:]}, "messages", "a") == wanted
    parts = [{"type": "text", "text": "q"}, {"type": "text", "text": "?"}]
    assert checked([{"role": "user", "content": parts}], "a") == [{"role": "user", "content": "q?"}]


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"text": "x"}, "it has neither messages nor prompt and completion"),
        ({"messages": []}, "its messages are not a list"),
        ({"messages": "hello"}, "its messages are not a list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "turn 1 has no role, or one that is none of system"),
        ({"messages": ["x"]}, "turn 1 has no role"),
        ({"prompt": "x", "completion": " "}, r"turn 2 \(the assistant's\) has no text"),
        ({"prompt": "x", "completion": None}, r"turn 2 \(the assistant's\) has no text"),
        ({"messages": [CONVERSATION[2]]}, "turn 1 is the assistant's and follows nothing, where one of the system or"),
        ({"messages": CONVERSATION[1:2] * 2}, "turn 2 is the user's and follows the user's, where one of the assi"),
        ({"messages": [*CONVERSATION[1:], CONVERSATION[0]]}, "turn 5 is the system's and follows the assistant's"),
        ({"messages": CONVERSATION[:2]}, "the assistant says nothing in it"),
    ],
)
def test_what_is_no_conversation_is_told_with_its_name(record: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SourceError, match=f"^chats.jsonl:7: {sentence}"):
        conversation(record, "messages", "chats.jsonl:7")
