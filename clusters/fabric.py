"""What the programs on an instance are told about its network, and the devices they must be able to open."""

from clusters.catalog import Instance

NEURON = "AWS Trainium"


def environment(instance: Instance, nodes: int) -> dict[str, str]:
    """Settings of libfabric for several nodes with EFA; nothing where there is none.

    Source: awslabs/awsome-distributed-ai, efa-cheatsheet.md (read 2026-11). `FI_EFA_USE_HUGE_PAGE=0` is for data
    loaders, whose forks fail when the huge pages are gone; `FI_EFA_USE_DEVICE_RDMA` must not be set from libfabric 1.18
    on. Which interface NCCL starts with is for the node to find out.
    """
    if nodes < 2 or not instance.efa_interfaces:
        return {}
    return {"FI_PROVIDER": "efa", "FI_EFA_USE_HUGE_PAGE": "0"}


def devices(instance: Instance) -> list[str]:
    """The device files that a container needs beside the GPUs: one per EFA interface, one per Neuron device."""
    efa = [f"/dev/infiniband/uverbs{number}" for number in range(instance.efa_interfaces)]
    return efa + [f"/dev/neuron{number}" for number in range(neurons(instance))]


def gpus(instance: Instance) -> int:
    """How many GPUs the instance has: schedulers count these as such, and Neuron devices not."""
    return 0 if neurons(instance) else instance.accelerators


def neurons(instance: Instance) -> int:
    """How many Neuron devices the instance has."""
    return instance.accelerators if instance.accelerator.startswith(NEURON) else 0
