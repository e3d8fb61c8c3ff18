"""What trials prove of plans that had none: rules of history, and failures that all plans would share."""

from __future__ import annotations

import itertools
import json

import pytest
from conftest import Bench, Notes

from autotune.results.columns import Row
from autotune.results.measurement import TrialOutcome
from autotune.schedules import registry
from autotune.search.early_stop import common_failure
from autotune.search.history import refused_by_history
from autotune.search.store import Finished
from autotune.space.plan import Plan


def plan(micro_batch_size: int, schedule: str = "1f1b", pp: int = 4, batch: int = 32, recompute: str = "none") -> Plan:
    stages = registry.find(schedule).default_stages_per_device()
    return Plan(
        pp,
        1,
        1,
        micro_batch_size,
        batch // micro_batch_size,
        schedule,
        stages,
        (1,) * pp * stages,
        recompute,  # type: ignore[arg-type]
    )


def short_of_memory(tried: Plan, **changes: object) -> Row:
    values = {name: getattr(tried, name) for name in Plan.__dataclass_fields__}
    return Row(**{"trial": 7, "state": "oom", "reason": "rank 0 ran out of memory", **values, **changes})  # type: ignore[arg-type]


def samples_held(tried: Plan) -> list[int]:
    """Stages' samples that every device holds at most, by walking through its passes: from F to the last of B, W."""
    schedule = registry.build(tried.schedule, tried.pp, tried.microbatches, tried.stages_per_device)
    most = []
    for order in schedule.order:
        last = {(one.stage, one.microbatch): one for one in order if one.kind in ("W", "BW")}
        held = peak = 0
        for one in order:
            held += (one.kind == "F") * tried.micro_batch_size
            peak = max(peak, held)
            held -= (last[one.stage, one.microbatch] is one) * tried.micro_batch_size
        most.append(peak)
    return most


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2", "v-min", "v-half", "interleaved-1f1b"])
def test_larger_micro_batch_is_refused_only_where_every_device_holds_as_much(schedule: str) -> None:
    kind = registry.find(schedule)
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if kind.microbatches_problem(4, 32 // size) is None]
    for tried, other in itertools.permutations([plan(size, schedule) for size in sizes], 2):
        refused = refused_by_history([short_of_memory(tried)], {"it": other})
        larger = other.micro_batch_size > tried.micro_batch_size
        as_much = all(b >= a for a, b in zip(samples_held(tried), samples_held(other), strict=True))
        if not (larger and as_much):
            assert not refused
        elif schedule in ("1f1b", "gpipe", "interleaved-1f1b"):  # one kind of peak: then the rule is exact
            assert refused["it"].startswith(
                f"history: trial 7 ran out of memory with micro_batch_size {tried.micro_batch_size}"
            )


def test_1f1b_that_ran_out_of_memory_says_nothing_once_fewer_microbatches_than_devices_are_left() -> None:
    # 4 devices hold 4 x 1 samples; one microbatch of 2 of a batch of 2 is all there is: 2 samples.
    assert not refused_by_history([short_of_memory(plan(1, batch=8))], {"it": plan(2, batch=2)})


@pytest.mark.parametrize(
    ("row", "other"),
    [
        (short_of_memory(plan(1)), plan(2, recompute="full")),
        (short_of_memory(plan(1)), plan(2, schedule="gpipe")),
        (short_of_memory(plan(1), state="timeout"), plan(2)),
        (short_of_memory(plan(1), reason="killed: the kernel's out-of-memory killer ended 1 process(es)"), plan(2)),
    ],
)
def test_nothing_follows_for_another_plan_or_from_another_end(row: Row, other: Plan) -> None:
    assert refused_by_history([short_of_memory(plan(1))], {"it": plan(2)})
    assert not refused_by_history([row], {"it": other})


def only_pipelines_of_two(bench: Bench) -> None:
    """1f1b and gpipe with three micro-batch sizes, of which gpipe with the smallest is over the limit."""
    bench.edit_space("pp: [1, 2, 4]", "pp: [2]")
    bench.edit_space("tp: [1, 3]", "tp: [1]")
    bench.edit_space("micro_batch_size: [2]", "micro_batch_size: [1, 2, 4]")
    bench.edit_space("schedule: [1f1b, interleaved-1f1b, zb-h1, v-min]", "schedule: [1f1b, gpipe]")
    bench.tell_worker({"when": {"schedule": "gpipe", "micro_batch_size": 1}, "do": "succeed", "peak": 2 << 20})


def test_plans_refused_by_history_cost_no_trial_and_say_why_in_the_table(bench: Bench) -> None:
    only_pipelines_of_two(bench)
    # 1f1b holds two microbatches however many there are; sizes 1 and 2 run first or second, as predictions have it.
    notes = Notes()
    result = bench.here(notes, refuse_by_estimate=False)
    rows = {(row["schedule"], row["micro_batch_size"]): row for row in bench.table()}
    first = rows["gpipe", "1"]["trial"]
    for size in ("2", "4"):
        row = rows["gpipe", size]
        assert (row["state"], row["trial"]) == ("refused", "")
        assert row["reason"].startswith(
            f"history: trial {first} ran out of memory with micro_batch_size 1; with {size}"
        )
    assert len(bench.launches()) == 4
    assert result.ended == "complete"
    assert (result.refused_by_history, result.refused_by_estimate) == (2, 0)
    assert "refused without a trial: history: trial" in notes


def test_out_of_memory_beside_a_search_on_the_same_devices_proves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_pipelines_of_two(bench)
    shared = property(lambda store: True, lambda store, value: None)
    monkeypatch.setattr("autotune.search.store.Store.shares_devices", shared, raising=False)
    result = bench.here(refuse_by_estimate=False, trials=4)
    assert (result.refused_by_history, len(bench.launches())) == (0, 4)
    # A search that goes on alone knows of it.
    monkeypatch.undo()
    assert any(row["state"] == "oom" for row in bench.table())
    result = bench.here(refuse_by_estimate=False, resume=True)
    assert (result.refused_by_history, len(bench.launches())) == (0, 6)


def failures(*reasons: str, state: str = "failed") -> list[Finished]:
    outcomes = [TrialOutcome(state, reason, None, "", 1.0) for reason in reasons]  # type: ignore[arg-type]
    return [Finished(number, plan(1), outcome) for number, outcome in enumerate(outcomes)]


def test_failures_are_alike_but_for_numbers_and_only_four_of_them_count() -> None:
    alike = [f"rank {n} failed first: cannot bind port {29500 + n}\nother {n}" for n in range(4)]
    assert common_failure(failures(*alike)) is not None
    assert common_failure(failures(*alike[:3])) is None
    assert common_failure(failures(*alike[:3], "rank 3 failed first: another cause")) is None
    assert common_failure(failures(*alike, state="oom")) is None
    assert common_failure(failures(*alike, state="timeout")) is None


def test_a_search_whose_first_trials_fail_alike_stops_and_says_the_cause_once(bench: Bench) -> None:
    bench.tell_worker({"do": "fail", "rank": 0, "error": "ModuleNotFoundError: No module named 'flash'"})
    done = bench.search()
    assert done.returncode == 1
    assert len(bench.launches()) == 4
    cause = (
        "the first 4 trials all failed alike, as trial 0: failed: rank 0 failed first: ModuleNotFoundError: No module"
    )
    assert done.stderr.count(cause) == 1
    assert {row["reason"][: len(cause) + 9] for row in bench.table() if row["state"] == "predicted"} == {
        f"not run: {cause}"
    }
    assert json.loads((bench.study / "best.json").read_text())["plan"] is None
    # The user mends it and goes on: the next trials decide anew.
    bench.tell_worker()
    result = bench.here(resume=True)
    assert result.ended == "complete"
    assert bench.states()["ok"] == 5


def test_keep_going_tries_every_plan_whatever_the_first_ones_did(bench: Bench) -> None:
    bench.tell_worker({"do": "silent"})
    result = bench.here(keep_going=True)
    assert (result.ended, result.best) == ("complete", None)
    assert len(bench.launches()) == 9
