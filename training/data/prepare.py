"""Turn documents into packed tokens: read, clean, deduplicate, split, train a tokenizer, encode, pack.

    python -m training.data.prepare job.json

The same documents give the same bytes, whatever the machine, its processes and the number of nodes. The work is cut
into pieces by the input alone (`training.data.records`); the result of each is a file under .parts-… of the output,
there or not there, so that a run that was killed goes on where it was. dataset.json comes after every shard,
result.json last. On several nodes (data.nodes, each started as the platform of `training.contract` does) each takes its
share of the pieces.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from training import contract
from training.alone import alone
from training.data import join, pack, tokens
from training.data.clean import TRAIN, Limits
from training.data.format import FORMAT, Layout, file_sha256, part_facts, write_facts
from training.data.learn import learn, take
from training.data.parts import Parts
from training.data.records import Fields, units
from training.data.sources import Document, SourceError, documents, inventory
from training.data.survey import Scheme, Work, chat_of, encode, survey
from training.data.team import Team, cores
from training.job import NodeJob, say
from training.process import JobError

SMALL: Final = 64 << 20
"""Bytes of input up to which one process is as quick as many, which take a second to start."""
TROUBLES: Final = 5
"""Sentences about broken records that are told."""


def prepare(job: NodeJob) -> None:
    """Write tokenizer.json, the shards, held_out.jsonl, dataset.json and result.json under job.output.

    Raises SourceError for a source, tokenizer or split that cannot be used.
    """
    began = time.monotonic()
    data = job.spec["data"]
    place = _place(int(data.get("nodes", 1)))
    listed = documents(data["source"], data["include"], data["max_documents"])
    if place.rank == 0:
        _same_text(listed, data)
    work = _work(job, listed, place)
    team = Team(work.parts, _workers(data, work), place.rank, place.nodes, pack.pack)
    with team:
        work, facts = _encoded(job, team, work)
        packing = _packing(job, work, facts)
        team.once(pack.count, "ledger", work)
        team.every(pack.pack, pack.names(packing), packing, "shard packed")
    if place.rank == 0:
        _finish(job, packing, facts)
        say("prepared", seconds=round(time.monotonic() - began, 1), **_result(job))
    if place.rank == 0 or work.exchange:
        shutil.rmtree(work.folder, ignore_errors=True)


def _encoded(job: NodeJob, team: Team, work: Work) -> tuple[Work, Mapping[str, Any]]:
    """Look at every unit, decide what stays, and encode it; return the work with its scheme, and the tokenizer's facts.

    Where the tokenizer is there already, units are encoded in the same pass as they are looked at.
    """
    given = _given(job)
    if given is not None:
        team.once(take, "tokenizer", work, given, _vocabulary(job))
        work, facts = _with_scheme(job, work)
        _select(job, team, work)
        return work, facts
    _select(job, team, work)
    template = "" if not work.fields.chat else job.spec["data"]["chat_template"]
    team.once(learn, "tokenizer", work, _vocabulary(job), template)
    work, facts = _with_scheme(job, replace(work, surveyed=True))
    sizes = [unit.size for unit in work.units]
    team.every(encode, [f"encoded-{i:06d}" for i in range(len(work.units))], work, "MB encoded", sizes)
    return work, facts


def _select(job: NodeJob, team: Team, work: Work) -> None:
    """Look at every unit and decide what becomes of each document."""
    sizes = [unit.size for unit in work.units]
    team.every(survey, [f"survey-{i:06d}" for i in range(len(work.units))], work, "MB read", sizes)
    most = job.spec["data"]["max_documents"] if any(unit.documents[0].ending for unit in work.units) else None
    team.once(join.exact, "exact", work, most)
    if work.threshold < 1:
        bands = [f"band-{i:03d}" for i in range(join.bands(work.threshold))]
        team.every(join.band, bands, work, "band sorted")
        pieces = [f"alike-{i:04d}" for i in range(join.pieces(work))]
        team.every(join.compare, pieces, work, "piece compared")
    team.once(join.select, "selected", work)
    if team.node == 0:
        told = work.parts.open("selected").facts
        say("selected", train=told["train"], held_out=told["held_out"], dropped=told["dropped"])
        troubles = [sentence for i in range(len(work.units)) if (sentence := work.looked_at(i).facts["trouble"])]
        for sentence in troubles[:TROUBLES]:
            say("broken-record", message=sentence, units=len(troubles))


def _place(nodes: int) -> contract.Node:
    """Return this node's place among those that prepare the data, first by torchrun's words. Raises JobError."""
    place = contract.read(os.environ)
    if "GROUP_WORLD_SIZE" in os.environ:
        place = replace(place, nodes=int(os.environ["GROUP_WORLD_SIZE"]), rank=int(os.environ["GROUP_RANK"]))
    if nodes == 1:
        return replace(place, nodes=1, rank=0)
    if place.nodes != nodes:
        raise JobError(f"data.nodes is {nodes} and the job has {place.nodes} nodes; ask the cluster for {nodes}")
    return place


def _work(job: NodeJob, listed: Sequence[Document], place: contract.Node) -> Work:
    """Cut the input up, and open the folder of results; those of another input or recipe are removed."""
    data = job.spec["data"]
    identity = _identity(job, listed)
    folder = job.output / f".parts-{identity}"
    job.output.mkdir(parents=True, exist_ok=True)
    exchange = ""
    if place.nodes > 1 and os.environ.get("CASTRA_PRIVATE_OUTPUT") == "1":
        exchange = os.environ.get("CASTRA_OUTPUT_URL", "")
        if not exchange:
            raise JobError("data.nodes above 1 needs an output folder that all nodes see, or one in S3")
        exchange = f"{exchange.rstrip('/')}/.parts-{identity}"
    if place.rank == 0:
        if not folder.exists():
            (job.output / "dataset.json").unlink(missing_ok=True)
        for other in job.output.glob(".parts-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    chat = data.get("kind", "text") == "chat"
    fields = Fields(chat, data.get("text_field", "text"), data.get("messages_field", "messages"), data["max_chars"])
    limits = Limits(data["min_chars"], data["max_chars"])
    Parts(folder, exchange)
    cut = tuple(units(listed))
    return Work(cut, fields, limits, data["near_duplicate"], data["held_out"], folder, exchange)


def _identity(job: NodeJob, listed: Sequence[Document]) -> str:
    """Return a hash of all that results depend on, so that those of something else are never taken."""
    data = {name: value for name, value in job.spec["data"].items() if name not in ("workers", "nodes", "digest")}
    given = _given(job)
    tokenizer = file_sha256(tokens.found_at(given)) if given else ""
    told = [FORMAT, data, _vocabulary(job), tokenizer, [astuple(one) for one in listed]]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def _same_text(listed: Sequence[Document], data: Mapping[str, Any]) -> None:
    """Refuse text that is not what the control plane named this dataset after, where it told its digest."""
    wanted = data.get("digest")
    if wanted and wanted != (found := str(inventory(listed)["digest"])):
        raise SourceError(
            f"data.source {data['source']!r} holds other text on this node (digest {found[:12]}) than where the run "
            f"was started ({wanted[:12]}): put the same files, or the same Python, on both"
        )


def _workers(data: Mapping[str, Any], work: Work) -> int:
    asked = data.get("workers", "auto")
    if asked != "auto":
        return int(asked)
    return cores() if sum(unit.size for unit in work.units) > SMALL else 1


def _given(job: NodeJob) -> Path | None:
    """Return the path of the tokenizer the job names, None where one is learned."""
    told = job.spec["data"]["tokenizer"]
    return job.inputs.get("tokenizer") or (None if told == "train" else Path(told).expanduser())


def _vocabulary(job: NodeJob) -> int:
    return int(job.spec["model"]["vocab_size"])


def _with_scheme(job: NodeJob, work: Work) -> tuple[Work, Mapping[str, Any]]:
    """Put the tokenizer's files on this node, and say how text becomes ids. Raises SourceError."""
    part = work.parts.open("tokenizer")
    work.tokenizer.parent.mkdir(exist_ok=True)
    for name, content in part.pages[0].items():
        with pack.fresh(work.tokenizer.with_name(name)) as out:
            out.write(content.tobytes())
    facts = part.facts
    frame = tokens.Frame(facts["bos_id"], facts["eos_id"], facts["dtype"])
    template = job.spec["data"]["chat_template"] if work.fields.chat else ""
    scheme = Scheme(work.tokenizer, frame, bool(facts["fast"]), template)
    if work.fields.chat:
        chat_of(scheme)
    return replace(work, scheme=scheme), facts


