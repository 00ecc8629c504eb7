"""What IAM calls the things we make and the calls we send: a table, row by row, that `clusters.policy` fills in.

Source: the service authorization reference of AWS (actions, resource types, condition keys) and, for the types, the
handlers' permissions in CloudFormation's resource schemas; read 2026-11. In a resource, `{run}` is the recipe's name;
a name that starts with `arn:` is whole, any other follows `arn:<partition>:<service>:<region>:<account>:`.
"""

from dataclasses import dataclass

TAGGED = {"StringEquals": {"aws:ResourceTag/castra:run": "{run}"}}
"""Only what carries the run's tag, which CloudFormation puts on everything that can."""


@dataclass(frozen=True, slots=True)
class Grant:
    """Actions of one service on some resources."""

    service: str
    actions: str
    """Their names, a space between."""
    resources: tuple[str, ...] = ("*",)
    tagged: bool = False
    """Only on what carries the run's tag."""


_STACK = ("stack/castra-{run}-*/*",)
_ROLES = ("arn:{partition}:iam::{account}:role/castra-*", "arn:{partition}:iam::{account}:role/aws-pcs/castra-*")
_PROFILES = (
    "arn:{partition}:iam::{account}:instance-profile/castra-*",
    "arn:{partition}:iam::{account}:instance-profile/aws-pcs/castra-*",
)
_BUCKETS = ("arn:{partition}:s3:::castra-*",)
_GROUPS = ("log-group:castra-*", "log-group:castra-*:*", "log-group:/aws/eks/castra-{run}/cluster*")
_EKS = (
    "cluster/castra-{run}",
    "nodegroup/castra-{run}/*",
    "addon/castra-{run}/*",
    "podidentityassociation/castra-{run}/*",
)

ALWAYS = (
    Grant(
        "cloudformation",
        "CreateChangeSet DeleteChangeSet DeleteStack DescribeChangeSet DescribeStackEvents ExecuteChangeSet "
        "GetTemplate ListStackResources TagResource",
        _STACK,
    ),
    Grant("cloudformation", "DescribeStacks"),
    Grant("ec2", "DescribeAvailabilityZones DescribeCapacityReservations DescribeInstanceTypeOfferings"),
    Grant("servicequotas", "GetServiceQuota ListServiceQuotas"),
)
"""Stacks and looking before. Who we are (sts:GetCallerIdentity) needs no permission."""

