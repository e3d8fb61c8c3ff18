"""The one simulation kernel: start and end of every pass of complete per-device orders.

The functions are written in the subset of Python that numba compiles, over flat integer and float sequences. As they
stand they run on plain lists, without numpy or numba: right for one schedule on the command line. `compiled()` returns
the same functions as machine code for numpy arrays: right for a search.

A pass is one integer, its code: (kind * stages + stage) * microbatches + microbatch, with kinds F, B, W, BW = 0..3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from autotune.schedules.costs import PassCosts
from autotune.schedules.schedule import Pass, PassKind, Schedule

__all__ = [
    "KINDS",
    "Compiled",
    "SlotTimes",
    "Tables",
    "code_of",
    "compiled",
    "cost_tables",
    "encode",
    "pass_of",
    "peaks",
    "run",
    "run_in_slots",
]

KINDS: tuple[PassKind, ...] = ("F", "B", "W", "BW")
NUMBER = {kind: number for number, kind in enumerate(KINDS)}


# Lists in plain Python, numpy arrays when compiled; no common type describes both.
Ints = Any
Floats = Any


def run(
    order: Ints,
    first: Ints,
    stages: int,
    microbatches: int,
    duration: Floats,
    hop: Floats,
    every: Ints,
    finished: Floats,
    waiter: Ints,
    position: Ints,
    ready: Ints,
    start: Floats,
    end: Floats,
) -> int:
    """Time complete orders; returns how many passes ran, fewer than all when the orders deadlock.

    Args:
        order: codes of all passes, device after device.
        first: where each device begins in `order`; length p + 1.
        duration: time of each (kind, stage); length 4 S.
        hop: latency into F of each stage, then into B of each stage; length 2 S.
        every: the same edges: only every n-th microbatch waits at all, 1 on any real machine; length 2 S.
        finished: scratch, 2 S m values, all below 0: end of each F, then of each B or BW; filled.
        waiter: scratch, 2 S m values, all -1: the device that waits for each F and each B.
        position: scratch, p values: the place in `order` each device has come to; filled.
        ready: scratch, p values.
        start, end: filled with the times of each place of `order`.
    """
    devices = len(first) - 1
    half = stages * microbatches
    ran = 0
    top = devices
    for device in range(devices):
        position[device] = first[device]
        ready[device] = devices - 1 - device
    while top > 0:
        top -= 1
        device = ready[top]
        place = position[device]
        stop = first[device + 1]
        clock = end[place - 1] if place > first[device] else 0.0
        while place < stop:
            code = order[place]
            row = code // microbatches
            microbatch = code - row * microbatches
            kind = row // stages
            stage = row - kind * stages
            begin = clock
            missing = -1
            if kind == 0:
                if stage > 0 and microbatch % every[stage] == 0:
                    source = code - microbatches
                    arrival = finished[source] + hop[stage]
                    if finished[source] < 0.0:
                        missing = source
                    elif arrival > begin:
                        begin = arrival
            elif kind == 2:
                source = code - half
                if finished[source] < 0.0:
                    missing = source
            else:
                source = stage * microbatches + microbatch
                if finished[source] < 0.0:
                    missing = source
                elif stage < stages - 1 and microbatch % every[stages + stage] == 0:
                    source = half + (stage + 1) * microbatches + microbatch
                    arrival = finished[source] + hop[stages + stage]
                    if finished[source] < 0.0:
                        missing = source
                    elif arrival > begin:
                        begin = arrival
            if missing >= 0:
                waiter[missing] = device
                break
            clock = begin + duration[row]
            start[place] = begin
            end[place] = clock
            place += 1
            ran += 1
            if kind != 2:
                done = code if kind == 0 else half + stage * microbatches + microbatch
                finished[done] = clock
                waiting = waiter[done]
                if waiting >= 0:
                    waiter[done] = -1
                    ready[top] = waiting
                    top += 1
        position[device] = place
    return ran


def peaks(
    order: Ints, first: Ints, stages: int, microbatches: int, activation: Floats, kept: Floats, peak: Floats
) -> None:
    """Fill `peak` (p values) with the most activation each device ever holds; needs no times, only orders.

    An activation is held from its F; its B frees all but the kept part, its W or BW the rest. `activation` and `kept`
    are per stage.
    """
    for device in range(len(first) - 1):
        held = 0.0
        most = 0.0
        for place in range(first[device], first[device + 1]):
            row = order[place] // microbatches
            kind = row // stages
            stage = row - kind * stages
            if kind == 0:
                held += activation[stage]
                if held > most:
                    most = held
            elif kind == 1:
                held -= activation[stage] - kept[stage]
            elif kind == 2:
                held -= kept[stage]
            else:
                held -= activation[stage]
        peak[device] = most


@dataclass(frozen=True)
class Compiled:
    """`run` and `peaks` as machine code; every sequence is a numpy array (int64 for integers, float64 for times)."""

    run: Callable[..., int]
    peaks: Callable[..., None]


@cache
def compiled() -> Compiled:
    """The kernel as machine code; compiled once per machine (about two seconds), then read from numba's cache."""
    from numba import njit

    return Compiled(run=njit(cache=True)(run), peaks=njit(cache=True)(peaks))


