"""What a job may be called and ask for anywhere, and its name where a service allows fewer letters than we do."""

import hashlib
import re

from clusters.base import Job, Refused


def check(job: Job) -> None:
    """Raise `Refused` for a job that no cluster could run."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,199}", job.name, re.ASCII):
        raise Refused(f"{job.name!r} cannot name a job: use letters, digits, '.', '_' and '-', at most 200")
    if job.nodes > 1 and not job.processes_per_node:
        raise Refused(
            f"job {job.name}: processes_per_node 0 is a program of one process; give it 1 node, not {job.nodes}"
        )
    if job.nodes < 1 or job.processes_per_node < 0 or job.timeout_s <= 0 or job.restarts < 0:
        raise Refused(
            f"job {job.name}: nodes and timeout_s must be positive, processes_per_node and restarts not negative"
        )


def fitted(name: str, longest: int, strange: str) -> str:
    """The name itself where it fits; else without its `strange` letters (a regular expression), cut, with a hash.

    The same name gives the same answer, and two names never give one: what is changed carries its hash.
    """
    plain = re.sub(strange, "-", name).rstrip("-")
    if plain == name and len(name) <= longest:
        return name
    tail = hashlib.sha256(name.encode()).hexdigest()[:10]
    return f"{plain[: longest - len(tail) - 1].rstrip('-')}-{tail}"
