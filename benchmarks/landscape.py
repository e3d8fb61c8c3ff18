"""Recorded landscapes: complete grids of a space, measured once, on which samplers are replayed without a cluster.

A folder of benchmarks/landscapes/ holds `trials.csv`, the table of a study that tried every plan, and its `space.yaml`.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from autotune.errors import UserError
from autotune.results.predicted import Predicted
from autotune.search.samplers import Observation
from autotune.space.plan import Plan
from autotune.space.space import load_space

__all__ = ["LANDSCAPES", "Landscape", "Recorded", "load_landscape"]

LANDSCAPES = Path(__file__).parent / "landscapes"
_MEASURED = ("ok", "oom")
# Standard error of a median over that of a mean, for normal values.
_MEDIAN = math.sqrt(math.pi / 2)


@dataclass(frozen=True)
class Recorded:
    """What a trial of one plan gave.

    Attributes:
        tokens_per_s: None where the plan is over the memory limit or failed.
        error: relative standard error of `tokens_per_s`, from the spread of the measured steps.
    """

    plan: Plan
    state: str
    tokens_per_s: float | None
    error: float
    peak_bytes: int | None

    def observe(self, deviate: float, limit_bytes: int | None) -> Observation:
        """What a study would know after a trial of it, were its measurement off by `deviate` standard errors."""
        over = None if self.peak_bytes is None or limit_bytes is None else float(self.peak_bytes - limit_bytes)
        return Observation(
            self.plan,
            None if self.tokens_per_s is None else self.tokens_per_s * math.exp(deviate * self.error),
            1.0 if over is None and self.state == "oom" else over,
            failed=self.state not in (*_MEASURED, "timeout"),
            peak_bytes=self.peak_bytes,
        )


@dataclass(frozen=True)
class Landscape:
    """Every plan that a study of the space would try, in its order, and how its trial ended."""

    name: str
    plans: tuple[Plan, ...]
    recorded: Mapping[Plan, Recorded]
    predicted: Mapping[Plan, Predicted]
    limit_bytes: int | None

    @property
    def best(self) -> Recorded:
        """The fastest plan within its limits."""
        return max(self.recorded.values(), key=lambda one: one.tokens_per_s or 0.0)


def load_landscape(folder: Path) -> Landscape:
    """The landscape of a folder. Plans that a rule or the estimate of their memory refuses are no part of it.

    Columns are taken by their names, so a table of an older or newer version will do.

    Raises:
        UserError: the grid is not complete: plans were not run, or are not those of the space.
    """
    space = load_space(folder / "space.yaml")
    measured_steps = space.trial.measured_steps
    recorded, predicted = {}, {}
    with open(folder / "trials.csv", newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] != "refused"]
    if waiting := sum(row["state"] == "predicted" for row in rows):
        raise UserError(f"{folder / 'trials.csv'} is no complete grid: {waiting} plans were not run")
    for row in rows:
        plan = _plan(row)
        recorded[plan] = _recorded(plan, row, measured_steps)
        if row["predicted_step_time_s"]:
            predicted[plan] = _predicted(row)
    plans = tuple(plan for plan in space.plans() if plan in recorded)
    if len(plans) != len(rows):
        raise UserError(f"{folder}: trials.csv has {len(rows)} plans, of which space.yaml has {len(plans)}")
    return Landscape(folder.name, plans, recorded, predicted, space.cluster.memory_limit_bytes)


def _plan(row: Mapping[str, str]) -> Plan:
    values: dict[str, object] = {field.name: row[field.name] for field in fields(Plan)}
    for name in ("pp", "tp", "dp", "micro_batch_size", "microbatches", "stages_per_device"):
        values[name] = int(row[name])
    return Plan.from_dict(values | {"layer_split": json.loads(row["layer_split"])})


def _recorded(plan: Plan, row: Mapping[str, str], steps: int) -> Recorded:
    ran = row["state"] == "ok"
    error = 0.0
    if ran and row["step_time_std_s"]:
        error = _MEDIAN * float(row["step_time_std_s"]) / float(row["step_time_s"]) / math.sqrt(steps)
    peak = int(row["peak_memory_bytes"]) if row["peak_memory_bytes"] else None
    return Recorded(plan, row["state"], float(row["tokens_per_s"]) if ran else None, error, peak)


def _predicted(row: Mapping[str, str]) -> Predicted:
    values = {field.name: float(row[f"predicted_{field.name}"]) for field in fields(Predicted)}
    return Predicted(**(values | {"peak_memory_bytes": int(row["predicted_peak_memory_bytes"])}))  # type: ignore[arg-type]
