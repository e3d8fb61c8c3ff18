"""A space file brings its own worker: the search tunes that job, and refuses what its trainer can't run."""

from __future__ import annotations

import csv
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Bench

ROOT = Path(__file__).parents[2]
MEGATRON = ROOT / "search_spaces" / "megatron-fake.yaml"


def cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune.cli", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert "Traceback" not in done.stderr, done.stderr
    return done


def rows(study: Path) -> list[dict[str, str]]:
    with open(study / "trials.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_job_that_logs_like_megatron_is_tuned_end_to_end(tmp_path: Path) -> None:
    final = ("--final", "1", "--final-rounds", "3")
    done = cli("search", str(MEGATRON), *final, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^1\.\d+x \(1\.\d+ to 1\.\d+\) over 1F1B: ", done.stdout, re.MULTILINE), done.stdout
    study = tmp_path / "results" / "megatron-fake"
    table = rows(study)
    refused = [row for row in table if row["state"] == "refused"]
    assert {row["schedule"] for row in refused} == {"zb-h1"}
    assert all(row["reason"].startswith("worker-megatron: Megatron-LM runs 1F1B and interleaved") for row in refused)
    ran = [row for row in table if row["trial"]]
    assert {row["state"] for row in ran} == {"ok", "oom"}
    # trained 2 + 4 iterations, of which the last 4 count
    best = next(row for row in ran if row["is_best"] == "true")
    log = (study / "logs" / f"trial-{int(best['trial']):04d}" / "rank-0.log").read_text()
    logged = [float(ms) for ms in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", log)]
    assert len(logged) == 6
    assert float(best["step_time_s"]) == pytest.approx(statistics.median(logged[2:]) / 1000)
    assert float(best["step_time_max_s"]) == pytest.approx(max(logged[2:]) / 1000)
    assert best["schedule"] == "interleaved-1f1b"
    assert float(best["speedup_vs_1f1b"]) > 1
    assert best["bubble_rate"] == ""
    assert int(best["peak_memory_bytes"]) <= 23 << 30
    out_of_memory = next(row for row in ran if row["state"] == "oom")
    assert "ran out of memory" in out_of_memory["reason"]
    assert "GiB of 23 GiB" in out_of_memory["reason"]
    again = cli("search", str(MEGATRON), "--resume", *final, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(rows(study)) == len(table)


def test_the_dry_run_and_predictions_refuse_by_the_workers_rule_too(tmp_path: Path) -> None:
    shown = cli("search", str(MEGATRON), "--dry-run", cwd=tmp_path)
    assert "worker-megatron" in shown.stdout
    cli("search", str(MEGATRON), "--fidelity", "predict", cwd=tmp_path)
    states = {row["schedule"]: row["state"] for row in rows(tmp_path / "results" / "megatron-fake")}
    assert states["zb-h1"] == "refused"


def test_resume_refuses_another_worker_and_shows_no_value_of_its_environment(bench: Bench) -> None:
    worker = f"worker:\n  command: '{sys.executable} -c pass'\n  starter: none\n  env: {{TOKEN: s3cret}}\n"
    space = bench.path / "tiny.yaml"
    text = space.read_text()
    space.write_text(text + worker)
    assert bench.run("search", "tiny.yaml", "--trials", "1").returncode == 1
    space.write_text(text + worker.replace("s3cret", "hidden2").replace("pass", "0"))
    changed = bench.run("search", "tiny.yaml", "--trials", "2", "--resume")
    assert changed.returncode == 2
    assert "worker.command" in changed.stderr
    assert "worker.env.TOKEN" in changed.stderr
    assert "s3cret" not in changed.stderr
    assert "hidden2" not in changed.stderr


def test_failed_launches_are_tried_again_now_and_on_resume(bench: Bench) -> None:
    bench.edit_space("schedule: [1f1b, interleaved-1f1b, zb-h1, v-min]", "schedule: [1f1b]")
    bench.tell_worker({"when": {"pp": 2}, "do": "fail", "rank": 0, "state": "launcher", "error": "no port"})
    bench.search()
    assert {row["pp"]: row["state"] for row in bench.table() if row["trial"]} == {
        "1": "ok",
        "2": "launcher",
        "4": "ok",
    }
    assert len(bench.launches()) == 3 + 2
    bench.tell_worker()
    bench.search("--resume")
    assert {row["pp"]: row["state"] for row in bench.table() if row["trial"]} == {"1": "ok", "2": "ok", "4": "ok"}
    assert len(bench.launches()) == 3 + 2 + 1


def test_worker_whose_folder_is_not_there_starts_nothing(bench: Bench) -> None:
    space = bench.path / "tiny.yaml"
    space.write_text(space.read_text() + "worker: {command: train, cwd: /not/on/this/machine}\n")
    done = bench.run("search", "tiny.yaml")
    assert done.returncode == 2
    assert done.stderr == "error: worker.cwd: /not/on/this/machine is no folder\n"
    assert not bench.study.exists()


def test_worker_on_the_command_line_goes_before_the_spaces(bench: Bench) -> None:
    space = bench.path / "tiny.yaml"
    space.write_text(space.read_text() + "worker: {command: /no/such/worker, starter: none}\n")
    done = bench.search("--trials", "1")
    assert done.returncode == 0
    assert bench.states()["ok"] == 1


def test_one_result_file_is_enough(bench: Bench) -> None:
    code = "import json, sys; json.dump(dict(step_time_s=0.1 * int(sys.argv[2])), open(sys.argv[1], 'w'))"
    space = bench.path / "tiny.yaml"
    space.write_text(
        space.read_text()
        + f'worker:\n  starter: none\n  command: ["{{python}}", -c, "{code}", "{{result_json}}", "{{pp}}"]\n'
    )
    done = bench.run("search", "tiny.yaml", "--trials", "3", "--final", "0", "--json")
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert (best["pp"], best["step_time_s"]) == (1, 0.1)


@pytest.mark.parametrize("url", ["postgresql://me:s3cret@localhost:1/x", "postgresql://localhost:1/x?password=s3cret"])
def test_password_of_a_database_is_nowhere(bench: Bench, url: str) -> None:
    done = bench.search("--storage", url)
    assert done.returncode == 2
    assert "s3cret" not in done.stderr + done.stdout
    written = [path.read_text(errors="replace") for path in bench.study.rglob("*") if path.is_file()]
    assert not any("s3cret" in text for text in written)


@pytest.mark.parametrize(
    "url", ["postgresql://me:s3c:ret@localhost:1port/x", "s3cret", "sqlite:///s3cret/nowhere/x.db"]
)
def test_unusable_storage_is_one_line(bench: Bench, url: str) -> None:
    done = bench.search("--storage", url)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "s3c:ret" not in done.stderr
