"""torchrun, with its rendezvous on the address it was told, and the exit code of its ranks.

    python -m training.launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 … -m training.run job.json

The store of torchrun's static rendezvous listens on every interface and asks nobody who they are. It has no option for
that, but takes a socket that is bound already. And torchrun ends with 1 whatever its ranks ended with; this ends with
2 (refused) or 143 (stopped and saved) if they did, and 128 + the signal if one was killed.
"""

import socket
import sys
import time
from datetime import timedelta
from typing import Any, Final

from training.process import FAILED, REFUSED, STOPPED, follow_parent, leave

LINGER_S: Final = 0.5
"""How long the store outlives torchrun's last barrier: who is still waiting in it would call the end a lost peer."""


def main() -> None:
    """Be torchrun."""
    follow_parent()
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    others = 0

    class BoundStore(TCPStore):
        """A store whose server, if it is one, listens on the address of the rendezvous only."""

        def __init__(
            self, host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **told: Any
        ) -> None:
            nonlocal others
            if is_master:
                others = world_size - 1
                told["master_listen_fd"] = socket.create_server((host, port), backlog=1024).detach()
            super().__init__(host, port, world_size, is_master, timeout, **told)

    vars(static_tcp_rendezvous)["TCPStore"] = BoundStore
    try:
        run.main()
        time.sleep(LINGER_S if others else 0)
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if first.exitcode not in (REFUSED, STOPPED):
            print(failure, file=sys.stderr, flush=True)
        leave(first.exitcode if first.exitcode > 0 else 128 - first.exitcode or FAILED)


if __name__ == "__main__":
    main()
