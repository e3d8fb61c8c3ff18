"""A study of the user's own training command exports that command, with the plan filled in; other scripts say so."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.export.exporter import export_note, export_plan, render_plan
from autotune.export.job import Job
from autotune.profiling.command import worker_of
from autotune.space.settings import WorkerSettings

ECHO = 'import json, os, sys; print(json.dumps([os.environ.get("RANK"), os.environ.get("DEGREES"), *sys.argv[1:]]))'


def bash(script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: os.environ[key] for key in ("PATH", "HOME", "LANG") if key in os.environ}
    return subprocess.run(
        ["bash", str(script), *arguments],
        env=inherited | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=script.parent,
    )


def with_worker(job: Job, *command: str, **settings: Any) -> Job:
    return replace(job, space=replace(job.space, worker=WorkerSettings(command, **settings)))


def exported(job: Job, folder: Path, target: str = "worker", evaluated: Any = "measured") -> Path:
    return export_plan(job.space, job.plan, target, folder, job.schedule, evaluated, job.trial)[0]


def test_the_script_runs_the_command_with_the_plans_values(job_of: Any, tmp_path: Path) -> None:
    (tmp_path / "job's").mkdir()
    command = (
        "{python}",
        "-c",
        ECHO,
        "--pp={pp}",
        "$(id) `id` {schedule}",
        "{steps}",
        "{request}",
        "{{pp}}",
        "{trial}",
    )
    job = with_worker(
        replace(job_of("zb-h1", pp=4), trial=7),
        *command,
        starter="none",
        env=(("DEGREES", "{pp} {tp} {out}"),),
        cwd=str(tmp_path / "job's"),
    )
    script = exported(job, tmp_path / "launch me")
    done = bash(script, "--extra")
    assert done.returncode == 0, done.stderr
    out = script.parent / "out"
    assert json.loads(done.stdout) == [
        None,
        f"4 1 {out}",
        "--pp=4",
        "$(id) `id` zb-h1",
        "4",
        f"{out}/request.json",
        "{pp}",
        "7",
        "--extra",
    ]
    request = json.loads((out / "request.json").read_text())
    assert request["plan"] == json.loads((out / "plan.json").read_text()) == job.plan.to_dict()
    longer = bash(script, STEPS="20", OUT=str(tmp_path / "elsewhere"))
    assert json.loads(longer.stdout)[4] == "21"
    assert json.loads((tmp_path / "elsewhere" / "request.json").read_text())["measured_steps"] == 20


def test_a_shells_program_gets_what_is_filled_in_quoted_as_in_a_trial(job_of: Any, tmp_path: Path) -> None:
    job = with_worker(job_of(pp=2), 'for i in 1 {pp}; do echo {out} "$i"; done', shell=True, starter="none")
    script = exported(job, tmp_path / "it's; echo bad")
    done = bash(script)
    assert done.stdout.splitlines() == [f"{script.parent}/out 1", f"{script.parent}/out 2"], done.stderr
    refused = bash(script, "--more")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "takes no further arguments: --more" in refused.stderr


@pytest.mark.ranks
@pytest.mark.parametrize("target", ["worker", "torchrun"])
def test_torchrun_starts_the_command_once_a_rank(job_of: Any, tmp_path: Path, target: str) -> None:
    command = ("sh", "-c", 'echo "$1" > "$2/rank-$RANK.txt"', "sh", "dp{dp}", "{out}")
    done = bash(exported(with_worker(job_of(pp=2, dp=2), *command), tmp_path, target))
    assert done.returncode == 0, done.stderr
    assert {path.name: path.read_text() for path in (tmp_path / "out").glob("rank-*")} == {
        f"rank-{rank}.txt": "dp2\n" for rank in range(4)
    }


def test_a_command_that_starts_its_ranks_is_told_its_nodes_and_runs_on_the_first(job_of: Any, tmp_path: Path) -> None:
    job = job_of(pp=2, dp=2)
    told = ("echo", "{nnodes}", "{nproc}", "{port}", "{master_addr}")
    script = exported(with_worker(job, *told, starter="none"), tmp_path / "a")
    one = bash(script).stdout.split()
    assert (one[:2], one[3]) == (["1", "4"], "localhost")
    assert 0 < int(one[2]) < 65536
    nodes = {"NNODES": "2", "MASTER_ADDR": "node0"}
    assert bash(script, **nodes).stdout.split() == ["2", "2", "29500", "node0"]
    other = bash(script, **nodes, NODE_RANK="1")
    assert (other.returncode, other.stdout) == (0, "")
    lost = bash(script, NNODES="2")
    assert (lost.returncode, "set MASTER_ADDR" in lost.stderr) == (2, True)
    script = exported(with_worker(job, *told, "{node_rank}", starter="none"), tmp_path / "b")
    assert bash(script, **nodes, NODE_RANK="1").stdout.split()[-1] == "1"


def test_arguments_of_trainers_are_filled_in(job_of: Any, tmp_path: Path) -> None:
    script = exported(with_worker(job_of(pp=4), "echo", "{megatron_args}", starter="none"), tmp_path / "a")
    assert "--pipeline-model-parallel-size 4 " in bash(script).stdout
    script = exported(with_worker(job_of("zb-h1", pp=4), "echo", "{torchtitan_args}", starter="none"), tmp_path / "b")
    words = bash(script, "--more").stdout.split()
    assert (words[0], words[-1]) == ("--more", "activation-checkpoint:none")  # a subcommand stands last
    assert words[words.index("--parallelism.pipeline_parallel_schedule_csv") + 1] == f"{tmp_path}/b/out/schedule.csv"
    assert (tmp_path / "b" / "out" / "schedule.csv").is_file()


def test_a_folder_of_the_worker_that_is_gone_is_told(job_of: Any, tmp_path: Path) -> None:
    done = bash(exported(with_worker(job_of(), "true", starter="none", cwd="/no/such $(id)"), tmp_path))
    assert done.returncode == 2
    assert "the worker's folder /no/such $(id) is not here: set WORKER_CWD" in done.stderr


@pytest.mark.parametrize(
    ("target", "starter"), [("megatron", "torchrun"), ("torchtitan", "none"), ("torchrun", "none")]
)
def test_a_script_of_another_launcher_says_what_the_plan_was_measured_with(
    job_of: Any, target: str, starter: Any
) -> None:
    job = with_worker(job_of(), "my train.sh", "--pp", "{pp}", starter=starter)
    said = "The plan was measured with the study's own worker `'my train.sh' --pp {pp}`, not with this launcher."

    def script(evaluated: Any) -> str:
        files = render_plan(job.space, job.plan, target, evaluated=evaluated)
        return next(text for name, text in files.items() if name.endswith(".sh"))

    assert f"# {said}\n" in script("measured")
    assert export_note(job.space, job.plan, target, "measured") == f"{said} `--to worker` writes one that runs it."
    assert "was measured" not in script("predicted")
    assert "`'my train.sh' --pp {pp}`, which this script does not run" in script("predicted")
    assert "predicted by the cost model, not measured" in script("predicted")


def test_no_note_where_the_script_runs_what_was_measured(job_of: Any) -> None:
    job = with_worker(job_of(), "train")
    for target in ("worker", "torchrun"):
        assert export_note(job.space, job.plan, target, "measured") is None
    assert export_note(job_of().space, job.plan, "megatron", "measured") is None
    assert worker_of(job.space.worker).argv == ("train",)


def test_line_breaks_of_a_command_do_not_end_the_comment(job_of: Any, tmp_path: Path) -> None:
    job = with_worker(job_of(), "true\ntouch bad\n", shell=True, starter="none")
    text = render_plan(job.space, job.plan, "torchrun", evaluated="measured")["train.sh"]
    assert "own worker `true touch bad`, not" in text
    assert "\ntouch bad" not in text
