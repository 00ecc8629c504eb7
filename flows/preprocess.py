"""Turn the recipe's text into packed tokens: clean, deduplicate, split, tokenise, pack.

python -m flows.preprocess recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from tasks import data
from tasks.lineage import trace


@verb("preprocess", description=__doc__)
def preprocess(recipe: Recipe = Recipe()) -> str:
    """Make the dataset, unless it is made already."""
    with alone(recipe) as settled:
        return f"dataset {data.preprocess(trace(settled)).key}"


if __name__ == "__main__":
    command(preprocess, __doc__)
