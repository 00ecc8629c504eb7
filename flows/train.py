"""Train the model on all nodes, from its newest checkpoint if there is one.

python -m flows.train recipes/rehearsal.yaml --set train.steps=200
python -m flows.train recipes/cases/megatron-gpt3-7b.yaml --kind batch --render    # shows it all, starts nothing
"""

import sys

if __name__ == "__main__" and "--render" in sys.argv:  # Prefect's import alone would take longer
    from flows._render import command as show

    show(__doc__)

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import model
from tasks.lineage import trace


@verb("train", description=__doc__)
def train(recipe: Recipe = Recipe()) -> str:
    """Train to the recipe's last step, unless that is done already."""
    with alone(recipe) as settled:
        facts = (trained := model.train(trace(settled))).facts
        if "loss_first" not in facts:
            return f"measured {trained.key}: {len(facts.get('rows', []))} rows in {facts['seconds']:.0f} s"
        return f"trained {trained.key}: loss {facts['loss_first']:.3f} to {facts['loss_last']:.3f}"


if __name__ == "__main__":
    command(train, __doc__)
