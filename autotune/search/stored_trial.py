"""What the database holds of one trial: attributes of Optuna's trial, and their way back to an outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from optuna.trial import FrozenTrial

from autotune.errors import UserError
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.results.predicted import Predicted
from autotune.search.tuners import Tuner
from autotune.space.plan import Plan

__all__ = [
    "BEGUN",
    "EARLIER",
    "MARK",
    "OUTCOME",
    "PLACE",
    "PLAN",
    "RATE",
    "SHARED",
    "TUNER",
    "Finished",
    "finished_of",
    "is_telling",
    "outcome_of",
    "trials_over",
]

# Names of attributes.
PLAN, TUNER, PLACE, MARK, BEGUN = "plan", "tuner", "place", "mark", "begun_s"
OUTCOME, RATE, EARLIER, SHARED = "outcome", "tokens_per_s", "earlier_s", "shared"


@dataclass(frozen=True)
class Finished:
    """A trial that came to an end, and how.

    Attributes:
        earlier_s: seconds in trials of the same plan that failed and that this one took the place of.
        shared: whether a trial of another search may have used the same devices meanwhile.
    """

    number: int
    plan: Plan
    outcome: TrialOutcome
    earlier_s: float = 0.0
    shared: bool = False

    @property
    def seconds(self) -> float:
        """Spent on the plan in all."""
        return self.outcome.duration_s + self.earlier_s


def is_telling(trial: FrozenTrial) -> bool:
    """Whether a trial has an outcome that says something about its plan."""
    attrs = trial.user_attrs
    return OUTCOME in attrs and PLAN in attrs and attrs[OUTCOME]["state"] != "launcher"


def trials_over(trials: Iterable[FrozenTrial], known: Collection[str], me: Tuner) -> set[int]:
    """Finished trials, by number, of searches that were over when this one was started.

    A search that is known is at work. Of one that ran on this machine the trial's start says whether it had begun
    before this process; clocks of machines are never compared, so another's search is over once it isn't known.

    Args:
        known: keys of the tuners that are known.
    """

    def is_over(trial: FrozenTrial) -> bool:
        attrs = trial.user_attrs
        if attrs.get(TUNER) in known or OUTCOME not in attrs:
            return False
        if attrs.get(PLACE) != me.place or attrs.get(MARK) == me.mark:  # elsewhere, or this very process, before
            return True
        return float(attrs.get(BEGUN, 0.0)) < me.started_s

    return {trial.number for trial in trials if is_over(trial)}


def finished_of(trial: FrozenTrial, plan: Plan) -> Finished:
    """A trial of `plan` that ended. Raises UserError if what is stored of it is damaged."""
    outcome = outcome_of(trial)
    try:
        earlier_s, shared = float(trial.user_attrs.get(EARLIER, 0.0)), bool(trial.user_attrs.get(SHARED, False))
        return Finished(trial.number, plan, outcome, earlier_s, shared)
    except (TypeError, ValueError) as error:
        raise UserError(f"the study's database is damaged: trial {trial.number}: {error}") from None


def outcome_of(trial: FrozenTrial) -> TrialOutcome:
    """The stored outcome. Raises UserError if it is none."""
    try:
        return _read_outcome(dict(trial.user_attrs[OUTCOME]))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise UserError(
            f"the study's database is damaged: trial {trial.number} has no whole outcome: {error!r}"
        ) from None


def _read_outcome(values: dict[str, Any]) -> TrialOutcome:
    if (measured := values["measurement"]) is not None:
        ranks = measured["peak_memory_bytes_per_rank"]
        measured = Measurement(**{**measured, "peak_memory_bytes_per_rank": tuple(ranks) if ranks else None})
    if (predicted := values.get("predicted")) is not None:
        predicted = Predicted(**predicted)
    return TrialOutcome(**{**values, "measurement": measured, "predicted": predicted})
