"""The networks: equal to transformers' own, the same first weights in every layout, comparable by a hash."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from tests.training.peers import together
from tests.training.shapes import FAMILIES, LENGTH, VOCABULARY, small
from training.model import (
    NextTokenLoss,
    allocate,
    box_of,
    build,
    flops_per_token,
    materialise,
    named_weights,
    skeleton,
    start_from,
    weights_sha256,
)
from training.process import JobError

pytestmark = [pytest.mark.torch]


def batch(rows: int = 3, length: int = LENGTH) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length + 1), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers_own_attention(family: str) -> None:
    network = build(small(family), LENGTH, seed=1)
    network.config.router_aux_loss_coef = 0.0  # the balance of experts, where there are any, is ours alone
    tokens = batch()
    names, weights = zip(*named_weights(network), strict=True)
    ours = NextTokenLoss(network)(tokens)
    with torch.no_grad():
        mine = network(tokens[:, :-1]).logits
    network.set_attn_implementation("eager")
    logits = network(tokens[:, :-1]).logits
    theirs = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    assert torch.allclose(mine, logits, atol=1e-5)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)
    slopes = zip(names, torch.autograd.grad(ours, weights), torch.autograd.grad(theirs, weights), strict=True)
    for name, slope, other in slopes:
        assert torch.allclose(slope, other, atol=1e-4, rtol=1e-4), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_back_the_network_it_was_saved_from(family: str, tmp_path: Path) -> None:
    taught = build(small(family), LENGTH, seed=1)
    taught.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    again = build(small(family), LENGTH, tmp_path)
    assert weights_sha256(again) == weights_sha256(taught)
    fresh = build(small(family), LENGTH, seed=2)
    assert weights_sha256(fresh) != weights_sha256(taught)
    start_from(fresh, tmp_path)
    assert weights_sha256(fresh) == weights_sha256(taught)


def test_weights_stored_in_16_bits_are_trained_in_32(tmp_path: Path) -> None:
    taught = build(small("gemma2"), LENGTH, seed=1).to(torch.bfloat16)
    taught.save_pretrained(tmp_path)
    again = build(small("gemma2"), LENGTH, tmp_path)
    assert {weight.dtype for weight in again.parameters()} == {torch.float32}
    assert again.model.rotary_emb.inv_freq.dtype == torch.float32
    assert all(torch.equal(a, b.float()) for a, b in zip(again.parameters(), taught.parameters(), strict=True))


def test_the_folder_decides_what_the_recipe_does_not_say(tmp_path: Path) -> None:
    taught = build(small(), LENGTH, seed=1)
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    taught.config.rope_parameters = scaled | {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
    taught.config.rms_norm_eps = 1e-3
    taught.save_pretrained(tmp_path)
    again = build(small(), LENGTH, tmp_path)
    assert again.model.norm.variance_epsilon == 1e-3
    assert not torch.equal(again.model.rotary_emb.inv_freq, taught.model.rotary_emb.inv_freq)
    longer = build(small(), 4 * LENGTH, tmp_path)
    assert longer.config.max_position_embeddings == 4 * LENGTH


def test_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"holds no \*\.safetensors"):
        start_from(build(small(), LENGTH), tmp_path)
    build(small(), LENGTH).save_pretrained(tmp_path)
    with pytest.raises(JobError, match=r"hidden_size is 32 there and 64 here; ffn_size is 48 there and 96 here"):
        build(small(hidden_size=64, ffn_size=96), LENGTH, tmp_path)
    with pytest.raises(JobError, match=r"family llama and model.family is qwen3"):
        build(small("qwen3"), LENGTH, tmp_path)
    with pytest.raises(JobError, match=r"model\.embed_tokens\.weight is \[301, 32\] in .* and \[302, 32\]"):
        start_from(build(small(vocab_size=302), LENGTH), tmp_path)
    with pytest.raises(JobError, match=r"lack model\.layers\.3\."):
        start_from(build(small(layers=4), LENGTH), tmp_path)
    with pytest.raises(JobError, match=r"have layers\.2\..*, which the recipe's llama lacks"):
        start_from(build(small(layers=2), LENGTH), tmp_path)


def test_what_is_only_planned_is_refused() -> None:
    with pytest.raises(JobError, match=r"model\.experts and model\.gated: false can be planned and not trained"):
        skeleton(small(experts=8, gated=False), LENGTH)


def test_broken_folders_are_refused_in_one_sentence(tmp_path: Path) -> None:
    build(small("gpt2"), LENGTH).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(JobError, match=r"has 24 positions and data.sequence_length is 25"):
        build(small("gpt2"), LENGTH + 1, tmp_path / "gpt2")
    shutil.copytree(tmp_path / "gpt2", tmp_path / "torn")
    with (tmp_path / "torn" / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(JobError, match=r"model\.safetensors cannot be read"):
        build(small("gpt2"), LENGTH, tmp_path / "torn")
    build(small(), LENGTH).save_pretrained(tmp_path / "halved", max_shard_size="50KB")
    next((tmp_path / "halved").glob("model-00002-of-*.safetensors")).unlink()
    with pytest.raises(JobError, match=r"halved lacks model-00002-of-.*\.safetensors, which its index names"):
        build(small(), LENGTH, tmp_path / "halved")
    (tmp_path / "gpt2" / "config.json").unlink()
    with pytest.raises(JobError, match=r"config.json is no configuration"):
        build(small("gpt2"), LENGTH, tmp_path / "gpt2")


def test_a_skeleton_holds_no_weights_until_they_are_filled() -> None:
    network = skeleton(small("gemma2"), LENGTH)
    assert all(weight.is_meta for weight in network.parameters())
    allocate(network, torch.device("cpu"))
    materialise(network, 7)
    assert network.lm_head.weight is network.model.embed_tokens.weight
    assert weights_sha256(network) == weights_sha256(build(small("gemma2"), LENGTH, seed=7))


def drawn_in_parts(rank: int) -> dict[str, tuple[Tensor, Any]]:
    network = skeleton(small("gpt2"), LENGTH)
    mesh = init_device_mesh("cpu", (2,))
    for module in network.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(weight, mesh, [Shard(weight.ndim - 1)])  # uneven: 301 rows, 32 columns
            setattr(module, name, torch.nn.Parameter(spread))
    network.tie_weights()
    allocate(network, torch.device("cpu"))
    materialise(network, 7)
    return {name: (part.clone(), box) for name, (part, box) in ((n, box_of(w)) for n, w in named_weights(network))}


def test_every_rank_draws_just_its_part_of_the_same_weights(tmp_path: Path) -> None:
    whole = dict(named_weights(build(small("gpt2"), LENGTH, seed=7)))
    for parts in together(2, drawn_in_parts, tmp_path):
        assert parts.keys() == whole.keys()
        for name, (part, box) in parts.items():
            assert part.numel() < whole[name].numel()
            assert torch.equal(part, whole[name][box])


def learned_in_shards(rank: int) -> tuple[bool, float, float]:
    """Shard over two ranks by two, fill, learn once: whether the bits are the whole's, the loss, a gradient's norm."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    objective = NextTokenLoss(skeleton(small("gemma"), LENGTH))
    plan: dict[str, ParallelStyle] = {"self_attn.q_proj": ColwiseParallel(), "self_attn.k_proj": ColwiseParallel()}
    plan |= {"self_attn.v_proj": ColwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
    for block in objective.blocks:
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(objective, mesh=mesh["dp"])
    allocate(objective, torch.device("cpu"))
    materialise(objective.model, 7)
    whole = dict(named_weights(build(small("gemma"), LENGTH, seed=7)))
    parts = {name: box_of(weight) for name, weight in objective.weights()}
    same = all(torch.equal(part, whole[name][box]) for name, (part, box) in parts.items())
    loss = objective(batch())
    loss.backward()
    embedding = objective.model.lm_head.weight  # the tied one: it must be the weight that learns
    return same, loss.item(), embedding.grad.full_tensor().norm().item()


def test_a_network_filled_in_shards_learns_as_the_whole(tmp_path: Path) -> None:
    whole = NextTokenLoss(build(small("gemma"), LENGTH, seed=7))
    loss = whole(batch())
    (slope,) = torch.autograd.grad(loss, [whole.model.lm_head.weight])
    for same, sharded, norm in together(4, learned_in_shards, tmp_path):
        assert same
        assert sharded == pytest.approx(loss.item(), rel=1e-6)
        assert norm == pytest.approx(slope.norm().item(), rel=1e-5)


def test_an_untrained_model_is_at_chance() -> None:
    tokens = batch(16)
    loss = NextTokenLoss(build(small(tie_embeddings=True), LENGTH, seed=0))(tokens) / tokens[:, 1:].numel()
    # Tied embeddings with SmallInit give logits a variance of 2/5, which costs half of that over a uniform guess.
    assert loss.item() == pytest.approx(math.log(VOCABULARY) + 0.2, abs=0.05)


def test_the_hash_follows_every_bit_and_nothing_else() -> None:
    one, other = build(small(), LENGTH), build(small(), LENGTH)
    assert weights_sha256(one) != weights_sha256(other)  # drawn from torch's generator, one after the other
    other.load_state_dict(one.state_dict())
    assert weights_sha256(one) == weights_sha256(other)
    with torch.no_grad():
        other.model.norm.weight[3] = math.nextafter(1.0, 2.0) + 1e-6
    assert weights_sha256(one) != weights_sha256(other)


def test_the_cost_of_a_token_by_hand() -> None:
    # per block: q and o 64x32, k and v 32x32, three MLP matrices 32x48, two norms of 32; then a norm and 301x32
    weights = 3 * (2 * 2048 + 2 * 1024 + 3 * 1536 + 64) + 32 + 301 * 32
    attention = 12 * 3 * 64 * LENGTH
    assert flops_per_token(build(small(), LENGTH), LENGTH) == 6 * weights + attention
    tied = build(small(tie_embeddings=True), LENGTH)
    assert flops_per_token(tied, LENGTH) == 6 * weights + attention
    windows = build(small("mistral"), LENGTH)
    assert flops_per_token(windows, LENGTH) == 6 * weights + 12 * 3 * 64 * 7
    # GPT-2: fused q, k, v and o of 32, an MLP of two matrices, biases everywhere; positions are looked up
    gpt2 = 3 * (4 * 32 * 33 + 2 * 32 * 48 + 48 + 32 + 4 * 32) + 2 * 32 + 301 * 32
    assert flops_per_token(build(small("gpt2"), LENGTH), LENGTH) == 6 * gpt2 + 12 * 3 * 32 * LENGTH
