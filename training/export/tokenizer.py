"""The tokenizer of the exported folder: the dataset's own, with its chat template, as transformers reads it."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from training.data.chat import TEMPLATES, Template
from training.data.format import held_out_tokens
from training.job import write_json
from training.process import JobError

OWN: Final = ("tokenizer_config.json", "chat_template.jinja")
"""What a dataset has of a tokenizer's folder, where it came from one."""


def write_tokenizer(dataset: Path, facts: dict[str, Any], template: str, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json and, of a chat, chat_template.jinja.

    `template` is data.chat_template. Readable by transformers 4 and 5; what the dataset has of these is kept.
    """
    raw = (dataset / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(raw)
    for name in OWN:
        if (dataset / name).is_file():
            shutil.copyfile(dataset / name, folder / name)
    tokenizer = Tokenizer.from_buffer(raw)
    end = tokenizer.id_to_token(facts["eos_id"])
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "clean_up_tokenization_spaces": False,
    }
    if facts.get("bos_id") is not None:
        told["bos_token"] = tokenizer.id_to_token(facts["bos_id"])
    theirs = _read(folder / "tokenizer_config.json")
    write_json(folder / "tokenizer_config.json", told | theirs | {"model_max_length": facts["sequence_length"]})
    write_json(folder / "special_tokens_map.json", {"eos_token": end})
    if facts.get("kind") == "chat" and template in TEMPLATES:
        (folder / "chat_template.jinja").write_text(jinja(TEMPLATES[template]))


def check_tokenizer(dataset: Path, facts: dict[str, Any], folder: Path) -> None:
    """Raise JobError unless AutoTokenizer cuts the first held-out document exactly as the training data was cut."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    with (dataset / "held_out.jsonl").open() as lines:
        first = json.loads(next(lines))
    if "text" in first:
        ids = tokenizer(first["text"], add_special_tokens=False, split_special_tokens=True)["input_ids"]
    elif tokenizer.chat_template:
        ids = tokenizer.apply_chat_template(first["messages"], return_dict=False)
    else:
        return
    found = held_out_tokens(dataset, facts)[: len(ids) + 1].tolist()
    begin = found[0] == facts.get("bos_id") != (ids[0] if ids else None)  # the dataset begins a text with it
    if found[begin : len(ids) + begin] != ids:
        raise JobError(
            f"transformers reads {dataset}/tokenizer.json differently from the tokenizers library; use another"
        )


def jinja(template: Template) -> str:
    """Return the Jinja of a template that is known by name; what it renders is what training.data.chat encodes."""
    content = "turn.content | trim" if template.trims else "turn.content"
    role = "turn.role"
    for ours, theirs in template.names.items():
        role = f"({_text(theirs)} if turn.role == {_text(ours)} else {role})"
    before = " ~ ".join(_with_role(part, role) for part in template.before)
    asked = " ~ ".join(
        _text(part.replace("{role}", template.names.get("assistant", "assistant"))) for part in template.before
    )
    lines = [f"{{{{- {_text(''.join(template.begin))} }}}}"] if template.begin else []
    lines += ["{%- set ns = namespace(lead='') %}"]
    if template.system and template.always:
        head = before.replace(role, _text("system"))
        lines += [
            "{%- if messages[0].role != 'system' %}",
            f"{{{{- {head} ~ {_text(template.always + template.end + template.after)} }}}}",
            "{%- endif %}",
        ]
    lines += ["{%- for turn in messages %}"]
    if template.system:
        lead = f"({_text(template.always)} if turn.role == 'system' else '') ~ " if template.always else ""
        lines += [f"{{{{- {before} ~ {lead}({content}) ~ {_text(template.end + template.after)} }}}}"]
    else:
        lines += [
            "{%- if turn.role == 'system' %}",
            f"{{%- set ns.lead = ({content}) ~ {_text(chr(10) * 2)} %}}",
            "{%- else %}",
            f"{{{{- {before} ~ ns.lead ~ ({content}) ~ {_text(template.end + template.after)} }}}}",
            "{%- set ns.lead = '' %}",
            "{%- endif %}",
        ]
    lines += ["{%- endfor %}", "{%- if add_generation_prompt %}", f"{{{{- {asked} }}}}", "{%- endif %}"]
    return "\n".join(lines)


def _with_role(part: str, role: str) -> str:
    head, found, rest = part.partition("{role}")
    pieces = [_text(head)] if head else []
    pieces += [role] if found else []
    pieces += [_text(rest)] if rest else []
    return " ~ ".join(pieces) or _text("")


def _text(text: str) -> str:
    return json.dumps(text)


def _read(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return told
