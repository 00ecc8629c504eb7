"""The metrics of a node: Prometheus' own parser reads them, they are the log's figures, and they disturb nothing."""

import json
import os
import re
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prometheus_client.parser import text_string_to_metric_families

from clusters.base import Job
from tests.training.hosts import Gang, Hosts
from tests.training.nursery import LENGTH, spec
from training.contract import Node
from training.metrics import COUNTED, FAMILIES, MEASURED, Metrics, of_node, serve
from training.program import Log

NODE = Node("batch", 2, 0, "10.0.0.1", "job-7", 3)
T = TypeVar("T")
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parsed(text: str) -> Series:
    """Every sample by its name and labels, common labels left out; the parser raises for what it cannot read."""
    common = ("recipe", "run", "node")
    return {
        (sample.name, frozenset((name, value) for name, value in sample.labels.items() if name not in common)): value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for value in [float(sample.value)]
    }


def plain(text: str) -> dict[str, float]:
    return {name: value for (name, labels), value in parsed(text).items() if not labels}


def told(**facts: Any) -> bytes:
    return b"@castra " + json.dumps(facts).encode()


def step(done: int, **metrics: float) -> bytes:
    return told(done=done, total=100, unit="step", metrics=metrics)


def test_a_step_of_the_log_is_what_is_told() -> None:
    metrics = of_node(spec() | {"name": "tiny"}, "tiny-train-1", NODE, 8, Path("/nowhere"))
    figures = {name: 0.5 + place for place, name in enumerate(MEASURED)}
    metrics.hear(step(7, **figures, unknown=3.0))
    metrics.hear(step(8, **figures))
    found = plain(metrics.text())
    assert {name: found[family] for name, family in MEASURED.items()} == figures
    assert (found["castra_step"], found["castra_steps_planned"]) == (8, 100)
    assert found["castra_tokens_total"] == 8 * 8 * LENGTH
    assert found["castra_productive_seconds_total"] == 2 * figures["step_seconds"]
    assert found["castra_restarts_total"] == 2
    families = text_string_to_metric_families(metrics.text())
    info = next(family.samples[0].labels for family in families if family.name == "castra_info")
    told = {"recipe": "tiny", "run": "tiny-train-1", "node": "0", "nodes": "2", "world_size": "16", "strategy": "ddp"}
    assert info | told == info


def test_every_family_has_its_help_and_type_before_its_samples_once(tmp_path: Path) -> None:
    mark = {"rank": 3, "phase": "update", "age_s": 2.0, "done": 9, "memory_bytes": 4096, "at": time.monotonic()}
    (tmp_path / "rank-3.json").write_text(json.dumps(mark))
    metrics = of_node(spec(), "run", NODE, 8, tmp_path)
    metrics.hear(step(1, loss=2.0, eval_loss=2.0, grad_norm=1.0, lr=1e-3, step_seconds=1, mfu=0.4, tokens_per_second=9))
    metrics.hear(told(event="checkpoint", step=1, name="step-00000001", seconds=0.1))
    text = metrics.text()
    shown = {family.name: family.type for family in text_string_to_metric_families(text)}
    kinds = {family.name.removesuffix("_total"): family.kind for family in FAMILIES}
    assert shown == kinds
    for family in FAMILIES:
        at = [number for number, line in enumerate(text.splitlines()) if re.match(rf"{family.name}[{{ ]", line)]
        assert text.splitlines()[at[0] - 2 : at[0]] == [
            f"# HELP {family.name} {family.help}",
            f"# TYPE {family.name} {family.kind}",
        ]
    found = parsed(text)
    assert found["castra_memory_bytes", frozenset({("rank", "3")})] == 4096
    assert found["castra_rank_step", frozenset({("rank", "3")})] == 9
    assert found["castra_heartbeat_age_seconds", frozenset({("rank", "3")})] < 5
    assert 2 <= found["castra_phase_age_seconds", frozenset({("rank", "3"), ("phase", "update")})] < 7


def test_names_are_the_ones_that_prometheus_advises() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"castra_[a-z_]+", family.name)
        assert family.name.endswith("_total") == (family.kind == "counter")


