"""The store's bucket: where ledgers, checkpoints and models live, longer than any run."""

from clusters.stacks.camp import CLOSED, tls_policy
from clusters.stacks.parts import Part, assemble, att, part, ref

OLD_VERSION_DAYS = 30
"""How long an overwritten or deleted object can be brought back; a checkpoint that was replaced costs until then."""


def name(bucket: str) -> str:
    """The name of the stack of a bucket: stacks have no dots."""
    return f"castra-store-{bucket.replace('.', '-')}"


def tags() -> dict[str, str]:
    """What the stack carries: no owner and no run, so that no teardown takes it for something left over."""
    return {"castra:store": "true"}


def template(bucket: str, *, tls_only: bool = True) -> Part:
    """The template of a versioned, encrypted, private bucket that survives its stack. Outputs: Bucket, Arn.

    `tls_only=False` is for emulators that speak plain http.
    """
    lifecycle = {
        "Rules": [
            {
                "Id": "abandoned-uploads",
                "Status": "Enabled",
                "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1},
            },
            {
                "Id": "old-versions",
                "Status": "Enabled",
                "NoncurrentVersionExpiration": {"NoncurrentDays": OLD_VERSION_DAYS},
                "ExpiredObjectDeleteMarker": True,
            },
        ]
    }
    kept = {"DeletionPolicy": "Retain", "UpdateReplacePolicy": "Retain"}
    made = part(
        "S3::Bucket",
        BucketName=bucket,
        VersioningConfiguration={"Status": "Enabled"},
        LifecycleConfiguration=lifecycle,
        **CLOSED,
    )
    policy = {key: told | kept for key, told in (tls_policy() if tls_only else {}).items()}
    outputs = {"Bucket": ref("Bucket"), "Arn": att("Bucket", "Arn")}
    return assemble("Castra: the bucket of a store.", {"Bucket": made | kept} | policy, outputs)
