"""What was ever submitted here, so that a test can tell one submission from two after all is gone.

POST /castra/journal {}      answers [["batch", "preprocess-tiny-0123-1"], …]
"""

from typing import Any

from emulator.extension import PAGES

TAKEN: list[tuple[str, str]] = []
"""Kind of cluster, and name of the job, in the order in which they were accepted."""


def taken(kind: str, name: str) -> None:
    """Note that a job was accepted."""
    TAKEN.append((kind, name))


def page(_told: Any) -> list[tuple[str, str]]:
    """All that was accepted."""
    return list(TAKEN)


PAGES["/castra/journal"] = page
