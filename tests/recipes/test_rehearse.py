from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import Recipe
from recipes.cluster import LocalCluster
from recipes.load import load
from recipes.planned import LLAMA, only_planned
from recipes.rehearse import MAX_PARAMETERS, MAX_RANKS, parameters, rehearse, work
from recipes.spec import Model, Parallel

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
    assert {"parallel.tp 8", "model.experts 8", "model.gated false", "train.precision fp8"} <= {
        *only_planned(load(asked))
    }
    small, notes = rehearse(load(asked))
    assert not only_planned(small)
    assert (small.parallel, small.train.precision) == (Parallel(), "bf16")
    assert small.model == small.model.model_copy(update=LLAMA)
    assert any("in place of what is only planned yet" in note for note in notes)


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
