"""One process on a node: it reads its job, hears stop signals, dies with its parent, ends with a code that says why."""

import ctypes
import errno
import os
import signal
import sys
import warnings
from types import FrameType, TracebackType
from typing import Final, NoReturn

from training.job import NodeJob, say

FAILED: Final = 1
REFUSED: Final = 2
STOPPED: Final = 143
"""Exit code after a stop signal was obeyed: 128 + SIGTERM, as a shell tells it."""
CLOSED: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
"""What a full or closed disk answers: the user must act, a retry does not help."""
PR_SET_PDEATHSIG: Final = 1
"""From linux/prctl.h."""


class JobError(Exception):
    """The job cannot be done as asked; the message is one sentence for the person who asked."""


class Stopped(Exception):
    """A stop signal was obeyed: the work is saved and may be resumed."""


class StopSignal:
    """Whether somebody asked this process to stop (SIGTERM, or Ctrl-C); from its making on, it only remembers."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.asked = True


def follow_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux), so that a killed torchrun leaves no orphan."""
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(FAILED)


def read_job() -> NodeJob:
    """Read the job the command line names. Raises JobError when there is none."""
    if len(sys.argv) != 2:
        raise JobError(f"this program takes one argument, the path of a job.json, and got {len(sys.argv) - 1}")
    try:
        return NodeJob.read(sys.argv[1])
    except OSError as problem:
        raise JobError(f"{sys.argv[1]} cannot be read: {problem.strerror}") from problem
    except (ValueError, KeyError, AttributeError) as problem:
        raise JobError(f"{sys.argv[1]} is not a job: it must be JSON with spec, inputs and output") from problem


def quiet() -> None:
    """Keep the libraries' chatter out of the job's log; what matters, this program says itself."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")


def end_on_crash() -> None:
    """End the process right after the traceback of an unexpected exception (torch's hook puts the rank before it)."""
    show = sys.excepthook

    def crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        closed = _closed_disk(error)
        if closed is not None:
            say("error", message=f"{closed.filename or 'the output'}: {closed.strerror}; make room or make it writable")
            leave(REFUSED)
        show(kind, error, trace)
        leave(FAILED)

    sys.excepthook = crash


def _closed_disk(error: BaseException) -> OSError | None:
    """Return the refusal of a disk that caused an error; torch's CheckpointException holds one per failed rank."""
    causes = [error, *(failure[0] for failure in getattr(error, "failures", {}).values())]
    return next((cause for cause in causes if isinstance(cause, OSError) and cause.errno in CLOSED), None)


def leave(code: int) -> NoReturn:
    """End the process at once: with gloo's threads alive, the interpreter's own end may abort it after the work."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
