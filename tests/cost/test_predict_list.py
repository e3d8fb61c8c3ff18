"""The lists of `predict` and of studies that ran nothing: what fits comes first, what only may fit is marked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cost.memory import MEMORY_ERROR
from autotune.results.columns import Row
from autotune.results.table import read_csv, write_csv

SPACE = Path(__file__).parents[2] / "search_spaces/dense-34b-64xh100.yaml"
LEGEND = "over limit: the predicted peak is over the memory limit"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A space whose fastest plan is predicted to be over the memory limit by less than the model's error."""
    folder = tmp_path_factory.mktemp("space")
    values = yaml.safe_load(SPACE.read_text(encoding="utf-8"))
    values["search"] |= {"pp": [4, 8], "tp": [2, 4], "micro_batch_size": 1}
    values["name"] = "tight"
    file = folder / "tight.yaml"

    def limited(size: int) -> list[dict[str, object]]:
        values["cluster"]["memory_limit"] = size
        file.write_text(yaml.safe_dump(values), encoding="utf-8")
        found: list[dict[str, object]] = json.loads(run("predict", file, "--json", "--top", 10**6))
        return found

    peak = limited(2**50)[0]["peak_memory_bytes"]
    assert isinstance(peak, int)
    limited(round(peak * (1 - MEMORY_ERROR / 2)))
    return file


def test_plans_that_fit_come_before_faster_ones_that_may_only_fit_and_these_before_refused_ones(space: Path) -> None:
    told = json.loads(run("predict", space, "--json", "--top", 10**6))
    groups = [0 if one["fits"] else 1 if one["refusal"] is None else 2 for one in told]
    assert set(groups) == {0, 1, 2}
    assert groups == sorted(groups)
    assert all(one["fits"] == (one["peak_memory_bytes"] <= one["memory_limit_bytes"]) for one in told)
    times = [
        [one["step_time_s"] for one, group in zip(told, groups, strict=True) if group == kind] for kind in range(3)
    ]
    assert all(group == sorted(group) for group in times)
    assert times[1][0] < times[0][0]  # the fastest is one that may only fit


def test_the_list_of_predict_marks_what_may_only_fit_and_says_what_the_mark_means(space: Path) -> None:
    told = json.loads(run("predict", space, "--json", "--top", 10**6))
    fit, over = (sum(one["refusal"] is None and one["fits"] is kind for one in told) for kind in (True, False))
    lines = run("predict", space, "--top", fit + over).splitlines()
    assert f"{len(told)} plans: {fit} fit, {over} over limit, {len(told) - fit - over} refused for memory" in lines[0]
    assert [line.endswith(", over limit") for line in lines[1:-1]] == [False] * fit + [True] * over
    assert lines[-1].startswith(LEGEND)
    assert LEGEND not in run("predict", space, "--top", fit)


@pytest.mark.parametrize("explain", [[], ["--explain"]], ids=["line", "explained"])
def test_one_plan_that_may_only_fit_is_marked_too(space: Path, explain: list[str]) -> None:
    told = json.loads(run("predict", space, "--json", "--top", 10**6))
    plan = next(one["plan"] for one in told if not one["fits"] and one["refusal"] is None)
    lines = run("predict", space, "--plan", json.dumps(plan), *explain).splitlines()
    assert lines[0].endswith(", over limit")
    assert lines[-1].startswith(LEGEND)


def test_a_study_of_predictions_lists_marks_and_exports_them_alike(space: Path, tmp_path: Path) -> None:
    run("search", space, "--fidelity", "predict", "--results-dir", tmp_path)
    study = tmp_path / "tight"
    rows = [row for row in read_csv(study / "trials.csv") if row.state == "predicted"]
    fits = [row.predicted_fits for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert rows[0].is_best
    for sort in ("tokens_per_s", "predicted_tokens_per_s"):
        lines = run("results", study, "--all", "--sort", sort).splitlines()
        listed = [line.split()[0] for line in lines if " predicted  " in line]
        assert listed == ["best", *listed[1 : fits.count(True)], *["over"] * fits.count(False)]
        assert sum(line.startswith(LEGEND) for line in lines) == 1
    assert "over limit" not in run("results", study, "--top", 3)
    assert "over limit" not in run("results", study, "--pareto")
    over = next(row for row in rows if not row.predicted_fits)
    given = ("--to", "torchrun", "--out", tmp_path / "job", "--fingerprint", over.fingerprint)
    assert "its predicted peak is over the memory limit" in run("export", study, *given)


def test_profiled_plans_that_do_not_fit_stand_below_those_that_do(tmp_path: Path) -> None:
    def row(trial: int | None, rate: float, fits: bool) -> Row:
        fidelity = "predict" if trial is None else "profile"
        plan = {"pp": 2, "tp": 1, "dp": 1, "micro_batch_size": 1, "microbatches": 4, "stages_per_device": 1}
        plan |= {"layer_split": (1, 1), "recompute": "none", "schedule": f"s{rate:.0f}"}
        told = {"predicted_step_time_s": 1 / rate, "predicted_tokens_per_s": rate, "predicted_fits": fits}
        return Row(trial=trial, state="predicted", fidelity=fidelity, **plan, **told)

    rows = [row(0, 9, False), row(1, 5, True), row(None, 8, False), row(None, 4, True)]
    write_csv(rows, tmp_path / "trials.csv")
    shown = json.loads(run("results", tmp_path, "--json"))
    assert [one["schedule"] for one in shown] == ["s5", "s9", "s4", "s8"]
