import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import Recipe
from recipes.cluster import LocalCluster
from recipes.load import RecipeError, load
from recipes.miniature import MAX_PARAMETERS, MAX_RANKS
from recipes.planned import dense, only_planned
from recipes.rehearse import CHAT, rehearse, work
from recipes.spec import Model
from recipes.weights import adapters, parameters

GALLERY = Path(__file__).parents[2] / "recipes"
BIG = ["llama3-8b-p4de", "llama3-8b-p5", "llama3-70b-p5"]


def counts(model: Model) -> tuple[int, ...]:
    """What makes a model large."""
    return (model.hidden_size, model.layers, model.heads, model.ffn_size)


@st.composite
def recipes(draw: st.DrawFn) -> Recipe:
    """Any valid recipe, of any size."""
    kv_heads, group = draw(st.integers(1, 16)), draw(st.integers(1, 20))
    heads = kv_heads * group
    steps = draw(st.integers(2, 10**6))
    kind = draw(st.sampled_from(["local", "slurm", "batch", "eks", "sagemaker"]))
    return load(
        {
            "name": draw(st.from_regex(r"[a-z][a-z0-9-]{0,38}[a-z0-9]", fullmatch=True)),
            "model": {
                "kv_heads": kv_heads,
                "heads": heads,
                "hidden_size": heads * 2 * draw(st.integers(1, 64)),
                "layers": draw(st.integers(1, 120)),
                "ffn_size": draw(st.integers(1, 60_000)),
                "vocab_size": draw(st.integers(300, 200_000)),
                "tie_embeddings": draw(st.booleans()),
            },
            "data": {
                "source": draw(st.sampled_from(["python-stdlib", "/nowhere/corpus", str(GALLERY)])),
                "tokenizer": draw(st.sampled_from(["train", "/nowhere/tokenizer.json", __file__])),
                "sequence_length": draw(st.integers(16, 131_072)),
                "max_documents": draw(st.none() | st.integers(1, 10**7)),
            },
            "cluster": {"kind": kind, "nodes": draw(st.integers(1, 16))},
            "parallel": {"micro_batch_size": draw(st.sampled_from(["auto", 1, 7]))},
            "train": {
                "steps": steps,
                "warmup_steps": draw(st.integers(0, steps - 1)),
                "global_batch_size": draw(st.integers(1, 4096)),
                "rehearse_failure_at": draw(st.none() | st.integers(1, steps - 1)),
            },
        }
    )


@settings(max_examples=150, deadline=None, database=None)
@given(recipe=recipes())
def test_any_recipe_becomes_small_and_then_stays_as_it_is(recipe: Recipe) -> None:
    small, notes = rehearse(recipe)
    assert isinstance(small.cluster, LocalCluster)
    ranks = small.cluster.nodes * small.cluster.processes_per_node
    assert ranks <= MAX_RANKS
    assert parameters(small.model) <= MAX_PARAMETERS
    assert small.model.vocab_size <= 4096
    assert work(small) <= work(Recipe())
    assert small.train.global_batch_size % ranks == 0 or (small == recipe) or recipe.cluster == small.cluster
    assert (small == recipe) == (not notes)
    assert rehearse(small) == (small, [])


@pytest.mark.parametrize("name", BIG)
def test_the_shape_of_a_large_model_is_kept(name: str) -> None:
    recipe = load(GALLERY / f"{name}.yaml")
    small, _ = rehearse(recipe)
    big, model = recipe.model, small.model
    assert model.heads // model.kv_heads == big.heads // big.kv_heads
    assert model.ffn_size / model.hidden_size == big.ffn_size / big.hidden_size
    assert (model.tie_embeddings, model.rope_theta) == (big.tie_embeddings, big.rope_theta)
    assert all(less < more for less, more in zip(counts(model), counts(big), strict=True))