def _packing(job: NodeJob, work: Work, facts: Mapping[str, Any]) -> pack.Packing:
    data = job.spec["data"]
    length, stream = int(data["sequence_length"]), data.get("packing", "concat") == "concat"
    marks = work.fields.chat or data.get("documents_apart", False) or not stream
    layout = Layout(length, length if stream else length + 1, facts["dtype"], bool(marks))
    megatron = facts["vocab_size"] if data.get("megatron") else 0
    return pack.Packing(work, job.output, layout, facts["pad_id"], megatron)


def _finish(job: NodeJob, packing: pack.Packing, facts: Mapping[str, Any]) -> None:
    """Write the tokenizer's files, dataset.json and, when nothing is left of the work, result.json."""
    work, output, data = packing.work, job.output, job.spec["data"]
    for path in sorted(work.tokenizer.parent.iterdir()):
        with pack.fresh(output / path.name) as out:
            out.write(path.read_bytes())
    told = work.parts.open("ledger")
    ledger = told.pages[0]["ledger"]
    shards = [one for name in pack.names(packing) if name.startswith("train") for one in pack.noted(work, name)]
    dataset = {
        "dtype": np.dtype(facts["dtype"]).name,
        "sequence_length": packing.layout.length,
        "stride": packing.layout.stride,
        "vocab_size": facts["vocab_size"],
        "eos_id": facts["eos_id"],
        "pad_id": facts["pad_id"],
        "bos_id": facts["bos_id"],
        "kind": data.get("kind", "text"),
        "packing": data.get("packing", "concat"),
        "documents_apart": bool(data.get("documents_apart", False)),
        "marks": packing.layout.marks,
        "tokenizer_sha256": file_sha256(output / "tokenizer.json"),
        "encoded_by": facts["library"],
        "train": _part(ledger, TRAIN, shards),
        "held_out": _part(ledger, TRAIN + 1, pack.noted(work, pack.HELD)),
        "sources": _sources(work, ledger),
        "dropped": told.facts["dropped"],
    }
    for stray in (*output.glob(".*.partial"), *output.glob(".*.json.[0-9]*")):
        stray.unlink()
    write_facts(output, dataset)
    work.parts.clear()
    job.finish(_summary(dataset))


