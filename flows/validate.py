"""Prove the cluster before it is paid to train: bucket reachable, every rank there, sums right.

python -m flows.validate recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import check
from tasks.lineage import trace


@verb("validate", description=__doc__)
def validate(recipe: Recipe = Recipe()) -> str:
    """Run the network check on all ranks; fails if the cluster is not fit to train on."""
    with alone(recipe) as settled:
        told, proof = check.bucket(settled), check.network(trace(settled))
        return f"{proof.ranks} ranks, sums right, all-reduce up to {proof.busbw_gbps:.2f} GB/s busbw; {told}"


if __name__ == "__main__":
    command(validate, __doc__)
