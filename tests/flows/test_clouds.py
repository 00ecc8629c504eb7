"""Every kind of cluster on emulated AWS: provisioned, found standing, worked on, struck; or refused in a sentence."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusters import keeper
from emulator import aws as emulated
from emulator import slurm
from emulator.aws import Emulator
from tests.camp import Camp
from tests.sky import tell

pytestmark = [pytest.mark.timeout(300)]

TINY = """
name: {name}
data: {{max_documents: 12, sequence_length: 32}}
model: {{hidden_size: 32, layers: 1, heads: 2, kv_heads: 2, ffn_size: 64, vocab_size: 400}}
train: {{steps: 4, global_batch_size: 4, warmup_steps: 1, checkpoint_every: 2}}
score: {{max_tokens: 400, must_beat: []}}
store: s3://castra-clouds
image: {{container: castra-rehearsal}}
cluster: {{kind: {kind}, instance_type: p5.4xlarge, nodes: 2, {more}}}
{rest}
"""

LIFE = """
import json, sys
from pathlib import Path
from benchmarks import mutations
counter = mutations.Counter(Path("requests"))
mutations.install(counter)
from flows.preprocess import preprocess
from flows.provision import provision
from flows.teardown import teardown
from flows.validate import validate
from recipes.load import load
recipe = load(sys.argv[1])
counts = []
for step in map(globals().get, sys.argv[2:]):
    before = counter.count
    state = step(recipe, return_state=True)
    counts.append([step.name, state.is_completed(), str(state.message), counter.count - before])