@pytest.mark.parametrize("name", BIG)
def test_what_is_paid_for_is_left_out_and_what_is_rehearsed_is_kept(name: str) -> None:
    recipe = load(GALLERY / f"{name}.yaml", ["parallel.micro_batch_size=1", "train.rehearse_failure_at=5000"])
    small, notes = rehearse(recipe)
    assert small.name == f"{name}-rehearsal"
    assert (small.store, small.image.flavour) == (".castra/store", "local")
    assert (small.data.source, small.data.include, small.data.tokenizer) == ("python-stdlib", ("*.py",), "train")
    assert small.data.held_out >= 0.03
    assert small.score.must_beat == ("unigram",)
    assert small.parallel.strategy == recipe.parallel.strategy
    assert small.parallel.micro_batch_size == "auto"
    assert small.train.precision == recipe.train.precision
    assert small.train.activation_checkpointing
    assert 40 < (small.train.rehearse_failure_at or 0) < small.train.steps
    assert small.budget == recipe.budget
    assert any("the Python standard library, because /fsx/corpus is not on this machine" in note for note in notes)
    assert all(note.partition(":")[0] in {*Recipe.model_fields, "tokenizer"} for note in notes)


def test_the_miniature_is_small_already() -> None:
    for recipe in (Recipe(), load(GALLERY / "rehearsal.yaml")):
        assert rehearse(recipe) == (recipe, [])


def test_what_is_only_planned_yet_is_rehearsed_with_what_is_run() -> None:
    mixture = {"experts": 8, "topk": 2, "expert_ffn": 4096, "head_dim": 256, "gated": False}
    asked = {
        "model": mixture,
        "parallel": {"tp": 8, "pp": 2},
        "train": {"precision": "fp8"},
        "cluster": {"kind": "eks"},
    }
    assert {"model.experts 8", "model.gated false", "train.precision fp8"} <= {*only_planned(load(asked))}
    small, notes = rehearse(load(asked))
    assert not only_planned(small)
    assert (small.parallel.tp, small.parallel.pp, small.train.precision) == (2, 2, "bf16")
    assert small.model == dense(small.model)
    assert small.model.head_dim
    assert any("in place of what is only planned yet" in note for note in notes)


def test_two_of_each_parallel_size_are_kept() -> None:
    cloud = {"kind": "slurm", "nodes": 8}
    for asked, kept, ranks in (
        ({"tp": 8}, {"tp": 2}, 4),
        ({"tp": 4, "pp": 8, "vpp": 4}, {"tp": 2, "pp": 2, "vpp": 2}, 4),
        ({"cp": 16, "tp": 1}, {"cp": 2, "tp": 1}, 4),
        ({"shard": 8}, {"shard": 2}, 4),
        ({"tp": 2, "pp": 2, "cp": 2}, {"tp": 2, "pp": 2, "cp": 1}, 4),
        ({}, {"tp": "auto", "shard": "auto"}, 2),
    ):
        small, _ = rehearse(load({"cluster": cloud, "parallel": {"strategy": "fsdp2"} | asked}))
        assert {name: getattr(small.parallel, name) for name in kept} == kept
        assert isinstance(small.cluster, LocalCluster)
        assert small.cluster.nodes * small.cluster.processes_per_node == ranks
        assert small.model.kv_heads % 2 == 0


