"""What `check` and `lower` promise: broken schedules are named, sends and receives agree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_cases import small_cases, with_order

from autotune.errors import UserError
from autotune.schedules.checks import InvalidScheduleError, check, pair_problems, problems
from autotune.schedules.lowering import Receive, Send, lower
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.schedule import Pass, Schedule


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_named_schedule_is_valid_for_all_small_pipelines(name: str) -> None:
    for devices, microbatches, stages in small_cases(name, range(1, 7), range(1, 15)):
        schedule = SCHEDULES[name].generate(devices, microbatches, stages)
        assert problems(schedule) == [], (devices, microbatches, stages)
        assert schedule.microbatches == microbatches
        assert len(schedule.placement) == devices * stages


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_every_named_schedule_is_valid_for_random_pipelines(data: st.DataObject) -> None:
    kind = SCHEDULES[data.draw(st.sampled_from(sorted(SCHEDULES)))]
    devices = data.draw(st.integers(2, 13))
    microbatches = data.draw(st.integers(1, 40))
    if kind.microbatch_multiple:
        microbatches = devices * (1 + microbatches % 3)
    microbatches = max(microbatches, kind.min_microbatches_per_device * devices)
    top = 5 if kind.max_stages_per_device is None else kind.max_stages_per_device
    stages = data.draw(st.integers(kind.min_stages_per_device, top))
    check(kind.generate(devices, microbatches, stages))


def test_torchs_published_1f1b_differs_on_the_last_device_and_ours_is_right() -> None:
    """The last device has no warm-up: it runs F0 B0 F1 B1, never F0 F1 B0."""
    schedule = build("1f1b", 4, 3)
    assert [str(item) for item in schedule.order[3]] == ["F3.0", "BW3.0", "F3.1", "BW3.1", "F3.2", "BW3.2"]
    assert [str(item) for item in schedule.order[2]][:3] == ["F2.0", "F2.1", "BW2.0"]


@pytest.fixture
def schedule() -> Schedule:
    return build("zb-h1", 2, 3)


def edited(schedule: Schedule, old: Pass, *new: Pass) -> Schedule:
    device = next(d for d, row in enumerate(schedule.order) if old in row)
    order: list[Pass] = []
    for item in schedule.order[device]:
        order += new if item == old else [item]
    return with_order(schedule, device, order)


BROKEN = {
    "a pass that repeats": (("F", 1, 1), [("F", 1, 1), ("F", 1, 1)], "F1.1 repeats"),
    "a backward that repeats": (("B", 1, 1), [("B", 1, 1), ("B", 1, 1)], "B1.1 repeats"),
    "a fused backward beside a split one": (("W", 1, 1), [("W", 1, 1), ("BW", 1, 1)], "BW1.1 repeats"),
    "a missing forward": (("F", 1, 2), [], "stage 1 never runs F of microbatch 2"),
    "a missing weight gradient": (("W", 0, 2), [], "stage 0 never runs W of microbatch 2"),
    "a microbatch that does not exist": (("W", 0, 2), [("W", 0, 99)], "W0.99 does not exist"),
    "a negative microbatch": (("W", 0, 2), [("W", 0, -1)], "W0.-1 does not exist"),
    "a stage that does not exist": (("W", 0, 2), [("W", 5, 2)], "W5.2 does not exist"),
    "a pass on the wrong device": (("W", 0, 2), [("W", 0, 2), ("W", 1, 2)], "stage 1 is on device 1"),
    "an unknown kind of pass": (("W", 0, 2), [("X", 0, 2)], "'X' is no kind of pass"),
}


@pytest.mark.parametrize("case", BROKEN, ids=lambda name: name.replace(" ", "_"))
def test_a_defect_is_named(schedule: Schedule, case: str) -> None:
    old, new, message = BROKEN[case]
    broken = edited(schedule, Pass(*old), *(Pass(*item) for item in new))  # type: ignore[arg-type]
    assert any(message in text for text in problems(broken)), problems(broken)
    with pytest.raises(InvalidScheduleError, match="schedule zb-h1 is invalid"):
        check(broken)


@pytest.mark.parametrize(
    ("first", "second"), [(("F", 1, 0), ("B", 1, 0)), (("B", 1, 0), ("W", 1, 0)), (("F", 0, 2), ("B", 0, 2))]
)
def test_passes_of_one_stage_out_of_order_are_named(
    schedule: Schedule, first: tuple[str, int, int], second: tuple[str, int, int]
) -> None:
    early, late = Pass(*first), Pass(*second)  # type: ignore[arg-type]
    device = next(d for d, row in enumerate(schedule.order) if early in row)
    order = list(schedule.order[device])
    a, b = order.index(early), order.index(late)
    order[a], order[b] = order[b], order[a]
    assert any(f"{late} runs before {early}" in text for text in problems(with_order(schedule, device, order)))


def test_a_deadlock_across_devices_names_who_waits() -> None:
    schedule = build("gpipe", 2, 2)
    # Device 0 wants the gradient of microbatch 1 before it makes its activation; device 1 runs 0 before 1.
    order = [Pass("F", 0, 0), Pass("BW", 0, 0), Pass("F", 0, 1), Pass("BW", 0, 1)]
    broken = with_order(schedule, 0, order)
    assert problems(broken) == [
        "deadlock: device 0 waits for ever to run BW0.0",
        "deadlock: device 1 waits for ever to run F1.1",
    ]


def test_a_placement_with_an_idle_device_is_named() -> None:
    good = build("1f1b", 2, 1)
    assert problems(Schedule("x", 1, (0, 0), good.order)) == ["device 1 holds no stage"]
    assert problems(Schedule("x", 1, (0, 2), good.order))[0] == "stage 1 is placed on device 2, there are 2"


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_lowering_keeps_passes_and_sends_every_tensor_that_crosses(name: str) -> None:
    for devices, microbatches, stages in [(4, 8, SCHEDULES[name].min_stages_per_device)]:
        schedule = build(name, devices, microbatches, stages)
        actions = lower(schedule)
        for device, row in enumerate(actions):
            assert tuple(a for a in row if isinstance(a, Pass)) == schedule.order[device]
        sends = sum(isinstance(a, Send) for row in actions for a in row)
        crossing = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
        assert sends == 2 * crossing * microbatches
        assert pair_problems(actions) == []


def test_lowered_actions_run_even_when_every_message_blocks_both_ends() -> None:
    """Rendezvous: a send and its receive happen together or not at all, as in the worst of backends."""
    for name in sorted(SCHEDULES):
        schedule = build(name, 4, 8)
        actions = lower(schedule)
        place = [0] * 4
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(actions):
                while place[device] < len(row) and isinstance(row[place[device]], Pass):
                    place[device] += 1
                    moved = True
                if place[device] == len(row):
                    continue
                action = row[place[device]]
                peer = action.peer
                if isinstance(action, Send) and place[peer] < len(actions[peer]):
                    wanted = Receive(action.kind, action.stage, action.microbatch, device)
                    if actions[peer][place[peer]] == wanted:
                        place[device] += 1
                        place[peer] += 1
                        moved = True
        assert place == [len(row) for row in actions], name


def test_a_receive_comes_before_its_reader() -> None:
    for name in sorted(SCHEDULES):
        for row in lower(build(name, 4, 8)):
            here = {(a.kind, a.reader, a.microbatch) for a in row if isinstance(a, Receive)}
            got = set()
            for action in row:
                if isinstance(action, Receive):
                    got.add((action.kind, action.reader, action.microbatch))
                elif isinstance(action, Pass) and action.kind != "W":
                    key = ("F" if action.kind == "F" else "B", action.stage, action.microbatch)
                    assert key not in here or key in got


def test_receives_in_another_order_than_the_sends_are_named() -> None:
    actions = lower(build("1f1b", 2, 3))
    receives = [k for k, action in enumerate(actions[1]) if isinstance(action, Receive)]
    a, b = receives[:2]
    actions[1][a], actions[1][b] = actions[1][b], actions[1][a]
    assert pair_problems(actions) == ["device 0 to device 1: message 0 is sent as F0.0, received as F0.1"]
    del actions[1][receives[2]]
    assert (
        "3 sends, 2 receives"
        in pair_problems(
            [
                actions[0],
                [x for x in actions[1] if not isinstance(x, Receive)] + [Receive("F", 0, 0, 0), Receive("F", 0, 1, 0)],
            ]
        )[0]
    )


def test_lowering_a_deadlock_is_refused() -> None:
    order = ((Pass("F", 0, 0), Pass("BW", 0, 0)), (Pass("BW", 1, 0), Pass("F", 1, 0)))
    with pytest.raises(UserError, match="deadlocks: 1 of 4"):
        lower(Schedule("broken", 1, (0, 1), order))
