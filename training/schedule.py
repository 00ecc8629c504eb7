"""The learning rate of every step."""

import math
from typing import Any


def learning_rate(step: int, train: dict[str, Any]) -> float:
    """Return the rate of step 1..steps: linear warm-up to the peak, then what `train.schedule` says.

    cosine and linear go down to `min_lr_ratio` of the peak at the last step; constant stays; wsd stays and goes down
    linearly over the last `decay_ratio` of the steps (Hu et al., "MiniCPM", arXiv:2404.06395, section 4).
    """
    peak, warmup, steps = train["learning_rate"], train["warmup_steps"], train["steps"]
    if step <= warmup:
        return float(peak * step / warmup)
    decay = steps - warmup
    if train["schedule"] == "wsd":
        decay = min(decay, math.ceil(train["decay_ratio"] * steps))
    done = max(0.0, 1 - (steps - step) / decay) if decay else 0.0
    left = {"cosine": (1 + math.cos(math.pi * done)) / 2, "constant": 1.0}.get(train["schedule"], 1 - done)
    return float(peak * (train["min_lr_ratio"] + (1 - train["min_lr_ratio"]) * left))
