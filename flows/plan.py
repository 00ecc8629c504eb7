"""What the recipe will take: memory, step time, dollars, and what would be created. Creates nothing.

python -m flows.plan recipes/llama3-8b-p4de.yaml
"""

from flows._command import command
from flows._house import verb
from recipes import Recipe
from tasks import plan as planning


@verb("plan", description=__doc__)
def plan(recipe: Recipe = Recipe()) -> str:
    """Plan the recipe; fails if it does not fit the cluster or the budget."""
    return planning.show(recipe)


if __name__ == "__main__":
    command(plan, __doc__)
