"""A model's whole life: plan, image, cluster, data, proof of the network, training, score, export, speech, and home.

    python -m flows.lifecycle recipes/rehearsal.yaml
    python -m flows.lifecycle recipes/llama3-8b-p4de.yaml --rehearse

Every stage finds what is done already, so a run that was killed, cancelled or that failed is simply run again.
"""

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
from flows.validate import validate
from recipes import Recipe
from tasks import model, summary
from tasks.job import cluster_of
from tasks.lineage import STEPS, trace


@verb("lifecycle", description=__doc__)
def lifecycle(recipe: Recipe = Recipe()) -> str:
    """Take the recipe from text to a promoted Hugging Face folder, and leave nothing running."""
    with alone(recipe):
        plan(recipe)  # what it costs, before anything is created; refuses what does not fit
        cluster_of(recipe)  # and a cluster that cannot be driven
        build_image(recipe)
        lineage = trace(recipe)
        if waiting := lineage.unfinished():
            with camp(recipe):  # provisioned on the way in; struck on the way out, whatever happens in between
                preprocess(recipe)
                if "train" in waiting:
                    validate(recipe)  # a cluster is proven before it is paid to train
                train(recipe)
                score(recipe)
                export(recipe)
                serve(recipe)
        model.promote_once(lineage)
        return summary.show(lineage, skipped=len(STEPS) - len(waiting))


if __name__ == "__main__":
    command(lifecycle, __doc__)
