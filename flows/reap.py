"""Take down whatever has outlived its time, of every recipe in a store: the safety net, on a schedule.

python -m flows.reap .castra/store
"""

import sys

from flows._command import EMULATED, REAL, execute
from flows._house import MISTAKES, verb
from flows._input import Real, launch, sentences
from tasks import stack


@verb("reap", description=__doc__, run_name="reap")
def reap(store: str = ".castra/store") -> str:
    """Reap what has expired; a camp that is kept on purpose is reaped when its time is over."""
    left = stack.reap(store)
    return f"{len(left)} resources stand, none past its time" if left else "inventory empty"


def main(store: str = ".castra/store", *, real: Real = False) -> None:
    """Take down whatever has outlived its time in a store."""
    with sentences(MISTAKES):
        needed = stack.any_expired(store)
        sys.exit(execute(reap, {"store": store}, sky=REAL if real else EMULATED if needed else None))


if __name__ == "__main__":
    launch(main, "reap", __doc__)
