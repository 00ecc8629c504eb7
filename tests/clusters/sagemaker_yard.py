"""SageMaker for the tests: training jobs of the emulator, which really run, and the adapter in front of it."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from botocore.exceptions import ClientError

from clusters import aws
from clusters.base import Job
from clusters.sagemaker import SageMakerCluster
from store import open_store
from tests.clusters.batch_yard import BUCKET, ROLE, network
from tests.sky import client


class SageMakerYard(SageMakerCluster):
    """The adapter, for jobs of the yard: what they write goes to S3, for SageMaker writes nowhere else."""

    def render(self, job: Job) -> dict[str, Any]:
        return super().render(self._there(job))

    def submit(self, job: Job) -> str:
        return super().submit(self._there(job))

    def _there(self, job: Job) -> Job:
        if str(job.config["output"]).startswith("s3://"):
            return job
        return dataclasses.replace(job, config={**job.config, "output": f"{self.store.url}/output/{job.name}"})


INSTANCE = "g5.xlarge"
_networks: dict[str, dict[str, list[str]]] = {}


def sagemaker(folder: Path, **more: str) -> SageMakerYard:
    """The adapter for training jobs of the emulator that AWS_ENDPOINT_URL leads to, as the fixture `site` sees to.

    `more` goes into the address.
    """
    site = aws.here()
    if site.endpoint not in _networks:
        _networks[site.endpoint] = network(site.endpoint)
        with contextlib.suppress(ClientError):
            client("s3", site.endpoint).create_bucket(Bucket=BUCKET)
    address = {
        "cluster": "sagemaker",
        "region": site.region,
        "endpoint": site.endpoint,
        "memory": site.memory,
        "Role": ROLE,
        "PrivateSubnet": _networks[site.endpoint]["subnets"][0],
        "SecurityGroup": _networks[site.endpoint]["securityGroupIds"][0],
        "image": "python:3.11",
        "instance_type": INSTANCE,
        "grace_s": "1",
    }
    return SageMakerYard(address | more, open_store(f"s3://{BUCKET}/{folder.name}"))
