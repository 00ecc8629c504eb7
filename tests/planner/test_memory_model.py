"""What a rank needs: identities of the states, laws of sharding, published formulas, and what autograd really keeps."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.hardware import ACCELERATORS, GIB, hardware
from planner.memory import PARTS, MemoryConstants, activations, breakdown, fits, in_flight, peak, per_layer, usable
from planner.schema import OFFLOAD, RECOMPUTE, Configs, Hardware, Layout, Shape, Software, mapped
from planner.software import STRATEGIES, castra, megatron
from recipes.spec import Model

Precision = Literal["fp32", "bf16"]
STAGE = {"ddp": 0, "fsdp2": 3, "zero1": 1, "zero2": 2, "zero3": 3}
PLAIN: dict[str, float] = dict.fromkeys(("tp", "pp", "vpp", "dp", "cp", "ep", "mbs", "ga", "shard"), 1.0)
GPT3: dict[str, float] = {
    "hidden": 12288,
    "layers": 96,
    "heads": 96,
    "kv_heads": 96,
    "head_dim": 128,
    "ffn": 49152,
    "vocab": 51200,
}
LLAMA: dict[str, float] = {
    "hidden": 4096,
    "layers": 32,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 14336,
    "vocab": 128256,
}
MIXTRAL: dict[str, float] = LLAMA | {"vocab": 32000, "experts": 8, "topk": 2, "expert_ffn": 14336}


def shape(sequence: float = 2048, **sizes: float) -> Shape:
    rest = {"gated": 1, "tied": 0, "experts": 0, "topk": 0, "expert_ffn": 0, "shared_experts": 0}
    columns = rest | {"dense_layers": 0, "mla": 0, "sequence": sequence} | sizes
    return Shape(**{name: np.asarray(float(value)) for name, value in columns.items()})


def layout(recompute: str = "none", offload: str = "none", **cut: float) -> Layout:
    codes = {"recompute": RECOMPUTE.index(recompute), "offload": OFFLOAD.index(offload)}
    columns = PLAIN | {"zero": 0, "sequence_parallel": 0} | {"shard": cut.get("dp", 1)} | cut | codes
    return Layout(**{name: np.asarray(float(value)) for name, value in columns.items()})


def machine(name: str) -> Hardware:
    return hardware([name], np.asarray(2.0), np.asarray(8.0), np.asarray(3200.0))


def configs(of: Shape, cut: Layout, software: Software | None = None, name: str = "H100-80") -> Configs:
    return Configs(shape=of, layout=cut, software=software or megatron("bf16"), hardware=machine(name))


def ours(
    strategy: str = "ddp", precision: Precision = "fp32", model: Model | None = None, sequence: int = 128, **cut: Any
) -> Configs:
    """Castra's own program."""
    return configs(
        shape(sequence, **_sizes(model or Model())),
        layout(**({"dp": 8, "zero": STAGE[strategy]} | cut)),
        castra([strategy], precision),
    )


def _sizes(model: Model) -> dict[str, float]:
    return {
        "hidden": model.hidden_size,
        "layers": model.layers,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.hidden_size // model.heads,
        "ffn": model.ffn_size,
        "vocab": model.vocab_size,
        "tied": model.tie_embeddings,
    }


def total(of: Configs) -> float:
    return float(np.ravel(peak(of))[0])


def states(of: Configs) -> float:
    parts = breakdown(of)
    return sum(float(np.ravel(parts[name])[0]) for name in ("weights", "gradients", "optimizer"))


