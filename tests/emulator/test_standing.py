"""The standing emulator: it outlives who started it, is found again, and ends when it is told to."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clusters import keeper
from clusters.warden import read_json
from emulator import aws as emulated
from emulator.aws import RECORD

ROOT = Path(__file__).parents[2]


def emulator(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    env |= {"CASTRA_STATE": str(state), "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "emulator", *words]
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90, check=False)


def test_it_stands_is_found_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTRA_STATE", str(tmp_path))
    assert emulated.standing() is None
    nothing = emulator(tmp_path, "status")
    assert (nothing.returncode, "no emulator stands" in nothing.stdout) == (1, True)
    try:
        up = emulator(tmp_path, "up", "--share", str(tmp_path))
        assert up.returncode == 0, up.stderr
        found = emulated.standing()
        assert found
        assert f"export AWS_ENDPOINT_URL={found.endpoint}\n" in up.stdout
        again = emulator(tmp_path, "up", "--port", "1")
        assert f"export AWS_ENDPOINT_URL={found.endpoint}\n" in again.stdout
        assert "stands already" in again.stderr
        told = emulator(tmp_path, "status").stdout
        assert found.endpoint in told
        assert "no stacks; no Batch jobs; no training jobs" in told
    finally:
        down = emulator(tmp_path, "down")
    assert "what was in it is gone: no stacks" in down.stdout
    assert emulated.standing() is None
    assert [path.name for path in (tmp_path / "services").iterdir()] == ["emulator.log"]
    assert emulator(tmp_path, "down").returncode == 1


def test_it_ends_with_its_owner_and_a_port_in_use_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CASTRA_STATE", str(tmp_path))
    assert emulator(tmp_path, "up").returncode == 0
    told = read_json(tmp_path / RECORD)
    assert told
    taken = emulator(tmp_path / "other", "up", "--port", str(told["port"]))
    assert taken.returncode == 1
    assert "the emulator did not start" in taken.stderr
    os.kill(told["pid"], signal.SIGKILL)
    until = time.monotonic() + 10
    while emulated.standing() or keeper.alive(Path(told["folder"])):
        assert time.monotonic() < until
        time.sleep(0.05)
