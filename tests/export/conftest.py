"""Plans to export, made as a search makes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.export.job import Job, make_job
from autotune.space.plan import Plan, spread_layers
from autotune.space.space import Space, load_space

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def quickstart() -> Space:
    return load_space(ROOT / "search_spaces" / "quickstart.yaml")


@pytest.fixture
def job_of(quickstart: Space) -> Any:
    """job_of(schedule="v-half", pp=4, model={"layers": 10}, training={...}): a job on pp x tp x dp devices."""

    def make(
        schedule: str = "1f1b",
        pp: int = 2,
        tp: int = 1,
        dp: int = 1,
        micro_batch_size: int = 1,
        microbatches: int = 4,
        stages: int = 1,
        recompute: Any = "none",
        split: tuple[int, ...] | None = None,
        model: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
    ) -> Job:
        batch = dp * micro_batch_size * microbatches
        space = replace(
            quickstart,
            model=replace(quickstart.model, **(model or {})),
            cluster=replace(quickstart.cluster, devices_per_node=pp * tp * dp),
            training=replace(quickstart.training, global_batch_size=batch, **(training or {})),
        )
        split = split or spread_layers(space.model.layers, pp * stages)
        plan = Plan(pp, tp, dp, micro_batch_size, microbatches, schedule, stages, split, recompute)
        return make_job(space, plan)

    return make