def matrices(model: Model) -> float:
    """Weights without the norms, which nobody counts here."""
    attention = 2 * model.hidden_size * (model.hidden_size + model.kv_heads * model.hidden_size // model.heads)
    block = attention + 3 * model.hidden_size * model.ffn_size
    return model.layers * block + (2 - model.tie_embeddings) * model.vocab_size * model.hidden_size


def test_replicated_adam_needs_sixteen_bytes_per_parameter() -> None:
    assert states(ours("ddp")) * GIB == pytest.approx(16 * matrices(Model()))
    assert states(ours("ddp", "bf16")) * GIB == pytest.approx(16 * matrices(Model()))


def test_fully_sharded_states_divide_by_the_ranks() -> None:
    assert states(ours("fsdp2", dp=8)) == pytest.approx(states(ours("ddp")) / 8)
    assert states(ours("zero3", "bf16", dp=16)) == pytest.approx(states(ours("zero3", "bf16", dp=1)) / 16)


def test_fsdp2_keeps_all_gradients_between_micro_batches() -> None:
    """training.parallel lets gradients travel after the last micro-batch only, so until then they stay whole."""
    extra = states(ours("fsdp2", ga=2)) - states(ours("fsdp2"))
    assert extra * GIB == pytest.approx(4 * matrices(Model()) * 7 / 8)


def test_a_gpt_block_keeps_what_korthikanti_counted() -> None:
    """Korthikanti et al. 2022: s b h (34 + 5 a s / h) bytes; with tensor parallelism 10 + 24/t + 5 a s/(h t)."""
    gpt, software = shape(**GPT3, gated=0), megatron("fp16", flash=0)
    scores = 5 * 96 * 2048 / 12288
    for cut, each in ((layout(), 34 + scores), (layout(tp=8), 10 + 24 / 8 + scores / 8)):
        _, whole = per_layer(configs(gpt, cut, software))
        assert float(whole) == pytest.approx(12288 * each)
    spread = layout("selective", tp=8, sequence_parallel=1)
    assert float(per_layer(configs(gpt, spread, software))[0]) == pytest.approx(12288 * 34 / 8)
    full = layout("full", tp=8, sequence_parallel=1)
    assert float(per_layer(configs(gpt, full, software))[0]) == pytest.approx(12288 * 2 / 8)


def test_stages_keep_as_many_micro_batches_as_are_under_way() -> None:
    """1F1B: the first stage pp, the last one 1; interleaved pp (1 + (pp - 1)/(pp v)) on the first."""

    def kept(**cut: Any) -> list[float]:
        return [float(stage) for stage in in_flight(configs(shape(**GPT3), layout(**cut)))]

    assert kept(pp=8, ga=64) == [8, 1]
    assert kept(pp=8, ga=3) == [3, 1]
    assert kept(pp=8, vpp=2, ga=64) == [pytest.approx(8 * (1 + 7 / 16)), pytest.approx(8 - 7 / 2)]
    assert kept(ga=64) == [1, 1]


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones() -> None:
    """8 experts on 64 ranks: with ep 8 each rank holds one, and 8 ranks share its optimizer's states."""
    one = configs(shape(**MIXTRAL), layout(dp=64, zero=1, ep=8))
    expert = 3 * 4096 * 14336 * 32
    common = 2 * 32 * 4096 * (4096 + 1024) + 32 * 4096 * 8 + 2 * 32000 * 4096
    assert float(breakdown(one)["optimizer"]) * GIB == pytest.approx(12 * (common / 64 + expert / 8))
    assert float(breakdown(one)["weights"]) * GIB == pytest.approx(2 * (common + expert))


def test_what_is_offloaded_is_not_there() -> None:
    def one(offload: str, recompute: str = "none") -> Configs:
        return configs(shape(**LLAMA), layout(recompute, offload, dp=8, zero=3, mbs=4))

    assert float(breakdown(one("optimizer"))["optimizer"]) == 0
    assert float(breakdown(one("optimizer"))["gradients"]) == 0
    away, here = (float(breakdown(one(where, "full"))["activations"]) for where in ("act", "none"))
    assert away < here


def test_keeping_less_needs_less() -> None:
    def kept(recompute: str) -> float:
        return float(activations(configs(shape(4096, **LLAMA), layout(recompute, mbs=8), megatron("bf16", flash=0))))

    full, per_op, blocks, core, none = map(kept, ("full", "selective_op", "selective_blocks", "selective", "none"))
    assert full < per_op < core < none
    assert full < blocks < none


def test_the_last_stage_pays_for_the_logits() -> None:
    """A vocabulary of a million words on two stages: more than the first stage's second micro-batch."""
    cut = layout("full", pp=2, ga=8)
    few, many = (configs(shape(**LLAMA | {"vocab": words}), cut) for words in (1000.0, 1e6))
    assert float(activations(many)) - float(activations(few)) > 2048 * 5 * 1e6
    fused = configs(shape(**LLAMA | {"vocab": 1e6}), cut, megatron("bf16", fused_loss=1))
    assert float(activations(fused)) < float(activations(many))


def test_usable_and_fits_agree_with_the_peak() -> None:
    small, large = ours("ddp"), configs(shape(**GPT3), layout())
    assert float(usable(small)[0]) == pytest.approx(0.98 * ACCELERATORS["H100-80"].memory_gib)
    assert fits(small).all()
    assert not fits(large).any()
    assert not fits(small, MemoryConstants(runtime=np.asarray(1000.0))).any()


SIZES = {
    "tp": (1, 2, 4, 8),
    "pp": (1, 2, 4, 8),
    "vpp": (1, 2, 3),
    "dp": (1, 2, 8, 32),
    "cp": (1, 2),
    "ep": (1, 2, 4, 8),
}


@st.composite
def anything(draw: st.DrawFn) -> Configs:
    """Any model on any layout by any software."""
    cut: dict[str, Any] = {name: draw(st.sampled_from(values)) for name, values in SIZES.items()}
    cut |= {"zero": draw(st.integers(0, 3)), "mbs": draw(st.integers(1, 8)), "ga": draw(st.integers(1, 16))}
    cut["shard"] = draw(st.sampled_from([ranks for ranks in SIZES["dp"] if ranks <= cut["dp"]]))
    cut["sequence_parallel"] = draw(st.integers(0, 1))
    models: list[dict[str, float]] = [GPT3, LLAMA, MIXTRAL, _sizes(Model())]
    sizes = draw(st.sampled_from(models)) | {"mla": draw(st.integers(0, 1))}
    precision = draw(st.sampled_from(["fp32", "bf16", "fp16", "bf16_fp32grad", "fp8"]))
    switches = {name: draw(st.integers(0, 1)) for name in ("flash", "fused_loss", "deepspeed", "holds_gradients")}
    plain: Any = draw(st.sampled_from(["fp32", "bf16"]))
    software = draw(st.sampled_from([megatron(precision, **switches), *(castra([s], plain) for s in STRATEGIES)]))
    words = [draw(st.sampled_from(names)) for names in (RECOMPUTE, OFFLOAD)]
    return configs(shape(**sizes), layout(*words, **cut), software, draw(st.sampled_from(["A100-40", "GB200"])))


def changed(of: Configs, **values: float) -> Configs:
    columns = {name: np.asarray(float(value)) for name, value in values.items()}
    return replace(of, layout=replace(of.layout, **columns))


@given(of=anything())
def test_the_parts_are_finite_and_add_up(of: Configs) -> None:
    parts = breakdown(of)
    assert tuple(parts) == PARTS
    assert all(np.all(np.isfinite(part)) and np.all(part >= 0) for part in parts.values())
    assert total(of) == pytest.approx(sum(float(np.ravel(part)[0]) for part in parts.values()))


@given(of=anything(), stage=st.integers(0, 2))
def test_a_higher_zero_stage_never_needs_more(of: Configs, stage: int) -> None:
    assert total(changed(of, zero=stage + 1)) <= total(changed(of, zero=stage)) * (1 + 1e-12)


@given(of=anything(), more=st.integers(2, 8))
def test_more_shards_never_need_more(of: Configs, more: int) -> None:
    few = float(of.layout.dp)
    many = changed(of, dp=few * more, shard=few * more)
    assert total(many) <= total(changed(of, shard=few)) * (1 + 1e-12)
    assert total(changed(of, shard=few)) <= total(of) * (1 + 1e-12)


@given(of=anything(), more=st.integers(2, 8))
def test_tensor_parallelism_never_needs_more(of: Configs, more: int) -> None:
    assert total(changed(of, tp=float(of.layout.tp) * more)) <= total(of) * (1 + 1e-12)


@given(of=anything(), more=st.integers(2, 8))
def test_a_larger_micro_batch_needs_more(of: Configs, more: int) -> None:
    assert total(changed(of, mbs=float(of.layout.mbs) * more)) > total(of)


@given(of=anything())
def test_single_precision_stays_single_precision(of: Configs) -> None:
    """Twice the configurations per second, unless one array of doubles creeps in."""
    single = mapped(of, lambda column: np.ravel(column).astype(np.float32).repeat(2))
    for part in breakdown(single).values():
        assert part.dtype == np.float32
    assert peak(single)[1] == pytest.approx(total(of), rel=1e-4)


@given(of=anything())
def test_many_configurations_at_once_equal_each_alone(of: Configs) -> None:
    both = [changed(of, recompute=code, zero=stage) for code, stage in ((0, 1), (4, 3), (2, 0))]
    rows = {name: np.array([float(getattr(one.layout, name)) for one in both]) for name in ("recompute", "zero")}
    together = replace(of, layout=replace(of.layout, **rows))
    assert peak(together) == pytest.approx([total(one) for one in both])


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("strategy", "precision"), [("ddp", "fp32"), ("fsdp2", "bf16"), ("ddp", "bf16")])
def test_activations_equal_what_autograd_keeps(strategy: str, precision: Precision, *, checkpointing: bool) -> None:
    """Two layers and two sequences more, so that casts of weights, the embedding and the loss cancel."""
    pytest.importorskip("torch")
    autocast, recompute = (strategy, precision) == ("ddp", "bf16"), "full" if checkpointing else "none"

    def theirs(layers: int, micro: int) -> int:
        return _saved_bytes(_wide(layers), micro, strategy == "fsdp2", autocast, checkpointing)

    def modelled(layers: int, micro: int) -> float:
        return float(activations(ours(strategy, precision, _wide(layers), mbs=micro, recompute=recompute))[0])

    assert _crossed(modelled) == pytest.approx(_crossed(theirs), rel=0.01)


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
