"""What clusters reached in micro-benchmarks, in the store beside the measured steps, for the next plan.

<store>/calibrated/<instance type>/<precision>/<nodes>.json        the newest for each number of nodes
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

import planner
from planner.achieved import Achieved
from store import Store

FOLDER: Final = "calibrated"


def nearest(store: Store, instance: str, precision: str, nodes: int) -> Achieved | None:
    """What such machines reached, on the number of nodes nearest to this one; None if nobody measured it.

    Raises `planner.PlanError` for a file that was spoilt, `StoreError` if the store fails.
    """
    named = (re.search(r"/(\d+)\.json$", key) for key in store.keys(f"{FOLDER}/{instance}/{precision}/"))
    counts = [int(one[1]) for one in named if one]
    if not counts:
        return None
    key = _key(instance, precision, min(counts, key=lambda there: (abs(math.log(there / nodes)), there)))
    found = store.get(key)
    try:
        return Achieved.from_json(json.loads(found.data), key) if found else None
    except ValueError:
        raise planner.PlanError(f"{key} is no JSON: delete it, and calibrate again.") from None


def keep(store: Store, instance: str, machine: planner.Machine, result: Mapping[str, Any]) -> Achieved:
    """Keep what the result.json of `training.checks.calibrate` says of machines.

    Raises `planner.PlanError` for figures that cannot be true, or are another machine's, and `StoreError`.
    """
    found = Achieved.of(result, machine)
    text = json.dumps(found.to_json(), indent=1, sort_keys=True)
    store.put(_key(instance, found.precision, found.nodes), text.encode())
    return found


def _key(instance: str, precision: str, nodes: int) -> str:
    return f"{FOLDER}/{instance}/{precision}/{nodes}.json"
