"""The space that a file describes, and every plan in it."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from autotune.schedules import registry
from autotune.space.cluster import ClusterSpec
from autotune.space.machine import Machine
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, RunIdentity, spread_layers
from autotune.space.resolve import (
    resolve_cluster,
    resolve_machine,
    resolve_model,
    resolve_search,
    resolve_training,
    resolve_worker,
)
from autotune.space.rules import BrokenRule, Point, broken_rules, derive_dp, derive_microbatches
from autotune.space.settings import SearchLists, TrialSettings, WorkerSettings
from autotune.space.space_file import read_space_file, space_to_yaml
from autotune.space.training import TrainingSpec

__all__ = ["Candidate", "PlanRule", "Space", "load_space"]

MAX_POINTS = 1_000_000
_spread = functools.lru_cache(maxsize=None)(spread_layers)


@dataclass(frozen=True)
class Candidate:
    """One point of the space: legal, with its plan, or refused, with every rule it breaks."""

    point: Point
    plan: Plan | None
    broken: tuple[BrokenRule, ...] = ()

    @property
    def reason(self) -> str:
        """Why it is refused: every broken rule's id and message; empty when legal."""
        return "; ".join(f"{rule}: {message}" for rule, message in self.broken)


@dataclass(frozen=True)
class Space:
    """Everything a study needs to know: what is trained, where, and which plans are tried.

    Attributes:
        name: the study's name, and its folder's.
        worker: the command that runs a plan; None: the built-in worker.
        machine: figures of one device for predictions; None: the catalogue's. They decide nothing of a run.
        plan_rules: rules beside those of `autotune.space.rules`, such as what a worker's trainer can't run.
        notes: what the reader of the file should know (a baseline that was added, dropout left out).
    """

    name: str
    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    search: SearchLists
    trial: TrialSettings = field(default_factory=TrialSettings)
    worker: WorkerSettings | None = None
    machine: Machine | None = None
    plan_rules: tuple[PlanRule, ...] = field(default=(), compare=False, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def candidates(self) -> Iterator[Candidate]:
        """Every point once, in the order of the lists: pp, tp, micro_batch_size, schedule, stages, recompute.

        A point has one spelling: pp = 1 is `1f1b` with one stage whatever schedules are listed, and stages_per_device
        varies only for schedules that let it be chosen. So no plan appears twice.
        """
        lists = self.search
        for pp, tp, micro_batch_size in itertools.product(lists.pp, lists.tp, lists.micro_batch_size):
            dp = derive_dp(pp, tp, self.cluster)
            microbatches = derive_microbatches(dp, micro_batch_size, self.training)
            for (schedule, stages), recompute in itertools.product(self._pipelines(pp), lists.recompute):
                yield self._candidate(Point(pp, tp, dp, micro_batch_size, microbatches, schedule, stages, recompute))

    def plans(self) -> tuple[Plan, ...]:
        """Every legal plan, each once."""
        return tuple(candidate.plan for candidate in self.candidates() if candidate.plan is not None)

    def fingerprint(self, plan: Plan) -> str:
        """16 hex digits that identify the run of `plan` in this space."""
        return self._identity.fingerprint(plan)

    @functools.cached_property
    def _identity(self) -> RunIdentity:
        return RunIdentity.of(self.model, self.cluster, self.training)

    def to_yaml(self) -> str:
        """The space as a file that stands alone: defaults filled in, Hugging Face config and cluster file inlined."""
        return space_to_yaml(self)

    def _pipelines(self, pp: int) -> tuple[tuple[str, int], ...]:
        """(schedule, stages per device) that differ at this pp."""
        if pp == 1:
            return (("1f1b", 1),)
        pairs: list[tuple[str, int]] = []
        for name in self.search.schedule:
            kind = registry.find(name)
            fixed = kind.min_stages_per_device == kind.max_stages_per_device
            values = (kind.min_stages_per_device,) if fixed else self.search.stages_per_device
            pairs += [(kind.name, stages) for stages in values]
        return tuple(dict.fromkeys(pairs))

    def _candidate(self, point: Point) -> Candidate:
        broken = broken_rules(point, self.model, self.cluster, self.training)
        if broken:
            return Candidate(point, None, broken)
        assert point.dp is not None
        assert point.microbatches is not None
        plan = Plan(
            pp=point.pp,
            tp=point.tp,
            dp=point.dp,
            micro_batch_size=point.micro_batch_size,
            microbatches=point.microbatches,
            schedule=point.schedule,
            stages_per_device=point.stages_per_device,
            layer_split=_spread(self.model.layers, point.pp * point.stages_per_device),
            recompute=point.recompute,
        )
        broken = tuple(problem for rule in self.plan_rules for problem in rule(self, plan))
        return Candidate(point, None if broken else plan, broken)


PlanRule = Callable[[Space, Plan], tuple[BrokenRule, ...]]
"""Why a plan that keeps the space's own rules is refused all the same."""


def load_space(path: str | Path) -> Space:
    """The space that the file at `path` describes.

    Raises:
        UserError: the file can't be read or has mistakes; all of them are listed, each with its line, its path in the
            file, its value and the legal values.
    """
    file = read_space_file(Path(path))
    problems = file.problems
    model, cluster, training, search = None, None, None, None
    model_notes: tuple[str, ...] = ()
    training_notes: tuple[str, ...] = ()
    search_notes: tuple[str, ...] = ()
    machine = None
    worker = None if file.worker is None else resolve_worker(file.worker, file.path.parent, problems)
    if file.model is not None:
        model, model_notes = resolve_model(file.model, file.path.parent, problems)
    if file.cluster is not None:
        cluster = resolve_cluster(file.cluster)
        if file.cluster.machine is not None:
            machine = resolve_machine(file.cluster.machine, cluster.device)
    if file.training is not None:
        training, training_notes = resolve_training(file.training, worker)
    if file.search is not None and cluster is not None:
        search, search_notes = resolve_search(file.search, cluster)
        points = math.prod(map(len, (search.pp, search.tp, search.micro_batch_size, search.recompute)))
        points *= len(search.schedule) * len(search.stages_per_device)
        if points > MAX_POINTS:
            problems.add(("search",), f"the lists span up to {points:,} points; at most {MAX_POINTS:,} are searched")
    problems.stop_if_any()
    assert model is not None
    assert cluster is not None
    assert training is not None
    assert search is not None
    assert file.trial is not None
    trial = TrialSettings(**file.trial.model_dump())
    notes = (*model_notes, *(training_notes if model.tied_embeddings else ()), *search_notes)
    return Space(file.name, model, cluster, training, search, trial, worker, machine, notes=notes)
