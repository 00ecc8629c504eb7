"""kill -9 before and after every request that changes something, in provision → submit → finish → teardown.

    python -m benchmarks.failure_matrix --kind batch
    python -m benchmarks.failure_matrix --kind batch --every 3        # every third request only
    python -m benchmarks.failure_matrix --kind slurm --only sbatch    # these requests only

One undisturbed life counts the requests. Then, for each of them twice, a fresh recipe: a life that is killed at that
point, and a rerun to the end. Counted: reruns that failed, submissions of the job beyond the first, resources left on
the emulated AWS, results that differ. Exit code 1 if any of these is not zero.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter as Tally
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import mutations
from benchmarks.leftovers import leftovers, submissions
from clusters import keeper
from emulator import aws as emulated

TINY = {
    "data": {"max_documents": 12, "sequence_length": 32},
    "model": {"hidden_size": 32, "layers": 1, "heads": 2, "kv_heads": 2, "ffn_size": 64, "vocab_size": 400},
    "train": {"steps": 4, "global_batch_size": 4, "warmup_steps": 1, "checkpoint_every": 2},
}
LONGEST_S = 240
Env = dict[str, str]


@dataclass(frozen=True)
class Cell:
    """What came of one kill."""

    number: int
    when: str
    request: str
    rerun: bool
    submitted: int
    left: tuple[str, ...]
    same: bool

    @property
    def well(self) -> bool:
        """Whether nothing was lost, doubled or left."""
        return self.rerun and self.same and self.submitted == 1 and not self.left


def main() -> int:
    """Run the matrix; returns the exit code."""
    told = _options()
    if told.life:
        return live(Path(told.life))
    with tempfile.TemporaryDirectory(prefix="castra-matrix-") as folder, ground(Path(folder)) as env:
        begun = time.monotonic()
        requests, wanted = _undisturbed(Path(folder), told.kind, env)
        took = time.monotonic() - begun
        print(f"{told.kind}: {len(requests)} changing requests in a life of {took:.0f} s", flush=True)
        points = [point for point in enumerate(requests, 1) if re.search(told.only, point[1])][:: told.every]
        kills = [(number, when, request) for number, request in points for when in ("before", "after")]
        cells = [_cell(Path(folder), told.kind, env, kill, wanted) for kill in kills]
        _table(told.kind, cells, time.monotonic() - begun)
    return int(not all(cell.well for cell in cells))


def _options() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kind", default="batch", choices=("slurm", "batch", "eks", "sagemaker"))
    options.add_argument("--every", type=int, default=1)
    options.add_argument("--only", default="", help="requests whose name matches this pattern")
    options.add_argument("--life", help=argparse.SUPPRESS)
    return options.parse_args()


@contextmanager
def ground(folder: Path) -> Iterator[Env]:
    """An emulator and a Prefect server that outlive every life; yields the environment of a life."""
    from rich.console import Console

    from flows._server import embedded

    os.environ["CASTRA_STATE"] = str(folder / "state")
    with emulated.running() as aws, embedded(keeper.free_port(), Console(quiet=True)) as url:
        yield {**os.environ, **emulated.environment(aws.endpoint), "PREFECT_API_URL": f"{url}/api"}


def _undisturbed(folder: Path, kind: str, env: Env) -> tuple[list[str], str]:
    place = folder / "undisturbed"
    life(place, kind, env, 0, "before")
    requests = [name for _, name in map(json.loads, (place / "requests").read_text().splitlines())]
    return requests, _result(place)


def _cell(folder: Path, kind: str, env: Env, kill: tuple[int, str, str], wanted: str) -> Cell:
    number, when, request = kill
    place = folder / f"m{number}{when[0]}"
    killed = life(place, kind, env, number, when)
    finished = life(place, kind, env, 0, "before") == 0
    name = place.name
    cell = Cell(
        number,
        when,
        request if killed < 0 else f"{request} (not reached)",
        finished,
        submissions(env["AWS_ENDPOINT_URL"], name),
        tuple(leftovers(env["AWS_ENDPOINT_URL"], name)),
        finished and _result(place) == wanted,
    )
    print(f"{number:3} {when:6} {request:45} {'ok' if cell.well else cell}", flush=True)
    return cell


def life(
    place: Path,
    kind: str,
    env: Env,
    at: int = 0,
    when: str = "before",
    cluster: dict[str, Any] | None = None,
) -> int:
    """One life of the recipe in `place`, killed at a request if `at` is not 0; returns its exit code.

    `cluster` changes fields of its cluster.
    """
    place.mkdir(exist_ok=True)
    (place / "recipe.json").write_text(
        json.dumps({"name": place.name, "kind": kind, "at": at, "when": when, "cluster": cluster or {}})
    )
    with (place / "log").open("ab") as log:
        argv = [sys.executable, "-m", "benchmarks.failure_matrix", "--life", str(place)]
        done = subprocess.run(argv, env=env, stdout=log, stderr=log, timeout=LONGEST_S, check=False)
    if not at and done.returncode:
        print((place / "log").read_text()[-3000:])
    return done.returncode


def live(place: Path) -> int:
    """Provision → submit → finish → teardown, in this process; it may end in the middle."""
    told = json.loads((place / "recipe.json").read_text())
    mutations.install(mutations.Counter(place / "requests", told["at"], told["when"] == "before"))
    from flows.preprocess import preprocess
    from flows.provision import provision
    from flows.teardown import teardown
    from recipes import Recipe
    from recipes.convert import on

    small = Recipe.model_validate({"name": told["name"], **TINY})
    recipe = on(small, told["kind"], small=True)
    recipe = Recipe.model_validate(
        recipe.model_dump() | {"cluster": recipe.cluster.model_dump() | told.get("cluster", {})}
    )
    steps = (climbing(),) if told.get("cluster") else (provision, preprocess, teardown)
    for step in steps:
        state: Any = step(recipe, return_state=True)
        if not state.is_completed():
            print(state.message)
            return 1
        if step is preprocess:
            (place / "result").write_text(_digest(recipe))
    return 0


def climbing() -> Any:
    """The same life as one flow that tries every rung of the ladder; it ends with the type it got."""
    from flows._camp import camp
    from flows._house import alone, verb
    from flows.preprocess import preprocess
    from recipes import Recipe
    from tasks import capacity, stack

    @verb("climb", description="Provision where there is capacity, preprocess, strike.")
    def climb(recipe: Recipe) -> str:
        stack.ensure_store(recipe)
        with alone(recipe), camp(recipe, prove=True) as settled:
            preprocess(settled)
        return capacity.rung_of(settled).instance_type

    return climb


def _digest(recipe: Any) -> str:
    """The hash of the tokens that were made."""
    from tasks.lineage import trace

    lineage = trace(recipe)
    found = lineage.store.get(f"{lineage.places['preprocess'].key}/train.bin")
    return hashlib.sha256(found.data).hexdigest() if found else ""


def _result(place: Path) -> str:
    path = place / "result"
    return path.read_text() if path.exists() else ""


def _table(kind: str, cells: list[Cell], seconds: float) -> None:
    bad = [cell for cell in cells if not cell.well]
    extra = sum(max(cell.submitted - 1, 0) for cell in cells)
    kinds = Tally(cell.request.partition(" ")[0] for cell in cells)
    print(
        f"{kind}: {len(cells)} kills in {seconds:.0f} s; {sum(not cell.rerun for cell in cells)} reruns failed, "
        f"{extra} duplicate submissions, {sum(bool(cell.left) for cell in cells)} with resources left, "
        f"{sum(not cell.same for cell in cells)} with another result; {len(cells) - len(bad)} of {len(cells)} well"
    )
    print("killed at: " + ", ".join(f"{name} ×{count}" for name, count in kinds.most_common()))


if __name__ == "__main__":
    sys.exit(main())
