"""What a server may use: said by the environment, as containers are told, with defaults that are safe alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from training.process import JobError


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of one server."""

    host: str
    port: int
    slots: int
    queue: int
    context: int
    seconds: float
    drain: float
    body: int

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Read CASTRA_LISTEN (host:port) and the numbers below. Raises JobError for what is no number or address.

        A SageMaker endpoint calls port 8080 and gives an answer 60 s, a streamed one 480 s; its largest body is 25 MB.
        Only CASTRA_LISTEN opens the server to other machines: the default is this one alone.
        """
        host, _, port = environment.get("CASTRA_LISTEN", "127.0.0.1:8080").rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise JobError(f"CASTRA_LISTEN is {environment['CASTRA_LISTEN']!r}; write it as host:port")
        return cls(
            host=host.strip("[]"),
            port=int(port),
            slots=int(_number(environment, "CASTRA_SLOTS", 8)),
            queue=int(_number(environment, "CASTRA_QUEUE", 64)),
            context=int(_number(environment, "CASTRA_CONTEXT", 8192)),
            seconds=_number(environment, "CASTRA_REQUEST_S", 60),
            drain=_number(environment, "CASTRA_DRAIN_S", 25),
            body=int(_number(environment, "CASTRA_BODY_BYTES", 25_000_000)),
        )


def _number(environment: Mapping[str, str], name: str, default: float) -> float:
    told = environment.get(name, "")
    try:
        value = float(told or default)
    except ValueError:
        value = 0
    if not 0 < value < 1e12:
        raise JobError(f"{name} is {told!r}; write a number above 0, or leave it out ({default:g})")
    return value
