"""Train, score, export, and let the model speak."""

import math
import time
from dataclasses import replace
from uuid import UUID

from store.manifest import Manifest, Place
from tasks import learning, promotion, report
from tasks.lineage import Lineage, NotDone
from tasks.machines import command, machine, processes_per_node
from tasks.step import Program, carry_out
from tasks.watch import Follower, Metrics
from training import cases
from training.cases.base import Command


class GateClosed(Exception):
    """The model did not pass its score gate; the text says which figure missed which limit."""


class LossCurve(Follower):
    """Follows a training job and keeps one picture of its loss and throughput current."""

    REDRAW_S = 10.0

    def __init__(self, vocab_size: int) -> None:
        super().__init__("train", _figures)
        self._uniform = math.log(vocab_size)
        self._page: UUID | None = None
        self._drawn = 0.0

    def take(self, line: str, bar: report.Bar) -> None:
        """Look at one log line, and redraw the curve now and then."""
        super().take(line, bar)
        if self.trained and time.monotonic() - self._drawn > self.REDRAW_S:
            self._drawn = time.monotonic()
            self._show()

    @property
    def trained(self) -> list[tuple[int, Metrics]]:
        """What was told of optimizer steps; a benchmark tells other things."""
        return [(step, told) for step, told in self.history if {"loss", "tokens_per_second"} <= told.keys()]

    def _show(self) -> None:
        markdown = self.markdown()
        if self._page is None:
            self._page = report.page("loss", markdown, "Training loss and throughput, live")
        else:
            report.rewrite(self._page, markdown)

    def markdown(self) -> str:
        """The picture, with the newest figures in words."""
        from tasks import pictures  # matplotlib costs half a second that a skipped step need not pay

        losses = [(float(step), metrics["loss"]) for step, metrics in self.trained]
        speed = [(float(step), metrics["tokens_per_second"]) for step, metrics in self.trained]
        step, newest = self.trained[-1]
        return f"{pictures.loss_curve(losses, speed, self._uniform)}\n\nstep {step}: {_figures(newest)}\n"

    def finish(self) -> None:
        """Draw the curve a last time."""
        if self.trained:
            self._show()


def _figures(metrics: Metrics) -> str:
    if not {"loss", "tokens_per_second"} <= metrics.keys():
        return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())
    return f"loss {metrics['loss']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"


def train(lineage: Lineage) -> Manifest:
    """Train the model on all nodes, resuming from its checkpoints where there are any."""
    told, theirs = lineage.recipe.train, command(lineage.recipe)
    program = Program("training.run", everywhere=True, timeout_s=int(told.timeout_hours * 3600), attempts=told.attempts)
    follower = LossCurve(lineage.recipe.model.vocab_size)
    if theirs is not None:
        return _run_case(lineage, program, theirs, follower)
    if lineage.recipe.case.program:
        return _measure(lineage, replace(program, module=cases.MEASUREMENTS))
    learning.begin(lineage)
    try:
        manifest = carry_out(lineage, "train", program, follower)
    finally:
        follower.finish()
    report.table("training", [_flat(manifest)], f"What training {manifest.key} came to")
    learning.learn(lineage, manifest, machine(lineage.recipe))
    return manifest


def _measure(lineage: Lineage, program: Program) -> Manifest:
    """Run one of Castra's own measurements; what a calibration takes from them is `flows.validate`'s to say."""
    manifest = carry_out(lineage, "train", program, Follower("train"))
    report.table("measured", manifest.facts["rows"], f"What {lineage.recipe.case.program} came to, {manifest.key}")
    return manifest


def _run_case(lineage: Lineage, program: Program, told: Command, follower: LossCurve) -> Manifest:
    """Run another framework's program; what it measured is its own, and teaches the planner nothing."""
    recipe, ranks = lineage.recipe, processes_per_node(lineage.recipe)
    theirs = replace(program, module=cases.MODULE, each=cases.processes(told, ranks))
    try:
        manifest = carry_out(lineage, "train", theirs, follower, {cases.RANKS: ranks})
    finally:
        follower.finish()
    report.table("training", [_flat(manifest)], f"What {recipe.case.framework} came to, {manifest.key}")
    if rows := manifest.facts.get("rows"):
        report.table("measured", rows, f"What {recipe.case.framework} measured")
    return manifest


def score(lineage: Lineage) -> Manifest:
    """Score the model on text it has not seen, beside what compressors make of the same text."""
    manifest = carry_out(lineage, "score", Program("training.score"), Follower("score"))
    facts = manifest.facts
    rows = [{"model": lineage.recipe.name, "bits_per_byte": facts["bits_per_byte"]}]
    rows += [{"model": name, "bits_per_byte": value} for name, value in sorted(facts["baselines"].items())]
    report.table("score", rows, f"Held-out bits per byte (lower is better); perplexity {facts['perplexity']:.1f}")
    if tasks := facts.get("tasks"):
        report.table("score-tasks", [{"task": task, **told} for task, told in sorted(tasks.items())], "lm-eval")
    return manifest


