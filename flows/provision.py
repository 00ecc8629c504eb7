"""Deploy the ground the recipe's cluster stands on, by a change set that the run shows before it is applied.

python -m flows.provision recipes/rehearsal.yaml --keep
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import stack


@verb("provision", description=__doc__)
def provision(recipe: Recipe = Recipe()) -> str:
    """Provision the camp, or find it standing."""
    with alone(recipe):
        outputs = stack.provision(recipe)
        return f"camp of {recipe.name} stands: {', '.join(sorted(outputs))}"


if __name__ == "__main__":
    command(provision, __doc__)
