"""Many plans through few schedules: the order of passes is built once, timed by the simulation kernel for every plan.

Two plans whose schedule, p, m and v agree run the same passes in the same order and differ in durations and bytes
alone, so the order is built and encoded once. A step of many microbatches repeats a steady state: its time is
extrapolated from two shorter steps (`Pipeline.run`), which tests hold against the full simulation.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

from autotune.errors import UserError
from autotune.schedules import kernel, registry
from autotune.schedules.costs import PassCosts
from autotune.schedules.schedule import Schedule

__all__ = ["DeviceBytes", "Order", "Pipeline", "PipelineRun", "Ratios", "adapts", "order_of", "peak_bytes", "pipeline"]

EXACT_UP_TO = 4
"""Steps of up to this many microbatches a device are simulated in full."""

GROWS = 0.99
"""Activations that grow by this share of all that the further microbatches hold keep growing."""

COMPILE_AFTER_PASSES = 300_000
"""Compiling the kernel pays from about this many simulated passes on."""


@dataclass(frozen=True)
class DeviceBytes:
    """Bytes of every stage (length S each): see `autotune.cost.activations.StageMemory`."""

    held: tuple[float, ...]
    kept: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    fused: tuple[float, ...]


@dataclass(frozen=True)
class PipelineRun:
    """What one step takes.

    Attributes:
        makespan_s: from the first start to the last end.
        span_s: the longest time from a device's own first start to its own last end.
        instant_makespan_s, instant_span_s: the same if messages took no time.
        busy_s: time each device works.
        peak_bytes: most bytes of activations and temporaries each device ever needs.
        held_bytes: the activations among them, at the moment of that peak.
    """

    makespan_s: float
    span_s: float
    instant_makespan_s: float
    instant_span_s: float
    busy_s: tuple[float, ...]
    peak_bytes: tuple[float, ...]
    held_bytes: tuple[float, ...]


def peak_bytes(order: Any, first: Any, stages: int, microbatches: int, table: Any, peak: Any, held_at: Any) -> None:
    """Fill `peak` and `held_at` (p values each) with the most bytes of every device and what is held then.

    Memory depends on the order of a device's passes alone, not on their times. Written for numba, like the kernel of
    `autotune.schedules.kernel`, whose codes `order` holds.

    Args:
        table: held, kept, and temporaries of F, B, W, BW of every stage; length 6 S.
    """
    for device in range(len(first) - 1):
        held = 0.0
        most = -1.0
        for place in range(first[device], first[device + 1]):
            row = order[place] // microbatches
            kind = row // stages
            stage = row - kind * stages
            if kind == 0:
                held += table[stage]
            need = held + table[(2 + kind) * stages + stage]
            if need > most:
                most = need
                held_at[device] = held
            if kind == 1:
                held -= table[stage] - table[stages + stage]
            elif kind == 2:
                held -= table[stages + stage]
            elif kind == 3:
                held -= table[stage]
            if held > most:
                most = held
                held_at[device] = held
        peak[device] = most


@cache
def _compiled_peak_bytes() -> Callable[..., None]:
    from numba import njit

    return njit(cache=True)(peak_bytes)


@dataclass(frozen=True, eq=False)
class Order:
    """A schedule as the kernels read it.

    Attributes:
        codes, first: `autotune.schedules.kernel.encode`.
        count: for every device, how many passes of each (kind, stage) it runs: pairs (kind * S + stage, number).
    """

    placement: tuple[int, ...]
    devices: int
    microbatches: int
    codes: list[int]
    first: list[int]

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.placement)

    @cached_property
    def arrays(self) -> tuple[Any, Any]:
        """`codes` and `first` as int64 arrays."""
        import numpy as np

        return np.array(self.codes, dtype=np.int64), np.array(self.first, dtype=np.int64)

    @cached_property
    def counts(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For every device, how many passes of each kind and stage it runs: (kind * S + stage, number)."""
        found = []
        for begin, end in zip(self.first, self.first[1:], strict=False):
            number: dict[int, int] = {}
            for code in self.codes[begin:end]:
                row = code // self.microbatches
                number[row] = number.get(row, 0) + 1
            found.append(tuple(sorted(number.items())))
        return tuple(found)

    def busy(self, duration: Sequence[float]) -> tuple[float, ...]:
        """Time each device works."""
        return tuple(sum(duration[row] * number for row, number in rows) for rows in self.counts)


