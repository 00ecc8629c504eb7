"""Where tests write down what they proved, for the table of docs/cases-matrix.md (`python -m benchmarks.matrix`)."""

import json
import os
from pathlib import Path
from typing import Literal, get_args

How = Literal["ran", "emulated", "rendered"]
KINDS = ("local", "slurm", "batch", "eks", "sagemaker")
FOLDER = "CASTRA_MATRIX"
"""The variable that names a folder for the results; nothing is written without it."""


def record(case: str, kind: str, how: How, proof: str) -> None:
    """Add one result, at the end of the test that proved it: a line of results.jsonl.

    case: the name of a file of recipes/cases. how: its program ran here for real ("ran"), it ran as a job of an
    emulated service ("emulated"), or the job was rendered and its arguments checked ("rendered"). proof: the test.
    Raises ValueError for a kind or a how that the table does not have.
    """
    if kind not in KINDS or how not in get_args(How):
        raise ValueError(f"{kind} ({how}) is no cell of the matrix: choose of {', '.join(KINDS)}; {get_args(How)}")
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(parents=True, exist_ok=True)
        line = json.dumps({"case": case, "kind": kind, "how": how, "proof": proof}) + "\n"
        handle = os.open(Path(folder, "results.jsonl"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:  # in one piece, for several processes may do so
            os.write(handle, line.encode())
        finally:
            os.close(handle)
