"""Things that go wrong on purpose: throttling, errors, slowness, lost answers, no capacity, failures, odd nodes.

    POST /castra/faults [{"service": "batch", "operation": "SubmitJob", "kind": "throttle", "times": 2}]
    POST /castra/faults [{"kind": "capacity", "instance_type": "p5.48xlarge", "zone": "us-east-1a", "times": 0}]
    POST /castra/faults [{"kind": "fail", "stack": "castra-x-camp", "resource": 3, "reason": "no more addresses"}]
    POST /castra/faults [{"kind": "down", "seconds": 60}]
    POST /castra/faults [{"kind": "file", "node": 1, "path": "/etc/castra/image.json", "text": "{}"}]

GET lists what is left of them, DELETE forgets them all. The emulator's own requests meet none.
"""

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from typing import Any

REQUEST_KINDS = ("throttle", "500", "slow", "drop", "lost")
"""What befalls a request: `drop` closes the connection instead of working, `lost` works and then closes it."""
KINDS = (*REQUEST_KINDS, "capacity", "fail", "down", "file")


@dataclass(slots=True)
class Fault:
    """One thing that goes wrong. Names may be patterns, as in `Describe*`."""

    kind: str
    service: str = "*"
    operation: str = "*"
    times: int = 1
    """How often; 0 is always."""
    skip: int = 0
    """How many that fit are let through first."""
    seconds: float = 1.0
    """How long `slow` and `down` take."""
    instance_type: str = "*"
    zone: str = "*"
    market: str = "*"
    """For `capacity`: on-demand, spot, or the id of a reservation."""
    stack: str = "*"
    resource: str = "*"
    """For `fail`: a logical id, or the number of the resource in the order they are made, from 1."""
    reason: str = "InsufficientInstanceCapacity: there is not enough capacity"
    node: int = 0
    """For `file`: the node of a job that finds this text at this path of its disk; another machine does not."""
    path: str = ""
    text: str = ""
    met: int = 0
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(KINDS)}")
        self.resource = str(self.resource)

    @property
    def over(self) -> bool:
        """Whether it can befall nothing any more."""
        if self.kind == "down":
            return time.monotonic() - self.began >= self.seconds
        return 0 < self.times <= self.met - self.skip

    def befalls(self) -> bool:
        """Count one that fits; returns whether it is let through no more."""
        self.met += 1
        return self.met > self.skip


_faults: list[Fault] = []
_lock = threading.Lock()


def add(told: Any) -> None:
    """Take one fault or a list of them, as JSON tells them; raises `ValueError` for what is none."""
    known = {one.name for one in fields(Fault)} - {"met", "began"}
    rows = told if isinstance(told, list) else [told]
    for row in rows:
        if not isinstance(row, Mapping) or (unknown := set(row) - known):
            wrong = ", ".join(sorted(unknown)) if isinstance(row, Mapping) else repr(row)
            raise ValueError(f"not a fault: {wrong}; a fault has {', '.join(sorted(known))}")
    made = [Fault(**row) for row in rows]
    with _lock:
        _faults.extend(made)


def listed() -> list[dict[str, Any]]:
    """What may still go wrong."""
    with _lock:
        return [asdict(one) for one in _faults if not one.over]


def clear() -> None:
    """Forget all."""
    with _lock:
        _faults.clear()


def down() -> bool:
    """Whether nothing is answered at this moment."""
    return any(one.kind == "down" and not one.over for one in list(_faults))


def may_befall(service: str) -> bool:
    """Whether a request to this service may meet something: only then is it worth finding out what it asks for."""
    return any(one.kind in REQUEST_KINDS and fnmatchcase(service, one.service) for one in list(_faults))


def of_request(service: str, operation: str) -> Fault | None:
    """What befalls this request."""
    return _first(lambda one: one.kind in REQUEST_KINDS, service=service, operation=operation)


def of_resource(stack: str, logical_id: str, number: int) -> str | None:
    """Why a stack's resource cannot be made, None if it can; `number` counts from 1."""
    found = _first(lambda one: one.kind == "fail" and one.resource in (logical_id, str(number), "*"), stack=stack)
    return found.reason if found else None


def of_node(node: int) -> Fault | None:
    """The file that the machine which starts as this node of a job has and should not."""
    return _first(lambda one: one.kind == "file" and one.node == node)


def no_capacity(instance_type: str, zone: str, market: str) -> str | None:
    """Why no instance of this type starts in this zone, in AWS's words; None if one does.

    `market` is "on-demand", "spot" or the id of a capacity reservation, which has to be known and active then.
    Counted, where the fault is not for always: ask once per attempt to start instances.
    """
    from emulator import reservations

    wanted = {"instance_type": instance_type, "zone": zone, "market": market}
    if _first(lambda one: one.kind == "capacity", **wanted) is None:
        return reservations.unusable(market, instance_type, zone) if market.startswith("cr-") else None
    if market == "spot":
        return "UnfulfillableCapacity: There is no Spot capacity available that matches your request."
    return (
        f"InsufficientInstanceCapacity: We currently do not have sufficient {instance_type} capacity in the "
        f"Availability Zone you requested ({zone})."
    )


def _first(fits: Any, **names: str) -> Fault | None:
    """The first fault that fits and is due; those that fit and are to be skipped are counted."""
    with _lock:
        for one in _faults:
            matches = all(fnmatchcase(name, getattr(one, key)) for key, name in names.items())
            if not one.over and fits(one) and matches and one.befalls():
                return one
    return None
