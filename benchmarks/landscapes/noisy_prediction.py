"""Makes a landscape of a space that nobody here can run: its predictions, and a reality that departs from them.

    cd benchmarks/landscapes
    python noisy_prediction.py ../../search_spaces/dense-34b-64xh100.yaml dense-34b-64xh100

Reality is drawn from the seed: every part of a predicted step is off by a factor of its own (communication by most),
every schedule, tp degree, micro-batch size and recomputation by another, every pair of schedule and pp by a smaller
one, and every plan by one of its own. Peak memory departs by schedule, by recomputation and by plan. The predictions
stay in the table as a study keeps them.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Mapping
from pathlib import Path

from autotune.results.columns import Row
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.results.predicted import Predicted
from autotune.results.rows import row_of, row_without_trial, tokens_per_step
from autotune.results.table import write_csv
from autotune.results.verdict import judge
from autotune.search.forecast import Forecast, Forecaster, forecast_all
from autotune.space.plan import Plan
from autotune.space.space import Space, load_space

# Standard deviations of the logarithm of reality over prediction.
PARTS = {"compute": 0.04, "bubble": 0.1, "tp": 0.25, "pp": 0.3, "dp": 0.25, "optimizer": 0.1, "overhead": 0.3}
SCHEDULE, TP, MICRO_BATCH_SIZE, RECOMPUTE, SCHEDULE_AND_PP, PLAN = 0.04, 0.04, 0.04, 0.03, 0.02, 0.02
MEMORY_OF_SCHEDULE, MEMORY_OF_RECOMPUTE, MEMORY_OF_PLAN = 0.03, 0.03, 0.01
STEP_SPREAD = 0.005  # standard deviation of a measured step over its mean


class Reality:
    """What a cluster would show of plans, were its predictions wrong in ways drawn from `seed`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def factor(self, deviation: float, *key: object) -> float:
        """The factor of a family, always the same for the same `key`."""
        return math.exp(random.Random(f"{self.seed}/{key}").gauss(0.0, deviation))

    def step_time_s(self, plan: Plan, told: Predicted) -> float:
        """Step time of a plan."""
        parts = sum(getattr(told, f"{name}_s") * self.factor(error, "part", name) for name, error in PARTS.items())
        families = (
            self.factor(SCHEDULE, "schedule", plan.schedule)
            * self.factor(TP, "tp", plan.tp)
            * self.factor(MICRO_BATCH_SIZE, "micro_batch_size", plan.micro_batch_size)
            * self.factor(RECOMPUTE, "recompute", plan.recompute)
            * self.factor(SCHEDULE_AND_PP, "schedule, pp", plan.schedule, plan.pp)
        )
        return parts * families * self.factor(PLAN, "plan", plan)

    def peak_bytes(self, plan: Plan, told: Predicted) -> int:
        """Peak memory of a plan."""
        factor = (
            self.factor(MEMORY_OF_SCHEDULE, "memory", plan.schedule)
            * self.factor(MEMORY_OF_RECOMPUTE, "memory", plan.recompute)
            * self.factor(MEMORY_OF_PLAN, "memory", plan)
        )
        return round(told.peak_memory_bytes * factor)

    def outcome(self, plan: Plan, told: Predicted, limit_bytes: int | None, device: str) -> TrialOutcome:
        """How a trial of a plan would end."""
        step_s, peak = self.step_time_s(plan, told), self.peak_bytes(plan, told)
        spread = STEP_SPREAD * step_s
        measured = Measurement(
            clock="wall",
            step_time_s=step_s,
            step_time_min_s=step_s - spread,
            step_time_max_s=step_s + spread,
            step_time_std_s=spread,
            step_time_wall_s=step_s,
            peak_memory_bytes_per_rank=(peak,),
            bubble_rate=None,
            loss=None,
            torch="",
            device=device,
        )
        if limit_bytes is not None and peak > limit_bytes:
            return TrialOutcome("oom", f"{peak - limit_bytes} bytes over the limit", measured, "", 60.0)
        return TrialOutcome("ok", "", measured, "", 60.0)


def landscape(space: Space, seed: int) -> list[Row]:
    """The table of a study that ran every plan which the estimate of its memory lets pass."""
    plans = space.plans()
    forecasts = forecast_all(Forecaster(space), plans)
    reality = Reality(seed)
    return judge([row_of_plan(space, number, plan, forecasts, reality) for number, plan in enumerate(plans)])


def row_of_plan(space: Space, number: int, plan: Plan, forecasts: Mapping[Plan, Forecast], reality: Reality) -> Row:
    """One plan as a study would have it."""
    told, limit = forecasts[plan], space.cluster.memory_limit_bytes
    if told.refusal is not None:
        tokens = tokens_per_step(space.model, space.training)
        return row_without_trial(plan, space.fingerprint(plan), "refused", told.refusal, told.predicted, tokens, limit)
    device = f"{space.cluster.device}, predicted with noise of seed {reality.seed}"
    outcome = reality.outcome(plan, told.predicted, limit, device)
    fingerprint = space.fingerprint(plan)
    return row_of(number, plan, fingerprint, outcome, space.model, space.training, "run", told.predicted, limit)


def main() -> None:
    """Write trials.csv and space.yaml into a folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", type=Path, help="space file")
    parser.add_argument("folder", type=Path, help="where the landscape goes")
    parser.add_argument("--seed", type=int, default=0, help="of reality")
    options = parser.parse_args()
    space = load_space(options.space)
    options.folder.mkdir(parents=True, exist_ok=True)
    rows = landscape(space, options.seed)
    write_csv(rows, options.folder / "trials.csv")
    (options.folder / "space.yaml").write_text(space.to_yaml(), encoding="utf-8")
    print(f"{len(rows)} plans, {sum(row.state == 'ok' for row in rows)} ok: {options.folder}")


if __name__ == "__main__":
    main()
