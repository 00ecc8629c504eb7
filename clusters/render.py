"""Every request a recipe would lead to, as files: without a network, without credentials, without making anything.

stacks/*.json      what CloudFormation is told, in the order of the numbers
<kind>/*           what the cluster is told of the training job
case/*             another framework's command, and the files it reads
job.json           what every node is told
policy.json        what whoever runs it must be allowed
README.md          the list, with what is filled in only when it is deployed

What the outputs of the stacks fill in is written `${Name}`.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from clusters import catalog, parallelcluster, policy
from clusters.aws import Site
from clusters.base import Job, Refused
from clusters.capacity import Rung, ladder
from clusters.kinds import address, attach, restarts
from clusters.stacks import architecture
from clusters.stacks import store as storage
from recipes import Recipe
from recipes.cluster import AwsCluster, BatchCluster, LocalCluster, SlurmCluster
from recipes.convert import on
from store import Store
from store.objects import in_s3
from training import cases
from training.cases.base import Command

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
    filled with a name that says so, or with the image that another framework publishes.
    """
    shown = on(recipe, kind)
    told = shown.model_dump(mode="json")
    shared = ("s3://", "/") if kind == "slurm" else ("s3://",)
    if kind != "local" and not recipe.store.startswith(shared):
        told["store"] = SOME_STORE
    if kind not in ("local", "slurm") and not shown.image.container:
        told["image"]["container"] = _published(shown) or SOME_CONTAINER
    return Recipe.model_validate(told)


def stand_in(recipe: Recipe) -> Recipe:
    """The recipe with processes of this machine in place of its nodes and ranks, however many: only to be shown."""
    cluster = LocalCluster.model_construct(kind="local", nodes=recipe.cluster.nodes, processes_per_node=_ranks(recipe))
    return as_kind(recipe, "local").model_copy(update={"cluster": cluster})


def _published(recipe: Recipe) -> str:
    if recipe.case.framework == "castra":
        return ""
    try:
        return cases.launcher(recipe.case.framework).UPSTREAM.container
    except cases.CaseError as problem:
        raise Refused(str(problem)) from None


def requests(recipe: Recipe) -> dict[str, str]:
    """All requests of a recipe on the first rung of its ladder: the file each goes in → what is in it. Pure.

    Raises `Refused` for a recipe that `clusters.validators` refuses or an adapter cannot render.
    """
    cluster = recipe.cluster
    rung = ladder(cluster)[0] if isinstance(cluster, AwsCluster) else None
    job = training_job(recipe)
    files: dict[str, Any] = {"job.json": _seen(job), **_case(recipe)}
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
    cluster, ranks = recipe.cluster, _ranks(recipe)
    root = recipe.store.rstrip("/")
    reads = cases.reads_dataset(recipe.case.framework, recipe.case.program)
    config: dict[str, Any] = {
        "spec": recipe.model_dump(mode="json"),
        "inputs": {"dataset": f"{root}/dataset"} if reads else {},
        "output": f"{root}/{STEP}",
    }
    module, each = cases.MEASUREMENTS if recipe.case.program else "training.run", ranks
    if recipe.case.framework != "castra":
        told, module = _command(recipe), cases.MODULE
        each = ranks if told is None else cases.processes(told, ranks)
        config["spec"][cases.RANKS] = ranks
    return Job(
        f"{recipe.name}-{STEP}-1",
        module,
        config,
        cluster.nodes,
        each,
        timeout_s=round(recipe.train.timeout_hours * 3600),
        restarts=restarts(cluster.kind, recipe.train.attempts, recipe.train.timeout_hours),
    )


def _ranks(recipe: Recipe) -> int:
    """Of each node."""
    cluster = recipe.cluster
    if isinstance(cluster, LocalCluster):
        return cluster.processes_per_node
    return catalog.find(cluster.instance_type).accelerators


def _command(recipe: Recipe) -> Command | None:
    """What starts another framework's program; None as long as the plan is open. Raises `Refused`."""
    parallel = recipe.parallel.model_dump(exclude={"recompute"})
    if "auto" in parallel.values():
        return None
    try:
        return cases.command(recipe.model_dump(mode="json"), recipe.cluster.nodes, _ranks(recipe))
    except cases.CaseError as problem:
        raise Refused(f"{recipe.name}: {problem}") from None


def _case(recipe: Recipe) -> dict[str, str]:
    """Another framework's command line, and the files it reads."""
    if recipe.case.framework == "castra":
        return {}
    if (told := _command(recipe)) is None:
        shows = f"python -m flows.train RECIPE --kind {recipe.cluster.kind} --render"
        return {"case/command.sh": f"# the plan decides it: {shows}\n"}
    starts = {
        "rank": f"torchrun --nnodes={recipe.cluster.nodes} --nproc-per-node={_ranks(recipe)}",
        "mpi": f"mpirun --np {recipe.cluster.nodes * _ranks(recipe)} --map-by ppr:{_ranks(recipe)}:node",
        "node": "",
    }[told.per]
    words = [f"{name}={shlex.quote(value)}" for name, value in told.env.items()]
    words += [starts] * bool(starts) + [shlex.quote(word) for word in told.argv]
    lines = " \\\n  ".join(_paired(words))
    files = {f"case/{name}": content for name, content in told.files.items()}
    return {"case/command.sh": f"cd {cases.folder(recipe.model_dump(mode='json'))}\n{lines}\n", **files}


def _paired(words: Sequence[str]) -> Iterator[str]:
    """Lines of a command: a flag with its values."""
    line: list[str] = []
    for word in words:
        if line and word.startswith("-"):
            yield " ".join(line)
            line = []
        line.append(word)
    yield " ".join(line)


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
