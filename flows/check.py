"""Is everything there? Credentials, region, quotas, capacity, tools, server, store: a line each, ok or how to fix it.

python -m flows.check recipes/llama3-8b-p5.yaml --aws
"""

from clusters.base import Refused
from flows._command import command
from flows._house import verb
from recipes import Recipe
from tasks import doctor


@verb("check", description=__doc__)
def check(recipe: Recipe = Recipe()) -> str:
    """Examine everything that can be examined without creating anything; fails if something is missing."""
    found = doctor.look(recipe)
    missing = [finding.what for finding in found if not finding.ok]
    if missing:
        raise Refused(f"{len(missing)} of {len(found)} need a fix: {', '.join(missing)}")
    return f"all {len(found)} are as they should be"


if __name__ == "__main__":
    command(check, __doc__)
