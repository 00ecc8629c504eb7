"""How long one optimizer step takes: layers, the pipeline they stand in, and the communication that nothing hides."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from planner.collectives import group_rate, ring
from planner.constants import Constants
from planner.layers import SMALL, Pass, Rates, again, dense_share, gemm, layer, on_core
from planner.schema import OFFLOAD, OPTIMIZER_AWAY, PARAMETERS_AWAY, RECOMPUTE, Configs, Floats, is_code
from planner.states import end_parameters, layer_parameters, parameters_per_rank

LOSS_BYTES: Final = 14.0
"""Moved per token and word of the vocabulary by softmax and its gradient."""
CORE_LOSS_BYTES: Final = 60.0
"""The same on a CPU's core, which computes exponents as slowly as that."""
OPTIMIZER_BYTES: Final = 44.0
"""Moved per parameter by AdamW with fp32 states (read 16, write 14), by clipping and by scaling (14)."""
FIXED_S: Final = 1e-3
"""Host's part of an optimizer step."""
CORE_OPTIMIZER_BYTES: Final = 20.0
"""The same on a CPU's core, whose caches hold the states of small models."""
CORE_BATCH_S: Final = 1.5e-3
"""Host's part of a micro-batch, besides its layers, where the host computes too."""
TRANSFER_S: Final = 15e-6
"""Latency of one message to the next stage."""


@dataclass(frozen=True, slots=True)
class LayerTime:
    """One layer and micro-batch on one rank, recomputation included. Unit: seconds."""

    forward: Floats
    backward: Floats
    parts: dict[str, Floats]
    """Both passes, by part; what the host adds is 'launch'."""


@dataclass(frozen=True, slots=True)
class Ends:
    """Embedding and head of one micro-batch, both passes. Unit: seconds."""

    first: Floats
    last: Floats


def layer_time(configs: Configs, constants: Constants) -> LayerTime:
    """An average layer; a pass is never faster than its host starts it."""
    forward, backward = layer(configs, constants)
    more = again(configs, forward)
    held = layer_parameters(configs) * 2 * configs.software.gradient_bytes * configs.software.trained
    backward.parts[SMALL] = backward.parts[SMALL] + held / Rates.of(configs, constants).memory
    both: dict[str, Floats] = {name: forward.parts[name] + backward.parts[name] + more[name] for name in forward.parts}
    host = constants.launch_us * 1e-6
    if np.any(configs.shape.experts > 0):
        host = host + (1 - dense_share(configs)) * constants.expert_us * 1e-6
    repeats = np.where(configs.layout.recompute == RECOMPUTE.index("full"), 1.0, 0.0)
    f, b = forward.total, Pass(backward.parts).total + sum(more.values(), start=np.zeros(()))
    alone = on_core(configs) > 0  # a core cannot start the next kernel while it computes
    fast_f = np.where(alone, f + host, np.maximum(f, host))
    fast_b = np.where(alone, b + host * (1 + repeats), np.maximum(b, host * (2.0 + repeats)))
    return LayerTime(fast_f, fast_b, both | {"launch": fast_f - f + fast_b - b})


def ends(configs: Configs, constants: Constants) -> Ends:
    """The head's products and loss, the embedding's look-up and gradient."""
    rates, shape, tokens = Rates.of(configs, constants), configs.shape, configs.tokens
    words, rest = shape.vocab / configs.layout.tp, (rates.flops, rates.memory, configs.hardware.multiprocessors)
    lost = on_core(configs, CORE_LOSS_BYTES, LOSS_BYTES)
    head = gemm(tokens, words, shape.hidden, *rest) + gemm(tokens, shape.hidden, words, *rest)
    head = head + gemm(words, shape.hidden, tokens, *rest) + lost * tokens * words / rates.memory
    first = 18.0 * tokens * shape.hidden / rates.memory + on_core(configs, CORE_BATCH_S)
    return Ends(first=first, last=head)


def phases(configs: Configs, constants: Constants) -> dict[str, Floats]:
    """Seconds of each phase of one optimizer step, for every configuration; their sum is the step."""
    return assemble(configs, constants, layer_time(configs, constants), ends(configs, constants))


def step_seconds(configs: Configs, constants: Constants) -> Floats:
    """Seconds per optimizer step."""
    return sum(phases(configs, constants).values(), start=np.zeros(()))


