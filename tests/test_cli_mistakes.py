"""A mistake in what was given is told in words: what is wrong, where, and what would be right."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.errors import UserError

SPACE = str(Path(__file__).parents[1] / "search_spaces" / "quickstart.yaml")
PLAN: dict[str, Any] = {
    "pp": 2,
    "tp": 1,
    "dp": 2,
    "micro_batch_size": 1,
    "microbatches": 8,
    "schedule": "1f1b",
    "stages_per_device": 1,
    "layer_split": [4, 4],
    "recompute": "none",
}


def mistake(*arguments: str) -> str:
    """What the command line is told by."""
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, UserError), (result.exception, result.output)
    return str(result.exception)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--timeout", "-3"], "--timeout must be above 0 seconds"),
        (["--resume", "--fresh"], "exclude each other"),
        (["--storage", "nonsense"], "--storage is no database URL"),
        (["--assume", "luck=1"], "no assumption 'luck'"),
        (["--worker", "x {luck}"], "unknown placeholder {luck}"),
        (["--fidelity", "predict", "--trials", "3"], "--trials means nothing with --fidelity predict"),
    ],
)
def test_dry_run_checks_every_option(options: list[str], told: str) -> None:
    assert told in mistake("search", SPACE, "--dry-run", *options)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("search SPACE --trials abc", "--trials must be a whole number of at least 1, not 'abc'"),
        ("search SPACE --trials 0", "--trials must be a whole number of at least 1, not 0"),
        ("search SPACE --final -1", "--final must be a whole number of at least 0, not -1"),
        ("search SPACE --final-rounds 2", "--final-rounds must be a whole number of at least 3, not 2"),
        ("search SPACE --takeover-after nan", "--takeover-after must be a number of at least 1, not nan"),
        ("search SPACE --seed 1.5", "--seed must be a whole number, not 1.5"),
        ("search SPACE --fidelity foo", "--fidelity must be one of predict, profile, run, not 'foo'"),
        ("results DIR --top -1", "--top must be a whole number of at least 0, not -1"),
        ("export DIR --to x --out y", "--to must be one of worker, torchrun, megatron, torchtitan, not 'x'"),
        ("calibrate --nodes 0 --out x", "--nodes must be a whole number from 1 to 100000, not 0"),
        ("predict SPACE --top 0", "--top must be a whole number of at least 1, not 0"),
        ("schedule show v-half --devices q --microbatches 2", "--devices must be a whole number, not 'q'"),
        ("results DIR --pareto --top 1 --all", "--top and --all mean nothing with --pareto"),
        ("results DIR --pareto --all", "--all means nothing with --pareto"),
        ("search SPACE --fidelity predict --final 2 --trials 2", "--final and --trials mean nothing with"),
    ],
)
def test_illegal_value_is_told_by_option_rule_and_value(arguments: str, told: str) -> None:
    message = mistake(*(SPACE if word == "SPACE" else word for word in arguments.split()))
    assert message.startswith(told)
    assert "\n" not in message


def test_launcher_without_worker_is_refused() -> None:
    assert "--launcher says how the command of --worker is started" in mistake("search", SPACE, "--launcher", "none")


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("[", "is no JSON"),
        ([], "space must be the path of a space file"),
        ({"plan": PLAN}, "space must be the path of a space file"),
        ({"space": SPACE}, "plan must be an object with the fields of a plan"),
        ({"space": SPACE, "plan": {"pp": 2}}, "the plan lacks tp, dp, micro_batch_size"),
        ({"space": SPACE, "plan": PLAN | {"size": 3}}, "the plan has no field 'size'; its fields are pp, tp"),
        ({"space": SPACE, "plan": PLAN | {"layer_split": 4}}, "layer_split must list the layers of every stage, not 4"),
        ({"space": SPACE, "plan": PLAN | {"pp": "2"}}, "pp must be a whole number from 1 up, not '2'"),
        ({"space": SPACE, "plan": PLAN | {"schedule": 1}}, "schedule and recompute are texts"),
    ],
)
def test_plan_file_that_is_none_is_told_by_what_it_lacks(tmp_path: Path, file: Any, told: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(file if isinstance(file, str) else json.dumps(file))
    message = mistake("predict", str(path))
    assert str(path) in message
    assert told in message


@pytest.mark.parametrize(
    ("plan", "told"),
    [("[" * 5000, "--plan is no JSON"), ("[]", "must be a JSON object"), ('{"luck": 1}', "no field 'luck'")],
)
def test_plan_option_that_is_none_is_told(plan: str, told: str) -> None:
    assert told in mistake("predict", SPACE, "--plan", plan)


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "can't read" in mistake("predict", str(tmp_path / "none.json"))
    assert "is missing" in mistake("validate", "--data", str(tmp_path))


@pytest.mark.parametrize("cpu_s", [0.12, 0.16])
def test_ctrl_c_while_modules_load_shows_no_traceback(cpu_s: float) -> None:
    """In its first moments, here 0.08 s of CPU time, a process is Python's own."""
    command = [sys.executable, "-m", "autotune", "search", SPACE, "--dry-run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        seen = psutil.Process(process.pid)
        while process.poll() is None and sum(seen.cpu_times()[:2]) < cpu_s:
            time.sleep(0.002)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    # On a busy machine the signal may come when all is done.
    assert process.returncode in (130, -signal.SIGINT, 0), (process.returncode, out, error)
    assert error in ("interrupted\n", "")
