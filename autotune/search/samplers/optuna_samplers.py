"""Optuna's samplers over the plans of a space: TPE for the throughput, NSGA-II for throughput against memory.

They propose freely, also what is illegal or measured already. So they work on a study in memory, told everything that
is known, and are asked again until a proposal can be run; the study on disk sees only real trials.
"""

from __future__ import annotations

import math
import random
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from autotune.results.predicted import Predicted
from autotune.search.samplers.proposer import FIELDS, Observation, fields_of
from autotune.space.plan import Plan

if TYPE_CHECKING:
    import optuna

__all__ = ["Nsga2", "Tpe"]

Direction = Literal["maximize", "minimize"]

# A sampler that has seen most of what it likes repeats itself; after so many proposals the nearest plan left is taken.
_ATTEMPTS = 16


class _Mirrored(ABC):
    """A sampler of Optuna on a study in memory that mirrors what is known."""

    why_stopped = ""
    directions: tuple[Direction, ...] = ("maximize",)

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        self.choices = {name: sorted({getattr(plan, name) for plan in plans}) for name in FIELDS}
        self.plans = len(plans)
        self.seed = seed
        self.study: optuna.Study | None = None
        self.open: dict[Plan, optuna.Trial] = {}
        self.told: set[Plan] = set()

    @abstractmethod
    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """Optuna's sampler."""

    @abstractmethod
    def values(self, observation: Observation) -> list[float] | None:
        """What to tell of a measured plan; None if it has no numbers."""

    def propose(self, left: Sequence[Plan], known: Sequence[Observation], flights: Sequence[Plan] = ()) -> Plan:
        """The sampler's first proposal that is left, or the plan nearest to what it proposed last."""
        study = self._mirror(known, flights)
        by_fields = {tuple(fields_of(plan).values()): plan for plan in left}
        proposal: dict[str, Any] = {}
        for _ in range(_ATTEMPTS):
            trial = study.ask()
            proposal = self._suggest(trial)
            if (plan := by_fields.get(tuple(proposal.values()))) is not None:
                self.open[plan] = trial
                return plan
            self._close(trial)
        return _nearest(left, proposal, random.Random(self.seed + 1000 * len(known)))

    def _mirror(self, known: Sequence[Observation], flights: Sequence[Plan]) -> optuna.Study:
        """The study in memory, told what it doesn't know yet; open are the trials of plans in flight, and no others."""
        import optuna

        if self.study is None:
            # A seed of its own for every state of knowledge: a resumed study doesn't repeat proposals.
            sampler = self.sampler(self.seed + 1000 * len(known))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
                self.study = optuna.create_study(directions=list(self.directions), sampler=sampler)
        for observation in known:
            if observation.plan not in self.told:
                self.told.add(observation.plan)
                self._tell(self.study, observation)
        for plan in [plan for plan in self.open if plan not in flights]:
            self._close(self.open.pop(plan))  # proposed, but never begun or given back
        for plan in flights:
            if plan not in self.open and plan not in self.told:
                self.open[plan] = self._opened(self.study, plan)
        return self.study

    def _suggest(self, trial: optuna.Trial) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, values) for name, values in self.choices.items()}

    def _tell(self, study: optuna.Study, observation: Observation) -> None:
        from optuna.trial import TrialState

        trial = self.open.pop(observation.plan, None)
        if trial is None:  # a baseline, or of an earlier run or another tuner
            trial = self._opened(study, observation.plan)
        if observation.constraint is not None:
            trial.set_constraint("memory", observation.constraint)
        if (values := self.values(observation)) is not None:
            study.tell(trial, values)
        else:
            study.tell(trial, state=TrialState.FAIL if observation.failed else TrialState.PRUNED)

    def _opened(self, study: optuna.Study, plan: Plan) -> optuna.Trial:
        """A trial of `plan` without an outcome: a sampler that lies about open trials keeps away from it."""
        study.enqueue_trial(fields_of(plan))
        trial = study.ask()
        self._suggest(trial)
        return trial

    def _close(self, trial: optuna.Trial) -> None:
        """Withdraw a proposal: samplers take no notice of failed trials."""
        from optuna.trial import TrialState

        assert self.study is not None
        self.study.tell(trial, state=TrialState.FAIL)


class Tpe(_Mirrored):
    """Optuna's multivariate TPE over the fields of a plan: the highest throughput."""

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """TPE that models the fields together, by groups, and lies about trials in flight."""
        import optuna

        startup = max(3, min(10, self.plans // 4))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(
                seed=seed, multivariate=True, group=True, constant_liar=True, n_startup_trials=startup
            )

    def values(self, observation: Observation) -> list[float] | None:
        """The throughput."""
        return None if observation.value is None else [observation.value]


class Nsga2(_Mirrored):
    """Optuna's NSGA-II: throughput up, peak memory down. The answer is `autotune.results.pareto.pareto_front`.

    Args:
        predicted: what the cost model says of the plans; empty where it knows nothing.
        limit_bytes: memory of a device; None for no limit.
    """

    directions = ("maximize", "minimize")

    def __init__(
        self, plans: Sequence[Plan], seed: int, predicted: Mapping[Plan, Predicted], limit_bytes: int | None
    ) -> None:
        super().__init__(plans, seed)
        self.predicted, self.limit_bytes = predicted, limit_bytes

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """NSGA-II with generations small enough that a study of tens of trials sees several."""
        import optuna

        return optuna.samplers.NSGAIISampler(seed=seed, population_size=max(6, min(24, self.plans // 8)))

    def values(self, observation: Observation) -> list[float] | None:
        """Throughput and peak; a plan whose memory nobody measured has no place on a front."""
        if observation.constraint is not None and observation.constraint > 0:
            # Infeasible plans are ordered by their constraint alone, but NSGA-II takes notice only of what has values.
            return [0.0, float(observation.peak_bytes or self._least_peak(observation.plan))]
        if observation.value is None or observation.peak_bytes is None:
            return None
        return [observation.value, float(observation.peak_bytes)]

    def _least_peak(self, plan: Plan) -> float:
        """Peak of a plan that ran out of memory before anybody measured it; infinite if nothing is known of it."""
        told = self.predicted.get(plan)
        return float(max(0 if told is None else told.peak_memory_bytes, self.limit_bytes or 0)) or math.inf


def _nearest(left: Sequence[Plan], wanted: Mapping[str, Any], chance: random.Random) -> Plan:
    """The plan of `left` that shares the most fields with `wanted`; any of equals."""

    def shared(plan: Plan) -> int:
        return sum(getattr(plan, name) == value for name, value in wanted.items())

    most = max(shared(plan) for plan in left)
    return chance.choice([plan for plan in left if shared(plan) == most])
