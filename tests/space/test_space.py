"""The points of a space: each once, in one spelling, with nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.results.rows import plan_of
from autotune.results.table import read_csv
from autotune.space.describe import describe_space, description_lines
from autotune.space.plan import Plan
from autotune.space.settings import SearchLists
from autotune.space.space import Space, load_space

ROOT = Path(__file__).parents[2]
SPACES = sorted((ROOT / "search_spaces").glob("*.yaml"))


@pytest.fixture(scope="module")
def quickstart() -> Space:
    return load_space(ROOT / "search_spaces" / "quickstart.yaml")


def test_quickstart_searches_every_dimension_with_about_fifty_plans(quickstart: Space) -> None:
    plans = quickstart.plans()
    assert 40 <= len(plans) <= 60
    for dimension in ("pp", "tp", "dp", "micro_batch_size", "microbatches", "schedule"):
        assert len({getattr(plan, dimension) for plan in plans}) >= 2, dimension
    assert {plan.schedule for plan in plans} >= {"1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min"}


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_every_ready_space_has_a_baseline_and_a_rival(path: Path) -> None:
    schedules = {plan.schedule for plan in load_space(path).plans() if plan.pp > 1}
    assert "1f1b" in schedules
    assert len(schedules) >= 2


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_plans_use_every_device_train_the_whole_batch_and_lose_no_layer(path: Path) -> None:
    space = load_space(path)
    for plan in space.plans():
        assert plan.pp * plan.tp * plan.dp == space.cluster.devices
        assert plan.dp * plan.micro_batch_size * plan.microbatches == space.training.global_batch_size
        assert sum(plan.layer_split) == space.model.layers
        assert len(plan.layer_split) == plan.pp * plan.stages_per_device
        assert min(plan.layer_split) >= 1


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_no_plan_stands_twice(path: Path) -> None:
    space = load_space(path)
    plans = space.plans()
    assert len(set(plans)) == len(plans)
    assert len({space.fingerprint(plan) for plan in plans}) == len(plans)


def test_fingerprints_stay_what_they_are_in_the_committed_example() -> None:
    study = ROOT / "results" / "example"
    space = load_space(study / "space.yaml")
    rows = [row for row in read_csv(study / "trials.csv") if row.layer_split is not None]
    assert rows
    assert [space.fingerprint(plan_of(row)) for row in rows] == [row.fingerprint for row in rows]
    plan = plan_of(rows[0])
    assert plan.fingerprint(space.model, space.cluster, space.training) == rows[0].fingerprint


def test_without_a_pipeline_all_schedules_are_one_plan(quickstart: Space) -> None:
    single = [plan for plan in quickstart.plans() if plan.pp == 1]
    assert {(plan.schedule, plan.stages_per_device) for plan in single} == {("1f1b", 1)}
    assert len(single) == len(quickstart.search.micro_batch_size) * len(quickstart.search.tp)


def test_stages_per_device_vary_only_where_the_schedule_lets_them(quickstart: Space) -> None:
    lists = replace(quickstart.search, stages_per_device=(2, 4), schedule=("1f1b", "zb-v", "interleaved-1f1b"))
    plans = replace(quickstart, search=lists).plans()
    stages = {name: {p.stages_per_device for p in plans if p.schedule == name and p.pp == 2} for name in lists.schedule}
    assert stages == {"1f1b": {1}, "zb-v": {2}, "interleaved-1f1b": {2, 4}}


def test_refusals_and_plans_add_up_to_the_points_of_the_lists(quickstart: Space) -> None:
    lists = quickstart.search
    points = 0
    for pp in lists.pp:
        pipelines = 1 if pp == 1 else len(lists.schedule)
        points += len(lists.tp) * len(lists.micro_batch_size) * pipelines
    candidates = list(quickstart.candidates())
    assert len(candidates) == points
    assert all((candidate.plan is None) == bool(candidate.broken) for candidate in candidates)


def test_a_refusal_names_every_rule_and_keeps_the_searched_values(quickstart: Space) -> None:
    tiny = replace(quickstart, model=replace(quickstart.model, layers=2, ffn_hidden=353))
    refused = [c for c in tiny.candidates() if len(c.broken) > 1]
    assert refused
    candidate = next(c for c in refused if {"tp-ffn", "layers-cover-stages"} <= {rule for rule, _ in c.broken})
    assert candidate.plan is None
    assert candidate.point.tp == 2
    assert "tp-ffn: " in candidate.reason
    assert "layers-cover-stages: " in candidate.reason


def test_ten_thousand_points_take_well_under_two_seconds_of_cpu(quickstart: Space) -> None:
    wide = replace(
        quickstart,
        model=replace(quickstart.model, layers=96, heads=64, kv_heads=64),
        cluster=replace(quickstart.cluster, nodes=64, devices_per_node=8),
        training=replace(quickstart.training, global_batch_size=4096),
        search=SearchLists(
            pp=tuple(range(1, 33)),
            tp=(1, 2, 4, 8),
            micro_batch_size=tuple(range(1, 9)),
            schedule=("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min"),
            recompute=("none", "full"),
        ),
    )
    started = time.process_time()
    candidates = list(wide.candidates())
    assert len(candidates) > 10_000
    assert time.process_time() - started < 2.0


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_a_space_written_back_stands_alone_and_is_equal(path: Path, tmp_path: Path) -> None:
    space = load_space(path)
    copy = tmp_path / "space.yaml"  # far from the model files
    copy.write_text(space.to_yaml())
    assert load_space(copy) == space
    assert [space.fingerprint(p) for p in load_space(copy).plans()] == [space.fingerprint(p) for p in space.plans()]


def test_the_dry_run_counts_refusals_by_rule_and_lists_every_plan(quickstart: Space) -> None:
    data = describe_space(quickstart)
    by_hand = Counter(rule for candidate in quickstart.candidates() for rule, _ in candidate.broken)
    assert {entry["rule"]: entry["count"] for entry in data["refused_by_rule"]} == by_hand
    assert [Plan.from_dict({k: v for k, v in plan.items() if k != "fingerprint"}) for plan in data["plans"]] == list(
        quickstart.plans()
    )
    assert json.loads(json.dumps(data)) == data
    text = "\n".join(description_lines(quickstart))
    assert f"{quickstart.model.parameter_count():,} parameters" in text
    for plan in data["plans"]:
        assert plan["fingerprint"] in text


def test_the_dry_run_shows_the_padded_vocabulary() -> None:
    space = load_space(ROOT / "search_spaces" / "gpt2-cpu.yaml")
    text = "\n".join(description_lines(space))
    assert "50,258 padded from 50257" in text
    assert [entry["padded_vocab"] for entry in describe_space(space)["vocab_by_tp"]] == [50257, 50258]


def test_the_dry_run_of_a_space_without_legal_plans_says_so(quickstart: Space) -> None:
    barren = replace(
        quickstart,
        training=replace(quickstart.training, global_batch_size=1),
        search=replace(quickstart.search, pp=(1,), tp=(1,)),
    )
    assert "no legal plan" in "\n".join(description_lines(barren))


def test_the_dry_run_is_quick_and_imports_no_heavy_library() -> None:
    code = (
        "import sys, time\n"
        "from autotune.space.space import load_space\n"
        "from autotune.space.describe import description_lines\n"
        f"description_lines(load_space({str(ROOT / 'search_spaces' / 'quickstart.yaml')!r}))\n"
        "heavy = {'torch', 'optuna', 'pandas', 'numba', 'scipy'} & set(sys.modules)\n"
        "print(time.process_time(), sorted(heavy))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    cpu, heavy = result.stdout.split(maxsplit=1)
    assert heavy.strip() == "[]"
    assert float(cpu) < 0.5
