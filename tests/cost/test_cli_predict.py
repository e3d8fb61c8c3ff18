"""The commands predict and validate."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from autotune.cli import app as whole_command_line
from autotune.cli_predict import mount
from autotune.cost.devices import machine
from autotune.cost.predict import Predictor
from autotune.errors import UserError
from autotune.profiling.calibrate import Calibration, cluster_file, read_machine
from autotune.results.table import read_csv
from autotune.space.plan import Plan
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


def _space(folder: Path, **changes: Any) -> str:
    """A file of the quickstart space with keys of its sections changed, named `section__key`."""
    values = yaml.safe_load(Path(SPACE).read_text(encoding="utf-8"))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values.setdefault(section, {})[key] = value
    file = folder / "space.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"training__global_batch_size": 4 * 10**8, "search__micro_batch_size": 1},
            "schedule-size: .* 200,000,000 passes a step, more than the 1,000,000",
        ),
        ({"cluster__nodes": 10**6}, "cluster.nodes: 1000000 must be at most 100000"),
        ({"model__vocab": 10**12}, "model.vocab: 1000000000000 must be at most"),
    ],
)
def test_sizes_that_no_machine_could_work_out_are_refused_at_once(
    app: typer.Typer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    begun = time.process_time()
    with pytest.raises(UserError, match=message):
        _run(app, "predict", _space(tmp_path, **changes))
    assert time.process_time() - begun < 5.0


@pytest.mark.parametrize(
    "changes",
    [
        {"model__layers": 10**6},
        {"model__layers": 2**31 - 1, "search__stages_per_device": 10**9},
        {"model__sequence_length": 10**9},
        {"model__hidden": 2**30},
        {"cluster__nodes": 10**5, "cluster__devices_per_node": 1024, "training__global_batch_size": 102_400_000},
    ],
    ids=["layers", "stages", "tokens", "width", "devices"],
)
def test_sizes_beyond_all_reason_still_get_an_answer(app: typer.Typer, tmp_path: Path, changes: dict[str, Any]) -> None:
    begun = time.process_time()
    got = json.loads(_run(app, "predict", _space(tmp_path, search__micro_batch_size=1, **changes), "--json"))
    assert all(0 < prediction["step_time_s"] < float("inf") for prediction in got)
    assert time.process_time() - begun < 15.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"microbatches": 4 * 10**8}, "microbatches is 4"),
        ({"dp": 3}, "must be the 4 devices: dp is 4"),
        ({"pp": "four"}, "pp must be a whole number from 1 up, not 'four'"),
        ({"layer_split": [9]}, r"layer_split must give 1 stages 8 layers in all, not \[9\]"),
        ({"schedule": "v-halve"}, "no schedule 'v-halve'"),
        ({"tp": 8}, "8 doesn't divide 4 devices"),
        ({"recompute": "some"}, "recompute must be one of none, full"),
    ],
)
def test_a_plan_file_that_cannot_run_in_its_space_is_refused(
    app: typer.Typer, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    plan = load_space(SPACE).plans()[0].to_dict() | changes
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"space": SPACE, "plan": plan}))
    with pytest.raises(UserError, match=message):
        _run(app, "predict", str(file))


CALIBRATED = (
    "cluster: {device: DEVICE, devices_per_node: 4}\n"
    "machine: {peak_flops: 1.0e+12, peak_flops_float32: 1.0e+11, memory_bytes_per_s: 1.0e+10, link_efficiency: 1.0}\n"
)


def test_predict_takes_a_calibration_as_search_does(app: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CALIBRATED.replace("DEVICE", "cpu"))
    one = json.loads(_run(app, "predict", SPACE, "--json", "--top", "1", "--calibrated-by", str(file)))[0]
    space = load_space(SPACE)
    # The file's share of the bandwidth is of the links it measured; the space's are nominal.
    figures = replace(read_machine(file), link_efficiency=0.8)
    plan = Plan.from_dict(one["plan"])
    told = Predictor(space.model, space.cluster, space.training, machine_figures=figures).predict(plan)
    assert one["step_time_s"] == told.step_time_s
    search = ("search", SPACE, "--fidelity", "predict", "--results-dir", str(tmp_path), "--calibrated-by", str(file))
    assert CliRunner().invoke(whole_command_line, search, catch_exceptions=False).exit_code == 0
    best = next(row for row in read_csv(tmp_path / "quickstart" / "trials.csv") if row.is_best)
    assert best.predicted_step_time_s == one["step_time_s"]


@pytest.mark.parametrize("command", [("predict",), ("search", "--fidelity", "predict")], ids=["predict", "search"])
def test_a_calibration_of_another_device_is_refused(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(CALIBRATED.replace("DEVICE", "h100"))
    given = (command[0], SPACE, *command[1:], "--calibrated-by", str(file))
    with pytest.raises(UserError, match="its figures are of h100, not of cpu"):
        CliRunner().invoke(whole_command_line, given, catch_exceptions=False)


def test_a_calibration_that_is_not_there_may_have_been_a_file_or_a_folder(tmp_path: Path) -> None:
    given = ("predict", SPACE, "--calibrated-by", str(tmp_path / "results" / "typo"))
    with pytest.raises(UserError, match=r"--calibrated-by .*typo: there is no such file or folder"):
        CliRunner().invoke(whole_command_line, given, catch_exceptions=False)


def test_the_software_follows_from_the_spaces_worker(app: typer.Typer, tmp_path: Path) -> None:
    def peak(*options: str, **changes: Any) -> int:
        space = _space(tmp_path, training__dtype="bfloat16", **changes)
        plan = json.dumps({"pp": 2, "tp": 2, "schedule": "1f1b", "micro_batch_size": 1})
        return json.loads(_run(app, "predict", space, "--plan", plan, "--json", *options))["peak_memory_bytes"]

    by_stack = {stack: peak("--stack", stack) for stack in ("worker", "worker-cuda", "megatron")}
    assert len(set(by_stack.values())) == 3
    assert peak() == by_stack["worker"]
    assert peak(worker__command="{python} pretrain_gpt.py {megatron_args}") == by_stack["megatron"]
    assert peak("--stack", "worker", worker__command="x {megatron_args}") == by_stack["worker"]
    assert peak(worker__command="python train.py {pp}") == by_stack["worker"]
    assert peak(worker__command="torchrun {torchtitan_args}") == by_stack["worker"]


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


BASE = {"peak_flops": 1e12, "peak_flops_float32": 1e12, "memory_bytes_per_s": 1e10}


@pytest.mark.parametrize(
    ("figure", "value", "rule"),
    [
        ("efficiency", "50", "above 0 and at most 1"),
        ("efficiency", "0", "above 0 and at most 1"),
        ("memory_efficiency", "1.01", "above 0 and at most 1"),
        ("link_efficiency", "5", "above 0 and at most 1"),
        ("link_efficiency", "nan", "above 0 and at most 1"),
        ("attention_efficiency", "1.6", "above 0 and at most 1.5"),
        ("kernel_s", "-1", "at least 0 and at most 1"),
        ("visit_s", "inf", "at least 0 and at most 1"),
        ("layer_host_s", "2", "at least 0 and at most 1"),
        ("peak_flops", "inf", "finite and above 0"),
        ("peak_flops_float32", "-1", "finite and above 0"),
        ("memory_bytes_per_s", "0", "finite and above 0"),
        ("memory_bytes", "nan", "finite and above 0"),
    ],
)
def test_a_figure_beyond_its_legal_range_is_refused_wherever_it_enters(
    app: typer.Typer, tmp_path: Path, figure: str, value: str, rule: str
) -> None:
    with pytest.raises(UserError, match=rf"--machine: {figure} must be {rule}, not {value}"):
        _run(app, "predict", SPACE, "--machine", f"{figure}={value}")
    figures = BASE | {figure: float(value)}
    with pytest.raises(UserError, match=rf"cluster\.machine\.{figure}: .* must be {rule}"):
        _run(app, "predict", _space(tmp_path, cluster__machine=figures))
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"machine": figures}))
    with pytest.raises(UserError, match=rf"machine\.{figure}: .* must be {rule}"):
        _run(app, "predict", SPACE, "--calibrated-by", str(file))
    written = machine("cpu").with_numbers(**{figure: float(value)})
    with pytest.raises(UserError, match=f"{figure} must be {rule}, but came out as"):
        cluster_file(Calibration(written, None, {}, ()), load_space(SPACE).cluster)
