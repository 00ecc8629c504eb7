"""Score the trained model on text it has not seen, and hold it to the recipe's gate.

python -m flows.score recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import model
from tasks.lineage import trace


@verb("score", description=__doc__)
def score(recipe: Recipe = Recipe()) -> str:
    """Score the model, unless that is done already; fails if the model misses a limit of the gate."""
    with alone(recipe) as settled:
        lineage = trace(settled)
        scored = model.score(lineage)
        model.gate(lineage, scored)
        baselines = ", ".join(f"{name} {value:.3f}" for name, value in sorted(scored.facts["baselines"].items()))
        return f"{scored.facts['bits_per_byte']:.3f} bits per byte ({baselines})"


if __name__ == "__main__":
    command(score, __doc__)
