"""Make sure that the machine image of the recipe's nodes exists.

python -m flows.build_image recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import image


@verb("build_image", description=__doc__)
def build_image(recipe: Recipe = Recipe()) -> str:
    """Bake the image, or say why there is nothing to bake."""
    with alone(recipe):
        return image.build(recipe)


if __name__ == "__main__":
    command(build_image, __doc__)
