"""A space names the file of its cluster: what it holds, what may override it, and how mistakes in it are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.cost.devices import catalogue
from autotune.errors import UserError
from autotune.space.cluster import Link
from autotune.space.machine import Machine
from autotune.space.space import Space, load_space

CLUSTER = """
cluster:
  nodes: 2
  devices_per_node: 4
  device: h100
  memory_limit: 70GB
  links:
    intra_node: {latency: 4us, bandwidth: 400GB/s}
    inter_node: {latency: 6us, bandwidth: 40GB/s}
machine: {name: h100, peak_flops: 9.0e+14, peak_flops_float32: 6.0e+13, memory_bytes_per_s: 3.0e+12, kernel_s: 3.0e-06}
measured: {hardware: whatever it was, messages: [[1024, 4.0e-06]]}
"""
SPACE = """
model: {layers: 8, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 256, sequence_length: 32}
training: {global_batch_size: 16}
cluster: {file: machines/cluster.yaml%s}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load_space_with(beside: str = "", cluster: str = CLUSTER) -> Space:
        (tmp_path / "machines").mkdir(exist_ok=True)
        (tmp_path / "machines" / "cluster.yaml").write_text(cluster)
        (tmp_path / "space.yaml").write_text(SPACE % beside)
        return load_space(tmp_path / "space.yaml")

    return load_space_with


def test_the_file_gives_the_cluster_and_the_figures_of_a_device(load: Any) -> None:
    space = load()
    assert (space.cluster.nodes, space.cluster.devices_per_node, space.cluster.device) == (2, 4, "h100")
    assert space.cluster.memory_limit_bytes == 70 * 10**9
    assert space.cluster.intra_node == Link(pytest.approx(4e-6), 400e9)
    assert space.machine == Machine("h100", 9e14, 6e13, None, 3e12, 1.0, 3e-6)


def test_keys_beside_the_file_override_its_own_one_by_one(load: Any) -> None:
    space = load(", nodes: 1, links: {inter_node: {bandwidth: 50GB/s}}, machine: {efficiency: 0.5}, memory_limit: null")
    assert (space.cluster.nodes, space.cluster.devices_per_node) == (1, 4)
    assert space.cluster.memory_limit_bytes is None
    assert space.cluster.inter_node == Link(pytest.approx(6e-6), 50e9)
    assert space.cluster.intra_node.bandwidth_bytes_per_s == 400e9
    assert space.machine == Machine("h100", 9e14, 6e13, None, 3e12, 0.5, 3e-6)


def test_the_space_of_a_study_stands_alone_with_the_figures(load: Any, tmp_path: Path) -> None:
    space = load(", memory_limit: null")
    elsewhere = tmp_path / "results" / "space.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(space.to_yaml())
    (tmp_path / "machines" / "cluster.yaml").unlink()
    again = load_space(elsewhere)
    assert again == space
    assert again.machine is not None
    assert [again.fingerprint(p) for p in again.plans()] == [space.fingerprint(p) for p in space.plans()]


@pytest.mark.parametrize("name", catalogue())
def test_every_catalogued_machine_survives_a_file(name: str, load: Any, tmp_path: Path) -> None:
    from dataclasses import replace

    space = replace(load(), machine=catalogue()[name])
    (tmp_path / "again.yaml").write_text(space.to_yaml())
    assert load_space(tmp_path / "again.yaml").machine == catalogue()[name]


def test_figures_of_a_device_do_not_change_what_is_run(load: Any) -> None:
    one, other = load(), load(", machine: {efficiency: 0.1}")
    assert [one.fingerprint(p) for p in one.plans()] == [other.fingerprint(p) for p in other.plans()]


def test_what_the_file_leaves_out_may_stand_beside_it(load: Any) -> None:
    assert load(", devices_per_node: 2", "cluster: {nodes: 3}").cluster.devices == 6
    with pytest.raises(UserError, match=r"space\.yaml:4: cluster\.devices_per_node: missing"):
        load("", "cluster: {nodes: 3}")


@pytest.mark.parametrize(
    ("beside", "cluster", "told"),
    [
        ("", CLUSTER.replace("nodes:", "node:", 1), r"machines/cluster\.yaml:3: cluster\.node: unknown key 'node'"),
        ("", CLUSTER.replace("4us", "soon"), r"machines/cluster\.yaml:8: cluster\.links\.intra_node\.latency: 'soon'"),
        ("", CLUSTER.replace("9.0e+14", "0"), r"cluster\.yaml:10: machine\.peak_flops: 0 must be finite and above 0"),
        ("", CLUSTER + "extra: 1\n", "unknown key 'extra'"),
        ("", "[1]", r"machines/cluster\.yaml: the file must hold a mapping of sections \(cluster, machine, measured\)"),
        ("", "machine: 3", r"machines/cluster\.yaml:1: machine: 3 must be a mapping"),
        (", nodez: 1", CLUSTER, r"space\.yaml:4: cluster\.nodez: unknown key 'nodez', did you mean nodes"),
        (
            ", machine: {efficiancy: 1}",
            CLUSTER,
            r"cluster\.machine\.efficiancy: .* did you mean efficiency",
        ),
        (", device: a100-80g", CLUSTER, r"cluster\.device: 'a100-80g', but the figures of .* are of 'h100'"),
    ],
)
def test_mistakes_are_told_where_they_stand(load: Any, beside: str, cluster: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load(beside, cluster)


def test_a_file_that_is_not_there_is_named(load: Any, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACE.replace("machines/", "nowhere/") % "")
    with pytest.raises(UserError, match=r"space\.yaml:4: cluster\.file: .*nowhere/cluster\.yaml: can't read"):
        load_space(tmp_path / "space.yaml")
    (tmp_path / "space.yaml").write_text((SPACE % "").replace("machines/cluster.yaml", "[1]"))
    with pytest.raises(UserError, match=r"cluster\.file: \[1\] must be text"):
        load_space(tmp_path / "space.yaml")
