"""Deploy the ground the recipe's cluster stands on, by a change set that the run shows before it is applied.

python -m flows.provision recipes/rehearsal.yaml --keep
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import approval, stack


@verb("provision", description=__doc__)
def provision(recipe: Recipe = Recipe(), zones: tuple[str, ...] = ()) -> str:
    """Provision the camp on the first rung of the capacity ladder whose stacks come up, or find it standing.

    `zones` are those the network spans, where that is more than this recipe names: it is a rung of another then.
    """
    stack.ensure_store(recipe)
    with alone(recipe):
        approval.ask(recipe)
        outputs = stack.climb(recipe, zones)
        return f"camp of {recipe.name} stands: {', '.join(sorted(outputs))}"


if __name__ == "__main__":
    command(provision, __doc__)
