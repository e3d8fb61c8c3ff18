"""The command `export`: it exports what the study's own space has, and says what became of the plan there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.rows import row_without_trial
from autotune.results.table import write_csv
from autotune.space.settings import WorkerSettings
from autotune.space.space import Space, load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"


@pytest.fixture(scope="module")
def space() -> Space:
    return load_space(QUICKSTART)


@pytest.fixture
def row(space: Space) -> Row:
    plan = space.plans()[0]
    row = row_without_trial(plan, space.fingerprint(plan), "predicted", "", None, 1, None)
    return replace(row, trial=0, state="ok", fidelity="run", step_time_s=1.0, tokens_per_s=1.0, is_best=True)


def export(space: Space, rows: list[Row], folder: Path, *arguments: str) -> str:
    (folder / "space.yaml").write_text(space.to_yaml())
    write_csv(rows, folder / "trials.csv")
    done = CliRunner().invoke(
        app, ["export", str(folder), "--to", "torchrun", "--out", str(folder / "out"), *arguments]
    )
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


def test_an_ok_plan_is_exported_without_remark(space: Space, row: Row, tmp_path: Path) -> None:
    said = export(space, [row], tmp_path)
    assert said.splitlines()[0] == f"{row.describe()} for torchrun:"
    assert list((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("oom", "rank 1 ran out of memory\nat step 2", "(it is oom: rank 1 ran out of memory):"),
        ("timeout", "", "(it is timeout):"),
        ("refused", "refused (estimate): 9 GiB", "(it is refused: refused (estimate): 9 GiB):"),
        ("predicted", "not run", "(predicted, not measured):"),
    ],
)
def test_a_plan_that_did_not_run_is_exported_with_its_state(
    space: Space, row: Row, tmp_path: Path, state: str, reason: str, said: str
) -> None:
    ended = replace(row, state=state, reason=reason, is_best=False)
    assert export(space, [ended], tmp_path, "--fingerprint", row.fingerprint).splitlines()[0].endswith(said)


def test_a_row_of_another_space_is_refused_and_nothing_written(space: Space, row: Row, tmp_path: Path) -> None:
    other = replace(space, training=replace(space.training, global_batch_size=2 * space.training.global_batch_size))
    with pytest.raises(UserError, match=rf"not of one study, or one of them was changed: .* is {row.fingerprint} in"):
        export(other, [row], tmp_path)
    with pytest.raises(UserError, match="not of one study"):  # a plan that was edited
        export(space, [replace(row, microbatches=(row.microbatches or 0) + 1)], tmp_path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens_per_s": 1.0}, "The plan was measured with 512"),
        (
            {"state": "predicted", "fidelity": "profile", "step_time_s": None, "predicted_step_time_s": 1.0},
            "The plan was profiled with 512",
        ),
        (
            {"state": "predicted", "fidelity": "predict", "step_time_s": None, "predicted_step_time_s": 1.0},
            "The plan was predicted with 512",
        ),
        ({"state": "failed", "step_time_s": None}, "The plan is for 512"),
    ],
)
def test_the_script_tells_measured_from_profiled_and_predicted(
    space: Space, row: Row, tmp_path: Path, changes: Any, said: str
) -> None:
    plan = next(plan for plan in space.plans() if plan.schedule == "1f1b")
    told = row_without_trial(plan, space.fingerprint(plan), "predicted", "", None, 1, None)
    row = replace(told, trial=0, state="ok", fidelity="run", step_time_s=1.0, is_best=True)
    export(space, [replace(row, **changes)], tmp_path, "--to", "megatron")
    assert said in (tmp_path / "out" / "train_megatron.sh").read_text()


def test_without_to_the_worker_of_the_space_is_exported_and_other_launchers_get_a_note(
    space: Space, row: Row, tmp_path: Path
) -> None:
    worker = WorkerSettings(("my-training", "--pp", "{pp}"), starter="none")
    space = replace(space, worker=worker)
    (tmp_path / "space.yaml").write_text(space.to_yaml())
    write_csv([row], tmp_path / "trials.csv")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["export", str(tmp_path), "--out", str(tmp_path / "out"), *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "for worker:" in run()
    assert f"worker=(\n  my-training\n  --pp {row.pp}\n" in (tmp_path / "out" / "train.sh").read_text()
    note = "measured with the study's own worker `my-training --pp {pp}`, not with this launcher"
    assert note in run("--to", "torchrun")
    assert note in (tmp_path / "out" / "train.sh").read_text()
    assert note in json.loads(run("--to", "torchrun", "--json"))["note"]
    assert json.loads(run("--json"))["note"] is None


def test_a_point_that_a_rule_refused_is_no_plan_to_export(space: Space, tmp_path: Path) -> None:
    refused = Row(state="refused", reason="tp-heads: tp 3 doesn't divide 4 attention heads", pp=1, tp=3, trial=5)
    with pytest.raises(UserError, match="is no plan that can run: tp-heads"):
        export(space, [refused], tmp_path, "--trial", "5")
