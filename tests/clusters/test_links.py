"""Links into AWS's console: for every kind, of the job that runs, as the console decodes them; none to an emulator."""

from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from clusters.links import links
from recipes import Recipe

PLACES: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "batch": (
        {},
        {"JobQueue": "arn:aws:batch:us-east-1:1:job-queue/castra-x", "LogGroup": "castra-x-Log-1"},
        "a1b2-c3",
    ),
    "eks": ({}, {"Cluster": "castra-tiny"}, "castra-train-1"),
    "sagemaker": ({}, {}, "castra-train-1"),
    "slurm": ({}, {}, "7.castra-train-1"),
    "slurm pcs": ({"flavour": "pcs"}, {"PcsCluster": "pcs_abc"}, ""),
    "slurm hyperpod": ({"flavour": "hyperpod"}, {}, ""),
}


def found(kind: str, region: str = "us-east-1", job_id: str | None = None, **more: str) -> dict[str, str]:
    fields, outputs, job = PLACES[kind]
    name = kind.partition(" ")[0]
    cluster = {"kind": name, "instance_type": "p5.48xlarge", "nodes": 2} | fields
    recipe = Recipe.model_validate({"name": "tiny", "cluster": cluster})
    return dict(
        links(recipe, {"cluster": name, "region": region, **outputs, **more}, job if job_id is None else job_id)
    )


def groups(told: dict[str, str]) -> list[str]:
    """The log groups, or parts of their names, as the console decodes them."""
    fragments = [urlsplit(url).fragment for url in told.values() if "logsV2" in url]
    shown = [unquote(unquote(fragment.replace("$", "%"))) for fragment in fragments]
    return [one.partition("log-group/")[2] or one.partition("Filter=")[2] for one in shown]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("batch", ["castra-x-Log-1"]),
        ("eks", ["/aws/eks/castra-tiny/cluster"]),
        ("sagemaker", ["/aws/sagemaker/TrainingJobs?logStreamNameFilter=castra-train-1/"]),
        ("slurm", ["/aws/parallelcluster/castra-tiny"]),
        ("slurm pcs", []),
        ("slurm hyperpod", ["/aws/sagemaker/Clusters/castra-tiny"]),
    ],
)
def test_the_log_groups_of_each_kind(kind: str, wanted: list[str]) -> None:
    assert groups(found(kind)) == wanted


@pytest.mark.parametrize("kind", PLACES)
def test_every_link_is_one_page_of_the_region_s_console(kind: str) -> None:
    told = found(kind)
    assert told
    for url in told.values():
        parts = urlsplit(url)
        assert (parts.scheme, parts.netloc) == ("https", "us-east-1.console.aws.amazon.com")
        assert parts.query == "region=us-east-1"
        assert not set(parts.fragment) & set(' "<>')
        assert parts.path.count("/") == 2


def test_the_job_itself_is_linked_where_the_service_has_a_page_for_it() -> None:
    assert found("batch")["the job in AWS Batch"].endswith("/batch/home?region=us-east-1#jobs/detail/a1b2-c3")
    assert found("sagemaker")["the job in SageMaker"].endswith("#/jobs/castra-train-1")
    queue = found("batch")["its queue"].partition("#queues/detail/")[2]
    assert unquote(queue) == PLACES["batch"][1]["JobQueue"]
    without = found("batch", job_id=""), found("sagemaker", job_id="")
    assert not any("the job in" in title for told in without for title in told)


@pytest.mark.parametrize(
    ("region", "host"), [("cn-north-1", "console.amazonaws.cn"), ("us-gov-west-1", "console.amazonaws-us-gov.com")]
)
def test_other_partitions_have_consoles_of_their_own(region: str, host: str) -> None:
    assert {urlsplit(url).netloc for url in found("batch", region).values()} == {host}


def test_there_is_nothing_to_see_of_what_is_emulated_or_on_this_machine() -> None:
    assert found("batch", endpoint="http://127.0.0.1:5000") == {}
    assert links(Recipe(), None) == []
    assert links(Recipe(), {"cluster": "local", "region": "us-east-1"}) == []