def assemble(configs: Configs, constants: Constants, one: LayerTime, edge: Ends) -> dict[str, Floats]:
    """The step from its layers: sharded weights, pipeline, gradients, optimizer."""
    layout, software = configs.layout, configs.software
    depth = configs.shape.layers / layout.pp
    piped = layout.pp > 1
    # Where layers do not divide, embedding and head take the places that are left.
    even = (software.balanced_ends == 0) & (depth == np.floor(depth))
    depth = np.where(even, depth, np.ceil((configs.shape.layers + 2) / layout.pp))
    seen, backward = _sharded(configs, constants, one)
    each = one.forward + one.backward + seen
    stage = depth * each
    longest = np.maximum(edge.last, edge.first)
    slowest = np.where(
        piped, stage + np.where(even, longest, np.maximum(longest - each, 0.0)), stage + edge.last + edge.first
    )
    once = np.where(even, layout.pp * stage, configs.shape.layers * each) + edge.last + edge.first
    once = np.maximum(once, slowest)
    hop = _transfer(configs, constants)
    visible = np.where(layout.vpp > 1, 1 - 0.8 * constants.overlap, 1.0)
    rounds = layout.ga - 1
    busy = layout.ga * depth
    result: dict[str, Floats] = {name: busy * seconds for name, seconds in one.parts.items()}
    result["head"] = layout.ga * (slowest - stage)
    result["pipeline bubble"] = np.where(piped, (once - slowest) / layout.vpp, 0.0)
    result["pipeline transfer"] = np.where(
        piped, rounds * 2 * layout.vpp * hop * visible + 2 * (layout.pp - 1) * hop, 0.0
    )
    once_a_step = _gradients(configs, constants, depth * backward) + _sharded_ends(configs, constants)
    result["data parallel"] = busy * seen + once_a_step
    result["optimizer"], result["offload"] = _optimizer(configs, constants)
    return {name: seconds * constants.scale for name, seconds in result.items()}


def _transfer(configs: Configs, constants: Constants) -> Floats:
    """Seconds to hand one micro-batch's activations to the next stage, scattered over the tensor-parallel ranks."""
    layout, rates = configs.layout, Rates.of(configs, constants)
    size = 2.0 * configs.tokens * configs.shape.hidden / layout.tp
    per_node = configs.hardware.per_node
    far = layout.tp * layout.cp * layout.dp >= per_node
    return size / np.where(far, rates.network / per_node, rates.links) + TRANSFER_S


def _members(configs: Configs, ranks: Floats) -> Floats:
    """How many of a data-parallel group of `ranks` share a node: tensor parallel ranks lie innermost, then context."""
    layout = configs.layout
    room = np.maximum(np.floor(configs.hardware.per_node / (layout.tp * layout.cp)), 1)
    return np.minimum(room, ranks)


def _sharded(configs: Configs, constants: Constants, one: LayerTime) -> tuple[Floats, Floats]:
    """Seconds per layer and micro-batch that fetching weights and giving gradients away adds; and the backward pass."""
    layout, rates, software = configs.layout, Rates.of(configs, constants), configs.software
    third, second = layout.zero == 3, (layout.zero == 2) & (software.reduces_each > 0)
    if not np.any(third | second):
        return np.zeros((), dtype=one.forward.dtype), one.backward  # single precision stays single
    group = np.where(third, layout.shard, layout.dp)
    inside = _members(configs, group)
    rate = group_rate(group, inside, rates.links, rates.network, configs.hardware.per_node)
    hops = constants.hop_us * 1e-6 * group / inside + configs.hardware.inter_latency
    latency = software.collectives_per_layer * np.where(group > inside, hops, configs.hardware.intra_latency)
    weights = layer_parameters(configs)
    gather = ring(weights * software.gathered_bytes, group, rate, latency, 1.0)
    reduce = ring(weights * software.reduced_bytes * software.trained, group, rate, latency, 1.0)
    forward = np.where(third, _beside(one.forward, gather, constants.overlap), 0.0)
    each = np.where(software.holds_gradients > 0, 0.0, reduce)  # who holds them sends them once a step
    sent = np.where(third, gather + each, np.where(second, reduce, 0.0))
    backward = _beside(one.backward, sent, constants.overlap)
    return forward + backward, one.backward + backward


