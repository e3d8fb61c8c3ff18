"""A schedule as the table that torch and torchtitan read: one row a device, one cell a time slot."""

from __future__ import annotations

import csv
import io

from autotune.schedules.costs import PassCosts
from autotune.schedules.schedule import Schedule
from autotune.schedules.simulate import simulate

__all__ = ["schedule_csv"]

# torch.distributed.pipelining: B is the full backward, I the input's gradient alone
_LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}


def schedule_csv(schedule: Schedule) -> str:
    """The compute-only table: cells `0F3` (stage 0, forward, microbatch 3), `0I3`, `0W3`, `0B3`, empty when idle.

    Slots are those of F = B = W = 1 on every stage, so a full backward leaves an empty cell behind it. The reader goes
    by the order in a row; the alignment is for people.
    """
    stages = schedule.stages
    ones, zeros = (1.0,) * stages, (0.0,) * stages
    starts = simulate(schedule, PassCosts(ones, ones, ones, 0.0, zeros, zeros)).start
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for passes, times in zip(schedule.order, starts, strict=True):
        row = [""] * (round(times[-1]) + 1)
        for item, time in zip(passes, times, strict=True):
            row[round(time)] = f"{item.stage}{_LETTERS[item.kind]}{item.microbatch}"
        writer.writerow(row)
    return text.getvalue()
