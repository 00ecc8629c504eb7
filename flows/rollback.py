"""Put the model that was in use before the current one in use again.

python -m flows.rollback recipes/rehearsal.yaml
"""

from flows._command import command
from flows._house import alone, verb
from recipes import Recipe
from store import open_store
from tasks import promotion, report


@verb("rollback", description=__doc__)
def rollback(recipe: Recipe = Recipe()) -> str:
    """Undo the last promotion; nothing is deleted."""
    with alone(recipe):
        record = promotion.roll_back(open_store(recipe.store), recipe.name)
        assert record.current is not None
        report.say(f"rollback: {record.current.export} is in use again")
        return f"{record.current.export} is in use again"


if __name__ == "__main__":
    command(rollback, __doc__)
