"""One Prefect flow per file, each a verb that a person deploys, schedules or runs.

Prefect reads its settings when it is first imported, so what holds for every flow is set here.
"""

import contextlib
import os
from pathlib import Path

from store.objects import state_folder

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
if "PREFECT_HOME" not in os.environ:
    os.environ["PREFECT_HOME"] = str(state_folder() / "prefect")
    with contextlib.suppress(OSError):  # told in one sentence where it matters: by the store or by the server
        Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
