"""How a schedule comes about: building block, repeated block and final schedule in one picture."""

from __future__ import annotations

from autotune.report.schedule_svg import Box, Panel, figure, headline, stage_chunks, timeline_panel
from autotune.schedules.building_block import BuildingBlock
from autotune.schedules.schedule import Schedule
from autotune.schedules.simulate import Timeline
from autotune.schedules.unroll import Timetable, repeat
from autotune.schedules.v_shaped import block_of

__all__ = ["anatomy_svg"]

REPEATS = 4
ONE_ROW = 1700.0  # wider pictures put the final schedule below its block


def anatomy_svg(timeline: Timeline) -> str:
    """Building block, repeated block and final schedule side by side, the last with its memory curves.

    A schedule in closed form has no building block; the first panel then shows one microbatch of its steady state, cut
    from the timeline, and there is no second one.
    """
    schedule = timeline.schedule
    final = timeline_panel(timeline, "final schedule", memory=True)
    block = block_of(schedule.name, schedule.devices)
    if block is None:
        panels = [_one_microbatch(timeline)]
    else:
        panels = [_block_panel(block, schedule), _repeated_panel(block, schedule)]
    width = sum(panel.natural_width() for panel in [*panels, final])
    grid = [[*panels, final]] if width <= ONE_ROW else [panels, [final]]
    return figure(headline(timeline), grid, schedule)


def _block_panel(block: BuildingBlock, schedule: Schedule) -> Panel:
    table = repeat(block, 1)
    bound = max(float(block.peak_bound(device)) for device in range(block.devices))
    title = f"building block: interval {block.interval}, holds at most {bound:g} microbatches"
    return Panel(title, _boxes(table), stage_chunks(schedule), float(table.slots), marks=(float(block.interval),))


def _repeated_panel(block: BuildingBlock, schedule: Schedule) -> Panel:
    table = repeat(block, min(REPEATS, schedule.microbatches))
    marks = tuple(float(block.interval * k) for k in range(1, table.microbatches))
    title = f"repeated every {block.interval} slots ({table.microbatches} of {schedule.microbatches} microbatches)"
    return Panel(title, _boxes(table), stage_chunks(schedule), float(table.slots), marks=marks)


def _boxes(table: Timetable) -> tuple[tuple[Box, ...], ...]:
    return tuple(
        tuple(Box(float(slot), float(slot + (2 if item.kind == "BW" else 1)), item) for slot, item in row)
        for row in table.cells
    )


def _one_microbatch(timeline: Timeline) -> Panel:
    """The passes of the middle microbatch, times from its first pass."""
    schedule = timeline.schedule
    chosen = schedule.microbatches // 2
    rows = [
        [
            Box(start, end, item)
            for item, start, end in zip(passes, starts, ends, strict=True)
            if item.microbatch == chosen
        ]
        for passes, starts, ends in zip(schedule.order, timeline.start, timeline.end, strict=True)
    ]
    origin = min(box.start for row in rows for box in row)
    shifted = tuple(tuple(Box(box.start - origin, box.end - origin, box.item) for box in row) for row in rows)
    length = max(box.end for row in shifted for box in row)
    return Panel(f"microbatch {chosen} alone", shifted, stage_chunks(schedule), length)