CALLS: dict[str, tuple[Grant, ...]] = {
    "batch": (
        Grant("batch", "SubmitJob TagResource", ("job-definition/*", "job/*", "job-queue/castra-{run}")),
        Grant("batch", "RegisterJobDefinition", ("job-definition/*",)),
        Grant("batch", "TerminateJob", ("job/*",)),
        Grant("batch", "DeregisterJobDefinition DescribeJobDefinitions DescribeJobs ListJobs"),
        Grant("logs", "GetLogEvents", _GROUPS),
    ),
    "eks": (Grant("eks", "DescribeCluster", ("cluster/castra-{run}",)),),
    "sagemaker": (
        Grant(
            "sagemaker",
            "AddTags CreateTrainingJob DeleteTrainingJob DescribeTrainingJob StopTrainingJob UpdateTrainingJob",
            ("training-job/*", "training-plan/*"),
        ),
        Grant("sagemaker", "DescribeTrainingPlan", ("training-plan/*",)),
        Grant("sagemaker", "ListTrainingJobs"),
        Grant(
            "logs", "DescribeLogStreams GetLogEvents", ("log-group:/aws/sagemaker/*", "log-group:/aws/sagemaker/*:*")
        ),
    ),
    "pcs": (
        Grant("ssm", "SendCommand", ("instance/*",), tagged=True),
        Grant("ssm", "SendCommand", ("arn:{partition}:ssm:{region}::document/AWS-RunShellScript",)),
        Grant("ssm", "GetCommandInvocation"),
        Grant("ec2", "DescribeInstances"),
    ),
    "hyperpod": (
        Grant("sagemaker", "DescribeTrainingPlan", ("training-plan/*",)),
        Grant("sagemaker", "ListClusterNodes", ("cluster/*",)),
        Grant("ssm", "StartSession", ("arn:{partition}:sagemaker:{region}:{account}:cluster/*",)),
        Grant("ssm", "ResumeSession TerminateSession", ("session/*",)),
    ),
    "parallelcluster": (
        Grant("cloudformation", "*", ("stack/castra-{run}/*", "stack/castra-{run}-*/*")),
        Grant("ec2", "*"),
        Grant("dynamodb", "*", ("table/parallelcluster-*",)),
        Grant("lambda", "*", ("function:parallelcluster-*", "function:pcluster-*")),
        Grant("logs", "*", ("log-group:/aws/parallelcluster/*", "log-group:/aws/lambda/*")),
        Grant(
            "cloudwatch",
            "DeleteAlarms DeleteDashboards DescribeAlarms GetDashboard PutDashboard PutMetricAlarm TagResource",
        ),
        Grant("s3", "*", ("arn:{partition}:s3:::parallelcluster-*",)),
        Grant(
            "iam",
            "AddRoleToInstanceProfile AttachRolePolicy CreateInstanceProfile CreateRole DeleteInstanceProfile "
            "DeleteRole DeleteRolePolicy DetachRolePolicy GetInstanceProfile GetPolicy GetRole GetRolePolicy PassRole "
            "PutRolePolicy RemoveRoleFromInstanceProfile SimulatePrincipalPolicy TagRole",
            (
                "arn:{partition}:iam::{account}:role/parallelcluster/*",
                "arn:{partition}:iam::{account}:instance-profile/parallelcluster/*",
            ),
        ),
        Grant(
            "route53",
            "ChangeResourceRecordSets ChangeTagsForResource CreateHostedZone DeleteHostedZone GetChange GetHostedZone "
            "ListResourceRecordSets",
        ),
        Grant("fsx", "DescribeFileSystems"),
        Grant("ssm", "GetParameter GetParametersByPath", ("arn:{partition}:ssm:{region}::parameter/aws/service/*",)),
        Grant("tag", "GetResources"),
    ),
}
"""What an adapter calls by itself. ParallelCluster's are those its user guide asks for ("base user policy")."""

