"""A model's whole life: plan, image, cluster, data, proof of the network, training, score, export, speech, and home.

    python -m flows.lifecycle recipes/rehearsal.yaml
    python -m flows.lifecycle recipes/llama3-8b-p4de.yaml --rehearse

Every stage finds what is done already, so a run that was killed, cancelled or that failed is simply run again.
"""

from typing import Final

from flows._camp import camp
from flows._command import command
from flows._house import alone, verb
from flows.build_image import build_image
from flows.export import export
from flows.plan import plan
from flows.preprocess import preprocess
from flows.score import score
from flows.serve import serve
from flows.train import train
from recipes import Recipe
from tasks import approval, capacity, model, stack, summary
from tasks.lineage import STEPS, Lineage, not_ours, trace

WORK: Final = {"preprocess": preprocess, "train": train, "score": score, "export": export, "serve": serve}


@verb("lifecycle", description=__doc__)
def lifecycle(recipe: Recipe = Recipe()) -> str:
    """Take the recipe from text to a promoted Hugging Face folder, and leave nothing running."""
    stack.ensure_store(recipe)
    with alone(recipe):
        plan(recipe)  # what it costs, before anything is created; refuses what does not fit
        approval.ask(recipe)
        build_image(recipe)
        lineage = _furthest(recipe)
        if waiting := lineage.unfinished():
            # a cluster is proven before it is paid to train; the camp is struck on the way out, whatever happens
            with camp(recipe, prove="train" in waiting) as settled:
                for name in lineage.steps:
                    WORK[name](settled)
            lineage = trace(settled)
        if lineage.steps != STEPS:
            return f"{summary.foreign(lineage)}; {not_ours(recipe, 'score')}"
        model.promote_once(lineage)
        return summary.show(lineage, skipped=len(STEPS) - len(waiting))


def _furthest(recipe: Recipe) -> Lineage:
    """The lineage on the rung of the capacity ladder on which most is done; a rung decides how many ranks there are."""
    return min((trace(rung) for rung in capacity.rungs(recipe)), key=lambda lineage: len(lineage.unfinished()))


if __name__ == "__main__":
    command(lifecycle, __doc__)
