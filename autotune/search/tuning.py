"""One tuner at work on a study, beside others perhaps: picks plans, has them evaluated, keeps the table up to date."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autotune.errors import UserError
from autotune.profiling.supervised import owner_mark
from autotune.results.columns import Row
from autotune.results.final import Final, pick_lineup, too_few
from autotune.results.measurement import TrialOutcome
from autotune.results.rows import row_of
from autotune.results.verdict import fastest
from autotune.search.book import Book
from autotune.search.budget import Budget, Spent
from autotune.search.early_stop import FIRST_TRIALS, common_failure
from autotune.search.evaluators import Evaluator, PlanRunner
from autotune.search.final import (
    TAKEN_OVER,
    Held,
    final_folder,
    final_to_hold,
    hold_final,
    least_launches,
    stored_final,
)
from autotune.search.folder_lock import table_lock
from autotune.search.interrupt import Interrupt
from autotune.search.judgement import judged_by
from autotune.search.observer import Observer, Outlook
from autotune.search.options import Ended, SearchOptions, SearchResult
from autotune.search.retry import Retry, with_failure
from autotune.search.samplers import Proposer, baselines, make_proposer
from autotune.search.store import Finished, Flight, Store
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Tuning"]

_FIRST_NAP_S, _LONGEST_NAP_S = 0.1, 1.0
_RAN = ("ok", "predicted")
# Plans of a baseline's schedule that are tried unasked until one of them runs.
_MOST_BASELINES = 3


@dataclass
class Tuning:
    """One run of a study: everything that changes while it goes on.

    Attributes:
        by_plan: trials that count, of all tuners, by the fingerprint of their plan.
        fresh: trials that ended during this run, in the order they were told.
        given_up: plans whose launches failed in this run; another run, or another tuner, may try them again.
        flights: what other tuners are measuring.
        first: plans to be measured before the sampler is asked.
        final_before: the study's final as this run found it.
        retry: failures of earlier searches that are run again.
    """

    space: Space
    options: SearchOptions
    store: Store
    book: Book
    evaluator: Evaluator
    observer: Observer
    interrupt: Interrupt
    by_plan: dict[str, Finished] = field(default_factory=dict)
    fresh: list[Finished] = field(default_factory=list)
    given_up: set[str] = field(default_factory=set)
    flights: Mapping[str, Flight] = field(default_factory=dict)
    first: list[Plan] = field(default_factory=list)
    final_before: Final | None = None
    retry: Retry = field(default_factory=lambda: Retry({}))
    met_others: bool = False
    asked_with: tuple[int, frozenset[Plan]] = (-1, frozenset())

    def __post_init__(self) -> None:
        self.budget = Budget(self.options, self.book.plans)
        self.proposer = self._make_proposer()
        self.store.predicted_bytes = {
            plan: told.predicted.peak_memory_bytes for plan, told in self.book.forecasts.items()
        }

    def run(self) -> SearchResult:
        """Search until nothing is left, a budget is spent, or an interrupt."""
        self._begin()
        ended: Ended = "interrupted"
        waiting = f"not {self._done_word} yet"
        try:
            ended = self._loop(waiting)
            waiting = self._why_waiting(ended)
        finally:
            self.evaluator.close()
            # Also when the database fails or Ctrl-C is hit twice: what is known goes into the table.
            rows = self._write(waiting)
        held = Held(self.book.final)
        if self.options.finalists and ended not in ("interrupted", "failing"):
            held = self._final(rows)
            ended = "interrupted" if held.interrupted else ended
            rows = self._write(waiting)
        why = {"converged": self.proposer.why_stopped, "failing": self._common_failure()}.get(ended, "")
        legal, fidelity = len(self.book.plans), self.options.fidelity
        return SearchResult(ended, rows, legal, fidelity, why=why, final=held.final, no_final=held.remark)

    @property
    def finished(self) -> list[Finished]:
        """Trials that count, in the order they began; those of plans that are tried again, or being so, are none."""
        again = {*self._again(), *self.flights}
        told = [one for fingerprint, one in self.by_plan.items() if fingerprint not in again]
        return sorted(told, key=lambda one: one.number)

    def _begin(self) -> None:
        self._sync(show=False)
        self.book.final = self.final_before = stored_final(self.store)
        if finished := self.finished:
            done = "profiled" if self.options.fidelity == "profile" else "measured"
            self.observer.note(f"resuming with {len(finished)} {done} plans")
        if self.store.left_out:
            self.observer.note(
                f"{self.store.left_out} measured plans are no longer in the space: their rows are kept out of the table"
            )
        self.fresh.clear()
        self._note_estimates()
        if self.options.retry_failed:
            self._retry_failed()
        # A launch that failed before is tried again first, then what every comparison needs.
        again = [self.book.plans[fingerprint] for fingerprint in self._again()]
        self.first = [*self.first, *again, *self._baselines()]

    def _retry_failed(self) -> None:
        self.retry = Retry.of(self.by_plan, self.store.over())
        count = len(self.retry.trials)
        self.observer.note(
            f"running {count} failed plans again" if count else "no failed plans of earlier searches to run again"
        )

    def _loop(self, waiting: str) -> Ended:
        nap_s = _FIRST_NAP_S
        while True:
            self._sync()
            ended = self._ended()
            plan = None if ended is not None else self._next()
            if ended is None and plan is None and self.proposer.why_stopped:
                ended = "converged"
            if ended is not None and (ended in ("interrupted", "failing") or not self.flights):
                return ended
            if plan is None or ended is not None:
                # Others are at it: should one of them die, its plan is measured here.
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
                continue
            nap_s = _FIRST_NAP_S
            if not self._try(plan):
                return "interrupted"
            if self.book.is_due():
                self._write(waiting, at_last=False)

    def _sync(self, show: bool = True) -> None:
        """Take notice of what other tuners did."""
        news = self.store.news()
        for note in news.notes:
            self.observer.note(note)
        self.flights = news.flights
        self.met_others = self.met_others or bool(news.flights)
        self.first = [*news.requeued, *self.first]
        rows = [self._remember(one) for one in news.finished]
        self._apply_history(rows)
        if show:
            for row in rows:
                self.observer.trial_ended(row, fastest(tuple(self.book.rows.values())), self._outlook())

    def _next(self) -> Plan | None:
        """The plan to measure now; None if there is none at the moment, or at all: then the proposer says why."""
        left = self._left()
        if not left or not self.budget.may_begin(self._spent()):
            return None
        free = set(left)
        self.first = [plan for plan in self.first if plan in free or self.space.fingerprint(plan) in self.flights]
        if (plan := next((plan for plan in self.first if plan in free), None)) is not None:
            return plan
        finished = self.finished
        if (plan := self._missing_baseline(left)) is not None:
            return plan
        asked_with = (len(finished), frozenset(left))
        if self.proposer.why_stopped and self.asked_with == asked_with:
            return None  # nothing is known or free that wasn't when it was asked
        self.asked_with = asked_with
        # Launches that failed say nothing of the plan, nor of alike ones.
        telling = [one for one in finished if one.outcome.state != "launcher"]
        throughput = {one.number: _rate(self._row(one)) for one in telling}
        flights = [flight.plan for flight in self.flights.values()]
        return self.proposer.propose(left, self.store.observations(telling, throughput), flights)

    def _missing_baseline(self, left: list[Plan]) -> Plan | None:
        """The next best plan of a baseline's schedule as long as none of them ran within its limits, a few at most."""
        if self.options.sampler == "grid":
            return None
        rows = self.book.rows.values()
        ran = {row.schedule for row in rows if row.state in _RAN}
        under_way = {flight.plan.schedule for flight in self.flights.values()}
        tried = Counter(row.schedule for row in rows)
        wanted = [
            plan for plan in left if plan.schedule not in ran | under_way and tried[plan.schedule] < _MOST_BASELINES
        ]
        return next(iter(self._baselines_among(wanted)), None) if wanted else None

    def _left(self) -> list[Plan]:
        """Plans that wait for a trial and that nobody is measuring."""
        waiting = self.book.left() | {fingerprint: self.book.plans[fingerprint] for fingerprint in self._again()}
        return [plan for fingerprint, plan in waiting.items() if fingerprint not in self.flights]

    def _again(self) -> list[str]:
        """Plans of which nothing is known but that launches failed, here not yet, and failures that are run again."""
        return [
            fingerprint
            for fingerprint, one in self.by_plan.items()
            if (one.outcome.state == "launcher" and fingerprint not in self.given_up)
            or self.retry.waits(fingerprint, one)
        ]

    def _ended(self) -> Ended | None:
        """Why no other trial is begun; trials of other tuners may go on."""
        if self.interrupt:
            return "interrupted"
        if self._common_failure():
            return "failing"
        if not self._left() and not self.flights:
            return "complete"
        return self.budget.ended(self._spent(), self._final_s())

    def _final_s(self) -> float:
        """Seconds that a final between the plans of now, or what is left of it, takes at least; 0 without one."""
        rows = tuple(self.book.rows.values())
        if not self.options.finalists or too_few(lineup := pick_lineup(rows, self.options.finalists)):
            return 0.0
        again = self.book.final == self.final_before
        final = final_to_hold(lineup, self.options.finalists, self.options.final_rounds, self.book.final, again)
        # Ranks are started for every launch; the longest trial was one for which they were.
        each_s = max(row.duration_s or 0.0 for row in rows if row.state == "ok")
        return least_launches(final) * each_s

    def _try(self, plan: Plan) -> bool:
        """Evaluate one plan and store how it ended; False if the search was interrupted first."""
        fingerprint, again = self.space.fingerprint(plan), set(self._again())
        before = self.by_plan.get(fingerprint)
        before = before if self.retry.waits(fingerprint, before) else None
        retried = self.retry.trials
        number = self.store.begin(plan, fingerprint, lambda claims: self.budget.allows(claims, again, retried), before)
        if number is None:
            return True  # another tuner was faster
        self.observer.trial_begins(number, plan, self._outlook())
        outcome = self.evaluator.evaluate(number, plan, lambda: bool(self.interrupt) or self.store.lost)
        if outcome is None:
            self.store.abandon(number)
            return not self.interrupt
        if before is not None:
            outcome = with_failure(before, outcome)
        finished = Finished(number, plan, outcome, 0.0 if before is None else before.seconds)
        if not self.store.finish(number, outcome, _rate(self._row(finished))):
            self.observer.note(
                f"trial {number}: this search gave no sign of life for so long that another took the plan over; "
                "the result is discarded"
            )
            return True
        if outcome.state == "launcher":
            self.given_up.add(fingerprint)
        row = self._remember(replace(finished, shared=self.store.shares_devices))
        self._apply_history([row])
        self.observer.trial_ended(row, fastest(tuple(self.book.rows.values())), self._outlook())
        return True

    def _remember(self, finished: Finished) -> Row:
        row = self._row(finished)
        self.by_plan[row.fingerprint] = finished
        self.fresh.append(finished)
        self.book.rows[row.fingerprint] = row
        return row

    def _apply_history(self, rows: list[Row]) -> None:
        if self.options.fidelity == "run" and any(row.state == "oom" for row in rows):
            # Beside a trial of another tuner on the same device, running out of memory proves nothing of the plan.
            proving = {fingerprint for fingerprint, one in self.by_plan.items() if not one.shared}
            for reason in self.book.refuse_by_history(proving):
                self.observer.note(f"refused without a trial: {reason}")

    def _row(self, finished: Finished) -> Row:
        plan, told = finished.plan, self.book.forecasts.get(finished.plan)
        limit = self.space.cluster.memory_limit_bytes
        return row_of(
            finished.number,
            plan,
            self.space.fingerprint(plan),
            judged_by(finished.outcome, limit, self.options.refuses),
            self.space.model,
            self.space.training,
            self.options.fidelity,
            None if told is None else told.predicted,
            limit,
        )

    def _write(self, waiting: str, at_last: bool = True) -> tuple[Row, ...]:
        """Replace the table by one that knows all that the database does."""
        with table_lock(self.book.folder.path) as held:
            try:
                self._sync()
                self.book.final = stored_final(self.store)
            except UserError:
                if not at_last:
                    raise
                if self.met_others:  # theirs may be the newer table
                    return self.book.table(waiting)
            if not held and not at_last:
                return self.book.table(waiting)
            return self.book.write(waiting)

    def _make_proposer(self) -> Proposer:
        predicted = {plan: told.predicted for plan, told in self.book.forecasts.items()}
        limit = self.space.cluster.memory_limit_bytes
        return make_proposer(self.options.sampler, tuple(self.book.plans.values()), self.options.seed, predicted, limit)

    def _final(self, rows: tuple[Row, ...]) -> Held:
        """The study's final, held by one tuner alone."""
        if not self.store.take_final():
            return Held(self.book.final, remark="no final here: another search holds it")
        try:
            self.book.final = stored_final(self.store)
            held = self._hold_final(rows)
            if held.interrupted and not self.interrupt:  # the launch was ended because the final is another's now
                held = replace(held, interrupted=False, remark=TAKEN_OVER)
            return replace(held, final=stored_final(self.store)) if held.remark == TAKEN_OVER else held
        finally:
            self.store.leave_final()

    def _hold_final(self, rows: tuple[Row, ...]) -> Held:
        """The final between the plans that `rows` call for, in fresh processes; it goes to the book as it grows."""
        logs = self.book.folder.logs
        runner = PlanRunner(self.space, replace(self.options, isolation="trial"), logs, owner_mark(self.store.study_id))

        def measure(trial: int, number: int, plan: Plan) -> TrialOutcome | None:
            where = final_folder(logs, trial, number)
            return runner.evaluate_in(where, trial, plan, lambda: bool(self.interrupt) or self.store.lost)

        def keep(final: Final) -> bool:
            if not self.store.save_final(final.to_dict()):
                return False
            self.book.final = final
            self.book.write_final(rows)
            return True

        try:
            return hold_final(
                rows,
                self.book.plans,
                self.options.finalists,
                self.options.final_rounds,
                self.book.final,
                measure,
                keep,
                self._budget_spent,
                self.observer,
                # Not what another search held just now: whoever wants it anew starts a search for it.
                again=self.book.final == self.final_before,
            )
        finally:
            runner.close()

    def _budget_spent(self, final: Final) -> str:
        """Which budget of time leaves none for another launch of the final; empty if none is spent."""
        spent = self._spent(final)
        ended = self.budget.time_ended(spent.seconds, spent.device_hours)
        return "" if ended is None else self.budget.reason(ended)

    def _spent(self, final: Final | None = None) -> Spent:
        final = final or self.book.final
        final_s = 0.0 if final is None else final.spent_s
        hours = final_s * self.space.cluster.devices / 3600
        counted = self.finished
        numbers = {one.number for one in counted}
        again = [o for o in self.by_plan.values() if o.number not in numbers and o.outcome.state != "launcher"]
        return self.budget.spent(counted, tuple(self.flights.values()), final_s, hours, again)

    def _outlook(self) -> Outlook:
        return self.budget.outlook(self._spent(), len(self._left()) + len(self.flights))

    def _common_failure(self) -> str:
        """How the first trials of this run failed alike; empty if they didn't, or that doesn't matter."""
        if self.options.keep_going or any(row.state in ("ok", "predicted") for row in self.book.rows.values()):
            return ""
        # Of other tuners a failed launch may be the fault of their machine.
        own = [one for one in self.fresh if one.outcome.state != "launcher" or self._is_given_up(one)]
        first = common_failure(own)
        if first is None:
            return ""
        line = first.outcome.reason.splitlines()[0] if first.outcome.reason else ""
        return (
            f"the first {FIRST_TRIALS} trials all failed alike, as trial {first.number}: {first.outcome.state}: {line}"
        )

    def _is_given_up(self, one: Finished) -> bool:
        return self.space.fingerprint(one.plan) in self.given_up

    @property
    def _done_word(self) -> str:
        return "profiled" if self.options.fidelity == "profile" else "run"

    def _why_waiting(self, ended: Ended) -> str:
        """Why plans are left, for their rows."""
        if ended == "interrupted" and self.store.others():
            return f"not {self._done_word} yet"
        causes = {
            "complete": "",
            "converged": self.proposer.why_stopped,
            "failing": self._common_failure(),
            "interrupted": "the search was interrupted",
        }
        kept = " or kept for the final" if ended in ("timeout", "device-hours") and self.options.finalists else ""
        return f"not {self._done_word}: {causes.get(ended) or self.budget.reason(ended) + kept}"

    def _note_estimates(self) -> None:
        refused = sum(fingerprint not in self.book.rows for fingerprint in self.book.estimates)
        if refused:
            self.observer.note(
                f"{refused} of {len(self.book.plans)} legal plans are refused by the estimate of their memory; "
                "--no-refuse-by-estimate tries them"
            )

    def _baselines(self) -> list[Plan]:
        estimates = self.book.estimates
        return self._baselines_among([plan for f, plan in self.book.plans.items() if f not in estimates])

    def _baselines_among(self, plans: Sequence[Plan]) -> list[Plan]:
        predicted = {plan: told.predicted for plan, told in self.book.forecasts.items()}
        return baselines(plans, predicted, self.space.cluster.memory_limit_bytes)


def _rate(row: Row) -> float | None:
    """What the sampler maximises: measured tokens/s, or the profile's."""
    return row.tokens_per_s if row.fidelity == "run" else row.predicted_tokens_per_s