@pytest.mark.parametrize("event", COUNTED)
def test_events_are_counted(event: str) -> None:
    metrics = Metrics({})
    assert plain(metrics.text())[COUNTED[event]] == 0  # there from the start, or no rate could be taken
    for _ in range(2):
        metrics.hear(told(event=event, message="…"))
    assert plain(metrics.text())[COUNTED[event]] == 2


def test_a_node_without_steps_in_its_log_tells_the_step_of_its_ranks(tmp_path: Path) -> None:
    for rank, done in ((2, 40), (10, 41)):
        mark = {"rank": rank, "phase": "x", "age_s": 0, "done": done, "memory_bytes": 1, "at": time.monotonic() - 9}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(mark))
    (tmp_path / "rank-4.json").write_text('{"torn')
    found = parsed(Metrics({}, beats=tmp_path).text())
    assert found["castra_step", frozenset()] == 40
    assert 9 <= found["castra_heartbeat_age_seconds", frozenset({("rank", "10")})] < 14
    assert [dict(labels)["rank"] for name, labels in found if name == "castra_rank_step"] == ["2", "10"]


def test_labels_and_numbers_of_any_kind_are_escaped() -> None:
    odd = 'a"b\\c\nd'
    metrics = Metrics({"recipe": odd, "run": "r", "node": "0", "host": "ünï"})
    metrics.hear(step(1, loss=1e-300, tokens_per_second=123456789.5))
    families = text_string_to_metric_families(metrics.text())
    info = next(family.samples[0] for family in families if family.name == "castra_info")
    assert (info.labels["recipe"], info.labels["host"]) == (odd, "ünï")
    found = plain(metrics.text())
    assert (found["castra_loss"], found["castra_tokens_per_second"]) == (1e-300, 123456789.5)


@pytest.mark.parametrize(
    "line",
    [
        b"a program's own line",
        b"@castra {torn",
        b"@castra [1]",
        b"@castra null",
        told(done="x", total=1, unit="step", metrics={}),
        told(done=1, unit="step"),
        told(event="restarted"),
        told(done=3, total=9, unit="size", metrics={"seconds": 1.0}),
        b"@castra \xff\xfe",
        b"@castra " + b"[" * 100_000,
    ],
)
def test_lines_of_another_grammar_change_nothing(line: bytes) -> None:
    metrics = Metrics({})
    before = plain(metrics.text()).keys()
    metrics.hear(line)
    assert plain(metrics.text()).keys() == before


