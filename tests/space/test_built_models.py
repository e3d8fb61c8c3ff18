"""The number of parameters a space shows is the number a trial builds, stage by stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autotune.profiling.model import Stage, StageContext
from autotune.profiling.weight_grad import WeightGradStore
from autotune.space.hf_config import read_hf_config
from autotune.space.plan import spread_layers

MODELS = Path(__file__).parents[2] / "search_spaces" / "models"


@pytest.mark.parametrize("stages", [1, 4])
@pytest.mark.parametrize("name", sorted(path.name for path in MODELS.iterdir()))
def test_stages_together_hold_the_parameters_that_are_shown(name: str, stages: int) -> None:
    spec = read_hf_config(MODELS / name, 64).spec
    split = spread_layers(spec.layers, stages)
    with torch.device("meta"):
        parts = [Stage(spec, split, stage, StageContext(store=WeightGradStore())) for stage in range(stages)]
    held = sum(parameter.numel() for part in parts for parameter in part.parameters())
    copy_of_table = spec.vocab * spec.hidden if spec.tied_embeddings else 0  # stages are tied when a device holds both
    assert held - copy_of_table == spec.parameter_count()
