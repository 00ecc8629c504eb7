"""The one place where AWS clients are made: which endpoint, which retries, and errors told in one sentence.

`AWS_ENDPOINT_URL` points everything at an emulator. `Site` remembers where a thing was made, so that it is looked for
there later, whatever the environment says then.
"""

import contextlib
import http.client
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from clusters.base import ClusterError, Refused, Unreachable

if TYPE_CHECKING:
    from mypy_boto3_cloudformation import CloudFormationClient
    from mypy_boto3_s3 import S3Client

EMULATOR_PATH = "/castra/emulator"
"""An emulator that keeps everything in memory answers here with `{"memory": "<its name>"}`."""
ANYBODY = "castra"
"""Both keys of who talks to such an emulator: real ones never leave for a place that is not AWS."""

_making = threading.Lock()


@dataclass(frozen=True, slots=True)
class Site:
    """A region of AWS, or of what stands in for it behind `endpoint`."""

    region: str
    endpoint: str = ""
    """Empty is AWS itself."""
    memory: str = ""
    """Names the running emulator that keeps all in memory: once it has gone, so has everything in it."""

    def __str__(self) -> str:
        return f"{self.region} at {self.endpoint}" if self.endpoint else self.region

    @classmethod
    def at(cls, address: Mapping[str, str]) -> "Site":
        """The site of a cluster's address, which says more than that."""
        return cls(*(address.get(name, "") for name in ("region", "endpoint", "memory")))


def here(region: str | None = None) -> Site:
    """The site that the environment points at (`AWS_ENDPOINT_URL`, `AWS_REGION`, the profile); raises `Refused`."""
    region = region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or _profile_region()
    if not region:
        raise Refused("no AWS region is set: name one in the recipe (cluster.region) or set AWS_REGION")
    endpoint = os.environ.get("AWS_ENDPOINT_URL", "").rstrip("/")
    return Site(region, endpoint, _memory(endpoint) if _is_loopback(endpoint) else "")


def vanished(site: Site) -> bool:
    """Whether the site was the memory of an emulator that is gone; raises `Unreachable` if it is too busy to say."""
    return bool(site.memory) and _memory(site.endpoint) != site.memory


def cloudformation(site: Site) -> "CloudFormationClient":
    """A client with adaptive retries and time limits; safe to share between threads."""
    return cast("CloudFormationClient", _client("cloudformation", site))


def s3(site: Site) -> "S3Client":
    """A client with adaptive retries and time limits; safe to share between threads."""
    return cast("S3Client", _client("s3", site))


def client(site: Site, service: str, attempts: int | None = None) -> Any:
    """A client of any service, with adaptive retries and time limits; safe to share between threads.

    `attempts` is 1 for a request that must not be sent twice, because its answer may be lost and it takes no token.
    """
    return _client(service, site, attempts)


def bucket_exists(bucket: str, site: Site) -> bool:
    """Whether there is a bucket of that name that we may use; raises `Refused` if it is somebody else's."""
    from botocore.exceptions import ClientError

    with sentences(site, f"bucket {bucket}"):
        try:
            s3(site).head_bucket(Bucket=bucket)
        except ClientError as error:
            if error.response["Error"]["Code"] not in ("404", "NoSuchBucket"):
                raise
            return False
    return True


def terminate(site: Site, instances: Sequence[str]) -> str:
    """Terminate EC2 instances; returns that in words. Fine on instances that are gone."""
    named = ", ".join(instances)
    with sentences(site, f"terminate {named}"):
        ec2 = client(site, "ec2")
        try:
            ec2.terminate_instances(InstanceIds=list(instances))
        except ec2.exceptions.ClientError as error:
            if error.response["Error"]["Code"] != "InvalidInstanceID.NotFound":
                raise
            return f"{named} is gone already"
    return f"{named} is terminated"


@contextlib.contextmanager
def sentences(site: Site, doing: str) -> Iterator[None]:
    """Tell what AWS answers as `Unreachable` (try again), `Refused` (do not) or `ClusterError`, in one sentence."""
    from botocore import exceptions as aws

    try:
        yield
    except (aws.HTTPClientError, aws.ConnectionError) as error:
        raise Unreachable(f"{doing}: AWS in {site} does not answer; check the network, then run again") from error
    except aws.ClientError as error:
        raise _told(error.response.get("Error", {}), doing, site) from error
    except (aws.NoCredentialsError, aws.PartialCredentialsError, aws.ProfileNotFound, aws.TokenRetrievalError) as error:
        raise Refused(f"{doing}: no AWS credentials ({error}); log in, or set AWS_PROFILE") from error
    except aws.BotoCoreError as error:
        raise ClusterError(f"{doing}: {error}") from error


def _told(error: Any, doing: str, site: Site) -> ClusterError:
    code, message = error.get("Code", "?"), str(error.get("Message", "")).rstrip(".")
    if (
        "Throttl" in code
        or "TooManyRequests" in code
        or code in ("RequestLimitExceeded", "ServiceUnavailable", "InternalFailure", "500", "503")
    ):
        return Unreachable(f"{doing}: AWS in {site} is overloaded ({code}); run again in a moment")
    if code in ("ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"):
        return Refused(f"{doing}: AWS does not accept the credentials ({code}); log in again")
    if "AccessDenied" in code or code in ("UnauthorizedOperation", "403"):
        return Refused(f"{doing}: not allowed ({message}); ask for that permission")
    return ClusterError(f"{doing}: AWS in {site} answers {code}: {message}")


def _client(service: str, site: Site, attempts: int | None = None) -> Any:
    if not site.endpoint and os.environ.get("AWS_ENDPOINT_URL"):
        # the credentials at hand are an emulator's then
        raise Unreachable(f"{site} means AWS itself, but AWS_ENDPOINT_URL is set: unset it, then run again")
    with _making, sentences(site, f"prepare for {service}"):
        return _made(service, site, attempts or (5 if site.endpoint else 10))


@cache
def _session(region: str, key: str | None) -> Any:
    """One for all services: it reads botocore's common data once."""
    import boto3

    return boto3.session.Session(aws_access_key_id=key, aws_secret_access_key=key, region_name=region)


@cache
def _made(service: str, site: Site, attempts: int) -> Any:
    from botocore.config import Config

    config = Config(
        retries={"mode": "adaptive", "total_max_attempts": attempts},
        connect_timeout=5,
        read_timeout=60,
    )
    session = _session(site.region, ANYBODY if site.memory else None)
    return session.client(service, endpoint_url=site.endpoint or None, config=config)


def _profile_region() -> str | None:
    import boto3
    from botocore.exceptions import BotoCoreError

    try:
        return boto3.session.Session().region_name
    except BotoCoreError as error:
        raise Refused(f"the AWS profile cannot be read ({error}); fix AWS_PROFILE or ~/.aws/config") from error


def _is_loopback(endpoint: str) -> bool:
    return urlsplit(endpoint).hostname in ("127.0.0.1", "localhost", "::1")


def _memory(endpoint: str) -> str:
    """The name of the emulator behind the endpoint; "" if there is none (any more), or something else listens."""
    host = urlsplit(endpoint)
    line = http.client.HTTPConnection(host.hostname or "", host.port, timeout=10)
    try:
        line.request("GET", EMULATOR_PATH)
        return str(json.loads(line.getresponse().read())["memory"])
    except TimeoutError as error:
        raise Unreachable(f"the emulator at {endpoint} does not answer within 10 s; run again in a moment") from error
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return ""
    finally:
        line.close()
