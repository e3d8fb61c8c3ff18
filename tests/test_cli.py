"""The command line starts fast, reads well, and turns every mistake into one line."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.results.columns import Row
from autotune.results.table import write_csv
from autotune.results.verdict import judge

SPACE = Path(__file__).parents[1] / "search_spaces" / "quickstart.yaml"
COMMANDS = ("search", "results", "compare", "export", "schedule", "predict", "calibrate")
CHEAP = {
    "help": ["--help"],
    "search help": ["search", "--help"],
    "calibrate help": ["calibrate", "--help"],
    "dry run": ["search", str(SPACE), "--dry-run"],
    "schedule show": ["schedule", "show", "v-half", "--devices", "8", "--microbatches", "32"],
}


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd)


@pytest.mark.parametrize("arguments", CHEAP.values(), ids=CHEAP)
def test_cheap_commands_take_half_a_second_of_cpu_and_import_neither_torch_nor_optuna(arguments: list[str]) -> None:
    code = (
        "import sys; from autotune.cli import main; sys.argv = ['autotune', *sys.argv[1:]]\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print('LOADED', [m for m in ('torch', 'optuna', 'pandas') if m in sys.modules], file=sys.stderr)"
    )
    used = []
    for _ in range(3):  # the best of three: other processes share the caches
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        assert done.stderr.strip() == "LOADED []", done.stderr
        assert done.stdout
        if used[-1] < 0.5:
            break
    assert min(used) < 0.5


def test_help_lists_every_command_and_the_exit_codes() -> None:
    text = run("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert "Exit codes: 0 done; 1 no plan ran within its limits; 2" in " ".join(text.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) > 5


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["search", "no-such.yaml", "--dry-run"], "no-such.yaml"),
        (["search", str(SPACE), "--resume", "--fresh"], "exclude each other"),
        (["search", str(SPACE), "--timeout", "-1"], "--timeout must be above 0"),
        (["search", str(SPACE), "--worker", "run {nope}", "--trials", "1"], "unknown placeholder {nope}"),
        (["search", str(SPACE), "--name", "../zz", "--fidelity", "predict"], "--name: '../zz' can't name a study"),
        (["search", str(SPACE), "--name", "", "--dry-run"], "--name must be a text that isn't empty, not ''"),
        (["results", "nowhere"], "no results table nowhere/trials.csv"),
        (["compare", "nowhere"], "no results table"),
        (["export", "nowhere", "--to", "torchrun", "--out", "x"], "nowhere"),
    ],
)
def test_mistake_is_one_message_without_a_traceback_and_exit_code_2(
    tmp_path: Path, arguments: list[str], why: str
) -> None:
    done = run(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert why in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
    assert not (tmp_path.parent / "zz").exists()


def test_mistyped_option_is_exit_code_2() -> None:
    assert run("search", str(SPACE), "--sampler", "gird").returncode == 2


def whole(**values: Any) -> Row:
    """A row with all fields of a plan."""
    plan = {"pp": 2, "tp": 1, "dp": 1, "micro_batch_size": 1, "microbatches": 4, "stages_per_device": 1}
    plan |= {"schedule": "1f1b", "recompute": "none"} | values
    return Row(layer_split=(1,) * (plan["pp"] * plan["stages_per_device"]), **plan)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    rows = [
        whole(trial=0, state="ok", pp=2, schedule="1f1b", step_time_s=1.0, tokens_per_s=100.0, peak_memory_bytes=2048),
        whole(trial=1, state="ok", pp=4, schedule="zb-v", step_time_s=0.5, tokens_per_s=200.0, stages_per_device=2),
        whole(trial=2, state="failed", pp=8, schedule="v-min", reason="rank 1 failed first: [boom]\nsecond line"),
        Row(state="refused", schedule="gpipe", reason="tp-heads: tp 3 doesn't divide 4 attention heads"),
    ]
    write_csv(judge(rows), tmp_path / "trials.csv")
    return tmp_path


def test_results_shows_the_best_first_and_every_reason(study: Path) -> None:
    lines = run("results", str(study)).stdout.splitlines()
    table = [line for line in lines if "tokens" not in line and ("1f1b" in line or "zb-v" in line)]
    assert "best" in table[0]
    assert "zb-v x2" in table[0]
    assert "2.000x" in table[0]
    assert "baseline" in table[1]
    assert any("rank 1 failed first: [boom]" in line for line in lines)
    assert not any("second line" in line for line in lines)
    assert "second line" in run("results", str(study), "--all").stdout
    assert not any("gpipe" in line for line in lines)
    assert lines[-1] == "4 plans: 2 ok, 1 failed, 1 refused"
    assert "tp-heads: tp 3" in run("results", str(study), "--all").stdout


def test_results_shows_tried_plans_first_and_only_the_best_of_those_merely_predicted(tmp_path: Path) -> None:
    def predicted(trial: int | None, rate: float) -> Row:
        fidelity = "predict" if trial is None else "profile"
        return whole(
            trial=trial,
            state="predicted",
            fidelity=fidelity,
            schedule=f"s{rate:.0f}",
            predicted_tokens_per_s=rate,
            predicted_step_time_s=1 / rate,
        )

    write_csv(judge([predicted(0, 100.0), *(predicted(None, 200.0 + n) for n in range(30))]), tmp_path / "trials.csv")
    out = run("results", str(tmp_path), "--top", "5").stdout
    shown = [word for line in out.splitlines() for word in line.split() if word.startswith("s") and word[1:].isdigit()]
    assert shown == ["s100", "s229", "s228", "s227", "s226", "s225"]
    assert "25 more plans were only predicted" in out
    assert "profile" in out
    assert len(run("results", str(tmp_path), "--all").stdout.splitlines()) > 30


def test_results_as_json_has_every_column_and_null_for_what_is_missing(study: Path) -> None:
    rows = json.loads(run("results", str(study), "--json", "--all", "--sort", "pp").stdout)
    assert [row["pp"] for row in rows] == [2, 4, 8, None]
    assert rows[2]["tokens_per_s"] is None
    assert list(rows[0]) == list(Row().to_dict())


@pytest.mark.parametrize("pareto", [[], ["--pareto"]], ids=["table", "front"])
def test_sorting_by_an_unknown_column_lists_the_known_ones(study: Path, pareto: list[str]) -> None:
    done = run("results", str(study), "--sort", "speed", *pareto)
    assert done.returncode == 2
    assert "tokens_per_s" in done.stderr


def test_damaged_files_are_told_with_what_mends_them_and_export_does_not_pass_them_over(study: Path) -> None:
    (study / "final.json").write_text("{")
    for command in (["results"], ["compare"], ["export", "--to", "torchrun", "--out", str(study / "job")]):
        done = run(command[0], str(study), *command[1:])
        assert done.returncode == 2
        assert "final.json is damaged" in done.stderr
        assert "--resume` writes it anew" in done.stderr
    (study / "trials.csv").write_text("a poem")
    assert "--resume` writes it anew" in run("compare", str(study)).stderr


def test_output_that_goes_into_head_ends_quietly(study: Path) -> None:
    command = f"{sys.executable} -m autotune.cli results {study} --json | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""


def test_version_is_the_packages() -> None:
    from autotune import __version__

    assert run("--version").stdout.strip() == f"autotune {__version__}"
