"""Where the processes that torchrun started meet, before and after a program that knows nothing of them: its store."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from training.process import JobError

PERIOD_S: Final = 0.2
"""Between two looks for what another rank puts there: a stop signal is heard meanwhile."""


@dataclass
class Meeting:
    """This process's place among those that torchrun started; what one puts there, all can get."""

    rank: int
    size: int
    local_rank: int
    address: str
    """Of the node of rank 0."""
    port: int
    _store: Any = None
    _alone: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, env: Mapping[str, str]) -> "Meeting":
        """As torchrun tells it; a single process where it does not. Raises JobError for what is not whole."""
        try:
            rank, size, local = (int(env.get(name, told)) for name, told in _ALONE.items())
            return cls(rank, size, local, env.get("MASTER_ADDR", "127.0.0.1"), int(env.get("MASTER_PORT", "0")))
        except ValueError as problem:
            raise JobError(f"torchrun's environment is not whole: {problem}") from problem

    def put(self, name: str, told: Any) -> None:
        """Leave something for the others, as JSON."""
        if self.size == 1:
            self._alone[name] = told
        else:
            self._connected().set(f"castra/case/{name}", json.dumps(told))

    def get(self, name: str) -> Any:
        """What was left under a name, as soon as it is there. Raises torch's DistError where the store is gone."""
        if self.size == 1:
            return self._alone[name]
        store, key = self._connected(), f"castra/case/{name}"
        while not store.check([key]):
            time.sleep(PERIOD_S)
        return json.loads(store.get(key))

    def gather(self, mine: Any) -> list[Any]:
        """What all ranks give, by rank, on rank 0; nothing elsewhere. Every rank must call it, once."""
        if self.rank:
            self.put(f"end-{self.rank}", mine)
            return []
        return [mine, *(self.get(f"end-{rank}") for rank in range(1, self.size))]

    def _connected(self) -> Any:
        if self._store is None:
            from torch._C._distributed_c10d import (
                TCPStore,
            )  # torchrun's own, which torchrun keeps until all ranks have ended

            self._store = TCPStore(self.address, self.port, is_master=False, timeout=timedelta(seconds=60))
        return self._store


_ALONE: Final = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def without_torchrun(env: Mapping[str, str]) -> dict[str, str]:
    """An environment that tells a program nothing of the ranks it is not one of."""
    return {name: told for name, told in env.items() if name not in _TORCHRUNS and not name.startswith("TORCHELASTIC_")}


_TORCHRUNS: Final = {
    *_ALONE,
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
}
