"""Grafana's dashboards, told here in short and kept as JSON: deployments/grafana/castra-*.json.

    python -m deployments.dashboards        # write them again

Their identifiers never change, so that a dashboard imported again replaces itself. Where the metrics come from:
docs/observability.md.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).with_name("grafana")
SCHEMA: Final = 39
"""Of the JSON, as Grafana 10.3 and later write it; newer ones migrate it."""
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
"""Of a panel: three stand side by side on Grafana's grid of 24."""
RUN: Final = '{run=~"$run"}'
HOSTS: Final = '{host=~"$host"}'
"""The label that every node's Prometheus puts on all it sends: prometheus/node.yaml."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: its title, its queries with the names of their lines, its unit, what it tells."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    about: str = ""
    kind: str = "timeseries"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One page, and the variables it is narrowed by: their names and the queries for their values."""

    uid: str
    title: str
    variables: tuple[tuple[str, str], ...]
    panels: tuple[Panel, ...]
    constants: tuple[tuple[str, str, str], ...] = ()
    """Text boxes: name, label, value at first."""


def _of(metric: str, name: str = "{{run}}") -> tuple[tuple[str, str], ...]:
    return ((metric + RUN, name),)


def _per_rank(metric: str) -> tuple[tuple[str, str], ...]:
    return ((metric + RUN, "node {{node}} rank {{rank}}"),)


TRAINING: Final = Dashboard(
    uid="castra-training",
    title="Castra: training",
    variables=(("run", "label_values(castra_info, run)"),),
    panels=(
        Panel("Step", (*_of("castra_step", "{{run}} node {{node}}"), *_of("castra_steps_planned", "of"))),
        Panel("Loss", (*_of("castra_loss"), *_of("castra_eval_loss", "held out"))),
        Panel("Gradient norm", _of("castra_grad_norm")),
        Panel("Tokens per second", _of("castra_tokens_per_second")),
        Panel("Seconds per step", _of("castra_step_seconds"), "s"),
        Panel("Model FLOPs utilisation", _of("castra_mfu_ratio"), "percentunit"),
        Panel("Learning rate", _of("castra_learning_rate"), "sci"),
        Panel("Memory of each rank", _per_rank("castra_memory_bytes"), "bytes"),
        Panel("Tokens", _of("castra_tokens_total")),
        Panel(
            "Since a rank's last heartbeat",
            _per_rank("castra_heartbeat_age_seconds"),
            "s",
            "A heartbeat comes every second. One rank alone that rises is the one to look at.",
        ),
        Panel(
            "Since a rank began what it does",
            ((f"castra_phase_age_seconds{RUN}", "rank {{rank}}: {{phase}}"),),
            "s",
            "Rises on all ranks where one holds up the others: that one is in another phase, or a step behind.",
        ),
        Panel("Steps of each rank", _per_rank("castra_rank_step")),
        Panel("Since the last checkpoint", _of("castra_checkpoint_age_seconds", "node {{node}}"), "s"),
        Panel(
            "What went wrong",
            (
                *_of("castra_restarts_total", "restarts"),
                *_of("castra_bad_steps_total", "bad steps"),
                *_of("castra_node_lost_total", "nodes lost"),
                *_of("castra_hangs_total", "hangs"),
                *_of("castra_stragglers_total", "looks that found a straggler"),
                *_of("castra_upload_failures_total", "failed uploads"),
            ),
        ),
        Panel("What runs", ((f"castra_info{RUN}", ""),), kind="table"),
    ),
)


def _gpu(title: str, query: str, unit: str, about: str = "") -> Panel:
    return Panel(title, ((query, "{{host}} GPU {{gpu}}"),), unit, about)


def _node(title: str, query: str, unit: str, name: str = "{{host}}") -> Panel:
    return Panel(title, ((query, name),), unit)


NODES: Final = Dashboard(
    uid="castra-nodes",
    title="Castra: nodes and GPUs",
    variables=(("host", "label_values(up, host)"),),
    panels=(
        _gpu(
            "GPU utilisation", f"DCGM_FI_DEV_GPU_UTIL{HOSTS}", "percent", "Share of the time in which any kernel ran."
        ),
        _gpu("Tensor cores at work", f"DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{HOSTS}", "percentunit"),
        _gpu("GPU memory used", f"DCGM_FI_DEV_FB_USED{HOSTS}", "mbytes"),
        _gpu("GPU temperature", f"DCGM_FI_DEV_GPU_TEMP{HOSTS}", "celsius"),
        _gpu("GPU power", f"DCGM_FI_DEV_POWER_USAGE{HOSTS}", "watt", "A GPU that waits for others draws less."),
        _gpu("GPU clock", f"DCGM_FI_DEV_SM_CLOCK{HOSTS}", "none", "In MHz. Below its neighbours': it is throttled."),
        _gpu("Last Xid", f"DCGM_FI_DEV_XID_ERRORS{HOSTS}", "none", "0 is none; NVIDIA's catalogue says what each is."),
        _gpu("Failed row remaps", f"DCGM_FI_DEV_ROW_REMAP_FAILURE{HOSTS}", "none", "1: the GPU must be replaced."),
        _gpu("Rows remapped after errors", f"DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS{HOSTS}", "none"),
        _gpu(
            "NVLink traffic",
            f"rate(DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL{HOSTS}[5m])",
            "none",
            "In the counter's own unit, over all links of a GPU.",
        ),
        _gpu("PCIe replays", f"rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER{HOSTS}[5m])", "cps"),
        _node(
            "Processors at work",
            '1 - avg by (host) (rate(node_cpu_seconds_total{mode="idle",host=~"$host"}[5m]))',
            "percentunit",
        ),
        _node("Memory available", f"node_memory_MemAvailable_bytes{HOSTS}", "bytes"),
        _node(
            "Room on disks",
            f"node_filesystem_avail_bytes{HOSTS} / node_filesystem_size_bytes{HOSTS}",
            "percentunit",
            "{{host}} {{mountpoint}}",
        ),
        _node("Disks write", f"rate(node_disk_written_bytes_total{HOSTS}[5m])", "Bps", "{{host}} {{device}}"),
        _node("Disks read", f"rate(node_disk_read_bytes_total{HOSTS}[5m])", "Bps", "{{host}} {{device}}"),
        _node("Clock's offset", f"node_timex_offset_seconds{HOSTS}", "s"),
    ),
)


