"""The last page of a run: what came out, where it is, what it cost, what to do next."""

from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from store.manifest import Manifest
from tasks import phrases, report
from tasks.lineage import STEPS, Lineage
from tasks.plan import bill


def show(lineage: Lineage, skipped: int) -> str:
    """Show the summary in the UI and on the terminal; returns its headline."""
    done = {step: lineage.done(step) for step in STEPS}
    costs = bill(lineage.recipe)
    facts = _facts(lineage, done, costs)
    report.table("bill", costs, "What this run cost, and what it would have cost on AWS")
    report.page("summary", _markdown(lineage, facts, done), "Summary")
    _print(facts)
    trained, scored = done["train"].facts, done["score"].facts
    return (
        f"{lineage.recipe.name}: loss {trained['loss_first']:.2f} to {trained['loss_last']:.2f}, "
        f"{scored['bits_per_byte']:.3f} bits per byte, {skipped} of {len(STEPS)} steps were done already"
    )


def foreign(lineage: Lineage) -> str:
    """The headline of another framework's training, or of what it measured."""
    recipe, facts = lineage.recipe, lineage.done("train").facts
    report.table("bill", bill(recipe), "What this run cost, and what it would have cost on AWS")
    if "loss_first" not in facts:
        return f"{recipe.name}: {len(facts['rows'])} rows measured by {recipe.case.framework}"
    return f"{recipe.name}: loss {facts['loss_first']:.2f} to {facts['loss_last']:.2f} by {recipe.case.framework}"


def _facts(lineage: Lineage, done: dict[str, Manifest], costs: list[dict[str, str]]) -> dict[str, str]:
    trained, scored, exported = done["train"].facts, done["score"].facts, done["export"].facts
    baselines = ", ".join(f"{name} {value:.3f}" for name, value in sorted(scored["baselines"].items()))
    folder = f"{lineage.store.address(done['export'].key)}/hf"
    return {
        "data": f"{done['preprocess'].facts['train']['tokens']:,} tokens to train on",
        "training loss": f"{trained['loss_first']:.3f} → {trained['loss_last']:.3f} in {trained['steps']} steps "
        f"({phrases.clock(trained['seconds'])}, {trained['tokens_per_second']:,.0f} tokens/s)",
        "bits per held-out byte": f"{scored['bits_per_byte']:.3f} ({baselines})",
        "export": folder,
        "largest logit difference": f"{exported['parity_max_abs_diff']:.1e}",
        "weights, SHA-256": exported["weights_sha256"],
        "cost": "; ".join(f"{row['what']} {row['usd']}" for row in costs),
        "try it": f"AutoModelForCausalLM.from_pretrained({folder!r})",
        "again, on new data": "python -m flows.retrain RECIPE",
        "all of it in the browser": "make ui",
    }


def _markdown(lineage: Lineage, facts: dict[str, str], done: dict[str, Manifest]) -> str:
    from tasks import pictures  # matplotlib costs half a second that a skipped step need not pay

    scored = done["score"].facts
    scores = [(lineage.recipe.name, float(scored["bits_per_byte"])), *sorted(scored["baselines"].items())]
    spoken = "\n".join(f"```python\n{told['prompt']}{told['text']}\n```" for told in done["serve"].facts["samples"])
    places = [{"step": step, "result": manifest.key, "finished": manifest.finished} for step, manifest in done.items()]
    where = f"store: `{lineage.store.url}`\n\n{phrases.grid(places)}"
    return (
        f"# {lineage.recipe.name}\n\n{phrases.grid([{'': name, ' ': value} for name, value in facts.items()])}\n"
        f"{pictures.bars('held-out bits per byte (lower is better)', 'bits per byte', scores)}\n\n"
        f"## What it writes\n\n{spoken}\n\n## Where everything is\n\n{where}"
    )


def _print(facts: dict[str, str]) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in facts.items():
        grid.add_row(name, escape(value))
    phrases.CONSOLE.print(Panel(grid, title="castra", title_align="left", border_style="dim", expand=False))