def test_a_family_keeps_its_ways() -> None:
    told = {"family": "gemma2", "hidden_size": 3584, "layers": 42, "heads": 16, "kv_heads": 8, "head_dim": 256}
    small, _ = rehearse(load({"model": told | {"ffn_size": 14336, "vocab_size": 256000, "sliding_window": 4096}}))
    model = small.model
    assert (model.family, model.sliding_window, model.heads // model.kv_heads) == ("gemma2", 64, 2)
    assert model.head_dim is not None
    assert model.head_dim * model.heads / model.hidden_size == pytest.approx(256 * 16 / 3584, rel=0.1)
    gpt2, _ = rehearse(load({"model": {"family": "gpt2", "hidden_size": 1600, "heads": 25, "kv_heads": 25}}))
    assert (gpt2.model.family, gpt2.model.gated) == ("gpt2", False)


def test_conversations_that_are_elsewhere_are_made_up(tmp_path: Path) -> None:
    told = {"kind": "chat", "source": "hf://someone/conversations", "tokenizer": "/nowhere/llama"}
    small, notes = rehearse(load({"data": told}))
    assert (small.data.kind, small.data.source, small.data.chat_template) == ("chat", str(CHAT), "chatml")
    assert any("made-up conversations" in note for note in notes)
    assert rehearse(small) == (small, [])
    lines = [json.loads(line)["messages"] for line in CHAT.read_text().splitlines()]
    assert len(lines) > 500
    assert {turn["role"] for turns in lines for turn in turns} == {"system", "user", "assistant"}
    here = tmp_path / "chat.jsonl"
    here.write_text('{"messages": []}')
    assert rehearse(load({"data": told | {"source": [str(here)]}}))[0].data.source == (str(here),)


def test_adapters_and_offloading_are_rehearsed_without_what_is_elsewhere() -> None:
    small, notes = rehearse(
        load(
            {
                "model": {"pretrained": "/nowhere/Llama-3.1-8B"},
                "train": {"lora_rank": 8, "compile": True, "steps": 10**6, "eval_every": 10**4},
                "parallel": {"strategy": "zero3", "offload": "parameters", "offload_to": "nvme"},
                "score": {"baseline": "/nowhere/base", "tasks": ["hellaswag"], "max_perplexity": 9},
                "export": {"push_to": "s3://elsewhere/model", "quantize": "int8"},
                "data": {"nodes": 16},
            }
        )
    )
    assert (small.model.pretrained, small.train.lora_rank, small.train.compile) == ("", 8, False)
    assert small.train.eval_every == small.train.steps // 2
    assert (small.parallel.offload, small.parallel.offload_to) == ("parameters", "cpu")
    assert (small.score.baseline, small.score.tasks, small.score.must_beat) == ("", (), ())
    assert (small.export.push_to, small.export.quantize) == ("", "int8")
    assert small.data.nodes == 2
    assert any("random weights, because /nowhere/Llama-3.1-8B is not on this machine" in note for note in notes)


def test_deepspeed_s_fp16_becomes_bf16() -> None:
    def rehearsed(strategy: str) -> str:
        return rehearse(load({"train": {"precision": "fp16"}, "parallel": {"strategy": strategy}}))[0].train.precision

    assert (rehearsed("zero2"), rehearsed("ddp")) == ("bf16", "fp16")


def test_adapters_have_the_weights_of_their_two_matrices() -> None:
    """Peft's own count for Llama 3.1 8B, rank 16, all seven linear layers: 41,943,040."""
    model = load(GALLERY / "llama31-8b-chat.yaml")
    assert adapters(model.model, 16, model.train.lora_targets) == 41_943_040
    with pytest.raises(RecipeError, match="gpt2 has only c_attn, c_proj, c_fc"):
        load({"model": {"family": "gpt2"}, "train": {"lora_rank": 8}})
    assert load({"model": {"family": "gpt2"}, "train": {"lora_rank": 8, "lora_targets": ["c_attn"]}})


def test_a_source_that_is_here_is_used_in_part(tmp_path: Path) -> None:
    small, notes = rehearse(load(GALLERY / "llama3-8b-p5.yaml", [f"data.source={tmp_path}"]))
    assert (small.data.source, small.data.max_documents) == (str(tmp_path), 2000)
    assert any(str(tmp_path) in note for note in notes)


def test_a_long_name_stays_within_its_limit() -> None:
    small, _ = rehearse(load({"name": "a" * 29 + "-" + "b" * 10, "cluster": {"kind": "eks"}}))
    assert small.name == "a" * 29 + "-rehearsal"


def test_parameters_are_those_of_the_published_models() -> None:
    """8,030,261,248 and 70,553,706,496: the counts of Meta-Llama-3-8B and -70B on the Hugging Face hub."""
    assert parameters(load(GALLERY / "llama3-8b-p5.yaml").model) == 8_030_261_248
    assert parameters(load(GALLERY / "llama3-70b-p5.yaml").model) == 70_553_706_496