def order_of(schedule: Schedule) -> Order:
    """The passes of a schedule as the kernels read them."""
    codes, first = kernel.encode(schedule)
    return Order(schedule.placement, schedule.devices, schedule.microbatches, codes, first)


@dataclass(frozen=True)
class _Timed:
    makespan: float
    start: tuple[float, ...]  # first start of every device
    tail: tuple[float, ...]  # from the last end of every device to the end of the step

    @property
    def span(self) -> float:
        return max(self.makespan - start - tail for start, tail in zip(self.start, self.tail, strict=True))


def _time(order: Order, tables: kernel.Tables, compiled: bool) -> _Timed:
    codes: Any = order.codes
    first: Any = order.first
    run: Callable[..., int] = kernel.run
    costs: tuple[Any, ...] = (tables.duration, tables.hop, tables.every)
    if compiled:
        codes, first = order.arrays
        costs, work = _as_arrays(tables, order)
        run = kernel.compiled().run
    else:
        work = kernel.scratch(order.devices, order.stages, order.microbatches, len(codes))
    ran = run(codes, first, order.stages, order.microbatches, *costs, **work)
    assert ran == len(order.codes), "a registered schedule deadlocked"
    bounds = list(zip(order.first, order.first[1:], strict=False))
    start = [float(work["start"][a]) for a, _ in bounds]
    last = [float(work["end"][b - 1]) for _, b in bounds]
    makespan = max(last)
    return _Timed(makespan, tuple(start), tuple(makespan - end for end in last))


