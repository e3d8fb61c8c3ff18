"""Helpers that several schedule tests share."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.schedules.registry import SCHEDULES
from autotune.schedules.schedule import Schedule


def legal_stages(name: str) -> tuple[int, ...]:
    """The stages per device to try a schedule with."""
    kind = SCHEDULES[name]
    return (2, 3) if kind.max_stages_per_device is None else (kind.min_stages_per_device,)


def small_cases(name: str, devices: range, microbatches: range) -> Iterator[tuple[int, int, int]]:
    """Every (devices, microbatches, stages per device) of the ranges that the schedule's definition allows."""
    for p in devices:
        for m in microbatches:
            if SCHEDULES[name].microbatches_problem(p, m) is None:
                for v in legal_stages(name):
                    yield p, m, v


def with_order(schedule: Schedule, device: int, order: list) -> Schedule:
    """`schedule` with another order on one device."""
    rows = list(schedule.order)
    rows[device] = tuple(order)
    return Schedule(schedule.name, schedule.microbatches, schedule.placement, tuple(rows))
