"""How fast the planner is, in processes of their own that keep to one thread.

python -m benchmarks.planner_speed sweep WORDS...    # what `python -m planner sweep WORDS... --json` says, warm
"""

import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

from benchmarks.planner_rows import ONE_THREAD, SHIPPED, Bench, Line, Rows, Section, at_most

TIMES: Final = 25
"""How often each thing is done; the fastest counts, since what else a machine does only makes it slower."""
COLD: Final = 3
SWEEPS: Final = {
    "MT-NLG 530B, 280..3360 A100": "--model mt-nlg-530b --instance p4de.24xlarge --gpus 280..3360",
    "GPT-3 175B, 64..1024 H100": "--model gpt3-175b --instance p5.48xlarge --gpus 64..1024",
    "DeepSeek V3, 256..2048 H200": "--model deepseek-v3 --instance p5en.48xlarge --gpus 256..2048",
}


def speed(_rows: Rows, _bench: Bench) -> list[Section]:
    """Sweeps and calibration, cold and warm."""
    return [_sweeps(), _commands()]


def _sweeps() -> Section:
    lines = []
    for name, words in SWEEPS.items():
        told = json.loads(run("benchmarks.planner_speed", *words.split())[1])
        figures = {"ms": 1000 * told["seconds"], "million/s": told["considered"] / told["seconds"] / 1e6}
        lines.append(Line(name, told["considered"], figures, {"ms": at_most(100), "million/s": (3, float("inf"))}))
    how = f"layouts listed, timed and their memory judged on one thread, best of {TIMES}; {_load()}"
    return Section("Sweeps, warm", how, lines)


def _commands() -> Section:
    lines = [_cold(f"sweep of {name}", "sweep", *words.split(), limit=1.5) for name, words in SWEEPS.items()]
    with tempfile.TemporaryDirectory() as folder:
        files = ["--rows", str(SHIPPED), "--collectives", str(SHIPPED.with_name("collectives.csv"))]
        lines.append(_cold("calibrate", "calibrate", *files, "--out", folder))
        asked = ["--profiles", folder, "--rows", str(SHIPPED), "--out", str(Path(folder) / "out.csv")]
        lines.append(_cold("predict every row", "predict", *asked))
    return Section("Commands, cold", f"`python -m planner ...` from start to end, fastest of several; {_load()}", lines)


def _cold(name: str, *words: str, limit: float = float("inf")) -> Line:
    runs = [run("planner", *words)[0] for _ in range(1 if words[0] == "calibrate" else COLD)]
    figures = {"s": min(wall for wall, _ in runs), "processor s": min(busy for _, busy in runs)}
    return Line(name, len(runs), figures, {"s": at_most(limit)} if limit < float("inf") else {})


def run(module: str, *words: str) -> tuple[tuple[float, float], str]:
    """Wall and processor seconds of a module's process, and what it prints."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", module, *words]
    done = subprocess.run(command, env=os.environ | ONE_THREAD, check=True, capture_output=True, text=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return (wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime), done.stdout


def _load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"


def fastest(words: Sequence[str]) -> dict[str, Any]:
    """What the quickest of several sweeps in this process says of itself."""
    from planner.sweep import main

    told = []
    for _ in range(TIMES):
        with redirect_stdout(io.StringIO()) as said:
            main([*words, "--json"])
        told.append(json.loads(said.getvalue()))
    return {name: min(told, key=lambda one: float(one["seconds"]))[name] for name in ("considered", "seconds")}


if __name__ == "__main__":
    print(json.dumps(fastest(sys.argv[1:])))
