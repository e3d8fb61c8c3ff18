"""Tables are read by torch itself: every pass in its place, lowered to sends and receives without a deadlock."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as torch_schedules

from autotune.export.schedule_csv import schedule_csv
from autotune.schedules import registry
from autotune.schedules.schedule import Schedule

OURS = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}


def torch_rows(schedule: Schedule) -> list[list[Any]]:
    """The table as torch parses it; None for an empty cell."""
    reader = csv.reader(io.StringIO(schedule_csv(schedule)))
    return [[torch_schedules._Action.from_str(cell) for cell in row] for row in reader]


def cases() -> list[tuple[str, int, int, int]]:
    found = []
    for kind in registry.SCHEDULES.values():
        for devices, microbatches in ((2, 4), (4, 8)):
            stages = kind.default_stages_per_device()
            if kind.microbatches_problem(devices, microbatches) is None:
                found.append((kind.name, devices, microbatches, stages))
    return found


@pytest.mark.parametrize(("name", "devices", "microbatches", "stages"), cases())
def test_torch_reads_the_same_passes_in_the_same_order(name: str, devices: int, microbatches: int, stages: int) -> None:
    schedule = registry.build(name, devices, microbatches, stages)
    read = [
        [(OURS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in row if a is not None]
        for row in torch_rows(schedule)
    ]
    assert read == [[tuple(item) for item in passes] for passes in schedule.order]


@pytest.mark.parametrize(("name", "devices", "microbatches", "stages"), cases())
def test_torch_lowers_every_table_without_a_deadlock(name: str, devices: int, microbatches: int, stages: int) -> None:
    schedule = registry.build(name, devices, microbatches, stages)
    holder: Callable[[int], int] = schedule.placement.__getitem__
    table = dict(enumerate([action for action in row if action is not None] for row in torch_rows(schedule)))
    lowered = torch_schedules._add_send_recv(table, holder, schedule.stages)
    simulated = torch_schedules._simulate_comms_compute(lowered, holder, schedule.stages)
    assert {rank: len([a for a in row if a is not None]) for rank, row in simulated.items()} == {
        rank: len(row) for rank, row in lowered.items()
    }


def test_rows_are_aligned_in_time() -> None:
    rows = list(csv.reader(io.StringIO(schedule_csv(registry.build("zb-h1", 2, 3)))))
    assert rows[0][0] == "0F0"
    assert rows[1][:3] == ["", "1F0", "1I0"]
    slot = {cell: index for row in rows for index, cell in enumerate(row) if cell}
    assert all(slot[f"1F{m}"] > slot[f"0F{m}"] and slot[f"0I{m}"] > slot[f"1I{m}"] for m in range(3))
    assert all(slot[f"{s}W{m}"] > slot[f"{s}I{m}"] for m in range(3) for s in range(2))


@pytest.mark.parametrize(("devices", "microbatches", "stages"), [(2, 4, 2), (4, 8, 2), (4, 12, 3), (2, 6, 4)])
def test_our_interleaved_order_is_the_one_torch_builds_itself(devices: int, microbatches: int, stages: int) -> None:
    """So an exported interleaved plan needs no table: torchtitan runs the passes that were measured."""
    ours = registry.build("interleaved-1f1b", devices, microbatches, stages)
    for rank in range(devices):
        builder = torch_schedules.ScheduleInterleaved1F1B.__new__(torch_schedules.ScheduleInterleaved1F1B)
        builder.pp_group_size, builder.n_local_stages = devices, stages
        builder._n_microbatches = microbatches
        builder.number_of_rounds = max(1, microbatches // devices)
        builder.microbatches_per_round = microbatches // builder.number_of_rounds
        theirs = builder._calculate_single_rank_operations(rank)
        assert [(OURS[a.computation_type.name], a.stage_index, a.microbatch_index) for a in theirs if a] == [
            tuple(item) for item in ours.order[rank]
        ]
