"""What finished trainings teach the planner: their steps as rows in the store, read by the next plan; and the drift.

    <store>/measured/<instance type>/castra+torch-<version>/<precision>/<training>.csv

One training is one row, whose name is the training's own: however often it is told, it is there once. The columns are
those of planner/tables, so that every table of measured steps is read by the same code.

What is learned must not move a training that has begun: its layout is written down when it begins, and holds.
"""

import contextlib
import csv
import io
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

import numpy as np

import planner
from planner import drift, interval, memory
from planner.achieved import Achieved
from planner.calibrate import adapt, on_site
from planner.keys import key_of
from planner.own import AGAIN, STAGES, offload_of
from planner.profiles import Profiles
from planner.rows import Row, Steps, parse, steps
from recipes import Recipe
from recipes.cluster import AwsCluster, LocalCluster
from recipes.identity import identity
from recipes.spec import Parallel
from recipes.weights import width
from store import Conflict, Store, StoreError, open_store
from store.manifest import Manifest, fingerprint
from store.objects import in_s3
from tasks import calibration
from tasks.phrases import grid

if TYPE_CHECKING:
    from tasks.lineage import Lineage

FOLDER: Final = "measured"
FIRST: Final = 3
"""Steps at a run's start that are left out: allocators, kernels and caches are still finding their places."""
FEWEST: Final = 5
"""Steps that must remain; fewer teach nothing."""
RESOLVED: Final = Parallel(strategy="ddp", micro_batch_size=1, shard=1, tp=1, pp=1, vpp=1, cp=1, ep=1)
KEYS: Final = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
               "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")  # fmt: skip
"""One of these is set where S3 is used; without, a plan does not wait for it."""
PROCESSORS: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Measured:
    """What a training's own journal says of its steps."""

    name: str
    """Of the training; the row's id."""
    step_s: float
    memory_gib: float
    """Most that the first rank held."""
    torch: str
    """Version."""
    save_gb_per_s: float = 0.0
    """At which each node wrote checkpoints; 0 where it was not measured."""


def measured(
    name: str, journal: Sequence[Mapping[str, float]], torch: str, save_gb_per_s: float = 0.0
) -> Measured | None:
    """The median of a journal's steady steps and the most memory of any; None if there are too few steps."""
    told = journal[FIRST:]
    if len(told) < FEWEST:
        return None
    peak = max(record["memory_gib"] for record in journal)
    return Measured(name, median(record["step_seconds"] for record in told), peak, torch, save_gb_per_s)


def row(recipe: Recipe, machine: planner.Machine, ranks: int, found: Measured) -> dict[str, str]:
    """A measured training as a row of a table of steps; the recipe's `parallel` must be resolved."""
    model, strategy, rows = recipe.model, recipe.parallel.strategy, recipe.train.global_batch_size
    micro, zero = int(recipe.parallel.micro_batch_size), STAGES[strategy]
    sizes = {name: int(getattr(recipe.parallel, name)) for name in ("tp", "pp", "vpp", "cp")}
    copies = ranks // (sizes["tp"] * sizes["pp"] * sizes["cp"])
    shape = {
        "hidden": model.hidden_size,
        "ffn": model.ffn_size,
        "gated_mlp": int(model.gated),
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": width(model),
        "vocab": model.vocab_size,
        "tied_emb": int(model.tie_embeddings),
        "seq": recipe.data.sequence_length,
        **dict.fromkeys(("n_experts", "topk", "moe_ffn", "shared_experts", "dense_layers", "mla"), 0),
    }
    layout = {
        **sizes,
        "dp": copies,
        "ep": 1,
        "zero": zero,
        "shard_size": int(recipe.parallel.shard) if strategy == "fsdp2" else copies if zero else 1,
        "mbs": micro,
        "gbs": rows,
        "ga": rows // (micro * copies),
        "recompute": AGAIN[recipe.train.activation_checkpointing],
        "seq_parallel": int(sizes["tp"] > 1),
        "flash_attn": 1,
        "precision": recipe.train.precision,
        "tp_overlap": 0,
        "compile": int(recipe.train.compile),
        "offload": offload_of(recipe.parallel),
    }
    place = {
        "hw": machine.chip,
        "gpus_per_node": machine.accelerators,
        "inter_node_gbps": machine.inter_gbps,
        "n_gpus": ranks,
        "framework": f"castra-{strategy}",
        "framework_version": f"torch {found.torch}",
    }
    configuration = {name: str(value) for name, value in {**place, **shape, **layout}.items()}
    figures = {
        "iter_s": f"{found.step_s:.6g}",
        "mem_gib": f"{found.memory_gib:.4g}",
        "usable": "time+mem",
        "save_gb_per_s": f"{found.save_gb_per_s:.4g}",
    }
    return {"id": found.name, "source": "castra"} | configuration | figures | {"group": fingerprint(configuration)}


