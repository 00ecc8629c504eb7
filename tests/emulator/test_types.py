"""The resource types: each is made, changed and deleted, and what AWS refuses fails with AWS's reason."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from clusters import catalog
from emulator import aws as emulated
from emulator.aws import Emulator
from tests.emulator.raw_stacks import Sky, att, part, ref, resources

TRUST = {
    "Version": "2012-10-17",
    "Statement": [{"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}],
}
IAM: dict[str, Any] = {"Capabilities": ["CAPABILITY_NAMED_IAM"]}
EFA_ONLY = [
    {"NetworkCardIndex": 0, "DeviceIndex": 0, "InterfaceType": "interface"},
    {"NetworkCardIndex": 0, "DeviceIndex": 1, "InterfaceType": "efa-only"},
    *({"NetworkCardIndex": card, "DeviceIndex": 0, "InterfaceType": "efa-only"} for card in range(1, 32)),
]
BLOCK = {
    "InstanceMarketOptions": {"MarketType": "capacity-block"},
    "CapacityReservationSpecification": {
        "CapacityReservationTarget": {"CapacityReservationId": "cr-0123456789abcdef0"}
    },
}


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """An emulator of these tests alone: they look at all there is in it."""
    with emulated.running(tmp_path_factory.mktemp("types")) as running:
        yield running


@pytest.fixture
def ground(sky: Sky) -> Iterator[dict[str, str]]:
    """A network and roles; their ids by name."""
    template = resources(
        Vpc=part("EC2::VPC", CidrBlock="10.3.0.0/16"),
        Subnet=part("EC2::Subnet", VpcId=ref("Vpc"), CidrBlock="10.3.0.0/20", AvailabilityZone="us-east-1a"),
        Other=part("EC2::Subnet", VpcId=ref("Vpc"), CidrBlock="10.3.16.0/20", AvailabilityZone="us-east-1b"),
        Group=part("EC2::SecurityGroup", GroupDescription="nodes", VpcId=ref("Vpc")),
        Role=part("IAM::Role", AssumeRolePolicyDocument=TRUST),
        Profile=part("IAM::InstanceProfile", Roles=[ref("Role")]),
    )
    outputs = {name: ref(name) for name in ("Vpc", "Subnet", "Other")}
    outputs |= {"Group": att("Group", "GroupId"), "Role": att("Role", "Arn"), "Profile": att("Profile", "Arn")}
    template["Outputs"] = {name: {"Value": value} for name, value in outputs.items()}
    stack = sky.bring("ground", template, **IAM)
    assert stack["StackStatus"] == "CREATE_COMPLETE", sky.why("ground")
    yield sky.outputs("ground")
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE"


def stands(sky: Sky, name: str, template: dict[str, Any], **more: Any) -> dict[str, Any]:
    stack = sky.bring(name, template, **IAM, **more)
    assert stack["StackStatus"].endswith(("CREATE_COMPLETE", "UPDATE_COMPLETE")), sky.why(name)
    assert "ROLLBACK" not in stack["StackStatus"], sky.why(name)
    return stack


def goes(sky: Sky, stack: dict[str, Any]) -> None:
    assert sky.delete(stack)["StackStatus"] == "DELETE_COMPLETE", sky.why(stack["StackId"])


def fails(sky: Sky, template: dict[str, Any]) -> str:
    """Why a stack cannot be made; it is rolled back and deleted."""
    stack = sky.bring("fails", template, **IAM)
    assert stack["StackStatus"] == "ROLLBACK_COMPLETE"
    why = sky.why("fails")
    goes(sky, stack)
    return why


def template_of(**data: Any) -> dict[str, Any]:
    return resources(T=part("EC2::LaunchTemplate", LaunchTemplateData=data))


def test_a_launch_template_has_versions_and_the_stacks_tags(sky: Sky) -> None:
    template = template_of(
        InstanceType="p5.48xlarge",
        NetworkInterfaces=EFA_ONLY,
        UserData={"Fn::Base64": "#!/bin/sh\n"},
        MetadataOptions={"HttpTokens": "required"},
        BlockDeviceMappings=[{"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 200, "VolumeType": "gp3"}}],
        TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "a", "Value": "b"}]}],
        **BLOCK,
    )
    template["Outputs"] = {"Latest": {"Value": att("T", "LatestVersionNumber")}, "Id": {"Value": ref("T")}}
    stack = stands(sky, "launch", template, Tags=[{"Key": "castra:run", "Value": "r"}])
    ec2, out = sky.client("ec2"), sky.outputs("launch")
    (row,) = ec2.describe_launch_template_versions(LaunchTemplateId=out["Id"])["LaunchTemplateVersions"]
    assert len(row["LaunchTemplateData"]["NetworkInterfaces"]) == 33
    (found,) = ec2.describe_launch_templates(LaunchTemplateIds=[out["Id"]])["LaunchTemplates"]
    assert {"Key": "castra:run", "Value": "r"} in found["Tags"]
    template["Resources"]["T"]["Properties"]["LaunchTemplateData"]["InstanceType"] = "p5e.48xlarge"
    stands(sky, "launch", template, update=True)
    assert sky.outputs("launch")["Latest"] == "2"
    goes(sky, stack)


@pytest.mark.parametrize("kind", [one.name for one in catalog.load().values() if one.efa_interfaces > 1])
def test_every_card_of_every_type_takes_its_efa(kind: str) -> None:
    from emulator import topology

    known = catalog.find(kind)
    first = [(0, 0, "interface")] + [(0, 1, "efa-only")] * (known.efa_interfaces >= known.network_cards)
    cards = first + [(card, 0, "efa-only") for card in range(1, known.network_cards)]
    rows = [{"NetworkCardIndex": card, "DeviceIndex": at, "InterfaceType": what} for card, at, what in cards]
    topology.check({"InstanceType": kind, "NetworkInterfaces": rows})


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (
            {"NetworkInterfaces": [{"DeviceIndex": 0, "InterfaceType": "EFAX"}]},
            "Invalid value 'EFAX' for InterfaceType",
        ),
        ({"NetworkInterfaces": [EFA_ONLY[0], EFA_ONLY[0]]}, "card index 0 and device index 0 are given 2 times"),
        ({"NetworkInterfaces": [{"DeviceIndex": 0, "InterfaceType": "efa-only"}]}, "cannot be of type efa-only"),
        ({"NetworkInterfaces": EFA_ONLY, "InstanceType": "p4d.24xlarge"}, "has 4 network cards"),
        (
            {"NetworkInterfaces": EFA_ONLY[:2], "InstanceType": "p6-b300.48xlarge"},
            "card 0 of p6-b300.48xlarge does not",
        ),
        (
            {"NetworkInterfaces": [*EFA_ONLY, EFA_ONLY[1] | {"NetworkCardIndex": 1}], "InstanceType": "p5.48xlarge"},
            "takes 32 EFA interfaces at most, 33 are asked for",
        ),
        ({"NetworkInterfaces": [EFA_ONLY[0], {"DeviceIndex": 9}], "InstanceType": "p5.48xlarge"}, "no device index 9"),
        ({"NetworkInterfaces": EFA_ONLY, "SecurityGroupIds": ["sg-1"]}, "may not be specified on the same request"),
        (BLOCK | {"Placement": {"GroupName": "g"}}, "Capacity Block cannot be used with a placement group"),
        ({"InstanceMarketOptions": {"MarketType": "capacity-block"}}, "needs a CapacityReservationTarget"),
        (
            {"InstanceMarketOptions": {"MarketType": "free"}},
            "Value 'free' at '/LaunchTemplateData/InstanceMarketOptions",
        ),
        ({"MetadataOptions": {"Colour": "red"}}, "extraneous key [Colour] is not permitted"),
    ],
)
def test_a_launch_template_that_ec2_refuses_fails(sky: Sky, data: Any, told: str) -> None:
    assert told in fails(sky, template_of(**data))


def batch(ground: dict[str, str], **more: Any) -> dict[str, Any]:
    compute = {
        "Type": "EC2",
        "AllocationStrategy": "BEST_FIT_PROGRESSIVE",
        "InstanceTypes": ["p5.48xlarge"],
        "MinvCpus": 0,
        "MaxvCpus": 384,
        "Subnets": [ground["Subnet"]],
        "InstanceRole": ground["Profile"],
        "LaunchTemplate": {"LaunchTemplateId": ref("Launch"), "Version": att("Launch", "LatestVersionNumber")},
    }
    cards = [card | {"Groups": [ground["Group"]]} for card in EFA_ONLY]
    return resources(
        Together=part("EC2::PlacementGroup", Strategy="cluster"),
        Launch=part("EC2::LaunchTemplate", LaunchTemplateData={"NetworkInterfaces": cards}),
        Machines=part(
            "Batch::ComputeEnvironment",
            Type="MANAGED",
            State="ENABLED",
            ReplaceComputeEnvironment=False,
            ComputeResources=compute | {"PlacementGroup": ref("Together")} | more,
        ),
        Queue=part(
            "Batch::JobQueue",
            Priority=1,
            State="ENABLED",
            ComputeEnvironmentOrder=[{"Order": 1, "ComputeEnvironment": ref("Machines")}],
        ),
        Job=part(
            "Batch::JobDefinition",
            Type="multinode",
            JobDefinitionName="many",
            Timeout={"AttemptDurationSeconds": 3600},
            NodeProperties={
                "NumNodes": 2,
                "MainNode": 0,
                "NodeRangeProperties": [
                    {
                        "TargetNodes": "0:",
                        "Container": {
                            "Image": "busybox",
                            "Command": ["true"],
                            "ResourceRequirements": [
                                {"Type": "VCPU", "Value": "2"},
                                {"Type": "MEMORY", "Value": "1024"},
                            ],
                        },
                    }
                ],
            },
        ),
    )


def test_batch_stands_changes_in_place_and_goes(sky: Sky, ground: dict[str, str]) -> None:
    template = batch(ground)
    stack = stands(sky, "batch", template)
    api = sky.client("batch")
    (before,) = api.describe_compute_environments()["computeEnvironments"]
    assert before["computeResources"]["maxvCpus"] == 384
    (queue,) = api.describe_job_queues()["jobQueues"]
    assert queue["computeEnvironmentOrder"][0]["computeEnvironment"] == before["computeEnvironmentArn"]
    (job,) = api.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert (job["type"], job["nodeProperties"]["numNodes"]) == ("multinode", 2)
    names = [row["GroupName"] for row in sky.client("ec2").describe_placement_groups()["PlacementGroups"]]
    assert before["computeResources"]["placementGroup"] in names
    template["Resources"]["Machines"]["Properties"]["ComputeResources"]["MaxvCpus"] = 768
    template["Resources"]["Job"]["Properties"]["NodeProperties"]["NumNodes"] = 4
    stands(sky, "batch", template, update=True)
    (after,) = api.describe_compute_environments()["computeEnvironments"]
    assert after["computeResources"]["maxvCpus"] == 768
    assert after["computeEnvironmentArn"] == before["computeEnvironmentArn"]
    (job,) = api.describe_job_definitions(status="ACTIVE")["jobDefinitions"]
    assert (job["revision"], job["nodeProperties"]["numNodes"]) == (2, 4)
    goes(sky, stack)
    assert api.describe_compute_environments()["computeEnvironments"] == []
    assert api.describe_job_queues()["jobQueues"] == []
    assert sky.client("ec2").describe_placement_groups()["PlacementGroups"] == []


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"Type": "EC3"}, "EC3"),
        ({"AllocationStrategy": "ANY_FIT"}, "ANY_FIT"),
        ({"InstanceTypes": ["p4d.24xlarge"]}, "has 4 network cards"),
    ],
)
def test_a_compute_environment_that_batch_refuses_fails(
    sky: Sky, ground: dict[str, str], more: dict[str, Any], told: str
) -> None:
    assert told in fails(sky, batch(ground, **more))


def test_a_capacity_block_takes_no_placement_group_in_batch(sky: Sky, ground: dict[str, str]) -> None:
    template = batch(ground)
    template["Resources"]["Launch"]["Properties"]["LaunchTemplateData"] |= BLOCK
    assert "cannot be used with a placement group" in fails(sky, template)


def eks(ground: dict[str, str]) -> dict[str, Any]:
    cluster = {"ClusterName": ref("Cluster")}
    policy = "arn:aws:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
    return resources(
        Cluster=part(
            "EKS::Cluster",
            Name="legion",
            Version="1.33",
            RoleArn=ground["Role"],
            ResourcesVpcConfig={"SubnetIds": [ground["Subnet"], ground["Other"]], "EndpointPrivateAccess": True},
            AccessConfig={"AuthenticationMode": "API"},
            Logging={"ClusterLogging": {"EnabledTypes": [{"Type": "api"}]}},
        ),
        Launch=part("EC2::LaunchTemplate", LaunchTemplateData={"NetworkInterfaces": EFA_ONLY} | BLOCK),
        Nodes=part(
            "EKS::Nodegroup",
            **cluster,
            NodegroupName="nodes",
            NodeRole=ground["Role"],
            Subnets=[ground["Subnet"]],
            AmiType="AL2023_x86_64_NVIDIA",
            CapacityType="CAPACITY_BLOCK",
            InstanceTypes=["p5.48xlarge"],
            ScalingConfig={"MinSize": 0, "DesiredSize": 2, "MaxSize": 2},
            LaunchTemplate={"Id": ref("Launch"), "Version": att("Launch", "LatestVersionNumber")},
            Labels={"castra": "node"},
            Taints=[{"Key": "nvidia.com/gpu", "Effect": "NO_SCHEDULE"}],
        ),
        Addon=part("EKS::Addon", **cluster, AddonName="vpc-cni", ResolveConflicts="OVERWRITE"),
        Access=part(
            "EKS::AccessEntry",
            **cluster,
            PrincipalArn=ground["Role"],
            Type="STANDARD",
            AccessPolicies=[{"PolicyArn": policy, "AccessScope": {"Type": "cluster"}}],
        ),
        Pods=part(
            "EKS::PodIdentityAssociation",
            **cluster,
            Namespace="castra",
            ServiceAccount="node",
            RoleArn=ground["Role"],
        ),
        Issuer=part(
            "IAM::OIDCProvider", Url=att("Cluster", "OpenIdConnectIssuerUrl"), ClientIdList=["sts.amazonaws.com"]
        ),
    ) | {"Outputs": {name: {"Value": att("Cluster", name)} for name in ("Arn", "Endpoint", "ClusterSecurityGroupId")}}


def test_eks_stands_changes_and_goes(sky: Sky, ground: dict[str, str]) -> None:
    template = eks(ground)
    stack = stands(sky, "eks", template)
    api = sky.client("eks")
    nodes = {"clusterName": "legion", "nodegroupName": "nodes"}
    assert api.list_addons(clusterName="legion")["addons"] == ["vpc-cni"]
    assert api.describe_nodegroup(**nodes)["nodegroup"]["capacityType"] == "CAPACITY_BLOCK"
    (policy,) = api.list_associated_access_policies(clusterName="legion", principalArn=ground["Role"])[
        "associatedAccessPolicies"
    ]
    assert policy["accessScope"] == {"type": "cluster"}
    (pod,) = api.list_pod_identity_associations(clusterName="legion")["associations"]
    assert pod["serviceAccount"] == "node"
    group = sky.outputs("eks")["ClusterSecurityGroupId"]
    assert sky.client("ec2").describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["VpcId"] == ground["Vpc"]
    template["Resources"]["Nodes"]["Properties"]["ScalingConfig"] |= {"MaxSize": 4, "DesiredSize": 4}
    template["Resources"]["Access"]["Properties"]["AccessPolicies"] = []
    stands(sky, "eks", template, update=True)
    assert api.describe_nodegroup(**nodes)["nodegroup"]["scalingConfig"]["maxSize"] == 4
    associated = api.list_associated_access_policies(clusterName="legion", principalArn=ground["Role"])
    assert associated["associatedAccessPolicies"] == []
    template["Resources"]["Cluster"]["Properties"]["AccessConfig"] = {"AuthenticationMode": "API_AND_CONFIG_MAP"}
    assert sky.bring("eks", template, update=True, **IAM)["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    assert sky.why("eks") == "a change of AccessConfig in place is not emulated here"
    goes(sky, stack)
    assert api.list_clusters()["clusters"] == []


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("Nodes", {"AmiType": "AL1"}, "Value 'AL1' at '/AmiType'"),
        ("Nodes", {"CapacityType": "GIFT"}, "CAPACITY_BLOCK"),
        ("Nodes", {"CapacityType": "ON_DEMAND"}, "go together"),
        ("Nodes", {"InstanceTypes": ["p4d.24xlarge"]}, "has 4 network cards"),
        ("Nodes", {"DiskSize": 50}, "cannot be given together with a launch template"),
        ("Addon", {"AddonName": "magic"}, "Addon magic specified is not supported"),
        ("Access", {"Type": "KING"}, "type KING is none of"),
        ("Cluster", {"AccessConfig": {"AuthenticationMode": "NONE"}}, "Value 'NONE' at '/AccessConfig"),
    ],
)
def test_what_eks_refuses_fails(sky: Sky, ground: dict[str, str], name: str, change: Any, told: str) -> None:
    template = eks(ground)
    template["Resources"][name]["Properties"] |= change
    assert told in fails(sky, template)


def files(ground: dict[str, str], **lustre: Any) -> dict[str, Any]:
    settings = {"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 250, "DataCompressionType": "LZ4"}
    return resources(
        Lustre=part(
            "FSx::FileSystem",
            FileSystemType="LUSTRE",
            FileSystemTypeVersion="2.15",
            StorageCapacity=lustre.pop("StorageCapacity", 2400),
            SubnetIds=[ground["Subnet"]],
            SecurityGroupIds=[ground["Group"]],
            LustreConfiguration=settings | lustre,
        ),
        Data=part(
            "FSx::DataRepositoryAssociation",
            FileSystemId=ref("Lustre"),
            FileSystemPath="/data",
            DataRepositoryPath="s3://bucket/data",
            BatchImportMetaDataOnCreate=True,
            S3={"AutoImportPolicy": {"Events": ["NEW", "CHANGED"]}},
        ),
        Home=part(
            "FSx::FileSystem",
            FileSystemType="OPENZFS",
            StorageCapacity=64,
            SubnetIds=[ground["Subnet"]],
            OpenZFSConfiguration={"DeploymentType": "SINGLE_AZ_HA_2", "ThroughputCapacity": 160},
        ),
    ) | {
        "Outputs": {
            "Mount": {"Value": att("Lustre", "LustreMountName")},
            "Dns": {"Value": att("Lustre", "DNSName")},
            "Volume": {"Value": att("Home", "RootVolumeId")},
        }
    }


def test_file_systems_stand_grow_and_go(sky: Sky, ground: dict[str, str]) -> None:
    template = files(ground)
    stack = stands(sky, "files", template, Tags=[{"Key": "castra:run", "Value": "r"}])
    api, out = sky.client("fsx"), sky.outputs("files")
    rows = {row["FileSystemType"]: row for row in api.describe_file_systems()["FileSystems"]}
    assert rows["LUSTRE"]["LustreConfiguration"]["MountName"] == out["Mount"]
    assert rows["LUSTRE"]["Lifecycle"] == "AVAILABLE"
    assert {"Key": "castra:run", "Value": "r"} in rows["LUSTRE"]["Tags"]
    assert out["Volume"].startswith("fsvol-")
    (link,) = api.describe_data_repository_associations()["Associations"]
    assert link["FileSystemId"] == rows["LUSTRE"]["FileSystemId"]
    template["Resources"]["Lustre"]["Properties"]["StorageCapacity"] = 4800
    stands(sky, "files", template, update=True)
    assert {row["StorageCapacity"] for row in api.describe_file_systems()["FileSystems"]} == {4800, 64}
    template["Resources"]["Lustre"]["Properties"]["StorageCapacity"] = 2400
    assert sky.bring("files", template, update=True)["StackStatus"] == "UPDATE_ROLLBACK_COMPLETE"
    goes(sky, stack)
    assert api.describe_file_systems()["FileSystems"] == []
    assert api.describe_data_repository_associations()["Associations"] == []


@pytest.mark.parametrize(
    ("lustre", "told"),
    [
        (
            {"StorageCapacity": 1000},
            "StorageCapacity 1000 is invalid for PERSISTENT_2: 1200 GiB, 2400 GiB, or increments",
        ),
        ({"PerUnitStorageThroughput": 100}, "PerUnitStorageThroughput 100 is invalid for PERSISTENT_2"),
        (
            {"EfaEnabled": True, "MetadataConfiguration": {"Mode": "AUTOMATIC"}, "StorageCapacity": 9600},
            "increments of 19200 GiB",
        ),
        ({"DeploymentType": "ETERNAL"}, "Value 'ETERNAL' at '/LustreConfiguration/DeploymentType'"),
    ],
)
def test_a_file_system_of_a_size_that_fsx_refuses_fails(
    sky: Sky, ground: dict[str, str], lustre: dict[str, Any], told: str
) -> None:
    assert told in fails(sky, files(ground, **lustre))


def pcs(ground: dict[str, str]) -> dict[str, Any]:
    return resources(
        Cluster=part(
            "PCS::Cluster",
            Name="cohort",
            Size="SMALL",
            Scheduler={"Type": "SLURM", "Version": "25.05"},
            Networking={"SubnetIds": [ground["Subnet"]], "SecurityGroupIds": [ground["Group"]]},
            SlurmConfiguration={"ScaleDownIdleTimeInSeconds": 300, "Accounting": {"Mode": "STANDARD"}},
        ),
        Launch=part("EC2::LaunchTemplate", LaunchTemplateData={"NetworkInterfaces": EFA_ONLY}),
        Nodes=part(
            "PCS::ComputeNodeGroup",
            ClusterId=att("Cluster", "Id"),
            Name="nodes",
            SubnetIds=[ground["Subnet"]],
            PurchaseOption="ONDEMAND",
            IamInstanceProfileArn=ground["Profile"].replace("instance-profile/", "instance-profile/AWSPCS-"),
            InstanceConfigs=[{"InstanceType": "p5.48xlarge"}],
            ScalingConfiguration={"MinInstanceCount": 0, "MaxInstanceCount": 2},
            CustomLaunchTemplate={"TemplateId": ref("Launch"), "Version": att("Launch", "LatestVersionNumber")},
        ),
        Queue=part(
            "PCS::Queue",
            ClusterId=att("Cluster", "Id"),
            Name="train",
            ComputeNodeGroupConfigurations=[{"ComputeNodeGroupId": att("Nodes", "Id")}],
        ),
    ) | {"Outputs": {"Address": {"Value": {"Fn::Select": [0, ["x"]]}}}}


def test_pcs_stands_changes_and_goes(sky: Sky, ground: dict[str, str]) -> None:
    template = pcs(ground)
    stack = stands(sky, "pcs", template)
    api = sky.client("pcs")
    told = api.get_cluster(clusterIdentifier="cohort")["cluster"]
    assert (told["status"], [end["type"] for end in told["endpoints"]]) == ("ACTIVE", ["SLURMCTLD", "SLURMDBD"])
    (queue,) = api.list_queues(clusterIdentifier="cohort")["queues"]
    assert queue["name"] == "train"
    template["Resources"]["Nodes"]["Properties"]["ScalingConfiguration"]["MaxInstanceCount"] = 8
    stands(sky, "pcs", template, update=True)
    where = {"clusterIdentifier": "cohort", "computeNodeGroupIdentifier": "nodes"}
    assert api.get_compute_node_group(**where)["computeNodeGroup"]["scalingConfiguration"]["maxInstanceCount"] == 8
    with pytest.raises(api.exceptions.ConflictException):
        api.delete_cluster(clusterIdentifier="cohort")
    goes(sky, stack)
    assert api.list_clusters()["clusters"] == []


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("Cluster", {"Size": "HUGE"}, "Value 'HUGE' at '/Size'"),
        ("Nodes", {"PurchaseOption": "CAPACITY_BLOCK"}, "needs a launch template with MarketType capacity-block"),
        ("Nodes", {"InstanceConfigs": [{"InstanceType": "p4d.24xlarge"}]}, "has 4 network cards"),
    ],
)
def test_what_pcs_refuses_fails(sky: Sky, ground: dict[str, str], name: str, change: Any, told: str) -> None:
    template = pcs(ground)
    template["Resources"][name]["Properties"] |= change
    assert told in fails(sky, template)


def test_sagemaker_serves_and_trains(sky: Sky, ground: dict[str, str]) -> None:
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/serve:1"
    variant = {
        "VariantName": "one",
        "ModelName": att("Model", "ModelName"),
        "InstanceType": "ml.p4d.24xlarge",
        "InitialInstanceCount": 1,
    }
    template = resources(
        Model=part("SageMaker::Model", ExecutionRoleArn=ground["Role"], PrimaryContainer={"Image": image}),
        Config=part("SageMaker::EndpointConfig", ProductionVariants=[variant]),
        Endpoint=part("SageMaker::Endpoint", EndpointConfigName=att("Config", "EndpointConfigName")),
        Pod=part(
            "SageMaker::Cluster",
            ClusterName="pod",
            NodeRecovery="Automatic",
            VpcConfig={"SecurityGroupIds": [ground["Group"]], "Subnets": [ground["Subnet"]]},
            InstanceGroups=[
                {
                    "InstanceGroupName": "workers",
                    "InstanceType": "ml.p5.48xlarge",
                    "InstanceCount": 2,
                    "ExecutionRole": ground["Role"],
                    "ThreadsPerCore": 1,
                    "LifeCycleConfig": {"SourceS3Uri": "s3://bucket/life", "OnCreate": "on_create.sh"},
                }
            ],
        ),
    )
    stack = stands(sky, "sage", template)
    api = sky.client("sagemaker")
    assert len(api.list_endpoints()["Endpoints"]) == 1
    assert len(api.list_cluster_nodes(ClusterName="pod")["ClusterNodeSummaries"]) == 2
    template["Resources"]["Pod"]["Properties"]["InstanceGroups"][0]["InstanceCount"] = 3
    variant["InitialInstanceCount"] = 2
    stands(sky, "sage", template, update=True)
    assert len(api.list_cluster_nodes(ClusterName="pod")["ClusterNodeSummaries"]) == 3
    goes(sky, stack)
    assert api.list_endpoints()["Endpoints"] == []
    assert api.list_models()["Models"] == []
    assert api.list_clusters()["ClusterSummaries"] == []


def small_ones() -> dict[str, Any]:
    """A template of types that need nothing else."""
    rights = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:ListBucket", "Resource": "*"}]}
    rule = {"selection": {"tagStatus": "any", "countType": "imageCountMoreThan", "countNumber": 9}}
    rules = {"rules": [rule | {"rulePriority": 1, "action": {"type": "expire"}}]}
    lifecycle = {"LifecyclePolicyText": json.dumps(rules)}
    return resources(
        Role=part("IAM::Role", AssumeRolePolicyDocument=TRUST),
        Policy=part("IAM::Policy", PolicyName="in", PolicyDocument=rights, Roles=[ref("Role")]),
        Managed=part("IAM::ManagedPolicy", PolicyDocument=rights, Roles=[ref("Role")]),
        Key=part("KMS::Key", EnableKeyRotation=True, PendingWindowInDays=7),
        Alias=part("KMS::Alias", AliasName="alias/castra", TargetKeyId=ref("Key")),
        Secret=part("SecretsManager::Secret", SecretString="quiet", KmsKeyId=att("Key", "Arn")),
        Images=part("ECR::Repository", ImageTagMutability="IMMUTABLE", LifecyclePolicy=lifecycle, EmptyOnDelete=True),
        Alarm=part(
            "CloudWatch::Alarm",
            ComparisonOperator="GreaterThanThreshold",
            EvaluationPeriods=1,
            MetricName="m",
            Namespace="castra",
            Period=60,
            Statistic="Sum",
            Threshold=1.5,
        ),
        Budget=part(
            "Budgets::Budget",
            Budget={"BudgetType": "COST", "TimeUnit": "MONTHLY", "BudgetLimit": {"Amount": 10, "Unit": "USD"}},
        ),
        Policing=part(
            "Batch::SchedulingPolicy",
            FairsharePolicy={
                "ComputeReservation": 1,
                "ShareDistribution": [{"ShareIdentifier": "a", "WeightFactor": 1.0}],
            },
        ),
        Held=part(
            "EC2::CapacityReservation",
            InstanceType="p5.48xlarge",
            InstancePlatform="Linux/UNIX",
            AvailabilityZone="us-east-1a",
            InstanceCount=2,
        ),
        Vpc=part("EC2::VPC", CidrBlock="10.5.0.0/16"),
        Subnet=part("EC2::Subnet", VpcId=ref("Vpc"), CidrBlock="10.5.0.0/20"),
        Acl=part("EC2::NetworkAcl", VpcId=ref("Vpc")),
        Entry=part(
            "EC2::NetworkAclEntry",
            NetworkAclId=ref("Acl"),
            RuleNumber=100,
            Protocol=-1,
            RuleAction="allow",
            CidrBlock="0.0.0.0/0",
        ),
        Follows=part("EC2::SubnetNetworkAclAssociation", SubnetId=ref("Subnet"), NetworkAclId=ref("Acl")),
    )


def test_the_small_ones_stand_change_and_go(sky: Sky) -> None:
    template = small_ones()
    stack = stands(sky, "small", template)
    held = sky.client("ec2").describe_capacity_reservations()["CapacityReservations"]
    assert [(row["State"], row["TotalInstanceCount"]) for row in held if row["State"] == "active"] == [("active", 2)]
    template["Resources"]["Alarm"]["Properties"]["Threshold"] = 2
    template["Resources"]["Managed"]["Properties"]["Roles"] = []
    template["Resources"]["Secret"]["Properties"]["SecretString"] = "loud"
    template["Resources"]["Held"]["Properties"]["InstanceCount"] = 3
    stands(sky, "small", template, update=True)
    (alarm,) = sky.client("cloudwatch").describe_alarms()["MetricAlarms"]
    assert alarm["Threshold"] == 2
    goes(sky, stack)
    assert sky.client("ecr").describe_repositories()["repositories"] == []
    assert sky.client("cloudwatch").describe_alarms()["MetricAlarms"] == []
    active = [{"Name": "state", "Values": ["active"]}]
    assert sky.client("ec2").describe_capacity_reservations(Filters=active)["CapacityReservations"] == []
