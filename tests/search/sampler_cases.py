"""Plans, truths and studies for the tests of samplers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product

from autotune.results.predicted import Predicted
from autotune.search.samplers import Observation, Proposer
from autotune.space.plan import Plan

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "v-half", "v-min")


def make_plan(pp: int, tp: int, micro_batch_size: int, schedule: str) -> Plan:
    dp = 16 // (pp * tp)
    v = 1 if schedule in ("1f1b", "zb-h1") else 2
    microbatches = 64 // (dp * micro_batch_size)
    return Plan(pp, tp, dp, micro_batch_size, microbatches, schedule, v, tuple([1] * (pp * v)))


def make_plans() -> list[Plan]:
    return [make_plan(*values) for values in product((2, 4, 8), (1, 2), (1, 2, 4), SCHEDULES)]


def predict(step_time_s: float, peak: int = 100) -> Predicted:
    return Predicted(step_time_s, peak, step_time_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def ok(plan: Plan, value: float, peak: int | None = 100, limit: int | None = None) -> Observation:
    over = None if peak is None or limit is None else float(peak - limit)
    return Observation(plan, value, over, failed=False, peak_bytes=peak)


def failed(plan: Plan) -> Observation:
    return Observation(plan, None, None, failed=True)


def out_of_memory(plan: Plan, over: float = 1.0, peak: int | None = None) -> Observation:
    return Observation(plan, None, over, failed=False, peak_bytes=peak)


@dataclass
class Study:
    """A study whose trials end as `truth` says."""

    plans: Sequence[Plan]
    truth: Callable[[Plan], Observation]
    known: list[Observation] = field(default_factory=list)

    def left(self) -> list[Plan]:
        done = {one.plan for one in self.known}
        return [plan for plan in self.plans if plan not in done]

    def run(self, proposer: Proposer, trials: int | None = None) -> list[Plan]:
        """The plans it tried, until the sampler stops, nothing is left, or `trials` are done."""
        tried: list[Plan] = []
        while (left := self.left()) and (trials is None or len(tried) < trials):
            plan = proposer.propose(left, self.known)
            if plan is None:
                break
            assert plan in left
            tried.append(plan)
            self.known.append(self.truth(plan))
        return tried
