"""Castra's own layouts: its strategies over all ranks, and FSDP2 with tensor, pipeline and context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Final

from planner.errors import DoesNotDivide
from planner.estimate import Layout
from planner.judge import Site, Work
from planner.software import STRATEGIES
from planner.space import divisors

if TYPE_CHECKING:
    from recipes.spec import Parallel, Recipe

STAGES: Final = {"ddp": 0, "zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp2": 3}
"""The ZeRO stage of each of Castra's strategies."""
SIZES: Final = ("tp", "pp", "vpp", "cp")
TRIED: Final = {"tp": (1, 2, 4, 8), "pp": (1, 2, 4, 8), "vpp": (1, 2, 4), "cp": (1, 2, 4, 8)}
"""Sizes that are tried where a recipe leaves them open; larger ones it can ask for."""
LEAST_TOKENS: Final = 2048
"""Where it is left open, context parallelism leaves each rank at least this many tokens of a sequence."""
AGAIN: Final[dict[bool | str, str]] = {False: "none", True: "full", "selective": "all_but_products"}
"""What `train.activation_checkpointing` means, in the words of `schema.RECOMPUTE`."""


@dataclass(frozen=True, slots=True)
class Cut:
    """How the model is cut up among the ranks; what remains of them is data parallel."""

    tp: int
    pp: int
    vpp: int
    cp: int

    @property
    def ranks(self) -> int:
        """That hold one model together, before any sharding."""
        return self.tp * self.pp * self.cp

    @property
    def whole(self) -> bool:
        """Whether the model is not cut up at all."""
        return self.ranks == 1


def layouts(recipe: Recipe, site: Site) -> list[Layout]:
    """All layouts that Castra's own program may be planned in: what the recipe asks for, and what else there is.

    Raises `DoesNotDivide` if nothing divides, or if what the recipe prescribes does not.
    """
    if asks_to_cut(recipe.parallel):
        if whole := _stays_whole(recipe):
            raise DoesNotDivide(f"parallel.tp, pp and cp do not cut up {whole}: leave them out.")
        free = recipe.model_copy(update={"parallel": type(recipe.parallel)()})
        return cut_layouts(recipe, site) + (_over_all(free, site) if _even(recipe, site) else [])
    others = [] if site.machine.local else _cut_or_none(recipe, site)
    if others and not _even(recipe, site):
        return others
    return own_layouts(recipe, site) + others


def own_layouts(recipe: Recipe, site: Site) -> list[Layout]:
    """Each of Castra's strategies over all ranks, with every micro batch that divides a rank's part of the batch.

    Raises `DoesNotDivide` if nothing does, or if what the recipe prescribes does not.
    """
    nodes, processes = counts_of(site)
    ranks, batch = nodes * processes, recipe.train.global_batch_size
    if batch % ranks:
        raise DoesNotDivide(_uneven(batch, nodes, processes))
    if why := _against_micro(recipe, ranks) or _against_shard(recipe.parallel, ranks):
        raise DoesNotDivide(why)
    found = _over_all(recipe, site)
    if not any(one.strategy == recipe.parallel.strategy for one in found) and recipe.parallel.strategy != "auto":
        raise DoesNotDivide(
            "a model with experts is not trained with zero3: take parallel.strategy fsdp2 or zero2."
            if recipe.model.experts
            else "DeepSpeed has no fp16 on CPUs: take train.precision bf16 or fp32, or parallel.strategy ddp."
        )
    return found


def cut_layouts(recipe: Recipe, site: Site) -> list[Layout]:
    """FSDP2 with every cut of the model that the recipe leaves open; raises `DoesNotDivide` if there is none."""
    work, (nodes, processes) = Work.of(recipe), counts_of(site)
    ranks, found, against = nodes * processes, list[Layout](), ""
    for cut in _cuts(recipe.parallel):
        why = _against(cut, work, site, ranks) or _against_batch(cut, recipe, ranks)
        against = against or why
        if not why and not _too_much(cut, recipe, work):
            found += _of_cut(cut, recipe, ranks)
    if not found:
        raise DoesNotDivide(against or "parallel leaves no layout: take other sizes, or auto.")
    return found