def learn(lineage: "Lineage", trained: Manifest, machine: planner.Machine) -> None:
    """Compare a finished training with what was predicted, show that, and keep its steps for the next plan.

    Nothing happens where the training was learned from before. A training is never lost for want of a lesson: what
    prevents one is told and forgotten.
    """
    from tasks import report  # Prefect costs more than the plan that imports this module

    try:
        _learn(lineage, trained, machine)
    except (planner.PlanError, StoreError) as problem:
        report.warn(f"nothing was learned from {trained.key}: {problem}")


@dataclass(frozen=True)
class Lessons:
    """What a plan goes by."""

    recipe: Recipe
    """With the layout that its training began with; as it was where none has begun, or nothing is left open."""
    rows: list[Row]
    """Measured on its machines."""
    achieved: Achieved | None = None
    """What these reached in micro-benchmarks."""

    @property
    def profiles(self) -> Profiles:
        """The shipped ones, laid over by what the machines reached, adapted to what was measured on them."""
        plain = adapt(Profiles.shipped(), self.rows) if self.rows else Profiles.shipped()
        if self.achieved is None:
            return plain
        site = replace(Profiles.shipped(), achieved=self.achieved)
        return replace(adapt(site, self.rows), plain=plain) if self.rows else site

    def save_advice(self, step_s: float, accelerators: int) -> str | None:
        """How often to save checkpoints, as a sentence; None on this machine, whose cores do not fail as GPUs do."""
        train, cluster = self.recipe.train, self.recipe.cluster
        if isinstance(cluster, LocalCluster):
            return None
        rate, basis = self._save_rate(cluster)
        save_s = interval.planned_save_s(interval.saved_weights(self.recipe), cluster.nodes, rate)
        every = train.checkpoint_every
        if every == "auto":
            every = interval.advise(step_s, save_s, accelerators, 1, train.steps).every
        advice = interval.advise(step_s, save_s, accelerators, every, train.steps)
        return f"{str(advice).removesuffix('.')} at {rate:.3g} GB/s per node ({basis})."

    @property
    def save_gb_per_s(self) -> float:
        """At which each node saves: measured, or likely."""
        cluster = self.recipe.cluster
        return interval.NODE_GB_PER_S if isinstance(cluster, LocalCluster) else self._save_rate(cluster)[0]

    def _save_rate(self, cluster: AwsCluster) -> tuple[float, str]:
        """GB/s at which each node saves: the fastest measured (small models save more slowly), or what is likely."""
        if found := max((float(one.get("save_gb_per_s") or 0) for one in self.rows), default=0.0):
            return found, "measured"
        if cluster.lustre_gib:
            from clusters.stacks.files import MB_PER_S_PER_TIB

            return MB_PER_S_PER_TIB * cluster.lustre_gib / 1024 / 1000 / cluster.nodes, "its share of FSx for Lustre"
        return interval.NODE_GB_PER_S, "assumed"


def lessons(recipe: Recipe) -> Lessons:
    """What the store knows of the recipe's machines and of its training.

    Planning creates nothing and waits for nobody: a store that is not there, or not within reach, knows nothing.
    Raises `planner.PlanError` if a table in the store was spoilt, `StoreError` if the store fails while it is read.
    """
    store = _store(recipe)
    if store is None:
        return Lessons(recipe, [])
    reached = calibration.nearest(store, instance(recipe), recipe.train.precision, recipe.cluster.nodes)
    return Lessons(_begun(store, recipe), remembered(store, recipe), reached)


