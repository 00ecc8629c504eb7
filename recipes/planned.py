"""What a recipe asks for that is planned, and that the program it names does not run."""

from collections.abc import Iterator
from typing import Any, Final

from recipes.spec import Model, Recipe

DENSE: Final[dict[str, Any]] = {
    name: Model.model_fields[name].default
    for name in ("mla", "experts", "topk", "expert_ffn", "shared_experts", "dense_layers")
}
"""What all networks that the program trains have in common, but the experts of `ROUTED`."""
ROUTED: Final = {"mixtral": ("experts", "topk", "expert_ffn")}
"""Families whose routed experts it trains, and what of them."""
ARITHMETIC: Final = ("fp32", "bf16", "fp16")
SIZES: Final = ("tp", "pp", "vpp", "cp", "ep")


def dense(model: Model) -> Model:
    """The nearest network that Castra's own program trains: the model itself, if it does."""
    able = {name: value for name, value in DENSE.items() if name not in ROUTED.get(model.family, ())}
    return model.model_copy(update=able | {"gated": model.family != "gpt2"})


def only_planned(recipe: Recipe) -> list[str]:
    """The fields of a recipe, with their values, that its program cannot run; none where all of it can be run.

    What another framework can do is its launcher's to say, see `training.cases`.
    """
    return list(_found(recipe)) if recipe.case.framework == "castra" else []


def _found(recipe: Recipe) -> Iterator[str]:
    if recipe.parallel.software != "castra":
        yield f"parallel.software {recipe.parallel.software}"
        yield from (
            f"parallel.{name} {size}" for name in SIZES if (size := getattr(recipe.parallel, name)) not in ("auto", 1)
        )
    able = dense(recipe.model)
    for name in ("gated", *DENSE):
        if (value := getattr(recipe.model, name)) != getattr(able, name):
            yield f"model.{name} {str(value).lower()}"
    if recipe.train.precision not in ARITHMETIC:
        yield f"train.precision {recipe.train.precision}"