def _part(ledger: Any, part: int, shards: Sequence[Any]) -> dict[str, Any]:
    count, size_tokens, size = ledger[:, part].sum(axis=0).tolist()
    return part_facts(shards, size_tokens, count, size)


def _sources(work: Work, ledger: Any) -> dict[str, dict[str, int]]:
    """Return documents, tokens and bytes of every source, training and held out together."""
    found: dict[str, Any] = {}
    for unit, counted in zip(work.units, ledger.sum(axis=1), strict=True):
        found[unit.documents[0].source] = found.get(unit.documents[0].source, 0) + counted
    return {
        source: dict(zip(("documents", "tokens", "bytes"), total.tolist(), strict=True))
        for source, total in found.items()
    }


def _summary(dataset: Mapping[str, Any]) -> dict[str, Any]:
    """Return result.json: the dataset's facts without its list of shards, and their sums."""
    parts = {name: {key: dataset[name][key] for key in dataset[name] if key != "shards"} for name in PARTS}
    total = {key: sum(parts[name][key] for name in PARTS) for key in ("documents", "bytes", "tokens")}
    return dict(dataset) | parts | total | {"bytes_per_token": round(total["bytes"] / total["tokens"], 4)}


def _result(job: NodeJob) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((job.output / "result.json").read_text())
    return told


PARTS: Final = ("train", "held_out")

if __name__ == "__main__":
    alone(prepare)
