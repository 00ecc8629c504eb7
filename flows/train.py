"""Train the model on all nodes, from its newest checkpoint if there is one.

python -m flows.train recipes/rehearsal.yaml --set train.steps=200
"""

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
        return f"trained {trained.key}: loss {facts['loss_first']:.3f} to {facts['loss_last']:.3f}"


if __name__ == "__main__":
    command(train, __doc__)
