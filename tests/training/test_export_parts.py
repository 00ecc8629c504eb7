"""Rounding as torch rounds, tensors put together from any boxes, quantising within its bound, templates as encoded."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.exports import learned, texts
from training.data.format import PartWriter, layout_of, part_facts
from training.export import quantize, stream
from training.export.dtypes import BFloat16, from_bf16, to_half
from training.export.source import Files, Memory, Stored, box, tensor
from training.export.tokenizer import check_tokenizer, jinja, write_tokenizer
from training.process import JobError

pytestmark = pytest.mark.torch


def test_bf16_is_rounded_as_torch_rounds_it_for_every_kind_of_number() -> None:
    import torch

    bits = np.random.default_rng(0).integers(0, 2**32, 2**20, dtype=np.uint32)
    edges = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 1], np.uint32)
    numbers = np.concatenate([bits, edges]).view(np.float32)
    ours = BFloat16()(numbers)
    theirs = torch.from_numpy(numbers).bfloat16().view(torch.int16).numpy().view(np.uint16)
    lost = np.isnan(numbers)
    assert (ours[~lost] == theirs[~lost]).all()
    assert np.isnan(from_bf16(ours[lost])).all()


def test_fp16_is_rounded_as_torch_rounds_it_and_infinities_stay() -> None:
    import torch

    numbers = np.random.default_rng(0).standard_normal(2**16).astype(np.float32) * 10.0 ** np.arange(-9, 7).repeat(4096)
    numbers = np.clip(numbers, -65504, 65504)
    numbers[:2] = np.inf, -np.inf
    assert (to_half("w", numbers).view(np.uint16) == torch.from_numpy(numbers).half().numpy().view(np.uint16)).all()
    with pytest.raises(JobError, match="w holds 7e"):
        to_half("w", np.array([70000], np.float32))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_tensor_is_put_together_from_any_grid_of_boxes(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    cuts = [sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    path = tmp_path_factory.mktemp("boxes") / "values"
    extents, content, at = [], b"", 0
    for edges in itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts)):
        part = whole[tuple(slice(*edge) for edge in edges)]
        found = box(path, 0, shape, [edge[0] for edge in edges], part.shape)
        extents += [type(one)(path, at + 4 * one.offset, one.start, one.count, one.runs, one.step) for one in found]
        content += part.tobytes()
        at = len(content)
    path.write_bytes(content)
    source = Files({"w": Stored("F32", shape, tuple(extents))})
    assert (tensor(source, "w") == whole).all()
    row = int(np.prod(shape[1:]))
    first = data.draw(st.integers(0, shape[0] - 1))
    count = data.draw(st.integers(1, shape[0] - first))
    out = np.empty(count * row, np.float32)
    source.read("w", first * row, out)
    assert (out == whole[first : first + count].reshape(-1)).all()
    source.close()


def test_values_that_are_nowhere_are_missed(tmp_path: Path) -> None:
    (tmp_path / "values").write_bytes(bytes(40))
    extents = tuple(box(tmp_path / "values", 0, (4, 4), (0, 0), (2, 4)))
    with pytest.raises(JobError, match="w has 16 values and the checkpoint's files hold 8 of them"):
        Files({"w": Stored("F32", (4, 4), extents)})
    with pytest.raises(JobError, match=r"values is truncated \(40 bytes, its tensors end at 64\)"):
        Files({"w": Stored("F32", (4, 4), tuple(box(tmp_path / "values", 0, (4, 4), (0, 0), (4, 4))))})


def test_big_models_come_in_shards_that_everybody_may_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    arrays = {f"w{i}": np.full((300, 500), i, np.float32) for i in range(7)}
    source = Memory(arrays)
    targets = stream.targets(source, arrays, "bf16")
    files = stream.shards(targets, 1)
    stream.write(source, targets, files, tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [path.name for path in shards] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert all(path.stat().st_size <= 1.01e6 and path.stat().st_mode & 0o777 == 0o644 for path in shards)
    found = {name: float(one[0, 0]) for path in shards for name, one in load_file(path).items()}
    assert found == {f"w{i}": float(i) for i in range(7)}
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == stream.INDEX


@pytest.mark.parametrize("columns", [1, 7, 128, 300])
def test_integers_come_back_within_half_a_step(columns: int) -> None:
    rows = np.random.default_rng(0).standard_normal((5, columns)).astype(np.float32)
    rows[0] = 0
    whole, scale = quantize.to_int8(rows)
    assert np.abs(quantize.dequantize(whole, scale) - rows).max() <= scale.max() / 2 * 1.0001
    numbers, scales = quantize.to_int4(rows)
    assert numbers.min() >= -8
    assert numbers.max() <= 7
    assert scales.shape == (5, -(-columns // 128))
    pairs = quantize.packed(numbers)
    assert pairs.shape == (5, -(-columns // 2))
    assert (quantize.unpacked(pairs, columns) == numbers).all()
    plain = np.clip(np.rint(rows / (np.abs(rows).max() / 7)), -8, 7) * (np.abs(rows).max() / 7)
    assert np.square(quantize.dequantize(numbers, scales) - rows).sum() <= np.square(plain - rows).sum() + 1e-6


@pytest.mark.parametrize("name", ["llama3.1", "gemma2", "chatml"])
@pytest.mark.parametrize("system", [False, True])
def test_the_template_renders_what_the_data_was_encoded_as(name: str, system: bool) -> None:
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    from training.data.chat import TEMPLATES, chat_of

    template = TEMPLATES[name]
    own = learned(texts(20), 400)
    own.add_special_tokens([AddedToken(one, special=True) for one in template.special])
    messages = [{"role": "system", "content": " Be kind. "}] if system else []
    messages += [{"role": "user", "content": ' Who "are" you?\n'}, {"role": "assistant", "content": "A model.\n"}]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=own, chat_template=jinja(template))
    chat = chat_of(name, own)
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids) == tokenizer.decode(chat.encode(messages, "x")[0].tolist())
    asked = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(asked) == tokenizer.decode(chat.prompt(messages[:-1], "x"))


def test_a_chats_tokenizer_goes_with_its_template_and_is_checked(tmp_path: Path) -> None:
    from tokenizers import AddedToken

    from training.data.chat import TEMPLATES, chat_of

    own = learned(texts(20), 400)
    own.add_special_tokens([AddedToken(one, special=True) for one in TEMPLATES["chatml"].special])
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    out.mkdir()
    own.save(str(data / "tokenizer.json"))
    messages = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]
    (data / "held_out.jsonl").write_text(json.dumps({"name": "x", "messages": messages}) + "\n")
    facts: dict[str, Any] = {"dtype": "uint16", "sequence_length": 32, "stride": 32, "marks": True, "eos_id": 0}
    facts |= {"kind": "chat", "bos_id": None}
    ids, learnt = chat_of("chatml", own).encode(messages, "x")
    with PartWriter(data, "held_out", layout_of(facts, "held_out"), 9) as writer:
        writer.write(np.append(ids, 0), np.append(learnt, False).astype(np.uint8))
        facts["held_out"] = part_facts(writer.close(), len(ids), 1, 1)
    write_tokenizer(data, facts, "chatml", out)
    check_tokenizer(data, facts, out)
    assert "im_start" in (out / "chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text("{{ 'something else' }}")
    with pytest.raises(JobError, match=r"transformers reads .* differently"):
        check_tokenizer(data, facts, out)
