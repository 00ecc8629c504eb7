"""The same training on other machines of the catalogue: which are compared, what is left open, what is refused."""

from pathlib import Path

import pytest

from clusters.base import Refused
from planner.offers import planned
from recipes.load import load
from recipes.spec import Parallel, Recipe
from tasks.plan_sweep import freed, moved, neighbours, sweep

GALLERY = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load(GALLERY / "llama3-8b-p5.yaml")


def test_every_machine_has_a_plan_or_a_reason(recipe: Recipe) -> None:
    found = sweep(recipe, ("p4de.24xlarge", "p5e.48xlarge"), (4, 7))
    assert [str(one) for one in found] == [
        "4 x p4de.24xlarge",
        "7 x p4de.24xlarge",
        "4 x p5e.48xlarge",
        "7 x p5e.48xlarge",
    ]
    assert {one.nodes for one in planned(found)} == {4}, "256 sequences do not divide by 56"


def test_what_was_prescribed_for_its_own_machines_is_left_open_elsewhere(recipe: Recipe) -> None:
    assert recipe.parallel.strategy == "fsdp2"
    assert freed(recipe).parallel == Parallel()
    assert freed(load({"parallel": {"recompute": "full"}})).parallel == Parallel(software="megatron")


def test_a_recipe_for_this_machine_moves_to_a_cluster() -> None:
    cluster = moved(Recipe(), "p5.48xlarge", 4).cluster
    assert (cluster.kind, cluster.nodes) == ("slurm", 4)


def test_where_nothing_can_run_it_every_reason_is_told(recipe: Recipe) -> None:
    with pytest.raises(Refused) as refused:
        sweep(recipe, ("g5.xlarge", "trn1.32xlarge"), (3, 64))
    assert [line.split(": ")[0] for line in str(refused.value).splitlines()] == [
        "3 x g5.xlarge",
        "64 x g5.xlarge",
        "3 x trn1.32xlarge",
        "64 x trn1.32xlarge",
    ]


def test_an_unknown_type_names_its_neighbours(recipe: Recipe) -> None:
    with pytest.raises(Refused, match=r"did you mean .*p5\.48xlarge"):
        sweep(recipe, ("p5.49xlarge",), (4,))


def test_there_is_always_something_to_compare_with(recipe: Recipe) -> None:
    assert neighbours(recipe) == (("p5.48xlarge",), (4, 8, 16, 32, 64))
    assert neighbours(load({"cluster": {"kind": "eks", "nodes": 1}}))[1] == (1, 2, 4)
    types, nodes = neighbours(Recipe())
    assert "g5.xlarge" in types
    assert nodes == (1,)