def gate(lineage: Lineage, scored: Manifest) -> None:
    """Refuse a model that misses the recipe's limits: raises `GateClosed`."""
    facts, rule = scored.facts, lineage.recipe.score
    reached, baselines = float(facts["bits_per_byte"]), facts["baselines"]
    for baseline in rule.must_beat:
        if reached >= (limit := float(baselines[baseline])):
            raise GateClosed(
                f"the model needs {reached:.3f} bits per held-out byte, {baseline} needs {limit:.3f}: train longer "
                f"(train.steps), or take {baseline!r} out of score.must_beat"
            )
    if rule.baseline and reached > (limit := float(baselines["baseline"])):
        raise GateClosed(
            f"the model needs {reached:.3f} bits per held-out byte, score.baseline {rule.baseline} needs {limit:.3f}: "
            "train longer, or take the baseline out"
        )
    for name, unit in (("bits_per_byte", "bits per held-out byte"), ("perplexity", "as its held-out perplexity")):
        limit = getattr(rule, f"max_{name}")
        if limit is not None and facts[name] > limit:
            raise GateClosed(
                f"the model has {facts[name]:.3f} {unit}, score.max_{name} allows {limit:.3f}: train longer, or raise "
                "the limit"
            )


def export(lineage: Lineage) -> Manifest:
    """Write the Hugging Face folder and prove that it computes what the trained model computes."""
    recipe = lineage.recipe
    told = {"name": recipe.name, "inputs": {name: place.key for name, place in lineage.inputs("export").items()}}
    manifest = carry_out(lineage, "export", Program("training.export.hf"), Follower("export"), {"lineage": told})
    facts = manifest.facts
    rows = [
        {"fact": "folder", "value": f"{lineage.store.address(manifest.key)}/hf"},
        {"fact": "parameters", "value": f"{facts['parameters']:,}"},
        {"fact": "largest logit difference to the trained model", "value": f"{facts['parity_max_abs_diff']:.2e}"},
        {"fact": "allowed", "value": f"{recipe.export.parity_tolerance:.0e}"},
        {"fact": "SHA-256 of the weights", "value": facts["weights_sha256"]},
    ]
    if copy := facts.get("quantized"):
        rows += [{"fact": f"quantised copy: {name.replace('_', ' ')}", "value": copy[name]} for name in sorted(copy)]
    if facts.get("pushed"):
        rows.append({"fact": "uploaded to", "value": lineage.recipe.export.push_to})
    report.table("export-proof", rows, f"Proof of the export {manifest.key}")
    return manifest


def serve(lineage: Lineage) -> Manifest:
    """Load the export as a stranger would, or as `serve.tp` ranks do, and let it continue the recipe's prompts."""
    ranks = lineage.recipe.serve.tp
    program = Program("training.export.generate", each=ranks if ranks > 1 else 0)
    manifest = carry_out(lineage, "serve", program, Follower("serve"))
    spoken = "\n".join(f"```python\n{sample['prompt']}{sample['text']}\n```\n" for sample in manifest.facts["samples"])
    report.page("samples", spoken, f"What {manifest.key} writes")
    return manifest


def _flat(manifest: Manifest) -> dict[str, object]:
    return {name: value for name, value in manifest.facts.items() if isinstance(value, int | float | str)}


def score_other(lineage: Lineage, training: Place) -> Manifest:
    """Score another training's model on this lineage's held-out text."""
    other = lineage.with_model(training)
    return carry_out(other, "score", Program("training.score"), Follower("score-in-use"))


def in_use(lineage: Lineage) -> promotion.Model:
    """The promoted model of the recipe's name; raises `NotDone` before the first promotion."""
    if (current := promotion.read(lineage.store, lineage.recipe.name).current) is None:
        raise NotDone(f"no model of {lineage.recipe.name} is in use yet: run `python -m flows.lifecycle` first")
    return current


def promote(lineage: Lineage, reason: str) -> str:
    """Put the lineage's export in use; returns what was done."""
    keys = {step: lineage.places[step].key for step in ("preprocess", "train", "export")}
    reached = float(lineage.done("score").facts["bits_per_byte"])
    chosen = promotion.Model(keys["preprocess"], keys["train"], keys["export"], reached, promotion.now())
    promotion.promote(lineage.store, lineage.recipe.name, chosen, reason)
    report.say(f"promoted: {chosen.export} is in use, because {reason}")
    return f"{chosen.export} is in use: {reason}"


def promote_once(lineage: Lineage) -> None:
    """Put the export of a life that passed its gate in use, unless it was in use before: what came later stays."""
    known = promotion.read(lineage.store, lineage.recipe.name).models
    if lineage.places["export"].key not in {model.export for model in known}:
        promote(lineage, "it passed its gate")
