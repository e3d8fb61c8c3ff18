"""A search measures every legal plan exactly once and writes down what became of each."""

from __future__ import annotations

import json
from typing import Any

import pandas
import pytest
from conftest import LEGAL, REFUSED, Bench

from autotune.results.table import read_csv, read_parquet
from autotune.space.space import load_space


def test_grid_launches_every_legal_plan_once_and_writes_a_row_for_every_point(bench: Bench) -> None:
    done = bench.search()
    assert done.returncode == 0, done.stderr
    assert len(bench.launches()) == len(set(bench.launches())) == LEGAL
    assert bench.states() == {"ok": LEGAL, "refused": REFUSED}
    rows = bench.table()
    assert [row["trial"] for row in rows[:LEGAL]] == [str(n) for n in range(LEGAL)]
    assert sum(row["is_best"] == "true" for row in rows) == sum(row["is_baseline"] == "true" for row in rows) == 1
    assert all("tp-heads" in row["reason"] and not row["tokens_per_s"] for row in rows if row["state"] == "refused")
    # 16 samples x 32 tokens over the fake's step of plan pp 1 (0.1 + 0.01 + 2 * 0.001 s, median one ms later)
    best = next(row for row in rows if row["is_best"] == "true")
    assert best["pp"] == "1"
    assert float(best["tokens_per_s"]) == pytest.approx(16 * 32 / (0.113 + 0.0003), rel=1e-6)


def test_study_folder_holds_what_the_readme_says(bench: Bench) -> None:
    bench.search("--trials", "4")
    assert {path.name for path in bench.study.iterdir() if not path.name.startswith(".")} == {
        "study.db",
        "trials.csv",
        "trials.parquet",
        "best.json",
        "space.yaml",
        "logs",
    }
    assert (bench.study / "logs" / "trial-0003" / "rank-0.log").exists()
    assert read_csv(bench.study / "trials.csv") == read_parquet(bench.study / "trials.parquet")
    assert len(pandas.read_parquet(bench.study / "trials.parquet")) == LEGAL + REFUSED
    assert load_space(bench.study / "space.yaml") == load_space(bench.path / "tiny.yaml")
    best = json.loads((bench.study / "best.json").read_text())
    assert best["row"]["is_best"] is True
    assert best["fidelity"] == best["row"]["fidelity"] == "run"
    assert best["plan"]["layer_split"] == best["row"]["layer_split"]


def test_baselines_are_the_first_trials_and_are_measured_once(bench: Bench) -> None:
    bench.search("--trials", "3", "--sampler", "random", "--seed", "7")
    first = [row["schedule"] for row in bench.table()][:2]
    assert first == ["1f1b", "interleaved-1f1b"]
    bench.search("--resume", "--trials", "6", "--sampler", "random", "--seed", "7")
    assert len(bench.launches()) == len(set(bench.launches())) == 6


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_no_sampler_measures_a_plan_twice_or_misses_one(bench: Bench, sampler: str) -> None:
    done = bench.search("--sampler", sampler, "--json")
    assert len(bench.launches()) == len(set(bench.launches())) == LEGAL
    assert json.loads(done.stdout)["states"] == {"ok": LEGAL, "refused": REFUSED}


def test_budget_of_trials_is_a_total_over_resumes(bench: Bench) -> None:
    bench.search("--trials", "2")
    bench.search("--trials", "5", "--resume")
    assert len(bench.launches()) == 5
    again = bench.search("--trials", "5", "--resume")
    assert again.returncode == 0
    assert len(bench.launches()) == 5


def test_budget_of_time_is_a_total_over_resumes(bench: Bench) -> None:
    bench.tell_worker({"do": "succeed", "sleep_s": 0.2})
    bench.search("--timeout", "0.1")
    assert len(bench.launches()) == 1
    done = bench.search("--timeout", "0.1", "--resume")
    assert "8 legal plans were not run" in done.stdout
    assert len(bench.launches()) == 1


