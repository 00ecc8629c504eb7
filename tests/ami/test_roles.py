"""Roles on a real Debian: each twice, the second time changing nothing; and what the last one does not let through."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ami import flavour, packer, stage, versions
from emulator import debian, machines
from emulator.machines import SSH_PORT, Machine
from tests.clusters.yard import wait_until

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not machines.possible() and not os.environ.get("CI"),
        reason="needs root, slirp4netns, systemd-container and mmdebstrap",
    ),
]
LOCAL = flavour.load("local")


class Node:
    """A machine, and Ansible on its way to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.key = folder, folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)], check=True)
        public = self.key.with_suffix(".pub").read_text().strip()
        self.machine = Machine("node", folder / "machine", "127.77.250.1", [debian.root()], public)
        (folder / "tmp").symlink_to(tempfile.mkdtemp(prefix="castra-"))
        shutil.copytree(stage.ANSIBLE, folder / "ansible")
        strange = "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
        where = f"ansible_host=127.77.250.1 ansible_port={SSH_PORT} ansible_user={debian.USER}"
        how = f"ansible_ssh_private_key_file={self.key} ansible_ssh_extra_args='{strange}'"
        (folder / "inventory").write_text(f"node {where} {how}\n")

    def __enter__(self) -> "Node":
        self.machine.boot()
        wait_until(lambda: self.ansible("-m", "ansible.builtin.ping")[0] == 0, 60)
        return self

    def __exit__(self, *_: object) -> None:
        self.machine.destroy()
        shutil.rmtree((self.folder / "tmp").resolve(), ignore_errors=True)

    def ansible(self, *words: str, program: str = "ansible") -> tuple[int, str]:
        where = ["node"] if program == "ansible" else []
        argv = [str(Path(sys.executable).with_name(program)), "-i", str(self.folder / "inventory"), *where, *words]
        env = os.environ | packer.environment(self.folder) | {"ANSIBLE_NOCOLOR": "1"}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=800, check=False)
        return done.returncode, done.stdout + done.stderr

    def sh(self, command: str) -> str:
        code, told = self.ansible("--become", "-m", "ansible.builtin.shell", "-a", command)
        assert code == 0, told
        return told

    def play(self, *roles: str, mode: str = "install") -> tuple[int, str]:
        """Run the playbook with some of the flavour's roles."""
        told: dict[str, object] = {
            "image_kind": "machine",
            "image_flavour": "local",
            "image_roles": dict.fromkeys(roles, mode),
            "image_os": LOCAL.os,
        }
        told |= {"image_kernel": LOCAL.kernel, "versions": versions.told(LOCAL), **LOCAL.variables}
        (self.folder / "told.json").write_text(json.dumps(told))
        playbook = str(self.folder / "ansible" / "playbooks" / "node.yml")
        return self.ansible("-e", f"@{self.folder}/told.json", playbook, program="ansible-playbook")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path) as made:
        yield made


def test_every_role_changes_nothing_the_second_time(node: Node) -> None:
    roles = [role for role in LOCAL.roles if role not in ("verify", "clean")]
    code, told = node.play(*roles)
    assert code == 0, told
    code, told = node.play(*roles)
    assert code == 0, told
    assert re.search(r"changed=0 +unreachable=0 +failed=0", told), told
    bill = json.loads(re.search(r"\{.*\}", node.sh("cat /etc/castra/image.json"), re.DOTALL)[0])  # type: ignore[index]  # or it fails
    assert {"slurm", "munge", "docker", "libfabric", "openmpi", "node_exporter", "kernel"} <= set(bill["software"])
    assert "running" in node.sh("systemctl start munge; munge -n | unmunge | grep -c Success; echo running")
    assert "9100" in node.sh("ss -ltn | grep 127.0.0.1:9100")
    node.sh(
        "cd /tmp; mkdir -p class/rdmap0s6/ports/1/hw_counters; echo 42 > class/rdmap0s6/ports/1/hw_counters/tx_bytes;"
        "/usr/local/bin/efa-metrics /tmp/class > /var/lib/node-metrics/planted.prom"
    )
    counted = 'node_amazonefa_tx_bytes{device="rdmap0s6",port="1"} 42'
    assert counted in node.sh("curl -s 127.0.0.1:9100/metrics | grep amazonefa"), "and the node exporter tells it"
    assert "active" in node.sh("systemctl start efa-metrics.timer; systemctl is-active efa-metrics.timer")


def test_what_is_secret_or_personal_does_not_get_into_an_image(node: Node) -> None:
    plants = (
        "mkdir -p /root/.aws /home/admin/.ssh; echo aws_secret_access_key=sesame > /root/.aws/credentials;"
        "echo key > /home/admin/.ssh/authorized_keys; echo ls > /root/.bash_history; ssh-keygen -A;"
        "echo line > /var/log/mine.log; touch /tmp/left"
    )
    node.sh(plants)
    code, told = node.play("clean")
    assert code == 0, told
    gone = "/root/.aws /home/admin/.ssh /root/.bash_history /var/log/mine.log /tmp/left /etc/ssh/ssh_host_rsa_key"
    assert "none" in node.sh(f"ls -d {gone} 2>/dev/null || echo none; test ! -s /etc/machine-id")
    node.sh("echo 'AKIAIOSFODNN7EXAMPLE' > /etc/forgotten")
    code, told = node.play("clean")
    assert code != 0
    assert "an image must not have /etc/forgotten" in told


def test_a_mismatch_is_named(node: Node) -> None:
    node.sh("mkdir -p /etc/sysctl.d; echo 'vm.max_map_count = 1' > /etc/sysctl.d/90-castra.conf")
    code, told = node.play("base", mode="assert")
    assert code != 0
    assert "kernel.numa_balancing is not set to 0" in told
