"""Run a node program that is one process and needs no other ranks; torch is not imported unless the program does."""

import os
from collections.abc import Callable
from typing import NoReturn

from training import process
from training.job import NodeJob, say


def alone(program: Callable[[NodeJob], None]) -> NoReturn:
    """Run a program on the job.json named on the command line and end the process.

    Exit codes as `training.ranks.run`: 0 done (or already done: result.json exists), 1 crashed, 2 refused (JobError,
    or a disk that is full or closed).
    """
    process.follow_parent()
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    process.quiet()
    try:
        job = process.read_job()
        if not (job.output / "result.json").exists():
            program(job)
    except process.JobError as error:
        _refuse(str(error))
    except OSError as problem:
        if problem.errno not in process.CLOSED:
            raise
        where = problem.filename or job.output
        _refuse(f"{where}: {problem.strerror}; make room there or make it writable, then start again")
    raise SystemExit(0)


def _refuse(sentence: str) -> NoReturn:
    say("error", message=sentence)
    raise SystemExit(process.REFUSED)