print(json.dumps(counts))
"""


CLIMB = """
import sys
from benchmarks.failure_matrix import climbing
from recipes.load import load
print(climbing()(load(sys.argv[1]), return_state=True).message)
"""


@pytest.fixture(scope="module")
def sky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Emulator, dict[str, str]]]:
    """An emulator and a Prefect server for all tests here, and the environment that leads to them."""
    from rich.console import Console

    from flows._server import embedded

    folder = tmp_path_factory.mktemp("sky")
    os.environ["CASTRA_STATE"] = str(folder)
    try:
        with emulated.running(folder) as aws, embedded(keeper.free_port(), Console(quiet=True)) as url:
            yield aws, emulated.environment(aws.endpoint) | {"PREFECT_API_URL": f"{url}/api"}
    finally:
        del os.environ["CASTRA_STATE"]


def live(camp: Camp, sky: tuple[Emulator, dict[str, str]], recipe: Path, *steps: str) -> list[list[Any]]:
    """Run flows in one process; for each: its name, whether it completed, its sentence, its changing requests."""
    env = camp.environment() | sky[1] | {"PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", LIFE, str(recipe), *steps]
    done = subprocess.run(argv, cwd=camp.folder, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counts: list[list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return counts


def told(name: str, kind: str, more: str = "", rest: str = "") -> str:
    return TINY.format(name=name, kind=kind, more=more, rest=rest)


@pytest.mark.parametrize("kind", ["slurm", "batch", "eks", "sagemaker"])
def test_a_cluster_of_every_kind_stands_works_and_is_struck(
    kind: str, user_camp: Camp, sky: tuple[Emulator, dict[str, str]]
) -> None:
    if kind == "slurm" and not slurm.possible() and not os.environ.get("CI"):
        pytest.skip("a real Slurm needs root, iproute2 and the packages slurm-wlm and munge")
    recipe = user_camp.recipe(told(f"cloud-{kind}", kind))
    first, second, worked, struck = live(user_camp, sky, recipe, "provision", "provision", "preprocess", "teardown")
    assert all(one[1] for one in (first, second, worked, struck)), (first, second, worked, struck)
    assert first[3] > second[3]
    requests = [name for _, name in map(json.loads, (user_camp.folder / "requests").read_text().splitlines())]
    again = requests[first[3] : first[3] + second[3]]
    assert not [name for name in again if not name.startswith(("PUT /castra-clouds/", "DELETE /castra-clouds/leases"))]
    assert struck[2] == "inventory empty"


ODD = {"kind": "file", "node": 1, "path": "/etc/castra/image.json", "text": '{"software": {"kernel": "0.0.1"}}'}


@pytest.mark.parametrize("kind", ["batch", "eks"])
def test_a_node_that_is_not_what_its_image_was_is_named_and_replaced(
    kind: str, user_camp: Camp, sky: tuple[Emulator, dict[str, str]]
) -> None:
    recipe = user_camp.recipe(told(f"odd-{kind}", kind))
    tell(sky[0].endpoint, "faults", [ODD])
    _, proven, _ = live(user_camp, sky, recipe, "provision", "validate", "teardown")
    assert proven[1], proven
    assert "1 node replaced" in proven[2]


def test_a_cluster_with_too_many_bad_nodes_is_refused_by_name(
    user_camp: Camp, sky: tuple[Emulator, dict[str, str]]
) -> None:
    recipe = user_camp.recipe(told("refused", "sagemaker", rest="checks: {replace: 0}"))
    tell(sky[0].endpoint, "faults", [ODD])
    _, refused, _ = live(user_camp, sky, recipe, "provision", "validate", "teardown")
    assert not refused[1]
    assert re.search(r"train on: \S+: kernel is \S+, the image was proven with 0.0.1", refused[2]), refused[2]


def test_the_ladder_is_climbed_until_there_are_instances(user_camp: Camp, sky: tuple[Emulator, dict[str, str]]) -> None:
    more = "zones: [us-east-1a, us-east-1b], alternatives: [g5.xlarge], patience_minutes: 0.05"
    for zone in ("us-east-1a", "us-east-1b"):
        scarce = {"kind": "capacity", "instance_type": "p5.4xlarge", "zone": zone, "times": 0}
        tell(sky[0].endpoint, "faults", [scarce])
    recipe = user_camp.recipe(told("climber", "batch", more))
    env = user_camp.environment() | sky[1] | {"PYTHONPATH": str(Path(__file__).parents[2])}
    argv = [sys.executable, "-c", CLIMB, str(recipe)]
    done = subprocess.run(argv, cwd=user_camp.folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.splitlines()[-1] == "g5.xlarge", done.stdout + done.stderr


def test_a_quota_that_is_too_small_is_told_by_check_and_refused_by_provision(
    user_camp: Camp, sky: tuple[Emulator, dict[str, str]]
) -> None:
    tell(sky[0].endpoint, "quotas", [{"code": "L-417A185B", "value": 8}])
    user_camp.env |= sky[1]
    recipe = user_camp.recipe(told("narrow", "batch").replace("castra-clouds", "castra-narrow"))
    try:
        code, said = user_camp.run("check", recipe)
        assert code == 1
        assert "✗ quota L-417A185B" in said
        assert "To fix: " in said
        assert "✓ credentials" in said
        code, said = user_camp.run("provision", recipe)
        assert code == 1
        assert "8 vCPUs" in said
        assert "making the bucket" not in said
    finally:
        tell(sky[0].endpoint, "quotas", method="DELETE")


BAD = {
    "placement_group: true, instance_type: p5.48xlarge, capacity: ['block:cr-0123456789abcdef0']": "placement_group",
    "capacity: [spot]": "spot",
    "nodes: 3, instance_type: p5.48xlarge, zones: [us-east-1a, us-west-2b]": "zones",
    "instance_type: p9.48xlarge": "p9.48xlarge",
    "region: eu-west-3, instance_type: p5.48xlarge": "eu-west-3",
    "instance_type: g5.xlarge, nodes: 64": "EFA",
}


@pytest.mark.parametrize("more", BAD)
def test_what_cannot_work_is_refused_in_one_sentence_before_anything_is_made(more: str, user_camp: Camp) -> None:
    recipe = user_camp.recipe(told("bad", "batch").replace("instance_type: p5.4xlarge, nodes: 2, ", more))
    code, said = user_camp.run("provision", recipe)
    assert code in (1, 2), said
    assert BAD[more] in said
    assert "Traceback" not in said
    assert "making" not in said
