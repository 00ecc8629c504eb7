"""What every section of a recipe is: frozen, and without fields it does not know."""

from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, PositiveInt

Size = PositiveInt | Literal["auto"]


class Part(BaseModel):
    """A frozen section of a recipe that refuses fields it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


P = TypeVar("P", bound=Part)


def agreed(part: P, wrong: list[str]) -> P:
    """The part, if nothing is wrong with how its fields go together; else all of it, one sentence a line."""
    if wrong:
        raise ValueError("\n".join(wrong))
    return part
