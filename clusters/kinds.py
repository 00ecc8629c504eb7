"""From a cluster's address to its adapter: how a flow, a teardown or a reaper gets hold of a cluster again."""

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from clusters.aws import Site
from clusters.base import Address, Cluster, ClusterError
from clusters.local import LocalCluster
from recipes import Recipe
from recipes.cluster import AwsCluster, SlurmCluster
from store import Store

ADAPTERS = {
    "slurm": "clusters.slurm:SlurmCluster",
    "batch": "clusters.batch:BatchCluster",
    "eks": "clusters.eks:EksCluster",
    "sagemaker": "clusters.sagemaker:SageMakerCluster",
}
"""Imported when they are needed: each knows a client library the others do not."""
BATCH_RESTARTS = 9
"""Retries of a Batch job (AWS Batch, RetryStrategy: attempts 1 to 10)."""
SAGEMAKER_HOURS = 28 * 24 - 1
"""How long a SageMaker training job may take, with all its starts."""


def address(recipe: Recipe, site: Site, outputs: Mapping[str, str]) -> dict[str, str]:
    """The address of the cluster that stands for a recipe on one rung of its ladder.

    Flat: the cluster's fields under their own names (lists with a comma between), the site, the container, which
    market the instances are from, and the outputs of its stacks.
    """
    cluster = recipe.cluster
    assert isinstance(cluster, AwsCluster)
    fields = cluster.model_dump(mode="json", exclude={"kind", "capacity", "alternatives"})
    told = {name: _flat(value) for name, value in fields.items() if value is not None}
    market, _, reserved = cluster.capacity[0].partition(":")
    told |= {"spot": _flat(market == "spot"), "plan": reserved if market == "plan" else ""}
    if isinstance(cluster, SlurmCluster):
        told |= {"container": recipe.image.container if cluster.containers else ""}
        told |= {"folder": f"/fsx/castra/{recipe.name}"} if cluster.lustre_gib else {}
    if queue := outputs.get("Queue") or outputs.get("Partition"):
        told["partition"] = queue
    where = {"region": site.region, "endpoint": site.endpoint, "memory": site.memory}
    about = {"image": recipe.image.container, "run": recipe.name}
    return {"cluster": cluster.kind, **where, **about, **told, **outputs, **_reach(cluster, site)}


def _reach(cluster: AwsCluster, site: Site) -> dict[str, str]:
    """How the recipe says that the head is reached; an emulated one is not."""
    if not isinstance(cluster, SlurmCluster) or not cluster.ssh or site.memory:
        return {}
    return {"reach": json.dumps(["ssh", "-o", "BatchMode=yes", cluster.ssh])}


def restarts(kind: str, attempts: int, timeout_hours: float) -> int:
    """How often the cluster itself starts a job's gang again, of `attempts` tries in all, as far as its service goes.

    The attempts beyond that are the control plane's.
    """
    most = {"batch": BATCH_RESTARTS, "sagemaker": max(int(SAGEMAKER_HOURS / timeout_hours) - 1, 0)}
    return min(attempts - 1, most.get(kind, attempts))


def _flat(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def attach(address: Address, store: Store) -> Cluster:
    """The adapter for the cluster at an address; `store` is where its jobs read and write.

    Raises `ClusterError` for a kind this version does not know.
    """
    kind = address.get("cluster", "")
    if kind == "local":
        return LocalCluster(Path(address["workdir"]))
    if kind not in ADAPTERS:
        raise ClusterError(f"a cluster of kind {kind!r} is not known to this version: update Castra")
    module, _, name = ADAPTERS[kind].partition(":")
    adapter: Callable[[Address, Store], Cluster] = getattr(import_module(module), name)
    return adapter(address, store)
