"""mpirun's launch agent in place of ssh: asks a node's door to run a command, and lasts as long as that runs.

python -m training.cases.reach HOST COMMAND …
"""

import json
import os
import socket
import sys
from pathlib import Path

from training.cases.mpi import NODES, PATIENCE_S, proof, read_line
from training.process import FAILED, follow_parent


def main() -> int:
    """Return the command's exit code, as ssh would."""
    follow_parent()
    host, command = sys.argv[1], " ".join(sys.argv[2:])
    known = json.loads(Path(os.environ[NODES]).read_text())
    try:
        with socket.create_connection((host, known["doors"][host]), timeout=PATIENCE_S) as door:
            shown = proof(known["secret"], read_line(door).strip(), command)
            door.sendall(json.dumps({"command": command, "proof": shown}).encode() + b"\n")
            door.settimeout(None)
            return int(read_line(door))
    except (OSError, KeyError) as problem:
        print(f"node {host} cannot be reached: {problem!r}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
