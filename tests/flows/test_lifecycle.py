"""The whole life as a user runs it: once, twice, killed, stopped, twice at once, and fed nonsense."""

import json
import shutil
import signal
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.camp import LOOPBACK, TINY, Camp

pytestmark = [pytest.mark.torch, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Camp, str]]:
    """A life that was run to its end, and what it printed."""
    camp = Camp(tmp_path_factory.mktemp("finished"))
    code, told = camp.run("lifecycle", camp.recipe())
    assert code == 0, told
    yield camp, told
    assert camp.processes(5) == []


def facts(camp: Camp, step: str) -> dict[str, object]:
    """What the manifest of a step says."""
    (manifest,) = camp.folder.glob(f".castra/store/{step}/*/manifest.json")
    told: dict[str, object] = json.loads(manifest.read_text())["facts"]
    return told


def open_ledger(camp: Camp) -> list[str]:
    """What the ledger says may exist."""
    entries = (json.loads(path.read_text()) for path in camp.folder.glob(".castra/store/ledger/*/*.json"))
    return [entry["name"] for entry in entries if entry["state"] != "gone"]


def test_a_life_ends_in_a_model_that_a_stranger_can_load(finished: tuple[Camp, str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    camp, told = finished
    (folder,) = camp.folder.glob(".castra/store/export/*/hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = AutoTokenizer.from_pretrained(folder)("import os", return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=2).shape[1] > tokens["input_ids"].shape[1]
    assert "inventory empty" in told
    assert str(facts(camp, "export")["weights_sha256"]) in told


def test_it_leaves_no_process_and_no_resource(finished: tuple[Camp, str]) -> None:
    camp, _ = finished
    assert camp.processes(5) == []
    assert open_ledger(camp) == []


def test_the_loss_falls(finished: tuple[Camp, str]) -> None:
    trained = facts(finished[0], "train")
    assert isinstance(trained["loss_first"], float)
    assert isinstance(trained["loss_last"], float)
    assert trained["loss_last"] < trained["loss_first"] - 0.5


def test_a_second_run_does_nothing_again(finished: tuple[Camp, str]) -> None:
    camp, _ = finished
    before = {path: path.stat().st_mtime_ns for path in camp.folder.glob(".castra/store/*/*/manifest.json")}
    code, told = camp.run("lifecycle", camp.folder / "tiny.yaml")
    assert code == 0, told
    assert "5 of 5 steps were done already" in told
    assert before == {path: path.stat().st_mtime_ns for path in camp.folder.glob(".castra/store/*/*/manifest.json")}


def test_killed_in_training_it_cleans_up_and_a_rerun_ends_in_the_same_weights(
    finished: tuple[Camp, str], user_camp: Camp
) -> None:
    run = user_camp.start("lifecycle", user_camp.recipe())
    user_camp.wait_for(".castra/store/train/*/checkpoints/step-00000010")
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert user_camp.processes(12) == []
    code, told = user_camp.run("lifecycle", user_camp.folder / "tiny.yaml")
    assert code == 0, told
    assert "preprocess: done already" in told
    assert facts(user_camp, "train")["resumed_from"] is not None
    assert facts(user_camp, "export")["weights_sha256"] == facts(finished[0], "export")["weights_sha256"]
    assert open_ledger(user_camp) == []
    assert user_camp.processes(5) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_in_training_it_saves_strikes_the_camp_and_ends(user_camp: Camp, number: signal.Signals) -> None:
    run = user_camp.start("lifecycle", user_camp.recipe(TINY.replace("steps: 40", "steps: 4000")))
    user_camp.wait_for(".castra/store/train/*/checkpoints/step-00000010")
    assert set(user_camp.listeners()) <= set(LOOPBACK)
    run.send_signal(number)
    told, _ = run.communicate(timeout=40)
    assert run.returncode not in (0, None), told
    assert "Traceback" not in told
    assert "striking the camp" in told
    assert user_camp.processes(12) == []
    assert open_ledger(user_camp) == []


def test_two_at_once_the_second_says_who_runs(user_camp: Camp) -> None:
    first = user_camp.start("lifecycle", user_camp.recipe(TINY.replace("steps: 40", "steps: 4000")))
    user_camp.wait_for(".castra/store/leases/tiny.json")
    code, told = user_camp.run("lifecycle", user_camp.folder / "tiny.yaml")
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=40)
    assert code == 1
    assert f"tiny is being run by process {first.pid}" in told
    assert "Traceback" not in told


def test_a_model_that_misses_its_gate_is_not_exported(finished: tuple[Camp, str], user_camp: Camp) -> None:
    shutil.copytree(finished[0].folder / ".castra" / "store", user_camp.folder / ".castra" / "store")
    shutil.rmtree(user_camp.folder / ".castra" / "store" / "export")
    strict = user_camp.recipe(TINY.replace("must_beat: []", "must_beat: [], max_bits_per_byte: 0.1"))
    code, told = user_camp.run("lifecycle", strict)
    assert code == 1
    assert "score.max_bits_per_byte allows 0.100" in told
    assert list(user_camp.folder.glob(".castra/store/export/*/manifest.json")) == []
    assert open_ledger(user_camp) == []


def test_two_ranks_serve_what_one_process_serves(finished: tuple[Camp, str], user_camp: Camp) -> None:
    alone = facts(finished[0], "serve")
    shutil.copytree(finished[0].folder / ".castra/store", user_camp.folder / ".castra/store")
    shutil.rmtree(user_camp.folder / ".castra/store/serve")
    two = TINY.replace("serve: {", "serve: {tp: 2, ")
    code, told = user_camp.run("serve", user_camp.recipe(two))
    assert code == 0, told
    together = facts(user_camp, "serve")
    assert (alone["ranks"], together["ranks"]) == (1, 2)
    assert together["samples"] == alone["samples"]


def test_wrong_recipes_are_told_before_anything_is_created(user_camp: Camp) -> None:
    code, told = user_camp.run("lifecycle", user_camp.recipe("name: tiny\ntrain:\n  stepz: 3\n"))
    assert code == 2
    assert "line 3" in told
    assert "did you mean" in told
    assert not (user_camp.folder / ".castra" / "store").exists()


def test_a_store_that_cannot_be_written_is_one_sentence(user_camp: Camp) -> None:
    (user_camp.folder / "taken").write_text("a file")
    code, told = user_camp.run("lifecycle", user_camp.recipe(), "--set", "store=taken")
    assert code == 2
    assert "is not a folder" in told
    assert "Traceback" not in told


def test_a_step_alone_says_what_it_needs_first(user_camp: Camp) -> None:
    code, told = user_camp.run("score", user_camp.recipe())
    assert code == 1
    assert "run `python -m flows.preprocess" in told


def test_a_cloud_recipe_is_planned_and_not_started_on_this_machine(user_camp: Camp) -> None:
    cloud = user_camp.recipe("name: cloud\ncluster: {kind: slurm, instance_type: p4de.24xlarge, nodes: 2}\n")
    for verb in ("lifecycle", "train"):
        code, told = user_camp.run(verb, cloud)
        assert code == 2
        assert "16 ranks: add --rehearse --on slurm" in told
    assert not (user_camp.folder / ".castra" / "store").exists()
    code, told = user_camp.run("plan", cloud)
    assert code == 0, told
    assert "$" in told


def test_what_a_killed_run_provisioned_is_struck_by_the_next(user_camp: Camp) -> None:
    run = user_camp.start("lifecycle", user_camp.recipe())
    user_camp.wait_for(".castra/store/ledger/tiny/*.json")
    time.sleep(0.5)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    code, told = user_camp.run("teardown", user_camp.folder / "tiny.yaml")
    assert code == 0, told
    assert open_ledger(user_camp) == []


def test_the_path_of_the_store_may_have_spaces(tmp_path: Path) -> None:
    camp = Camp(tmp_path / "my models")
    camp.folder.mkdir()
    code, told = camp.run("plan", camp.recipe())
    assert code == 0, told


@pytest.fixture
def writer(user_camp: Camp) -> Camp:
    """A user with a folder of text of their own."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    for folder, count in (("text", 60), ("more", 90)):
        (user_camp.folder / folder).mkdir()
        for source in sources[:count]:
            shutil.copy(source, user_camp.folder / folder)
    user_camp.recipe(
        TINY.replace("max_documents: 200", "source: text, held_out: 0.1").replace("steps: 40", "steps: 20")
    )
    return user_camp


def in_use(camp: Camp) -> dict[str, Any]:
    """The record of the promoted model."""
    told: dict[str, Any] = json.loads((camp.folder / ".castra/store/promoted/tiny.json").read_text())
    return told


def test_retraining_keeps_promotes_and_rolls_back(writer: Camp) -> None:
    code, told = writer.run("retrain", writer.folder / "tiny.yaml")
    assert code == 1
    assert "run `python -m flows.lifecycle` first" in told
    assert writer.run("lifecycle", writer.folder / "tiny.yaml")[0] == 0
    first = in_use(writer)["models"][-1]["export"]

    code, told = writer.run("retrain", writer.folder / "tiny.yaml")
    assert code == 0, told
    assert "the data is what" in told
    assert in_use(writer)["models"][-1]["export"] == first

    code, told = writer.run("retrain", writer.folder / "tiny.yaml", "--set", "data.source=more")
    assert code == 0, told
    second = in_use(writer)
    assert second["models"][-1]["export"] != first
    assert "it gains" in second["reason"]

    code, told = writer.run("rollback", writer.folder / "tiny.yaml")
    assert code == 0, told
    assert in_use(writer)["models"][-1]["export"] == first
    assert open_ledger(writer) == []
