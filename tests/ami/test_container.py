"""Containers: what they are built from is pinned to the last file, and what their build says is understood."""

import re
from pathlib import Path

import pytest

from ami import compatibility, container, requirements, stage, versions
from ami.base import ImageError
from ami.container import Container


@pytest.mark.parametrize("name", container.names())
def test_every_container_can_be_built_as_it_is_written(name: str, tmp_path: Path) -> None:
    kind = container.load(name)
    versions.check(kind)
    compatibility.check(kind)
    for role, mode in kind.roles.items():
        assert (stage.ANSIBLE / "roles" / role / "tasks" / f"{mode}.yml").is_file(), role
    container.write(tmp_path, kind, "somewhere@sha256:1", {"castra.flavour": name})
    definition = (tmp_path / "Containerfile").read_text()
    assert "\nFROM somewhere@sha256:1\n" in definition
    assert "$" not in definition.partition("\nFROM")[2]
    assert [line for line in definition.splitlines() if line.startswith("ENV PATH=")]
    assert (tmp_path / "bake.sh").is_file()
    assert (tmp_path / "ansible" / "playbooks" / "node.yml").is_file()


@pytest.mark.parametrize("name", container.names())
def test_all_that_pip_installs_has_its_checksums(name: str) -> None:
    for file, text in container.locks(container.load(name)).items():
        rows = re.split(r"\n(?=\S)", text.strip())
        assert all(re.match(r"[a-z0-9.-]+==\S+ \\\n  --hash=sha256:[0-9a-f]{64}", row) for row in rows), file


def test_torch_for_gpus_brings_nccl_and_torch_for_processors_does_not() -> None:
    gpu, local = (container.locks(container.load(name))["training.txt"] for name in ("gpu", "local"))
    assert re.search(r"^torch==", gpu, re.MULTILINE)
    assert re.search(r"^nvidia-nccl-cu\d+==", gpu, re.MULTILINE)
    assert not re.search(r"^(torch|nvidia-|cuda-|triton)", local, re.MULTILINE)
    assert re.search(r"^transformers==", local, re.MULTILINE)
    both = [container.locks(container.load(name))["training-built.txt"] for name in ("gpu", "local")]
    assert all(text.startswith("deepspeed==") for text in both)
    with pytest.raises(ImageError, match=r"nonsense is not in .*lock it first"):
        requirements.locked("debian-12", ["nonsense"])


def test_the_hash_covers_what_goes_into_a_container_and_nothing_else() -> None:
    kind = container.load("gpu")
    known = container.digest(kind, "base")
    assert container.digest(kind.model_copy(update={"description": "another"}), "base") == known
    others = [
        container.digest(kind, "another base"),
        container.digest(kind.model_copy(update={"environment": {"A": "B"}}), "base"),
        container.digest(kind.model_copy(update={"variables": {"efa_minimal": True}}), "base"),
        container.digest(kind.model_copy(update={"variables": {"training_cpu": True}}), "base"),
    ]
    assert len({known, *others}) == 5


def test_a_base_is_named_by_its_digest(tmp_path: Path) -> None:
    text = (container.FLAVOURS / "gpu.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(re.sub(r"@sha256:\w+", "", text))
    with pytest.raises(ImageError, match=r"mine.yaml: base: "):
        container.load(str(tmp_path / "mine.yaml"))
    assert isinstance(container.load("gpu"), Container)


def test_what_ansible_says_in_the_container_is_understood() -> None:
    begun = container.event("TASK [efa : Look for OFI-NCCL] *************")
    assert begun == {"event": "playbook_on_task_start", "role": "efa", "task": "Look for OFI-NCCL", "host": ""}
    assert container.event("changed: [localhost] => (item=one)") == {"event": "runner_on_ok", "changed": True}
    assert container.event("ok: [localhost]") == {"event": "runner_on_ok", "changed": False}
    assert container.event("skipping: [localhost]") is None
    assert container.event("STEP 2/4: RUN sh bake.sh") is None
    said = container.event('fatal: [localhost]: FAILED! => {"changed": false, "msg": "no", "stderr": "because"}')
    assert said is not None
    assert said["why"] == "no; because"
    item = container.event('failed: [localhost] (item=x) => {"ansible_loop_var": "item", "msg": "not x"}')
    assert item is not None
    assert item["why"] == "not x"
    last = 'fatal: [localhost]: FAILED! => {"changed": false, "msg": "One or more items failed", "results": []}'
    assert container.event(last) is None, "of a loop, the item that failed has said it"
