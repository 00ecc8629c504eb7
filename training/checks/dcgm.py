"""What DCGM's diagnosis found: `dcgmi diag -r 2|3|4 -j`, of DCGM 3 and 4.

Severities of errors: NVIDIA/DCGM 72fa3feaa67d, dcgmlib/dcgm_errors.h; form of the answer of DCGM 4: the same,
testing/python3/dcgm_diag_schema.json. Durations of the levels: docs.nvidia.com/datacenter/dcgm, dcgmi diag (2 minutes,
15 minutes, longer), and the gpu-cluster-healthcheck of awslabs/awsome-distributed-ai, whose limits are taken.
"""

import json
from collections.abc import Iterable
from typing import Any, Final

from training.checks.finding import Action, Finding
from training.checks.gpus import Unreadable

PATIENCE_S: Final = {1: 120.0, 2: 900.0, 3: 2700.0, 4: 10800.0}
"""By level."""
TESTS: Final = ("DCGM Diagnostic", "DCGM GPU Diagnostic")
"""Of DCGM 4, and before."""
MONITOR, ISOLATE, UNKNOWN, TRIAGE, CONFIG, RESET = 1, 2, 3, 4, 5, 6
ACTIONS: Final[dict[int, Action]] = {MONITOR: "monitor", CONFIG: "", RESET: "reset"}
"""Of the others "isolate": a failure that is not explained is not to be trained on."""


def read(told: str) -> list[Finding]:
    """Read an answer; tests that passed tell nothing. Raises `Unreadable`."""
    try:
        # it may say something before the JSON
        document = json.loads(told[told.index("{") :])
        diagnosis = next(document[name] for name in TESTS if name in document)
        tests = [test for part in diagnosis.get("test_categories", []) for test in part["tests"] if test]
        results = [(test["name"], result) for test in tests for result in test["results"]]
    except (ValueError, StopIteration, KeyError, TypeError) as problem:
        raise Unreadable(f"dcgmi diag -j answered something else than a diagnosis: {told.strip()[:100]!r}") from problem
    found = [finding for test, result in results for finding in _findings(test, result)]
    if error := diagnosis.get("runtime_error"):
        found.append(Finding("warn", f"DCGM's diagnosis could not run: {error}", todo="see nv-hostengine's log"))
    elif results and all(_status(result) in ("skip", "not run") for _, result in results):
        found.append(Finding("warn", "DCGM skipped all of its tests", todo="see whether DCGM knows this GPU"))
    return found


def _status(result: dict[str, Any]) -> str:
    return str(result.get("status", "")).lower()


def _findings(test: str, result: dict[str, Any]) -> Iterable[Finding]:
    """What one result tells: a finding per warning, or one if it has none."""
    if _status(result) not in ("fail", "warn", "warning"):
        return
    failed = _status(result) == "fail"
    for warning in result.get("warnings") or [{}]:
        text, severity = _warning(warning)
        action: Action = ACTIONS.get(severity, "isolate") if failed else "monitor"
        yield Finding(
            "refuse" if action in ("isolate", "reset") else "warn",
            f"DCGM's test {test} {'failed' if failed else 'warns'}" + (f": {text}" if text else ""),
            device=_device(result),
            todo={"isolate": "replace the node", "reset": "reset the GPU", "": "set it right"}.get(action, "watch it"),
            action=action,
        )


def _warning(warning: Any) -> tuple[str, int]:
    """Text and severity; DCGM before 3.1 gave a text alone."""
    if not isinstance(warning, dict):
        return str(warning), UNKNOWN
    return str(warning.get("warning", "")), int(warning.get("error_severity", UNKNOWN))


def _device(result: dict[str, Any]) -> str:
    if "entity_id" in result:
        return f"{result.get('entity_group', 'GPU')} {result['entity_id']}"
    ids = str(result.get("gpu_ids", "")).split(",")
    return ", ".join(f"GPU {number}" for number in ids if number)
