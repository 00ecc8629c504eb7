"""The machine image the nodes start from."""

import shutil

from clusters.base import Refused
from recipes.spec import Recipe


def build(recipe: Recipe) -> str:
    """Make sure that the recipe's image exists; returns what was done. Raises `Refused` for a flavour it cannot bake.

    The local flavour is this machine as it is: nothing is baked.
    """
    if recipe.image.flavour != "local":
        raise Refused(
            f"image.flavour {recipe.image.flavour!r} cannot be baked yet: --rehearse runs on this machine as it is"
        )
    found = "packer is here but has nothing to do" if shutil.which("packer") else "packer is not installed"
    return f"skipped, the nodes are this machine as it is ({found})"
