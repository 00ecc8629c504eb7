"""Whether this machine has what bakes a recipe's image and its container."""

import shutil

import pytest

from recipes import Recipe
from tasks import doctor


def findings(**image: str) -> dict[str, bool]:
    return {one.what: one.ok for one in doctor._images(Recipe.model_validate({"image": image}))}


def test_the_tools_of_an_image_are_looked_for_only_where_one_is_baked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert findings() == {}
    assert findings(flavour="eks-gpu", ami="ami-0123456789abcdef0") == {}
    assert findings(container="public.ecr.aws/somebody/torch:1") == {}
    monkeypatch.setenv("PATH", "/nowhere")
    found = findings(flavour="eks-gpu", container="123456789012.dkr.ecr.us-east-1.amazonaws.com/castra/gpu:1")
    assert found.keys() == {"tool packer", "tool ansible-playbook", "tool ssh", "tool podman"}
    assert not any(ok for what, ok in found.items() if what != "tool ansible-playbook")


def test_what_is_on_path_is_found() -> None:
    found = findings(flavour="eks-gpu")
    assert found["tool ssh"] == (shutil.which("ssh") is not None)
