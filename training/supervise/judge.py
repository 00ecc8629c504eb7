"""What to do with a step whose loss or gradient is not finite, or whose loss spikes."""

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any, Final

from training.job import say
from training.process import JobError

WINDOW: Final = 100
"""Good steps whose median loss a spike is measured by (train.loss_spike)."""
FEWEST: Final = 10
"""Good steps before which nothing is called a spike: there is no median to speak of."""


class Judge:
    """Judges every step by its global loss and gradient norm, so that all ranks judge alike.

    `train` is that part of the recipe: on_bad_step, max_bad_steps, loss_spike. Rank 0 is `talking`.
    """

    def __init__(self, train: Mapping[str, Any], *, talking: bool) -> None:
        self._stops, self._most, self._spike = (
            train["on_bad_step"] == "stop",
            train["max_bad_steps"],
            train["loss_spike"],
        )
        self._talking = talking
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._bad = 0

    def judge(self, step: int, loss: float, norm: float) -> bool:
        """Return whether to do the step's update. Raises JobError where the recipe says stop, or too many were bad."""
        why = self._wrong(loss, norm)
        if why is None:
            self._bad = 0
            self._losses.append(loss)
            return True
        self._bad += 1
        if self._stops:
            raise JobError(f"{why} at step {step}: {_ADVICE} (the checkpoints before it are kept)")
        if self._bad >= self._most:
            raise JobError(f"{why} at step {step}, bad step {self._bad} in a row (train.max_bad_steps): {_ADVICE}")
        if self._talking:
            numbers = {"loss": loss, "grad_norm": norm}
            finite = {name: number for name, number in numbers.items() if math.isfinite(number)}
            say("bad-step", step=step, reason=why, in_a_row=self._bad, **finite)
        return False

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs to judge alike, as JSON."""
        return {"losses": list(self._losses), "bad": self._bad}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over another's state."""
        self._losses.extend(state.get("losses", ()))
        self._bad = state.get("bad", 0)

    def _wrong(self, loss: float, norm: float) -> str | None:
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss} and the gradient norm {norm}"
        if self._spike is None or len(self._losses) < FEWEST:
            return None
        usual = median(self._losses)
        if loss > self._spike * usual:
            times = f"{loss / usual:.1f} times the median {usual:.4g}"
            return f"the loss is {loss:.4g}, {times} of the last {len(self._losses)} steps"
        return None


_ADVICE: Final = "training diverged; lower train.learning_rate or lengthen train.warmup_steps"
