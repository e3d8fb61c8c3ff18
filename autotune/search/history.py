"""What the trial of one plan proves of another: no larger micro-batch fits where a smaller one ran out of memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.rows import plan_of
from autotune.schedules import registry
from autotune.schedules.costs import PassCosts
from autotune.schedules.simulate import simulate
from autotune.space.plan import Plan

__all__ = ["PREFIX", "refused_by_history"]

PREFIX = "history: "
"""How the reason of a plan begins that is refused by this rule."""

# Shares of an activation that stay from B to W. Which is true depends on the model: the claim is checked for all.
_KEPT = (0.0, 0.25, 0.5, 0.75, 1.0)
_HOST = "the kernel's out-of-memory killer"


def refused_by_history(rows: Iterable[Row], left: Mapping[str, Plan]) -> dict[str, str]:
    """Why plans among those `left`, by fingerprint, can't fit, by what the trials in `rows` showed.

    Refused is the plan of a trial that ran out of memory, with a larger micro-batch and all else equal, if every device
    then holds at least as many samples at its peak: its schedule's peak of held microbatches times their size. Weights,
    gradients and optimizer state are the same, so it needs at least as much memory.
    A trial that the kernel's out-of-memory killer ended proves nothing: other processes use the host's memory, too.
    """
    short = sorted(
        (row for row in rows if row.state == "oom" and row.trial is not None and _HOST not in row.reason),
        key=lambda row: row.trial or 0,
    )
    by_family: dict[Plan, list[Row]] = {}
    for row in short:
        by_family.setdefault(_family(plan_of(row)), []).append(row)
    found = {}
    for fingerprint, plan in left.items():
        for row in by_family.get(_family(plan), ()):
            if (reason := _proof(row, plan_of(row), plan)) is not None:
                found[fingerprint] = reason
                break
    return found


def _family(plan: Plan) -> Plan:
    """A plan without its micro-batches: equal for plans that differ in nothing else."""
    return replace(plan, micro_batch_size=1, microbatches=1)


def _proof(row: Row, tried: Plan, plan: Plan) -> str | None:
    if plan.micro_batch_size <= tried.micro_batch_size:
        return None
    before, after = _held_samples(tried), _held_samples(plan)
    if before is None or after is None:
        return None
    pairs = [pair for kept in range(len(_KEPT)) for pair in zip(before[kept], after[kept], strict=True)]
    if any(later < earlier for earlier, later in pairs):
        return None
    fullest = max(before[-1]), max(after[-1])
    return (
        f"{PREFIX}trial {row.trial} ran out of memory with micro_batch_size {tried.micro_batch_size}; with "
        f"{plan.micro_batch_size}, all else equal, every device holds at least as much at its peak "
        f"(the fullest {fullest[1]:g} samples, then {fullest[0]:g})"
    )


@functools.lru_cache(maxsize=4096)
def _held_samples(plan: Plan) -> tuple[tuple[float, ...], ...] | None:
    """For every share kept: the most samples that each device holds at once, on its whole share of the model.

    None where the schedule can't be built.
    """
    try:
        schedule = registry.build(plan.schedule, plan.pp, plan.microbatches, plan.stages_per_device)
    except UserError:
        return None
    peaks = []
    for kept in _KEPT:
        costs = PassCosts.uniform(schedule.placement, kept=kept)
        peaks.append(tuple(peak * plan.micro_batch_size for peak in simulate(schedule, costs).peak_activation))
    return tuple(peaks)