def scraped(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


def test_a_busy_port_and_nonsense_are_a_line_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        busy = f"127.0.0.1:{taken.getsockname()[1]}"
        for address, why in ((busy, "in use"), ("here", "must be host:port"), ("127.0.0.1:99999", "0-65535")):
            serve(Metrics({}), address, Log())
            (line,) = capfd.readouterr().out.splitlines()
            event = json.loads(line.removeprefix("@castra "))
            assert event["event"] == "metrics-off"
            assert f"CASTRA_METRICS={address} serves nothing" in event["message"]
            assert why in event["message"]


def test_it_is_served_on_loopback_and_nothing_else_is(capfd: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics({})
    metrics.hear(step(5, loss=1.5))
    serve(metrics, ":0", Log())
    url = json.loads(capfd.readouterr().out.removeprefix("@castra "))["address"]
    assert url.startswith("http://127.0.0.1:")
    assert plain(scraped(url))["castra_step"] == 5
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.replace("/metrics", "/etc/passwd"), timeout=5)
    assert refused.value.code == 404
    refused.value.close()


def test_who_asks_and_goes_away_disturbs_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics({"host": "x" * 5_000_000})
    serve(metrics, ":0", Log())
    url = json.loads(capfd.readouterr().out.removeprefix("@castra "))["address"]
    port = int(url.rpartition(":")[2].removesuffix("/metrics"))
    for _ in range(3):  # the answer is larger than what the sockets hold
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            client.recv(10)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # ends with a reset
    assert len(scraped(url)) > 5_000_000
    assert capfd.readouterr() == ("", "")


def served(gang: Gang, rank: int) -> str:
    """Where a node serves, once it does."""
    until = time.monotonic() + 30
    while not (found := gang.say("metrics", rank)):
        assert time.monotonic() < until, gang.log(rank)
        time.sleep(0.02)
    return str(found[0]["address"])


def test_two_nodes_that_train_tell_what_their_log_tells(hosts: Hosts, dataset: Path) -> None:
    job = Job(
        "train",
        "training.run",
        {
            "spec": spec(steps=100_000, checkpoint_every=50_000),
            "inputs": {"dataset": str(dataset)},
            "output": str(hosts.folder / "out"),
        },
        nodes=2,
        processes_per_node=1,
    )
    gang = hosts.start(job, env={"CASTRA_METRICS": "127.0.0.1:0"}, grace_s=20)
    places = [served(gang, rank) for rank in range(2)]
    marked = ("castra_rank_step", frozenset({("rank", "1")}))
    seen: list[dict[str, float]] = []
    until = time.monotonic() + 60
    while not (seen and "castra_step" in seen[-1]) or parsed(scraped(places[1])).get(marked, 0) < 1:
        assert time.monotonic() < until, gang.log()
        seen.append(plain(scraped(places[0])))
        time.sleep(0.05)
    logged = {fact["done"]: fact["metrics"] for fact in steps_of(gang)}
    last = seen[-1]
    figures = logged[int(last["castra_step"])]
    assert {name: last[family] for name, family in MEASURED.items() if name in figures} == {
        name: figures[name] for name in MEASURED if name in figures
    }
    assert last["castra_tokens_total"] == last["castra_step"] * 8 * LENGTH
    one = parsed(scraped(places[1]))
    rank = frozenset({("rank", "1")})
    assert one["castra_heartbeat_age_seconds", rank] < 10
    assert one["castra_memory_bytes", rank] > 50e6
    assert 1 <= one["castra_step", frozenset()] <= max(fact["done"] for fact in steps_of(gang))
    stopped = leaf(gang.processes[1].pid)
    os.kill(stopped, signal.SIGSTOP)
    ages = waited(lambda: [age(place, number) for number, place in enumerate(places)], lambda found: found[1] > 4)
    assert ages[0] < ages[1]  # whom it holds up goes on beating
    os.kill(stopped, signal.SIGCONT)
    waited(lambda: age(places[1], 1), lambda found: found < 3)
    gang.processes[0].terminate()
    assert gang.wait() == [143, 143]


def age(place: str, rank: int) -> float:
    """How long ago a rank beat, as its node tells."""
    return parsed(scraped(place))["castra_heartbeat_age_seconds", frozenset({("rank", str(rank))})]


def leaf(pid: int) -> int:
    """The process at the end of a line of parents and children: the rank."""
    below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return leaf(int(below[0])) if below else pid


def waited(look: Callable[[], T], enough: Callable[[T], bool]) -> T:
    """What is seen once it is enough."""
    until = time.monotonic() + 60
    while not enough(found := look()):
        assert time.monotonic() < until, found
        time.sleep(0.1)
    return found


def steps_of(gang: Gang) -> list[dict[str, Any]]:
    """The steps in the log of node 0."""
    lines = [line.partition("@castra ")[2] for line in gang.log().splitlines() if line.endswith("}}")]
    return [fact for fact in map(json.loads, filter(None, lines)) if fact.get("unit") == "step"]


def test_nodes_do_their_work_whether_or_not_they_are_watched(hosts: Hosts) -> None:
    gang = hosts.start(hosts.job(nodes=2, say=["one"], sleep=1), env={"CASTRA_METRICS": "127.0.0.1:0"})
    for rank in range(2):
        series = parsed(scraped(served(gang, rank)))
        (labels,) = (dict(labels) for name, labels in series if name == "castra_info")
        assert (labels["nodes"], labels["platform"]) == ("2", "kubernetes")
    assert gang.wait() == [0, 0]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        again = hosts.start(hosts.job("again", say=["one"]), env={"CASTRA_METRICS": f":{taken.getsockname()[1]}"})
        assert again.wait() == [0]
    assert [fact["event"] for fact in again.say("metrics-off")] == ["metrics-off"]
