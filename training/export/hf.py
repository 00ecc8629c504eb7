"""Export a checkpoint as a Hugging Face folder and prove that it computes what the trained model computes.

    python -m training.export.hf job.json

The folder holds safetensors, config, generation config, tokenizer and model card. The weights go from the checkpoint's
files to the folder's a block at a time; the folder is written beside its place, loaded back by
`AutoModelForCausalLM.from_pretrained`, compared weight by weight and logit by logit with the checkpoint, and only then
gets its name. Nothing in it tells the time or the machine: the same checkpoint gives the same bytes, also where an
export was killed and started again, which goes on with the files that were whole.
"""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from training.alone import alone
from training.data.format import held_out_tokens, read_facts
from training.export import lora, parity, place, stream
from training.export.card import model_card
from training.export.convert import open_source
from training.export.dtypes import converter, values
from training.export.own import Own
from training.export.quantize import LOSS_RISE, quantise
from training.export.source import Layered, Memory, Source, safetensors, tensor
from training.export.tokenizer import check_tokenizer, write_tokenizer
from training.export.upload import push
from training.job import NodeJob, say
from training.process import JobError
from training.score.likelihood import total_nats
from training.score.text import choose
from training.score.trained import agree, base_folder, newest, skeleton_of, trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER: Final = "adapter"
"""Folder in the export with the adapters, where they are not added to the weights."""
JUDGED: Final = 16_384
"""Held-out tokens on which a quantised copy's loss is compared with the export's."""


def export(job: NodeJob) -> None:
    """Write job.output/hf, upload it where export.push_to says so, and write result.json.

    Raises JobError when there is no complete checkpoint or it is of another model, when a logit differs by more than
    export.parity_tolerance from the trained model's (whose weights are first rounded to export.dtype), when quantising
    costs too much, or when S3 or the Hub refuses.
    """
    dataset, asked = job.inputs["dataset"], job.spec["export"]
    facts, out = read_facts(dataset), job.output / "hf"
    network = skeleton_of(job, facts)
    with weights_of(job, network) as (source, adapters):
        digest = place.digest_of([*source.files(), dataset / "dataset.json"], _plan(job))
        fresh = place.begin(out, digest)
        write_tokenizer(dataset, facts, job.spec["data"].get("chat_template", "tokenizer"), fresh)
        check_tokenizer(dataset, facts, fresh)
        result = _weights(job, facts, network, source, fresh)
        if adapters is not None:
            base = job.spec["model"].get("pretrained") or job.spec["name"]
            result["adapter"] = lora.write_adapter(adapters, job.spec["train"], asked["dtype"], base, fresh / ADAPTER)
        result |= _proof(job, facts, source, fresh)
        if asked.get("quantize", "none") != "none":
            result["quantized"] = _quantised(job, facts, source, fresh)
    (fresh / "README.md").write_text(model_card(job, facts, result))
    result["files"] = sorted(path.relative_to(fresh).as_posix() for path in fresh.rglob("*") if path.is_file())
    place.publish(out)
    if asked.get("push_to"):
        result["pushed"] = push(out, asked["push_to"])
    job.finish(result)
    place.end(out)
    say("exported", **result)


@contextlib.contextmanager
def weights_of(job: NodeJob, network: "PreTrainedModel") -> Iterator[tuple[Source, Source | None]]:
    """Give the trained weights by the network's names, adapters added or, by export.merge_lora false, apart.

    The second source has the adapters, None where they are added or there are none. Raises JobError when the newest
    checkpoint is of another model.
    """
    from training.model.experts import stored_weights

    checkpoint = newest(job)
    agree(job, checkpoint)
    shapes = {name: tuple(weight.shape) for name, weight in stored_weights(network)}
    own = Own(checkpoint)
    try:
        source: Source = own
        absent = [name for name in shapes if name not in own.tensors]
        if absent and lora.adapted(own):
            source = _over_base(job, network, own, absent)
            if job.spec["train"].get("lora_base") == "nf4":
                source = lora.Rounded(source, [f"{stem}.weight" for stem in lora.adapted(own)])
        for name, shape in shapes.items():
            if name not in source.tensors or source.tensors[name].shape != shape:
                found = list(source.tensors[name].shape) if name in source.tensors else "absent"
                raise JobError(f"{checkpoint} is of another model: {name} is {found} there and {list(shape)} here")
        train, apart = job.spec["train"], not job.spec["export"].get("merge_lora", True)
        if not lora.adapted(source):
            yield source, None
        elif apart:
            yield source, source
        else:
            yield lora.Merged(source, train["lora_alpha"], transposed=network.config.model_type == "gpt2"), None
    finally:
        own.close()


def write_weights(
    source: Source, network: "PreTrainedModel", dtype: str, max_shard_mb: int, folder: Path
) -> dict[str, stream.Target]:
    """Write a network's weights, tied ones once, in files of at most max_shard_mb; returns what was written."""
    from training.model.experts import stored_weights

    targets = stream.targets(source, [name for name, _ in stored_weights(network)], dtype)
    files = stream.shards(targets, max_shard_mb)
    for stale in set(folder.glob("*.safetensors")) - {folder / file.name for file in files}:
        stale.unlink()
    stream.fits(targets, files, folder)
    stream.write(source, targets, files, folder)
    return targets


def write_config(network: "PreTrainedModel", eos_id: int, dtype: str, folder: Path) -> None:
    """Write config.json and generation_config.json."""
    import torch
    from transformers import GenerationConfig

    config = network.config
    config.architectures = [type(network).__name__]
    config.eos_token_id = eos_id
    config.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=eos_id, do_sample=False).save_pretrained(folder)


