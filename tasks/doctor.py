"""Look before anything is paid: whether this machine and this account have what a recipe needs, a line for each."""

import importlib.util
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict

from prefect.client.orchestration import get_client
from rich.markup import escape

from ami import container, packer
from clusters import aws, container_images, parallelcluster, preflight, validators
from clusters.base import ClusterError
from clusters.eks import EksCluster as EksAdapter
from clusters.preflight import Finding
from recipes import Recipe
from recipes.cluster import EksCluster, LocalCluster, SlurmCluster
from store import StoreError, open_store
from store.objects import state_folder
from tasks import capacity, ground, phrases, report, stack

ROOM_GB = 5.0
"""What an environment, a miniature's results and a few checkpoints take. Unit: GB (10^9 bytes)."""


def look(recipe: Recipe) -> list[Finding]:
    """Everything that can be known without creating anything; shows it in the UI and on the terminal."""
    found = [finding for examine in _EXAMINATIONS for finding in _guarded(examine, recipe)]
    report.table("check", [_row(finding) for finding in found], f"What {recipe.name} needs, and whether it is there")
    for finding in found:
        mark = "[green]✓[/]" if finding.ok else "[bold red]✗[/]"
        fix = "" if finding.ok else f"\n    To fix: {escape(finding.fix)}"
        phrases.CONSOLE.print(f"{mark} {escape(finding.what)}: {escape(finding.detail)}{fix}", soft_wrap=True)
    return found


def _guarded(examine: Callable[[Recipe], Iterator[Finding]], recipe: Recipe) -> Iterator[Finding]:
    try:
        yield from examine(recipe)
    except (ClusterError, StoreError) as error:
        what = examine.__name__.strip("_").replace("_", " ")
        yield Finding(what, False, str(error), str(error).rpartition("; ")[2])


def _recipe(recipe: Recipe) -> Iterator[Finding]:
    problems = validators.problems(recipe)
    for problem in problems:
        yield Finding("recipe", False, problem, "change the recipe as it says")
    if not problems:
        yield Finding("recipe", True, f"{recipe.cluster.kind}, {recipe.cluster.nodes} nodes")


def _machine(recipe: Recipe) -> Iterator[Finding]:
    for package, extra in (("torch", "train"), ("moto", "local")):
        if package == "torch" and not isinstance(recipe.cluster, LocalCluster):
            continue
        there = importlib.util.find_spec(package) is not None
        yield Finding(f"package {package}", there, "installed" if there else "missing", f"uv sync --extra {extra}")
    folder = state_folder()
    free = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free / 1e9
    yield Finding("disk", free > ROOM_GB, f"{free:.0f} GB free for {folder}", "free some space, or set CASTRA_STATE")


def _tools(recipe: Recipe) -> Iterator[Finding]:
    if not isinstance(recipe.cluster, SlurmCluster):
        return
    place = shutil.which("ssh")
    yield Finding("tool ssh", place is not None, place or "not on PATH", "install an OpenSSH client")
    if recipe.cluster.flavour == "parallelcluster":
        words = parallelcluster.command(aws.here(recipe.cluster.region))
        yield Finding("tool pcluster", True, " ".join(words))


def _images(recipe: Recipe) -> Iterator[Finding]:
    """What bakes the recipe's image and its container, where they are ours."""
    if recipe.image.flavour != "local" and not recipe.image.ami:
        for name, place in packer.looked_for().items():
            yield Finding(f"tool {name}", place is not None, place or "not on PATH", packer.TOOLS[name])
    if f"/{container_images.PREFIX}/" in recipe.image.container:
        place = shutil.which("podman")
        yield Finding("tool podman", place is not None, place or "not on PATH", container.TOOLS["podman"])


def _server(_: Recipe) -> Iterator[Finding]:
    with get_client(sync_client=True) as client:
        problem = client.api_healthcheck()
        url = str(client.api_url).removesuffix("/api")
    yield Finding("Prefect server", problem is None, f"{url} answers", "check PREFECT_API_URL, or unset it")


def _store(recipe: Recipe) -> Iterator[Finding]:
    if missing := stack.missing_bucket(recipe):
        yield Finding("store", True, f"bucket {missing[0]} will be made by flows.provision")
        return
    yield Finding("store", True, f"{open_store(recipe.store).url} can be written")


def _account(recipe: Recipe) -> Iterator[Finding]:
    """Credentials first: without them nothing else can be asked."""
    if isinstance(recipe.cluster, LocalCluster) or validators.problems(recipe):
        return
    site = aws.here(recipe.cluster.region)
    for rung in capacity.every(recipe):
        yield from preflight.findings(rung, site)


def _cluster(recipe: Recipe) -> Iterator[Finding]:
    """What the cluster that stands lacks, if one does."""
    if not isinstance(recipe.cluster, EksCluster) or (standing := ground.read(recipe)) is None:
        return
    lacks = EksAdapter(standing.address, open_store(recipe.store)).lacks()
    for sentence in lacks:
        yield Finding("cluster", False, sentence, "install it, then check again")
    if not lacks:
        yield Finding("cluster", True, f"{standing.address.get('Cluster', '')} has what the jobs need")


def _row(finding: Finding) -> dict[str, str]:
    told = asdict(finding)
    return {"": "ok" if finding.ok else "fix", **{name: str(told[name]) for name in ("what", "detail", "fix")}}


_EXAMINATIONS = (_recipe, _machine, _tools, _images, _server, _store, _account, _cluster)
