"""Write the model as a Hugging Face folder, and prove that it computes what the trained model computes.

python -m flows.export recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import model
from tasks.lineage import trace


@verb("export", description=__doc__)
def export(recipe: Recipe = Recipe()) -> str:
    """Export a model that passed its gate, unless that is done already."""
    with alone(recipe) as settled:
        lineage = trace(settled)
        model.gate(lineage, lineage.done("score"))
        exported = model.export(lineage)
        return f"exported {exported.key}, largest logit difference {exported.facts['parity_max_abs_diff']:.1e}"


if __name__ == "__main__":
    command(export, __doc__)
