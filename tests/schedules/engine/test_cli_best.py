"""`autotune schedule best` from the outside."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from autotune.cli_schedule_best import best
from autotune.errors import UserError
from autotune.schedules.checks import check
from autotune.schedules.schedule import Schedule
from autotune.schedules.simulate import simulate

app = typer.Typer()
app.command("best")(best)
SMALL = ["--devices", "4", "--microbatches", "8", "--pass-times", "1,1.5,0.6", "--comm", "0.2", "--quick"]


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_json_holds_a_valid_schedule_and_why_it_was_chosen() -> None:
    found = json.loads(run("--memory-limit", "3", "--format", "json"))
    schedule = Schedule.from_dict(found)
    check(schedule)
    assert found["valid"]
    assert max(found["peak_activation"]) <= 3
    assert found["lower_bound"] <= found["makespan"]
    assert found["gap"] == pytest.approx(found["makespan"] / found["lower_bound"] - 1)
    assert found["chosen"]["placement"] in {"linear", "v", "loop"}
    assert len(found["candidates"]) == 5
    assert min(c["makespan"] for c in found["candidates"] if c["makespan"]) == pytest.approx(found["makespan"])


def test_text_says_makespan_bound_and_reason() -> None:
    text = run("--memory-limit", "3", "--placement", "v")
    assert "chosen: v, 2 stages per device" in text
    assert "lower bound" in text
    assert "of 3" in text


@pytest.mark.parametrize(("name", "begins"), [("svg", "<svg"), ("csv", "")])
def test_other_formats_are_written_to_files(tmp_path: Path, name: str, begins: str) -> None:
    target = tmp_path / f"schedule.{name}"
    run("--format", name, "--out", str(target))
    assert begins in target.read_text()
    assert len(target.read_text()) > 100


def test_the_front_lists_more_memory_and_less_time() -> None:
    lines = list(csv.DictReader(io.StringIO(run("--front", "--format", "csv"))))
    limits = [float(line["limit"]) for line in lines]
    spans = [float(line["makespan"]) for line in lines]
    assert limits == sorted(limits)
    assert spans == sorted(spans, reverse=True)
    assert len(json.loads(run("--front", "--format", "json", "--memory-limit", "2"))) >= 2


def test_slowdown_gives_less_memory_than_no_limit() -> None:
    free = json.loads(run("--format", "json"))
    less = json.loads(run("--slowdown", "10", "--format", "json"))
    assert max(less["peak_activation"]) < max(free["peak_activation"])
    assert less["makespan"] <= 1.1 * free["makespan"]


def test_proof_tells_whether_the_schedule_is_the_fastest() -> None:
    pytest.importorskip("ortools", reason="the extra `prove` is not installed")
    arguments = ["--devices", "2", "--microbatches", "3", "--placement", "v", "--memory-limit", "1.5", "--prove", "20"]
    result = CliRunner().invoke(app, [*arguments, "--quick", "--format", "json"], catch_exceptions=False)
    found = json.loads(result.output)
    assert found["proof"]["optimal"]
    assert simulate(Schedule.from_dict(found)).makespan == pytest.approx(found["proof"]["lower_bound"])


def test_a_costs_file_replaces_times_and_brings_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(
        "latency: 0.1\nlayers: {count: 16, forward: 1, backward: 1.2, weight: 0.8, activation: 10}\n"
        "head: {forward: 2, backward: 2, weight: 2, activation: 5}\nmemory_limit: 120\n"
    )
    arguments = ["--devices", "4", "--microbatches", "8", "--quick", "--costs", str(path), "--format", "json"]
    result = CliRunner().invoke(app, [*arguments, "--balance"], catch_exceptions=False)
    found = json.loads(result.output)
    assert max(found["peak_activation"]) <= 120
    assert sum(found["chosen"]["layer_split"]) == 16
    even = json.loads(CliRunner().invoke(app, arguments, catch_exceptions=False).output)
    assert found["makespan"] <= even["makespan"]


@pytest.mark.parametrize("times", ["1e12,1e12,1e12", "1e-6,1e-6,1e-6", "1e-9,1,0", "1e9,1e2,1"])
@pytest.mark.parametrize("comm", ["0", "1e-3", "1"])
def test_times_up_to_the_limits_are_scheduled(times: str, comm: str) -> None:
    forward, backward, weight = (float(part) for part in times.split(","))
    latency = float(comm) * max(forward, backward, weight)
    found = json.loads(run("--pass-times", times, "--comm", f"{latency}", "--format", "json"))
    assert found["valid"]
    assert found["makespan"] >= found["lower_bound"] * (1 - 1e-9) >= 8 * (forward + backward + weight) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--memory-limit", "much"], "must be a number"),
        (["--memory-limit", "0.5"], "smallest feasible one is 1.0"),
        (["--balance"], "needs a --costs file"),
        (["--front", "--slowdown", "5"], "exclude each other"),
        (["--front", "--format", "svg"], "text, csv or json"),
        (["--slowdown", "5", "--memory-limit", "2"], "give no --memory-limit"),
        (["--placement", "v", "--stages-per-device", "4"], "exactly 2"),
        (["--costs", "none.yaml"], "--costs replaces"),
        (["--pass-times", "1e300,1e300,1e300"], "from 1e-09 to 1e"),
        (["--pass-times", "nan,1,1"], "three numbers F,B,W"),
        (["--pass-times", "1e-6,1,1", "--comm", "1e6"], "1e-06 to 1e.06: none may be more than"),
        (["--memory-limit", "inf"], "--memory-limit must be a number above 0"),
        (["--memory-limit", "3,nan,3,3"], "--memory-limit must be a number above 0"),
        (["--devices", "100000", "--microbatches", "100000"], "more than the 2,000,000"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, [*SMALL, *arguments], catch_exceptions=False)
