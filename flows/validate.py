"""Prove the cluster before it is paid to train: bucket, nodes, collectives; and replace the nodes that fail.

python -m flows.validate recipes/rehearsal.yaml
python -m flows.validate recipes/llama3-8b-p5.yaml --aws --set checks.level=full
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import check, phrases
from tasks.lineage import trace


@verb("validate", description=__doc__)
def validate(recipe: Recipe = Recipe()) -> str:
    """Run the checks of the recipe's level on all nodes; fails if the cluster is not fit to train on."""
    with alone(recipe) as settled:
        told, proof = check.bucket(settled), check.prove(trace(settled))
        found = f"{proof.ranks} ranks, sums right, all-reduce up to {proof.busbw_gbps:.2f} GB/s busbw"
        changed = f"; {phrases.count(proof.replaced, 'node')} replaced" * bool(proof.replaced)
        warned = f"; {phrases.count(proof.warnings, 'warning')}, see the artifact findings" * bool(proof.warnings)
        return f"{found}{changed}{warned}; {told}"


if __name__ == "__main__":
    command(validate, __doc__)
