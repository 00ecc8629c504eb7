"""Load the export as a stranger would, and let it continue the recipe's prompts.

python -m flows.serve recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import model
from tasks.lineage import trace


@verb("serve", description=__doc__)
def serve(recipe: Recipe = Recipe()) -> str:
    """Check that the exported model speaks, unless that is done already."""
    with alone(recipe) as settled:
        spoken = model.serve(trace(settled))
        return f"{len(spoken.facts['samples'])} prompts continued by {spoken.inputs['export']}"


if __name__ == "__main__":
    command(serve, __doc__)
