"""Two nodes with networks of their own: network namespaces with a cable between them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nodes import Running, make_request, once_a_node

from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER
from autotune.profiling.hosts import Hosts
from autotune.profiling.node_check import check_nodes

pytestmark = pytest.mark.slow


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Namespaces named by their addresses."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    net = f"10.77.{os.getpid() % 250}"
    names = (f"{net}.1", f"{net}.2")
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
        steps = [f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}"]
        for name in names:
            steps += [f"-n {name} addr add {name}/24 dev eth0", f"-n {name} link set eth0 up"]
            steps += [f"-n {name} link set lo up"]
        for step in steps:
            assert ip(*step.split()).returncode == 0, step
        yield Hosts(names, ("ip", "netns", "exec", "{host}"))
    finally:
        for name in names:
            ip("netns", "del", name)


def test_ranks_of_two_networks_train_over_the_cable(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")  # no name server is reached from there
    assert [node.name for node in check_nodes(hosts, tmp_path, "s1")] == list(hosts.names)
    before = bytes_sent(hosts.names[1])
    running = Running(tmp_path / "trial", DEFAULT_WORKER, make_request(), hosts, limit_s=120)
    running.finish(180)
    assert running.ending is not None
    outcome = assess(running.request, running.ending, running.folder, cores=2)
    assert (outcome.state, outcome.reason) == ("ok", "")
    assert bytes_sent(hosts.names[1]) - before > 10_000


def test_the_port_is_one_of_the_first_nodes_network(hosts: Hosts, tmp_path: Path) -> None:
    worker = replace(once_a_node("meet"), env=(("MEET_PORT", "{port}"), ("MEET_HOST", "{master_addr}")))
    assert Running(tmp_path, worker, hosts=hosts).finish().state == "ok"


def bytes_sent(name: str) -> int:
    """Through the cable, by the kernel's count."""
    shown = json.loads(ip("-n", name, "-j", "-s", "link", "show", "eth0").stdout)
    return int(shown[0]["stats64"]["tx"]["bytes"])
