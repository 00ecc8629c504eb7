"""What to say when nothing fits: what is too big, by how much, and the smallest change that makes it fit."""

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final

from planner.estimate import Estimate
from planner.judge import divisors, fits, usable_gib
from planner.machine import Machine
from recipes.spec import Recipe

MOST_RANKS: Final = 16384
"""More nodes than this many ranks make are no advice."""


def too_big(recipe: Recipe, machine: Machine, nodes: int, processes_per_node: int, leanest: Estimate) -> str:
    """The sentence for a recipe none of whose layouts fits; `leanest` is the one that needs least."""
    room = usable_gib(machine, machine.share(nodes, processes_per_node))
    tried = _changes(recipe, machine, nodes, processes_per_node)
    change = next((words for words, tweaked, count in tried if fits(tweaked, machine, count, processes_per_node)), "")
    return (
        f"the model does not fit on {machine.name}: {leanest.layout} needs {leanest.memory.total:.1f} GiB per rank, "
        f"{leanest.memory.total - room:.1f} GiB more than the {room:.1f} GiB usable; the smallest change that fits is "
        f"{change or 'a machine with more memory, or a smaller model'}."
    )


def _changes(
    recipe: Recipe, machine: Machine, nodes: int, processes_per_node: int
) -> Iterator[tuple[str, Recipe, int]]:
    """Changes to try, the smallest first: the layout, then recomputation, then more machines."""
    parallel = recipe.parallel
    if parallel.micro_batch_size != "auto":
        for size in reversed(divisors(recipe.train.global_batch_size // (nodes * processes_per_node))):
            if size < parallel.micro_batch_size:
                yield f"parallel.micro_batch_size {size}", _with(recipe, "parallel", micro_batch_size=size), nodes
    if parallel.strategy != "auto":
        for strategy in ("fsdp2", "zero3"):
            yield f"parallel.strategy {strategy}", _with(recipe, "parallel", strategy=strategy), nodes
    free = _with(recipe, "parallel", strategy="auto", micro_batch_size="auto")
    lean = _with(free, "train", activation_checkpointing=True)
    yield "parallel auto", free, nodes
    yield "train.activation_checkpointing true", lean, nodes
    if machine.local:
        fewer = (count for count in reversed(_counts(recipe, processes_per_node)) if count < nodes)
        yield from ((f"cluster.nodes {count}", free, count) for count in fewer)
    else:
        yield from _more_nodes(free, "cluster.nodes", machine, nodes, processes_per_node)
        words = "train.activation_checkpointing true with cluster.nodes"
        yield from _more_nodes(lean, words, machine, nodes, processes_per_node)


def _more_nodes(
    recipe: Recipe, words: str, machine: Machine, nodes: int, processes_per_node: int
) -> Iterator[tuple[str, Recipe, int]]:
    """The smallest number of nodes that fits, if any. If some number fits then so does every larger one."""
    counts = [
        count for count in _counts(recipe, processes_per_node) if nodes < count <= MOST_RANKS // processes_per_node
    ]
    enough = bisect_left(counts, True, key=lambda count: fits(recipe, machine, count, processes_per_node))
    if enough < len(counts):
        yield f"{words} {counts[enough]}", recipe, counts[enough]


def _counts(recipe: Recipe, processes_per_node: int) -> list[int]:
    """Numbers of nodes over which the global batch divides."""
    batch = recipe.train.global_batch_size
    return divisors(batch // processes_per_node) if batch % processes_per_node == 0 else []


def _with(recipe: Recipe, part: str, **values: Any) -> Recipe:
    return recipe.model_copy(update={part: getattr(recipe, part).model_copy(update=values)})
