"""Which plan to measure next. Every proposal is a legal plan that was not measured yet."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, Protocol

from autotune.results.predicted import Predicted
from autotune.results.verdict import BASELINE_SCHEDULE, INTERLEAVED_SCHEDULE
from autotune.space.plan import Plan

__all__ = ["FIELDS", "SAMPLERS", "Observation", "Proposer", "SamplerName", "baselines", "fields_of", "make_proposer"]

SamplerName = Literal["grid", "random", "tpe"]
SAMPLERS: tuple[SamplerName, ...] = ("grid", "random", "tpe")

FIELDS = ("pp", "tp", "micro_batch_size", "schedule", "stages_per_device", "recompute")
"""What a study varies; the rest of a plan follows from these."""

_ATTEMPTS = 64


@dataclass(frozen=True)
class Observation:
    """What the study knows about a measured plan.

    Attributes:
        value: tokens/s, measured or profiled; None if the plan gave no number that counts.
        peak_bytes: peak memory of the heaviest device, measured or profiled; None if nobody measured it.
        constraint: above 0 when infeasible, by how much; None when nothing is known.
        failed: the trial said nothing about the plan (infrastructure, no result).
    """

    plan: Plan
    value: float | None
    constraint: float | None
    failed: bool
    peak_bytes: int | None = None


class Proposer(Protocol):
    """Picks from what is left, given what is known."""

    why_stopped: str
    """Why nothing that is left is worth a trial; empty as long as something is."""

    def propose(self, left: Sequence[Plan], known: Sequence[Observation]) -> Plan | None:
        """One of `left`, which is not empty; None, and `why_stopped` tells, if none of them is worth a trial."""


def fields_of(plan: Plan) -> dict[str, Any]:
    """The searched fields of a plan, which tell the plans of a space apart."""
    return {name: getattr(plan, name) for name in FIELDS}


def baselines(plans: Sequence[Plan], predicted: Mapping[Plan, Predicted], limit_bytes: int | None) -> list[Plan]:
    """The plans to measure first, so that even a short study can compare: one under 1F1B, one interleaved.

    Of each, the one with the shortest predicted step among those predicted to fit in `limit_bytes`. Where nothing is
    predicted, the one with the least tensor parallelism (whose collectives sit inside every pass), then the shortest
    real pipeline, then the largest micro-batch.
    """

    def order(plan: Plan) -> tuple[bool, float, bool, bool, int, int, int]:
        told = predicted.get(plan)
        over, expected_s = (False, inf) if told is None else (not told.fits(limit_bytes), told.step_time_s)
        return (over, expected_s, plan.recompute != "none", plan.pp == 1, plan.tp, plan.pp, -plan.micro_batch_size)

    families = [[p for p in plans if p.schedule == name] for name in (BASELINE_SCHEDULE, INTERLEAVED_SCHEDULE)]
    return [min(family, key=order) for family in families if family]


def make_proposer(
    name: SamplerName,
    plans: Sequence[Plan],
    seed: int,
    predicted: Mapping[Plan, Predicted],
    limit_bytes: int | None,
) -> Proposer:
    """The proposer called `name` over the legal `plans` of a space.

    Args:
        predicted: what the cost model says of the plans; empty where it knows nothing.
        limit_bytes: memory of a device; None for no limit.
    """
    if name == "grid":
        return _Grid()
    if name == "random":
        return _Random(plans, seed)
    return _Tpe(plans, seed)


class _Grid:
    """In the order of the space file."""

    why_stopped = ""

    def propose(self, left: Sequence[Plan], known: Sequence[Observation]) -> Plan:
        return left[0]


class _Random:
    """In one random order of the whole space, so that a resumed study goes on where it stopped."""

    why_stopped = ""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        shuffled = list(plans)
        random.Random(seed).shuffle(shuffled)
        self.position = {plan: index for index, plan in enumerate(shuffled)}

    def propose(self, left: Sequence[Plan], known: Sequence[Observation]) -> Plan:
        return min(left, key=self.position.__getitem__)


class _Tpe:
    """Optuna's multivariate TPE over the fields of a plan.

    TPE proposes freely, also what is illegal or measured already. So it works on a study in memory, told everything
    that is known, and is asked again until a proposal can be run; the study on disk sees only real trials.
    """

    why_stopped = ""

    def __init__(self, plans: Sequence[Plan], seed: int) -> None:
        self.choices = {name: sorted({getattr(plan, name) for plan in plans}) for name in FIELDS}
        self.startup = max(3, min(10, len(plans) // 4))
        self.seed = seed

    def propose(self, left: Sequence[Plan], known: Sequence[Observation]) -> Plan:
        import optuna

        # A seed of its own for every state of knowledge: a resumed study doesn't repeat proposals.
        seed = self.seed + 1000 * len(known)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=self.startup)
        mirror = optuna.create_study(direction="maximize", sampler=sampler)
        for observation in known:
            self._tell(mirror, observation)
        by_fields = {tuple(fields_of(plan).values()): plan for plan in left}
        proposal: dict[str, Any] = {}
        for _ in range(_ATTEMPTS):
            trial = mirror.ask()
            proposal = self._suggest(trial)
            plan = by_fields.get(tuple(proposal.values()))
            if plan is not None:
                return plan
            mirror.tell(trial, state=optuna.trial.TrialState.FAIL)  # TPE takes no notice of failed trials
        return _nearest(left, proposal, random.Random(seed))

    def _suggest(self, trial: Any) -> dict[str, Any]:
        return {name: trial.suggest_categorical(name, values) for name, values in self.choices.items()}

    def _tell(self, mirror: Any, observation: Observation) -> None:
        from optuna.trial import TrialState

        mirror.enqueue_trial(fields_of(observation.plan))
        trial = mirror.ask()
        self._suggest(trial)
        if observation.constraint is not None:
            trial.set_constraint("memory", observation.constraint)
        if observation.value is not None:
            mirror.tell(trial, observation.value)
        else:
            mirror.tell(trial, state=TrialState.FAIL if observation.failed else TrialState.PRUNED)


def _nearest(left: Sequence[Plan], wanted: Mapping[str, Any], chance: random.Random) -> Plan:
    """The plan of `left` that shares the most fields with `wanted`; any of equals."""

    def shared(plan: Plan) -> int:
        return sum(getattr(plan, name) == value for name, value in wanted.items())

    most = max(shared(plan) for plan in left)
    return chance.choice([plan for plan in left if shared(plan) == most])
