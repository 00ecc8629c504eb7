"""`python -m clusters render`: every request as a file, with nobody asked and nothing made."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.session import get_session
from botocore.validate import ParamValidator

from clusters import render, validators
from clusters.__main__ import main
from clusters.base import Refused
from clusters.kinds import restarts
from clusters.stacks import architecture
from recipes import Recipe, convert
from recipes.load import RecipeError, load
from tests.clusters.gallery import CONTAINER, KINDS, PLAN, recipe, rung

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
SIZES = ("tp", "pp", "vpp", "cp", "ep", "shard", "micro_batch_size")


def told(files: dict[str, str], name: str) -> Any:
    return json.loads(files[name])


def invalid(service: str, operation: str, request: dict[str, Any]) -> str:
    """What botocore has against a request; nothing if it is fine."""
    shape = get_session().get_service_model(service).operation_model(operation).input_shape
    assert shape is not None
    return str(ParamValidator().validate(request, shape).generate_report())


@pytest.mark.parametrize("kind", convert.KINDS)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_renders_on_every_kind(path: Path, kind: str) -> None:
    one = render.as_kind(load(path), kind)
    assert validators.problems(one) == []
    assert one.cluster.kind == kind
    files = render.requests(one)
    assert set(files) >= {"README.md", "job.json"}
    assert all(f"]({name})" in files["README.md"] for name in files if name != "README.md")
    assert any(name.startswith(f"{kind}/") for name in files)
    assert ("policy.json" in files) == (kind != "local")


@pytest.mark.parametrize("kind", KINDS)
def test_the_stacks_are_those_that_would_be_deployed(kind: str) -> None:
    one = recipe(kind)
    files = render.requests(one)
    stacks = [name for name in files if name.startswith("stacks/")]
    assert stacks[0] == "stacks/0-castra-store-my-models.json"
    wanted = architecture.needed(one, rung(one))
    assert stacks[1:] == [f"stacks/{number}-{stack.name}.json" for number, stack in enumerate(wanted, 1)]
    assert [told(files, name) for name in stacks[1:]] == [stack.template for stack in wanted]


def test_batchs_requests_are_as_botocore_wants_them() -> None:
    files = render.requests(recipe("batch"))
    definition, job = told(files, "batch/register_job_definition.json"), told(files, "batch/submit_job.json")
    assert invalid("batch", "RegisterJobDefinition", definition) == ""
    assert invalid("batch", "SubmitJob", job) == ""
    assert job["jobQueue"] == "${JobQueue}"
    assert CONTAINER in files["batch/register_job_definition.json"]


def test_sagemakers_request_is_as_botocore_wants_it() -> None:
    request = told(render.requests(recipe("sagemaker")), "sagemaker/create_training_job.json")
    assert request["RoleArn"] == "${Role}"
    filled = request | {"RoleArn": "arn:aws:iam::123456789012:role/castra"}
    assert invalid("sagemaker", "CreateTrainingJob", filled) == ""


def test_slurms_script_is_a_script_and_its_cluster_is_yaml() -> None:
    files = render.requests(recipe("parallelcluster"))
    subprocess.run(["bash", "-n"], input=files["slurm/job.sbatch"], text=True, check=True)
    assert yaml.safe_load(files["slurm/cluster.yaml"])["Scheduling"]["Scheduler"] == "slurm"
    assert "slurm/cluster.yaml" not in render.requests(recipe("pcs"))


def test_kubernetes_manifests_come_in_order() -> None:
    made = list(yaml.safe_load_all(render.requests(recipe("eks"))["eks/manifests.yaml"]))
    assert made[0]["kind"] == "Namespace"
    assert made[-1]["kind"] == "Job"


def test_the_job_is_the_recipes_training() -> None:
    job = told(render.requests(recipe("batch")), "job.json")
    assert (job["module"], job["nodes"], job["processes_per_node"]) == ("training.run", 2, 8)
    assert job["output"] == "s3://my-models/castra/train"


MEGATRON = ROOT / "recipes" / "cases" / "megatron-deepspeed-gpt-103b.yaml"
SETTLED = ["parallel.ep=1", "parallel.shard=1"]


@pytest.mark.parametrize("kind", convert.KINDS)
def test_another_framework_s_command_and_its_files_are_among_them(kind: str) -> None:
    one = load(MEGATRON, SETTLED)
    shown = render.stand_in(one) if kind == "local" else render.as_kind(one, kind)
    files = render.requests(shown)
    words = files["case/command.sh"].split()
    assert words[:2] == ["cd", "/opt/Megatron-DeepSpeed"]
    assert {"--nnodes=8", "--nproc-per-node=8", "pretrain_gpt.py", "--deepspeed_config"} <= {*words}
    assert told(files, "case/ds_config.json")["zero_optimization"] == {"stage": 0}
    job = told(files, "job.json")
    assert (job["module"], job["processes_per_node"], job["spec"]["ranks_per_node"]) == ("training.cases.run", 8, 8)
    if kind not in ("local", "slurm"):
        assert shown.image.container == "nvcr.io/nvidia/pytorch:25.04-py3", "the framework's own, where none is named"


def test_an_open_plan_is_left_to_the_plan_and_a_wrong_case_is_refused() -> None:
    files = render.requests(render.as_kind(load(MEGATRON), "batch"))
    assert files["case/command.sh"].endswith("python -m flows.train RECIPE --kind batch --render\n")
    with pytest.raises(Refused, match=r"parallel\.vpp 2 does not go with"):
        render.requests(render.as_kind(load(MEGATRON, [*SETTLED, "parallel.vpp=2"]), "batch"))


def test_what_mpirun_starts_has_one_process_a_node_and_reads_nothing() -> None:
    one = load(
        ROOT / "recipes" / "cases" / "nccl-tests.yaml",
        ["parallel.strategy=ddp", *(f"parallel.{size}=1" for size in SIZES)],
    )
    files = render.requests(render.as_kind(one.model_copy(), "eks"))
    assert "mpirun --np 16 --map-by ppr:8:node build/all_reduce_perf" in files["case/command.sh"]
    job = told(files, "job.json")
    assert (job["processes_per_node"], job["inputs"], job["spec"]["ranks_per_node"]) == (1, {}, 8)


def test_another_kind_keeps_what_is_shared_and_drops_what_it_cannot_take() -> None:
    eks = recipe("eks", nodes=4, zones=["us-east-1b"], capacity=["block:cr-0123456789abcdef0", "spot"])
    batch = render.as_kind(eks, "batch").cluster
    assert batch.kind == "batch"
    assert (batch.nodes, batch.zones, batch.capacity) == (4, ("us-east-1b",), ("block:cr-0123456789abcdef0",))
    trained = render.as_kind(eks, "sagemaker").cluster
    assert trained.kind == "sagemaker"
    assert trained.capacity == ("spot",)
    back = render.as_kind(recipe("sagemaker", capacity=[PLAN]), "eks").cluster
    assert back.kind == "eks"
    assert back.capacity == ("on-demand",)
    assert render.as_kind(eks, "local").cluster.nodes == 2
    assert render.as_kind(eks, "eks") == eks


def test_the_miniature_becomes_something_that_could_run_on_aws() -> None:
    one = render.as_kind(Recipe(), "eks")
    assert (one.store, one.image.container) == (render.SOME_STORE, render.SOME_CONTAINER)
    assert one.cluster.kind == "eks"
    assert one.cluster.instance_type == "p5.4xlarge"
    assert "`your-…`" in render.requests(one)["README.md"]


def test_the_restarts_are_those_a_service_grants() -> None:
    assert restarts("batch", attempts=20, timeout_hours=24) == 9
    assert restarts("sagemaker", attempts=20, timeout_hours=24) == 19
    assert restarts("sagemaker", attempts=20, timeout_hours=120) == 4
    assert restarts("eks", attempts=20, timeout_hours=120) == 19


def test_the_command_needs_neither_network_nor_credentials(tmp_path: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    argv = [sys.executable, "-m", "clusters", "render", str(RECIPES[0]), "--kind", "eks", "--set", "cluster.nodes=4"]
    argv += ["--out", str(tmp_path / "out")]
    done = subprocess.run(argv, env=env, cwd=ROOT, text=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("README.md lists them\n")
    assert json.loads((tmp_path / "out" / "job.json").read_text())["nodes"] == 4


def test_the_policy_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy", str(RECIPES[0]), "--kind", "batch", "--account", "123456789012"]) == 0
    assert json.loads(capsys.readouterr().out)["Version"] == "2012-10-17"


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--set", "cluster.instance_type=p5.49xlarge"], "cluster.instance_type: 'p5.49xlarge' is not"),
        (["--set", "cluster.nodez=4"], "nodez"),
        (["--kind", "batch", "--set", "cluster.capacity=[spot]"], "cluster.capacity: Batch has no spot instances"),
    ],
)
def test_a_mistake_is_a_sentence(
    more: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["render", str(ROOT / "recipes/llama3-8b-p5.yaml"), "--out", str(tmp_path / "out"), *more]) == 2
    assert sentence in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_kind_there_is_not() -> None:
    with pytest.raises(RecipeError, match="'nomad' is not a kind of cluster"):
        render.as_kind(Recipe(), "nomad")
