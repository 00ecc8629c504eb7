"""Where the jobs run: this machine, or one of four kinds of clusters on AWS."""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from recipes.part import Part

Rung = Annotated[
    str,
    Field(
        pattern=r"^(on-demand|spot|(block|reservation):cr-[0-9a-f]{8,17}|plan:arn:aws[a-z-]*:sagemaker:\S+)$",
        description="A way to get instances: on-demand, spot, block:cr-…, reservation:cr-… or plan:arn….",
    ),
]
Zone = Annotated[
    str,
    Field(
        pattern=r"^[a-z]{2}(-[a-z]+)+-\d[a-z]$", description="Availability zone: a region and a letter, as us-east-1b."
    ),
]


class LocalCluster(Part):
    """This machine: each node is a torchrun group of its own."""

    kind: Literal["local"] = Field("local", description="Which kind of cluster.")
    nodes: PositiveInt = Field(2, le=16, description="Nodes, each a torchrun group on this machine.")
    processes_per_node: PositiveInt = Field(1, le=16, description="Training processes (ranks) per node.")


class AwsCluster(Part):
    """What every AWS cluster shares."""

    instance_type: str = Field(
        "p4de.24xlarge",
        description="EC2 instance type; `python -m clusters.catalog` lists them.",
        examples=["p5.48xlarge"],
    )
    alternatives: tuple[str, ...] = Field(
        (),
        description="Instance types to try where the first is not to be had, in order; the layout is planned anew.",
        examples=[["p5en.48xlarge"]],
    )
    nodes: PositiveInt = Field(2, description="Number of instances.", examples=[16])
    region: str = Field(
        "us-east-1", pattern=r"^[a-z]{2}(-[a-z]+)+-\d$", description="AWS region: its code, such as us-east-1."
    )
    zones: tuple[Zone, ...] = Field(
        (),
        description="Availability zones to try, in order; empty tries all of the region that offer the type.",
        examples=[["us-east-1b", "us-east-1d"]],
    )
    capacity: tuple[Rung, ...] = Field(
        ("on-demand",),
        min_length=1,
        description="The ladder of ways to get instances, tried in order: on-demand, spot, block:cr-… (a capacity "
        "block), reservation:cr-… (a targeted reservation), plan:arn… (a SageMaker training plan).",
        examples=[["block:cr-0123456789abcdef0", "on-demand"]],
    )
    patience_minutes: PositiveFloat = Field(
        30.0, description="How long instances are waited for before the next rung is tried. Unit: minutes."
    )
    placement_group: bool | None = Field(
        None, description="Put the instances close together; empty does so wherever the capacity allows it."
    )
    lustre_gib: int = Field(
        0, ge=0, description="Size of an FSx for Lustre file system mounted at /fsx; 0 makes none. Unit: GiB."
    )


class SlurmCluster(AwsCluster):
    """Slurm: AWS ParallelCluster, AWS PCS or SageMaker HyperPod."""

    kind: Literal["slurm"] = Field("slurm", description="Which kind of cluster.")
    flavour: Literal["parallelcluster", "pcs", "hyperpod"] = Field(
        "parallelcluster", description="Which of AWS's services runs Slurm."
    )
    head_instance_type: str = Field("m5.2xlarge", description="EC2 instance type of the head or login node.")
    ssh: str = Field(
        "",
        pattern=r"^[\w.@:-]*$",
        description="How ssh reaches the head or login node: a host, or an alias of ~/.ssh/config; empty finds "
        "ParallelCluster's head node by itself.",
        examples=["castra-login"],
    )
    python: str = Field(
        "python3",
        description="The Python with torch and transformers on the nodes.",
        examples=["/fsx/venv/bin/python"],
    )
    containers: bool = Field(False, description="Install enroot and pyxis and run the jobs in image.container.")


class BatchCluster(AwsCluster):
    """AWS Batch multi-node parallel jobs."""

    kind: Literal["batch"] = Field("batch", description="Which kind of cluster.")


class EksCluster(AwsCluster):
    """Kubernetes: Amazon EKS, with node groups of its own or on SageMaker HyperPod."""

    kind: Literal["eks"] = Field("eks", description="Which kind of cluster.")
    flavour: Literal["nodegroup", "hyperpod"] = Field("nodegroup", description="Who brings the nodes.")
    kubernetes_version: str = Field(
        "1.35",
        pattern=r"^1\.\d{2}$",
        description="Version of the control plane: two numbers, such as 1.35.",
        examples=["1.34"],
    )
    workload: Literal["job", "jobset"] = Field(
        "job",
        description="job: an indexed Job, as every cluster has it; jobset: a JobSet, restarted as a gang in place.",
    )
    queue: str = Field("", description="Name of a Kueue LocalQueue that admits the jobs; empty uses none.")


class SageMakerCluster(AwsCluster):
    """SageMaker training jobs."""

    kind: Literal["sagemaker"] = Field("sagemaker", description="Which kind of cluster.")
    warm_pool_minutes: int = Field(
        0, ge=0, le=60, description="Keep the instances this long for the next job, at their price. Unit: minutes."
    )
    volume_gib: PositiveInt = Field(500, description="Disk of each instance. Unit: GiB.")


Cluster = Annotated[
    LocalCluster | SlurmCluster | BatchCluster | EksCluster | SageMakerCluster, Field(discriminator="kind")
]
