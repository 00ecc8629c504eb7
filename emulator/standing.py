"""The owner of the standing emulator: a small process in the background that outlives the shell that asked for it.

`python -m emulator up` starts it; it starts the emulator, writes down where it is, and waits for its end. If it is
killed, the emulator ends with it; `down` ends the emulator, and then this ends by itself.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clusters import keeper
from clusters.aws import Site, here
from clusters.base import ClusterError
from clusters.warden import read_json, write_json
from emulator import aws
from emulator.aws import RECORD, ROOT, Emulator
from store.objects import state_folder

START_S = aws.START_S + 10
DOWN_S = 20.0


def up(port: int | None, share: Sequence[Path]) -> Emulator:
    """The standing emulator, started if there is none; raises `ClusterError` if it does not start."""
    if found := aws.standing():
        return found
    folder = (state_folder() / RECORD).parent
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.dumps({"port": port, "share": [str(one.resolve()) for one in share]})
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (folder / "emulator.log").open("w") as log:
        owner = subprocess.Popen(
            [sys.executable, "-m", "emulator.standing", asked],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if found := aws.standing():
            return found
        if owner.poll() is not None:
            raise ClusterError((folder / "emulator.log").read_text().strip().rpartition("\n")[2] or "it ended at once")
        time.sleep(0.05)
    raise ClusterError(f"the emulator did not answer within {START_S:.0f} s; its log is {folder / 'emulator.log'}")


def down() -> bool:
    """End the standing emulator; returns whether there was one."""
    found = aws.standing()
    record = state_folder() / RECORD
    if found is None:
        record.unlink(missing_ok=True)
        return False
    found.stop()
    until = time.monotonic() + DOWN_S
    while record.exists() and time.monotonic() < until:  # its owner takes the record away, last
        time.sleep(0.05)
    record.unlink(missing_ok=True)
    return True


def own(port: int | None, share: Sequence[Path]) -> None:
    """Start the emulator and hold it until it ends or this is asked to end."""
    record = state_folder() / RECORD
    emulator = aws.start(share=share, port=port)
    try:
        for sign in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(sign, lambda *_: sys.exit(0))
        write_json(record, _told(emulator))
        while keeper.alive(emulator.folder):
            time.sleep(0.2)
    finally:
        emulator.stop()
        if (read_json(record) or {}).get("pid") == os.getpid():
            record.unlink(missing_ok=True)


def _told(emulator: Emulator) -> dict[str, Any]:
    os.environ |= aws.environment(emulator.endpoint)
    site: Site = here()
    where = {"endpoint": site.endpoint, "memory": site.memory, "folder": str(emulator.folder)}
    return where | {"pid": os.getpid(), "port": int(site.endpoint.rpartition(":")[2])}


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    try:
        own(told["port"], [Path(one) for one in told["share"]])
    except ClusterError as failure:
        sys.exit(str(failure))
