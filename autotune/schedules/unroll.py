"""From a building block to a schedule, in three steps: repeat, squeeze, reorder (arXiv 2405.15362, section 3)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import floor

from autotune.errors import UserError
from autotune.schedules import kernel
from autotune.schedules.building_block import BuildingBlock
from autotune.schedules.placement import device_stages
from autotune.schedules.schedule import Pass, PassKind, Schedule

__all__ = ["Timetable", "reorder", "repeat", "squeeze", "unroll"]


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
        return max(slot + LENGTH[item.kind] for row in self.cells for slot, item in row[-1:])

    def schedule(self, name: str) -> Schedule:
        """The order of the passes as a schedule."""
        order = tuple(tuple(item for _, item in row) for row in self.cells)
        return Schedule(name, self.microbatches, self.placement, order)


COMPARED = 2  # ways are compared on at most this many microbatches per device; more repeat the steady state


def unroll(block: BuildingBlock, microbatches: int, limits: tuple[int, ...] | None = None) -> Timetable:
    """repeat, squeeze and reorder `block` within the memory of its steady state, or within `limits`.

    There are three ways, and the one with the shortest table is taken, the first one of equals: reordered with every W
    in its place, reordered with W put off, and squeezed alone.

    Args:
        limits: for every device the most stage activations it may hold, at least those of the steady state.
    """
    within = limits or tuple(
        floor(block.steady_peak(device) * len(held)) for device, held in enumerate(device_stages(block.placement))
    )
    sample = COMPARED * block.devices
    if microbatches <= sample:
        return min(_each_way(block, microbatches, within), key=lambda table: table.slots)
    return WAYS[_best_way(block, sample, within)](squeeze(repeat(block, microbatches)), within)


WAYS: tuple[Callable[[Timetable, tuple[int, ...]], Timetable], ...] = (
    lambda tight, within: reorder(tight, within),
    lambda tight, within: reorder(tight, within, put_off_weights=True),
    lambda tight, within: tight,
)


def _each_way(block: BuildingBlock, microbatches: int, within: tuple[int, ...]) -> list[Timetable]:
    tight = squeeze(repeat(block, microbatches))
    return [way(tight, within) for way in WAYS]


@lru_cache(maxsize=256)
def _best_way(block: BuildingBlock, microbatches: int, within: tuple[int, ...]) -> int:
    slots = [table.slots for table in _each_way(block, microbatches, within)]
    return slots.index(min(slots))


def repeat(block: BuildingBlock, microbatches: int) -> Timetable:
    """The block once for every microbatch, `interval` slots apart; a block without collisions gives none here."""
    rows: list[list[tuple[int, Pass]]] = [[] for _ in range(block.devices)]
    for microbatch in range(microbatches):
        for device, slot, item in block.passes(microbatch):
            rows[device].append((slot, item))
    return Timetable(block.placement, microbatches, tuple(tuple(sorted(row)) for row in rows))


def squeeze(table: Timetable) -> Timetable:
    """The same order on every device without the gaps that nothing waits for: each pass in its earliest slot."""
    times = kernel.run_in_slots(table.schedule("squeezed"))
    assert times.complete, "a repeated building block runs what is read before its reader"
    rows = []
    for device, row in enumerate(table.cells):
        starts = times.start[times.first[device] : times.first[device + 1]]
        rows.append(tuple((int(start), item) for start, (_, item) in zip(starts, row, strict=True)))
    return Timetable(table.placement, table.microbatches, tuple(rows))


def reorder(table: Timetable, limits: tuple[int, ...], *, put_off_weights: bool = False) -> Timetable:
    """Pull passes forward into the idle slots of warm-up and cool-down without holding more activation.

    Slot by slot, a device runs the next pass of its order if that is ready. If it must wait, the slot goes to the first
    later pass that is ready and can't delay the waiting one: a B, else a W, else an F if everything between still keeps
    to the limit. After its last F a device runs every B that is ready before the W that wait. So the steady state,
    which has no idle slots, keeps the order of the block.

    Args:
        limits: for every device the most stage activations it may hold; at least what `table` holds.
        put_off_weights: give W no place in the order at all: they only fill idle slots or make room for an F. Better
            for few microbatches, which never reach the steady state.

    Raises:
        UserError: a limit is below what the order of F and B alone holds.
    """
    for number, (row, limit) in enumerate(zip(table.cells, limits, strict=True)):
        most = max(accumulate(OUTSTANDING[item.kind] for _, item in row))
        if most > limit:
            raise UserError(
                f"device {number} holds {most} stage activations in this order, more than the limit {limit}"
            )
    ended = [NEVER] * (2 * len(table.placement) * table.microbatches) + [0]
    rows = [_Device(row, table, limit, put_off_weights) for row, limit in zip(table.cells, limits, strict=True)]
    cells: list[list[tuple[int, Pass]]] = [[] for _ in rows]
    left = sum(len(row) for row in table.cells)
    stuck = 4 * left + table.slots
    slot = 0
    while left:
        assert slot < stuck, "a legal order within the limits always goes on"
        # A pass ends after its slot, so no choice of a slot depends on another one.
        for device, cell in zip(rows, cells, strict=True):
            if device.free > slot:
                continue
            place = device.choose(slot, ended)
            if place is not None:
                cell.append((slot, device.queue[place]))
                device.take(place, slot, ended)
                left -= 1
        slot += 1
    return Timetable(table.placement, table.microbatches, tuple(tuple(cell) for cell in cells))


NEVER = 1 << 60
HELD = {"F": 1, "B": 0, "W": -1, "BW": -1}
OUTSTANDING = {"F": 1, "B": -1, "W": 0, "BW": -1}
LENGTH: dict[PassKind, int] = {"F": 1, "B": 1, "W": 1, "BW": 2}


class _Device:
    """One device's order, what it holds, and its choice for a slot.

    `ended`, which all devices share, is when each F and then each B has ended, by stage and microbatch; its last value
    is 0, what a pass that reads nothing waits for.
    """

    def __init__(self, row: tuple[tuple[int, Pass], ...], table: Timetable, limit: int, put_off_weights: bool) -> None:
        stages, microbatches = len(table.placement), table.microbatches
        half = stages * microbatches
        nothing = 2 * half
        self.queue = [item for _, item in row]
        self.reads: list[tuple[int, int]] = []
        self.writes: list[int] = []
        for kind, stage, microbatch in self.queue:
            cell = stage * microbatches + microbatch
            if kind == "F":
                self.reads.append((cell - microbatches if stage else nothing, nothing))
            elif kind == "W":
                self.reads.append((half + cell, nothing))
            else:
                self.reads.append((cell, half + cell + microbatches if stage < stages - 1 else nothing))
            self.writes.append(cell if kind == "F" else -1 if kind == "W" else half + cell)
        # Places of the passes of a kind and stage, those that are done left out once they come first.
        self.waiting: dict[tuple[PassKind, int], deque[int]] = {}
        for place, item in enumerate(self.queue):
            self.waiting.setdefault((item.kind, item.stage), deque()).append(place)
        self.done = [False] * len(self.queue)
        self.tail = self.head = 0
        self.free = 0
        self.forwards = sum(item.kind == "F" for item in self.queue)
        self.held = 0
        self.outstanding = 0  # F without their B
        self.limit = limit
        self.put_off_weights = put_off_weights

    def choose(self, slot: int, ended: list[int]) -> int | None:
        """The place in the queue of the pass to start in `slot`; None to stay idle."""
        self._advance()
        if self.head == len(self.queue):
            return self._next("W", slot, ended)
        one, other = self.reads[self.head]
        ready_at = max(ended[one], ended[other])
        kind = self.queue[self.head].kind
        if ready_at > slot:
            return self._fill(slot, ready_at, ended)
        if kind == "F" and self.held == self.limit:
            # What is held beyond the F without a B waits for its W.
            return self._next("W", slot, ended)
        if kind == "W" and self.forwards == 0:
            later = self._next("B", slot, ended)
            return self.head if later is None else later
        return self.head

    def _advance(self) -> None:
        """Move `tail` to the first pass that is not done, `head` to the first of those that has its place."""
        while self.tail < len(self.queue) and self.done[self.tail]:
            self.tail += 1
        self.head = max(self.head, self.tail)
        while self.head < len(self.queue) and (
            self.done[self.head] or (self.put_off_weights and self.queue[self.head].kind == "W")
        ):
            self.head += 1

    def _next(self, kind: str, slot: int, ended: list[int]) -> int | None:
        """The first pass of a kind that is ready."""
        for place in range(self.tail, len(self.queue)):
            if self.queue[place].kind == kind and not self.done[place]:
                one, other = self.reads[place]
                if ended[one] <= slot and ended[other] <= slot:
                    return place
        return None

    def _fill(self, slot: int, wanted_at: int, ended: list[int]) -> int | None:
        """The pass that fills the time until the head of the queue can run, from `slot` to `wanted_at`."""
        ready: dict[PassKind, int] = {}
        for key, places in self.waiting.items():
            while self.done[places[0]]:
                places.popleft()
            place, kind = places[0], key[0]
            one, other = self.reads[place]
            fits = ended[one] <= slot and ended[other] <= slot and slot + LENGTH[kind] <= wanted_at
            if fits and place < ready.get(kind, NEVER):
                ready[kind] = place
        backward = min(ready.get("B", NEVER), ready.get("BW", NEVER))
        if backward != NEVER:
            return backward
        if "W" in ready:
            return ready["W"]
        return ready["F"] if "F" in ready and self._room_before(ready["F"]) else None

    def _room_before(self, place: int) -> bool:
        """Whether everything before an F keeps to the limit if that F is run first."""
        if self.held >= self.limit:
            return False
        outstanding = self.outstanding
        for earlier in range(self.tail, place):
            if not self.done[earlier]:
                outstanding += OUTSTANDING[self.queue[earlier].kind]
                if outstanding >= self.limit:
                    return False
        return self.outstanding < self.limit

    def take(self, place: int, slot: int, ended: list[int]) -> None:
        """Run the pass at `place` of the queue from `slot` on."""
        item = self.queue[place]
        self.done[place] = True
        places = self.waiting[item.kind, item.stage]
        while places and self.done[places[0]]:
            places.popleft()
        if not places:
            del self.waiting[item.kind, item.stage]
        self.free = slot + LENGTH[item.kind]
        self.outstanding += OUTSTANDING[item.kind]
        self.held += HELD[item.kind]
        self.forwards -= item.kind == "F"
        if item.kind != "W":
            ended[self.writes[place]] = self.free
