"""What a recipe asks for that is planned, and that Castra's own training program does not run yet."""

from collections.abc import Iterator
from typing import Any, Final

from recipes.spec import Model, Recipe

DENSE: Final[dict[str, Any]] = {
    name: Model.model_fields[name].default
    for name in ("mla", "experts", "topk", "expert_ffn", "shared_experts", "dense_layers")
}
"""What all networks that the program trains have in common."""
ARITHMETIC: Final = ("fp32", "bf16", "fp16")
SIZES: Final = ("tp", "pp", "vpp", "cp", "ep")


def dense(model: Model) -> Model:
    """The nearest network that Castra's own program trains: the model itself, if it does."""
    return model.model_copy(update=DENSE | {"gated": model.family != "gpt2"})


def only_planned(recipe: Recipe) -> list[str]:
    """The fields of a recipe, with their values, that nothing here can run yet; none where all of it can be run."""
    return list(_found(recipe))


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
