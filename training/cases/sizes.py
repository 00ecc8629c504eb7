"""How a recipe's plan cuts the work up, in the numbers that frameworks ask for; and what a user lays over them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from training.cases.base import CaseError

CUTS: Final = ("tp", "pp", "vpp", "cp", "ep")
NAMES: Final = {
    "tp": "tensor parallel ranks",
    "pp": "pipeline stages",
    "vpp": "interleaved pipeline stages",
    "cp": "context parallel ranks",
    "ep": "expert parallel ranks",
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """A plan on its ranks."""

    ranks: int
    ranks_per_node: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    dp: int
    """Data parallel ranks: what is left of the ranks."""
    shard: int
    """Data parallel ranks that one copy of the states is cut up among; 1 where each has them whole."""
    micro_batch_size: int
    """Sequences per rank and forward pass."""
    accumulation: int
    """Micro batches of an optimizer step."""

    @property
    def batch_per_replica(self) -> int:
        """Sequences of an optimizer step on one data parallel rank."""
        return self.micro_batch_size * self.accumulation


def sizes(spec: Mapping[str, Any], nodes: int, processes_per_node: int) -> Sizes:
    """The sizes of a recipe's plan; raises CaseError where `parallel` is not settled or does not divide."""
    told, batch = spec["parallel"], spec["train"]["global_batch_size"]
    unsettled = [name for name in (*CUTS, "micro_batch_size") if not isinstance(told[name], int)]
    if unsettled or told["strategy"] == "auto":
        left = ", ".join([*(["strategy"] if told["strategy"] == "auto" else []), *unsettled])
        raise CaseError(f"parallel.{left}: auto is left for the planner: plan the recipe first, or write the number.")
    ranks, cut = nodes * processes_per_node, told["tp"] * told["pp"] * told["cp"]
    if ranks % cut:
        raise CaseError(
            f"tp {told['tp']} x pp {told['pp']} x cp {told['cp']} is {cut} ranks, which do not divide {nodes} nodes of "
            f"{processes_per_node}: change parallel, or cluster.nodes."
        )
    dp, micro = ranks // cut, told["micro_batch_size"]
    if batch % (dp * micro):
        raise CaseError(
            f"train.global_batch_size {batch} is no multiple of {dp} data parallel ranks x micro_batch_size {micro}: "
            f"take a multiple of {dp * micro}."
        )
    cuts = {name: told[name] for name in CUTS}
    return Sizes(ranks, processes_per_node, **cuts, dp=dp, shard=_shard(told, dp), micro_batch_size=micro,
                 accumulation=batch // (dp * micro))  # fmt: skip


def _shard(told: Mapping[str, Any], dp: int) -> int:
    if told["strategy"] in ("ddp", "zero0"):
        return 1
    shard: int = told["shard"] if told["strategy"] == "fsdp2" and isinstance(told["shard"], int) else dp
    if dp % shard:
        raise CaseError(f"parallel.shard {shard} does not divide {dp} data parallel ranks: take a divisor of {dp}.")
    return shard


def again(spec: Mapping[str, Any]) -> str:
    """What the backward pass does again: none, selective or full, by the field of the software it is planned as."""
    if spec["parallel"]["software"] == "megatron" and spec["parallel"]["recompute"] != "auto":
        return str(spec["parallel"]["recompute"])
    told = spec["train"]["activation_checkpointing"]
    return told if isinstance(told, str) else ("full" if told else "none")


def refuse(
    framework: str,
    spec: Mapping[str, Any],
    *,
    cuts: Iterable[str] = CUTS,
    offloads: Iterable[str] = (),
    also: Iterable[str] = (),
) -> None:
    """Raise CaseError for what a framework's program cannot do: what is not one of `cuts`, of `offloads`; `also`."""
    told, model, able = spec["parallel"], spec["model"], set(cuts)
    wrong = [
        f"it has no {NAMES[name]}: set parallel.{name}: 1"
        for name in CUTS
        if name not in able and told[name] not in (1, "auto")
    ]
    if "ep" not in able and model["experts"]:
        wrong.append("it trains no mixture of experts: set model.experts: 0")
    if model["mla"]:
        wrong.append("it has no latent attention: set model.mla: false")
    if spec["train"]["lora_rank"]:
        wrong.append("it trains no adapters: set train.lora_rank: 0")
    if told["offload"] not in ("none", *offloads):
        wrong.append(f"it does not offload {told['offload']}: set parallel.offload: none")
    if wrong := [*wrong, *also]:
        raise CaseError(f"{framework} cannot carry out this plan: {'; '.join(wrong)}.")


def assigned(arguments: Iterable[str]) -> dict[str, Any]:
    """Assignments name=value as a mapping; values are JSON where they can be read so, else text.

    Raises CaseError for one without a name or an =.
    """
    found: dict[str, Any] = {}
    for one in arguments:
        name, equals, value = one.removeprefix("--").partition("=")
        if not (name and equals):
            raise CaseError(f"case.arguments: {one!r} is not name=value.")
        found[name] = _read(value)
    return found


def lay_over(config: dict[str, Any], arguments: Iterable[str]) -> dict[str, Any]:
    """The configuration with assignments such as `training.steps=10` laid over it, sections made where there are none.

    Raises CaseError for one that goes into what is no section.
    """
    for name, value in assigned(arguments).items():
        *path, last = name.split(".")
        here = config
        for part in path:
            here = here.setdefault(part, {})
            if not isinstance(here, dict):
                raise CaseError(f"case.arguments: {name} goes into {part}, which is a value and no section.")
        here[last] = value
    return config


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