def prescribes(recipe: Recipe, layout: Layout) -> bool:
    """Whether one of Castra's own layouts is among those the recipe's `parallel` part leaves open."""
    parallel = recipe.parallel
    told = {"strategy": layout.strategy, "micro_batch_size": layout.micro_batch_size}
    told |= {name: getattr(layout, name) for name in SIZES}
    same = all(getattr(parallel, name) in {"auto", value} for name, value in told.items())
    copies = parallel.shard == "auto" or layout.strategy != "fsdp2" or parallel.shard == layout.shard
    return same and copies and layout.offload == offload_of(parallel)


def asks_to_cut(parallel: Parallel) -> bool:
    """Whether a recipe asks for a model that is cut up among ranks."""
    return any(getattr(parallel, name) not in ("auto", 1) for name in SIZES)


def offload_of(parallel: Parallel) -> str:
    """What is offloaded and whereto, in the words of `schema.OFFLOAD`."""
    return parallel.offload + ("-nvme" if parallel.offload != "none" and parallel.offload_to == "nvme" else "")


def counts_of(site: Site) -> tuple[int, int]:
    """Nodes, and processes on each."""
    assert site.nodes
    return site.nodes, site.processes_per_node or site.machine.accelerators


def even_nodes(recipe: Recipe, processes_per_node: int) -> list[int]:
    """Numbers of nodes over which the global batch divides, all ranks being data parallel."""
    batch = recipe.train.global_batch_size
    return divisors(batch // processes_per_node) if batch % processes_per_node == 0 else []


def _even(recipe: Recipe, site: Site) -> bool:
    nodes, processes = counts_of(site)
    return recipe.train.global_batch_size % (nodes * processes) == 0


def _cut_or_none(recipe: Recipe, site: Site) -> list[Layout]:
    """What a recipe that leaves the sizes open may be cut into, if anything."""
    parallel = recipe.parallel
    if (
        parallel.strategy not in ("auto", "fsdp2")
        or _stays_whole(recipe)
        or all(getattr(parallel, name) == 1 for name in SIZES)
    ):
        return []
    try:
        return cut_layouts(recipe, site)
    except DoesNotDivide:
        return []


def _stays_whole(recipe: Recipe) -> str:
    """What of a recipe Castra's own program does not cut up among ranks of one model; empty where it does."""
    told = {"a model with experts": recipe.model.experts > 0, "a base of 4 bits": recipe.train.lora_base == "nf4"}
    return next((what for what, there in told.items() if there), "")


def _able(recipe: Recipe, site: Site) -> list[str]:
    """The strategies that Castra's own program has for a recipe's model, the simplest first."""
    wanted = recipe.parallel.strategy
    names = [name for name in STRATEGIES if name != "zero0" or wanted == name]
    if site.machine.local and recipe.train.precision == "fp16":
        names = [name for name in names if not name.startswith("zero")]
    if recipe.train.lora_base == "nf4":
        return ["ddp"]
    return [name for name in names if name != "zero3"] if recipe.model.experts else names


def _over_all(recipe: Recipe, site: Site) -> list[Layout]:
    nodes, processes = counts_of(site)
    ranks = nodes * processes
    part = recipe.train.global_batch_size // ranks
    wanted = recipe.parallel.strategy
    return [
        Layout(
            strategy=strategy,
            dp=ranks,
            zero=STAGES[strategy],
            shard=_shard(recipe.parallel, ranks) if strategy == "fsdp2" else ranks,
            micro_batch_size=size,
            gradient_accumulation=part // size,
            recompute=AGAIN[recipe.train.activation_checkpointing],
            offload=offload_of(recipe.parallel) if strategy == wanted else "none",
        )
        for strategy in _able(recipe, site)
        for size in divisors(part)
    ]


def _shard(parallel: Parallel, copies: int) -> int:
    return copies if parallel.shard == "auto" else parallel.shard


def _cuts(parallel: Parallel) -> Iterator[Cut]:
    """Every cut that a recipe leaves open but the one into a single part, the smallest first."""
    told = {name: getattr(parallel, name) for name in SIZES}
    tried = [TRIED[name] if size == "auto" else (size,) for name, size in told.items()]
    yield from (cut for sizes in product(*tried) if not (cut := Cut(*sizes)).whole)


def _of_cut(cut: Cut, recipe: Recipe, ranks: int) -> Iterator[Layout]:
    copies = ranks // cut.ranks
    for size in _micros(cut, recipe, ranks):
        yield Layout(
            strategy="fsdp2",
            tp=cut.tp,
            pp=cut.pp,
            vpp=cut.vpp,
            cp=cut.cp,
            dp=copies,
            zero=STAGES["fsdp2"],
            shard=_shard(recipe.parallel, copies),
            micro_batch_size=size,
            gradient_accumulation=recipe.train.global_batch_size // copies // size,
            recompute=AGAIN[recipe.train.activation_checkpointing],
            sequence_parallel=cut.tp > 1,
        )


def _micros(cut: Cut, recipe: Recipe, ranks: int) -> list[int]:
    """Micro-batches that divide a data parallel rank's part, and leave a pipeline as many as it needs."""
    part = recipe.train.global_batch_size // (ranks // cut.ranks)
    asked = recipe.parallel.micro_batch_size
    found = [size for size in divisors(part) if asked in ("auto", size)]
    return [size for size in found if _flows(cut, part // size)]


def _flows(cut: Cut, micro_batches: int) -> bool:
    """Whether a pipeline can work: one micro-batch for every stage; interleaved, whole rounds of them."""
    if cut.pp == 1:
        return True
    return micro_batches >= cut.pp and (cut.vpp == 1 or micro_batches % cut.pp == 0)


def _too_much(cut: Cut, recipe: Recipe, work: Work) -> bool:
    """Whether a cut is one that nobody asked for, and that leaves ranks too little to do."""
    if cut.cp > 1 and recipe.parallel.cp == "auto":
        return float(work.shape.sequence) / cut.cp < LEAST_TOKENS
    return False


def _against(cut: Cut, work: Work, site: Site, ranks: int) -> str:
    """Why the model cannot be cut up so, as a sentence with what to take instead; empty where it can."""
    if ranks % cut.ranks:
        sizes = f"{cut.tp} x {cut.pp} x {cut.cp}"
        return f"{ranks} ranks do not divide by parallel.tp x pp x cp ({sizes}): take other sizes."
    return _against_tp(cut.tp, work, site) or _against_cp(cut, work) or _against_pp(cut, work)


def _against_tp(tp: int, work: Work, site: Site) -> str:
    """What `training.parallel.plans` asks of a model, besides."""
    if tp > 1 and work.lacks_tp:
        return f"parallel.tp {tp}: {work.lacks_tp} no tensor parallel plan; take 1."
    # nodes of one accelerator are all as far from each other
    if not site.machine.local and tp > (node := counts_of(site)[1]) > 1:
        return (
            f"parallel.tp {tp} is more than the {node} accelerators of a node, who alone are near enough: take {node}."
        )
    shape = work.shape
    wholes = {"heads": shape.heads, "kv_heads": shape.kv_heads, "ffn_size": shape.ffn, "vocab_size": shape.vocab}
    sizes = {name: int(size) for name, size in wholes.items()}
    undivided = next((name for name, size in sizes.items() if size % tp), None)
    if undivided is None:
        return ""
    able = _sizes(lambda count: not any(size % count for size in sizes.values()))
    return f"parallel.tp {tp} does not divide model.{undivided} {sizes[undivided]}: {able}."


def _against_cp(cut: Cut, work: Work) -> str:
    length = int(work.shape.sequence)
    if length % cut.tp == 0 and (cut.cp == 1 or length % (2 * cut.cp * cut.tp) == 0):
        return ""
    parts = f"2 x cp {cut.cp} x tp {cut.tp}" if cut.cp > 1 else f"tp {cut.tp}"
    return (
        f"data.sequence_length {length} does not divide by parallel's {parts}: take smaller sizes, or another length."
    )


def _against_pp(cut: Cut, work: Work) -> str:
    if cut.vpp > 1 and cut.pp == 1:
        return f"parallel.vpp {cut.vpp} needs pipeline stages: take parallel.pp above 1, or parallel.vpp 1."
    layers = int(work.shape.layers)
    if layers % (cut.pp * cut.vpp) == 0:
        return ""
    told = f"pp {cut.pp}" + (f" x vpp {cut.vpp}" if cut.vpp > 1 else "")
    able = _sizes(lambda stages: layers % (stages * cut.vpp) == 0)
    return f"parallel.{told} does not divide model.layers {layers}: {able}."


def _against_batch(cut: Cut, recipe: Recipe, ranks: int) -> str:
    """Why the global batch cannot be divided so; empty where it can."""
    copies, batch = ranks // cut.ranks, recipe.train.global_batch_size
    if batch % copies:
        around = [size for size in (batch // copies * copies, (batch // copies + 1) * copies) if size]
        return (
            f"train.global_batch_size {batch} does not divide over the {copies} data parallel ranks ({ranks} ranks / "
            f"{cut.ranks} for each model): take {' or '.join(map(str, around))}."
        )
    if why := _against_micro(recipe, copies) or _against_shard(recipe.parallel, copies):
        return why
    if not _micros(cut, recipe, ranks):
        needs = "a multiple of" if cut.vpp > 1 else "at least"
        return (
            f"parallel.pp {cut.pp} needs {needs} {cut.pp} micro-batches, and each data parallel rank has "
            f"{batch // copies} sequences: take a larger train.global_batch_size, or a smaller micro batch."
        )
    return ""


def _against_micro(recipe: Recipe, ranks: int) -> str:
    """Why the prescribed micro batch does not divide a rank's part of the global batch; empty where it does."""
    part = recipe.train.global_batch_size // ranks
    prescribed, micros = recipe.parallel.micro_batch_size, divisors(part)
    if prescribed == "auto" or prescribed in micros:
        return ""
    near = [max(size for size in micros if size <= prescribed), *(size for size in micros if size > prescribed)][:2]
    return (
        f"parallel.micro_batch_size {prescribed} does not divide the {part} sequences of each rank "
        f"(train.global_batch_size {recipe.train.global_batch_size} over {ranks} ranks): take "
        f"{' or '.join(map(str, near))}."
    )


def _against_shard(parallel: Parallel, copies: int) -> str:
    """Why the ranks cannot be grouped into shards; empty where they can."""
    if parallel.shard == "auto" or copies % parallel.shard == 0:
        return ""
    able = _sizes(lambda size: copies % size == 0)
    return f"parallel.shard {parallel.shard} does not divide the {copies} data parallel ranks: {able}."


def _sizes(able: Callable[[int], bool]) -> str:
    """Advice: the first few sizes that would do."""
    found = [str(size) for size in range(1, 65) if able(size)][:6]
    return "take " + " or ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found or ["other sizes"])


def _uneven(batch: int, nodes: int, processes_per_node: int) -> str:
    ranks = nodes * processes_per_node
    sizes = [size for size in (batch // ranks * ranks, (batch // ranks + 1) * ranks) if size]
    others = divisors(batch // processes_per_node) if batch % processes_per_node == 0 else []
    nearest = min(others, key=lambda count: abs(count - nodes), default=0)
    fewer = f", or cluster.nodes {nearest}" if nearest else ""
    return (
        f"train.global_batch_size {batch} does not divide over {ranks} ranks ({nodes} nodes x {processes_per_node}): "
        f"take {' or '.join(map(str, sizes))}{fewer}."
    )
