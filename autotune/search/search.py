"""The search: picks plans, has them measured, keeps study and table up to date, and can stop and go on at any point."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from autotune.errors import UserError
from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand
from autotune.profiling.launcher import launch, trial_folder
from autotune.profiling.pool import RankPool
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervised import end_leftovers, owner_mark
from autotune.profiling.supervisor import Ending
from autotune.results.columns import Row
from autotune.results.compare import compare
from autotune.results.measurement import TrialOutcome
from autotune.results.rows import row_of
from autotune.results.verdict import fastest, judge
from autotune.schedules import registry
from autotune.schedules.checks import check
from autotune.schedules.schedule import Schedule
from autotune.search.folder import StudyFolder
from autotune.search.identity import identity
from autotune.search.interrupt import Interrupt
from autotune.search.observer import Observer, Outlook, Silent
from autotune.search.samplers import SamplerName, baselines, make_proposer
from autotune.search.store import Finished, Store, open_store, sqlite_url
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Ended", "Isolation", "SearchOptions", "SearchResult", "search"]

Ended = Literal["complete", "trials", "timeout", "interrupted"]
Isolation = Literal["pool", "trial"]

# The table is rewritten after every trial unless that would take more than a twentieth of the time.
_WRITE_SHARE = 20


@dataclass(frozen=True)
class SearchOptions:
    """How to search a space.

    Attributes:
        trials: most trials of the study, earlier runs included; None for every legal plan.
        timeout_s: after this much time spent in trials, earlier runs included, none is begun; None for no limit.
        trial_timeout_s: wall-clock limit of one trial; None takes the space's.
        storage: database URL; None for study.db in the study's folder.
        isolation: `pool` keeps ranks from trial to trial if the worker can serve, `trial` starts new ones each time.
        resume: go on with the study in `folder`; fresh: delete it first. Neither: it must not exist.
    """

    folder: Path
    trials: int | None = None
    timeout_s: float | None = None
    trial_timeout_s: float | None = None
    sampler: SamplerName = "grid"
    seed: int = 0
    storage: str | None = None
    resume: bool = False
    fresh: bool = False
    worker: WorkerCommand = DEFAULT_WORKER
    isolation: Isolation = "pool"

    def __post_init__(self) -> None:
        if self.resume and self.fresh:
            raise UserError("--resume and --fresh exclude each other: one goes on with a study, the other deletes it")
        if self.trials is not None and self.trials < 1:
            raise UserError(f"--trials must be at least 1, not {self.trials}")
        for name in ("timeout_s", "trial_timeout_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise UserError(f"--{name.removesuffix('_s').replace('_', '-')} must be above 0 seconds, not {value}")


@dataclass(frozen=True)
class SearchResult:
    """How a search ended.

    Attributes:
        rows: the whole table, judged.
        legal: legal plans of the space; those without a row were not run.
    """

    ended: Ended
    rows: tuple[Row, ...]
    legal: int

    @property
    def best(self) -> Row | None:
        """The fastest plan within its limits."""
        return fastest(self.rows)

    def count(self, state: str) -> int:
        """Rows in `state`."""
        return sum(row.state == state for row in self.rows)


def search(
    space: Space, options: SearchOptions, observer: Observer | None = None, interrupt: Interrupt | None = None
) -> SearchResult:
    """Run a study of `space` to its end, its budget, or an interrupt.

    Raises:
        UserError: no legal plan, the study can't be opened or continued, or its folder can't be written.
    """
    folder = StudyFolder(options.folder)
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    if not plans:
        raise UserError(f"space {space.name} has no legal plan; --dry-run counts the rules that refuse them")
    _refuse_existing(folder, options)
    folder.create()
    with folder.locked():
        if options.fresh:
            folder.clear()
        store = open_store(
            options.storage or sqlite_url(folder.database),
            options.folder.name,
            identity(space, options.worker),
            plans,
            space.cluster.memory_limit_bytes,
            resume=options.resume,
            fresh=options.fresh,
        )
        folder.write_text(folder.space, space.to_yaml())
        # An Interrupt that was not raised yet is false: `or` would lose it.
        interrupt = Interrupt() if interrupt is None else interrupt
        return _Search(space, options, folder, store, plans, observer or Silent(), interrupt).run()


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


@dataclass
class _Search:
    """One run of a study: everything that changes while it goes on."""

    space: Space
    options: SearchOptions
    folder: StudyFolder
    store: Store
    plans: dict[str, Plan]
    observer: Observer
    interrupt: Interrupt
    finished: list[Finished] = field(default_factory=list)
    rows: dict[str, Row] = field(default_factory=dict)
    next_write: float = 0.0
    pool: RankPool | None = None

    def run(self) -> SearchResult:
        if leftovers := end_leftovers(self.store.study_id):
            self.observer.note(f"ended {leftovers} processes that a killed search had left")
        again = self.store.recover()
        for one in self.store.finished():
            self._remember(one)
        if self.finished:
            self.observer.note(f"resuming with {len(self.finished)} measured plans")
        refused = self._refused_rows()
        proposer = make_proposer(self.options.sampler, tuple(self.plans.values()), self.options.seed)
        first = [*again, *baselines(tuple(self.plans.values()))]
        try:
            while (ended := self._ended()) is None:
                left = self._left()
                plan = next((p for p in first if p in left), None)
                if plan is None:
                    throughput = {one.number: self._row(one).tokens_per_s for one in self.finished}
                    plan = proposer.propose(left, self.store.observations(self.finished, throughput))
                if not self._try(plan):
                    ended = "interrupted"
                    break
                self._write(refused, throttled=True)
        finally:
            if self.pool is not None:
                self.pool.close()
            # Also when the database fails or Ctrl-C is hit twice: what is known goes into the table.
            self._write(refused)
        return SearchResult(ended, self._table(refused), len(self.plans))

    def _ended(self) -> Ended | None:
        if self.interrupt:
            return "interrupted"
        if not self._left():
            return "complete"
        if self.options.trials is not None and len(self.finished) >= self.options.trials:
            return "trials"
        if self.options.timeout_s is not None and self._spent_s() >= self.options.timeout_s:
            return "timeout"
        return None

    def _left(self) -> list[Plan]:
        return [plan for fingerprint, plan in self.plans.items() if fingerprint not in self.rows]

    def _spent_s(self) -> float:
        return sum(one.outcome.duration_s for one in self.finished)

    def _outlook(self) -> Outlook:
        done = len(self.finished)
        goal = len(self.plans) if self.options.trials is None else min(self.options.trials, len(self.plans))
        if not done:
            return Outlook(done, goal, None)
        left_s = self._spent_s() / done * (goal - done)
        if self.options.timeout_s is not None:
            left_s = min(left_s, max(0.0, self.options.timeout_s - self._spent_s()))
        return Outlook(done, goal, left_s)

    def _try(self, plan: Plan) -> bool:
        """Measure one plan and store how it ended; False if the search was interrupted first."""
        number = self.store.begin(plan, self.space.fingerprint(plan))
        self.observer.trial_begins(number, plan, self._outlook())
        outcome = self._measure(number, plan)
        if outcome is None:
            self.store.abandon(number)
            return False
        finished = Finished(number, plan, outcome)
        self.store.finish(number, outcome, self._row(finished).tokens_per_s)
        row = self._remember(finished)
        self.observer.trial_ended(row, fastest(tuple(self.rows.values())), self._outlook())
        return True

    def _measure(self, number: int, plan: Plan) -> TrialOutcome | None:
        """Launch `plan`; None if the launch was interrupted."""
        began = time.time()
        try:
            schedule = _schedule_of(plan)
        except UserError as error:  # nothing is started for a schedule that can't be run
            started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(began))
            return TrialOutcome("invalid", str(error), None, started, time.time() - began)
        request = TrialRequest(
            trial=number,
            plan=plan,
            schedule=schedule,
            model=self.space.model,
            cluster=self.space.cluster,
            training=self.space.training,
            warmup_steps=self.space.trial.warmup_steps,
            measured_steps=self.space.trial.measured_steps,
        )
        limit_s = self.options.trial_timeout_s or self.space.trial.timeout_s
        where = trial_folder(self.folder.logs, number)
        ending = self._launch(request, where, limit_s)
        return None if ending.kind == "stopped" else assess(request, ending, where)

    def _launch(self, request: TrialRequest, folder: Path, limit_s: float) -> Ending:
        worker, owner = self.options.worker, owner_mark(self.store.study_id)
        if self.options.isolation == "trial" or worker.serve_argv is None:
            return launch(request, worker, folder, limit_s, owner, lambda: bool(self.interrupt))
        if self.pool is None:
            self.pool = RankPool(worker, self.folder.logs, owner)
        return self.pool.run(request, folder, limit_s, lambda: bool(self.interrupt))

    def _remember(self, finished: Finished) -> Row:
        row = self._row(finished)
        self.finished.append(finished)
        self.rows[row.fingerprint] = row
        return row

    def _row(self, finished: Finished) -> Row:
        fingerprint = self.space.fingerprint(finished.plan)
        return row_of(
            finished.number, finished.plan, fingerprint, finished.outcome, self.space.model, self.space.training
        )

    def _refused_rows(self) -> tuple[Row, ...]:
        return tuple(
            Row(state="refused", reason=candidate.reason, **candidate.point._asdict())
            for candidate in self.space.candidates()
            if candidate.plan is None
        )

    def _table(self, refused: tuple[Row, ...]) -> tuple[Row, ...]:
        measured = sorted(self.rows.values(), key=lambda row: row.trial or 0)
        return tuple(judge([*measured, *refused]))

    def _write(self, refused: tuple[Row, ...], throttled: bool = False) -> None:
        began = time.monotonic()
        if throttled and began < self.next_write:
            return
        rows = self._table(refused)
        self.folder.write_tables(rows)
        self.folder.write_text(self.folder.best, json.dumps(_best_file(self.space, rows), indent=1) + "\n")
        now = time.monotonic()
        self.next_write = now + _WRITE_SHARE * (now - began)


def _schedule_of(plan: Plan, build: Callable[[str, int, int, int], Schedule] | None = None) -> Schedule:
    """The schedule of a plan, proven runnable. Raises UserError if it isn't."""
    schedule = (build or registry.build)(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_device)
    check(schedule)
    return schedule


def _best_file(space: Space, rows: tuple[Row, ...]) -> dict[str, object]:
    """What best.json holds: the best plan with everything an exporter needs, and how it compares."""
    best = fastest(rows)
    plan = None if best is None else next(p for p in space.plans() if space.fingerprint(p) == best.fingerprint)
    return {
        "study": space.name,
        "plan": None if plan is None else plan.to_dict(),
        "row": None if best is None else best.to_dict(),
        "comparison": compare(rows).to_dict(),
        "model": asdict(space.model),
        "cluster": asdict(space.cluster),
        "training": asdict(space.training),
    }
