"""The samplers at the command line: auto ends a real study and says why, nsga2 prints its front."""

from __future__ import annotations

import json

import pytest
from conftest import LEGAL, Bench


@pytest.fixture
def slow_pipelines(bench: Bench) -> Bench:
    """Every pipeline is ten times slower than the plan without one."""
    bench.tell_worker({"when": {"pp": 1}, "do": "succeed", "step_s": 0.05}, {"do": "succeed", "step_s": 0.5})
    return bench


def test_auto_is_the_default_and_its_table_says_why_plans_were_not_run(slow_pipelines: Bench) -> None:
    bench = slow_pipelines
    done = bench.search("--sampler", "auto", "--final", "0")
    assert done.returncode == 0, done.stderr
    assert "stopped: after " in done.stdout
    assert "no other is likely to beat pp1 tp1 dp4 mbs2 m2 1f1b" in done.stdout
    waiting = [row for row in bench.table() if row["state"] == "predicted"]
    assert 0 < len(waiting) < LEGAL - 4
    assert all("no other is likely to beat" in row["reason"] for row in waiting)
    again = bench.search("--sampler", "auto", "--final", "0", "--resume")
    assert again.returncode == 0
    assert len(bench.launches()) == LEGAL - len(waiting), "a resumed study that had converged runs nothing"
    whole = bench.search("--sampler", "grid", "--final", "0", "--resume")
    assert whole.returncode == 0
    assert len(bench.launches()) == LEGAL


def test_nsga2_prints_the_front_and_every_study_keeps_it(bench: Bench) -> None:
    bench.tell_worker(
        {"when": {"pp": 1}, "do": "succeed", "peak": 900_000},
        {"when": {"schedule": "v-min"}, "do": "succeed", "peak": 100_000},
        {"do": "succeed", "peak": 500_000},
    )
    done = bench.search("--sampler", "nsga2", "--final", "0")
    assert done.returncode == 0, done.stderr
    rows = json.loads(bench.run("results", "results/tiny", "--pareto", "--json").stdout)
    assert f"{len(rows)} plans than which none is both faster and smaller" in done.stdout
    assert rows[-1]["schedule"] == "v-min"
    assert json.loads((bench.study / "best.json").read_text())["pareto"] == [row["fingerprint"] for row in rows]


def test_when_a_baseline_fails_the_next_one_is_measured_though_it_promises_little(bench: Bench) -> None:
    bench.tell_worker({"when": {"schedule": "1f1b", "pp": 1}, "do": "fail"}, {"do": "succeed", "step_s": 0.05})
    done = bench.search("--sampler", "auto", "--final", "0", "--trials", "4")
    assert done.returncode == 0, done.stderr
    tried = [row for row in bench.table() if row["trial"]]
    assert {row["state"] for row in tried if row["schedule"] == "1f1b" and row["pp"] == "1"} <= {"failed"}
    assert any(row["state"] == "ok" for row in tried if row["schedule"] == "1f1b")