def remembered(store: Store, recipe: Recipe) -> list[Row]:
    """The steps measured on the recipe's machines in its precision, by the newest software.

    A plan is made for whatever software is there, so the rows are given without its version: that was chosen here.
    """
    place = f"{FOLDER}/{instance(recipe)}/"
    keys = [key for key in store.keys(place) if key.split("/")[-2] == recipe.train.precision]
    newest = max((_version(key) for key in keys), default=())
    rows = [row for key in keys if _version(key) == newest for row in _rows(store, key)]
    return [{**row, "framework_version": ""} for row in rows]


def calibrate(recipe: Recipe, result: Mapping[str, Any], machine: planner.Machine) -> Achieved | None:
    """Keep what `training.checks.calibrate` measured on a recipe's cluster, its result.json, for the next plan.

    Nothing is kept of a cluster that is emulated; figures that cannot be true are told, and refuse no cluster.
    """
    from tasks import report

    if not machine.local and result["device"] == "cpu":
        return None
    try:
        found = calibration.keep(open_store(recipe.store), instance(recipe), machine, result)
    except (planner.PlanError, StoreError) as problem:
        report.warn(f"the calibration of {recipe.name}'s cluster is not kept: {problem}")
        return None
    report.say(f"the next plan goes by what this cluster reached: {found}")
    return found


def instance(recipe: Recipe) -> str:
    """The instance type; of this machine its processor, so that one store may serve several machines."""
    if not isinstance(recipe.cluster, LocalCluster):
        return recipe.cluster.instance_type
    return "local-" + re.sub(r"[^a-z0-9]+", "-", f"{os.cpu_count()} x {_processor()}".lower()).strip("-")


def begin(lineage: "Lineage") -> None:
    """Write down with which layout a training begins, unless that was done before."""
    chosen = lineage.recipe.parallel.model_dump(mode="json")
    key = _begun_key(lineage.recipe, lineage.asked)
    try:
        lineage.store.put(key, json.dumps(chosen, sort_keys=True).encode(), if_absent=True)
    except Conflict:
        return


def _begun(store: Store, recipe: Recipe) -> Recipe:
    if "auto" not in recipe.parallel.model_dump(exclude={"recompute"}).values():
        return recipe
    found = store.get(_begun_key(recipe, recipe.parallel))
    if found is None:
        return recipe
    return recipe.model_copy(update={"parallel": Parallel.model_validate_json(found.data)})


def _store(recipe: Recipe) -> Store | None:
    there = any(os.environ.get(name) for name in KEYS) if in_s3(recipe.store) else _folder(recipe.store).is_dir()
    with contextlib.suppress(StoreError):
        return open_store(recipe.store) if there else None
    return None


def _folder(url: str) -> Path:
    parts = urlsplit(url)
    return Path(unquote(parts.path) if parts.scheme else url).expanduser()


def _begun_key(recipe: Recipe, asked: Parallel) -> str:
    """Covers what a training's identity covers, with the layout as it was asked for, and the machines."""
    plain = recipe.model_copy(update={"parallel": RESOLVED})
    whole = identity(plain, "train", {"dataset": ""}, world_size=0)["recipe"]
    machines = [instance(recipe), recipe.cluster.nodes, getattr(recipe.cluster, "processes_per_node", 0)]
    told = whole | {"asked": asked.model_dump(mode="json"), "length": recipe.data.sequence_length, "on": machines}
    return f"layouts/{recipe.name}@{fingerprint(told)}.json"


def _learn(lineage: "Lineage", trained: Manifest, machine: planner.Machine) -> None:
    from tasks import report

    recipe, store = lineage.recipe, lineage.store
    name, torch = trained.key.partition("/")[2], str(trained.facts.get("torch", "unknown"))
    key = f"{FOLDER}/{instance(recipe)}/castra+torch-{torch}/{recipe.train.precision}/{name}.csv"
    emulated = not machine.local and trained.facts.get("device") == "cpu"
    if emulated or recipe.train.lora_rank or store.get(key) is not None:  # the tables have no row for adapters
        return
    found = measured(name, _journal(store, trained), torch, _save_rate(recipe, trained))
    if found is None:
        report.say(f"{trained.key} is too short to learn from: {FIRST} steps warm up, {FEWEST} more are needed")
        return
    mine, before = row(recipe, machine, int(trained.facts["world_size"]), found), lessons(recipe)
    table = _table(mine)
    parse(Path(key), table.decode())  # what cannot be read back is not kept
    known = before.profiles
    _show(_drift(known, on_site(known, steps([mine | {"framework_version": ""}, *before.rows], known.links))))
    store.put(key, table)
    report.say(f"the planner learned from {name}: {found.step_s:.3g} s a step, {found.memory_gib:.3g} GiB per rank")


