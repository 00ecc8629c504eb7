"""Take down everything that exists because of a recipe, and prove it with an empty inventory.

python -m flows.teardown recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import stack


@verb("teardown", description=__doc__)
def teardown(recipe: Recipe = Recipe()) -> str:
    """Strike the camp; what the recipe keeps on purpose stays until it expires."""
    with alone(recipe):
        kept = stack.strike_task(recipe)
        return f"{len(kept)} resources kept on purpose" if kept else "inventory empty"


if __name__ == "__main__":
    command(teardown, __doc__)