def test_every_way_to_fail_is_a_row_with_its_state_and_the_search_goes_on(bench: Bench) -> None:
    bench.tell_worker(
        {"when": {"schedule": "zb-h1", "pp": 2}, "do": "silent"},
        {"when": {"schedule": "zb-h1"}, "do": "sleep"},
        {
            "when": {"schedule": "v-min", "pp": 2},
            "do": "fail",
            "rank": 0,
            "error": 'ValueError: first\ncause, "quoted"',
        },
        {"when": {"schedule": "v-min"}, "do": "succeed", "peak": 2 << 20},
        {"when": {"schedule": "interleaved-1f1b", "pp": 4}, "do": "chatter", "megabytes": 5},
    )
    done = bench.search("--trial-timeout", "1.5")
    assert done.returncode == 0
    rows = {(row["schedule"], row["pp"]): row for row in bench.table() if row["state"] != "refused"}
    states = {key: row["state"] for key, row in rows.items()}
    assert states == {
        ("1f1b", "1"): "ok",
        ("1f1b", "2"): "ok",
        ("1f1b", "4"): "ok",
        ("interleaved-1f1b", "2"): "ok",
        ("interleaved-1f1b", "4"): "failed",
        ("zb-h1", "2"): "no-result",
        ("zb-h1", "4"): "timeout",
        ("v-min", "2"): "failed",
        ("v-min", "4"): "oom",
    }
    assert rows["v-min", "2"]["reason"] == 'rank 0 failed first: ValueError: first\ncause, "quoted"'
    assert "the very last words" in rows["interleaved-1f1b", "4"]["reason"]
    assert rows["v-min", "4"]["peak_memory_bytes"] == str((2 << 20) + 3)
    assert rows["v-min", "4"]["is_best"] == "false"
    shown = bench.run("results", str(bench.study), "--all")
    assert 'cause, "quoted"' in shown.stdout


def test_out_of_memory_is_a_graded_constraint_and_other_failures_are_no_opinion(bench: Bench) -> None:
    import optuna

    bench.tell_worker(
        {"when": {"schedule": "zb-h1"}, "do": "succeed", "peak": (1 << 20) + 500},
        {"when": {"schedule": "v-min"}, "do": "silent"},
    )
    bench.search()
    study = optuna.load_study(study_name="tiny", storage=f"sqlite:///{bench.study / 'study.db'}")
    by_schedule: dict[str, Any] = {trial.params["schedule"]: trial for trial in study.get_trials()}
    assert by_schedule["zb-h1"].state == optuna.trial.TrialState.PRUNED
    assert by_schedule["zb-h1"].constraints == {"memory_bytes_over_limit": 503.0}
    assert by_schedule["v-min"].state == optuna.trial.TrialState.FAIL
    assert by_schedule["1f1b"].constraints["memory_bytes_over_limit"] < 0
    assert study.best_trial.params["pp"] == 1
    assert study.best_value == pytest.approx(16 * 32 / 0.1133)


def test_nothing_feasible_is_exit_code_1_with_the_closest_plan_and_a_whole_table(bench: Bench) -> None:
    bench.tell_worker({"when": {"pp": 1}, "do": "succeed", "peak": 2 << 20}, {"do": "succeed", "peak": 3 << 20})
    done = bench.search()
    assert done.returncode == 1
    assert "none of 9 plans ran within its limits; closest is pp1 tp1 dp4" in done.stderr
    assert "1048579 bytes over the limit" in done.stderr
    assert bench.states() == {"oom": LEGAL, "refused": REFUSED}
    compared = bench.run("compare", str(bench.study))
    assert compared.returncode == 1
    assert "nothing to compare" in compared.stdout
    exported = bench.run("export", str(bench.study), "--to", "torchrun", "--out", "job")
    assert exported.returncode == 1
    assert "nothing to export" in exported.stderr
    shown = bench.run("results", str(bench.study))
    assert shown.returncode == 0
    alike = [line for line in shown.stdout.splitlines() if line.startswith("oom: ")]
    assert len(alike) == 1
    assert alike[0].startswith(f"oom: {LEGAL} plans, such as trial ")
    assert "--all lists every reason in full" in shown.stdout
    assert not (bench.path / "job").exists()


def test_broken_schedule_is_refused_before_any_process_starts(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.schedules import registry
    from autotune.schedules.schedule import Schedule
    from autotune.search import search as module

    build = registry.build

    def swapped(name: str, devices: int, microbatches: int, stages: int | None = None) -> Schedule:
        good = build(name, devices, microbatches, stages)
        order = [list(passes) for passes in good.order]
        order[-1].reverse()
        return Schedule(good.name, good.microbatches, good.placement, tuple(map(tuple, order)))

    monkeypatch.setattr(registry, "build", swapped)
    options = module.SearchOptions(folder=bench.study, trials=1, refuse_by_estimate=False)
    result = module.search(load_space(bench.path / "tiny.yaml"), options)
    assert result.rows[0].state == "invalid"
    assert "1f1b" in result.rows[0].reason
    assert not (bench.study / "logs").exists()