def _as_arrays(tables: kernel.Tables, order: Order) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Costs and scratch space of the compiled kernel."""
    import numpy as np

    cells = 2 * order.stages * order.microbatches
    work = {
        "finished": np.full(cells, -1.0),
        "waiter": np.full(cells, -1, dtype=np.int64),
        "position": np.zeros(order.devices, dtype=np.int64),
        "ready": np.zeros(order.devices, dtype=np.int64),
        "start": np.empty(len(order.codes)),
        "end": np.empty(len(order.codes)),
    }
    return (np.array(tables.duration), np.array(tables.hop), np.array(tables.every, dtype=np.int64)), work


def _peaks(order: Order, table: list[float], compiled: bool) -> tuple[list[float], list[float]]:
    codes: Any = order.codes
    first: Any = order.first
    peak: Any = [0.0] * order.devices
    held: Any = [0.0] * order.devices
    walk: Callable[..., None] = peak_bytes
    values: Any = table
    if compiled:
        import numpy as np

        codes, first = order.arrays
        peak, held, values = np.zeros(order.devices), np.zeros(order.devices), np.array(table)
        walk = _compiled_peak_bytes()
    walk(codes, first, order.stages, order.microbatches, values, peak, held)
    return list(map(float, peak)), list(map(float, held))


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A schedule for p devices, m microbatches and v stages a device.

    Attributes:
        orders: the order itself; or, for many microbatches, those of two shorter steps that are p microbatches apart.
    """

    microbatches: int
    orders: tuple[Order, ...]

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage -> device."""
        return self.orders[0].placement

    @property
    def exact(self) -> bool:
        """Whether the whole step is simulated, not extrapolated."""
        return len(self.orders) == 1

    @property
    def passes(self) -> int:
        """Passes that one `run` simulates."""
        return sum(len(order.codes) for order in self.orders)

    def run(self, costs: PassCosts, memory: DeviceBytes, compiled: bool = False) -> PipelineRun:
        """Time and memory of one step.

        Beyond the exact range: every p further microbatches add what the last p added, and no device can do with less
        than its first start, its work and its tail. Peaks stand still, unless every microbatch is held to the end
        (gpipe).

        Args:
            compiled: run the kernels as machine code.
        """
        tables = kernel.cost_tables(self.placement, costs)
        busy = self._busy(tables)
        makespan, span = instant = self._times(tables, busy, compiled)
        if any(tables.hop):
            instant = self._times(replace(tables, hop=[0.0] * len(tables.hop)), busy, compiled)
        peaks, held = self._peaks(memory, compiled)
        return PipelineRun(makespan, span, *instant, busy, tuple(peaks), tuple(held))

    def _busy(self, tables: kernel.Tables) -> tuple[float, ...]:
        last = self.orders[-1]
        share = self.microbatches / last.microbatches
        return tuple(share * value for value in last.busy(tables.duration))

    def _times(self, tables: kernel.Tables, busy: tuple[float, ...], compiled: bool) -> tuple[float, float]:
        """Makespan and longest span."""
        timed = [_time(order, tables, compiled) for order in self.orders]
        if self.exact:
            return timed[0].makespan, timed[0].span
        short, long = timed
        steps = (self.microbatches - self.orders[1].microbatches) / self.orders[1].devices
        bounds = (a + b + c for a, b, c in zip(long.start, busy, long.tail, strict=True))
        makespan = max(long.makespan + steps * (long.makespan - short.makespan), *bounds)
        return makespan, max(long.span + steps * (long.span - short.span), *busy)

    def _peaks(self, memory: DeviceBytes, compiled: bool) -> tuple[list[float], list[float]]:
        """Most bytes of every device, and what is held at that moment."""
        table = [*memory.held, *memory.kept, *memory.forward, *memory.backward, *memory.weight, *memory.fused]
        walked = [_peaks(order, table, compiled) for order in self.orders]
        peaks, held = walked[-1]
        last = self.orders[-1]
        more = _less(held, walked[0][1])
        if not all(a >= GROWS * b * last.devices / last.microbatches > 0 for a, b in zip(more, held, strict=True)):
            return peaks, held
        grown = [value * self.microbatches / last.microbatches for value in held]
        return [peak + extra for peak, extra in zip(peaks, _less(grown, held), strict=True)], grown


def _less(a: Sequence[float], b: Sequence[float]) -> list[float]:
    return [x - y for x, y in zip(a, b, strict=True)]


class Ratios(NamedTuple):
    """What a schedule that adapts to costs is searched with: means over stages, in units of a mean F.

    Attributes:
        kept: part of an activation that stays from B to W.
    """

    backward: float
    weight: float
    hop: float
    kept: float

    @classmethod
    def of(cls, costs: PassCosts) -> Ratios:
        """The ratios of `costs`, rounded to steps of 0.05 so that similar plans share a schedule."""
        f, b, w, activation, kept = map(
            sum, (costs.forward, costs.backward, costs.weight, costs.activation, costs.kept)
        )
        hops = [costs.hop] if isinstance(costs.hop, (int, float)) else [row[d - 1] for d, row in enumerate(costs.hop)]
        hop = sum(hops) / len(hops) * len(costs.forward)
        return cls(*(round(20 * value) / 20 for value in (b / f, w / f, hop / f, min(1.0, kept / activation))))

    def costs(self, stages: int) -> PassCosts:
        """Equal stages with these ratios."""
        each = (1.0,) * stages
        return PassCosts(
            forward=each,
            backward=(self.backward,) * stages,
            weight=(self.weight,) * stages,
            hop=self.hop,
            activation=each,
            kept=(self.kept,) * stages,
        )


def adapts(name: str) -> bool:
    """Whether the schedule is searched for given costs."""
    return registry.find(name).search is not None


@cache
def pipeline(
    name: str, devices: int, microbatches: int, stages_per_device: int, ratios: Ratios | None = None
) -> Pipeline:
    """The named schedule, ready to be timed; kept for every later plan that runs the same order.

    Args:
        ratios: costs that a schedule which adapts is searched with; None: F = B = W and no latency.

    Raises:
        UserError: unknown schedule, or numbers it doesn't allow.
    """
    if microbatches <= EXACT_UP_TO * devices + devices or devices == 1:
        return Pipeline(microbatches, (_order(name, devices, microbatches, stages_per_device, ratios),))
    short = (EXACT_UP_TO - 1) * devices + microbatches % devices
    orders = tuple(_order(name, devices, m, stages_per_device, ratios) for m in (short, short + devices))
    return Pipeline(microbatches, orders)


@contextmanager
def _no_search_for_cycles() -> Iterator[None]:
    """Generators make hundreds of thousands of passes and no cycles; looking for some takes half of their time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@cache
@_no_search_for_cycles()
def _order(name: str, devices: int, microbatches: int, stages_per_device: int, ratios: Ratios | None) -> Order:
    kind = registry.find(name)
    for problem in (kind.stages_problem(stages_per_device), kind.microbatches_problem(devices, microbatches)):
        if problem:
            raise UserError(problem)
    if kind.search is not None and ratios is not None:
        return order_of(kind.search(devices, microbatches, None, ratios.costs(devices * stages_per_device)))
    # `registry.build` also checks the generator's work, which takes longer than to make it; tests do that once.
    return order_of(kind.generate(devices, microbatches, stages_per_device))
