"""Plans are predicted, profiled or run; what is predicted is never taken for a measurement."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import LEGAL, REFUSED, Bench

from autotune.results.columns import COLUMNS, Row
from autotune.results.compare import compare
from autotune.results.table import read_csv

MEASURED = ("step_time_s", "step_time_wall_s", "tokens_per_s", "peak_memory_bytes", "bubble_rate", "loss", "clock")
PARTS = ("compute", "bubble", "tp", "pp", "dp", "optimizer", "overhead")


@pytest.fixture
def roomy(bench: Bench) -> Bench:
    """The bench with memory for every plan."""
    bench.edit_space("1MiB", "1GiB")
    return bench


def rows_of(bench: Bench, state: str | None = None) -> list[Row]:
    return [row for row in read_csv(bench.study / "trials.csv") if state in (None, row.state)]


def predict(bench: Bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    return bench.run("search", "tiny.yaml", "--fidelity", "predict", *arguments)


def test_predict_ranks_every_legal_plan_without_trials_and_without_torch(roomy: Bench) -> None:
    code = (
        "import sys; from autotune.cli import main; sys.argv = ['autotune', *sys.argv[1:]]\n"
        "try: main()\n"
        "finally: print('TORCH', 'torch' in sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "search", "tiny.yaml", "--fidelity", "predict"]
    done = subprocess.run(command, cwd=roomy.path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "TORCH False"
    assert "best predicted: " in done.stdout
    assert not (roomy.study / "logs").exists()
    predicted = rows_of(roomy, "predicted")
    assert roomy.states() == {"predicted": LEGAL, "refused": REFUSED}
    assert all(row.fidelity == "predict" and row.trial is None and row.predicted_fits for row in predicted)
    assert all(getattr(row, name) in (None, "") for row in predicted for name in MEASURED)
    steps = [row.predicted_step_time_s or math.nan for row in predicted]
    assert steps == sorted(steps)
    assert [row.is_best for row in predicted] == [True] + [False] * (LEGAL - 1)
    for row, step_s in zip(predicted, steps, strict=True):
        assert sum(getattr(row, f"predicted_{part}_s") for part in PARTS) == pytest.approx(step_s)
        assert row.predicted_tokens_per_s == pytest.approx(16 * 32 / step_s)


def test_predicted_plans_are_shown_compared_and_exported_as_predicted(roomy: Bench) -> None:
    predict(roomy)
    assert "predicted step" in roomy.run("results", str(roomy.study)).stdout
    assert "predicted by the cost model, not measured" in roomy.run("compare", str(roomy.study)).stdout
    compared = json.loads(roomy.run("compare", str(roomy.study), "--json").stdout)
    assert compared["fidelity"] == "predict"
    assert compared["baseline"]["ratio_low"] is None
    assert compared["baseline"]["beyond_spread"] is False
    best = json.loads((roomy.study / "best.json").read_text())
    assert best["fidelity"] == "predict"
    assert best["row"]["tokens_per_s"] is None
    exported = roomy.run("export", str(roomy.study), "--to", "torchrun", "--out", str(roomy.path / "out"))
    assert "(predicted, not measured)" in exported.stdout
    slowest = rows_of(roomy, "predicted")[-1]
    arguments = ("--to", "torchrun", "--out", str(roomy.path / "out2"), "--fingerprint", slowest.fingerprint)
    assert slowest.describe() in roomy.run("export", str(roomy.study), *arguments).stdout


def test_interrupted_predictions_go_on_and_end_in_the_same_table(roomy: Bench) -> None:
    predict(roomy)
    table = roomy.study / "trials.csv"
    whole = table.read_text()
    lines = whole.splitlines(keepends=True)
    table.write_text("".join(lines[:1] + lines[4:]))
    done = predict(roomy, "--resume")
    assert f"resuming with {LEGAL - 3} predicted plans\npredicting 3 plans" in done.stdout
    assert table.read_text() == whole


def test_study_keeps_its_fidelity_and_what_its_predictions_rest_on(roomy: Bench) -> None:
    predict(roomy)
    assert "fidelity: 'predict' -> 'run'" in roomy.search("--resume").stderr
    done = predict(roomy, "--resume", "--assume", "dp_overlap=0.5")
    assert done.returncode == 2
    assert "predictor.assumptions.dp_overlap: 0.0 -> 0.5" in done.stderr


@pytest.mark.parametrize("arguments", [("--trials", "3"), ("--timeout", "3"), ("--trial-timeout", "3")])
def test_budgets_of_trials_are_refused_where_there_are_none(bench: Bench, arguments: tuple[str, str]) -> None:
    done = predict(bench, *arguments)
    assert done.returncode == 2
    assert f"{arguments[0]} means nothing with --fidelity predict" in done.stderr


def test_plans_that_cannot_fit_by_estimate_cost_no_trial_and_say_what_fills_memory(bench: Bench) -> None:
    done = bench.search("--refuse-by-estimate")
    assert done.returncode == 1
    assert f"{LEGAL} refused by the estimate of their memory" in done.stderr
    assert bench.launches() == []
    assert bench.states() == {"refused": LEGAL + REFUSED}
    for row in rows_of(bench):
        if row.fidelity == "predict":
            assert row.reason.startswith("refused (estimate): pipeline device ")
            assert "optimizer" in row.reason
            assert (row.predicted_peak_memory_bytes or 0) * 0.92 > 1 << 20
    assert bench.search("--resume", "--no-refuse-by-estimate").returncode == 0
    assert len(bench.launches()) == LEGAL


def test_estimate_refuses_nothing_for_other_software_unless_asked(bench: Bench) -> None:
    bench.search()
    assert bench.states() == {"ok": LEGAL, "refused": REFUSED}


def test_estimate_refuses_only_beyond_its_error_and_what_is_over_the_limit_does_not_compete(bench: Bench) -> None:
    bench.edit_space("1MiB", "1GiB")
    predict(bench)
    peaks = sorted(row.predicted_peak_memory_bytes or 0 for row in rows_of(bench, "predicted"))
    limit = round(peaks[0] * 0.97)  # below every prediction, the least of which is within the error
    bench.edit_space("1GiB", str(limit))
    done = predict(bench, "--fresh")
    inside = sum(0.92 * peak <= limit for peak in peaks)
    assert done.returncode == 1
    assert f"{inside} fit only if their prediction is too high" in done.stderr
    assert bench.states()["predicted"] == inside
    assert not any(row.is_best or row.predicted_fits for row in rows_of(bench))
    predict(bench, "--fresh", "--no-refuse-by-estimate")
    assert bench.states() == {"predicted": LEGAL, "refused": REFUSED}


def test_measured_plans_carry_the_error_of_their_prediction_and_the_rest_says_why_it_was_not_run(roomy: Bench) -> None:
    roomy.search("--trials", "3")
    measured, waiting = rows_of(roomy, "ok"), rows_of(roomy, "predicted")
    assert (len(measured), len(waiting)) == (3, LEGAL - 3)
    for row in measured:
        assert row.predicted_step_time_s is not None
        assert row.step_time_s is not None
        assert row.predicted_step_time_error == pytest.approx(row.predicted_step_time_s / row.step_time_s - 1)
        assert row.predicted_peak_memory_error is not None
    assert {row.reason for row in waiting} == {"not run: the budget of 3 trials is spent"}
    assert all(row.predicted_step_time_s and row.predicted_step_time_error is None for row in waiting)
    assert all(row.speedup_vs_1f1b is None and not row.is_best for row in waiting)
    assert compare([*measured, *waiting]).fidelity == "run"


def test_baselines_are_those_with_the_shortest_predicted_step(roomy: Bench) -> None:
    roomy.search("--trials", "2", "--sampler", "random")
    rows = [row for row in rows_of(roomy) if row.state != "refused"]
    for trial, schedule in enumerate(("1f1b", "interleaved-1f1b")):
        family = [row for row in rows if row.schedule == schedule]
        fastest = min(family, key=lambda row: row.predicted_step_time_s or math.inf)
        assert fastest.trial == trial


def test_finished_trials_refit_the_device_and_can_be_used_by_other_studies(roomy: Bench) -> None:
    done = roomy.search("--json")
    refit = json.loads(done.stdout)["refit"]
    assert refit["trials"] == LEGAL
    assert refit["mean_error_after"] < refit["mean_error_before"]
    predict(roomy, "--name", "before")
    again = predict(roomy, "--name", "after", "--calibrated-by", str(roomy.study))
    assert "refitted to 9 trials" in again.stderr
    before, after = (read_csv(roomy.path / "results" / name / "trials.csv")[0] for name in ("before", "after"))
    assert before.predicted_step_time_s != after.predicted_step_time_s


def test_device_without_figures_is_run_without_predictions_and_not_predicted(roomy: Bench) -> None:
    roomy.edit_space("device: cpu", "device: cuda")
    assert "no figures for device 'cuda'" in predict(roomy).stderr
    assert "no predictions: no figures for device 'cuda'" in roomy.search("--trials", "1").stdout
    assert all(row.predicted_step_time_s is None for row in rows_of(roomy))
    assert roomy.states() == {"ok": 1, "predicted": LEGAL - 1, "refused": REFUSED}


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_loss_that_is_no_number_is_never_ok(roomy: Bench, loss: float) -> None:
    roomy.tell_worker({"when": {"schedule": "1f1b"}, "do": "succeed", "loss": loss})
    roomy.search("--trials", "1")
    (tried,) = [row for row in rows_of(roomy) if row.trial is not None]
    assert tried.state == "non-finite"
    assert tried.tokens_per_s is None
    assert not tried.is_best


@pytest.mark.slow
def test_profile_measures_stages_once_and_is_resumed(roomy: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_CACHE", str(roomy.path / "cache"))
    roomy.edit_space("pp: [1, 2, 4]", "pp: [2, 4]")
    roomy.edit_space("interleaved-1f1b, zb-h1, v-min", "interleaved-1f1b")
    arguments = ("search", "tiny.yaml", "--fidelity", "profile")
    done = roomy.run(*arguments, "--trials", "1")
    assert done.returncode == 0, done.stderr
    profiles = len(list((roomy.path / "cache").rglob("*.json")))
    states = [(row.fidelity, row.state) for row in rows_of(roomy) if row.fidelity]
    assert sorted(states) == [("predict", "predicted")] * 3 + [("profile", "predicted")]
    assert roomy.run(*arguments, "--resume").returncode == 0
    rows = [row for row in rows_of(roomy) if row.fidelity]
    assert [(row.trial, row.fidelity, row.state) for row in rows] == [(n, "profile", "predicted") for n in range(4)]
    assert all(row.predicted_step_time_s and row.step_time_s is None for row in rows)
    assert len(list(Path(roomy.path / "cache").rglob("*.json"))) <= 2 * profiles  # another split, not other plans
    assert "predicted from profiled stages, not measured" in roomy.run("compare", str(roomy.study)).stdout


def test_predicted_columns_are_at_the_end_of_the_header() -> None:
    names = [column.name for column in COLUMNS]
    first = names.index("predicted_step_time_s")
    assert names[first - 1] == "fingerprint"
    assert all(name.startswith("predicted_") for name in names[first:])
