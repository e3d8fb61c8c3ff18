"""The search: picks plans, has them evaluated, keeps study and table up to date, can stop and go on at any point."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from autotune.errors import UserError
from autotune.profiling.refit import Refit, refit, timed_plans
from autotune.profiling.supervised import end_leftovers, owner_mark
from autotune.results.columns import Row
from autotune.results.final import Final
from autotune.results.measurement import TrialOutcome
from autotune.results.rows import row_of
from autotune.results.verdict import fastest
from autotune.search.book import Book
from autotune.search.evaluators import Evaluator, PlanRunner, make_evaluator
from autotune.search.final import Held, final_folder, hold_final, stored_final
from autotune.search.folder import StudyFolder
from autotune.search.forecast import Forecaster, forecast_all
from autotune.search.identity import identity
from autotune.search.interrupt import Interrupt
from autotune.search.observer import Observer, Outlook, Silent
from autotune.search.options import Ended, Isolation, SearchOptions, SearchResult
from autotune.search.ranking import rank
from autotune.search.samplers import baselines, make_proposer
from autotune.search.store import Finished, Store, open_store, sqlite_url
from autotune.search.worker_plans import settle_worker
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Ended", "Isolation", "SearchOptions", "SearchResult", "search"]

# With fewer trials a refit says more about their noise than about the machine.
_LEAST_TO_REFIT = 3
# More of them, taken evenly, make the fit slower and no better.
_MOST_TO_REFIT = 100


def search(
    space: Space, options: SearchOptions, observer: Observer | None = None, interrupt: Interrupt | None = None
) -> SearchResult:
    """Run a study of `space` to its end, its budget, or an interrupt.

    Raises:
        UserError: no legal plan, the study can't be opened or continued, its folder can't be written, or the fidelity
            is `predict` and nothing is known of the space's device.
    """
    space, options, worker = settle_worker(space, options)
    folder, observer = StudyFolder(options.folder), observer or Silent()
    # An Interrupt that was not raised yet is false: `or` would lose it.
    interrupt = Interrupt() if interrupt is None else interrupt
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    if not plans:
        raise UserError(f"space {space.name} has no legal plan; --dry-run counts the rules that refuse them")
    _refuse_existing(folder, options)
    forecaster = _make_forecaster(space, options, observer)
    if options.resume and not folder.holds_study():
        observer.note(f"no study in {folder.path} to go on with; starting a new one")
    folder.create()
    with folder.locked():
        if options.fresh:
            folder.clear()
        predictor = forecaster.identity() if forecaster is not None and options.fidelity == "predict" else None
        store = open_store(
            options.storage or sqlite_url(folder.database),
            options.folder.name,
            identity(space, worker, options.fidelity, predictor),
            plans,
            space.cluster.memory_limit_bytes,
            resume=options.resume,
            fresh=options.fresh,
            must_exist=options.resume and folder.csv.exists(),
        )
        folder.write_text(folder.space, space.to_yaml())
        if options.fidelity == "predict":
            assert forecaster is not None
            return rank(space, folder, plans, forecaster, observer, interrupt)
        forecasts = forecast_all(forecaster, plans.values(), lambda: interrupt)
        book = Book(space, options.fidelity, folder, plans, forecasts)
        evaluator = make_evaluator(space, options, folder.logs, store.study_id)
        result = _Search(space, options, store, book, evaluator, observer, interrupt).run()
    return replace(result, refit=_refit(space, result, forecaster))


def _refuse_existing(folder: StudyFolder, options: SearchOptions) -> None:
    if not options.resume and not options.fresh and folder.holds_study():
        raise UserError(
            f"{folder.path} holds a study; --resume goes on with it, --fresh deletes it and starts anew, "
            "--name or --results-dir puts the new one elsewhere"
        )
    if options.resume and options.storage is None and folder.csv.exists() and not folder.database.exists():
        raise UserError(
            f"{folder.csv} is there but {folder.database} is not, so the study can't be continued; "
            "--storage names its database if it lies elsewhere, --fresh starts anew"
        )


def _make_forecaster(space: Space, options: SearchOptions, observer: Observer) -> Forecaster | None:
    """None where nothing is known of the device, unless predictions are all that is wanted."""
    try:
        return Forecaster(space, options.assumptions, options.figures, options.refuses)
    except UserError as error:
        if options.fidelity == "predict":
            raise
        observer.note(f"no predictions: {error}")
        return None


def _refit(space: Space, result: SearchResult, forecaster: Forecaster | None) -> Refit | None:
    """The device's efficiency fitted to finished trials, for the error of predictions before and after."""
    trials = timed_plans(result.rows)
    if forecaster is None or result.ended == "interrupted" or len(trials) < _LEAST_TO_REFIT:
        return None
    trials = trials[:: math.ceil(len(trials) / _MOST_TO_REFIT)]
    figures, assumptions = forecaster.figures, forecaster.assumptions
    return refit(trials, space.model, space.cluster, space.training, figures, assumptions=assumptions)


