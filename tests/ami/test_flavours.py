"""Flavours, pinned versions, what goes together, and the hash of it all."""

from pathlib import Path

import pytest

from ami import compatibility, container, flavour, stage, versions
from ami.base import ImageError
from ami.flavour import Flavour
from ami.versions import Pin

LOCAL = flavour.load("local")


def digest(kind: Flavour, base: str = "ami-1", **told: object) -> str:
    return stage.digest(kind, {"versions": versions.told(kind), **told}, base)


@pytest.mark.parametrize("name", flavour.names())
def test_every_flavour_can_be_baked_as_it_is_written(name: str) -> None:
    kind = flavour.load(name)
    versions.check(kind)
    compatibility.check(kind)
    assert list(kind.roles)[-3:] == ["image_facts", "verify", "clean"]
    for role, mode in kind.roles.items():
        assert (stage.ANSIBLE / "roles" / role / "tasks" / f"{mode}.yml").is_file(), role


def test_every_role_is_used_in_every_mode_that_it_has() -> None:
    kinds = [*map(flavour.load, flavour.names()), *map(container.load, container.names())]
    used = {(role, mode) for kind in kinds for role, mode in kind.roles.items()}
    proven = {role for role, mode in used if mode == "install"}
    for place in (stage.ANSIBLE / "roles").glob("*/tasks/install.yml"):
        assert (place.parts[-3], "install") in used
    for place in (stage.ANSIBLE / "roles").glob("*/tasks/assert.yml"):
        assert place.parts[-3] in proven or (place.parts[-3], "assert") in used
    assert {role for role, _ in used} == set(flavour.ROLES)


def test_all_recipes_can_name_every_flavour() -> None:
    from typing import get_args

    from recipes import spec

    assert sorted(get_args(spec.Flavour)) == list(flavour.names())


def test_roles_run_in_one_order_however_they_are_written(tmp_path: Path) -> None:
    told = (flavour.FLAVOURS / "local.yaml").read_text()
    head, _, _ = told.partition("roles:")
    (tmp_path / "mine.yaml").write_text(f"{head}roles: {{clean: install, base: install}}\n")
    assert list(flavour.load(str(tmp_path / "mine.yaml")).roles) == ["base", "clean"]


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("roles: {nvidia: install}", "there is no role 'nvidia'"),
        ("roles: {base: remove}", "roles.base"),
        ("roles: {base: install}\nrols: {}", "rols"),
        ("[1]", "is not a flavour"),
    ],
)
def test_a_badly_written_flavour_is_refused_in_a_sentence(tmp_path: Path, written: str, sentence: str) -> None:
    told = (flavour.FLAVOURS / "local.yaml").read_text().partition("roles:")[0]
    (tmp_path / "mine.yaml").write_text(written if written.startswith("[") else f"{told}{written}\n")
    with pytest.raises(ImageError, match=sentence) as error:
        flavour.load(str(tmp_path / "mine.yaml"))
    assert "\n" not in str(error.value)


def test_an_unknown_flavour_is_refused_with_the_nearest() -> None:
    with pytest.raises(ImageError, match="did you mean 'pcluster-gpu'"):
        flavour.load("pcluster-gp")


def test_what_nothing_proves_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = {"slurm": {"slurm": Pin(version="1", source="file", url="https://example.org/slurm.tar.gz")}}
    monkeypatch.setattr(versions, "load", lambda: bare)
    with pytest.raises(ImageError, match=r"slurm\.slurm 1 has no checksum"):
        versions.check(LOCAL)
    versions.check(LOCAL.model_copy(update={"roles": {"slurm": "assert"}}))


def test_every_pin_that_is_installed_is_proven() -> None:
    for pins in versions.load().values():
        assert all(pin.proven for pin in pins.values())
        assert all(pin.url.startswith("https://") for pin in pins.values() if pin.source in ("file", "git"))


@pytest.mark.parametrize(
    ("made_of", "sentence"),
    [
        ({"cuda.toolkit": "13.2", "nvidia_driver.driver": "570.10"}, "needs nvidia_driver.driver >=580, not 570.10"),
        ({"efa.installer": "1.51.0", "os": "debian-12"}, "needs os ubuntu-24.04"),
        ({"nccl.nccl": "2.30.4-1", "efa.base": "1.30.0"}, "OFI-NCCL"),
        ({"nccl.nccl": "2.30.4-1", "cuda.toolkit": "11.8"}, "built for CUDA 12 and 13"),
        ({"lustre_client.client": "2.15", "os": "amazon-linux-2023", "kernel": "5.10"}, "take a newer base image"),
        ({"parallelcluster": "3.16.1", "os": "ubuntu-24.04", "slurm.slurm": "26.05"}, "brings Slurm 25.11.8"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_fix(made_of: dict[str, str], sentence: str) -> None:
    (problem,) = compatibility.problems(made_of)
    assert sentence in problem


def test_a_flavour_that_does_not_go_together_is_refused_by_name() -> None:
    old = flavour.load("eks-gpu").model_copy(update={"kernel": "5.10"})
    with pytest.raises(ImageError, match="flavour eks-gpu: "):
        compatibility.check(old)


def test_the_hash_covers_what_goes_into_the_image_and_nothing_else() -> None:
    first = digest(LOCAL)
    assert first == digest(LOCAL.model_copy(update={"description": "in other words"}))
    others = [
        digest(LOCAL, base="ami-2"),
        digest(LOCAL, more=1),
        digest(LOCAL.model_copy(update={"instance_type": "m7i.xlarge"})),
        digest(LOCAL.model_copy(update={"roles": {"base": "install"}})),
        digest(LOCAL.model_copy(update={"variables": {}})),
    ]
    assert len({first, *others}) == 6


def test_a_role_that_is_not_used_does_not_change_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shutil import copytree

    copytree(stage.ANSIBLE, tmp_path / "ansible")
    monkeypatch.setattr(stage, "ANSIBLE", tmp_path / "ansible")
    monkeypatch.setattr(stage, "ROOT", Path("/"))
    before = digest(LOCAL)
    (tmp_path / "ansible/roles/cuda/tasks/assert.yml").write_text("---\n")
    assert digest(LOCAL) == before
    (tmp_path / "ansible/roles/base/tasks/install.yml").write_text("---\n")
    assert digest(LOCAL) != before


def test_mistakes_that_others_made_are_not_made_here() -> None:
    """awslabs/awsome-distributed-ai at 95b939c: settings for everybody, misspelt sysctls, dead mirrors, lost files."""
    roles = [path for path in (stage.ANSIBLE / "roles").rglob("*") if path.is_file()]
    for wrong in ("LD_PRELOAD", "NCCL_PROTO", "=brr", ": brr", "64436", "mirrorlist", "/tmp/enroot.conf", "profile.d"):
        assert [path for path in roles if wrong in path.read_text()] == [], wrong
    from_git = [pin for pins in versions.load().values() for pin in pins.values() if pin.source == "git"]
    assert from_git
    assert all(pin.commit for pin in from_git)
