"""Whose program trains: Castra's own, or another framework's, which is told the plan in its own words."""

from typing import Final, Literal

from pydantic import Field

from recipes.part import Part

Framework = Literal[
    "castra",
    "megatron-lm",
    "megatron-deepspeed",
    "nemo",
    "llm-foundry",
    "torchtitan",
    "picotron",
    "neuronx",
    "nccl-tests",
    "param",
]
MEGATRONS: Final = ("megatron-lm", "megatron-deepspeed", "nemo")
"""Frameworks that are planned as Megatron and read its .bin and .idx files."""


class Case(Part):
    """The program that trains, or measures."""

    framework: Framework = Field(
        "castra", description="Whose program runs on the nodes; every one but castra must be installed there."
    )
    program: str = Field(
        "", description="Which of the framework's programs; empty is its pre-training.", examples=["all_reduce"]
    )
    folder: str = Field(
        "",
        description="Execution. Where the framework lies on the nodes; empty is where its container has it.",
        examples=["/opt/Megatron-LM"],
    )
    arguments: tuple[str, ...] = Field(
        (),
        description="Laid over what the plan says, each name=value by the framework's own names.",
        examples=[["log-interval=10", "eval-iters=0"]],
    )
