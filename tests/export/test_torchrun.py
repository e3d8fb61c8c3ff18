"""The torchrun export runs: real ranks train the plan that was measured."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.export.exporter import TARGETS, export_plan, render_plan
from autotune.export.job import Job
from autotune.profiling.protocol import TrialRequest
from autotune.schedules import registry


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


def test_several_nodes_meet_at_the_named_address(job_of: Any, tmp_path: Path) -> None:
    job = job_of(pp=2, dp=2)
    script = export_plan(job.space, job.plan, "torchrun", tmp_path)[0]
    fake = tmp_path / "python"
    fake.write_text('#!/bin/bash\n[[ "$1" == -m ]] && printf "%s\\n" "$@" > "$(dirname "$0")/seen"\nexit 0\n')
    fake.chmod(0o755)
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
    with pytest.raises(UserError, match="can't write"):
        export_plan(job.space, job.plan, "torchrun", tmp_path / "file" / "out")
