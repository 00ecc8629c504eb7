"""Which image a recipe's nodes start from."""

import pytest

from clusters.aws import Site
from clusters.base import Refused
from recipes import Recipe
from tasks import image, image_wanted
from tests.sky import emulator, site

__all__ = ["emulator", "site"]


def recipe(**told: str) -> Recipe:
    cluster = {"kind": "slurm", "instance_type": "p5.4xlarge", "nodes": 2}
    return Recipe.model_validate({"cluster": cluster, "store": "s3://castra-wanted", "image": told})


@pytest.mark.usefixtures("site")
def test_a_recipe_whose_image_is_no_question_is_left_alone() -> None:
    for one in (Recipe(), recipe(), recipe(flavour="pcluster-gpu", ami="ami-0123456789abcdef0")):
        assert image_wanted.settled(one) == one


@pytest.mark.usefixtures("site")
def test_the_emulator_leaves_aws_s_flavours_to_aws_s_own_images() -> None:
    one = recipe(flavour="pcluster-gpu")
    assert image_wanted.settled(one) == one
    with pytest.raises(Refused, match="add --aws"):
        image.build(one)


def test_on_aws_a_recipe_takes_the_image_of_its_flavour_and_is_refused_while_there_is_none(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulator stands for AWS here, where every flavour can be baked."""
    monkeypatch.setattr("ami.flavour.Flavour.emulated", True)
    one = recipe(flavour="pcluster-gpu")
    with pytest.raises(Refused, match="is not baked yet"):
        image_wanted.settled(one)
    assert image_wanted.wanted("pcluster-gpu").regions == (site.region,)


def test_an_image_is_wanted_in_every_region_once_the_first_is_where_it_is_baked(site: Site) -> None:
    wanted = image_wanted.wanted("local", ("us-west-2", "us-east-1", "us-west-2"))
    assert wanted.regions == ("us-west-2", "us-east-1")
    assert (wanted.site.region, wanted.site.endpoint) == ("us-west-2", site.endpoint)
    assert image_wanted.found(wanted) == {}
    assert wanted.digest == image_wanted.wanted("local").digest, "Debian's image has one id in the emulator's regions"
