"""The emulator as a process: it starts, keeps to itself, and ends with whoever started it."""

import http.client
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from werkzeug.test import Client

from clusters import aws, keeper
from clusters.aws import Site
from clusters.base import ClusterError, Refused, Unreachable
from emulator import aws as emulated
from emulator import server
from emulator.aws import Emulator
from tests.sky import client

ROOT = Path(__file__).parents[2]


def test_it_listens_on_loopback_only(emulator: Emulator) -> None:
    port = urlsplit(emulator.endpoint).port
    listening = {
        fields[1].split(":")[0]
        for kind in ("tcp", "tcp6")
        for fields in map(str.split, Path(f"/proc/net/{kind}").read_text().splitlines()[1:])
        if fields[3] == "0A" and int(fields[1].split(":")[1], 16) == port
    }
    assert listening == {"0100007F"}


def test_its_environment_points_at_it_with_keys_of_nobody(emulator: Emulator, site: Site) -> None:
    environment = emulated.environment(emulator.endpoint)
    assert environment["AWS_ENDPOINT_URL"] == emulator.endpoint
    assert {environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"]} == {"castra"}
    assert (site.region, site.endpoint) == (environment["AWS_REGION"], emulator.endpoint)
    assert site.memory
    assert not aws.vanished(site)


def test_it_ends_with_its_owner(tmp_path: Path) -> None:
    text = (
        "import time; from pathlib import Path; from emulator import aws\n"
        f"print(aws.start(Path({str(tmp_path)!r})).endpoint, flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", text], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout
    endpoint = owner.stdout.readline().strip()
    site = Site("us-east-1", endpoint, memory_of(endpoint))
    assert not aws.vanished(site)
    owner.kill()
    owner.communicate()
    (folder,) = tmp_path.iterdir()
    until = time.monotonic() + 10
    while keeper.alive(folder):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert aws.vanished(site)


def memory_of(endpoint: str) -> str:
    line = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=10)
    try:
        line.request("GET", aws.EMULATOR_PATH)
        return str(json.loads(line.getresponse().read())["memory"])
    finally:
        line.close()


def test_stop_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with emulated.running(tmp_path) as running:
        assert memory_of(running.endpoint)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="refused"):
        memory_of(running.endpoint)


def test_what_a_killed_owner_left_is_swept(tmp_path: Path) -> None:
    left = tmp_path / "emulator-left"
    left.mkdir()
    (left / "log").write_text("")
    os.utime(left, (0, 0))
    with emulated.running(tmp_path) as running:
        assert list(tmp_path.iterdir()) == [running.folder]


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "moto.py").write_text("")  # an installation that is broken
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(emulated, "ROOT", tmp_path)
    with pytest.raises(ClusterError, match=r"^the emulator did not start \(.*exited with code 1\); its log is .*log$"):
        emulated.start(tmp_path)


def test_a_conditional_write_is_won_by_one_thread(emulator: Emulator, site: Site) -> None:
    s3 = client("s3", site.endpoint)
    s3.create_bucket(Bucket="raced")
    reply = s3.put_object(Bucket="raced", Key="k", Body=b"1", IfNoneMatch="*")
    s3.put_object(Bucket="raced", Key="k", Body=b"2", IfMatch=reply["ETag"])
    with pytest.raises(s3.exceptions.ClientError, match="PreconditionFailed"):
        s3.put_object(Bucket="raced", Key="k", Body=b"3", IfMatch=reply["ETag"])


def test_real_aws_is_out_of_reach_while_an_emulator_is_set(site: Site) -> None:
    with pytest.raises(Unreachable, match="AWS_ENDPOINT_URL is set: unset it"):
        aws.cloudformation(Site("us-east-1"))


def test_errors_of_aws_are_sentences(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    told = r"^look: AWS in us-east-1 at http.* answers ValidationError: "
    with pytest.raises(ClusterError, match=told), aws.sentences(site, "look"):
        aws.cloudformation(site).describe_stacks(StackName="none")
    nowhere = Site("us-east-1", "http://127.0.0.1:9")
    told = r"^look: AWS in .* does not answer; check the network"
    with pytest.raises(Unreachable, match=told), aws.sentences(nowhere, "look"):
        aws.cloudformation(nowhere).describe_stacks()
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    with pytest.raises(Refused, match="no AWS region is set"):
        aws.here()


def test_moto_is_changed_once_by_many_who_ask_first(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[int] = []

    @cache
    def change() -> None:
        time.sleep(0.05)
        changes.append(1)

    monkeypatch.setattr(server, "CHANGES", {"ec2": (change,)})
    application = server.Application()
    signed = "AWS4-HMAC-SHA256 Credential=castra/20261120/us-east-1/ec2/aws4_request, SignedHeaders=host, Signature=0"

    def ask(_: int) -> int:
        told = {"Action": "DescribeRegions", "Version": "2016-11-15"}
        answer = Client(application).post(
            "/", data=told, headers={"Authorization": signed, "Host": "ec2.amazonaws.com"}
        )
        return answer.status_code

    with ThreadPoolExecutor(4) as many:
        assert list(many.map(ask, range(4))) == [200] * 4
    assert changes == [1]
