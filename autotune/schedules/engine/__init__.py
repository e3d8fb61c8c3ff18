"""The engine that finds the best schedule under real costs and memory limits (see docs/schedule-engine.md)."""

from autotune.schedules.engine.balance import balanced_split, layer_cuts
from autotune.schedules.engine.best import BestSchedule, Option, best_schedule, memory_front, smallest_memory
from autotune.schedules.engine.effort import FULL, QUICK, Effort
from autotune.schedules.engine.sources import (
    CostSource,
    Cut,
    LayerCosts,
    fixed_stages,
    node_latencies,
    uniform_share,
)

__all__ = [
    "FULL",
    "QUICK",
    "BestSchedule",
    "CostSource",
    "Cut",
    "Effort",
    "LayerCosts",
    "Option",
    "balanced_split",
    "best_schedule",
    "fixed_stages",
    "layer_cuts",
    "memory_front",
    "node_latencies",
    "smallest_memory",
    "uniform_share",
]
