"""The types that keep bytes: FSx file systems and image repositories; and those that watch: alarms and budgets."""

from typing import Any

from emulator.request import truth
from emulator.resources import Properties, Resource, tag_list, until

LUSTRE_ONLY_CREATED = ("DeploymentType", "EfaEnabled", "ImportPath", "ExportPath", "DriveCacheType")
"""Settings of a Lustre file system that only another one can have."""


class FileSystem(
    Resource,
    type="AWS::FSx::FileSystem",
    fixed="BackupId FileSystemType KmsKeyId NetworkType SecurityGroupIds StorageType SubnetIds",
    mutable="FileSystemTypeVersion LustreConfiguration OpenZFSConfiguration StorageCapacity Tags",
    required="FileSystemType SubnetIds",
):
    """A Lustre or OpenZFS file system; what FSx refuses of its sizes fails here."""

    def create(self) -> str:
        if self.p.get("BackupId"):
            raise ValueError("file systems from a backup are not emulated here")
        told = self._told("FileSystemTypeVersion", "StorageCapacity", *sorted(self.fixed - {"BackupId"}))
        made = self.call("fsx", "create_file_system", told, Tags=tag_list(self.p))
        self.id = str(made["FileSystem"]["FileSystemId"])
        until(lambda: bool(self._found()["Lifecycle"] == "AVAILABLE"), f"File system {self.id}")
        return self.id

    def replaces(self, old: Properties) -> bool:
        before, after = old.get("LustreConfiguration", {}), self.p.get("LustreConfiguration", {})
        return super().replaces(old) or any(before.get(key) != after.get(key) for key in LUSTRE_ONLY_CREATED)

    def settle(self, old: Properties) -> None:
        names = ("LustreConfiguration", "OpenZFSConfiguration")
        if old and (told := self.changed(old, "FileSystemTypeVersion", "StorageCapacity", *names)):
            for name in (name for name in names if name in told):
                told[name] = {key: one for key, one in told[name].items() if old.get(name, {}).get(key) != one}
            self.call("fsx", "update_file_system", told, FileSystemId=self.id)
        if old and (wanted := tag_list(self.p)):
            self.aws.fsx.tag_resource(ResourceARN=self._found()["ResourceARN"], Tags=wanted)

    def attributes(self) -> dict[str, Any]:
        found = self._found()
        told = {"Id": self.id, "ResourceARN": found["ResourceARN"], "DNSName": found["DNSName"]}
        if "LustreConfiguration" in found:
            return told | {"LustreMountName": found["LustreConfiguration"]["MountName"]}
        return told | {"RootVolumeId": found["OpenZFSConfiguration"]["RootVolumeId"]}

    def delete(self) -> None:
        self.aws.fsx.delete_file_system(FileSystemId=self.id)

    def _found(self) -> dict[str, Any]:
        return dict(self.aws.fsx.describe_file_systems(FileSystemIds=[self.id])["FileSystems"][0])

    def _told(self, *names: str) -> dict[str, Any]:
        told = {key: self.p[key] for key in (*names, "LustreConfiguration") if key in self.p}
        if zfs := self.p.get("OpenZFSConfiguration"):  # its options are about its deletion
            told["OpenZFSConfiguration"] = {key: value for key, value in zfs.items() if key != "Options"}
        return told


class DataRepositoryAssociation(
    Resource,
    type="AWS::FSx::DataRepositoryAssociation",
    fixed="BatchImportMetaDataOnCreate DataRepositoryPath FileSystemId FileSystemPath",
    mutable="ImportedFileChunkSize S3 Tags",
    required="DataRepositoryPath FileSystemId FileSystemPath",
):
    """A folder of a Lustre file system tied to a prefix in S3."""

    def create(self) -> str:
        made = self.call("fsx", "create_data_repository_association", self.chosen("Tags"), Tags=tag_list(self.p))
        return str(made["Association"]["AssociationId"])

    def settle(self, old: Properties) -> None:
        if old and (told := self.changed(old, "ImportedFileChunkSize", "S3")):
            self.call("fsx", "update_data_repository_association", told, AssociationId=self.id)

    def attributes(self) -> dict[str, Any]:
        found = self.aws.fsx.describe_data_repository_associations(AssociationIds=[self.id])["Associations"][0]
        return {"AssociationId": self.id, "ResourceARN": found["ResourceARN"]}

    def delete(self) -> None:
        self.aws.fsx.delete_data_repository_association(AssociationId=self.id)


