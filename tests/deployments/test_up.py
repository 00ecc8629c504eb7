"""`make ui` as a person uses it: all of it comes up, a worker runs, a cancel stops, Ctrl-C ends everything."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from clusters import keeper
from flows._server import answers
from recipes import Recipe
from recipes.load import load
from tests.camp import TINY, Camp, heed_ctrl_c

ROOT = Path(__file__).parents[2]
BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
SILENT = ["--disable-background-networking", "--disable-component-update", "--virtual-time-budget=20000"]

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


def deployments() -> list[dict[str, Any]]:
    """What prefect.yaml declares."""
    told: list[dict[str, Any]] = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text())["deployments"]
    return told


def test_every_flow_is_deployed_by_its_module() -> None:
    verbs = {path.stem for path in (ROOT / "flows").glob("[a-z]*.py")}
    assert {told["entrypoint"] for told in deployments()} == {f"flows.{verb}.{verb}" for verb in verbs}


def test_no_flow_is_named_like_anything_importable() -> None:
    found = [path.stem for path in (ROOT / "flows").glob("[a-z]*.py")]
    probe = f"import importlib.util as u; print([n for n in {found!r} if u.find_spec(n)])"
    taken = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True, cwd="/")
    assert taken.stdout.strip() == "[]"


def test_the_deployed_recipe_is_the_gallery_s() -> None:
    wanted = load(ROOT / "recipes" / "rehearsal.yaml")
    given = [told["parameters"]["recipe"] for told in deployments() if "recipe" in told["parameters"]]
    assert given
    assert all(Recipe.model_validate(recipe) == wanted for recipe in given)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Camp, str]]:
    """A camp with server, emulator and worker up, and its URL."""
    camp, port = Camp(tmp_path_factory.mktemp("up")), keeper.free_port()
    camp.env["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    log = camp.folder / "up.log"
    with log.open("wb") as out:
        argv = [sys.executable, "-m", "deployments.up", "--port", str(port)]
        run = subprocess.Popen(argv, cwd=ROOT, env=camp.environment(), stdout=out, stderr=out, preexec_fn=heed_ctrl_c)
    wait(lambda: "Castra is up" in log.read_text(), 120, log)
    yield camp, f"http://127.0.0.1:{port}"
    run.send_signal(signal.SIGINT)
    assert run.wait(timeout=40) == 130
    assert camp.processes(5) == []


def wait(happened: Any, patience_s: float, log: Path | None = None) -> None:
    """Wait until `happened()`, or fail with the log."""
    until = time.monotonic() + patience_s
    while not happened():
        assert time.monotonic() < until, log.read_text() if log else "nothing happened"
        time.sleep(0.2)


def recipe(camp: Camp, **train: Any) -> dict[str, Any]:
    """The tiny recipe as a deployment's parameter, with its results in the camp's folder."""
    told: dict[str, Any] = yaml.safe_load(TINY)
    return told | {"store": str(camp.folder / "store"), "train": told["train"] | train}


def deploy_run(camp: Camp, name: str, told: dict[str, Any]) -> str:
    """Type `prefect deployment run`; returns the run's id."""
    argv = [sys.executable, "-m", "prefect", "deployment", "run", name, "--param", f"recipe={json.dumps(told)}"]
    done = subprocess.run(argv, env=camp.environment(), capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.split("UUID: ")[1].split()[0]


def state(url: str, run: str) -> dict[str, Any]:
    """The state of a flow run."""
    told: dict[str, Any] = httpx.get(f"{url}/api/flow_runs/{run}").json()["state"]
    return told


def test_a_run_through_the_worker_leaves_artifacts_a_person_can_read(up: tuple[Camp, str]) -> None:
    camp, url = up
    run = deploy_run(camp, "lifecycle/rehearsal", recipe(camp))
    wait(lambda: state(url, run)["type"] in ("COMPLETED", "FAILED", "CRASHED"), 240)
    assert state(url, run)["type"] == "COMPLETED", state(url, run)
    assert "bits per byte" in state(url, run)["message"]
    found = httpx.post(f"{url}/api/artifacts/latest/filter", json={"limit": 100}).json()
    wanted = {"plan", "change-set", "token-ledger", "network-proof", "loss", "score", "export-proof", "samples"}
    assert wanted | {"bill", "inventory", "summary"} <= {artifact["key"] for artifact in found}
    assert "data:image/svg+xml;base64" in next(a["data"] for a in found if a["key"] == "loss")


def test_the_server_refuses_a_bad_recipe_before_a_run_exists(up: tuple[Camp, str]) -> None:
    camp, url = up
    before = httpx.post(f"{url}/api/flow_runs/count", json={}).json()
    argv = [sys.executable, "-m", "prefect", "deployment", "run", "lifecycle/rehearsal", "--param"]
    bad = [*argv, f"recipe={json.dumps(recipe(camp, steps=0))}"]
    done = subprocess.run(bad, env=camp.environment(), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode != 0
    assert httpx.post(f"{url}/api/flow_runs/count", json={}).json() == before


def test_a_cancel_stops_training_and_strikes_the_camp(up: tuple[Camp, str]) -> None:
    camp, url = up
    run = deploy_run(camp, "lifecycle/rehearsal", recipe(camp, steps=5000) | {"name": "slow"})
    camp.wait_for("store/train/slow*/checkpoints/step-00000010", 200)
    httpx.post(f"{url}/api/flow_runs/{run}/set_state", json={"state": {"type": "CANCELLING"}})
    wait(lambda: not [line for line in camp.processes() if "training.run" in line], 60)
    wait(lambda: state(url, run)["type"] == "CANCELLED", 40)
    found = list(camp.folder.glob("store/ledger/slow/*.json"))
    assert found
    wait(lambda: {json.loads(path.read_text())["state"] for path in found} == {"gone"}, 40)


@pytest.mark.skipif(not shutil.which("chromium") and not os.environ.get("CI"), reason="needs chromium (Debian package)")
def test_the_browser_shows_the_run_and_the_recipe_s_form(up: tuple[Camp, str], tmp_path: Path) -> None:
    _, url = up
    (deployed,) = [
        told for told in httpx.post(f"{url}/api/deployments/filter", json={}).json() if told["name"] == "weekly"
    ]
    shown = browse(f"{url}/deployments/deployment/{deployed['id']}/run", tmp_path)
    for words in ("Width of the residual stream", "Peak learning rate", "Optimizer steps"):
        assert words in shown


def browse(address: str, profile: Path) -> str:
    """The page as Chromium renders it."""
    argv = ["chromium", *BROWSER, *SILENT, f"--user-data-dir={profile}", "--dump-dom", address]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_second_camp_on_the_same_port_is_one_sentence(up: tuple[Camp, str], tmp_path: Path) -> None:
    _, url = up
    other = Camp(tmp_path)
    argv = [sys.executable, "-m", "deployments.up", "--port", url.rpartition(":")[2]]
    done = subprocess.run(argv, env=other.environment(), capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "is up at" in done.stderr
    assert "Traceback" not in done.stderr
    assert answers(f"{url}/api")
