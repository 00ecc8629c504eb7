"""Every role says which arguments it takes, and Ansible refuses others of the wrong kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ami import packer, stage

ROLES = sorted(path.name for path in (stage.ANSIBLE / "roles").iterdir())
ENTRIES = ("install", "assert", "main")


@pytest.mark.parametrize("role", ROLES)
def test_every_default_of_a_role_is_an_argument_of_all_its_entries(role: str) -> None:
    place = stage.ANSIBLE / "roles" / role
    specs = yaml.safe_load((place / "meta" / "argument_specs.yml").read_text())["argument_specs"]
    assert set(specs) == {path.stem for path in (place / "tasks").glob("*.yml")} & set(ENTRIES)
    defaults = place / "defaults" / "main.yml"
    named = set(yaml.safe_load(defaults.read_text())) if defaults.exists() else set()
    for entry in specs.values():
        assert named <= set(entry.get("options", {}))
        assert all(option["description"] for option in entry.get("options", {}).values())


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        ({"efa_minimal": ["no"], "image_kind": "machine"}, "unable to convert to bool"),
        ({"image_kind": "building"}, "value of image_kind must be one of: machine, container, got: building"),
        ({}, "missing required arguments: image_kind"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused_before_anything_is_done(
    told: dict[str, object], sentence: str, tmp_path: Path
) -> None:
    role = {"ansible.builtin.include_role": {"name": "efa", "tasks_from": "assert"}, "name": "Apply"}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [role]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    common = {"versions": {}, "image_roles": {}, "efa_ofi_nccl": False, "efa_driver": False}
    (tmp_path / "told.json").write_text(json.dumps(common | {"ansible_python_interpreter": sys.executable} | told))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "ansible").symlink_to(stage.ANSIBLE)
    words = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        "-i",
        "localhost,",
        "-e",
        f"@{tmp_path}/told.json",
    ]
    env = os.environ | packer.environment(tmp_path) | {"ANSIBLE_ROLES_PATH": str(stage.ANSIBLE / "roles")}
    done = subprocess.run(
        [*words, str(tmp_path / "play.yml")], env=env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode != 0
    assert sentence in done.stdout
    assert "Ask for the version of libfabric" not in done.stdout
