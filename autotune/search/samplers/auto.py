"""The default sampler: the plan that promises most by its prediction, corrected by measurements, until none is left.

`gp` is the same without predictions and without an end of its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.results.predicted import Predicted
from autotune.search.samplers.families import Families, Scales
from autotune.search.samplers.proposer import Observation
from autotune.space.plan import Plan

__all__ = ["Auto"]

Floats = npt.NDArray[np.float64]

# Standard deviations of the natural logarithm of measured over predicted: the scales that the cost model's errors have
# (docs/cost-model.md). The mean is left open: a wrong figure of the device shifts all plans alike.
_RATE_ERRORS = Scales(mean=3.0, field=0.06, parts=0.3, alike=0.03, own=0.025)
_MEMORY_ERRORS = Scales(mean=0.1, field=0.02, parts=0.0, alike=0.02, own=0.02)
# Of the logarithm of what was measured, where nothing is predicted.
_RATES = Scales(mean=3.0, field=0.25, parts=0.0, alike=0.2, own=0.04)
_MEMORIES = Scales(mean=3.0, field=0.3, parts=0.0, alike=0.2, own=0.05)
# Of success, which is 0, and failure, -1.
_FAILURES = Scales(mean=0.1, field=0.2, parts=0.0, alike=0.2, own=0.1)

# A plan counts as able to win as long as its throughput may be this many standard deviations above its mean.
_CONFIDENCE = 2.5
# Fewer measurements don't tell how far the predictions of this software on this machine err.
_LEAST_TO_STOP = 5
# Plans less likely than this to fit in memory, or to run at all, come last.
_UNLIKELY = 0.05
# An out-of-memory whose size nobody measured is taken to be at least so much over the limit.
_LEAST_OVER = 1.05


@dataclass(frozen=True)
class _Outlook:
    """Of the plans left, in their order: logarithm of tokens/s (relative where nothing was measured) and chances."""

    rate: Floats
    deviation: Floats
    fits: Floats
    runs: Floats

    @property
    def upper(self) -> Floats:
        """Upper confidence bound of the rate."""
        return self.rate + _CONFIDENCE * self.deviation

    @property
    def possible(self) -> npt.NDArray[np.bool_]:
        """Plans that may well run within their limits."""
        return (self.fits >= _UNLIKELY) & (self.runs >= _UNLIKELY)


class Auto:
    """Proposes the plan with the highest expected improvement and stops when no upper bound is above the best.

    Args:
        plans: the legal plans.
        seed: order of plans that promise the same.
        predicted: of the cost model; plans without one are expected to be as slow as the slowest.
        limit_bytes: memory of a device; None for no limit.
        stops: whether it may say that nothing left is worth a trial.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        seed: int,
        predicted: Mapping[Plan, Predicted],
        limit_bytes: int | None,
        stops: bool = True,
    ) -> None:
        self.why_stopped = ""
        self._stops, self._limit = stops, limit_bytes
        order = list(plans)
        random.Random(seed).shuffle(order)
        self._index = {plan: index for index, plan in enumerate(order)}
        told = [predicted.get(plan) for plan in order]
        there = [one for one in told if one is not None]
        self._predicts = bool(there)
        if there:
            slowest, middling = max(one.step_time_s for one in there), float(np.median([_peak(one) for one in there]))
            self._rate = -np.log([slowest if one is None else one.step_time_s for one in told])
            self._memory = np.log([middling if one is None else _peak(one) for one in told])
            self._families = Families(order, _parts(told))
        else:
            self._rate, self._memory = np.zeros(len(order)), np.zeros(len(order))
            self._families = Families(order)

    def propose(self, left: Sequence[Plan], known: Sequence[Observation], flights: Sequence[Plan] = ()) -> Plan | None:
        """The most promising of `left`; None if none is likely to beat the best of `known`.

        Plans in flight are taken to give what is expected of them, so that tuners don't all take neighbours.
        """
        self.why_stopped = ""
        known = [one for one in known if one.plan in self._index]
        left = sorted(left, key=self._index.__getitem__)
        outlook = self._outlook(left, known, flights)
        fitting = [one for one in known if one.value and not (one.constraint is not None and one.constraint > 0)]
        best = max(fitting, key=lambda one: one.value or 0.0, default=None)
        if best is None:
            return left[int(np.argmax(outlook.rate + np.log(np.maximum(outlook.fits * outlook.runs, 1e-9))))]
        goal = math.log(best.value or 1.0)
        enough = len(fitting) >= _LEAST_TO_STOP
        if self._stops and enough and not np.any(outlook.possible & (outlook.upper > goal)):
            self.why_stopped = _why(len(known), best, left, outlook)
            return None
        promise = _expected_improvement(outlook.rate, outlook.deviation, goal) * outlook.fits * outlook.runs
        promise = np.where(outlook.possible, promise, promise * 1e-6)
        return left[int(np.argmax(promise))]

    def _outlook(self, left: Sequence[Plan], known: Sequence[Observation], flights: Sequence[Plan]) -> _Outlook:
        wanted = self._at(left)
        valued = [one for one in known if one.value]
        measured = self._at([one.plan for one in valued])
        rates = np.log([one.value or 1.0 for one in valued]) - self._rate[measured]
        # The first measurements set the level; the mean's own freedom is about that.
        level = float(np.median(rates)) if len(rates) else 0.0
        scales, errors = _RATE_ERRORS if self._predicts else _RATES, rates - level
        if believed := [plan for plan in flights if plan in self._index]:
            expected, _ = self._families.posterior(scales, measured, errors, self._at(believed))
            measured = np.concatenate([measured, self._at(believed)])
            errors = np.concatenate([errors, expected])
        mean, deviation = self._families.posterior(scales, measured, errors, wanted)
        return _Outlook(
            self._rate[wanted] + level + mean, deviation, self._fits(wanted, known), self._runs(wanted, known)
        )

    def _fits(self, wanted: npt.NDArray[np.int64], known: Sequence[Observation]) -> Floats:
        """Chance that the peak memory is within the limit."""
        if self._limit is None:
            return np.ones(len(wanted))
        told = [(self._index[one.plan], peak) for one in known if (peak := self._peak_of(one)) is not None]
        if not self._predicts and not told:
            return np.ones(len(wanted))
        measured = np.array([index for index, _ in told], dtype=np.int64)
        errors = np.log([peak for _, peak in told]) - self._memory[measured]
        level = 0.0 if self._predicts else float(np.median(errors))
        scales = _MEMORY_ERRORS if self._predicts else _MEMORIES
        mean, deviation = self._families.posterior(scales, measured, errors - level, wanted)
        return _below((math.log(self._limit) - self._memory[wanted] - level - mean) / deviation)

    def _peak_of(self, one: Observation) -> float | None:
        """Peak of a plan in bytes; of an out-of-memory that nobody measured, the least that it must have been."""
        if one.peak_bytes:
            return float(one.peak_bytes)
        if one.constraint is not None and one.constraint > 0 and self._limit is not None:
            expected = math.exp(self._memory[self._index[one.plan]]) if self._predicts else 0.0
            return max(expected, _LEAST_OVER * self._limit)
        return None

    def _runs(self, wanted: npt.NDArray[np.int64], known: Sequence[Observation]) -> Floats:
        """Chance that a plan gives a number, judged by alike plans; 1 as long as none failed."""
        judged = [one for one in known if one.value or not (one.constraint is not None and one.constraint > 0)]
        outcomes = np.array([0.0 if one.value else -1.0 for one in judged])
        if not np.any(outcomes):
            return np.ones(len(wanted))
        measured = self._at([one.plan for one in judged])
        mean, _ = self._families.posterior(_FAILURES, measured, outcomes, wanted)
        return np.clip(1.0 + mean, 0.0, 1.0)

    def _at(self, plans: Sequence[Plan]) -> npt.NDArray[np.int64]:
        return np.array([self._index[plan] for plan in plans], dtype=np.int64)


