"""The torchrun export runs: real ranks train the plan that was measured."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.export.exporter import TARGETS, export_plan, render_plan
from autotune.export.job import Job
from autotune.profiling.protocol import TrialRequest
from autotune.schedules import registry
from autotune.space.settings import WorkerSettings


def render(job: Job, target: str) -> dict[str, str]:
    return render_plan(job.space, job.plan, target, job.schedule)


def bash(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return subprocess.run(
        ["bash", str(script)], env=inherited | variables, capture_output=True, text=True, timeout=300, check=False
    )


def test_plan_json_is_the_workers_request_with_the_schedule_that_was_measured(job_of: Any) -> None:
    job = job_of("v-half", pp=2, stages=2)
    request = TrialRequest.from_dict(json.loads(render(job, "torchrun")["plan.json"]))
    assert request.plan == job.plan
    assert request.schedule == registry.build("v-half", 2, 4, 2)
    assert (request.model, request.cluster, request.training) == (
        job.space.model,
        job.space.cluster,
        job.space.training,
    )


@pytest.mark.parametrize("target", TARGETS)
def test_scripts_are_valid_bash_executable_and_survive_odd_folders(target: str, job_of: Any, tmp_path: Path) -> None:
    job = job_of("interleaved-1f1b", pp=2, tp=2, stages=2)
    written = export_plan(job.space, job.plan, target, tmp_path / "a folder $(touch x)")
    (script,) = [path for path in written if path.suffix == ".sh"]
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert sorted(path.name for path in script.parent.iterdir()) == sorted(path.name for path in written)


@pytest.mark.ranks
def test_the_exported_script_trains_the_plan_on_real_ranks(job_of: Any, tmp_path: Path) -> None:
    job = job_of("zb-h1", pp=2, microbatches=2)
    out = tmp_path / "launch me"
    written = export_plan(job.space, job.plan, "torchrun", out)
    result = bash(next(path for path in written if path.suffix == ".sh"), STEPS="4", OUT=str(out / "reports"))
    assert result.returncode == 0, result.stderr
    reports = [json.loads((out / "reports" / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert [report["state"] for report in reports] == ["ok", "ok"]
    assert [len(report["step_wall_s"]) for report in reports] == [4, 4]
    assert "2 ranks, 4 steps" in result.stdout
    assert "loss 6." in result.stdout  # ln 512 = 6.24 of an untrained model


def test_the_wrong_number_of_ranks_is_refused_before_anything_starts(job_of: Any, tmp_path: Path) -> None:
    job = job_of(pp=2, dp=2)
    script = export_plan(job.space, job.plan, "torchrun", tmp_path)[0]
    result = bash(script, NPROC_PER_NODE="3")
    assert result.returncode == 2
    assert "needs 4 ranks" in result.stderr


def fake_torchrun(folder: Path) -> Path:
    fake = folder / "python"
    fake.write_text('#!/bin/bash\n[[ "$1" == -m ]] && printf "%s\\n" "$@" > "$(dirname "$0")/seen"\nexit 0\n')
    fake.chmod(0o755)
    return fake


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NNODES": "3"}, "needs 4 ranks; NNODES=3 x NPROC_PER_NODE=4 makes 12"),
        ({"NNODES": "4", "NPROC_PER_NODE": "8"}, "needs 4 ranks; NNODES=4 x NPROC_PER_NODE=8 makes 32"),
        ({"NNODES": "two"}, "NNODES=two must be a whole number from 1"),
        ({"NPROC_PER_NODE": "08"}, "NPROC_PER_NODE=08 must be a whole number from 1"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2 must be a whole number from 0 to 1"),
        ({"NNODES": "2"}, "set MASTER_ADDR to the address of node 0"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT=65536 must be a whole number from 1 to 65535"),
        ({"STEPS": "abc"}, "STEPS=abc must be a whole number from 1"),
        ({"STEPS": "0"}, "STEPS=0 must be a whole number from 1"),
        ({"STEPS": "-1"}, "STEPS=-1 must be a whole number from 1"),
    ],
)
@pytest.mark.parametrize("worker", [None, WorkerSettings(("true",))])
def test_what_the_script_cannot_use_is_told_before_anything_starts(
    job_of: Any, tmp_path: Path, variables: dict[str, str], said: str, worker: WorkerSettings | None
) -> None:
    job = job_of(pp=2, dp=2)
    space = replace(job.space, worker=worker)
    script = export_plan(space, job.plan, "worker", tmp_path)[0]
    done = bash(script, PYTHON=str(fake_torchrun(tmp_path)), **variables)
    assert done.returncode == 2
    assert f"error: {said}" in done.stderr.replace("this plan ", "")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "seen").exists()


@pytest.mark.parametrize(
    ("nodes", "per_node", "lines"),
    [
        (1, 4, ["One node: bash train.sh", "NNODES=2 NPROC_PER_NODE=2 NODE_RANK=<0..1> MASTER_ADDR"]),
        (4, 1, ["NNODES=4 NPROC_PER_NODE=1 NODE_RANK=<0..3> MASTER_ADDR"]),
    ],
)
@pytest.mark.parametrize("target", TARGETS)
def test_the_example_and_the_defaults_fit_the_plan(
    job_of: Any, tmp_path: Path, target: str, nodes: int, per_node: int, lines: list[str]
) -> None:
    job = job_of(pp=4)
    space = replace(job.space, cluster=replace(job.space.cluster, nodes=nodes, devices_per_node=per_node))
    files = export_plan(space, job.plan, target, tmp_path)
    script = next(path for path in files if path.suffix == ".sh")
    text = " ".join(script.read_text().replace(script.name, "train.sh").split())
    assert all(line in text for line in lines)
    assert ("One node:" in text) == (nodes == 1)
    fake = fake_torchrun(tmp_path)
    bash(script, PYTHON=str(fake), MASTER_ADDR="a", MEGATRON="m", CONFIG="c", NNODES="2")
    seen = (tmp_path / "seen").read_text().split()
    assert (seen[seen.index("--nnodes") + 1], seen[seen.index("--nproc-per-node") + 1]) == ("2", "2")
    bash(script, PYTHON=str(fake), MASTER_ADDR="a", MEGATRON="m", CONFIG="c")
    seen = (tmp_path / "seen").read_text().split()
    assert (seen[seen.index("--nnodes") + 1], seen[seen.index("--nproc-per-node") + 1]) == (str(nodes), str(per_node))


def test_a_plan_of_one_device_has_no_example_of_nodes(job_of: Any) -> None:
    job = job_of(pp=1)
    text = render(job, "torchrun")["train.sh"]
    assert "on 1 cpu device\n" in text
    assert "Several nodes" not in text


def test_several_nodes_meet_at_the_named_address(job_of: Any, tmp_path: Path) -> None:
    job = job_of(pp=2, dp=2)
    script = export_plan(job.space, job.plan, "torchrun", tmp_path)[0]
    fake = fake_torchrun(tmp_path)
    missing = bash(script, NNODES="2", NPROC_PER_NODE="2", PYTHON=str(fake))
    assert missing.returncode != 0
    assert "MASTER_ADDR" in missing.stderr
    bash(
        script, NNODES="2", NPROC_PER_NODE="2", NODE_RANK="1", MASTER_ADDR="node0", MASTER_PORT="4321", PYTHON=str(fake)
    )
    seen = (tmp_path / "seen").read_text().split()
    for option, value in (
        ("--nnodes", "2"),
        ("--nproc-per-node", "2"),
        ("--node-rank", "1"),
        ("--rdzv-endpoint", "node0:4321"),
        ("--max-restarts", "0"),
    ):
        assert seen[seen.index(option) + 1] == value
    assert seen[seen.index("--rdzv-id") + 1] == job.run_id
    assert "autotune.profiling.worker" in seen


def test_an_unknown_target_is_refused_with_the_nearest_one(job_of: Any, tmp_path: Path) -> None:
    job = job_of()
    with pytest.raises(UserError, match="did you mean megatron"):
        export_plan(job.space, job.plan, "megatronn", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_a_clear_error(job_of: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    job = job_of()
    for out in (tmp_path / "file", tmp_path / "file" / "out" / "deeper"):
        with pytest.raises(UserError, match=rf"can't write to {out}: {tmp_path}/file is no folder; the files go into"):
            export_plan(job.space, job.plan, "torchrun", out)
    (tmp_path / "out" / "train.sh").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"can't write {tmp_path}/out/train.sh: Is a directory"):
        export_plan(job.space, job.plan, "torchrun", tmp_path / "out")
