"""Every request a recipe would lead to, as files: without a network, without credentials, without making anything.

stacks/*.json      what CloudFormation is told, in the order of the numbers
<kind>/*           what the cluster is told of the training job
job.json           what every node is told
policy.json        what whoever runs it must be allowed
README.md          the list, with what is filled in only when it is deployed

What the outputs of the stacks fill in is written `${Name}`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from clusters import catalog, parallelcluster, policy
from clusters.aws import Site
from clusters.base import Job
from clusters.capacity import Rung, ladder
from clusters.kinds import address, attach, restarts
from clusters.stacks import architecture
from clusters.stacks import store as storage
from recipes import Recipe
from recipes.cluster import AwsCluster, BatchCluster, LocalCluster, SlurmCluster
from recipes.convert import on
from store import Store
from store.objects import in_s3

SOME_STORE = "s3://your-bucket/castra"
SOME_CONTAINER = "your-account.dkr.ecr.your-region.amazonaws.com/train:latest"
STEP = "train"


class NamedStore:
    """A store that is named and never opened, which is all that rendering a job takes."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")


def as_kind(recipe: Recipe, kind: str) -> Recipe:
    """The recipe on a kind of cluster, see `recipes.convert.on`; raises `RecipeError` for a kind there is not.

    What nodes on AWS cannot do without and the recipe does not have, a store that they reach and a container image, is
    filled with a name that says so.
    """
    shown = on(recipe, kind)
    told = shown.model_dump(mode="json")
    shared = ("s3://", "/") if kind == "slurm" else ("s3://",)
    if kind != "local" and not recipe.store.startswith(shared):
        told["store"] = SOME_STORE
    if kind not in ("local", "slurm") and not shown.image.container:
        told["image"]["container"] = SOME_CONTAINER
    return Recipe.model_validate(told)


def requests(recipe: Recipe) -> dict[str, str]:
    """All requests of a recipe on the first rung of its ladder: the file each goes in → what is in it. Pure.

    Raises `Refused` for a recipe that `clusters.validators` refuses or an adapter cannot render.
    """
    cluster = recipe.cluster
    rung = ladder(cluster)[0] if isinstance(cluster, AwsCluster) else None
    job = training_job(recipe)
    files: dict[str, Any] = {"job.json": _seen(job)}
    for name, told in _stacks(recipe, rung):
        files[f"stacks/{name}.json"] = told
    files |= {f"{cluster.kind}/{name}": told for name, told in _adapter(recipe, rung, job)}
    if rung is not None:
        pages = policy.split(policy.policy(recipe))
        names = ["policy.json", *(f"policy-{number}.json" for number in range(2, len(pages) + 1))]
        files |= dict(zip(names, pages, strict=True))
    text = {name: told if isinstance(told, str) else json.dumps(told, indent=1) + "\n" for name, told in files.items()}
    return {"README.md": _index(recipe, rung, sorted(text)), **text}


def write(recipe: Recipe, out: Path) -> list[Path]:
    """Write the requests below a folder, over what has the same name; returns the files, the list of them first."""
    written = []
    for name, text in requests(recipe).items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        written.append(path)
    return written


def training_job(recipe: Recipe) -> Job:
    """The training as a job, on all nodes; `parallel: auto` is left to the plan, which no request shows."""
    cluster = recipe.cluster
    ranks = (
        cluster.processes_per_node
        if isinstance(cluster, LocalCluster)
        else catalog.find(cluster.instance_type).accelerators
    )
    root = recipe.store.rstrip("/")
    config = {
        "spec": recipe.model_dump(mode="json"),
        "inputs": {"dataset": f"{root}/dataset"},
        "output": f"{root}/{STEP}",
    }
    return Job(
        f"{recipe.name}-{STEP}-1",
        "training.run",
        config,
        cluster.nodes,
        ranks,
        timeout_s=round(recipe.train.timeout_hours * 3600),
        restarts=restarts(cluster.kind, recipe.train.attempts, recipe.train.timeout_hours),
    )


def _stacks(recipe: Recipe, rung: Rung | None) -> Iterator[tuple[str, Any]]:
    if place := in_s3(recipe.store):
        bucket, _ = place
        yield f"0-{storage.name(bucket)}", storage.template(bucket)
    for number, one in enumerate(architecture.needed(recipe, rung), 1):
        yield f"{number}-{one.name}", one.template


def _adapter(recipe: Recipe, rung: Rung | None, job: Job) -> Iterator[tuple[str, Any]]:
    """What the cluster's adapter would send, each request a file."""
    cluster, store = recipe.cluster, cast("Store", NamedStore(recipe.store))
    if rung is None:
        yield "processes.json", attach({"cluster": "local", "workdir": "${CASTRA_STATE}/jobs"}, store).render(job)
        return
    assert isinstance(cluster, AwsCluster)
    outputs: dict[str, str] = {}
    if isinstance(cluster, SlurmCluster) and cluster.flavour == "parallelcluster":
        yield "cluster.yaml", _yaml(parallelcluster.configuration(recipe, cluster, rung, {}))
        outputs = parallelcluster.outputs({}, cluster, recipe.name)
    told = attach(address(recipe, Site(cluster.region), outputs), store).render(job)
    for name, request in told.items():
        if name == "script":
            yield "job.sbatch", request
        elif name in ("manifests", "plugins"):
            yield f"{name}.yaml", "---\n".join(map(_yaml, request))
        elif name != "objects":
            yield f"{name}.json", request


class _Readable(yaml.SafeDumper):
    """YAML for people: nothing refers to something above, and a program has its own lines."""

    def ignore_aliases(self, _told: Any) -> bool:
        return True

    def text(self, told: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", told, style="|" if "\n" in told else None)


_Readable.add_representer(str, _Readable.text)


def _yaml(told: Mapping[str, Any]) -> str:
    return yaml.dump(told, Dumper=_Readable, sort_keys=False, width=120)


def _seen(job: Job) -> dict[str, Any]:
    """job.json as `clusters.payload` writes it, without the time a program has to save, which is the adapter's."""
    return {
        "name": job.name,
        "module": job.module,
        **job.config,
        "nodes": job.nodes,
        "processes_per_node": job.processes_per_node,
        "timeout_s": job.timeout_s,
    }


def _index(recipe: Recipe, rung: Rung | None, names: list[str]) -> str:
    cluster = recipe.cluster
    where = f"{cluster.nodes} x {rung}" if rung else f"{cluster.nodes} nodes on this machine"
    later = ["`parallel: auto` is settled by the plan, `${…}` by the outputs of the stacks."]
    if isinstance(cluster, AwsCluster) and len(ladder(cluster)) > 1:
        later.append(f"This is the first of {len(ladder(cluster))} rungs of the capacity ladder.")
    if isinstance(cluster, BatchCluster):
        later.append("The job definition is registered for this one job, and removed with it.")
    if SOME_STORE in recipe.store or recipe.image.container == SOME_CONTAINER:
        later.append("`your-…` is what the recipe does not say yet: `store`, `image.container`.")
    listed = "\n".join(f"- [{name}]({name})" for name in names)
    return f"# {recipe.name} on {cluster.kind}: {where}\n\n{' '.join(later)}\n\n{listed}\n"
