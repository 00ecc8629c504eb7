"""From raw text to packed tokens."""

from clusters.base import Refused
from store.manifest import Manifest
from tasks import report
from tasks.lineage import Lineage
from tasks.step import Program, carry_out
from tasks.watch import Follower


def preprocess(lineage: Lineage) -> Manifest:
    """Clean, deduplicate, split, tokenise and pack the recipe's data."""
    nodes, there = lineage.recipe.data.nodes, lineage.recipe.cluster.nodes
    if nodes > there:
        raise Refused(f"data.nodes is {nodes} and the cluster has {there}: lower it, or raise cluster.nodes")
    program = Program("training.data.prepare", nodes=nodes)
    manifest = carry_out(lineage, "preprocess", program, Follower("preprocess"))
    facts = manifest.facts
    rows = [
        {"split": split.replace("_", "-"), **{name: facts[split][name] for name in ("documents", "bytes", "tokens")}}
        for split in ("train", "held_out")
    ]
    rows += [{"split": f"from {source}", **told} for source, told in sorted(facts.get("sources", {}).items())]
    report.table("token-ledger", rows, f"Tokens of {manifest.key}, by split and by source")
    dropped = [{"reason": reason, "documents": count} for reason, count in sorted(facts["dropped"].items())]
    report.table("dropped-documents", dropped, "Documents left out, by reason")
    return manifest
