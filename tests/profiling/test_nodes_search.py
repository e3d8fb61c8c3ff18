"""Whole searches over nodes, by a remote shell and by Slurm."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import FAKES, HEAD, LINK, OTHER, SHELL

from autotune.profiling.command import DEFAULT_WORKER
from autotune.profiling.launcher import launch
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.rank_files import read_report
from autotune.schedules import registry
from autotune.space.cluster import ClusterSpec
from autotune.space.plan import Plan
from autotune.space.space import load_space

SPACE = """
name: nodes
model: {layers: 4, hidden: 16, heads: 2, kv_heads: 2, ffn_hidden: 32, vocab: 32, sequence_length: 8}
cluster: {nodes: 2, devices_per_node: 2, device: cpu}
training: {global_batch_size: 4}
search: {pp: [2, 4], tp: [1], micro_batch_size: [1], schedule: [1f1b]}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "space.yaml").write_text(SPACE)
    return tmp_path


def search(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune.cli", "search", "space.yaml", "--sampler", "grid", "--final", "0"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | variables
    done = subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=300, env=environ)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def table(folder: Path) -> list[dict[str, str]]:
    with open(folder / "results" / "nodes" / "trials.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def loss_of_one_rank(folder: Path) -> float:
    """Of the same model and batch on one rank of this machine."""
    space = load_space(folder / "space.yaml")
    plan = Plan(1, 1, 1, 1, 4, "1f1b", 1, (space.model.layers,))
    cluster = ClusterSpec(1, 1, "cpu", None, LINK, LINK)
    request = TrialRequest(0, plan, registry.build("1f1b", 1, 4, 1), space.model, cluster, space.training)
    launch(request, DEFAULT_WORKER, folder / "alone", 120)
    report = read_report(folder / "alone", 0)
    assert report is not None
    return report.losses[-1]


def test_inside_a_slurm_allocation_warm_ranks_on_its_nodes_train_as_one_rank_does(folder: Path) -> None:
    log = folder / "srun.log"
    (folder / "bin").mkdir()
    (folder / "bin" / "srun").symlink_to(FAKES / "srun")
    done = search(
        folder,
        PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        FAKE_SRUN_LOG=str(log),
        SLURM_JOB_ID="17",
        SLURM_JOB_NODELIST="127.0.0.[2-3]",
        SLURM_NNODES="2",
        SLURM_CPUS_PER_TASK="1",
    )
    assert done.returncode == 0, done.stderr
    assert f"every trial spans 2 nodes, by srun: {HEAD}, {OTHER}" in done.stdout + done.stderr
    rows = table(folder)
    assert [row["state"] for row in rows] == ["ok", "ok"]
    expected = loss_of_one_rank(folder)
    assert [float(row["loss"]) for row in rows] == pytest.approx([expected] * 2, rel=1e-4)
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(steps) == 2  # the check and one launch, which ran both plans
    assert all("--overlap" in step for step in steps)
    told = json.loads((folder / "results" / "nodes" / "logs" / "ranks-0000" / "nodes.json").read_text())
    assert [(node["name"], node["ranks"]) for node in told] == [(HEAD, [0, 1]), (OTHER, [2, 3])]


def over_hosts(folder: Path, action: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    worker = f"env MEET_PORT={{port}} MEET_HOST={{master_addr}} {{python}} {FAKES / 'node_worker.py'} {{node_rank}} "
    nodes = ("--hosts", f"{HEAD},{OTHER}", "--remote-shell", " ".join(SHELL))
    return search(folder, *nodes, "--worker", worker + action, "--launcher", "none", *arguments)


def test_a_worker_of_ones_own_is_searched_over_nodes_and_a_study_keeps_to_its_nodes(folder: Path) -> None:
    done = over_hosts(folder, "meet", "--trials", "1")
    assert done.returncode == 0, done.stderr
    assert [row["state"] for row in table(folder)].count("ok") == 1
    again = over_hosts(folder, "meet", "--resume")
    assert again.returncode == 0, again.stderr
    assert [row["state"] for row in table(folder)] == ["ok", "ok"]
    worker = f"{{python}} {FAKES / 'node_worker.py'} leave"
    here = search(folder, "--worker", worker, "--launcher", "none", "--resume")
    assert here.returncode != 0
    assert "nodes: 2 -> (not there)" in here.stderr


def test_mistakes_are_told_before_anything_is_started(folder: Path) -> None:
    done = over_hosts(folder, "meet", "--hosts", "a,b,c")
    assert done.returncode == 2
    assert "--hosts names 3 nodes (a, b, c), but the space's cluster.nodes is 2" in done.stderr
    done = search(folder, "--remote-shell", "rsh {host}")
    assert (done.returncode, "--remote-shell means nothing without --hosts" in done.stderr) == (2, True)
    done = over_hosts(folder, "meet", "--hosts", f"{HEAD},unreachable")
    assert done.returncode == 2
    assert "node unreachable can't be reached" in done.stderr
    assert not (folder / "results").exists()
