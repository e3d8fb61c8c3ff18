"""How one plan of a study is evaluated: run on all its devices, or profiled stage by stage on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from autotune.errors import UserError
from autotune.profiling.attempts import run_trial
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand, hang_timeout
from autotune.profiling.cores import usable_cores
from autotune.profiling.launcher import empty_folder, launch, trial_folder
from autotune.profiling.node_check import check_nodes, end_leftovers
from autotune.profiling.pool import RankPool
from autotune.profiling.profile_plan import PlanProfiler, profile_outcome
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.supervised import owner_mark
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import TrialOutcome
from autotune.results.predicted import Predicted
from autotune.schedules import registry
from autotune.schedules.checks import check
from autotune.schedules.schedule import Schedule
from autotune.search.options import SearchOptions
from autotune.search.worker_plans import for_plan
from autotune.space.machine import Machine
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Evaluator", "PlanRunner", "StageMeasurer", "make_evaluator", "reach_nodes"]

Stop = Callable[[], bool]


class Evaluator(Protocol):
    """Evaluates plans one after the other."""

    def evaluate(self, number: int, plan: Plan, stop: Stop) -> TrialOutcome | None:
        """The outcome of trial `number`; None if `stop` asked to end before there was one."""

    def close(self) -> None:
        """End every process that was kept."""


def reach_nodes(options: SearchOptions, logs: Path, note: Callable[[str], None] = lambda text: None) -> None:
    """Ask the nodes that trials span, if they span any, before a study is begun or changed.

    Args:
        logs: folder that the nodes must share.
        note: is told what the user should know.

    Raises:
        UserError: a node can't be reached, or doesn't share the folder of the study.
    """
    if options.hosts is not None:
        nodes = check_nodes(options.hosts, logs, None, note)
        how = "srun" if options.hosts.slurm else "a remote shell"
        note(f"every trial spans {len(nodes)} nodes, by {how}: {', '.join(node.name for node in nodes)}")


def make_evaluator(
    space: Space, options: SearchOptions, logs: Path, study_id: str, note: Callable[[str], None] = lambda text: None
) -> Evaluator:
    """The evaluator of the fidelity `profile` or `run`; what a killed search left on the nodes is ended.

    Args:
        note: is told what the user should know.

    Raises:
        UserError: a node that `reach_nodes` had reached is gone.
    """
    if options.fidelity == "profile":
        return StageMeasurer(space, options.refuses)
    if options.hosts is not None and options.resume:
        end_leftovers(options.hosts, logs, study_id, note)
    return PlanRunner(space, options, logs, owner_mark(study_id))


@dataclass
class PlanRunner:
    """Runs plans by the worker, on ranks that are kept where the worker can serve."""

    space: Space
    options: SearchOptions
    logs: Path
    owner: str
    pool: RankPool | None = None

    def evaluate(self, number: int, plan: Plan, stop: Stop) -> TrialOutcome | None:
        """Launch `plan`; nothing is started for a schedule that can't be run."""
        return self.evaluate_in(trial_folder(self.logs, number), number, plan, stop)

    def evaluate_in(self, where: Path, number: int, plan: Plan, stop: Stop) -> TrialOutcome | None:
        """The same, with the folder of the trial given."""
        began = time.time()
        try:
            request = _request(self.space, number, plan)
            command = for_plan(self.worker, self.space, request, where)
        except UserError as error:
            return _broken(error, began)
        empty_folder(where, inside=self.logs.parent)
        return run_trial(
            lambda: self._launch(command(), request, where, stop), request, where, self.worker, stop, self._cores
        )

    def close(self) -> None:
        """End the ranks that were kept."""
        if self.pool is not None:
            self.pool.close()

    @property
    def worker(self) -> WorkerCommand:
        """What runs the plans."""
        return self.options.worker or DEFAULT_WORKER

    @property
    def _cores(self) -> float | None:
        """Cores that the ranks share, where they don't share this machine's: nodes are alike."""
        return None if self.options.hosts is None else usable_cores() * len(self.options.hosts.names)

    def _launch(self, worker: WorkerCommand, request: TrialRequest, folder: Path, stop: Stop) -> Ending:
        limit_s = self.options.trial_timeout_s or self.space.trial.timeout_s
        hang_s = hang_timeout(worker, self.options.hang_timeout_s or self.space.trial.hang_timeout_s)
        if self.options.isolation == "trial" or worker.serve_argv is None:
            return launch(request, worker, folder, limit_s, self.owner, stop, hang_s, self.options.hosts)
        if self.pool is None:
            self.pool = RankPool(worker, self.logs, self.owner, self.options.hosts)
        return self.pool.run(request, folder, limit_s, stop, hang_s)


@dataclass
class StageMeasurer:
    """Profiles plans: each distinct stage is measured once on the local device, the schedule is simulated."""

    space: Space
    refuses: bool
    profiler: PlanProfiler = field(init=False)

    def __post_init__(self) -> None:
        space = self.space
        self.profiler = PlanProfiler(space.model, space.training.dtype, space.cluster.device)

    def evaluate(self, number: int, plan: Plan, stop: Stop) -> TrialOutcome | None:
        """Profile `plan`."""
        began = time.time()
        try:
            request = _request(self.space, number, plan)
        except UserError as error:
            return _broken(error, began)
        self.profiler.stages.stop = stop
        outcome, profile = profile_outcome(self.profiler, request)
        if profile is None:
            # A search that is ended ends the measuring processes: that says nothing about the plan.
            return None if stop() else outcome
        if outcome.state == "refused" and not self.refuses:
            outcome = replace(outcome, state="predicted", reason=f"kept by --no-refuse-by-estimate: {outcome.reason}")
        measurement = profile.measurement if outcome.state == "predicted" else None
        return replace(outcome, measurement=measurement, predicted=Predicted.of(profile))

    def close(self) -> None:
        """End the measuring process."""
        self.profiler.close()


def _request(space: Space, number: int, plan: Plan) -> TrialRequest:
    """What the ranks of `plan` are told. Raises UserError if its schedule can't be run."""
    return TrialRequest(
        trial=number,
        plan=plan,
        schedule=_schedule_of(plan),
        model=space.model,
        cluster=space.cluster,
        training=space.training,
        warmup_steps=space.trial.warmup_steps,
        measured_steps=space.trial.measured_steps,
        link_efficiency=(space.machine or Machine).link_efficiency,
    )


def _schedule_of(plan: Plan) -> Schedule:
    schedule = registry.build(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_device)
    check(schedule)
    return schedule


def _broken(error: UserError, began: float) -> TrialOutcome:
    started = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(began))
    return TrialOutcome("invalid", str(error), None, started, time.time() - began)
