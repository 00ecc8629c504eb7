"""From raw text to packed tokens."""

from store.manifest import Manifest
from tasks import report
from tasks.lineage import Lineage
from tasks.step import Program, carry_out
from tasks.watch import Follower

PREPARE = Program("training.data.prepare")


def preprocess(lineage: Lineage) -> Manifest:
    """Clean, deduplicate, split, tokenise and pack the recipe's data."""
    manifest = carry_out(lineage, "preprocess", PREPARE, Follower("preprocess"))
    facts = manifest.facts
    rows = [
        {"split": split.replace("_", "-"), **{name: facts[split][name] for name in ("documents", "bytes", "tokens")}}
        for split in ("train", "held_out")
    ]
    report.table("token-ledger", rows, f"Tokens of {manifest.key}, by split")
    dropped = [{"reason": reason, "documents": count} for reason, count in sorted(facts["dropped"].items())]
    report.table("dropped-documents", dropped, "Documents left out, by reason")
    return manifest
