"""Failed plans that are run again on wish: which ones, and what their new rows say of the failure before.

A plan is run again in place of one trial, the one that this search saw when it joined: a claim on it is given only
while that trial is the one that counts. So of searches that all retry, one runs the plan, and its outcome is the last
word.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from autotune.results.measurement import TrialOutcome
from autotune.results.text import first_line
from autotune.search.stored_trial import Finished

__all__ = ["Retry", "with_failure"]

_FAILED = ("failed", "timeout", "hang", "killed", "no-result", "non-finite", "invalid")
"""Failed launches are not among these: they are tried again unasked."""

_MARK = "tried again: "


@dataclass(frozen=True)
class Retry:
    """The failures that are run again: of each plan, by fingerprint, the trial that a new one takes the place of."""

    trials: Mapping[str, int]

    def waits(self, fingerprint: str, one: Finished | None) -> bool:
        """Whether `one`, the trial of the plan that counts now, is still to be replaced."""
        return one is not None and self.trials.get(fingerprint) == one.number

    @staticmethod
    def of(ended: Mapping[str, Finished], over: Iterable[int]) -> Retry:
        """The failures among trials that ended.

        Args:
            ended: by the fingerprint of the plan.
            over: trials of searches that were over when this one began: what the others ran is their own last word.
        """
        before = set(over)
        failed = {f: one.number for f, one in ended.items() if one.outcome.state in _FAILED}
        return Retry({f: number for f, number in failed.items() if number in before})


def with_failure(before: Finished, outcome: TrialOutcome) -> TrialOutcome:
    """The outcome of the new trial, whose reason ends with a line for each failure before it."""
    lines = before.outcome.reason.splitlines()
    earlier = [line for line in lines if line.startswith(_MARK)]
    own = first_line("\n".join(line for line in lines if not line.startswith(_MARK)))
    line = f"{_MARK}trial {before.number} was {before.outcome.state}" + (f": {own}" if own else "")
    return replace(outcome, reason="\n".join([*filter(None, [outcome.reason]), *earlier, line]))
