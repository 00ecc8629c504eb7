"""Arithmetic: which type matrices are multiplied in, and the loss scale that keeps fp16 gradients from vanishing."""

from dataclasses import dataclass
from typing import Any, Final

import torch

LOW: Final = {"bf16": torch.bfloat16, "fp16": torch.float16}
GROW_AFTER: Final = 1000
"""Updates without an overflow after which the scale is doubled (DeepSpeed's and apex's default order)."""


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass (Micikevicius et al., arXiv:1710.03740, section 3.2)."""

    value: float = 2.0**16
    good: int = 0
    """Updates since the scale last changed."""

    def grow(self) -> None:
        """An update was done."""
        self.good += 1
        if self.good >= GROW_AFTER and self.value < 2.0**24:
            self.value, self.good = self.value * 2, 0

    def shrink(self) -> bool:
        """Gradients overflowed; return whether a smaller scale may help (below 1 the loss itself has diverged)."""
        able = self.value > 1
        self.value, self.good = max(1.0, self.value / 2), 0
        return able

    def told(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"loss_scale": self.value, "good": self.good}

    def restore(self, told: dict[str, Any]) -> None:
        """Take a checkpoint's state back; a run in another precision had none."""
        self.value, self.good = told.get("loss_scale", self.value), told.get("good", 0)