class Repository(
    Resource,
    type="AWS::ECR::Repository",
    fixed="EncryptionConfiguration RepositoryName",
    mutable="EmptyOnDelete ImageScanningConfiguration ImageTagMutability LifecyclePolicy RepositoryPolicyText Tags",
):
    """A repository of container images; deleting it fails while it holds some, unless it is told to be emptied."""

    def create(self) -> str:
        name = str(self.p.get("RepositoryName") or self.name(256).lower())
        names = ("EncryptionConfiguration", "ImageScanningConfiguration", "ImageTagMutability")
        told = {key: self.p[key] for key in names if key in self.p}
        self.call("ecr", "create_repository", told, repositoryName=name, tags=tag_list(self.p))
        return name

    def settle(self, old: Properties) -> None:
        where = {"repositoryName": self.id}
        if told := self.changed(old, "LifecyclePolicy"):
            text = told["LifecyclePolicy"]["LifecyclePolicyText"]
            self.call("ecr", "put_lifecycle_policy", where, lifecyclePolicyText=text)
        if told := self.changed(old, "RepositoryPolicyText"):
            self.call("ecr", "set_repository_policy", where, policyText=told["RepositoryPolicyText"])
        if old and (told := self.changed(old, "ImageScanningConfiguration")):
            self.call("ecr", "put_image_scanning_configuration", where, **told)
        if old and (told := self.changed(old, "ImageTagMutability")):
            self.call("ecr", "put_image_tag_mutability", where, **told)

    def attributes(self) -> dict[str, Any]:
        (found,) = self.aws.ecr.describe_repositories(repositoryNames=[self.id])["repositories"]
        return {"Arn": found["repositoryArn"], "RepositoryUri": found["repositoryUri"]}

    def delete(self) -> None:
        self.aws.ecr.delete_repository(repositoryName=self.id, force=truth(self.p.get("EmptyOnDelete", False)))


class Alarm(
    Resource,
    type="AWS::CloudWatch::Alarm",
    fixed="AlarmName",
    mutable="ActionsEnabled AlarmActions AlarmDescription ComparisonOperator DatapointsToAlarm Dimensions "
    "EvaluationPeriods InsufficientDataActions MetricName Metrics Namespace OKActions Period Statistic Tags Threshold "
    "TreatMissingData Unit",
    required="ComparisonOperator EvaluationPeriods",
):
    """What tells that a figure is too high or too low."""

    def create(self) -> str:
        return str(self.p.get("AlarmName") or self.name(255))

    def settle(self, old: Properties) -> None:
        labels = {} if old else {"Tags": tag_list(self.p)}
        self.call("cloudwatch", "put_metric_alarm", self.chosen("AlarmName", "Tags"), AlarmName=self.id, **labels)

    def attributes(self) -> dict[str, Any]:
        return {"Arn": self.aws.arn("cloudwatch", f"alarm:{self.id}")}

    def delete(self) -> None:
        self.aws.cloudwatch.delete_alarms(AlarmNames=[self.id])


class Budget(
    Resource, type="AWS::Budgets::Budget", fixed="NotificationsWithSubscribers Budget ResourceTags", required="Budget"
):
    """What may be spent. A change replaces it."""

    def create(self) -> str:
        told = {**self.p["Budget"]}
        name = told.setdefault("BudgetName", self.name(100))
        if limit := told.get("BudgetLimit"):
            told["BudgetLimit"] = {key: str(value) for key, value in limit.items()}
        warned = {key: self.p[key] for key in ("NotificationsWithSubscribers",) if key in self.p}
        self.call("budgets", "create_budget", warned, AccountId=self.aws.account, Budget=told)
        return str(name)

    def delete(self) -> None:
        self.aws.budgets.delete_budget(AccountId=self.aws.account, BudgetName=self.id)
