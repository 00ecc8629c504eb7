"""The constants an uncalibrated estimate rests on, per generation of accelerators: read from tables/prior.json."""

import json
from functools import cache
from pathlib import Path
from typing import Final

from planner.machine import Machine
from planner.speed import Prior

TABLE = Path(__file__).with_name("tables") / "prior.json"
FAMILIES: Final = {"A100": "A100", "H100": "H100", "H200": "H100"}
"""Part of an accelerator's name → the generation its prior was chosen on."""
ANY_GPU: Final = "gpu"
"""The prior of a generation nobody measured for us, with the widest interval."""


def family_of(accelerator: str) -> str:
    """The generation whose prior serves an accelerator, by its name."""
    return next((family for part, family in FAMILIES.items() if part in accelerator), ANY_GPU)


def prior_for(machine: Machine) -> Prior:
    """The constants for a machine."""
    return table()["cpu" if machine.local else family_of(machine.accelerator)]


@cache
def table() -> dict[str, Prior]:
    """Every prior by its name: the generations, 'gpu' for the others, 'cpu' for this machine."""
    told = json.loads(TABLE.read_text())["priors"]
    lists = {name: {field: tuple(told[name][field]) for field in ("interval", "deepspeed_interval")} for name in told}
    return {name: Prior(**told[name] | lists[name]) for name in told}
