"""What a check found wrong: how bad it is, on which node and device, and what to do about it."""

from dataclasses import dataclass
from typing import Final, Literal

Severity = Literal["refuse", "warn"]
"""`refuse`: training would fail, hang or be wrong or slow here. `warn`: it works, and somebody should know."""
Action = Literal["isolate", "reboot", "reset", "monitor", ""]
"""What the node needs, gravest first: to be taken out and replaced, a reboot, a reset of the GPU, an eye on it."""

GRAVEST: Final[tuple[Action, ...]] = ("isolate", "reboot", "reset", "monitor", "")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong."""

    severity: Severity
    what: str
    """A part of a sentence, with the figure seen and the figure expected."""
    node: str = ""
    device: str = ""
    """`GPU 3`, `rdmap16s27`, `/scratch`."""
    todo: str = ""
    action: Action = ""

    @property
    def gravity(self) -> tuple[str, int]:
        """What findings are sorted by, the gravest first."""
        return self.severity, GRAVEST.index(self.action)
