"""What people see of a cluster's proof: the nodes, what is wrong with them, the bandwidths as a picture and a CSV."""

import base64
import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tasks import phrases, report
from training.checks.finding import Finding

if TYPE_CHECKING:
    from tasks.check import Stage

COLUMNS = ("collective", "bytes", "seconds", "algbw_gbps", "busbw_gbps")
PANELS = {"algorithm bandwidth (algbw)": "algbw_gbps", "bus bandwidth (busbw)": "busbw_gbps"}
FEW = 8
"""Nodes that a row names."""


def show(stages: "Sequence[Stage]") -> None:
    """Show all that the programs found, and `findings`: what is wrong, over all of them."""
    shown = {"nodes": _nodes, "network": _network, "pairs": _pairs, "calibrate": _calibration}
    for stage in stages:
        shown[stage.name](stage.result)
    rows = _grouped([one for stage in stages for one in stage.findings])
    report.table("findings", rows or [{"what": "nothing is wrong"}], "What the checks of the cluster found")


def _grouped(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """One row for what many nodes have in common, gravest first."""
    nodes: dict[Finding, list[str]] = {}
    for one in sorted(findings, key=lambda finding: finding.gravity):
        nodes.setdefault(replace(one, node=""), []).append(one.node)
    return [asdict(one) | {"node": ", ".join(named[:FEW]) + f" and {len(named) - FEW} more" * (len(named) > FEW)}
            for one, named in nodes.items()]  # fmt: skip


def _nodes(found: Mapping[str, Any]) -> None:
    rows = [{"host": one["host"], **one["software"]} for one in found["nodes"]]
    report.table("nodes", rows, "What runs on the nodes")
    differences = found["differences"] or [{"what": "none"}]
    report.table("node-differences", differences, "Where one node differs from the others")


def _network(found: Mapping[str, Any]) -> None:
    from tasks import pictures  # matplotlib costs half a second that a skipped step need not pay

    rows = [{name: row[name] for name in COLUMNS if name in row} for row in found["rows"]]
    kinds = dict.fromkeys(row["collective"] for row in rows)
    panels = {
        title: {kind: [(row["bytes"], row[name]) for row in rows if row["collective"] == kind] for kind in kinds}
        for title, name in PANELS.items()
    }
    picture = pictures.bandwidths(panels)
    told = f"{found['ranks']} ranks on {found['nodes']} nodes, {found['backend']}"
    told += f" over {found['provider']}" * bool(found.get("provider"))
    page = f"{picture}\n\n{told}, sums correct: {found['correct']}\n\n{phrases.grid(rows)}\n\n{_csv(rows)}"
    report.page("network-proof", page, "Collectives over all ranks")


def _pairs(found: Mapping[str, Any]) -> None:
    rows = found["slow"] or [{"node": "none is slower than the others"}]
    report.table("slow-nodes", rows, f"Pairs of nodes against each other, in {len(found['rounds'])} rounds")


def _calibration(found: Mapping[str, Any]) -> None:
    rows = [{"what": what, "reached": rate} for what, rate in found["summary"].items()]
    report.table("calibration", rows, "What a rank reaches, for the planner: GFLOPS of arithmetic, GB/s of the rest")
    report.table("slow-ranks", found["slow"] or [{"rank": "none is behind the others"}], "Ranks behind the others")


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a file to be saved from the page."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return f"[collectives.csv](data:text/csv;base64,{base64.b64encode(text.getvalue().encode()).decode()})"
