"""torchrun, with its rendezvous on the address it was told, and the exit code of its ranks.

    python -m training.launch --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 … -m training.run job.json

The store of torchrun's static rendezvous listens on every interface and asks nobody who they are. It has no option for
that, but takes a socket that is bound already. And torchrun ends with 1 whatever its ranks ended with; this ends with
2 (refused) or 143 (stopped and saved) if they did, and 128 + the signal if one was killed.
"""

import socket
import sys
from datetime import timedelta
from typing import Any

from training.process import FAILED, REFUSED, STOPPED, follow_parent, leave


def main() -> None:
    """Be torchrun."""
    follow_parent()
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

    class BoundStore(TCPStore):
        """A store whose server, if it is one, listens on the address of the rendezvous only."""

        def __init__(
            self, host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **told: Any
        ) -> None:
            if is_master:
                told["master_listen_fd"] = socket.create_server((host, port), backlog=1024).detach()
            super().__init__(host, port, world_size, is_master, timeout, **told)

    vars(static_tcp_rendezvous)["TCPStore"] = BoundStore
    try:
        run.main()
    except ChildFailedError as failure:
        _, first = failure.get_first_failure()
        if first.exitcode not in (REFUSED, STOPPED):
            print(failure, file=sys.stderr, flush=True)
        leave(first.exitcode if first.exitcode > 0 else 128 - first.exitcode or FAILED)


if __name__ == "__main__":
    main()
