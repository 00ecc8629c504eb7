"""Look at what a recipe would lead to on its cluster, without making anything.

python -m clusters render recipes/llama3-8b-p5.yaml --out /tmp/requests
python -m clusters render recipes/llama3-8b-p5.yaml --kind eks --set cluster.nodes=4 --out /tmp/requests
python -m clusters policy recipes/llama3-8b-p5.yaml
"""

import argparse
import json
import sys
from pathlib import Path

from clusters import policy, render, validators
from clusters.base import ClusterError
from recipes import Recipe
from recipes.convert import KINDS
from recipes.load import RecipeError, load


def main(argv: list[str] | None = None) -> int:
    """Carry out one command; 2, with a sentence for each mistake, if the recipe or the command is wrong."""
    asked = _parser().parse_args(argv)
    try:
        recipe = _recipe(asked)
        validators.check(recipe)
        asked.run(recipe, asked)
    except (RecipeError, ClusterError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m clusters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="render | policy")
    one = commands.add_parser("render", help="write every request of a recipe, without network or credentials")
    one.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder they go in")
    one.set_defaults(run=_render)
    two = commands.add_parser("policy", help="print the IAM policy of whoever runs a recipe")
    two.add_argument("--account", default="*", metavar="ID", help="for this AWS account only")
    two.set_defaults(run=_policy)
    for command in (one, two):
        command.add_argument("recipe", metavar="RECIPE", help="a recipe file")
        command.add_argument("--kind", choices=KINDS, help="as if its cluster were of this kind")
        command.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="lay over the recipe")
    return parser


def _recipe(asked: argparse.Namespace) -> Recipe:
    """The recipe that is asked for: first another kind, then what is laid over it."""
    if asked.kind is None:
        recipe = load(asked.recipe, asked.set)
        return render.as_kind(recipe, recipe.cluster.kind)
    return load(render.as_kind(load(asked.recipe), asked.kind).model_dump(mode="json"), asked.set)


def _render(recipe: Recipe, asked: argparse.Namespace) -> None:
    written = render.write(recipe, asked.out)
    print(f"{len(written)} files in {asked.out}: {written[0]} lists them")


def _policy(recipe: Recipe, asked: argparse.Namespace) -> None:
    print(json.dumps(policy.policy(recipe, asked.account), indent=1))


if __name__ == "__main__":
    sys.exit(main())
