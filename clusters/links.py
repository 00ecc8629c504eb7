"""Where to look: the pages of AWS's console about a cluster, a job of it, and their logs, from the address alone.

A page is named by its URL's fragment, which the console decodes twice for log groups (`/` is `$252F`). Sources, read
2026-11: Amazon CloudWatch Logs user guide and Lambda's own link format for #logsV2; the console's pages themselves.
Nothing here was opened: a page needs somebody who is signed in to the account.
"""

from collections.abc import Iterator, Mapping
from urllib.parse import quote

from clusters.base import Address
from recipes import Recipe
from recipes.cluster import SlurmCluster

SAGEMAKER_JOBS = "/aws/sagemaker/TrainingJobs"
CONSOLES = {"cn-": "console.amazonaws.cn", "us-gov-": "console.amazonaws-us-gov.com"}
"""Where the console of regions outside the common partition is, by how their names begin."""
Link = tuple[str, str]


def links(recipe: Recipe, address: Address | None, job_id: str = "") -> list[Link]:
    """Titles and URLs of what there is to see of a cluster, and of one of its jobs; none where AWS is emulated.

    `address` is that of the cluster that stands for the recipe (`tasks.ground.Ground.address`), None on this machine.
    """
    if address is None or address.get("endpoint") or not address.get("region"):
        return []
    page = _Console(address["region"])
    kinds = {"batch": _batch, "eks": _eks, "sagemaker": _sagemaker, "slurm": _slurm}
    if address.get("cluster") not in kinds:
        return []
    stacks = page("stacks of this run", "cloudformation", f"/stacks?filteringText={_quoted(f'castra-{recipe.name}')}")
    return [*kinds[address["cluster"]](page, recipe, address, job_id), stacks]


class _Console:
    """Pages of one region."""

    def __init__(self, region: str) -> None:
        host = next((host for start, host in CONSOLES.items() if region.startswith(start)), "console.aws.amazon.com")
        self._region = region
        self._base = f"https://{region}.{host}" if host == "console.aws.amazon.com" else f"https://{host}"

    def __call__(self, title: str, service: str, fragment: str) -> Link:
        """A page of a service."""
        return title, f"{self._base}/{service}/home?region={self._region}#{fragment}"

    def log_group(self, title: str, name: str) -> Link:
        """A log group."""
        return self(f"{title} ({name})", "cloudwatch", f"logsV2:log-groups/log-group/{_twice(name)}")

    def log_groups(self, title: str, start: str) -> Link:
        """All log groups whose names hold `start`."""
        return self(f"{title} ({start}…)", "cloudwatch", f"logsV2:log-groups$3FlogGroupNameFilter$3D{_twice(start)}")

    def log_streams(self, title: str, group: str, start: str) -> Link:
        """The streams of a log group whose names begin with `start`."""
        told = f"logsV2:log-groups/log-group/{_twice(group)}$3FlogStreamNameFilter$3D{_twice(start)}"
        return self(f"{title} ({group})", "cloudwatch", told)


def _batch(page: _Console, recipe: Recipe, address: Mapping[str, str], job_id: str) -> Iterator[Link]:
    del recipe
    yield page.log_group("log of the jobs", address.get("LogGroup", "/aws/batch/job"))
    if job_id:
        yield page("the job in AWS Batch", "batch", f"jobs/detail/{_quoted(job_id)}")
    if queue := address.get("JobQueue"):
        yield page("its queue", "batch", f"queues/detail/{_quoted(queue)}")


def _eks(page: _Console, recipe: Recipe, address: Mapping[str, str], job_id: str) -> Iterator[Link]:
    """Pods' own logs are in Kubernetes alone, unless the cluster ships them elsewhere."""
    del job_id
    name = address.get("Cluster") or f"castra-{recipe.name}"
    yield page("the cluster in Amazon EKS", "eks", f"/clusters/{_quoted(name)}")
    yield page.log_group("log of the control plane", f"/aws/eks/{name}/cluster")


def _sagemaker(page: _Console, recipe: Recipe, address: Mapping[str, str], job_id: str) -> Iterator[Link]:
    del recipe, address
    if not job_id:
        yield page.log_group("log of the jobs", SAGEMAKER_JOBS)
        return
    yield page.log_streams("log of the job", SAGEMAKER_JOBS, f"{job_id}/")
    yield page("the job in SageMaker", "sagemaker", f"/jobs/{_quoted(job_id)}")


def _slurm(page: _Console, recipe: Recipe, address: Mapping[str, str], job_id: str) -> Iterator[Link]:
    """A job's own log is on the cluster's file system."""
    del job_id
    name = f"castra-{recipe.name}"
    flavour = recipe.cluster.flavour if isinstance(recipe.cluster, SlurmCluster) else ""
    if flavour == "hyperpod":
        yield page("the cluster in SageMaker HyperPod", "sagemaker", f"/cluster-management/{_quoted(name)}")
        yield page.log_groups("logs of its nodes", f"/aws/sagemaker/Clusters/{name}")
    elif flavour == "pcs":
        if found := address.get("PcsCluster"):
            yield page("the cluster in AWS PCS", "pcs", f"/clusters/{_quoted(found)}")
    else:
        yield page.log_groups("logs of its nodes", f"/aws/parallelcluster/{name}")


def _quoted(text: str) -> str:
    return quote(text, safe="")


def _twice(text: str) -> str:
    """A text as the console's CloudWatch pages take it: percent-encoded twice, with `$` for the first percent sign."""
    return quote(quote(text, safe=""), safe="").replace("%", "$")
