"""Above a sum of money the run waits in the UI until somebody answers; a no creates nothing; a yes is remembered."""

import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.camp import Camp
from tests.flows.test_clouds import told

pytestmark = [pytest.mark.timeout(240)]

ASKS = "budget: {approve_above_usd: 1}"


def url_of(run: "subprocess.Popen[str]") -> str:
    """The address of the run's own Prefect server, as it is printed."""
    assert run.stdout
    for line in run.stdout:
        if line.startswith("watch: "):
            return line.removeprefix("watch: ").partition("/runs")[0]
    raise AssertionError("the run ended before it said where to watch it")


def paused(url: str, patience_s: float = 60.0) -> dict[str, Any]:
    """The run that waits for an answer."""
    wanted = {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}}
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        found: list[dict[str, Any]] = httpx.post(f"{url}/api/flow_runs/filter", json=wanted).json()
        if found:
            return found[0]
        time.sleep(0.5)
    raise AssertionError("no run waits for approval")


def answer(url: str, run: dict[str, Any], **said: object) -> httpx.Response:
    """What the UI's form sends."""
    return httpx.post(f"{url}/api/flow_runs/{run['id']}/resume", json={"run_input": said})


def recipe(camp: Camp, name: str) -> Path:
    return camp.recipe(told(name, "batch", rest=ASKS).replace("s3://castra-clouds", f"s3://castra-{name}"))


def test_a_no_creates_nothing(user_camp: Camp) -> None:
    run = user_camp.start("provision", recipe(user_camp, "refused"))
    url = url_of(run)
    waiting = paused(url)
    bad = answer(url, waiting, approve="perhaps", approved_by="tester")
    assert bad.json()["status"] == "REJECT", "an answer of another form is not taken"
    assert answer(url, waiting, approve=False, approved_by="tester").json()["status"] == "ACCEPT"
    said, _ = run.communicate(timeout=60)
    assert run.returncode == 1
    assert "was not approved: nothing that costs was created" in said
    assert not list(user_camp.folder.rglob("camps"))


def test_a_yes_goes_on(user_camp: Camp) -> None:
    run = user_camp.start("provision", recipe(user_camp, "granted"))
    url = url_of(run)
    waiting = paused(url)
    pages = httpx.post(f"{url}/api/artifacts/filter", json={"artifacts": {"key": {"any_": ["approval"]}}}).json()
    assert "would cost about **$" in pages[0]["data"]
    assert "one step" in pages[0]["data"], "the plan is beside it"
    assert answer(url, waiting, approve=True, approved_by="tester").json()["status"] == "ACCEPT"
    said, _ = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert "approved by tester" in said
    assert "camp of granted stands" in said
