"""What the recipe will take: layouts, memory, step time, dollars, and what was refused. Creates nothing.

python -m flows.plan recipes/llama3-8b-p4de.yaml
python -m flows.plan recipes/llama3-70b-p5.yaml --instances p4de.24xlarge,p5.48xlarge --nodes 8..64 --deadline 7d
"""

if __name__ == "__main__":  # Prefect's import alone would take longer than the plan
    import os

    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the matrices are small: threads would wait for each other
    from flows._plan import command

    command(__doc__)
else:
    from flows._house import verb
    from recipes import Recipe
    from tasks import plan as planning

    @verb("plan", description=__doc__)
    def plan(recipe: Recipe = Recipe()) -> str:
        """Plan the recipe; fails if it does not fit the cluster or the budget."""
        return planning.show(recipe)
