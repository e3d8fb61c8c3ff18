"""Every sampler proposes legal plans that were not measured yet, and goes on from what is known."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from sampler_cases import Study, failed, make_plans, ok, out_of_memory, predict

from autotune.cli_search import Sampler
from autotune.search.options import SearchOptions
from autotune.search.samplers import FIELDS, SAMPLERS, Observation, Proposer, SamplerName, fields_of, make_proposer
from autotune.space.plan import Plan

PLANS = make_plans()
PREDICTED = {plan: predict(1.0 + 0.01 * index) for index, plan in enumerate(PLANS)}
EXHAUSTIVE: tuple[SamplerName, ...] = tuple(name for name in SAMPLERS if name != "auto")


def proposer(name: SamplerName, seed: int = 0, plans: Sequence[Plan] = PLANS, limit: int | None = 150) -> Proposer:
    return make_proposer(name, plans, seed, PREDICTED, limit)


def outcome(plan: Plan) -> Observation:
    """Throughput by the plan, with some failures and plans too large among them."""
    if plan.schedule == "v-min" and plan.pp == 8:
        return failed(plan)
    if plan.micro_batch_size == 4 and plan.pp == 2:
        return out_of_memory(plan, 50.0, 200)
    return ok(plan, 1000.0 * plan.pp / plan.tp + PLANS.index(plan), 100 - plan.pp, 150)


def test_command_line_and_library_know_the_same_samplers_and_auto_is_the_default(tmp_path: object) -> None:
    assert {one.value for one in Sampler} == set(SAMPLERS)
    assert SearchOptions(folder=tmp_path).sampler == "auto"  # type: ignore[arg-type]


@pytest.mark.parametrize("name", EXHAUSTIVE)
def test_every_plan_is_proposed_once_whatever_becomes_of_it(name: SamplerName) -> None:
    plans = PLANS[:30]
    tried = Study(plans, outcome).run(proposer(name, plans=plans))
    assert sorted(map(str, tried)) == sorted(map(str, plans))


@pytest.mark.parametrize("name", SAMPLERS)
def test_same_seed_proposes_the_same_and_a_resumed_study_repeats_nothing(name: SamplerName) -> None:
    first, second = Study(PLANS, outcome), Study(PLANS, outcome)
    assert first.run(proposer(name, 3), 8) == second.run(proposer(name, 3), 8)
    tried = first.run(proposer(name, 3), 8)  # a new proposer, that knows only the study
    assert not set(tried) & {one.plan for one in second.known}


@pytest.mark.parametrize("name", ["random", "tpe", "nsga2", "gp"])
def test_seeds_differ(name: SamplerName) -> None:
    runs = [Study(PLANS, outcome).run(proposer(name, seed), 6) for seed in range(4)]
    assert len({tuple(run) for run in runs}) > 1


@pytest.mark.parametrize("name", SAMPLERS)
def test_plans_that_other_tuners_hold_are_not_proposed(name: SamplerName) -> None:
    """Only `left` says what may be proposed: what others have claimed is neither known nor left."""
    free = PLANS[::9]
    study = Study(free, outcome)
    study.run(proposer(name), 4)
    assert {one.plan for one in study.known} <= set(free)


@pytest.mark.parametrize("name", ["tpe", "gp"])
def test_learning_samplers_find_the_best_plan_in_fewer_trials_than_chance(name: SamplerName) -> None:
    def needed(sampler: SamplerName, seed: int) -> int:
        study = Study(PLANS, lambda plan: ok(plan, 1000.0 * plan.pp / plan.tp + 300.0 * SCORES[plan.schedule]))
        best, picks = max(study.truth(plan).value or 0.0 for plan in PLANS), proposer(sampler, seed)
        while not study.known or study.known[-1].value != best:
            study.run(picks, 1)
        return len(study.known)

    learned = [needed(name, seed) for seed in range(4)]
    chance = [needed("random", seed) for seed in range(4)]
    assert sum(learned) < sum(chance)


SCORES = {"1f1b": 0, "interleaved-1f1b": 1, "zb-h1": 2, "v-half": 3, "v-min": -2}


def test_nsga2_explores_both_objectives_and_turns_away_from_plans_over_the_limit() -> None:
    def truth(plan: Plan) -> Observation:
        """More pipeline is faster; larger micro-batches are faster and need more; the largest don't fit."""
        if plan.micro_batch_size == 4:
            return out_of_memory(plan, 50.0, 200)
        return ok(plan, 100.0 * plan.pp * plan.micro_batch_size, 40 * plan.micro_batch_size, 150)

    too_large, fronts = [], []
    for seed in range(6):
        study = Study(PLANS, truth)
        tried = study.run(proposer("nsga2", seed), 36)
        too_large.append(sum(plan.micro_batch_size == 4 for plan in tried[18:]))
        best = {(one.value, one.peak_bytes) for one in study.known if one.value}
        fronts.append({(800.0, 40), (1600.0, 80)} <= best)
    assert sum(too_large) < 6 * 18 / 3, "no fewer than chance"
    assert sum(fronts) >= 5


def test_fields_tell_the_plans_of_a_space_apart() -> None:
    assert len({tuple(fields_of(plan).values()) for plan in PLANS}) == len(PLANS)
    assert tuple(fields_of(PLANS[0])) == FIELDS


def test_random_order_is_that_of_the_whole_space() -> None:
    sampler, half = proposer("random", 7), random.Random(1).sample(PLANS, 45)
    whole = Study(PLANS, outcome).run(sampler)
    assert Study(half, outcome).run(sampler) == [plan for plan in whole if plan in half]


@pytest.mark.parametrize("name", ["gp", "tpe", "nsga2"])
def test_plans_in_flight_are_known_to_the_sampler_and_forgotten_when_they_end(name: SamplerName) -> None:
    known = [outcome(plan) for plan in PLANS[:12]]
    flights, left = PLANS[12:16], PLANS[16:]
    asked = proposer(name)
    for _ in range(3):
        assert asked.propose(left, known, flights) in left
    ended = [*known, *(outcome(plan) for plan in flights)]
    assert asked.propose(left, ended) in left
    if name in ("tpe", "nsga2"):
        assert len(asked.open) == 1, "the last proposal alone is open"  # type: ignore[attr-defined]


def test_auto_keeps_away_from_neighbours_of_plans_in_flight() -> None:
    known = [ok(plan, 1000.0, 50) for plan in PLANS[:6]]
    alone = proposer("auto")._outlook(PLANS[20:], known, [])  # type: ignore[attr-defined]
    beside = proposer("auto")._outlook(PLANS[20:], known, PLANS[10:20])  # type: ignore[attr-defined]
    assert (beside.deviation <= alone.deviation * 1.05).all()
    assert beside.deviation.mean() < 0.9 * alone.deviation.mean()
    assert beside.rate == pytest.approx(alone.rate, abs=0.1)
