"""Finished trials refit the cost model: machine numbers from measured step times, with the error before and after.

`autotune.profiling.refit_reach` says where a fit holds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.cost.assumptions import Assumptions
from autotune.cost.devices import Machine
from autotune.cost.fit import fit_machine
from autotune.cost.predict import Predictor
from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.rows import plan_of
from autotune.space.cluster import ClusterSpec
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

__all__ = ["CHOICES_WITHOUT_LINKS", "Fitter", "Refit", "Trial", "in_range", "mean_error", "refit", "timed_plans"]


Trial = tuple[Plan, float]
"""A plan and its measured step time in seconds."""

CHOICES = (("efficiency",), ("efficiency", "link_efficiency"), ("efficiency", "kernel_s"))
CHOICES_WITHOUT_LINKS = (("efficiency",), ("efficiency", "kernel_s"))
"""What may be fitted, simplest first. Links' share is for plans that differ in messages and collectives."""

TRIALS_A_NUMBER = 4
NEEDED_GAIN = 0.8
"""Another number has to bring the error on trials left out of the fit below this share of what it was."""
GOOD_ENOUGH = 0.02
MOST_TRIALS = 100
"""More of them, taken evenly, make the fit slower and no better."""

USEFUL_ERROR, USEFUL_GAIN = 0.25, 0.9
"""A fit helps if its error on left-out trials is at most the one, and at most the other of the error without it."""

NOMINAL_LIMIT = 20.0
"""Of a CPU's efficiency in a fit: its peak is a nominal one, which grows instead of a share above 1."""


@dataclass(frozen=True)
class Refit:
    """The machine that fits finished trials best.

    Attributes:
        numbers: the fitted machine numbers' names; a peak where a CPU was found faster than its nominal one.
        before, after: relative error of every trial's predicted step time, with the old machine and the new one.
        left_out: the same for machines that were fitted to all other trials; None with too few of them.
    """

    machine: Machine
    numbers: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...] | None

    @property
    def doubt(self) -> str | None:
        """Why predictions with the fitted machine are not to be relied on, after "the fit"; None if they help."""
        before = mean_error(self.before)
        if self.left_out is None:
            return f"can't be judged: {len(self.before)} trials are too few to leave any out"
        error = mean_error(self.left_out)
        if error > USEFUL_ERROR:
            return (
                f"is poor: trials left out of it are predicted {error:.1%} wrong, at most {USEFUL_ERROR:.0%} is useful"
            )
        if error > USEFUL_GAIN * before:
            return f"hardly helps: trials left out of it are predicted {error:.1%} wrong, without it {before:.1%}"
        return None

    def sentence(self) -> str:
        """One line: how many trials and numbers, mean error before, after and left out."""
        numbers = f"{len(self.numbers)} number{'s' * (len(self.numbers) != 1)}"
        text = (
            f"{numbers} ({', '.join(self.numbers)}) refitted to {len(self.before)} trials: "
            f"mean error of the step time {mean_error(self.before):.1%} before, {mean_error(self.after):.1%} after"
        )
        return (
            text if self.left_out is None else f"{text}, {mean_error(self.left_out):.1%} on trials left out of the fit"
        )


def timed_plans(rows: Sequence[Row]) -> list[tuple[Plan, float]]:
    """Plans and step times of the rows that were run to the end."""
    return [
        (plan_of(row), row.step_time_s)
        for row in rows
        if row.fidelity == "run" and row.state == "ok" and row.step_time_s is not None
    ]


