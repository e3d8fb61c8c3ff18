"""Proof that a schedule can be run: every pass once, in order and in its place, no deadlock, messages matched."""

from __future__ import annotations

from collections import defaultdict

from autotune.errors import UserError
from autotune.schedules import kernel
from autotune.schedules.lowering import Action, Receive, Send, lower
from autotune.schedules.schedule import Pass, PassKind, Schedule

__all__ = ["InvalidScheduleError", "check", "pair_problems", "problems"]

SHOWN = 5
F_DONE, B_DONE, W_DONE = 1, 2, 4
ALL_DONE = F_DONE | B_DONE | W_DONE
DOES = {"F": F_DONE, "B": B_DONE, "W": W_DONE, "BW": B_DONE | W_DONE}
NEEDS = {"F": 0, "B": F_DONE, "W": F_DONE | B_DONE, "BW": F_DONE}


class InvalidScheduleError(UserError):
    """A schedule that can't be run as it stands; the message says what is wrong with it."""


def check(schedule: Schedule) -> None:
    """Raise `InvalidScheduleError` with the first few `problems` of `schedule`, if it has any."""
    found = problems(schedule)
    if found:
        more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise InvalidScheduleError(
            f"schedule {schedule.name} is invalid:" + "".join(f"\n  {text}" for text in found[:SHOWN]) + more
        )


def problems(schedule: Schedule) -> list[str]:
    """Everything that is wrong with `schedule`, in words; empty for a valid one.

    Each stage must do F and either BW or B and W exactly once for every microbatch, F before B before W, on the device
    that holds it; the orders must not deadlock; for every ordered pair of devices the lowered schedule must receive in
    the order it sends.
    """
    found = _shape_problems(schedule)
    if found:
        return found
    found = _pass_problems(schedule)
    if found:
        return found
    found = _deadlock_problems(schedule)
    return found or pair_problems(lower(schedule))


def _shape_problems(schedule: Schedule) -> list[str]:
    found = []
    if schedule.microbatches < 1:
        found.append(f"{schedule.microbatches} microbatches, needs at least 1")
    if not schedule.placement:
        found.append("no stages")
    for stage, device in enumerate(schedule.placement):
        if not 0 <= device < schedule.devices:
            found.append(f"stage {stage} is placed on device {device}, there are {schedule.devices}")
    for device in range(schedule.devices):
        if device not in schedule.placement:
            found.append(f"device {device} holds no stage")
    return found


def _pass_problems(schedule: Schedule) -> list[str]:
    """Wrong, repeated, misplaced, disordered and missing passes."""
    found = []
    stages, microbatches, placement = schedule.stages, schedule.microbatches, schedule.placement
    done = [0] * (stages * microbatches)
    for device, passes in enumerate(schedule.order):
        for item in passes:
            kind, stage, microbatch = item
            if kind not in DOES:
                found.append(f"device {device}: {kind!r} is no kind of pass, legal: F, B, W, BW")
                continue
            if not (0 <= stage < stages and 0 <= microbatch < microbatches):
                found.append(
                    f"device {device}: {item} does not exist; stages are 0 to {stages - 1}, "
                    f"microbatches 0 to {microbatches - 1}"
                )
                continue
            if placement[stage] != device:
                found.append(f"device {device}: runs {item}, but stage {stage} is on device {placement[stage]}")
                continue
            cell = stage * microbatches + microbatch
            before, does = done[cell], DOES[kind]
            if before & does:
                found.append(f"device {device}: {item} repeats a pass that has run before")
            elif before & NEEDS[kind] != NEEDS[kind]:
                needed: PassKind = "F" if not before & F_DONE else "B"
                found.append(f"device {device}: {item} runs before {Pass(needed, stage, microbatch)}")
            done[cell] = before | does
    for cell, state in enumerate(done):
        if state != ALL_DONE:
            stage, microbatch = divmod(cell, microbatches)
            names = [name for name, bit in (("F", F_DONE), ("B", B_DONE), ("W", W_DONE)) if not state & bit]
            found.append(f"stage {stage} never runs {' and '.join(names)} of microbatch {microbatch}")
    return found


def _deadlock_problems(schedule: Schedule) -> list[str]:
    times = kernel.run_in_slots(schedule)
    return [
        f"deadlock: device {device} waits for ever to run {schedule.order[device][place - times.first[device]]}"
        for device, place in enumerate(times.position)
        if place < times.first[device + 1]
    ]


def pair_problems(actions: list[list[Action]]) -> list[str]:
    """Where the receives of a pair of devices are not posted in the order of the sends, for lowered lists of actions.

    Backends without tags match a send with the oldest open receive from that device: another order hands a tensor to
    the wrong reader without any error.
    """
    sent: dict[tuple[int, int], list[tuple]] = defaultdict(list)
    taken: dict[tuple[int, int], list[tuple]] = defaultdict(list)
    for device, listed in enumerate(actions):
        for action in listed:
            if isinstance(action, Send):
                sent[device, action.peer].append(action[:3])
            elif isinstance(action, Receive):
                taken[action.peer, device].append(action[:3])
    found = []
    for pair in sorted(sent.keys() | taken.keys()):
        sends, receives = sent[pair], taken[pair]
        if sends == receives:
            continue
        place = next((k for k, (a, b) in enumerate(zip(sends, receives, strict=False)) if a != b), None)
        what = (
            f"{len(sends)} sends, {len(receives)} receives"
            if place is None
            else f"message {place} is sent as {Pass(*sends[place])}, received as {Pass(*receives[place])}"
        )
        found.append(f"device {pair[0]} to device {pair[1]}: {what}")
    return found
