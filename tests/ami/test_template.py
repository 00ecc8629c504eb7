"""The template, in the dialects of both Packers, and the playbook's roles."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import hcl2
import pytest

from ami import packer, stage

KEYS = Path(__file__).with_name("amazon_ebs_keys_1.8.2.txt")
NEW = {"metadata_options", "imds_support"}
"""What Debian's Packer does not know."""
BLOCKS = {"launch_block_device_mappings"}
"""Repeated blocks, which the plugin's list of names leaves to their own."""
needs_packer = pytest.mark.skipif(not shutil.which("packer") and not os.environ.get("CI"), reason="needs packer")


def source(version: tuple[int, int]) -> dict[str, Any]:
    found = hcl2.loads(stage.template(version))
    told = json.loads(json.dumps(found))["source"][0]
    for name in ("amazon-ebs", '"amazon-ebs"'):
        told = told.get(name, told)
    (inner,) = told.values()
    return {key: value for key, value in inner.items() if not key.startswith("__")}


def test_every_option_is_one_that_the_current_plugin_has() -> None:
    known = set(KEYS.read_text().split())
    assert not set(source((1, 11))) - known - BLOCKS


def test_the_old_dialect_leaves_out_what_is_new_and_nothing_else() -> None:
    assert set(source((1, 11))) - set(source((1, 6))) == NEW
    assert "required_plugins" in stage.template((1, 16))
    assert "required_plugins" not in stage.template((1, 6))
    assert "# >>>" not in stage.template((1, 6))


def test_tokens_are_required_and_the_root_is_encrypted() -> None:
    told = source((1, 11))
    assert "required" in str(told["metadata_options"])
    assert "True" in str(told["launch_block_device_mappings"][0]["encrypted"])
    assert "terminate" in told["shutdown_behavior"]
    assert "shutdown -h" in told["user_data"]


@needs_packer
def test_debians_packer_takes_the_template(tmp_path: Path, environment: dict[str, str]) -> None:
    program = str(shutil.which("packer"))
    told = re.findall(r'variable "(\w+)" \{\n  type\s+= (\w+)', stage.TEMPLATE.read_text())
    some: dict[str, Any] = {name: {"string": "x", "number": 22, "map": {"a": "b"}}[kind] for name, kind in told}
    stage.stage(tmp_path, stage.packer_version(program), some, {})
    words = [program, "validate", "-syntax-only", str(tmp_path / "packer")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_roles_are_told_in_their_order(tmp_path: Path) -> None:
    roles = {"packages": "install", "base": "install"}
    stage.stage(tmp_path, (1, 6), {}, {"image_roles": roles})
    assert list(json.loads((tmp_path / "playbook.json").read_text())["image_roles"]) == ["packages", "base"]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "tmp").mkdir()
    there = packer.environment(tmp_path)
    there["ANSIBLE_CONFIG"] = str(stage.ANSIBLE / "ansible.cfg")
    return os.environ | there | {"NO_COLOR": "1", "XDG_CACHE_HOME": str(tmp_path / "cache"), "HOME": str(tmp_path)}


def test_roles_pass_the_strictest_profile_of_ansible_lint(environment: dict[str, str]) -> None:
    words = [str(Path(sys.executable).with_name("ansible-lint")), "--offline", "-q"]
    done = subprocess.run(
        words, cwd=stage.ANSIBLE, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ansible_loads_every_task_of_every_role(tmp_path: Path, environment: dict[str, str]) -> None:
    """Statically, for the playbook chooses its roles while it runs. Nothing is run."""
    entries = sorted((stage.ANSIBLE / "roles").glob("*/tasks/*.yml"))
    tasks = [
        {"name": str(path), "ansible.builtin.import_role": {"name": path.parts[-3], "tasks_from": path.name}}
        for path in entries
    ]
    (tmp_path / "all.yml").write_text(json.dumps([{"hosts": "localhost", "tasks": tasks}]))
    words = [str(Path(sys.executable).with_name("ansible-playbook")), "--syntax-check", "-i", "localhost,"]
    for playbook in (stage.PLAYBOOK, tmp_path / "all.yml"):
        done = subprocess.run(
            [*words, str(playbook)], env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
