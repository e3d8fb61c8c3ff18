"""From calibration to predictions: a space that names the measured cluster is predicted with its figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cost.predict import predict_plan
from autotune.profiling.calibrate import read_machine
from autotune.results.table import read_csv
from autotune.space.space import load_space

QUICKSTART = Path(__file__).parents[1] / "search_spaces" / "quickstart.yaml"


def run(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated machine's file and a space that names it."""
    folder = tmp_path_factory.mktemp("calibrated")
    run("calibrate", "--seconds", "0.02", "--devices-per-node", "4", "--out", folder / "cluster.yaml")
    values = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    (folder / "space.yaml").write_text(yaml.safe_dump(values | {"cluster": {"file": "cluster.yaml"}}))
    return folder


@pytest.fixture(scope="module")
def fastest(folder: Path) -> Any:
    return json.loads(run("predict", folder / "space.yaml", "--json", "--top", "1"))[0]


@pytest.mark.ranks
def test_dry_run_shows_the_measured_machine(folder: Path) -> None:
    measured = yaml.safe_load((folder / "cluster.yaml").read_text(encoding="utf-8"))
    shown = json.loads(run("search", folder / "space.yaml", "--dry-run", "--json"))
    assert shown["cluster"]["machine"] == asdict(read_machine(folder / "cluster.yaml"))
    assert shown["cluster"]["machine"]["peak_flops_float32"] == measured["machine"]["peak_flops_float32"]
    link = measured["cluster"]["links"]["intra_node"]
    assert shown["cluster"]["links"]["intra_node"] == {
        "latency_s": link["latency"],
        "bandwidth_bytes_per_s": link["bandwidth"],
    }
    assert "by the space file" in run("search", folder / "space.yaml", "--dry-run")


@pytest.mark.ranks
def test_predict_uses_the_measured_figures(folder: Path, fastest: Any) -> None:
    space, figures = load_space(folder / "space.yaml"), read_machine(folder / "cluster.yaml")
    plan = next(plan for plan in space.plans() if plan.to_dict() == fastest["plan"])
    given = (plan, space.model, space.cluster, space.training)
    assert fastest["step_time_s"] == predict_plan(*given, machine_figures=figures).step_time_s
    assert fastest["step_time_s"] != predict_plan(*given).step_time_s


@pytest.mark.ranks
def test_study_keeps_the_figures_without_the_file(folder: Path, fastest: Any, tmp_path: Path) -> None:
    text = (folder / "space.yaml").read_text()
    (tmp_path / "cluster.yaml").write_text((folder / "cluster.yaml").read_text())
    (tmp_path / "space.yaml").write_text(text)
    study = tmp_path / "results" / "measured"
    search = ("--fidelity", "predict", "--results-dir", tmp_path / "results", "--name", "measured")
    run("search", tmp_path / "space.yaml", *search)
    best = next(row for row in read_csv(study / "trials.csv") if row.is_best)
    assert best.predicted_step_time_s == fastest["step_time_s"]
    (tmp_path / "cluster.yaml").unlink()
    again = json.loads(run("predict", study / "space.yaml", "--json", "--top", "1"))[0]
    assert again["step_time_s"] == fastest["step_time_s"]
    run("search", study / "space.yaml", *search, "--resume")