TYPES: dict[str, tuple[Grant, ...]] = {
    "AWS::Batch::ComputeEnvironment": (
        Grant(
            "batch",
            "CreateComputeEnvironment DeleteComputeEnvironment TagResource UpdateComputeEnvironment",
            ("compute-environment/castra-{run}",),
        ),
        Grant("batch", "DescribeComputeEnvironments"),
    ),
    "AWS::Batch::JobQueue": (
        Grant(
            "batch",
            "CreateJobQueue DeleteJobQueue TagResource UpdateJobQueue",
            ("job-queue/castra-{run}", "compute-environment/castra-{run}"),
        ),
        Grant("batch", "DescribeJobQueues"),
    ),
    "AWS::EC2::EIP": (Grant("ec2", "AllocateAddress DescribeAddresses"), Grant("ec2", "ReleaseAddress", tagged=True)),
    "AWS::EC2::FlowLog": (Grant("ec2", "CreateFlowLogs DescribeFlowLogs"), Grant("ec2", "DeleteFlowLogs", tagged=True)),
    "AWS::EC2::InternetGateway": (
        Grant("ec2", "CreateInternetGateway DescribeInternetGateways"),
        Grant("ec2", "DeleteInternetGateway", tagged=True),
    ),
    "AWS::EC2::LaunchTemplate": (
        Grant("ec2", "CreateLaunchTemplate DescribeLaunchTemplateVersions DescribeLaunchTemplates"),
        Grant("ec2", "CreateLaunchTemplateVersion DeleteLaunchTemplate ModifyLaunchTemplate", tagged=True),
    ),
    "AWS::EC2::NatGateway": (
        Grant("ec2", "CreateNatGateway DescribeNatGateways"),
        Grant("ec2", "DeleteNatGateway", tagged=True),
    ),
    "AWS::EC2::PlacementGroup": (
        Grant("ec2", "CreatePlacementGroup DescribePlacementGroups"),
        Grant("ec2", "DeletePlacementGroup", tagged=True),
    ),
    "AWS::EC2::Route": (Grant("ec2", "CreateRoute DeleteRoute ReplaceRoute", tagged=True),),
    "AWS::EC2::RouteTable": (
        Grant("ec2", "CreateRouteTable DescribeRouteTables"),
        Grant("ec2", "DeleteRouteTable", tagged=True),
    ),
    "AWS::EC2::SecurityGroup": (
        Grant("ec2", "CreateSecurityGroup DescribeSecurityGroupRules DescribeSecurityGroups"),
        Grant("ec2", "AuthorizeSecurityGroupEgress DeleteSecurityGroup RevokeSecurityGroupEgress", tagged=True),
    ),
    "AWS::EC2::SecurityGroupEgress": (
        Grant("ec2", "AuthorizeSecurityGroupEgress RevokeSecurityGroupEgress", tagged=True),
    ),
    "AWS::EC2::SecurityGroupIngress": (
        Grant("ec2", "AuthorizeSecurityGroupIngress RevokeSecurityGroupIngress", tagged=True),
    ),
    "AWS::EC2::Subnet": (
        Grant("ec2", "CreateSubnet DescribeSubnets"),
        Grant("ec2", "DeleteSubnet ModifySubnetAttribute", tagged=True),
    ),
    "AWS::EC2::SubnetRouteTableAssociation": (Grant("ec2", "AssociateRouteTable DisassociateRouteTable", tagged=True),),
    "AWS::EC2::VPC": (
        Grant("ec2", "CreateTags", ("*/*",)),
        Grant("ec2", "CreateVpc DescribeVpcAttribute DescribeVpcs"),
        Grant("ec2", "DeleteVpc ModifyVpcAttribute", tagged=True),
    ),
    "AWS::EC2::VPCEndpoint": (
        Grant("ec2", "CreateVpcEndpoint DescribeVpcEndpoints"),
        Grant("ec2", "DeleteVpcEndpoints ModifyVpcEndpoint", tagged=True),
    ),
    "AWS::EC2::VPCGatewayAttachment": (Grant("ec2", "AttachInternetGateway DetachInternetGateway", tagged=True),),
    "AWS::ECR::Repository": (
        Grant(
            "ecr",
            "BatchDeleteImage CreateRepository DeleteLifecyclePolicy DeleteRepository DescribeRepositories "
            "GetLifecyclePolicy ListImages ListTagsForResource PutImageScanningConfiguration PutLifecyclePolicy "
            "TagResource",
            ("repository/castra-{run}-*",),
        ),
    ),
    "AWS::EKS::Addon": (
        Grant("eks", "CreateAddon DeleteAddon DescribeAddon TagResource UpdateAddon", _EKS),
        Grant("eks", "CreatePodIdentityAssociation DeletePodIdentityAssociation", _EKS),
    ),
    "AWS::EKS::Cluster": (
        Grant(
            "eks",
            "CreateCluster DeleteCluster DescribeCluster DescribeUpdate TagResource UpdateClusterConfig "
            "UpdateClusterVersion",
            _EKS,
        ),
    ),
    "AWS::EKS::Nodegroup": (
        Grant(
            "eks",
            "CreateNodegroup DeleteNodegroup DescribeNodegroup DescribeUpdate TagResource UpdateNodegroupConfig "
            "UpdateNodegroupVersion",
            _EKS,
        ),
        Grant("ec2", "RunInstances DescribeLaunchTemplateVersions"),  # EKS tries the launch template on our behalf
    ),
    "AWS::EKS::PodIdentityAssociation": (
        Grant(
            "eks",
            "CreatePodIdentityAssociation DeletePodIdentityAssociation DescribePodIdentityAssociation TagResource "
            "UpdatePodIdentityAssociation",
            _EKS,
        ),
    ),
    "AWS::FSx::DataRepositoryAssociation": (
        Grant(
            "fsx",
            "CreateDataRepositoryAssociation DeleteDataRepositoryAssociation TagResource "
            "UpdateDataRepositoryAssociation",
            ("association/*", "file-system/*"),
            tagged=True,
        ),
        Grant("fsx", "DescribeDataRepositoryAssociations"),
        Grant("s3", "GetBucketAcl GetBucketPolicy PutBucketPolicy", ("{store}",)),
        Grant(
            "iam",
            "AttachRolePolicy CreateServiceLinkedRole PutRolePolicy",
            ("arn:{partition}:iam::{account}:role/aws-service-role/s3.data-source.lustre.fsx.amazonaws.com/*",),
        ),
    ),
    "AWS::FSx::FileSystem": (
        Grant("fsx", "CreateFileSystem CreateVolume TagResource", ("file-system/*", "volume/*")),
        Grant("fsx", "DeleteFileSystem DeleteVolume UpdateFileSystem", ("file-system/*", "volume/*"), tagged=True),
        Grant("fsx", "DescribeFileSystems DescribeVolumes"),
    ),
    "AWS::IAM::InstanceProfile": (
        Grant(
            "iam",
            "AddRoleToInstanceProfile CreateInstanceProfile DeleteInstanceProfile GetInstanceProfile "
            "RemoveRoleFromInstanceProfile TagInstanceProfile",
            _PROFILES,
        ),
    ),
    "AWS::IAM::Role": (
        Grant(
            "iam",
            "CreateRole DeleteRole DeleteRolePolicy GetRole GetRolePolicy ListAttachedRolePolicies ListRolePolicies "
            "ListRoleTags PutRolePolicy TagRole UntagRole UpdateAssumeRolePolicy UpdateRoleDescription",
            _ROLES,
        ),
    ),
    "AWS::Logs::LogGroup": (
        Grant("logs", "CreateLogGroup DeleteLogGroup ListTagsForResource PutRetentionPolicy TagResource", _GROUPS),
        Grant("logs", "DescribeLogGroups"),
    ),
    "AWS::PCS::Cluster": (
        Grant("pcs", "CreateCluster DeleteCluster GetCluster TagResource UpdateCluster", ("cluster/*",)),
        Grant("secretsmanager", "CreateSecret DeleteSecret RotateSecret TagResource", ("secret:pcs!*",)),
        Grant("ec2", "CreateNetworkInterface CreateNetworkInterfacePermission DescribeNetworkInterfaces"),
    ),
    "AWS::PCS::ComputeNodeGroup": (
        Grant(
            "pcs",
            "CreateComputeNodeGroup DeleteComputeNodeGroup GetComputeNodeGroup TagResource UpdateComputeNodeGroup",
            ("cluster/*",),
        ),
        Grant(
            "ec2",
            "CreateFleet DescribeImages DescribeInstanceTypes GetInstanceTypesFromInstanceRequirements RunInstances",
        ),
        Grant("ec2", "TerminateInstances", tagged=True),
    ),
    "AWS::PCS::Queue": (Grant("pcs", "CreateQueue DeleteQueue GetQueue TagResource UpdateQueue", ("cluster/*",)),),
    "AWS::S3::Bucket": (
        Grant(
            "s3",
            "CreateBucket DeleteBucket GetBucketTagging ListBucket ListBucketMultipartUploads ListBucketVersions "
            "PutBucketOwnershipControls PutBucketPublicAccessBlock PutBucketTagging PutEncryptionConfiguration "
            "PutLifecycleConfiguration",
            _BUCKETS,
        ),
        Grant("s3", "AbortMultipartUpload DeleteObject DeleteObjectVersion", ("arn:{partition}:s3:::castra-*/*",)),
    ),
    "AWS::S3::BucketPolicy": (Grant("s3", "DeleteBucketPolicy GetBucketPolicy PutBucketPolicy", _BUCKETS),),
    "AWS::SageMaker::Cluster": (
        Grant(
            "sagemaker", "AddTags CreateCluster DeleteCluster DescribeCluster ListTags UpdateCluster", ("cluster/*",)
        ),
        Grant("sagemaker", "ListClusterNodes", ("cluster/*",)),
    ),
}
"""What CloudFormation does, in the name of who calls it, for a resource of each type."""
