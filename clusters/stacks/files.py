"""Shared files: FSx for Lustre bound to the store, and a home for Slurm's users."""

from clusters.stacks.nodes import Place
from clusters.stacks.parts import Part, assemble, att, named, part, ref
from recipes.cluster import AwsCluster
from recipes.spec import Recipe

MB_PER_S_PER_TIB = 250
"""Throughput that is bought with the capacity: PERSISTENT_2 has 125, 250, 500 and 1000."""
HOME_GIB, HOME_MB_PER_S = 64, 160
"""The smallest OpenZFS file system there is."""
EVENTS = ["NEW", "CHANGED", "DELETED"]


def template(recipe: Recipe, cluster: AwsCluster, place: Place) -> Part:
    """The template of a place's /fsx, of `cluster.lustre_gib`, and of its /home, as far as it has them.

    What lies below `<store>/fsx/` is what lies in /fsx: both ways, as files change. Outputs: FileSystem, MountName,
    DnsName for /fsx, Home and HomeDns for /home. The files go with the stack; what was exported to the store stays.
    """
    resources: Part = {}
    outputs: Part = {}
    if place.fsx:
        resources |= {"FileSystem": _lustre(place, cluster.lustre_gib)}
        resources |= {"Repository": _repository(recipe.store)} if recipe.store.startswith("s3://") else {}
        outputs |= {
            "FileSystem": ref("FileSystem"),
            "MountName": att("FileSystem", "LustreMountName"),
            "DnsName": _dns("FileSystem"),
        }
    if place.home:
        resources |= {"Home": _home(place)}
        outputs |= {"Home": ref("Home"), "HomeDns": _dns("Home")}
    return assemble("Castra: shared files of one run.", resources, outputs)


def _dns(name: str) -> Part:
    """The DNS name of a file system, put together as AWS documents it."""
    return {"Fn::Sub": f"${{{name}}}.fsx.${{AWS::Region}}.${{AWS::URLSuffix}}"}


def _lustre(place: Place, gib: int) -> Part:
    return part(
        "FSx::FileSystem",
        FileSystemType="LUSTRE",
        FileSystemTypeVersion="2.15",
        StorageCapacity=gib,
        StorageType="SSD",
        SubnetIds=[place.subnet_id],
        SecurityGroupIds=[place.group_id],
        LustreConfiguration={
            "DeploymentType": "PERSISTENT_2",
            "PerUnitStorageThroughput": MB_PER_S_PER_TIB,
            "DataCompressionType": "LZ4",
            "AutomaticBackupRetentionDays": 0,
            "MetadataConfiguration": {"Mode": "AUTOMATIC"},
        },
        Tags=named("fsx"),
    ) | {"DeletionPolicy": "Delete", "UpdateReplacePolicy": "Delete"}


def _repository(store: str) -> Part:
    return part(
        "FSx::DataRepositoryAssociation",
        FileSystemId=ref("FileSystem"),
        FileSystemPath="/",
        DataRepositoryPath=f"{store.rstrip('/')}/fsx",
        BatchImportMetaDataOnCreate=True,
        S3={"AutoImportPolicy": {"Events": EVENTS}, "AutoExportPolicy": {"Events": EVENTS}},
        Tags=named("store"),
    )


def _home(place: Place) -> Part:
    export = {"Clients": "*", "Options": ["rw", "crossmnt", "no_root_squash"]}
    return part(
        "FSx::FileSystem",
        FileSystemType="OPENZFS",
        StorageCapacity=HOME_GIB,
        StorageType="SSD",
        SubnetIds=[place.subnet_id],
        SecurityGroupIds=[place.group_id],
        OpenZFSConfiguration={
            "DeploymentType": "SINGLE_AZ_HA_2",
            "ThroughputCapacity": HOME_MB_PER_S,
            "AutomaticBackupRetentionDays": 0,
            "Options": ["DELETE_CHILD_VOLUMES_AND_SNAPSHOTS"],
            "RootVolumeConfiguration": {
                "DataCompressionType": "LZ4",
                "NfsExports": [{"ClientConfigurations": [export]}],
            },
        },
        Tags=named("home"),
    ) | {"DeletionPolicy": "Delete", "UpdateReplacePolicy": "Delete"}
