"""What Packer and Ansible say, and what is made of it."""

import json
from pathlib import Path

import pytest

from ami import packer
from ami.base import ImageError
from ami.playbook import event_line
from tasks.image_follow import Reader, Story


def test_a_line_is_understood_with_its_commas_and_line_ends() -> None:
    line = packer.line("1700000000,amazon-ebs.node,ui,say,one%!(PACKER_COMMA) two\\nthree\n")
    assert line is not None
    assert (line.kind, line.text, line.error) == ("ui", "one, two\nthree", "")
    wrong = packer.line("1700000000,,ui,error,Build 'x' errored: no")
    assert wrong is not None
    assert wrong.error == "Build 'x' errored: no"
    assert packer.line("Warning: something, else") is None
    assert packer.line("") is None


def test_the_images_of_the_last_run_count(tmp_path: Path) -> None:
    runs = [
        {"packer_run_uuid": "old", "artifact_id": "us-east-1:ami-0"},
        {"packer_run_uuid": "new", "artifact_id": "us-east-1:ami-1,us-west-2:ami-2"},
    ]
    (tmp_path / "manifest.json").write_text(json.dumps({"builds": runs, "last_run_uuid": "new"}))
    assert packer.images(tmp_path) == {"us-east-1": "ami-1", "us-west-2": "ami-2"}
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(ImageError, match="named no image"):
        packer.images(tmp_path)


def test_a_missing_program_is_named_with_where_it_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match=r"packer is not on PATH.*apt-get install packer"):
        packer.programs()


def test_secrets_are_not_in_what_packer_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "sesame")
    told = packer.command("packer", tmp_path), packer.environment(tmp_path)
    assert "sesame" not in str(told)


@pytest.mark.parametrize(
    ("why", "passing"),
    [
        ("Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 12", True),
        ("Timeout waiting for SSH.", True),
        ("InsufficientInstanceCapacity: no p5.48xlarge", True),
        ("RequestLimitExceeded", True),
        ("No package matching 'slrm' is available", False),
        ("Slurm is 21.08, versions.yaml expects 22.05 or newer", False),
    ],
)
def test_only_what_passes_by_itself_is_tried_again(why: str, passing: bool) -> None:
    story = Story(("slurm",))
    story.take_event({"event": "playbook_on_task_start", "role": "slurm", "task": "Install", "host": ""})
    failed = {"event": "runner_on_failed", "role": "slurm", "task": "Install", "host": "node", "why": why}
    story.take_event(failed | {"seconds": 1.0, "changed": False, "ignored": False})
    failure = story.failure("local@1")
    assert failure.passing is passing
    assert "task 'Install' of role slurm failed on node" in str(failure)
    assert why in str(failure)


def test_a_failed_item_of_a_loop_says_why() -> None:
    items = [{"failed": False, "msg": "fine"}, {"failed": True, "msg": "no", "stderr": "disk full"}]
    result = {"msg": "One or more items failed", "results": items}
    line = event_line({"event": "runner_on_failed", "event_data": {"task": "t", "role": "r", "res": result}})
    assert line is not None
    assert line["why"] == "no; disk full"


def test_versions_that_a_role_found_are_on_the_bill() -> None:
    story = Story(("slurm",))
    facts = {"ansible_facts": {"slurm_found": {"slurm": "22.05.8"}}}
    event = {"event": "runner_on_ok", "event_data": {"task": "Note", "role": "slurm", "res": facts}}
    line = event_line(event)
    assert line is not None
    story.take_event(line)
    assert story.bill == {"slurm": "22.05.8"}
    assert event_line({"event": "verbose", "event_data": {}}) is None


def test_a_growing_file_is_read_in_whole_lines(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "log")
    assert reader.lines() == []
    (tmp_path / "log").write_text("one\ntw")
    assert reader.lines() == ["one"]
    (tmp_path / "log").write_text("one\ntwo\n")
    assert reader.lines() == ["two"]
