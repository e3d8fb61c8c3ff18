"""A worker that takes a trainer's arguments gets those of the plan, and only plans that they can express."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.export.job import Job
from autotune.export.megatron import megatron_arguments
from autotune.export.schedule_csv import schedule_csv
from autotune.profiling.command import parse_worker
from autotune.profiling.protocol import TrialRequest
from autotune.schedules import registry
from autotune.search.worker_plans import for_plan, for_worker
from autotune.space.space import Space, load_space

ROOT = Path(__file__).parents[2]
MEGATRON = parse_worker("pretrain_gpt.py {megatron_args} --lr 1e-4")
TITAN = parse_worker("train --config c {torchtitan_args}")


@pytest.fixture(scope="module")
def space() -> Space:
    return load_space(ROOT / "search_spaces" / "quickstart.yaml")


def request_for(space: Space, schedule: str, pp: int) -> TrialRequest:
    plan = next(plan for plan in space.plans() if (plan.schedule, plan.pp) == (schedule, pp))
    built = registry.build(schedule, pp, plan.microbatches, plan.stages_per_device)
    return TrialRequest(0, plan, built, space.model, space.cluster, space.training)


def test_megatron_gets_every_argument_as_a_word_of_its_own(space: Space, tmp_path: Path) -> None:
    request = request_for(space, "interleaved-1f1b", 4)
    words = for_plan(MEGATRON, space, request, tmp_path)().fill(request, tmp_path)
    exported = " ".join(megatron_arguments(Job(space, request.plan))).split(" ")
    assert words == ("pretrain_gpt.py", *exported, "--lr", "1e-4")
    assert words[words.index("--pipeline-model-parallel-size") + 1] == "4"


def test_torchtitan_gets_the_table_of_the_schedule_that_was_checked(space: Space, tmp_path: Path) -> None:
    request, folder = request_for(space, "v-half", 2), tmp_path / "a b"
    words = for_plan(TITAN, space, request, folder)().fill(request, folder)
    table = Path(words[words.index("--parallelism.pipeline_parallel_schedule_csv") + 1])
    assert table == folder / "schedule.csv"
    assert table.read_text() == schedule_csv(request.schedule)
    assert words[-1] == "activation-checkpoint:none"


def test_what_megatron_cannot_run_is_refused_by_its_rule_with_the_exporters_reason(space: Space) -> None:
    schedules = {plan.schedule for plan in for_worker(space, MEGATRON).plans()}
    assert schedules == {"1f1b", "interleaved-1f1b"}
    refused = [point for point in for_worker(space, MEGATRON).candidates() if point.point.schedule == "zb-v"]
    assert all(point.plan is None for point in refused)
    assert any("worker-megatron: Megatron-LM runs 1F1B and interleaved 1F1B, not zb-v" in p.reason for p in refused)


def test_what_torchtitan_cannot_run_is_refused_by_its_rule(space: Space) -> None:
    gpt2 = load_space(ROOT / "search_spaces" / "gpt2-cpu.yaml")
    assert not for_worker(gpt2, TITAN).plans()
    rules = {broken.rule for point in for_worker(gpt2, TITAN).candidates() for broken in point.broken}
    assert "worker-torchtitan" in rules
    assert for_worker(space, TITAN).plans() == space.plans()


def test_other_workers_run_every_legal_plan_as_it_is(space: Space, tmp_path: Path) -> None:
    worker = parse_worker("train --pp {pp}")
    assert for_worker(space, worker) is space
    assert for_plan(worker, space, request_for(space, "zb-v", 2), tmp_path)() is worker


def test_a_plan_that_comes_past_the_rule_is_refused_all_the_same(space: Space, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Megatron-LM runs 1F1B"):
        for_plan(MEGATRON, space, request_for(space, "zb-v", 2), tmp_path)
