"""Predicted memory against what real ranks meter."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.cost.predict import predict_plan
from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER
from autotune.profiling.pool import RankPool
from autotune.profiling.protocol import TrialRequest
from autotune.schedules import registry
from autotune.space.plan import Plan
from autotune.space.space import load_space
from autotune.space.training import DType

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

SPACE = Path(__file__).parents[2] / "search_spaces/quickstart.yaml"
METHODS = [(4, 1, 1, "zb-h1"), (2, 2, 1, "1f1b"), (2, 1, 2, "v-half"), (1, 1, 4, "1f1b")]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_rank_needs_the_memory_that_was_predicted(
    dtype: DType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    space = load_space(SPACE)
    space = replace(space, training=replace(space.training, dtype=dtype))
    pool = RankPool(DEFAULT_WORKER, tmp_path / "ranks")
    try:
        for trial, (pp, tp, dp, name) in enumerate(METHODS):
            v = registry.find(name).min_stages_per_device
            layers = space.model.layers // (pp * v)
            m = space.training.global_batch_size // dp
            plan = Plan(pp, tp, dp, 1, m, name, v, (layers,) * (pp * v))
            request = TrialRequest(
                trial, plan, registry.build(name, pp, m, v), space.model, space.cluster, space.training
            )
            outcome = assess(request, pool.run(request, tmp_path / str(trial), 120.0), tmp_path / str(trial))
            assert outcome.measurement is not None, outcome.reason
            measured = outcome.measurement.peak_memory_bytes_per_rank
            assert measured is not None
            predicted = predict_plan(plan, space.model, space.cluster, space.training, exact=True)
            for rank, truth in enumerate(measured):
                assert predicted.memory[rank // (tp * dp)].total == pytest.approx(truth, rel=0.06)
    finally:
        pool.close()
