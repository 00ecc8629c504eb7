"""Lines from CloudWatch Logs: each once, in order, whatever the moment they are asked for."""

import time

import pytest

from clusters import cloudwatch
from clusters.aws import Site
from clusters.cloudwatch import Stream
from tests.sky import client


class Log:
    """A log group with two streams."""

    def __init__(self, site: Site) -> None:
        self.logs, self.group = client("logs", site.endpoint), f"group-{time.monotonic_ns()}"
        self.start = int(time.time() * 1000) - 10_000
        self.logs.create_log_group(logGroupName=self.group)
        for stream in ("a", "b"):
            self.logs.create_log_stream(logGroupName=self.group, logStreamName=stream)

    def write(self, stream: str, *events: tuple[int, str]) -> None:
        told = [{"timestamp": self.start + when, "message": line} for when, line in events]
        self.logs.put_log_events(logGroupName=self.group, logStreamName=stream, logEvents=told)


@pytest.fixture
def log(site: Site) -> Log:
    return Log(site)


def test_the_streams_are_merged_by_time(site: Site, log: Log) -> None:
    log.write("a", (1, "one"), (3, "three"))
    log.write("b", (2, "[node1] two"))
    lines, _ = cloudwatch.read(site, log.group, [Stream("a", "[node0] "), Stream("b", "[node1] ")], "")
    assert lines == ["[node0] one", "[node1] two", "[node0] three"]


def test_lines_of_one_millisecond_come_once(site: Site, log: Log) -> None:
    seen: list[str] = []
    cursor = ""
    for number in range(5):
        log.write("a", (7, f"{number}"), (7, f"{number} again"))
        lines, cursor = cloudwatch.read(site, log.group, [Stream("a")], cursor)
        seen += lines
        assert cloudwatch.read(site, log.group, [Stream("a")], cursor) == ([], cursor)
    assert seen == [word for number in range(5) for word in (f"{number}", f"{number} again")]


def test_a_stream_that_is_late_is_not_missed(site: Site, log: Log) -> None:
    both = [Stream("a"), Stream("b"), Stream("never")]
    log.write("a", (100, "first"))
    _, cursor = cloudwatch.read(site, log.group, both, "")
    log.write("b", (50, "before it, and later there"))
    assert cloudwatch.read(site, log.group, both, cursor)[0] == ["before it, and later there"]


def test_more_than_a_page_is_read_whole(site: Site, log: Log) -> None:
    for part in range(3):
        log.write("a", *((part, f"{part}-{number}") for number in range(5000)))
    lines, _ = cloudwatch.read(site, log.group, [Stream("a")], "")
    assert len(lines) == len(set(lines)) == 15_000
