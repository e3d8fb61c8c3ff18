"""What a study may spend, over all its tuners and resumes, and what is left of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from autotune.search.claims import Claim
from autotune.search.observer import Outlook
from autotune.search.options import Ended, SearchOptions
from autotune.search.store import Finished, Flight
from autotune.space.plan import Plan

__all__ = ["Budget", "Spent"]

_NOTHING: Mapping[str, int] = MappingProxyType({})
_MOST_FOR_FINAL = 1 / 3
"""Share of a budget of time that is kept for the final at most."""


@dataclass(frozen=True)
class Spent:
    """What a study has spent, trials in flight included.

    Attributes:
        done: finished trials.
        in_flight: trials of other tuners that go on.
        seconds: in trials, failures that were run again included, and in the final.
        device_hours: the same, times the devices of each.
        tuners: at work now.
    """

    done: int
    in_flight: int
    seconds: float
    device_hours: float
    trial_s: float
    trial_device_hours: float
    tuners: int

    @property
    def trials(self) -> int:
        """Trials that count."""
        return self.done + self.in_flight


class Budget:
    """The budgets of a study.

    Args:
        plans: of the space, by fingerprint; trials of other plans don't count.
    """

    def __init__(self, options: SearchOptions, plans: Mapping[str, Plan]) -> None:
        self._trials, self._timeout_s = options.trials, options.timeout_s
        self._device_hours, self._plans = options.device_hours, plans
        self._devices = max((plan.devices for plan in plans.values()), default=0)
        # A profile measures on one device, whatever the plan would need.
        self._profiles = options.fidelity == "profile"

    def spent(
        self,
        finished: Collection[Finished],
        flights: Collection[Flight],
        final_s: float,
        final_device_hours: float,
        retried: Collection[Finished] = (),
    ) -> Spent:
        """What has been spent.

        Args:
            retried: failures that are being run again, or are to be: their time was spent, but they are no trials.
        """
        earlier_s = sum(one.earlier_s for one in finished) + sum(one.seconds for one in retried)
        earlier_hours = sum(self._hours(one.plan, one.earlier_s) for one in finished)
        earlier_hours += sum(self._hours(one.plan, one.seconds) for one in retried)
        trial_s = sum(one.outcome.duration_s for one in finished)
        hours = sum(self._hours(one.plan, one.outcome.duration_s) for one in finished)
        return Spent(
            done=len(finished),
            in_flight=len(flights),
            seconds=trial_s + earlier_s + sum(flight.seconds for flight in flights) + final_s,
            device_hours=hours
            + earlier_hours
            + sum(self._hours(one.plan, one.seconds) for one in flights)
            + final_device_hours,
            trial_s=trial_s,
            trial_device_hours=hours,
            tuners=1 + len({flight.tuner for flight in flights if flight.tuner is not None}),
        )

    def ended(self, spent: Spent, final_s: float = 0.0) -> Ended | None:
        """Which budget is spent; trials in flight count for time, but may yet fail to become trials.

        Args:
            final_s: what the final takes. So much of a budget of time is kept for it, at most a third.
        """
        if self._trials is not None and spent.done >= self._trials:
            return "trials"
        kept_s = min(final_s, _MOST_FOR_FINAL * (self._timeout_s or 0.0))
        kept_hours = min(final_s * self._devices / 3600, _MOST_FOR_FINAL * (self._device_hours or 0.0))
        return self.time_ended(spent.seconds + kept_s, spent.device_hours + kept_hours)

    def time_ended(self, seconds: float, device_hours: float) -> Ended | None:
        """Which budget of time is spent."""
        if self._timeout_s is not None and seconds >= self._timeout_s:
            return "timeout"
        if self._device_hours is not None and device_hours >= self._device_hours:
            return "device-hours"
        return None

    def may_begin(self, spent: Spent) -> bool:
        """Whether another trial may begin beside those in flight."""
        return self._trials is None or spent.trials < self._trials

    def allows(
        self, claims: Mapping[str, Claim], again: Collection[str], retried: Mapping[str, int] = _NOTHING
    ) -> bool:
        """The same, by all claims of the study; asked while none can change.

        Args:
            again: plans whose failed launches count no more, because they are to be launched again.
            retried: trials that count no more, because they are to be replaced, by the fingerprints of their plans.
        """
        if self._trials is None:
            return True

        def counts(claim: Claim) -> bool:
            if claim.state == "launcher" and claim.fingerprint in again:
                return False
            replaced = claim.state == "done" and retried.get(claim.fingerprint) == claim.trial
            return claim.fingerprint in self._plans and not replaced

        return sum(map(counts, claims.values())) < self._trials

    def outlook(self, spent: Spent, left: int) -> Outlook:
        """Where a study stands whose plans that are not measured yet are so many, those in flight included."""
        goal = spent.done + left
        if self._trials is not None:
            goal = max(spent.done, min(self._trials, goal))
        seconds = None
        if spent.done:
            each_s, each_hours = spent.trial_s / spent.done, spent.trial_device_hours / spent.done
            coming = float(goal - spent.done)
            if self._device_hours is not None and each_hours > 0:
                coming = min(coming, max(0.0, self._device_hours - spent.device_hours) / each_hours)
            if self._timeout_s is not None and each_s > 0:
                coming = min(coming, max(0.0, self._timeout_s - spent.seconds) / each_s)
            seconds = each_s * coming / spent.tuners
        return Outlook(spent.done, goal, seconds, spent.device_hours, self._device_hours)

    def reason(self, ended: Ended) -> str:
        """Of plans that had no trial because a budget was spent."""
        return {
            "trials": f"the budget of {self._trials} trials is spent",
            "timeout": f"the time of {_number(self._timeout_s)} s is spent",
            "device-hours": f"the budget of {_number(self._device_hours)} device-hours is spent",
        }.get(ended, "")

    def _hours(self, plan: Plan, seconds: float) -> float:
        return seconds * (1 if self._profiles else plan.devices) / 3600


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"
