"""From a cluster's address to its adapter: how a flow, a teardown or a reaper gets hold of a cluster again."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from clusters.base import Address, Cluster, ClusterError
from clusters.local import LocalCluster
from store import Store

ADAPTERS = {
    "slurm": "clusters.slurm:SlurmCluster",
    "batch": "clusters.batch:BatchCluster",
    "eks": "clusters.eks:EksCluster",
    "sagemaker": "clusters.sagemaker:SageMakerCluster",
}
"""Imported when they are needed: each knows a client library the others do not."""


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
