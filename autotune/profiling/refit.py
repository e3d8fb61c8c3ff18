"""Finished trials refit the cost model: machine numbers from measured step times, with the error before and after."""

from __future__ import annotations

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

__all__ = ["Refit", "refit", "timed_plans"]


@dataclass(frozen=True)
class Refit:
    """The machine that fits finished trials best.

    Attributes:
        numbers: the fitted machine numbers' names.
        before, after: relative error of every trial's predicted step time, with the old machine and the new one.
        left_out: the same for machines that were fitted to all other trials; None with too few of them.
    """

    machine: Machine
    numbers: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...] | None

    def sentence(self) -> str:
        """One line: how many trials and numbers, mean error before, after and left out."""
        numbers = f"{len(self.numbers)} number{'s' * (len(self.numbers) != 1)}"
        text = (
            f"{numbers} ({', '.join(self.numbers)}) refitted to {len(self.before)} trials: "
            f"mean error of the step time {_mean(self.before):.1%} before, {_mean(self.after):.1%} after"
        )
        return text if self.left_out is None else f"{text}, {_mean(self.left_out):.1%} on trials left out of the fit"


def timed_plans(rows: Sequence[Row]) -> list[tuple[Plan, float]]:
    """Plans and step times of the rows that were run to the end."""
    return [
        (plan_of(row), row.step_time_s)
        for row in rows
        if row.fidelity == "run" and row.state == "ok" and row.step_time_s is not None
    ]


def refit(
    trials: Sequence[tuple[Plan, float]],
    model: ModelSpec,
    cluster: ClusterSpec,
    training: TrainingSpec,
    machine: Machine,
    numbers: Sequence[str] = ("efficiency",),
    assumptions: Assumptions | None = None,
) -> Refit:
    """Refit machine numbers to measured step times.

    Args:
        trials: plans with their step times in seconds.
        machine: the figures so far.
        numbers: what to fit, of `autotune.cost.fit.FITTABLE`; few, or trials are learnt by heart.

    Raises:
        UserError: fewer trials than numbers, or a number that can't be fitted.
    """
    if len(trials) < len(numbers):
        raise UserError(f"{len(numbers)} numbers can't be refitted to {len(trials)} finished trials")

    def errors(figures: Machine, of: Sequence[tuple[Plan, float]]) -> list[float]:
        predictor = Predictor(model, cluster, training, assumptions, figures, compiled=False)
        return [predictor.predict(plan).step_time_s / seconds - 1 for plan, seconds in of]

    def fitted(of: Sequence[tuple[Plan, float]]) -> Machine:
        return fit_machine(machine, numbers, lambda figures: errors(figures, of), from_start=False)

    best = fitted(trials)
    left_out = None
    if len(trials) > len(numbers):
        left_out = tuple(
            error
            for k, held in _folds(len(trials))
            for error in errors(fitted([trials[i] for i in k]), [trials[i] for i in held])
        )
    return Refit(best, tuple(numbers), tuple(errors(machine, trials)), tuple(errors(best, trials)), left_out)


MOST_FOLDS = 8


def _folds(number: int) -> list[tuple[list[int], list[int]]]:
    """(kept, left out) indices: every trial is left out once, one by one or in as many groups as `MOST_FOLDS`."""
    folds = min(number, MOST_FOLDS)
    return [
        ([i for i in range(number) if i % folds != k], [i for i in range(number) if i % folds == k])
        for k in range(folds)
    ]


def _mean(errors: Sequence[float]) -> float:
    return statistics.fmean(abs(error) for error in errors)
