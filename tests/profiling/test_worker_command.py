"""A worker's command gets the plan, its environment and its folder, and no shell unless asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_launcher import make_request

from autotune.errors import UserError
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand, hang_timeout, parse_worker, worker_of
from autotune.profiling.launcher import launch
from autotune.space.placeholders import PLACEHOLDERS, WORD_LISTS
from autotune.space.plan import Plan
from autotune.space.settings import ReaderSettings, WorkerSettings


def test_every_placeholder_has_its_value(tmp_path: Path) -> None:
    names = [name for name in PLACEHOLDERS if name not in WORD_LISTS]
    worker = WorkerCommand(tuple(f"{name}={{{name}}}" for name in names), "none").with_port()
    told = dict(word.split("=", 1) for word in worker.fill(make_request(pp=2, dp=2), tmp_path))
    assert {name: told[name] for name in ("pp", "tp", "dp", "microbatches", "global_batch_size", "devices")} == {
        "pp": "2",
        "tp": "1",
        "dp": "2",
        "microbatches": "4",
        "global_batch_size": "8",
        "devices": "4",
    }
    assert (told["nnodes"], told["nproc"], told["layer_split"], told["steps"]) == ("1", "4", "1,1", "4")
    assert (told["out"], told["result_json"]) == (str(tmp_path), str(tmp_path / "result.json"))
    assert 0 < int(told["port"]) < 65536


def test_port_is_one_in_command_and_environment(tmp_path: Path) -> None:
    worker = WorkerCommand(("{port}",), "none", env=(("MASTER_PORT", "{port}"),)).with_port()
    assert worker.fill_env(make_request(), tmp_path) == {"MASTER_PORT": worker.fill(make_request(), tmp_path)[0]}


def test_real_command_runs_in_its_folder_with_its_environment_and_no_shell(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    worker = WorkerCommand(
        ("sh", "-c", 'pwd; echo "$1"; echo "$DEGREE"; cat "$2"', "sh", "$(echo run) `id` {schedule}", "{plan_json}"),
        "none",
        env=(("DEGREE", "pp{pp}"), ("AUTOTUNE_TRIAL_ID", "forged")),
        cwd=str(tmp_path / "job"),
    )
    folder = tmp_path / "trial"
    ending = launch(make_request(), worker, folder, 60)
    assert ending.exit_code == 0
    where, said, degree, plan = (folder / "rank-0.log").read_text().splitlines()
    assert where == str(tmp_path / "job")
    assert said == "$(echo run) `id` 1f1b"
    assert degree == "pp2"
    assert Plan.from_dict(json.loads(plan)) == make_request().plan


def test_shell_runs_the_command_only_if_asked_and_values_are_quoted(tmp_path: Path) -> None:
    worker = WorkerCommand(("for i in 1 2; do echo {out} $i; done",), "none", shell=True)
    folder = tmp_path / "it's; echo bad"
    launch(make_request(), worker, folder, 60)
    assert (folder / "rank-0.log").read_text().splitlines() == [f"{folder} 1", f"{folder} 2"]


def test_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "trial"
    launch(make_request(), WorkerCommand(("true",), "none", cwd=str(tmp_path / "gone")), folder, 60)
    assert f"cannot start 'true' in {tmp_path / 'gone'}" in (folder / "rank-0.log").read_text()


def test_a_command_line_worker_is_checked_before_anything_runs() -> None:
    with pytest.raises(UserError, match=r"unknown placeholder \{ppp\} in the worker command; known: pp, tp"):
        parse_worker("train {ppp}")
    assert parse_worker("train {megatron_args}").reader == ReaderSettings("megatron")
    assert parse_worker("train {megatron_args}").trainer_arguments == "megatron_args"


def test_worker_of_a_space_is_what_its_section_says() -> None:
    settings = WorkerSettings(("a", "{pp}"), env=(("A", "1"),), cwd="/", reader=ReaderSettings("megatron"))
    worker = worker_of(settings)
    assert (worker.argv, worker.env, worker.cwd, worker.reader.kind) == (("a", "{pp}"), (("A", "1"),), "/", "megatron")
    assert worker.serve_argv is None
    assert worker_of(None) == DEFAULT_WORKER


def test_only_workers_that_tell_their_progress_hang_by_default() -> None:
    assert hang_timeout(DEFAULT_WORKER, None) == 300
    assert hang_timeout(parse_worker("train"), None) is None
    assert hang_timeout(parse_worker("train"), 60.0) == 60