@dataclass(frozen=True)
class Tables:
    """A pipeline's costs as `run` and `peaks` read them."""

    duration: list[float]
    hop: list[float]
    every: list[int]
    activation: list[float]
    kept: list[float]


def cost_tables(placement: Sequence[int], costs: PassCosts) -> Tables:
    """`costs` on `placement` as flat tables."""
    stages = len(placement)
    edges = [(max(s - 1, 0), s) for s in range(stages)] + [(min(s + 1, stages - 1), s) for s in range(stages)]
    both = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)]
    return Tables(
        duration=[*costs.forward, *costs.backward, *costs.weight, *both],
        hop=[costs.edge_latency(placement, a, b) for a, b in edges],
        every=[costs.edge_every(placement, a, b) for a, b in edges],
        activation=list(costs.activation),
        kept=list(costs.kept),
    )


def code_of(item: Pass, stages: int, microbatches: int) -> int:
    """The integer that stands for a pass."""
    return (NUMBER[item.kind] * stages + item.stage) * microbatches + item.microbatch


def pass_of(code: int, stages: int, microbatches: int) -> Pass:
    """The pass an integer stands for."""
    row, microbatch = divmod(code, microbatches)
    kind, stage = divmod(row, stages)
    return Pass(KINDS[kind], stage, microbatch)


def encode(schedule: Schedule) -> tuple[list[int], list[int]]:
    """Codes of all passes, device after device, and where each device begins (length p + 1)."""
    stages, microbatches = schedule.stages, schedule.microbatches
    base = {kind: number * stages for number, kind in enumerate(KINDS)}
    order: list[int] = []
    first = [0]
    for passes in schedule.order:
        order += [(base[kind] + stage) * microbatches + microbatch for kind, stage, microbatch in passes]
        first.append(len(order))
    return order, first


def scratch(devices: int, stages: int, microbatches: int, passes: int) -> dict[str, Any]:
    """The scratch and result lists that `run` wants, by the names of its arguments."""
    cells = 2 * stages * microbatches
    return {
        "finished": [-1.0] * cells,
        "waiter": [-1] * cells,
        "position": [0] * devices,
        "ready": [0] * devices,
        "start": [0.0] * passes,
        "end": [0.0] * passes,
    }


@dataclass(frozen=True)
class SlotTimes:
    """A run in slots: what `run` filled, and how many passes ran."""

    ran: int
    first: list[int]
    position: list[int]
    start: list[float]
    end: list[float]

    @property
    def complete(self) -> bool:
        """Whether every pass ran; else the orders deadlock."""
        return self.ran == len(self.end)


def run_in_slots(schedule: Schedule) -> SlotTimes:
    """Run `schedule` when F, B and W take one slot, BW two, and messages no time."""
    stages, microbatches = schedule.stages, schedule.microbatches
    order, first = encode(schedule)
    work = scratch(schedule.devices, stages, microbatches, len(order))
    duration = [1.0] * (3 * stages) + [2.0] * stages
    ran = run(order, first, stages, microbatches, duration, [0.0] * (2 * stages), [1] * (2 * stages), **work)
    return SlotTimes(ran, first, work["position"], work["start"], work["end"])
