"""Predictions of whole plans: sums, monotone where physics is, fast, and the paper's hybrid grid."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cost_models import GPT, LLAMA_70B

from autotune.cost.assumptions import MEGATRON, WORKER, ZERO_BUBBLE
from autotune.cost.devices import catalogue, machine
from autotune.cost.explain import explain, prediction_row, to_dict
from autotune.cost.predict import MeanPasses, Prediction, Predictor, model_flops, predict_plan, predict_plans
from autotune.errors import UserError
from autotune.report.tables import _predicted_bubble
from autotune.results.predicted import Predicted
from autotune.results.rows import row_without_trial
from autotune.schedules import registry
from autotune.schedules.simulate import simulate
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, spread_layers
from autotune.space.space import load_space
from autotune.space.training import TrainingSpec

ROOT = Path(__file__).parents[2]
CLUSTER = ClusterSpec(8, 8, "a100-80g", None, Link(3e-6, 300e9), Link(5e-6, 25e9))
TRAINING = TrainingSpec(256, "bfloat16")


def _plan(pp: int = 4, tp: int = 2, dp: int = 8, b: int = 1, schedule: str = "1f1b", layers: int = 80) -> Plan:
    v = registry.find(schedule).min_stages_per_device
    return Plan(pp, tp, dp, b, 256 // (dp * b), schedule, v, spread_layers(layers, pp * v))


def _predict(plan: Plan, **changes: object) -> Prediction:
    settings: dict = {"model": LLAMA_70B, "cluster": CLUSTER, "training": TRAINING, "assumptions": MEGATRON}
    return predict_plan(plan, **(settings | changes))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zb-h1", "v-half"])
def test_the_parts_of_a_step_sum_to_it(schedule: str) -> None:
    got = _predict(_plan(schedule=schedule))
    assert sum(asdict(got.breakdown).values()) == pytest.approx(got.step_time_s)
    assert all(part >= -1e-12 for part in asdict(got.breakdown).values())
    assert 0 < got.mfu < machine("a100-80g").efficiency
    assert got.tokens_per_s == pytest.approx(256 * 4096 / got.step_time_s)


def test_a_prediction_is_the_simulation_of_its_own_pass_costs() -> None:
    plan = _plan(schedule="v-half")
    got = predict_plan(plan, LLAMA_70B, CLUSTER, TRAINING, MEGATRON, exact=True)
    timeline = simulate(registry.build("v-half", 4, plan.microbatches), got.pass_costs)
    passes = got.step_time_s - got.breakdown.dp_s - got.breakdown.optimizer_s
    assert passes == pytest.approx(timeline.makespan)
    assert got.bubble_rate == pytest.approx(timeline.bubble_rate)


@pytest.mark.parametrize("schedule", ["1f1b", "v-half"])
def test_there_is_one_bubble_what_the_busiest_device_does_not_work_while_the_pipeline_runs(schedule: str) -> None:
    got = predict_plan(_plan(schedule=schedule), LLAMA_70B, CLUSTER, TRAINING, MEGATRON, exact=True)
    timeline = simulate(registry.build(schedule, 4, 32), got.pass_costs)
    parts = got.breakdown
    assert parts.pipeline_s == pytest.approx(timeline.makespan)
    assert (parts.bubble_s + parts.pp_s) / parts.pipeline_s == pytest.approx(timeline.bubble_rate)
    assert got.bubble_rate == pytest.approx(timeline.bubble_rate)
    told = f"{timeline.bubble_rate:.1%}"
    assert f"bubble {told}" in explain(got).splitlines()[0]
    assert f"Bubble rate {told}" in explain(got)
    row = row_without_trial(got.plan, "", "predicted", "", Predicted.of(got), 1, None)
    assert _predicted_bubble(row) == pytest.approx(timeline.bubble_rate)


def test_a_step_too_long_to_simulate_in_full_is_extrapolated_even_where_one_plan_is_asked_for() -> None:
    training = TrainingSpec(400_000, "bfloat16")
    plan = Plan(4, 2, 8, 1, 50_000, "1f1b", 1, spread_layers(80, 4))
    long = predict_plan(plan, LLAMA_70B, CLUSTER, training, MEGATRON, exact=True)
    assert not long.exact
    short = predict_plan(_plan(), LLAMA_70B, CLUSTER, TRAINING, MEGATRON, exact=True)
    # what a step takes beside its microbatches is the same
    per_microbatch = max(
        map(sum, zip(*(getattr(long.pass_costs, k) for k in ("forward", "backward", "weight")), strict=True))
    )
    assert long.step_time_s - short.step_time_s == pytest.approx((50_000 - 32) * per_microbatch, rel=1e-3)


def test_predictions_of_many_plans_are_those_of_each_alone() -> None:
    plans = [_plan(schedule=name) for name in ("1f1b", "zb-h1")] + [_plan(pp=2, dp=16)]
    together = list(predict_plans(plans, LLAMA_70B, CLUSTER, TRAINING, MEGATRON))
    assert together == [_predict(plan) for plan in plans]


def test_better_machines_and_links_never_slow_a_plan_down() -> None:
    plan, base = _plan(), machine("a100-80g")
    first = _predict(plan, machine_figures=base).step_time_s
    for better in (
        {"efficiency": base.efficiency * 1.1},
        {"kernel_s": base.kernel_s / 2},
        {"memory_bytes_per_s": base.memory_bytes_per_s * 2},
        {"visit_s": 0.0},
        {"link_efficiency": 1.0},
    ):
        assert _predict(plan, machine_figures=base.with_numbers(**better)).step_time_s < first
    slow = replace(CLUSTER, inter_node=Link(5e-6, 2.5e9))
    assert _predict(plan, cluster=slow).step_time_s > first


def test_large_matmuls_are_more_efficient_than_small_ones() -> None:
    small, large = (_predict(_plan(b=b)).pass_costs.weight[1] / b for b in (1, 4))
    assert large < small


def test_overlap_hides_the_share_it_states() -> None:
    plan = _plan()
    shown = _predict(plan).breakdown
    hidden = _predict(plan, assumptions=replace(MEGATRON, dp_overlap=0.75, tp_overlap=0.5)).breakdown
    assert hidden.dp_s == pytest.approx(shown.dp_s / 4)
    assert hidden.tp_s == pytest.approx(shown.tp_s / 2)


def test_measured_means_replace_the_models_pass_times() -> None:
    plan = _plan(pp=4, tp=1, dp=16)
    passes = MeanPasses(0.1, 0.11, 0.09, 0.0)
    got = Predictor(LLAMA_70B, CLUSTER, TRAINING, MEGATRON).predict(plan, exact=True, passes=passes)
    overhead = machine("a100-80g").visit_s
    assert sum(got.pass_costs.forward) / 4 == pytest.approx(0.1 + overhead / 2)
    assert sum(got.pass_costs.weight) / 4 == pytest.approx(0.09)


def test_model_flops_are_those_of_narayanan_et_al() -> None:
    # arXiv 2104.04473, section 5.1: 96 B s l h^2 (1 + s/6h + V/16lh) with recomputation; 3 in 4 are the model's.
    s, layers, h, v = GPT.sequence_length, GPT.layers, GPT.hidden, GPT.vocab
    published = 96 * 4 * s * layers * h * h * (1 + s / (6 * h)) * 3 / 4 + 6 * 4 * s * h * v
    assert model_flops(GPT, 4) == pytest.approx(published)


def test_a_tied_table_on_one_device_counts_once() -> None:
    tied = ModelSpec(8, 1024, 16, 16, 64, 4096, 64000, 512, tied_embeddings=True)
    training = TrainingSpec(16, "bfloat16")

    def parameters(model: ModelSpec, schedule: str, device: int) -> float:
        plan = Plan(2, 1, 1, 1, 16, schedule, 2, (2, 2, 2, 2))
        return predict_plan(plan, model, CLUSTER, training, MEGATRON).memory[device].parameters

    untied = replace(tied, tied_embeddings=False)
    table = 2 * 64000 * 1024
    assert parameters(untied, "v-half", 0) - parameters(tied, "v-half", 0) == pytest.approx(table)
    assert parameters(untied, "interleaved-1f1b", 1) == parameters(tied, "interleaved-1f1b", 1)


def test_unknown_devices_and_impossible_plans_are_told_as_users_mistakes() -> None:
    with pytest.raises(UserError, match="no figures for device 'abacus'"):
        _predict(_plan(), cluster=replace(CLUSTER, device="abacus"))
    with pytest.raises(UserError, match="no schedule 'zigzag'"):
        _predict(replace(_plan(), schedule="zigzag"))


def test_every_figure_of_the_catalogue_is_sane_and_the_named_devices_are_there() -> None:
    devices = catalogue()
    assert {"a100-40g", "a100-80g", "h100", "h200", "b200", "mi300x", "cpu"} <= devices.keys()
    for device in devices.values():
        assert 0 < device.efficiency <= 1
        assert 1e9 < device.memory_bytes_per_s < 1e14
        assert device.peak("bfloat16") > 0 < device.peak("float32")
    assert devices["h200"].memory_bytes_per_s > devices["h100"].memory_bytes_per_s


def test_an_explanation_names_every_part_and_the_heaviest_device() -> None:
    got = _predict(_plan(tp=1, dp=16))
    text = explain(got, limit_bytes=10 * 1024**3)
    for word in ("compute", "bubble", "data-parallel traffic", "optimizer", "heaviest", "refused (estimate)"):
        assert word in text
    values = to_dict(got, 10 * 1024**3)
    assert sum(values["breakdown_s"].values()) == pytest.approx(values["step_time_s"])
    assert values["memory_bytes"][got.heaviest]["total"] == pytest.approx(values["peak_memory_bytes"], abs=1)
    row = prediction_row(got)
    assert row["predicted_step_time_s"] == got.step_time_s
    assert row["predicted_bubble_s"] == got.breakdown.bubble_s


def test_predicting_imports_no_torch() -> None:
    code = (
        "import sys; from autotune.cost.predict import predict_plan; from autotune.space.space import load_space;"
        f"s = load_space({str(ROOT / 'search_spaces/quickstart.yaml')!r});"
        "predict_plan(s.plans()[0], s.model, s.cluster, s.training);"
        "print([m for m in ('torch', 'numba', 'numpy', 'optuna', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# The hybrid grid of arXiv 2405.15362: 98.5B on 40 A100. Software and machine numbers are those that the same group's
# runs of arXiv 2401.10241, Table 4, give (`autotune validate`).
PAPER_MFU = {
    ("1f1b", "none"): 49.81,
    ("1f1b", "full"): 37.15,
    ("zb-1p", "none"): 54.52,
    ("v-half", "none"): 52.60,
    ("v-min", "none"): 48.02,
    ("v-zb", "none"): 57.58,
}
GRID_SOFTWARE = replace(ZERO_BUBBLE, sequence_parallel=True, sharding="zero1")
GRID_MACHINE = machine("a100-80g").with_numbers(efficiency=0.727)


@pytest.fixture(scope="module")
def grid() -> dict[tuple[str, str, int, int, int], Prediction]:
    space = load_space(ROOT / "search_spaces/paper-98b-a100.yaml")
    predictor = Predictor(space.model, space.cluster, space.training, GRID_SOFTWARE, GRID_MACHINE)
    return {
        (p.schedule, p.recompute, p.pp, p.dp, p.micro_batch_size): predictor.predict(p, exact=True)
        for p in space.plans()
    }


def test_six_methods_come_in_the_papers_order_at_its_published_plan(grid) -> None:
    ours = {method: grid[(*method, 5, 2, 2)].mfu for method in PAPER_MFU}
    assert sorted(ours, key=ours.__getitem__) == sorted(PAPER_MFU, key=PAPER_MFU.__getitem__)
    base = "1f1b", "none"
    for method, published in PAPER_MFU.items():
        assert ours[method] / ours[base] == pytest.approx(published / PAPER_MFU[base], abs=0.07)


def test_the_published_1f1b_plan_is_within_three_percent_of_the_best_1f1b_that_fits(grid) -> None:
    limit = load_space(ROOT / "search_spaces/paper-98b-a100.yaml").cluster.memory_limit_bytes
    fitting = {key: p for key, p in grid.items() if key[0] == "1f1b" and p.refusal(limit) is None}
    published = fitting["1f1b", "none", 5, 2, 2]
    assert published.step_time_s <= 1.03 * min(p.step_time_s for p in fitting.values())


def test_the_workers_assumptions_are_the_default() -> None:
    cpu = replace(CLUSTER, device="cpu", nodes=1)
    plan = Plan(2, 1, 4, 1, 8, "1f1b", 1, (3, 3))
    training = TrainingSpec(32)
    assert predict_plan(plan, GPT, cpu, training) == predict_plan(plan, GPT, cpu, training, WORKER)
