"""What the tests of export and score share: a small dataset, networks, and checkpoints as every layout writes them."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.spec import Recipe
from training.data.format import PartWriter, layout_of, part_facts, write_facts
from training.job import NodeJob

LENGTH = 32
MODEL = {"hidden_size": 32, "layers": 2, "heads": 2, "kv_heads": 1, "ffn_size": 64, "vocab_size": 400}
Cut = Callable[[tuple[int, ...]], Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]]
"""From a tensor's shape to the rank, the origin and the size of each of its boxes."""


def recipe(**parts: dict[str, Any]) -> dict[str, Any]:
    """Return the resolved recipe of a model that is made in milliseconds."""
    told: dict[str, Any] = {
        "name": "tiny",
        "model": MODEL,
        "data": {"source": "/corpus", "sequence_length": LENGTH},
        "train": {"steps": 30, "global_batch_size": 8, "warmup_steps": 2},
        "parallel": {"strategy": "ddp", "micro_batch_size": 8},
        "score": {"max_tokens": 2000},
        "serve": {"prompts": ("value_1 = ", "# file"), "max_new_tokens": 12},
    }
    for part, fields in parts.items():
        told[part] = told[part] | fields if part in told else fields
    return Recipe.model_validate(told).model_dump(mode="json")


def texts(count: int, start: int = 0) -> list[str]:
    """Return small documents."""
    return [
        f"# file {i} <|endoftext|>\n"
        + "".join(f"value_{j} = compute({i * j}, name={i % 7})\n" for j in range(i % 9 + 9))
        for i in range(start, start + count)
    ]


def learned(documents: list[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of these documents, whose token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def write_dataset(folder: Path, vocab_size: int = 400) -> Path:
    """Write a dataset of small documents, every sixth held out, with a tokenizer trained on them."""
    folder.mkdir(parents=True)
    every = texts(60)
    held_out, train = every[::6], [text for i, text in enumerate(every) if i % 6]
    tokenizer = learned(train, vocab_size)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    size = tokenizer.get_vocab_size()
    facts: dict[str, Any] = {
        "dtype": "uint16",
        "sequence_length": LENGTH,
        "stride": LENGTH,
        "vocab_size": size,
        "eos_id": 0,
        "pad_id": 0,
        "bos_id": None,
        "kind": "text",
        "packing": "concat",
        "documents_apart": False,
        "marks": False,
        "sources": {"/corpus": {"tokens": 1, "documents": 60, "bytes": 1}},
        "dropped": {"too_short": 3},
    }
    for part, chosen in (("train", train), ("held_out", held_out)):
        with PartWriter(folder, part, layout_of(facts, part), 100) as writer:
            ids = np.concatenate([[*tokenizer.encode(text).ids, 0] for text in chosen])
            writer.write(ids)
            shards = writer.close()
        facts[part] = part_facts(shards, len(ids), len(chosen), sum(len(text.encode()) for text in chosen))
    lines = [json.dumps({"name": f"{i}.py", "text": text}) for i, text in enumerate(held_out)]
    (folder / "held_out.jsonl").write_text("\n".join(lines) + "\n")
    write_facts(folder, facts)
    return folder


def network(spec: dict[str, Any], folder: Path | None = None, seed: int = 1) -> Any:
    """Return the recipe's network with random weights, adapters that do something included."""
    import torch

    from training.model import add_adapters, allocate, materialise, skeleton

    train = spec["train"]
    made = skeleton(spec["model"], spec["data"]["sequence_length"], folder)
    if train["lora_rank"]:
        add_adapters(made, train["lora_rank"], train["lora_alpha"], train["lora_targets"])
    allocate(made, torch.device("cpu"))
    materialise(made, seed, folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if weight.requires_grad and (".lora_B." in name or weight.ndim == 1):
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.05)
    return made.eval()


def whole(shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """One process, or ddp."""
    yield 0, (0,) * len(shape), shape


def rows(shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """FSDP2 on three ranks: rows, as torch.chunk cuts them."""
    step = -(-shape[0] // 3)
    for rank in range(3):
        if rank * step < shape[0]:
            yield rank, (rank * step, *(0 for _ in shape[1:])), (min(step, shape[0] - rank * step), *shape[1:])


def columns(shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Tensor parallel on two ranks times FSDP2 on two: rows and columns."""
    if len(shape) == 1:
        yield from whole(shape)
        return
    high, wide = -(-shape[0] // 2), -(-shape[1] // 2)
    for rank, (r, c) in enumerate(((0, 0), (0, wide), (high, 0), (high, wide))):
        rest = shape[2:]
        yield rank, (r, c, *(0 for _ in rest)), (min(high, shape[0] - r), min(wide, shape[1] - c), *rest)


def write_checkpoint(run: Path, spec: dict[str, Any], made: Any, cut: Cut = whole) -> Path:
    """Write a network's trained weights, with moments, as a run's checkpoint of step 30, in the boxes of `cut`."""
    from training.checkpoint.image import Image
    from training.checkpoint.manifest import Identity, Manifest
    from training.checkpoint.piece import Piece
    from training.model.anatomy import named_weights

    folder = run / "checkpoints" / "step-00000030"
    folder.mkdir(parents=True)
    by_rank: dict[int, list[Piece]] = {}
    tensors: dict[str, Any] = {}
    for name, weight in named_weights(made):
        if not weight.requires_grad:
            continue
        now = weight.detach()
        for label, value in ((name, now), (f"exp_avg/{name}", now * 0.5)):
            shape = tuple(value.shape)
            tensors[label] = {"dtype": "F32", "shape": list(shape)}
            for rank, origin, size in cut(shape):
                part = value[tuple(slice(o, o + s) for o, s in zip(origin, size, strict=True))].clone()
                by_rank.setdefault(rank, []).append(Piece(label, shape, origin, part))
    files = {}
    for rank, pieces in by_rank.items():
        image = Image(pieces, pinned=False)
        image.fill(pieces)
        files[f"rank-{rank:05d}.safetensors"] = image.write(folder / f"rank-{rank:05d}.safetensors")
    train = spec["train"]
    lora = {name: train[name] for name in ("lora_rank", "lora_alpha", "lora_targets")} if train["lora_rank"] else None
    identity = Identity(1, "ddp", len(by_rank), spec["model"], lora)
    Manifest(30, identity, {}, tensors, files).write(folder)
    return folder


def job_of(spec: dict[str, Any], output: Path, **inputs: Path) -> NodeJob:
    """Return a job."""
    return NodeJob(spec, output, dict(inputs))


def result(folder: Path) -> dict[str, Any]:
    """Return result.json."""
    told: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return told


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two sets of tensors are the same, bit by bit."""
    import torch

    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )
