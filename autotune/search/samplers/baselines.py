"""The plans that every study measures first, so that it can compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from autotune.results.predicted import Predicted
from autotune.results.verdict import BASELINE_SCHEDULE, INTERLEAVED_SCHEDULE
from autotune.space.plan import Plan

__all__ = ["baselines"]


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
