"""AWS Batch: compute environment, queue, image repository and roles for multi-node parallel jobs."""

from clusters import catalog
from clusters.capacity import Rung
from clusters.stacks import nodes
from clusters.stacks.parts import (
    LOG_DAYS,
    Part,
    assemble,
    att,
    image_rights,
    log_rights,
    part,
    ref,
    role,
    store_rights,
)
from recipes.cluster import BatchCluster
from recipes.spec import Recipe

SHORTEST_PATIENCE_S, LONGEST_PATIENCE_S = 600, 86_400
"""Batch gives up on a waiting job no sooner and no later."""
HOPELESS = (
    "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY",
    "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE",
    "MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT",
)
"""Why a job may wait in RUNNABLE for ever."""
KEPT_IMAGES = 10


def template(recipe: Recipe, cluster: BatchCluster, rung: Rung, place: nodes.Place) -> Part:
    """The template for one rung.

    Outputs: JobQueue, ComputeEnvironment, JobRole, ExecutionRole (ARNs), Repository (its URI), LogGroup.
    """
    group = {"PlacementGroup": nodes.placement_group()} if nodes.close_together(cluster, rung) else {}
    resources = group | {
        "LaunchTemplate": nodes.launch_template(
            place, rung, UserData=nodes.first_minutes(place), BlockDeviceMappings=nodes.root_volume()
        ),
        "ComputeEnvironment": _environment(recipe, cluster, rung, place),
        "JobQueue": _queue(recipe, cluster),
        "Repository": _repository(),
        "LogGroup": part("Logs::LogGroup", RetentionInDays=LOG_DAYS),
        **_roles(recipe),
    }
    outputs = {
        "JobQueue": ref("JobQueue"),
        "ComputeEnvironment": ref("ComputeEnvironment"),
        "JobRole": att("JobRole", "Arn"),
        "ExecutionRole": att("ExecutionRole", "Arn"),
        "Repository": att("Repository", "RepositoryUri"),
        "LogGroup": ref("LogGroup"),
    }
    return assemble("Castra: AWS Batch for multi-node parallel jobs.", resources, outputs)


def _environment(recipe: Recipe, cluster: BatchCluster, rung: Rung, place: nodes.Place) -> Part:
    """Updated in place: so wants BEST_FIT_PROGRESSIVE, the service-linked role and no replacement.

    Multi-node jobs want on-demand prices, one zone, and as many vCPUs as the nodes have and no more.
    """
    spot = rung.market == "spot"
    image = {"ImageType": "ECS_AL2023" if nodes.is_neuron(rung.instance_type) else "ECS_AL2023_NVIDIA"}
    resources = {
        "Type": "SPOT" if spot else "EC2",
        "AllocationStrategy": "SPOT_PRICE_CAPACITY_OPTIMIZED" if spot else "BEST_FIT_PROGRESSIVE",
        "MinvCpus": 0,
        "MaxvCpus": catalog.find(rung.instance_type).vcpus * cluster.nodes,
        "InstanceTypes": [rung.instance_type],
        "InstanceRole": att("InstanceProfile", "Arn"),
        "Subnets": [place.subnet_id],
        "Ec2Configuration": [image | ({"ImageIdOverride": recipe.image.ami} if recipe.image.ami else {})],
        "LaunchTemplate": {
            "LaunchTemplateId": ref("LaunchTemplate"),
            "Version": att("LaunchTemplate", "LatestVersionNumber"),
        },
        "UpdateToLatestImageVersion": True,
    }
    if nodes.close_together(cluster, rung):
        resources["PlacementGroup"] = ref("PlacementGroup")
    return part(
        "Batch::ComputeEnvironment",
        ComputeEnvironmentName=f"castra-{recipe.name}",
        Type="MANAGED",
        State="ENABLED",
        ComputeResources=resources,
        ReplaceComputeEnvironment=False,
        UpdatePolicy={"TerminateJobsOnUpdate": False, "JobExecutionTimeoutMinutes": 30},
    )


def _queue(recipe: Recipe, cluster: BatchCluster) -> Part:
    patience = min(max(round(cluster.patience_minutes * 60), SHORTEST_PATIENCE_S), LONGEST_PATIENCE_S)
    gives_up = [
        {"Action": "CANCEL", "State": "RUNNABLE", "Reason": reason, "MaxTimeSeconds": patience} for reason in HOPELESS
    ]
    return part(
        "Batch::JobQueue",
        JobQueueName=f"castra-{recipe.name}",
        State="ENABLED",
        Priority=1,
        ComputeEnvironmentOrder=[{"Order": 1, "ComputeEnvironment": ref("ComputeEnvironment")}],
        JobStateTimeLimitActions=gives_up,
    )


def _repository() -> Part:
    """For images of one's own; images that nothing refers to go."""
    rules = (
        '{"rules":[{"rulePriority":1,"description":"the newest images","selection":'
        f'{{"tagStatus":"any","countType":"imageCountMoreThan","countNumber":{KEPT_IMAGES}}},'
        '"action":{"type":"expire"}}]}'
    )
    return part(
        "ECR::Repository",
        RepositoryName={"Fn::Sub": "${AWS::StackName}"},
        ImageScanningConfiguration={"ScanOnPush": True},
        LifecyclePolicy={"LifecyclePolicyText": rules},
        EmptyOnDelete=True,
    )


def _roles(recipe: Recipe) -> Part:
    """Whoever is who: the instance (ECS's agent), the job (the store), the agent on the job's behalf (image, log)."""
    agent = ("service-role/AmazonEC2ContainerServiceforEC2Role",)
    rights = store_rights(recipe.store)
    return {
        "InstanceRole": role("What a node does for ECS", "ec2", managed=agent),
        "InstanceProfile": part("IAM::InstanceProfile", Roles=[ref("InstanceRole")]),
        "JobRole": role("What a job may do: its store", "ecs-tasks", *rights),
        "ExecutionRole": role(
            "What starts a job: its image, its log", "ecs-tasks", *image_rights(), log_rights(att("LogGroup", "Arn"))
        ),
    }
