"""torchrun, with its rendezvous on loopback when the nodes are all this machine.

    python -m training.launch --nnodes 2 --node-rank 0 --master-addr 127.0.0.1 … -m training.run job.json

The store of torchrun's static rendezvous listens on every interface and asks nobody who they are. It has no option for
that, but takes a socket that is bound already.
"""

import socket
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed import run
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

LOOPBACK = "127.0.0.1"


class LoopbackStore(TCPStore):
    """A store whose server, if it is one, listens on 127.0.0.1 only."""

    def __init__(self, host: str, port: int, world_size: int, is_master: bool, timeout: timedelta, **told: Any) -> None:
        if is_master and host == LOOPBACK:
            told["master_listen_fd"] = socket.create_server((LOOPBACK, port), backlog=1024).detach()
        super().__init__(host, port, world_size, is_master, timeout, **told)


def main() -> None:
    """Be torchrun."""
    vars(static_tcp_rendezvous)["TCPStore"] = LoopbackStore
    run.main()


if __name__ == "__main__":
    main()
