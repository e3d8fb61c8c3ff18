"""The commands predict and validate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from autotune.cli_predict import mount
from autotune.errors import UserError
from autotune.space.space import load_space

SPACE = str(Path(__file__).parents[2] / "search_spaces/quickstart.yaml")


@pytest.fixture(scope="module")
def app() -> typer.Typer:
    made = typer.Typer()
    mount(made)
    return made


def _run(app: typer.Typer, *arguments: str) -> str:
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.output


def test_predict_ranks_a_space_and_prints_the_fastest_that_fit(app: typer.Typer) -> None:
    ranked = json.loads(_run(app, "predict", SPACE, "--json", "--top", "5"))
    times = [prediction["step_time_s"] for prediction in ranked]
    assert times == sorted(times)
    assert len(times) == 5
    assert f"{len(load_space(SPACE).plans())} plans" in _run(app, "predict", SPACE)


def test_predict_explains_one_plan(app: typer.Typer, tmp_path: Path) -> None:
    plan = load_space(SPACE).plans()[0]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"space": SPACE, "plan": plan.to_dict()}))
    text = _run(app, "predict", str(file), "--explain")
    assert plan.describe() in text
    assert "Peak memory of each pipeline device" in text
    assert json.loads(_run(app, "predict", str(file), "--json"))["plan"] == plan.to_dict()


def test_predict_takes_assumptions_and_machine_numbers(app: typer.Typer) -> None:
    plain = json.loads(_run(app, "predict", SPACE, "--json", "--top", "1"))[0]
    fast = json.loads(_run(app, "predict", SPACE, "--json", "--top", "1", "--machine", "efficiency=1.0"))[0]
    assert fast["step_time_s"] < plain["step_time_s"]
    _run(app, "predict", SPACE, "--stack", "megatron", "--assume", "sharding=none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", '{"pq": 1}'], "no field 'pq'"),
        (["--plan", "pp=1"], "no JSON"),
        (["--plan", '{"pp": 999}'], "no plan of the"),
        (["--machine", "luck=1"], "no number 'luck'"),
        (["--stack", "jax"], "no stack 'jax'"),
    ],
)
def test_mistakes_are_told(app: typer.Typer, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _run(app, "predict", SPACE, *arguments)
