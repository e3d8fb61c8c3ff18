"""Where the search begins: target patterns of the known block families on a placement.

A pattern gives the time from each position of a microbatch's chain (F of stage 0..S-1, B of stage S-1..0) to the next.
It need not be free of collisions: the simulation re-times it. The families follow the building blocks of
"Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): on a V the time from device to device on the way
down and back decides lifespan and so memory; on loops a group of microbatches passes a leg before the next leg begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.schedules.engine.backfill import FILL_BFW, FILL_BWF, FILL_NONE, NEVER
from autotune.schedules.engine.problem import Floats, Problem

__all__ = ["Candidate", "starts"]


@dataclass(frozen=True)
class Candidate:
    """Targets and policy of one candidate, in engine time (see `backfill.evaluate`)."""

    increments: Floats
    period: float
    tau: float
    group: int
    policy: Floats


# Names of what a device does in a gap (see `backfill`): F first or B and W first, or nothing; a W after each B at once.
FORWARD, FILL, KEEP, AT_ONCE = "forward first", "fill", "keep order", "weight at once"


def _policies(v: int) -> dict[str, Floats]:
    look = 4.0 * v + 2
    return {
        FORWARD: np.array([FILL_BFW, 0.0, 0.3, NEVER, look]),
        FILL: np.array([FILL_BWF, 0.0, 0.0, NEVER, look]),
        KEEP: np.array([FILL_NONE, 0.0, 0.5, NEVER, look]),
        AT_ONCE: np.array([FILL_BFW, 0.0, 100.0, 0.0, look]),
    }


class _Chain:
    """Least increments of a problem's chain, stretched leg by leg (a leg is p positions, one sweep over devices)."""

    def __init__(self, problem: Problem) -> None:
        tables = problem.tables
        self.p, self.v, self.stages = problem.devices, problem.stages_per_device, problem.stages
        self.m = problem.microbatches
        S = self.stages
        work = tables.forward + tables.backward + tables.weight
        loads = [float(work[tables.device == d].sum()) for d in range(self.p)]
        self.period = max(loads)
        self.f = float(tables.forward.sum()) / S
        self.b = float(tables.backward.sum()) / S
        self.hop = float(tables.forward_hop.sum()) / max(1, S - 1)
        least = np.zeros(2 * S)
        least[1:S] = tables.forward[:-1] + tables.forward_hop[1:]
        least[S] = tables.forward[-1]
        # Position S + k is B of stage S-1-k; it waits for B of stage S-k.
        least[S + 1 :] = tables.backward[:0:-1] + tables.backward_hop[-2::-1]
        self.least = np.maximum(least, 1e-3)
        self.least[0] = 0.0

    def stretch(self, hops: Sequence[float] | None = None, turns: Sequence[float] | None = None) -> Floats:
        """Increments with at least `hops[leg]` between devices and `turns[leg]` before each of the 2v legs."""
        increments = self.least.copy()
        for leg in range(2 * self.v):
            low = leg * self.p
            if hops is not None:
                inside = increments[low + 1 : low + self.p]
                np.maximum(inside, hops[leg], out=inside)
            if turns is not None and leg > 0:
                increments[low] = max(increments[low], turns[leg])
        return increments


# Slots (a sixth of the period) between devices on the way down, then at the three turns; one slot on the way back.
# Chosen from all 120 combinations because together they hold the best start of 72 settings to 0.1 % on average.
V_PATTERNS = (
    ((5, 1, 6, 2), FILL),
    ((5, 2, 4, 1), FORWARD),
    ((2, 1, 6, 2), FILL),
    ((4, 1, 3, 2), FILL),
    ((1, 1, 3, 1), FILL),
    ((5, 1, 2, 1), FORWARD),
    ((1, 2, 3, 1), FORWARD),
    ((3, 1, 4, 2), FORWARD),
    ((4, 1, 3, 2), FORWARD),
    ((5, 1, 1, 2), FILL),
    ((2, 2, 5, 1), FORWARD),
    ((5, 1, 4, 1), KEEP),
    ((3, 2, 5, 2), FORWARD),
    ((4, 1, 3, 1), FILL),
    ((3, 1, 2, 2), FILL),
    ((2, 1, 3, 2), FORWARD),
)