def _sharded_ends(configs: Configs, constants: Constants) -> Floats:
    """Seconds per step to fetch the sharded embeddings, once a micro-batch, and to give their gradients away."""
    layout, rates, software = configs.layout, Rates.of(configs, constants), configs.software
    third = layout.zero == 3
    if not np.any(third):
        return np.zeros((), dtype=rates.links.dtype)
    inside = _members(configs, layout.shard)
    rate = group_rate(layout.shard, inside, rates.links, rates.network, configs.hardware.per_node)
    weights = end_parameters(configs)
    gather = ring(weights * software.gathered_bytes, layout.shard, rate, configs.hardware.intra_latency, 1.0)
    reduce = ring(
        weights * software.reduced_bytes * software.trained, layout.shard, rate, configs.hardware.intra_latency, 1.0
    )
    times = np.where(software.holds_gradients > 0, 1.0, layout.ga)
    return np.where(third, layout.ga * gather + times * reduce, 0.0)


def _beside(work: Floats, sent: Floats, overlap: Floats) -> Floats:
    """What sending adds to work when a share of it hides behind the work."""
    return sent - overlap * np.minimum(work, sent)


def _gradients(configs: Configs, constants: Constants, backward: Floats) -> Floats:
    """Seconds at the end of a step until every rank has its gradients (and, sharded, the new weights)."""
    layout, software, rates = configs.layout, configs.software, Rates.of(configs, constants)
    mine = parameters_per_rank(configs)
    per_node, hop = configs.hardware.per_node, constants.hop_us * 1e-6
    buckets = configs.shape.layers / layout.pp
    shard = np.where(layout.shard > 0, layout.shard, layout.dp)
    inside, close = _members(configs, layout.dp), _members(configs, shard)
    whole = group_rate(layout.dp, inside, rates.links, rates.network, per_node)
    part = group_rate(shard, close, rates.links, rates.network, per_node)
    nodes, span = layout.dp / inside, shard / close
    tree = buckets * np.where(nodes > 1, 2 * hop * np.log2(np.maximum(nodes, 2)), configs.hardware.intra_latency)
    line = buckets * np.where(span > 1, hop * span, configs.hardware.intra_latency)
    reduced, gathered = mine * software.reduced_bytes * software.trained, mine * software.gathered_bytes
    replicas = layout.dp / shard
    across = ring(reduced / shard, replicas, rates.network / per_node, tree, 2.0)
    scattered = ring(reduced, shard, part, line, 1.0)
    split = scattered + ring(gathered, shard, part, line, 1.0)
    plain = ring(reduced, layout.dp, whole, tree, 2.0)
    second = np.where(software.reduces_each > 0, 0.0, scattered)
    second = second + ring(gathered, shard, part, line, 1.0)
    seconds = np.choose(
        np.asarray(layout.zero, dtype=np.int64),
        [plain, split + across, second + across, across + np.where(software.holds_gradients > 0, scattered, 0.0)],
    )
    hidden = constants.overlap * np.minimum(seconds, backward * 0.9)
    return seconds - np.where(software.dp_overlap > 0, hidden, 0.0)


def _optimizer(configs: Configs, constants: Constants) -> tuple[Floats, Floats]:
    """AdamW on this rank's share of the states; and the travel to and from the host's memory."""
    layout, rates = configs.layout, Rates.of(configs, constants)
    held = parameters_per_rank(configs) / np.where(layout.zero >= 1, np.maximum(layout.shard, 1), 1.0)
    mine = held * configs.software.trained
    away = np.where(layout.offload >= OPTIMIZER_AWAY, mine * 16.0 / configs.hardware.host, 0.0)
    if np.any(layout.offload > OPTIMIZER_AWAY):
        away = away + _beyond(configs, held, mine)
    return mine * on_core(configs, CORE_OPTIMIZER_BYTES, OPTIMIZER_BYTES) / rates.memory + FIXED_S, away


def _beyond(configs: Configs, held: Floats, mine: Floats) -> Floats:
    """What more travels where not the optimizer alone lies in the host's memory: none of it is taken to be hidden.

    Weights of 2 bytes come for every forward and every backward pass; from a disk come, and go back to it, the
    optimizer's 12 bytes.
    """
    layout, hardware = configs.layout, configs.hardware
    fetched = np.where(layout.offload >= PARAMETERS_AWAY, 2 * layout.ga * held * 2.0, 0.0)
    on_disk = is_code(layout.offload, OFFLOAD, "optimizer-nvme", "parameters-nvme")
    rate = np.where(on_disk, np.minimum(hardware.disk, hardware.host), hardware.host)
    return fetched / rate + np.where(on_disk, mine * 24.0 / hardware.disk, 0.0)
