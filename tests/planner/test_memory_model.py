"""What a rank needs: identities of the states, laws of sharding, and what autograd really keeps."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner import parameters
from planner.grid import Grid
from planner.machine import Precision
from planner.memory import GIB, activations, breakdown
from planner.model import Shape
from planner.software import STRATEGIES, Software
from recipes.spec import Model


def grid(
    strategy: str = "ddp", precision: Precision = "fp32", model: Model | None = None, sequence: int = 128, **cut: float
) -> Grid:
    layout = {"micro": 1.0, "accumulation": 1.0, "ranks": 8.0, "ranks_per_node": 8.0, "recompute": 0.0} | cut
    arrays = {name: np.asarray(value) for name, value in layout.items()}
    return Grid(Shape.of(model or Model(), sequence), Software.of([strategy], precision), **arrays)


def states(of: Grid) -> float:
    parts = breakdown(of, "gpu")
    return sum(float(parts[name][0]) for name in ("weights", "gradients", "optimizer"))


def total(of: Grid) -> float:
    return sum(float(np.broadcast_to(part, 1)[0]) for part in breakdown(of, "gpu").values())


def test_replicated_adam_needs_sixteen_bytes_per_parameter() -> None:
    assert states(grid("ddp")) * GIB == pytest.approx(16 * parameters(Model()))
    assert states(grid("ddp", "bf16")) * GIB == pytest.approx(16 * parameters(Model()))


def test_fully_sharded_states_divide_by_the_ranks() -> None:
    assert states(grid("fsdp2", ranks=8)) == pytest.approx(states(grid("ddp")) / 8)
    assert states(grid("zero3", "bf16", ranks=16)) == pytest.approx(states(grid("zero3", "bf16", ranks=1)) / 16)


def test_fsdp2_keeps_all_gradients_between_micro_batches() -> None:
    """training.parallel lets gradients travel after the last micro-batch only, so until then they stay whole."""
    extra = states(grid("fsdp2", accumulation=2)) - states(grid("fsdp2"))
    assert extra * GIB == pytest.approx(4 * parameters(Model()) * 7 / 8)


@given(ranks=st.integers(1, 4096), precision=st.sampled_from(["fp32", "bf16"]))
def test_a_higher_zero_stage_never_has_larger_states(ranks: int, precision: Precision) -> None:
    one, two, three = (states(grid(f"zero{stage}", precision, ranks=ranks)) for stage in (1, 2, 3))
    assert one >= two >= three


@given(
    strategy=st.sampled_from(STRATEGIES),
    ranks=st.integers(1, 512),
    more=st.integers(1, 8),
    micro=st.integers(1, 8),
    recompute=st.sampled_from([0.0, 1.0]),
)
def test_more_ranks_never_need_more_memory(strategy: str, ranks: int, more: int, micro: int, recompute: float) -> None:
    few = grid(strategy, "bf16", ranks=ranks, micro=micro, recompute=recompute)
    many = grid(strategy, "bf16", ranks=ranks * more, micro=micro, recompute=recompute)
    assert total(many) <= total(few) + 1e-9


@given(micro=st.integers(1, 64), strategy=st.sampled_from(STRATEGIES), precision=st.sampled_from(["fp32", "bf16"]))
def test_recomputation_keeps_less_and_activations_grow_with_the_micro_batch(
    micro: int, strategy: str, precision: Precision
) -> None:
    kept = activations(grid(strategy, precision, micro=micro))[0]
    assert kept == pytest.approx(micro * activations(grid(strategy, precision))[0])
    assert activations(grid(strategy, precision, micro=micro, recompute=1.0))[0] < kept


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("fsdp2", "bf16"), ("ddp", "bf16")])
def test_activations_equal_what_autograd_keeps(strategy: str, precision: Precision, *, checkpointing: bool) -> None:
    """Two layers and two sequences more, so that casts of weights, the embedding and the loss cancel."""
    pytest.importorskip("torch")
    autocast, recompute = (strategy, precision) == ("ddp", "bf16"), float(checkpointing)

    def theirs(layers: int, micro: int) -> int:
        return _saved_bytes(_wide(layers), micro, strategy == "fsdp2", autocast, checkpointing)

    def ours(layers: int, micro: int) -> float:
        return float(activations(grid(strategy, precision, _wide(layers), micro=micro, recompute=recompute))[0])

    assert _crossed(ours) == pytest.approx(_crossed(theirs), rel=0.01)


def _crossed(count: Callable[[int, int], float]) -> float:
    return count(3, 4) - count(1, 4) - count(3, 2) + count(1, 2)


def _wide(layers: int) -> Model:
    return Model(hidden_size=64, layers=layers, heads=4, kv_heads=2, ffn_size=160, vocab_size=512)


def _saved_bytes(spec: Model, micro: int, *how: bool) -> int:
    """Bytes autograd keeps of a forward pass over `micro` sequences, weights apart."""
    import torch

    from training.model import build

    cast, autocast, checkpointing = how
    network = build(spec.model_dump(mode="json"), 128).model
    if cast:
        network = network.bfloat16()
    if checkpointing:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    weights = {weight.untyped_storage().data_ptr() for weight in network.parameters()}
    kept: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage, tensor)
        return tensor

    tokens = torch.zeros((micro, 128), dtype=torch.int64)
    low = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), low:
        network(input_ids=tokens, use_cache=False)
    return sum(storage.nbytes() for storage, _ in kept.values())
