"""Train the promoted model further on new data, and put the result in use only if it is better.

python -m flows.retrain recipes/rehearsal.yaml --set data.source=/new/text
"""

from flows._camp import camp
from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import data, model, promotion, report
from tasks.lineage import Ancestor, Lineage, trace


@verb("retrain", description=__doc__)
def retrain(recipe: Recipe = Recipe(), min_gain: float = 0.0) -> str:
    """Preprocess, train from the last promoted model, score both on the new held-out text, promote the better one.

    `min_gain` is how many bits per byte the new model must be better by. The first model of a name is made by the
    lifecycle flow.
    """
    with alone(recipe):
        current = model.in_use(trace(recipe))
        ancestor = Ancestor(promotion.place(current.dataset), promotion.place(current.export))
        lineage = trace(recipe, ancestor)
        if _nothing_new(lineage, current):
            return _keep(lineage, f"the data is what {current.export} was trained on")
        with camp(recipe, prove=False) as settled:
            lineage = trace(settled, ancestor)
            data.preprocess(lineage)
            model.train(lineage)
            new, old = model.score(lineage), model.score_other(lineage, promotion.place(current.training))
            model.gate(lineage, new)
            gain = old.facts["bits_per_byte"] - new.facts["bits_per_byte"]
            if gain <= min_gain:
                return _keep(lineage, f"the new model gains {gain:.4f} bits per byte, {min_gain:.4f} is asked for")
            model.export(lineage)
            model.serve(lineage)
        return model.promote(lineage, f"it gains {gain:.4f} bits per byte over {current.export}")


def _nothing_new(lineage: Lineage, current: promotion.Model) -> bool:
    before = lineage.source_of(promotion.place(current.dataset))
    return before == lineage.source_of(lineage.places["preprocess"])


def _keep(lineage: Lineage, why: str) -> str:
    promotion.keep(lineage.store, lineage.recipe.name, f"kept: {why}")
    report.say(f"retrain: the model in use stays, because {why}")
    return f"kept the model in use: {why}"


if __name__ == "__main__":
    command(retrain, __doc__)
