"""Dashboards and alerts: only metrics and labels that somebody exports, JSON that Grafana takes, stable ids."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.dashboards import DASHBOARDS, FOLDER, as_json, text
from training.metrics import FAMILIES, Metrics, of_node

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deployments/prometheus"
EXPORTERS = json.loads(Path(__file__).with_name("exporters.json").read_text())
EXPORTED = {name for one in EXPORTERS.values() for name in one["names"]} | {family.name for family in FAMILIES}
OWN_LABELS = {"recipe", "run", "node", "rank", "phase", "nodes", "host", "platform", "world_size"}
LABELS = {label for one in EXPORTERS.values() for label in one["labels"]} | OWN_LABELS
WORDS = {"and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"}
FUNCTIONS = {"rate", "increase", "changes", "count", "sum", "max", "avg", "abs", "label_values"}
UNITS = {
    "short", "none", "s", "sci", "percent", "percentunit", "bytes", "mbytes", "Bps", "pps", "cps", "celsius", "watt",
    "currencyUSD",
}  # fmt: skip
"""Of Grafana's: packages/grafana-data/src/valueFormats/categories.ts."""


def names_of(query: str) -> tuple[set[str], set[str], set[str]]:
    """The metrics, the labels and the functions of a query in PromQL; variables of Grafana left out."""
    labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", " ".join(re.findall(r"\{([^}]*)\}", query))))
    for group in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", query):
        labels |= {label.strip() for label in group.split(",")}
    bare = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", " ", re.sub(r"\{[^}]*\}|\[[^\]]*\]|\$\w+", " ", query))
    functions = set(re.findall(r"([A-Za-z_]\w*)\s*\(", bare)) | set(
        re.findall(r"\b(count|sum|max|avg)\b(?=\s+\()", bare)
    )
    words = set(re.findall(r"(?<![\w.])[A-Za-z_:][\w:]*", bare)) - functions - WORDS
    return words, labels, functions


def panels() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in sorted(FOLDER.glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            yield f"{path.stem}: {panel['title']}", panel


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((PROMETHEUS / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def queries() -> dict[str, str]:
    found = {f"{name} {target['refId']}": target["expr"] for name, panel in panels() for target in panel["targets"]}
    return found | {rule["alert"]: rule["expr"] for rule in rules()}


def test_names_are_found_in_a_query() -> None:
    query = 'sum by (run, x) (rate(a_total{b=~"$c",d!="e"}[5m])) * $usd / max by (f) (g) and h < 3e9 * 1e9'
    names, labels, functions = names_of(query)
    assert ({"a_total", "g", "h"}, {"run", "x", "b", "d", "f"}, {"sum", "rate", "max"}) == (names, labels, functions)


@pytest.mark.parametrize("name", queries())
def test_every_metric_is_exported_by_somebody(name: str) -> None:
    names, labels, functions = names_of(queries()[name])
    assert names
    assert names <= EXPORTED
    assert labels <= LABELS
    assert functions <= FUNCTIONS
    query = queries()[name]
    assert query.count("(") == query.count(")")
    for counter in re.findall(r"castra_\w+_total", query):
        assert f"rate({counter}" in query or f"increase({counter}" in query or query.startswith(counter)


def test_labels_of_our_own_are_really_there(tmp_path: Path) -> None:
    from training.contract import Node

    (tmp_path / "rank-0.json").write_text('{"rank":0,"phase":"x","age_s":0,"done":1,"memory_bytes":1,"at":0}')
    told: Metrics = of_node({"name": "tiny"}, "run-1", Node("batch", 2, 0, "m", "j", 1), 1, tmp_path)
    assert set(re.findall(r'[{,](\w+)="', told.text())) >= OWN_LABELS


def test_the_files_are_what_the_module_tells() -> None:
    assert {path.name: path.read_text() for path in FOLDER.glob("*")} == {
        f"{one.uid}.json": text(one) for one in DASHBOARDS
    }


def test_identifiers_stay() -> None:
    told = {one.uid: one.title for one in DASHBOARDS}
    assert told == {
        "castra-training": "Castra: training",
        "castra-nodes": "Castra: nodes and GPUs",
        "castra-efa": "Castra: EFA",
        "castra-goodput": "Castra: goodput and cost",
    }


@pytest.mark.parametrize("one", DASHBOARDS, ids=lambda one: one.uid)
def test_a_dashboard_is_what_grafana_takes(one: Any) -> None:
    told = as_json(one)
    assert "id" not in told  # another Grafana would take it for its own
    assert isinstance(told["schemaVersion"], int)
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", told["uid"])
    variables = {variable["name"]: variable for variable in told["templating"]["list"]}
    assert variables["datasource"] | {"type": "datasource", "query": "prometheus"} == variables["datasource"]
    assert [panel["id"] for panel in told["panels"]] == list(range(1, len(told["panels"]) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in told["panels"]:
        assert panel.keys() >= {"type", "title", "gridPos", "targets", "fieldConfig", "options", "datasource"}
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= variables.keys()


def test_alerts_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in rules()}) == len(rules())
    wanted = {"StepStalled", "NodeLost", "Xid", "EfaDrops", "DiskFull"}
    assert {rule["alert"] for rule in rules()} >= wanted
    for rule in rules():
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "5m"))
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "what_to_do"}
        _, labels, _ = names_of(rule["expr"])
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= LABELS
        grouped = re.search(r"^\w+ by \(", rule["expr"])
        assert not grouped or shown <= labels  # others are summed away


def test_every_port_is_one_that_is_documented() -> None:
    settings = yaml.safe_load((PROMETHEUS / "node.yaml").read_text())
    assert settings["global"]["external_labels"].keys() == {"host"}  # by which dashboards and alerts name nodes
    jobs = settings["scrape_configs"]
    ports = {job["job_name"]: job["static_configs"][0]["targets"] for job in jobs}
    assert ports.keys() == {"castra", "node", "dcgm"}
    told = (ROOT / "docs/observability.md").read_text()
    for (place,) in ports.values():
        assert place.startswith("127.0.0.1:")
        assert place.removeprefix("127.0.0.1:") in told


def test_every_metric_is_documented() -> None:
    told = (ROOT / "docs/observability.md").read_text()
    assert [family.name for family in FAMILIES if f"`{family.name}`" not in told] == []