def _peak(one: Predicted) -> float:
    return float(max(one.peak_memory_bytes, 1))


def _parts(told: Sequence[Predicted | None]) -> Floats:
    """Shares of the parts of the predicted step, (plans, 7)."""
    there = [one for one in told if one is not None]
    shares = np.array([_shares(one) for one in there])
    middle = shares.mean(axis=0)
    return np.array([middle if one is None else _shares(one) for one in told])


def _shares(one: Predicted) -> list[float]:
    parts = (one.compute_s, one.bubble_s, one.tp_s, one.pp_s, one.dp_s, one.optimizer_s, one.overhead_s)
    return [part / one.step_time_s for part in parts]


def _below(z: Floats) -> Floats:
    """Standard normal distribution function."""
    return np.array([0.5 * math.erfc(-value / math.sqrt(2.0)) for value in z])


def _expected_improvement(mean: Floats, deviation: Floats, goal: float) -> Floats:
    """Expected amount by which normal values exceed `goal` (Jones et al. 1998, equation 15)."""
    deviation = np.maximum(deviation, 1e-12)
    z = (mean - goal) / deviation
    density = np.exp(-0.5 * z**2) / math.sqrt(2.0 * math.pi)
    return np.maximum(deviation * (z * _below(z) + density), 0.0)


def _why(trials: int, best: Observation, left: Sequence[Plan], outlook: _Outlook) -> str:
    """Why the search stops, with the numbers."""
    possible = outlook.possible
    text = (
        f"after {trials} plans no other is likely to beat {best.plan.describe()} (best measured {_tokens(best.value)}"
    )
    if np.any(possible):
        top = int(np.argmax(np.where(possible, outlook.upper, -np.inf)))
        text += f"; the most any other may reach is {_tokens(math.exp(outlook.upper[top]))}: {left[top].describe()}"
    text += ")"
    too_large = int(np.sum(outlook.fits < _UNLIKELY))
    if too_large:
        text += f"; {too_large} others are unlikely to fit in memory"
    failing = int(np.sum((outlook.runs < _UNLIKELY) & (outlook.fits >= _UNLIKELY)))
    if failing:
        text += f"; {failing} others are like plans that failed"
    return text


def _tokens(value: float | None) -> str:
    return f"{value or 0.0:,.0f} tokens/s"
