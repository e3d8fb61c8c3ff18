"""What a worker that takes a trainer's arguments can run, and the arguments of one plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import UserError
from autotune.export.job import Job
from autotune.export.worker_arguments import RULES, trainer_arguments, trainer_problems
from autotune.profiling.command import DEFAULT_WORKER, WorkerCommand, worker_of
from autotune.profiling.hosts import trial_hosts
from autotune.profiling.protocol import TrialRequest
from autotune.space.plan import Plan
from autotune.space.rules import BrokenRule
from autotune.space.space import PlanRule, Space

if TYPE_CHECKING:
    from autotune.search.options import SearchOptions

__all__ = ["for_plan", "for_worker", "settle_worker"]


def settle_worker(space: Space, options: SearchOptions) -> tuple[Space, SearchOptions, WorkerCommand]:
    """The space with its worker's rules, the options with their worker and nodes, and the worker, of a search.

    A worker of the space's own runs nothing where plans are only predicted or profiled, but its rules hold.

    Raises:
        UserError: the folder that the worker runs in is not there, or there are more or fewer nodes than the space has.
    """
    named = options.worker or worker_of(space.worker)
    worker = named if options.fidelity == "run" else DEFAULT_WORKER
    if worker.cwd is not None and not os.path.isdir(worker.cwd):
        raise UserError(f"worker.cwd: {worker.cwd} is no folder")
    hosts = trial_hosts(options.hosts, space.cluster) if options.fidelity == "run" else None
    return for_worker(space, named), replace(options, worker=worker, hosts=hosts), worker


def for_worker(space: Space, worker: WorkerCommand) -> Space:
    """The space, in which plans that the trainer of `worker` can't express are refused by a rule of its own."""
    name = worker.trainer_arguments
    return space if name is None else replace(space, plan_rules=(*space.plan_rules, _rule(name)))


def _rule(name: str) -> PlanRule:
    def problems(space: Space, plan: Plan) -> tuple[BrokenRule, ...]:
        return tuple(BrokenRule(RULES[name], problem) for problem in trainer_problems(name, Job(space, plan)))

    return problems


def for_plan(worker: WorkerCommand, space: Space, request: TrialRequest, folder: Path) -> Callable[[], WorkerCommand]:
    """Makes the command for one launch of a plan; what its arguments speak of is written to the trial's `folder`.

    Raises:
        UserError: the trainer can't run the plan, or, when called, the folder can't be written.
    """
    name = worker.trainer_arguments
    if name is None:
        return lambda: worker
    words, files = trainer_arguments(name, Job(space, request.plan, request.schedule), folder)

    def command() -> WorkerCommand:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for file, text in files.items():
                (folder / file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {folder}: {error.strerror}") from error
        return worker.given(name, words)

    return command
