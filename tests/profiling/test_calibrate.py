"""Calibration of the machine at hand, the cluster file, and the refit from finished trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cost.devices import machine
from autotune.cost.predict import predict_plan
from autotune.errors import UserError
from autotune.profiling.calibrate import (
    Calibration,
    calibrate,
    cluster_file,
    fit_link,
    fit_matmuls,
    read_machine,
)
from autotune.profiling.refit import refit, timed_plans
from autotune.results.columns import Row
from autotune.space.cluster import Link
from autotune.space.space import load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"
CLI = CliRunner()


def test_link_is_found_in_messages_of_all_sizes() -> None:
    truth = Link(2e-4, 1.5e9)
    messages = [(size, truth.latency_s + size / truth.bandwidth_bytes_per_s) for size in (1024, 2**16, 2**20, 2**26)]
    link = fit_link(messages)
    assert link.latency_s == pytest.approx(truth.latency_s)
    assert link.bandwidth_bytes_per_s == pytest.approx(truth.bandwidth_bytes_per_s)


def test_matmul_rate_and_fixed_time_are_found() -> None:
    samples = [
        {"rows": n, "inner": n, "columns": n, "seconds": 5e-6 + 2.0 * n**3 / 1e12} for n in (64, 256, 1024, 4096)
    ]
    rate, fixed = fit_matmuls(samples)
    assert rate == pytest.approx(1e12)
    assert fixed == pytest.approx(5e-6)


def test_no_fixed_time_is_below_zero() -> None:
    link = fit_link([(1000, 1e-7), (1_000_000, 1e-3), (2_000_000, 2.1e-3)])
    assert link.latency_s == 0.0
    assert link.bandwidth_bytes_per_s > 0


def test_one_size_is_too_little() -> None:
    with pytest.raises(UserError, match="two measured points"):
        fit_link([(1000, 1.0)])


@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate("cpu", seconds=0.02)


@pytest.mark.ranks
def test_calibration_measures_this_machine(calibration: Calibration) -> None:
    figures = calibration.machine
    assert 1e8 < figures.peak("float32") * figures.efficiency < 1e13
    assert 1e8 < figures.memory_bytes_per_s < 1e12
    assert calibration.link is not None
    assert calibration.link.bandwidth_bytes_per_s > 1e7
    for rows in calibration.matmuls.values():
        assert len(rows) >= 3
        assert all(seconds > 0 and share > 0 for *_, seconds, share in rows)


@pytest.mark.ranks
def test_cluster_file_is_a_section_of_a_space_file(calibration: Calibration, tmp_path: Path) -> None:
    space = load_space(QUICKSTART)
    path = tmp_path / "cluster.yaml"
    path.write_text(cluster_file(calibration, space.cluster), encoding="utf-8")
    pasted = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    pasted["cluster"] = yaml.safe_load(path.read_text(encoding="utf-8"))["cluster"]
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(pasted), encoding="utf-8")
    cluster = load_space(tmp_path / "space.yaml").cluster
    # What is written is what is reached: all of the link measured, and of the other one the share that is assumed.
    assert calibration.machine.link_efficiency == 1.0
    between = space.cluster.inter_node
    reached = replace(between, bandwidth_bytes_per_s=0.8 * between.bandwidth_bytes_per_s)
    assert cluster == replace(space.cluster, intra_node=calibration.link, inter_node=reached)
    assert read_machine(path) == calibration.machine


def test_without_a_measured_link_the_links_stay_nominal(calibration: Calibration) -> None:
    space = load_space(QUICKSTART)
    nominal = replace(calibration, link=None, machine=calibration.machine.with_numbers(link_efficiency=0.8))
    written = yaml.safe_load(cluster_file(nominal, space.cluster))
    for level in ("intra_node", "inter_node"):
        link = getattr(space.cluster, level)
        assert written["cluster"]["links"][level]["bandwidth"] == link.bandwidth_bytes_per_s
    assert written["machine"]["link_efficiency"] == 0.8


@pytest.mark.skipif(any(Path("/dev").glob("nvidia[0-9]*")), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no h100 in this machine: torch .* finds no GPU; --device cpu"):
        calibrate("h100", seconds=0.01)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--device", "h1000"], "--device: unknown device 'h1000'; known: cpu"),
        (["--seconds", "inf"], "--seconds must be a number of seconds above 0, not inf"),
        (["--out", "DIR/new/cluster.yaml"], "there is no folder"),
        (["--out", "DIR"], "it is a folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(options: list[str], complaint: str, tmp_path: Path) -> None:
    command = ["calibrate", *(option.replace("DIR", str(tmp_path)) for option in options)]
    with pytest.raises(UserError, match=complaint):
        CLI.invoke(app, command, catch_exceptions=False)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("cluster: {}", "no section `machine`"),
        (
            "machine: {name: cpu, peak_flop: 1}",
            r"cluster\.yaml:1: machine\.peak_flop: unknown key .* did you mean peak_flops",
        ),
        ("machine: {name: cpu, peak_flops: fast}", "machine.peak_flops: 'fast' must be a number"),
        ("machine: {name: cpu, peak_flops: 1}", "machine.memory_bytes_per_s: missing"),
        ("machine: [", r"cluster\.yaml:1: not valid YAML"),
        ("machines: {}", "unknown key 'machines', did you mean machine"),
        ("cluster: {devices_per_node: 2, file: other.yaml}", "cluster.file: a cluster file can't name another one"),
    ],
)
def test_mistakes_in_a_cluster_file_are_named(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=complaint):
        read_machine(path)


def test_finished_trials_refit_the_efficiency() -> None:
    space = load_space(QUICKSTART)
    truth, guess = machine("cpu").with_numbers(efficiency=0.45), machine("cpu").with_numbers(efficiency=0.9)
    plans = space.plans()[::4]
    trials = [
        (plan, predict_plan(plan, space.model, space.cluster, space.training, machine_figures=truth).step_time_s)
        for plan in plans
    ]
    result = refit(trials, space.model, space.cluster, space.training, guess)
    assert result.machine.efficiency == pytest.approx(0.45, rel=0.01)
    assert max(map(abs, result.after)) < 0.005 < min(map(abs, result.before))
    assert result.left_out is not None
    assert len(result.left_out) == len(trials)
    assert max(map(abs, result.left_out)) < 0.005
    assert result.sentence().startswith(f"1 number (efficiency) refitted to {len(trials)} trials")


def test_refit_needs_as_many_trials_as_numbers() -> None:
    space = load_space(QUICKSTART)
    with pytest.raises(UserError, match="2 numbers can't be refitted to 1 finished trials"):
        refit(
            [(space.plans()[0], 1.0)],
            space.model,
            space.cluster,
            space.training,
            machine("cpu"),
            ("efficiency", "kernel_s"),
        )


def test_only_plans_that_ran_count_as_trials() -> None:
    plan = load_space(QUICKSTART).plans()[0]
    names = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    rows = [
        Row(state="ok", fidelity="run", step_time_s=2.0, **names),
        Row(state="oom", fidelity="run", step_time_s=1.0, **names),
        Row(state="predicted", fidelity="profile", step_time_s=1.0, **names),
        Row(state="refused"),
    ]
    assert timed_plans(rows) == [(plan, 2.0)]


def test_command_writes_the_file_and_refuses_unknown_devices(tmp_path: Path) -> None:
    import typer

    from autotune.cli_calibrate import mount

    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    mount(app)
    out = tmp_path / "cluster.yaml"
    done = CLI.invoke(app, ["calibrate", "--out", str(out), "--seconds", "0.01", "--no-links"])
    assert done.exit_code == 0, done.output
    assert "share of the peak" in done.output
    assert read_machine(out).name == "cpu"
    wrong = CLI.invoke(app, ["calibrate", "--device", "h1000", "--out", str(out)])
    assert isinstance(wrong.exception, UserError)
