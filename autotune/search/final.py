"""Holds the final of a study: its best plans and its baselines are measured again, in turns, each in fresh processes.

Every launch is stored before the next begins, so a final that is cut short goes on where it stood.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.final import LEAST_ROUNDS, Final, FinalLaunch, Lineup, pick_lineup, too_few
from autotune.results.measurement import TrialOutcome
from autotune.results.text import first_line
from autotune.search.observer import Observer
from autotune.space.plan import Plan

__all__ = [
    "TAKEN_OVER",
    "FinalKeeper",
    "Held",
    "Measure",
    "final_folder",
    "final_to_hold",
    "hold_final",
    "least_launches",
    "stored_final",
]


class FinalKeeper(Protocol):
    """Where the final of a study is stored."""

    def final(self) -> dict[str, Any] | None:
        """What `save_final` stored last."""

    def save_final(self, values: dict[str, Any]) -> bool:
        """Store a final in place of the one before; False if another search holds the final now."""


TAKEN_OVER = "no final here: this search gave no sign of life for so long that another took the final over"

Measure = Callable[[int, int, Plan], TrialOutcome | None]
"""Measures a plan in fresh processes, given its trial's number and the round; None if it was interrupted."""


@dataclass(frozen=True)
class Held:
    """What became of a final.

    Attributes:
        final: as far as it came; None without one.
        interrupted: whether an interrupt ended it.
        remark: why there is none, why it isn't finished, or why it decided nothing; empty if it decides, or none was
            wanted.
    """

    final: Final | None
    interrupted: bool = False
    remark: str = ""


def final_folder(logs: Path, trial: int, number: int) -> Path:
    """Where request, reports and logs of one launch lie: `logs/final-0003/round-1`."""
    return logs / f"final-{trial:04d}" / f"round-{number}"


def stored_final(keeper: FinalKeeper) -> Final | None:
    """The final that a study has so far.

    Raises:
        UserError: what is stored is damaged.
    """
    values = keeper.final()
    if values is None:
        return None
    try:
        return Final.from_dict(values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"the final in the study's database is damaged, or of another version: {error}") from None


def final_to_hold(lineup: Lineup, top: int, most_rounds: int, so_far: Final | None, again: bool = False) -> Final:
    """The final of a lineup to go on with, which may be over, or to begin; the arguments are those of `hold_final`."""
    if so_far is not None and so_far.lineup == lineup and not (again and so_far.decided_nothing):
        return replace(so_far, top=top, most_rounds=max(most_rounds, so_far.most_rounds))
    return Final(lineup, top, most_rounds, earlier_s=0.0 if so_far is None else so_far.spent_s)


def least_launches(final: Final) -> int:
    """How many launches a final needs yet at least; 0 if it is over."""
    if final.upcoming() is None:
        return 0
    in_it = [plan for plan in final.lineup.plans if plan not in final.lost]
    made = {(launch.round, launch.fingerprint) for launch in final.launches}
    wanted = {(number, plan) for number in range(1, LEAST_ROUNDS + 1) for plan in in_it}
    return max(1, len(wanted - made))  # beyond the least rounds each further one hangs on the one before


def hold_final(
    rows: Sequence[Row],
    plans: Mapping[str, Plan],
    top: int,
    most_rounds: int,
    so_far: Final | None,
    measure: Measure,
    keep: Callable[[Final], bool],
    budget_spent: Callable[[Final], str],
    observer: Observer,
    again: bool = False,
) -> Held:
    """Hold the final between the plans that the rows of a study call for, or finish the one that it has.

    Args:
        plans: by fingerprint.
        top: how many of the fastest plans take part beside the baselines.
        most_rounds: rounds after which it ends in any case. A final that was begun with more keeps to those.
        so_far: the study's final. One between other plans is over; its time counts on.
        keep: stores the final after every launch; False if another search took it over.
        budget_spent: which budget of the study leaves no time for another launch; empty if none is spent.
        again: hold a final anew that no plan got through. Its time counts on, too.
    """
    lineup = pick_lineup(rows, top)
    if few := too_few(lineup):
        old = "" if so_far is None else "; the one before was between other plans, so it doesn't count"
        return Held(so_far, remark=f"no final: {few}{old}")
    final = final_to_hold(lineup, top, most_rounds, so_far, again)
    by_fingerprint = {row.fingerprint: row for row in rows}
    upcoming, announced = final.upcoming(), False
    # Another number of plans may have been asked for, which are the same ones.
    if upcoming is None and final != so_far and not keep(final):
        return Held(so_far, remark=TAKEN_OVER)
    while upcoming is not None:
        if spent := budget_spent(final):
            begun = f"the final was cut short after {final.progress}" if final.launches else "no final"
            return Held(final if final.launches else so_far, remark=f"{begun}: {spent}")
        if not announced:
            observer.note(_begins(final))
            announced = True
        number, fingerprint = upcoming
        row = by_fingerprint[fingerprint]
        outcome = measure(row.trial or 0, number, plans[fingerprint])
        if outcome is None:
            remark = f"the final was interrupted after {final.progress}; --resume goes on with it"
            return Held(final if final.launches else so_far, interrupted=True, remark=remark)
        launch = _launch_of(number, fingerprint, outcome)
        final = final.with_launch(launch)
        if not keep(final):
            return Held(so_far, remark=TAKEN_OVER)
        observer.note(f"final, round {number}: {row.describe()}: {_told(launch)}")
        upcoming = final.upcoming()
    return Held(final, remark=final.decided_nothing)


def _launch_of(number: int, fingerprint: str, outcome: TrialOutcome) -> FinalLaunch:
    step_s = outcome.measurement.step_time_s if outcome.state == "ok" and outcome.measurement is not None else None
    return FinalLaunch(number, fingerprint, outcome.state, outcome.reason, step_s, outcome.started, outcome.duration_s)


def _begins(final: Final) -> str:
    what = f"{len(final.lineup.plans)} plans in turns, each in fresh processes"
    return f"final, {final.progress}: {what}"


def _told(launch: FinalLaunch) -> str:
    if launch.state == "ok":
        return f"step {(launch.step_time_s or 0.0) * 1000:.1f} ms"
    return f"{launch.state}: {first_line(launch.reason)}" + (
        "" if launch.state == "launcher" else "; it falls out of the final"
    )