def _plan(job: NodeJob) -> dict[str, Any]:
    """Return what of a recipe decides the bytes of the weights."""
    train = {name: job.spec["train"].get(name) for name in ("lora_rank", "lora_alpha", "lora_base", "seed")}
    asked = {name: job.spec["export"].get(name) for name in ("dtype", "max_shard_mb", "merge_lora", "quantize")}
    return {"model": job.spec["model"], "export": asked, "train": train}


def _over_base(job: NodeJob, network: "PreTrainedModel", own: Own, absent: list[str]) -> Source:
    """Return a checkpoint of adapters alone over the weights that training began with and kept frozen."""
    folder = base_folder(job)
    if folder is None:
        return Layered(own, Memory(_drawn(job, network)), {name: name for name in absent})
    base = safetensors(folder)
    there = {name: name if name in base.tensors else name.partition(".")[2] for name in absent}
    return Layered(own, base, {name: theirs for name, theirs in there.items() if theirs in base.tensors})


def _drawn(job: NodeJob, network: "PreTrainedModel") -> dict[str, Any]:
    """Return the random weights that training began with."""
    import torch

    from training.model import allocate, materialise
    from training.model.experts import stored_weights

    allocate(network, torch.device("cpu"))
    materialise(network, job.spec["train"]["seed"])
    return {name: weight.detach().numpy() for name, weight in stored_weights(network)}


def _weights(
    job: NodeJob, facts: dict[str, Any], network: "PreTrainedModel", source: Source, folder: Path
) -> dict[str, Any]:
    asked = job.spec["export"]
    write_config(network, facts["eos_id"], asked["dtype"], folder)
    targets = write_weights(source, network, asked["dtype"], asked["max_shard_mb"], folder)
    return {
        "parameters": sum(values(target.shape) for target in targets.values()),
        "dtype": asked["dtype"],
        "bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        "weights_sha256": parity.weights_sha256(folder),
    }


def _proof(job: NodeJob, facts: dict[str, Any], source: Source, folder: Path) -> dict[str, Any]:
    asked, tokens = job.spec["export"], held_out_tokens(job.inputs["dataset"], facts)
    rows = parity.rows_of(tokens, int(facts["sequence_length"]), job.spec["model"]["vocab_size"])
    model = trained(job, facts)
    if job.spec["train"].get("lora_rank") and not asked.get("merge_lora", True):
        parity.prove_adapter(model, folder / ADAPTER / lora.WEIGHTS, asked["dtype"])
        _without_adapters(model)
    proof = parity.prove(model, source, folder, rows, asked["dtype"])
    if not proof.difference <= asked["parity_tolerance"]:
        raise JobError(
            f"the exported model's logits differ by up to {proof.difference:.2g} from the trained model's, and "
            f"export.parity_tolerance is {asked['parity_tolerance']:.2g}; raise it only if you know why they differ"
        )
    return {
        "parity_max_abs_diff": proof.difference,
        "parity_tokens": proof.tokens,
        "parity_tensors": proof.tensors,
    }


def _without_adapters(model: "PreTrainedModel") -> None:
    """Let a model compute what its frozen weights alone do: that is what the folder beside the adapters holds."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.zero_()


def _quantised(job: NodeJob, facts: dict[str, Any], source: Source, fresh: Path) -> dict[str, Any]:
    """Write the quantised copy beside the export and say what it costs. Raises JobError when that is too much."""
    kind, dtype = job.spec["export"]["quantize"], job.spec["export"]["dtype"]
    out = job.output / f"hf-{kind}"
    digest = place.digest_of(source.files(), _plan(job))
    folder = place.begin(out, digest)
    for path in fresh.iterdir():
        if path.is_file() and not path.name.startswith(("model", ".", "README")):
            shutil.copyfile(path, folder / path.name)
    told = quantise(source, safetensors(fresh).tensors, kind, dtype, folder, job.spec["export"]["max_shard_mb"])
    before, after = (_loss(job, facts, one) for one in (fresh, folder))
    told |= {"kind": kind, "loss": after, "loss_change": after - before, "loss_limit": LOSS_RISE[kind]}
    if not after - before <= LOSS_RISE[kind]:
        raise JobError(
            f"the {kind} copy's held-out loss is {after:.4f} nats per token, {after - before:.4f} above the export's, "
            f"and {LOSS_RISE[kind]} is allowed; set export.quantize to {'int8 or ' if kind == 'int4' else ''}none"
        )
    place.publish(out)
    place.end(out)
    return told


def _loss(job: NodeJob, facts: dict[str, Any], folder: Path) -> float:
    """Return the held-out loss (nats per token) of an exported or quantised folder, computed in fp32."""
    import torch

    from training.model import allocate
    from training.model.experts import stored_weights

    network = skeleton_of(job, facts)
    allocate(network, torch.device("cpu"))
    source = open_source(folder)
    with torch.no_grad():
        for name, weight in stored_weights(network):
            whole = converter(name, source.tensors[name].dtype, "F32")(tensor(source, name))
            weight.copy_(torch.from_numpy(whole))
    held_out = choose(job.inputs["dataset"], facts, JUDGED)
    nats = total_nats(network, held_out, int(facts["sequence_length"]), facts["eos_id"])
    return nats / (len(held_out.tokens) if held_out.learned is None else int(held_out.learned.sum()))


if __name__ == "__main__":
    alone(export)