def _save_rate(recipe: Recipe, trained: Manifest) -> float:
    seconds = float(trained.facts.get("save_seconds", 0))
    size = interval.saved_weights(recipe) * interval.BYTES_PER_WEIGHT
    return size / recipe.cluster.nodes / seconds / 1e9 if seconds else 0.0


def _drift(known: Profiles, rows: Steps) -> drift.Drift:
    """The first row beside its prediction; the others of its profile help to tell which phase is off."""
    keys = [key_of(one) for one in rows.rows]
    mine, one = rows.of(np.array([key == keys[0] for key in keys])), rows.of(np.arange(len(keys)) == 0)
    key = keys[0]
    profile = known.find(key.accelerator, key.framework, key.precision, per_node=key.per_node, gbps=key.gbps)
    predicted = profile.seconds(one.configs)
    times = tuple(float(np.ravel(value)[0]) for value in (predicted.seconds, predicted.low, predicted.high))
    parts = memory.breakdown(one.configs, profile.memory)
    gib = {name: float(np.ravel(value)[0]) for name, value in parts.items()}
    return drift.explain(mine, (times[0], times[1], times[2]), gib, profile.constants)


def _show(found: drift.Drift) -> None:
    from tasks import pictures, report

    within = f"{found.low:.3g} to {found.high:.3g}"
    rows: list[dict[str, Any]] = [
        {"what": "s/step", "planned": found.seconds, "90 % interval": within, "measured": found.measured_seconds},
        {"what": "GiB/rank", "planned": found.gib, "90 % interval": "", "measured": found.measured_gib},
    ]
    report.table("drift", [one | {"off": f"{one['measured'] / one['planned'] - 1:+.1%}"} for one in rows], "Drift")
    phases = sorted(found.phases.items(), key=lambda item: -item[1])
    drawn = pictures.bars(
        "one step", "seconds", [("measured", found.measured_seconds), ("planned", found.seconds), *phases]
    )
    told = found.sentences()
    words = "\n\n".join(told) or f"Within the 90 % interval ({within} s a step): the plan was right."
    report.page("drift-phases", f"{words}\n\n{drawn}\n\n{grid(_suspects(found))}", "Planned and measured")
    for sentence in told:
        report.warn(f"drift: {sentence}")


def _suspects(found: drift.Drift) -> list[dict[str, Any]]:
    return [
        {
            "phase": one.phase,
            "constant": one.constant,
            "planned": one.value,
            "needed": one.needed,
            "left": f"{one.left:.1%}",
        }
        for one in found.suspects
    ]


def _journal(store: Store, trained: Manifest) -> list[dict[str, float]]:
    """Every whole line; a crash may have torn the last of an attempt."""
    found = store.get(f"{trained.key}/progress.jsonl")
    lines = found.data.decode().splitlines() if found else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def _rows(store: Store, key: str) -> list[Row]:
    found = store.get(key)
    return parse(Path(key), found.data.decode()).rows if found else []


def _table(one: Mapping[str, str]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(one), lineterminator="\n")
    table.writeheader()
    table.writerow(one)
    return text.getvalue().encode()


def _version(key: str) -> tuple[int, ...]:
    """The version of the software in a key, as numbers to compare."""
    return tuple(
        int(number) for number in re.findall(r"\d+", key.split("/")[-3].partition("torch-")[2].partition("+")[0])
    )


def _processor() -> str:
    """The model of this machine's processor."""
    lines = PROCESSORS.read_text().splitlines() if PROCESSORS.exists() else []
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return told[0] if told else platform.machine()
