"""From a building block to a schedule, in three steps: repeat, squeeze, reorder (arXiv 2405.15362, section 3)."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

from autotune.schedules import kernel
from autotune.schedules.building_block import BuildingBlock
from autotune.schedules.placement import device_stages
from autotune.schedules.schedule import Pass, Schedule

__all__ = ["Timetable", "reorder", "repeat", "squeeze", "unroll"]

FillFirst = Literal["W", "F"]


@dataclass(frozen=True)
class Timetable:
    """Passes in slots of one unit pass (BW takes two).

    Attributes:
        cells: for every device (slot, pass), slots ascending.
    """

    placement: tuple[int, ...]
    microbatches: int
    cells: tuple[tuple[tuple[int, Pass], ...], ...]

    @property
    def slots(self) -> int:
        """Slots from 0 to the end of the last pass."""
        return max(slot + _length(item) for row in self.cells for slot, item in row[-1:])

    def schedule(self, name: str) -> Schedule:
        """The order of the passes as a schedule."""
        order = tuple(tuple(item for _, item in row) for row in self.cells)
        return Schedule(name, self.microbatches, self.placement, order)


def unroll(block: BuildingBlock, microbatches: int) -> Timetable:
    """repeat, squeeze and reorder `block` within the memory of its steady state.

    Both fillings are tried and the shortest table returned: the squeezed one when neither is shorter.
    """
    tight = squeeze(repeat(block, microbatches))
    limits = tuple(
        floor(block.steady_peak(device) * len(held)) for device, held in enumerate(device_stages(block.placement))
    )
    fillings: tuple[FillFirst, ...] = ("W", "F")
    return min((tight, *(reorder(tight, limits, fill) for fill in fillings)), key=lambda table: table.slots)


def repeat(block: BuildingBlock, microbatches: int) -> Timetable:
    """The block once for every microbatch, `interval` slots apart; a block without collisions gives none here."""
    rows: list[list[tuple[int, Pass]]] = [[] for _ in range(block.devices)]
    for microbatch in range(microbatches):
        for device, slot, item in block.passes(microbatch):
            rows[device].append((slot, item))
    return Timetable(block.placement, microbatches, tuple(tuple(sorted(row)) for row in rows))


def squeeze(table: Timetable) -> Timetable:
    """The same order on every device without the gaps that nothing waits for: each pass in its earliest slot."""
    stages, microbatches = len(table.placement), table.microbatches
    schedule = table.schedule("squeezed")
    order, first = kernel.encode(schedule)
    work = kernel.scratch(len(table.cells), stages, microbatches, len(order))
    duration = [1.0] * (3 * stages) + [2.0] * stages
    ran = kernel.run(order, first, stages, microbatches, duration, [0.0] * (2 * stages), [1] * (2 * stages), **work)
    assert ran == len(order), "a repeated building block runs what is read before its reader"
    rows = []
    for device, row in enumerate(table.cells):
        starts = work["start"][first[device] : first[device + 1]]
        rows.append(tuple((int(start), item) for start, (_, item) in zip(starts, row, strict=True)))
    return Timetable(table.placement, microbatches, tuple(rows))


def reorder(table: Timetable, limits: tuple[int, ...], fill_first: FillFirst = "W") -> Timetable:
    """Pull passes forward into the idle slots of warm-up and cool-down without holding more activation.

    Slot by slot, every idle device runs the next F or B of its order if that is ready. If not, it fills the slot with
    a later B that is ready, a waiting W, or a later F, as long as every moment between keeps the limit. W passes have
    no place of their own: a W runs when nothing else can, or when the limit stops an F.

    Args:
        limits: for every device the most stage activations it may hold; at least what the order of F and B holds.
        fill_first: whether W or F goes first into an idle slot.
    """
    devices = len(table.cells)
    clock = _Clock(table)
    rows = [_Device(device, table, limits[device], fill_first) for device in range(devices)]
    cells: list[list[tuple[int, Pass]]] = [[] for _ in rows]
    left = sum(len(row) for row in table.cells)
    slot = 0
    while left:
        chosen = [(device, row.choose(slot, clock)) for device, row in enumerate(rows) if row.free <= slot]
        for device, item in chosen:
            if item is not None:
                cells[device].append((slot, item))
                rows[device].free = slot + _length(item)
                clock.finish(item, slot + _length(item))
                left -= 1
        slot += 1
    return Timetable(table.placement, table.microbatches, tuple(tuple(row) for row in cells))


def _length(item: Pass) -> int:
    return 2 if item.kind == "BW" else 1


class _Clock:
    """When every F and every B has ended, by stage and microbatch."""

    def __init__(self, table: Timetable) -> None:
        self.last = len(table.placement) - 1
        never = 1 << 60
        self.forward = [[never] * table.microbatches for _ in table.placement]
        self.backward = [[never] * table.microbatches for _ in table.placement]

    def finish(self, item: Pass, slot: int) -> None:
        if item.kind == "F":
            self.forward[item.stage][item.microbatch] = slot
        elif item.kind != "W":
            self.backward[item.stage][item.microbatch] = slot

    def ready(self, item: Pass, slot: int) -> bool:
        kind, stage, microbatch = item
        if kind == "F":
            return stage == 0 or self.forward[stage - 1][microbatch] <= slot
        if self.forward[stage][microbatch] > slot:
            return False
        return stage == self.last or self.backward[stage + 1][microbatch] <= slot


class _Device:
    """One device's order of F and B, what it holds, and its choice for a slot."""

    LOOK_AHEAD = 64  # entries; further ahead than any gap of a block reaches into

    def __init__(self, device: int, table: Timetable, limit: int, fill_first: FillFirst) -> None:
        self.queue = [item for _, item in table.cells[device] if item.kind != "W"]
        self.done = [False] * len(self.queue)
        self.head = 0
        self.free = 0
        self.limit = limit
        self.fill_first = fill_first
        self.outstanding = 0  # F without their B
        self.waiting: list[Pass] = []  # W that may run, oldest first
        self.next_waiting = 0

    def choose(self, slot: int, clock: _Clock) -> Pass | None:
        """The pass to start in `slot`, taken off the queue; None to stay idle."""
        while self.head < len(self.queue) and self.done[self.head]:
            self.head += 1
        if self.head == len(self.queue):
            return self._take_weight()
        pending = len(self.waiting) - self.next_waiting
        full = self.outstanding + pending >= self.limit
        item = self.queue[self.head]
        if clock.ready(item, slot):
            if item.kind != "F" or not full:
                return self._take(self.head)
            if pending:
                return self._take_weight()
        return self._fill(slot, clock, full)

    def _fill(self, slot: int, clock: _Clock, full: bool) -> Pass | None:
        """What goes into a slot that the head of the queue can't use."""
        ahead = None
        seen: set[tuple[str, int]] = set()
        held = most = self.outstanding
        for place in range(self.head, min(self.head + self.LOOK_AHEAD, len(self.queue))):
            if self.done[place]:
                continue
            item = self.queue[place]
            first = (item.kind, item.stage) not in seen and place > self.head
            if first and clock.ready(item, slot):
                if item.kind != "F":
                    return self._take(place)
                if ahead is None and most < self.limit and not full:
                    ahead = place
            seen.add((item.kind, item.stage))
            held += 1 if item.kind == "F" else -1
            most = max(most, held)
        if ahead is not None and (self.fill_first == "F" or self.next_waiting == len(self.waiting)):
            return self._take(ahead)
        return self._take_weight()

    def _take(self, place: int) -> Pass:
        item = self.queue[place]
        self.done[place] = True
        if item.kind == "F":
            self.outstanding += 1
        else:
            self.outstanding -= 1
            if item.kind == "B":
                self.waiting.append(Pass("W", item.stage, item.microbatch))
        return item

    def _take_weight(self) -> Pass | None:
        if self.next_waiting == len(self.waiting):
            return None
        self.next_waiting += 1
        return self.waiting[self.next_waiting - 1]