def refit(
    trials: Sequence[Trial],
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    machine: Machine,
    numbers: Sequence[str] | None = None,
    assumptions: Assumptions | None = None,
    choices: Sequence[tuple[str, ...]] = CHOICES,
) -> Refit:
    """Refit machine numbers to measured step times.

    Args:
        trials: plans with their step times in seconds.
        machine: the figures so far.
        numbers: what to fit, of `autotune.cost.fit.FITTABLE`; None: the one of `choices` that predicts trials left out
            of the fit best, a simpler one unless more numbers bring much.

    Raises:
        UserError: fewer trials than numbers, or a number that can't be fitted.
    """
    fitter = Fitter(model, cluster, training, assumptions, machine)
    if numbers is not None:
        return fitter.refit(trials, tuple(numbers))
    trials = trials[:: -(-len(trials) // MOST_TRIALS)]
    best = fitter.refit(trials, choices[0])
    for choice in choices[1:]:
        if (
            best.left_out is None
            or mean_error(best.left_out) < GOOD_ENOUGH
            or len(trials) < TRIALS_A_NUMBER * len(choice)
        ):
            continue
        other = fitter.refit(trials, choice)
        if other.left_out is not None and mean_error(other.left_out) < NEEDED_GAIN * mean_error(best.left_out):
            best = other
    return best


@dataclass(frozen=True)
class Fitter:
    """Fits numbers of `machine` to trials of one model on one cluster."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    assumptions: Assumptions | None
    machine: Machine

    def errors(self, figures: Machine, trials: Sequence[Trial]) -> tuple[float, ...]:
        """Relative error of every trial's predicted step time."""
        predictor = Predictor(self.model, self.cluster, self.training, self.assumptions, figures, compiled=False)
        return tuple(predictor.predict(plan).step_time_s / seconds - 1 for plan, seconds in trials)

    def fit(self, trials: Sequence[Trial], numbers: tuple[str, ...]) -> Machine:
        """The machine with `numbers` fitted; its efficiency may be above 1 on a CPU (`in_range` mends that).

        Squares of the errors' logarithms are least: half the time and twice the time are equally wrong.
        """
        greatest = {"efficiency": NOMINAL_LIMIT} if self.cluster.device == "cpu" else {}

        def logarithms(figures: Machine) -> list[float]:
            return [math.log1p(error) for error in self.errors(figures, trials)]

        return fit_machine(self.machine, numbers, logarithms, from_start=False, greatest=greatest)

    def refit(self, trials: Sequence[Trial], numbers: tuple[str, ...]) -> Refit:
        """The fit to all trials, and what fits to all but some say about those."""
        if len(trials) < len(numbers):
            raise UserError(f"{len(numbers)} numbers can't be refitted to {len(trials)} finished trials")
        best = self.fit(trials, numbers)
        left_out = None
        if len(trials) > len(numbers):
            left_out = tuple(
                error
                for kept, held in _folds(len(trials))
                for error in self.errors(self.fit([trials[i] for i in kept], numbers), [trials[i] for i in held])
            )
        before, after = self.errors(self.machine, trials), self.errors(best, trials)
        peak = "peak_flops_float32" if self.training.dtype == "float32" else "peak_flops"
        named = tuple(peak if name == "efficiency" and best.efficiency > 1 else name for name in numbers)
        return Refit(in_range(best), named, before, after, left_out)


def in_range(machine: Machine) -> Machine:
    """The same machine with an efficiency of at most 1: what is above is in the peaks."""
    if machine.efficiency <= 1:
        return machine
    faster = machine.efficiency
    return machine.with_numbers(
        peak_flops=machine.peak_flops * faster, peak_flops_float32=machine.peak_flops_float32 * faster, efficiency=1.0
    )


MOST_FOLDS = 8


def _folds(number: int) -> list[tuple[list[int], list[int]]]:
    """(kept, left out) indices: every trial is left out once, one by one or in as many groups as `MOST_FOLDS`."""
    folds = min(number, MOST_FOLDS)
    return [
        ([i for i in range(number) if i % folds != k], [i for i in range(number) if i % folds == k])
        for k in range(folds)
    ]


def mean_error(errors: Sequence[float]) -> float:
    """Mean absolute one."""
    return statistics.fmean(abs(error) for error in errors)