def _efa(title: str, unit: str, *metrics: str, about: str = "") -> Panel:
    queries = tuple(
        (f"rate(node_amazonefa_{metric}{HOSTS}[5m])", f"{{{{host}}}} {{{{device}}}} {metric}") for metric in metrics
    )
    return Panel(title, queries, unit, about)


EFA: Final = Dashboard(
    uid="castra-efa",
    title="Castra: EFA",
    variables=(("host", "label_values(up, host)"),),
    panels=(
        _efa("Sent and received", "Bps", "tx_bytes", "rx_bytes"),
        _efa("RDMA reads", "Bps", "rdma_read_bytes", "rdma_read_resp_bytes"),
        _efa("RDMA writes", "Bps", "rdma_write_bytes", "rdma_write_recv_bytes"),
        _efa("Packets", "pps", "tx_pkts", "rx_pkts"),
        _efa("Dropped packets", "pps", "rx_drops", about="Any is worth a look: NCCL sends again, and waits."),
        _efa("Failed work requests", "cps", "rdma_read_wr_err", "rdma_write_wr_err"),
        Panel("Adapters", ((f"count by (host) (node_amazonefa_tx_bytes{HOSTS})", "{{host}}"),), "none"),
    ),
)
_COST: Final = 'sum by (run) (castra_nodes{node="0",run=~"$run"}) * $usd_per_node_hour'
GOODPUT: Final = Dashboard(
    uid="castra-goodput",
    title="Castra: goodput and cost",
    variables=(("run", "label_values(castra_info, run)"),),
    constants=(("usd_per_node_hour", "US dollars per node and hour", "55.04"),),
    panels=(
        Panel(
            "Goodput",
            ((f"rate(castra_productive_seconds_total{RUN}[30m])", "{{run}}"),),
            "percentunit",
            "Share of the time that was steps: the rest is starts, checkpoints, waits and steps done twice.",
        ),
        Panel("Nodes that answer", ((f"count by (run) (castra_info{RUN})", "{{run}}"),), "none"),
        Panel("Dollars per hour", ((_COST, "{{run}}"),), "currencyUSD"),
        Panel(
            "Dollars per billion tokens",
            ((f"{_COST} / 3600 / sum by (run) (rate(castra_tokens_total{RUN}[30m])) * 1e9", "{{run}}"),),
            "currencyUSD",
            "Of the last half hour; the price is the one above, and not the bill's.",
        ),
        Panel("Restarts", _of("castra_restarts_total", "{{run}} node {{node}}")),
    ),
)
DASHBOARDS: Final = (TRAINING, NODES, EFA, GOODPUT)


def as_json(one: Dashboard) -> dict[str, Any]:
    """A dashboard as Grafana imports it."""
    return {
        "uid": one.uid,
        "title": one.title,
        "tags": ["castra"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "timezone": "utc",
        "time": {"from": "now-3h", "to": "now"},
        "refresh": "30s",
        "annotations": {"list": []},
        "templating": {"list": list(_variables(one))},
        "panels": [_panel(number, panel) for number, panel in enumerate(one.panels)],
    }


def main() -> None:
    """Write all dashboards."""
    FOLDER.mkdir(exist_ok=True)
    for one in DASHBOARDS:
        (FOLDER / f"{one.uid}.json").write_text(text(one))


def text(one: Dashboard) -> str:
    """The file of a dashboard."""
    return json.dumps(as_json(one), indent=1) + "\n"


def _variables(one: Dashboard) -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    for name, query in one.variables:
        yield {
            "name": name,
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,  # with the time range
            "includeAll": True,
            "allValue": ".*",
            "multi": True,
            "current": {"text": "All", "value": "$__all"},
            "sort": 1,
        }
    for name, label, value in one.constants:
        current = {"text": value, "value": value}
        yield {"name": name, "label": label, "type": "textbox", "query": value, "current": current}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    across = 24 // WIDTH
    table = panel.kind == "table"
    return {
        "id": number + 1,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "gridPos": {"x": number % across * WIDTH, "y": number // across * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "options": {} if table else {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}},
        "targets": [_target(place, query, name, table) for place, (query, name) in enumerate(panel.queries)],
    }


def _target(place: int, query: str, name: str, table: bool) -> dict[str, Any]:
    shown = {"format": "table", "instant": True} if table else {"legendFormat": name}
    return {"refId": chr(ord("A") + place), "datasource": SOURCE, "expr": query, **shown}


if __name__ == "__main__":
    main()
