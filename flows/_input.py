"""What every command line reads, and how it refuses: a recipe, the options all share, one sentence for a mistake.

Nothing here knows Prefect, so that a plan by hand need not wait for it.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import cyclopts
from cyclopts import Parameter
from rich.markup import escape

from clusters.base import ClusterError
from recipes import Recipe
from recipes.convert import KINDS, on
from recipes.load import RecipeError, load
from recipes.rehearse import rehearse
from store import StoreError
from tasks.phrases import CONSOLE

MISTAKES: tuple[type[Exception], ...] = (ClusterError, RecipeError, StoreError)
"""Failures whose text is a sentence for the user; everything else is a defect of ours and keeps its traceback."""

RecipePath = Annotated[Path, Parameter(help="The recipe, a YAML file.")]
Sets = Annotated[
    list[str] | None, Parameter("--set", negative="", help="Change a field: train.steps=200. Can be given again.")
]
Rehearse = Annotated[
    bool, Parameter("--rehearse", negative="", help="Shrink the recipe to two nodes on this machine: nothing is paid.")
]
On = Annotated[
    str | None,
    Parameter("--on", help=f"Run it on another kind of cluster: {', '.join(KINDS)}; with --rehearse, emulated."),
]
Real = Annotated[
    bool,
    Parameter("--aws", negative="", help="On AWS itself, with your credentials, for money; else AWS is emulated."),
]


def launch(run: Any, name: str, help_text: str | None) -> None:
    """Parse the command line for `run`, with help and errors in the house's style."""
    app = cyclopts.App(name=f"python -m flows.{name}", help=help_text, help_format="plaintext", version_flags=[])
    app.default(run)
    app()


@contextlib.contextmanager
def sentences(mistakes: tuple[type[Exception], ...]) -> Iterator[None]:
    """Turn a user's mistake into one sentence on standard error and exit code 2."""
    try:
        yield
    except mistakes as mistake:
        _refuse(str(mistake))
    except BrokenPipeError:  # whoever read has seen enough, as `head` does; what is still to be written goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except OSError as error:  # Castra's own folder on this machine: everything else tells its own sentence
        place = error.filename or "the disk"
        _refuse(f"{place}: {error.strerror}; work in a folder you may write to, or set CASTRA_STATE to one")
    except KeyboardInterrupt:
        CONSOLE.print("[bold red]✗[/] stopped", highlight=False)
        sys.exit(130)


def _refuse(sentence: str) -> NoReturn:
    CONSOLE.print(f"[bold red]✗[/] {escape(sentence)}", highlight=False, soft_wrap=True)
    sys.exit(2)


def read(path: Path, sets: list[str], *, kind: str | None, shrink: bool, keep: bool = False) -> Recipe:
    """Load a recipe as the command line asks for it; raises `RecipeError`."""
    recipe = load(path, sets)
    if shrink:
        recipe, notes = rehearse(recipe)
        for note in notes:
            CONSOLE.print(f"  rehearsal: {note}", highlight=False, soft_wrap=True)
    if kind:
        recipe = on(recipe, kind, small=shrink)
    return recipe.model_copy(update={"keep": True}) if keep else recipe
