"""Tasks of EleutherAI's lm-evaluation-harness, where it is installed on the nodes."""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.process import JobError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def check(tasks: Sequence[str]) -> None:
    """Raise JobError when tasks are asked for and the harness is not installed; before anything is computed."""
    if tasks and find_spec("lm_eval") is None:
        raise JobError(
            f"score.tasks asks for {', '.join(tasks)} and lm_eval is not installed on the nodes; install it in the "
            "image or leave score.tasks empty"
        )


def run(tasks: Sequence[str], model: "PreTrainedModel", dataset: Path) -> dict[str, dict[str, float]]:
    """Return the figures of every task by its name; the harness needs the tasks' data on the nodes. Raises JobError."""
    if not tasks:
        return {}
    from transformers import PreTrainedTokenizerFast

    harness: Any = import_module("lm_eval")
    models: Any = import_module("lm_eval.models.huggingface")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(dataset / "tokenizer.json"))
    try:
        wrapped = models.HFLM(pretrained=model, tokenizer=tokenizer)
        told: Any = harness.simple_evaluate(model=wrapped, tasks=list(tasks))
    except (KeyError, ValueError, OSError) as problem:
        raise JobError(f"score.tasks: lm_eval could not do {', '.join(tasks)} ({problem})") from problem
    return {
        task: {name: float(value) for name, value in figures.items() if isinstance(value, int | float)}
        for task, figures in told["results"].items()
    }