Start = tuple[Floats, int, float, str]


def _linear(chain: _Chain) -> Iterator[Start]:
    T, f, b, c = chain.period, chain.f, chain.b, chain.hop
    yield chain.stretch([f + c, T]), 1, 1.0, FORWARD
    yield chain.stretch(), 1, 1.0, AT_ONCE
    yield chain.stretch([b + c, b + c]), 1, 1.0, FORWARD
    yield chain.stretch([f + b, f + b]), 1, 1.0, FORWARD
    yield chain.stretch([T / 2, T / 2]), 1, 1.0, FILL
    yield chain.stretch(), 1, 1.0, FILL


def _v(chain: _Chain) -> Iterator[Start]:
    T, f, b, c = chain.period, chain.f, chain.b, chain.hop
    unit = T / 6
    for (down, first, middle, last), policy in V_PATTERNS:
        hops = [down * unit, unit, down * unit, unit]
        yield chain.stretch(hops, [0, first * unit, middle * unit, last * unit]), 1, 1.0, policy
    for share in (4 / 3, 1.0):
        yield chain.stretch([share * T - f - c, 0, share * T - b - c, 0]), 1, 1.0, FORWARD
    for policy in (FORWARD, KEEP):
        yield chain.stretch(), 1, 1.0, policy


def _loop(chain: _Chain) -> Iterator[Start]:
    T, f, b, c, p, v = chain.period, chain.f, chain.b, chain.hop, chain.p, chain.v

    def legs(x: float, y: float, group: int = 1, tau: float = 1.0, wait: bool = True) -> Floats:
        """Hops x down and y back; with `wait` a leg begins when the group has passed the one before."""
        x, y = max(x, f + c), max(y, b + c)
        leg = group * tau * T
        forward, backward = max(f, leg - (p - 1) * x), max(b, leg - (p - 1) * y)
        turns = [0.0] + [forward] * (v - 1) + [0.0] + [backward] * (v - 1)
        return chain.stretch([x] * v + [y] * v, turns if wait else None)

    # Groups as near to p as divide the microbatches evenly: one left over would pay for a whole group.
    whole = -(-chain.m // max(1, round(chain.m / p)))
    half, tight, loose = max(1, whole // 2), 1.0 / v, 1.2 / v
    yield legs(f + b, f + b, half, tight), half, tight, FORWARD
    yield legs(f + b, f + b, whole, tight), whole, tight, FORWARD
    yield legs(f + b, f + b, whole, loose), whole, loose, FORWARD
    yield legs(f + b, f + b, whole, loose, False), whole, loose, FORWARD
    yield legs(f + b, f + b, whole, tight, False), whole, tight, FORWARD
    yield legs(f + c, b + c), 1, 1.0, FORWARD
    yield legs(f + c, b + c), 1, 1.0, AT_ONCE
    yield legs(f + c, b + c, half, tight), half, tight, AT_ONCE
    yield chain.stretch([f] * v + [T / v - f] * v), half, tight, FORWARD
    yield chain.stretch([f] * v + [T / v - f] * v), 1, 1.0, FORWARD
    yield legs(f + c, T / v, half, tight), half, tight, FORWARD
    yield legs(f + c, T / v, half, loose), half, loose, FORWARD
    yield legs(T / v / 2, T / v / 2, half, tight), half, tight, FORWARD
    yield legs(b + c, b + c), 1, 1.0, FILL
    yield legs(f + b, f + b), 1, 1.0, FORWARD


def starts(problem: Problem) -> list[Candidate]:
    """Candidates to evaluate first, for any caps, the most useful ones first; the same list for the same problem."""
    chain = _Chain(problem)
    policies = _policies(chain.v)
    family = _v if problem.kind == "v" else _linear if chain.v == 1 else _loop
    return [
        Candidate(increments, chain.period, tau, group, policies[policy])
        for increments, group, tau, policy in family(chain)
    ]
