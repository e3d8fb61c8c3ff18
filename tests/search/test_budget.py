"""Budgets are totals of the study; the display says what remains of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from conftest import Bench, Notes

from autotune.errors import UserError
from autotune.results.measurement import TrialOutcome
from autotune.search.budget import Budget
from autotune.search.observer import Outlook
from autotune.search.options import SearchOptions
from autotune.search.store import Finished, Flight
from autotune.search.tuners import Tuner
from autotune.space.space import load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"


class Outlooks(Notes):
    """Remembers where a search stood when each trial ended."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Outlook] = []

    def trial_ended(self, row: object, best: object, outlook: Outlook) -> None:
        self.seen.append(outlook)


def test_device_hours_are_a_total_over_resumes(bench: Bench) -> None:
    bench.tell_worker({"do": "succeed", "sleep_s": 0.2})
    hours = 0.1 * 4 / 3600  # half of what one trial of 0.2 s on four devices takes
    outlooks = Outlooks()
    first = bench.here(outlooks, device_hours=hours)
    again = bench.here(resume=True, device_hours=hours)
    assert (first.ended, again.ended) == ("device-hours", "device-hours")
    assert len(bench.launches()) == 1
    assert outlooks.seen[0].device_hours >= 2 * hours
    assert outlooks.seen[0].device_hours_limit == hours
    assert outlooks.seen[0].seconds_left == 0
    waiting = {row["reason"] for row in bench.table() if row["state"] == "predicted"}
    assert waiting == {f"not run: the budget of {hours:g} device-hours is spent"}


def test_device_hours_must_be_above_zero_and_mean_nothing_to_predictions(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--device-hours must be above 0"):
        SearchOptions(tmp_path, device_hours=0)
    with pytest.raises(UserError, match="--device-hours means nothing with --fidelity predict"):
        SearchOptions(tmp_path, device_hours=1, fidelity="predict")


def test_estimate_of_what_remains_obeys_every_budget_and_counts_the_tuners(tmp_path: Path) -> None:
    space = load_space(QUICKSTART)
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    outcome = TrialOutcome("ok", "", None, "", 10.0)
    finished = [Finished(number, plan, outcome) for number, plan in enumerate(list(plans.values())[:4])]
    other = Tuner("key", "host", "place", 1, "1.00")
    flights = [Flight(list(plans.values())[4], other, 5.0)]

    def seconds_left(**budgets: float) -> float | None:
        budget = Budget(SearchOptions(tmp_path, **budgets), plans)  # type: ignore[arg-type]
        return budget.outlook(budget.spent(finished, flights, 0.0, 0.0), 20).seconds_left

    # 20 plans of 10 s each, by two tuners
    assert seconds_left() == 100
    assert seconds_left(trials=10) == 6 * 10 / 2
    assert seconds_left(timeout_s=65) == (65 - 45) / 2
    hours_spent = 45 * 4 / 3600
    assert seconds_left(device_hours=2 * hours_spent) == pytest.approx(45 / 2)


def test_trials_in_flight_count_as_trials_but_end_no_search(tmp_path: Path) -> None:
    space = load_space(QUICKSTART)
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    budget = Budget(SearchOptions(tmp_path, trials=3), plans)
    outcome = TrialOutcome("ok", "", None, "", 10.0)
    finished = [Finished(number, plan, outcome) for number, plan in enumerate(list(plans.values())[:2])]
    spent = budget.spent(finished, [Flight(list(plans.values())[2], None, 0.0)], 0.0, 0.0)
    assert not budget.may_begin(spent)
    assert budget.ended(spent) is None
    assert budget.ended(dataclasses.replace(spent, done=3, in_flight=0)) == "trials"


def test_time_is_kept_for_the_final_but_at_most_a_third_of_it(tmp_path: Path) -> None:
    space = load_space(QUICKSTART)
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    outcome = TrialOutcome("ok", "", None, "", 10.0)
    finished = [Finished(number, plan, outcome) for number, plan in enumerate(list(plans.values())[:6])]

    def ended(final_s: float, **budgets: float) -> str | None:
        budget = Budget(SearchOptions(tmp_path, **budgets), plans)  # type: ignore[arg-type]
        return budget.ended(budget.spent(finished, [], 0.0, 0.0), final_s)

    # 60 s are spent
    assert ended(0.0, timeout_s=100) is None
    assert ended(30.0, timeout_s=100) is None
    assert ended(1000.0, timeout_s=100) is ended(33.0, timeout_s=100) is None
    assert ended(30.0, timeout_s=90) == ended(1000.0, timeout_s=90) == "timeout"
    assert ended(1000.0, timeout_s=91) is None
    assert ended(30.0, device_hours=90 * 4 / 3600) == "device-hours"


def test_a_search_whose_time_runs_out_still_begins_its_final(bench: Bench) -> None:
    bench.tell_worker({"do": "succeed", "sleep_s": 1.0})
    result = bench.here(timeout_s=12.0, final=1, final_rounds=3, sampler="random")
    assert result.ended == "timeout"
    assert result.final is not None
    assert result.final.launches
    waiting = {row["reason"] for row in bench.table() if row["state"] == "predicted"}
    assert waiting == {"not run: the time of 12 s is spent or kept for the final"}
