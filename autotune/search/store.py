"""The Optuna study on disk: every trial with its plan and its outcome, safe against the death of any of its tuners."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.profiling.process_tree import end_all, marked
from autotune.profiling.supervised import end_leftovers
from autotune.results.measurement import TrialOutcome
from autotune.schedules import registry
from autotune.search.claims import Claim, Claims
from autotune.search.database import Database
from autotune.search.final_table import read_final, write_final
from autotune.search.judgement import judged_by
from autotune.search.overrun import overrun_bytes, peak_bytes
from autotune.search.pulse import Pulse
from autotune.search.samplers import FIELDS, Observation, fields_of
from autotune.search.stored_trial import (
    BEGUN,
    EARLIER,
    MARK,
    OUTCOME,
    PLACE,
    PLAN,
    RATE,
    SHARED,
    TUNER,
    Finished,
    finished_of,
    is_telling,
    outcome_of,
    trials_over,
)
from autotune.search.tuners import Tuner, Watch, local_clock_s, share_devices
from autotune.space.plan import Plan

__all__ = ["Finished", "Flight", "News", "Store"]

T = TypeVar("T")

_CONSTRAINT = "memory_bytes_over_limit"
_FINAL = "final"
# A trial that says nothing about its plan: Optuna calls it failed and samplers take no notice of it.
_UNINFORMATIVE = ("failed", "invalid", "hang", "killed", "no-result", "non-finite", "launcher")
# A trial with a value: measured on all devices, or profiled on one.
_VALUED = ("ok", "predicted")
# A claim beside those of plans: of the study's final.
_THE_FINAL = "the final"


@dataclass(frozen=True)
class Flight:
    """A trial of another tuner that has not ended, as far as this one knows."""

    plan: Plan
    tuner: Tuner | None
    seconds: float


@dataclass(frozen=True)
class News:
    """What became of the study since it was asked last.

    Attributes:
        finished: trials that count and were not told before, this tuner's own included.
        flights: plans that other tuners are measuring, by fingerprint.
        requeued: plans of dead tuners that are to be measured again.
        notes: what a user should know of it.
    """

    finished: tuple[Finished, ...] = ()
    flights: Mapping[str, Flight] = field(default_factory=dict)
    requeued: tuple[Plan, ...] = ()
    notes: tuple[str, ...] = ()


class Store:
    """One study, as one of its tuners sees it. A trial is begun with a claim on its plan and finished with its outcome.

    Use it in a `with` statement: inside, this tuner is known to the others and gives them signs of life.

    Args:
        plans: the legal plans by fingerprint.
        memory_limit_bytes: limit that makes a plan infeasible; None for no limit.
        grace_s: a tuner that gave no sign of life for so long is taken for dead.
        identity: what the study is about, as this tuner found it.
    """

    def __init__(
        self,
        database: Database,
        study: optuna.Study,
        claims: Claims,
        mark: str,
        plans: Mapping[str, Plan],
        memory_limit_bytes: int | None,
        grace_s: float,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self._identity = identity
        self._database, self._study, self._claims = database, study, claims
        self._plans = plans
        self._limit = memory_limit_bytes
        self._grace_s = grace_s
        self._watch, self._watch_unknown = Watch(claims.me, grace_s), Watch(claims.me, grace_s)
        self._pulse = Pulse(claims, grace_s)
        self._open: dict[int, str] = {}
        self._told: dict[str, int] = {}
        self._in_flight_since: dict[tuple[str, str], float] = {}
        self._requeued: list[Plan] = []
        self._notes: list[str] = []
        self._worst_over = 0.0
        self.predicted_bytes: Mapping[Plan, int] = {}
        """Predicted peaks of plans: they grade an out-of-memory that nobody measured."""
        self.shares_devices = False
        """Whether another tuner, at any time since this one began, may have used the same devices."""
        self._spaces = self._distributions()
        self.study_id = mark
        """Marks the processes of this study."""
        self.left_out = 0
        """Finished trials whose plans are not in the space, as `news` saw it last."""

    def __enter__(self) -> Store:
        try:
            self._claims.join(self._identity)
            self._recover()
            self._pulse.__enter__()
        except BaseException:
            self._database.close()
            raise
        return self

    def __exit__(self, *told: Any) -> None:
        self._pulse.__exit__(*told)
        try:
            # After an error this may fail, too; then the next tuner sees that this one is gone.
            with suppress(Exception):
                for number in list(self._open):
                    self.abandon(number)
                self._claims.leave()
        finally:
            self._database.close()

    @property
    def lost(self) -> bool:
        """Whether others took this tuner for dead: what it measures now doesn't count."""
        return self._pulse.lost

    def others(self) -> list[Tuner]:
        """The other tuners that are known."""
        return [tuner for tuner in self._claims.tuners() if tuner.key != self._claims.me.key]

    def news(self) -> News:
        """What became of the study since the last call. Ends the claims of tuners that died."""
        tuners = self._claims.tuners()
        if self._pulse.lost or all(tuner.key != self._claims.me.key for tuner in tuners):
            self._come_back()
            tuners = self._claims.tuners()
        for tuner in self._watch.dead(tuners):
            self._notes += self._bury(tuner)
        self._note_sharing(tuners)
        claims = self._claims.all()
        if self._free_unknown(claims, tuners):
            claims = self._claims.all()
        requeued, self._requeued = tuple(self._requeued), []
        notes, self._notes = tuple(self._notes), []
        return News(self._new(claims), self._flights(claims, tuners), requeued, notes)

    def begin(
        self,
        plan: Plan,
        fingerprint: str,
        may: Callable[[Mapping[str, Claim]], bool],
        instead_of: Finished | None = None,
    ) -> int | None:
        """Open a trial of `plan`; its number. None if another tuner has the plan, or `may` says no.

        Args:
            may: decides by all claims, the plan's own not among those that count, while no other tuner can make one.
            instead_of: the plan's trial that the new one takes the place of; None too, if it no longer counts.
        """
        if not self._claims.take(fingerprint, may, None if instead_of is None else instead_of.number):
            return None
        earlier_s = 0.0 if instead_of is None else instead_of.seconds
        number = self._run(lambda: self._create(plan, fingerprint, earlier_s))
        self._open[number] = fingerprint
        return number

    def finish(self, number: int, outcome: TrialOutcome, tokens_per_s: float | None) -> bool:
        """Write the outcome of a trial and close it; False if it doesn't count: another tuner took its plan over."""

        self._note_sharing(self._claims.tuners())  # others may have come while it ran

        def write() -> None:
            with suppress(UpdateFinishedTrialError):  # closed by whoever took the plan over
                trial = self._trial(number)
                if self.shares_devices:
                    trial.set_user_attr(SHARED, True)
                trial.set_user_attr(RATE, tokens_per_s)
                trial.set_user_attr(OUTCOME, asdict(outcome))

        fingerprint = self._open[number]
        self._run(write)
        counts = self._claims.settle(fingerprint, number, "launcher" if outcome.state == "launcher" else "done")
        if counts:
            self._told[fingerprint] = number
            self._run(lambda: self._close(number, fingerprint, outcome, tokens_per_s))
        else:
            self._run(lambda: self._fail(number))
        self._open.pop(number, None)
        return counts

    def abandon(self, number: int) -> None:
        """Close a trial that was interrupted: its plan is as good as never tried."""
        fingerprint = self._open.pop(number)
        self._run(lambda: self._fail(number))
        self._claims.drop(fingerprint)

    def over(self) -> set[int]:
        """Finished trials of searches that were over when this one was started."""
        known = {tuner.key for tuner in self._claims.tuners()}
        return self._run(lambda: trials_over(self._study.get_trials(deepcopy=False), known, self._claims.me))

    def take_final(self) -> bool:
        """Whether this tuner is the one to hold the study's final: only one does at a time."""
        return self._claims.take(_THE_FINAL, lambda claims: True)

    def leave_final(self) -> None:
        """The final is over, or was interrupted."""
        self._claims.drop(_THE_FINAL)

    def final(self) -> dict[str, Any] | None:
        """What `save_final` stored last."""

        def read() -> dict[str, Any] | None:
            with self._database.transaction() as connection:
                values = read_final(connection, self._study._study_id)
            # Earlier versions kept it among the attributes of Optuna's study.
            return self._study.user_attrs.get(_FINAL) if values is None else values

        return self._run(read)

    def save_final(self, values: dict[str, Any]) -> bool:
        """Store the study's final, in place of the one before; False if another tuner has taken it over."""
        study = self._study._study_id
        return self._claims.while_mine(_THE_FINAL, lambda connection: write_final(connection, study, values))

    def observations(self, finished: list[Finished], tokens_per_s: Mapping[int, float | None]) -> list[Observation]:
        """What the finished trials (by number: their throughput) tell a sampler."""
        judged = [(one, judged_by(one.outcome, self._limit)) for one in finished]
        measured = [peak_bytes(outcome) for _, outcome in judged]
        self._worst_over = max([0.0, *(float(peak - (self._limit or peak)) for peak in measured if peak is not None)])
        return [
            Observation(
                plan=one.plan,
                value=tokens_per_s.get(one.number) if outcome.state in _VALUED else None,
                constraint=self._over_limit(one.plan, outcome),
                failed=outcome.state in _UNINFORMATIVE,
                peak_bytes=peak_bytes(outcome),
            )
            for one, outcome in judged
        ]

    def _run(self, operation: Callable[[], T]) -> T:
        return self._database.run(operation)

    def _recover(self) -> None:
        """Clean up after tuners that died: close their trials, free their plans, end their processes."""
        ended = end_leftovers(self.study_id)
        if ended:
            self._notes.append(f"ended {ended} processes that a killed search had left")
        tuners = self._claims.tuners()
        for tuner in self._watch.dead(tuners):
            self._bury(tuner)
        trials = self._trials()
        # After the trials: whoever began one of them is here, unless it ended since.
        living = {tuner.key for tuner in self._claims.tuners()}
        outcomes: dict[str, int] = {}
        for trial in trials:
            if is_telling(trial):
                outcomes.setdefault(trial.user_attrs[PLAN], trial.number)
        self._claims.adopt(outcomes)
        self._close_all([trial for trial in trials if trial.user_attrs.get(TUNER) not in living])

    def _bury(self, tuner: Tuner) -> list[str]:
        """Free what a dead tuner held; what is to be noted of it."""
        its, outcomes = self._trials_of(tuner.key)
        freed = self._claims.bury(tuner, outcomes)
        if freed is None:
            return []
        end_leftovers(self.study_id)
        if tuner.place == self._claims.me.place:  # stopped, perhaps: then its trial goes on
            end_all(marked(f"{self.study_id}/{tuner.mark}/"), grace_s=0.0)
        self._close_all(its)
        again = self._requeue(freed)
        return [f"another search ({tuner.describe()}) died{again and '; ' + again}"]

    def _free_unknown(self, claims: Mapping[str, Claim], tuners: list[Tuner]) -> bool:
        """Free plans that are held in the name of no tuner that is known, after the grace; whether any was.

        Should the owner live though it is not known, it notices within that time and gives its trial up.
        """
        known = {tuner.key for tuner in tuners}
        owners = sorted({claim.owner for claim in claims.values() if claim.state == "held"} - known)
        dead = self._watch_unknown.dead(Tuner(owner, "", "", 0, "") for owner in owners)
        for owner in (tuner.key for tuner in dead):
            its, outcomes = self._trials_of(owner)
            if (freed := self._claims.bury_unknown(owner, outcomes)) is None:
                continue
            self._close_all(its)
            again = self._requeue(freed)
            self._notes.append(f"a search that nobody knows held a plan{again and '; ' + again}")
        return bool(dead)

    def _trials_of(self, owner: str) -> tuple[list[FrozenTrial], dict[str, int]]:
        """All trials of a tuner, and the numbers of those that say something, by their plans."""
        its = [trial for trial in self._trials() if trial.user_attrs.get(TUNER) == owner]
        return its, {trial.user_attrs[PLAN]: trial.number for trial in its if is_telling(trial)}

    def _requeue(self, freed: list[str]) -> str:
        """Have plans measured again that are free now; what is to be said of it."""
        plans = [self._plans[fingerprint] for fingerprint in freed if fingerprint in self._plans]
        self._requeued += plans
        return " and ".join(plan.describe() for plan in plans) + " is measured again" if plans else ""

    def _come_back(self) -> None:
        """Others took this tuner for dead, because it was stopped for long: its claims are gone."""
        self._claims.rejoin(uuid.uuid4().hex, self._identity)
        self._watch.me = self._watch_unknown.me = self._claims.me
        self._pulse.lost = False

    def _close_all(self, trials: list[FrozenTrial]) -> None:
        """Close trials that nobody will close: by their outcome if it counts, else as failed."""
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        claims = self._claims.all() if running else {}
        for trial in running:
            claim = claims.get(trial.user_attrs.get(PLAN, ""))
            if claim is not None and claim.trial == trial.number and OUTCOME in trial.user_attrs:
                outcome, rate = outcome_of(trial), trial.user_attrs.get(RATE)
                self._run(lambda t=trial, o=outcome, r=rate: self._close(t.number, t.user_attrs[PLAN], o, r))  # type: ignore[misc]
            else:
                self._run(lambda t=trial: self._fail(t.number))  # type: ignore[misc]

    def _new(self, claims: Mapping[str, Claim]) -> tuple[Finished, ...]:
        """Trials that count, in the order they began, and were not told before."""
        ended = {f: claim.trial for f, claim in claims.items() if claim.trial is not None}
        self.left_out = sum(f not in self._plans for f in ended)
        new = {f: number for f, number in ended.items() if f in self._plans and self._told.get(f) != number}
        if not new:
            return ()
        trials = {trial.number: trial for trial in self._trials()}
        found = []
        for fingerprint, number in sorted(new.items(), key=lambda item: item[1]):
            self._told[fingerprint] = number
            found.append(finished_of(trials[number], self._plans[fingerprint]))
        return tuple(found)

    def _flights(self, claims: Mapping[str, Claim], tuners: list[Tuner]) -> dict[str, Flight]:
        me, now = self._claims.me.key, time.monotonic()
        held = [c for c in claims.values() if c.state == "held" and c.owner != me and c.fingerprint in self._plans]
        since = {(c.fingerprint, c.owner): self._in_flight_since.get((c.fingerprint, c.owner), now) for c in held}
        self._in_flight_since = since
        who = {tuner.key: tuner for tuner in tuners}
        return {
            c.fingerprint: Flight(self._plans[c.fingerprint], who.get(c.owner), now - since[c.fingerprint, c.owner])
            for c in held
        }

    def _note_sharing(self, tuners: list[Tuner]) -> None:
        for tuner in tuners:
            if tuner.key != self._claims.me.key and not self.shares_devices and share_devices(tuner, self._claims.me):
                self.shares_devices = True
                self._notes.append(
                    f"another search ({tuner.describe()}) may use the same devices: plans that run at the same time "
                    "compete for them; give each search its own, by CUDA_VISIBLE_DEVICES or taskset"
                )

    def _create(self, plan: Plan, fingerprint: str, earlier_s: float) -> int:
        me = self._claims.me
        attrs = {PLAN: fingerprint, TUNER: me.key, PLACE: me.place, MARK: me.mark, BEGUN: local_clock_s()}
        values = fields_of(plan)
        spaces = {name: space for name, space in self._spaces.items() if _holds(space, values[name])}
        template = create_trial(
            state=TrialState.RUNNING,
            params={name: values[name] for name in spaces},
            distributions=spaces,
            user_attrs=attrs | ({EARLIER: earlier_s} if earlier_s else {}),
        )
        storage = self._study._storage
        return storage.get_trial_number_from_id(storage.create_new_trial(self._study._study_id, template))

    def _distributions(self) -> dict[str, BaseDistribution]:
        """What Optuna is told of the fields, wide enough that lists can be widened: its categories may never change."""
        most = 2**31 - 1
        spaces: dict[str, BaseDistribution] = {name: IntDistribution(1, most) for name in FIELDS}
        spaces["schedule"] = CategoricalDistribution(tuple(registry.SCHEDULES))
        spaces["recompute"] = CategoricalDistribution(("none", "full"))
        # Those of a study that another version began stay as they are; what they can't say is left to the plan itself.
        for trial in self._trials():
            if trial.distributions:
                return {
                    name: _compatible(trial.distributions[name], space)
                    for name, space in spaces.items()
                    if name in trial.distributions
                }
        return spaces

    def _close(self, number: int, fingerprint: str, outcome: TrialOutcome, tokens_per_s: float | None) -> None:
        with suppress(UpdateFinishedTrialError, ValueError):  # somebody else closed it meanwhile
            if (over := self._over_limit(self._plans.get(fingerprint), outcome)) is not None:
                self._trial(number).set_constraint(_CONSTRAINT, over)
            if outcome.state in _VALUED:
                self._study.tell(number, tokens_per_s, skip_if_finished=True)
            else:
                uninformative = outcome.state in _UNINFORMATIVE
                state = TrialState.FAIL if uninformative else TrialState.PRUNED
                self._study.tell(number, state=state, skip_if_finished=True)

    def _fail(self, number: int) -> None:
        with suppress(UpdateFinishedTrialError, ValueError):
            self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _trials(self) -> list[FrozenTrial]:
        return self._run(lambda: self._study.get_trials(deepcopy=False))

    def _trial(self, number: int) -> optuna.Trial:
        storage = self._study._storage
        return optuna.Trial(self._study, storage.get_trial_id_from_study_id_trial_number(self._study._study_id, number))

    def _over_limit(self, plan: Plan | None, outcome: TrialOutcome) -> float | None:
        predicted = None if plan is None else self.predicted_bytes.get(plan)
        return overrun_bytes(outcome, self._limit, predicted, self._worst_over)


def _compatible(stored: BaseDistribution, wanted: BaseDistribution) -> BaseDistribution:
    return wanted if isinstance(stored, IntDistribution) and isinstance(wanted, IntDistribution) else stored


def _holds(space: BaseDistribution, value: Any) -> bool:
    return not isinstance(space, CategoricalDistribution) or value in space.choices