@dataclass
class _Search:
    """One run of a study: everything that changes while it goes on."""

    space: Space
    options: SearchOptions
    store: Store
    book: Book
    evaluator: Evaluator
    observer: Observer
    interrupt: Interrupt
    finished: list[Finished] = field(default_factory=list)

    def run(self) -> SearchResult:
        if leftovers := end_leftovers(self.store.study_id):
            self.observer.note(f"ended {leftovers} processes that a killed search had left")
        again = self.store.recover()
        for one in self.store.finished():
            self._remember(one)
        self.book.final = stored_final(self.store)
        if self.finished:
            done = "profiled" if self.options.fidelity == "profile" else "measured"
            self.observer.note(f"resuming with {len(self.finished)} {done} plans")
        self._note_estimates()
        predicted = {plan: told.predicted for plan, told in self.book.forecasts.items()}
        limit = self.space.cluster.memory_limit_bytes
        proposer = make_proposer(
            self.options.sampler, tuple(self.book.plans.values()), self.options.seed, predicted, limit
        )
        first = [*again, *self._baselines()]
        waiting = f"not {self._done_word} yet"
        try:
            while (ended := self._ended()) is None:
                left = self.book.left()
                plan = next((p for p in first if p in left), None)
                if plan is None:
                    throughput = {one.number: _rate(self._row(one)) for one in self.finished}
                    plan = proposer.propose(left, self.store.observations(self.finished, throughput))
                if plan is None:
                    ended = "converged"
                    break
                if not self._try(plan):
                    ended = "interrupted"
                    break
                self.book.write_if_due(waiting)
            waiting = self._why_waiting(ended, proposer.why_stopped)
        finally:
            self.evaluator.close()
            # Also when the database fails or Ctrl-C is hit twice: what is known goes into the table.
            rows = self.book.write(waiting)
        why = proposer.why_stopped if ended == "converged" else ""
        held = Held(self.book.final)
        if self.options.finalists and ended != "interrupted":
            held = self._hold_final(rows)
            ended = "interrupted" if held.interrupted else ended
            rows = self.book.write(waiting)
        legal, fidelity = len(self.book.plans), self.options.fidelity
        return SearchResult(ended, rows, legal, fidelity, why=why, final=held.final, no_final=held.remark)

    def _hold_final(self, rows: tuple[Row, ...]) -> Held:
        """The final between the plans that `rows` call for, in fresh processes; it goes to the book as it grows."""
        logs = self.book.folder.logs
        runner = PlanRunner(self.space, replace(self.options, isolation="trial"), logs, owner_mark(self.store.study_id))

        def measure(trial: int, number: int, plan: Plan) -> TrialOutcome | None:
            return runner.evaluate_in(final_folder(logs, trial, number), trial, plan, lambda: bool(self.interrupt))

        def keep(final: Final) -> None:
            self.store.save_final(final.to_dict())
            self.book.final = final
            self.book.write_final(rows)

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
            )
        finally:
            runner.close()

    def _budget_spent(self, final: Final) -> str:
        """Which budget of time leaves none for another launch of the final; empty if none is spent."""
        limit_s = self.options.timeout_s
        if limit_s is not None and self._trials_s() + final.spent_s >= limit_s:
            return f"the time of {limit_s:g} s is spent"
        return ""

    @property
    def _done_word(self) -> str:
        return "profiled" if self.options.fidelity == "profile" else "run"

    def _why_waiting(self, ended: Ended, why_stopped: str) -> str:
        """Why plans are left, for their rows."""
        causes = {
            "complete": "",
            "converged": why_stopped,
            "trials": f"the budget of {self.options.trials} trials is spent",
            "timeout": f"the time of {self.options.timeout_s} s is spent",
            "interrupted": "the search was interrupted",
        }
        return f"not {self._done_word}: {causes[ended]}"

    def _note_estimates(self) -> None:
        refused = sum(fingerprint not in self.book.rows for fingerprint in self.book.estimates)
        if refused:
            self.observer.note(
                f"{refused} of {len(self.book.plans)} legal plans are refused by the estimate of their memory; "
                "--no-refuse-by-estimate tries them"
            )

    def _baselines(self) -> list[Plan]:
        limit = self.space.cluster.memory_limit_bytes
        may_fit = [plan for fingerprint, plan in self.book.plans.items() if fingerprint not in self.book.estimates]
        return baselines(may_fit, {plan: told.predicted for plan, told in self.book.forecasts.items()}, limit)

    def _ended(self) -> Ended | None:
        if self.interrupt:
            return "interrupted"
        if not self.book.left():
            return "complete"
        if self.options.trials is not None and len(self.finished) >= self.options.trials:
            return "trials"
        if self.options.timeout_s is not None and self._spent_s() >= self.options.timeout_s:
            return "timeout"
        return None

    def _spent_s(self) -> float:
        """Time of the study: in trials, and in its final."""
        return self._trials_s() + (0.0 if self.book.final is None else self.book.final.spent_s)

    def _trials_s(self) -> float:
        return sum(one.outcome.duration_s for one in self.finished)

    def _outlook(self) -> Outlook:
        done = len(self.finished)
        goal = done + len(self.book.left())
        if self.options.trials is not None:
            goal = min(self.options.trials, goal)
        if not done:
            return Outlook(done, goal, None)
        left_s = self._trials_s() / done * (goal - done)
        if self.options.timeout_s is not None:
            left_s = min(left_s, max(0.0, self.options.timeout_s - self._spent_s()))
        return Outlook(done, goal, left_s)

    def _try(self, plan: Plan) -> bool:
        """Evaluate one plan and store how it ended; False if the search was interrupted first."""
        number = self.store.begin(plan, self.space.fingerprint(plan))
        self.observer.trial_begins(number, plan, self._outlook())
        outcome = self.evaluator.evaluate(number, plan, lambda: bool(self.interrupt))
        if outcome is None:
            self.store.abandon(number)
            return False
        finished = Finished(number, plan, outcome)
        self.store.finish(number, outcome, _rate(self._row(finished)))
        row = self._remember(finished)
        self.observer.trial_ended(row, fastest(tuple(self.book.rows.values())), self._outlook())
        return True

    def _remember(self, finished: Finished) -> Row:
        row = self._row(finished)
        self.finished.append(finished)
        self.book.rows[row.fingerprint] = row
        return row

    def _row(self, finished: Finished) -> Row:
        plan, told = finished.plan, self.book.forecasts.get(finished.plan)
        return row_of(
            finished.number,
            plan,
            self.space.fingerprint(plan),
            finished.outcome,
            self.space.model,
            self.space.training,
            self.options.fidelity,
            None if told is None else told.predicted,
            self.space.cluster.memory_limit_bytes,
        )


def _rate(row: Row) -> float | None:
    """What the sampler maximises: measured tokens/s, or the profile's."""
    return row.tokens_per_s if row.fidelity == "run" else row.predicted_tokens_per_s
