"""Make Hugging Face safetensors of a checkpoint folder, whoever wrote it, without torch and in little memory.

    python -m training.export.convert FOLDER OUT --dtype bf16
    python -m training.export.convert FOLDER OUT --config /models/Llama-3.1-8B --prefix model.

FOLDER is a checkpoint of Castra, of DeepSpeed (ZeRO 0 to 3) or of torch.distributed.checkpoint, a quantised folder of
`training.export.quantize`, or a folder of safetensors. Pickles in it are read by an unpickler that runs nothing.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from training.export import place, stream
from training.export.dcp import is_dcp, open_dcp
from training.export.dtypes import DTYPES, values
from training.export.own import Own
from training.export.quantize import Quantised, is_quantised
from training.export.source import Source, safetensors
from training.export.zero import is_deepspeed, open_deepspeed
from training.job import write_json
from training.process import CLOSED, REFUSED, JobError

BESIDE: Final = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "*.model",
)
"""What of a Hugging Face folder goes with weights of the same model."""
RECORD: Final = "conversion.json"


def convert(
    folder: Path,
    out: Path,
    dtype: str = "fp32",
    *,
    max_shard_mb: int = 5000,
    prefix: str = "",
    config: Path | None = None,
) -> dict[str, Any]:
    """Write the weights of a checkpoint folder to `out` and return what was done, which is also in conversion.json.

    `dtype` is fp32, bf16 or fp16: that of all floating tensors. `max_shard_mb` limits a file (10^6 bytes). Of the names
    that begin with `prefix` it is taken off. `config` is a Hugging Face folder of the same model, whose config and
    tokenizer are copied. A tensor with two names is written once, unless that config says that they are not tied.

    A second run with the same arguments does nothing. Raises JobError when the folder cannot be read, is incomplete or
    of another model than `config`, or when `out` holds something else; OSError when the disk is full.
    """
    source = open_source(folder, prefix)
    told = _config(config) if config else {}
    names = _names(source, untied=told.get("tie_word_embeddings") is False)
    _agree(source, names, told, folder)
    plan = {"dtype": dtype, "max_shard_mb": max_shard_mb, "names": names, "config": told}
    digest = place.digest_of(source.files(), plan)
    if (done := _done(out)).get("plan") == digest:
        return done
    if out.exists() and any(out.iterdir()) and not out.with_name(f".{out.name}.plan").exists():
        raise JobError(f"{out} holds something already; remove it or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = place.begin(out, digest)
    targets = _targets(source, names, dtype)
    files = stream.shards(targets, max_shard_mb)
    stream.fits(targets, files, fresh)
    stream.write(source, targets, files, fresh)
    if config:
        copy_beside(config, fresh, dtype)
    result = {
        "dtype": dtype,
        "bytes": sum((fresh / file.name).stat().st_size for file in files),
        "files": [file.name for file in files],
        "parameters": sum(values(target.shape) for target in targets.values()),
        "plan": digest,
        "tensors": len(targets),
        "tied": dict(source.tied),
    }
    write_json(fresh / RECORD, result)
    place.publish(out)
    place.end(out)
    return result


def open_source(folder: Path, prefix: str = "") -> Source:
    """Open a checkpoint folder of any kind that is known. Raises JobError when it is of none."""
    foreign = open_dcp if is_dcp(folder) else open_deepspeed if is_deepspeed(folder) else None
    if foreign is not None:
        try:
            return foreign(folder, prefix)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as problem:
            raise JobError(f"{folder} is not a checkpoint as its kind is written ({problem!r})") from problem
    if (folder / "manifest.json").is_file():
        return Own(folder)
    if is_quantised(folder):
        return Quantised(folder)
    if any(folder.glob("*.safetensors")):
        return safetensors(folder)
    raise JobError(
        f"{folder} is no checkpoint: it has neither Castra's manifest.json, DeepSpeed's latest or *_model_states.pt, "
        "torch's .metadata nor *.safetensors; name the folder that has"
    )


def copy_beside(config: Path, folder: Path, dtype: str) -> None:
    """Copy config, tokenizer and generation config of a Hugging Face folder; config.json is told the new type."""
    for pattern in BESIDE:
        for path in sorted(config.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
    told = json.loads((folder / "config.json").read_text())
    told.pop("torch_dtype", None)
    told.pop("quantization_config", None)
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    write_json(folder / "config.json", told | {"dtype": names[dtype]})


def _names(source: Source, *, untied: bool) -> list[str]:
    """Return the tensors to write, in their order; a name that stands for another's tensor only where asked for."""
    return [*source.tensors, *(source.tied if untied else ())]


def _targets(source: Source, names: Sequence[str], dtype: str) -> dict[str, stream.Target]:
    real = {name: source.tied.get(name, name) for name in names}
    found = stream.targets(source, dict.fromkeys(real.values()), dtype)
    return {name: found[real[name]] for name in names}


def _config(folder: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as problem:
        raise JobError(f"{folder}/config.json cannot be read; --config is a Hugging Face folder") from problem
    return told


def _agree(source: Source, names: Sequence[str], config: dict[str, Any], folder: Path) -> None:
    """Raise JobError when the input embedding is not of the configuration's shape, or there is none to compare."""
    width = config.get("hidden_size") or config.get("n_embd")
    if width is None or "vocab_size" not in config:
        return
    wanted = (config["vocab_size"], width)
    tables = [name for name in names if name.endswith(("embed_tokens.weight", "wte.weight"))]
    if not tables:
        raise JobError(f"{folder} has no embed_tokens.weight among {', '.join(list(names)[:3])}, …; --prefix may help")
    found = source.tensors[tables[0]].shape
    if found != wanted:
        raise JobError(
            f"{folder} is another model's checkpoint: its {tables[0]} is {list(found)} and --config says {list(wanted)}"
        )


def _done(out: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads((out / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return told


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says and return the exit code: 0 done, 2 refused with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m training.export.convert", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, help="the checkpoint")
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist, or be of the same conversion")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="type of the weights")
    parser.add_argument("--max-shard-mb", type=int, default=5000, help="largest file, in 10^6 bytes")
    parser.add_argument("--prefix", default="", help="take the names that begin with this, without it")
    parser.add_argument("--config", type=Path, help="Hugging Face folder whose config and tokenizer go with them")
    asked = parser.parse_args(words)
    try:
        result = convert(
            asked.folder,
            asked.out,
            asked.dtype,
            max_shard_mb=asked.max_shard_mb,
            prefix=asked.prefix,
            config=asked.config,
        )
    except JobError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except OSError as problem:
        if problem.errno not in CLOSED:
            raise
        print(f"{problem.filename or asked.out}: {problem.strerror}; make room or make it writable", file=sys.stderr)
        return REFUSED
    print(json.dumps({name: value for name, value in result.items() if name != "plan"}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
