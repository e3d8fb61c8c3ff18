"""The built model is the one that the space describes, in every partition."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.profiling.data import Batch
from autotune.profiling.init import initial_value, initialise
from autotune.profiling.model import Stage, StageContext, stage_layers
from autotune.profiling.weight_grad import WeightGradStore
from autotune.space.model import ModelSpec
from autotune.space.plan import spread_layers

sys.path.insert(0, str(Path(__file__).parent))
from cases import FAMILIES
from reference import parameter_shapes, reference

SPECS = [replace(spec, layers=5) for spec in FAMILIES.values()]


def build(spec: ModelSpec, split: tuple[int, ...], stage: int, loss_scale: float = 1.0) -> Stage:
    built = Stage(spec, split, stage, StageContext(WeightGradStore(), loss_scale=loss_scale))
    initialise(built, spec, seed=0)
    return built


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_every_stage_has_the_parameters_the_spec_says(spec: ModelSpec, stages: int):
    split = spread_layers(spec.layers, stages)
    for stage in range(stages):
        expected = split[stage] * spec.layer_parameters()
        expected += (stage == 0) * spec.embedding_parameters()
        expected += (stage == stages - 1) * (spec.norm_parameters() + spec.vocab * spec.hidden)
        assert sum(p.numel() for p in build(spec, split, stage).parameters()) == expected


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_names_and_shapes_are_those_of_the_whole_model_and_count_as_the_spec_says(spec: ModelSpec):
    shapes = parameter_shapes(spec)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == spec.parameter_count()
    whole = build(spec, (spec.layers,), 0)
    named = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    if spec.tied_embeddings:
        assert named.pop("head.weight") == named["embedding.weight"]
    assert named == shapes


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_a_stage_starts_with_the_same_weights_whatever_the_split(spec: ModelSpec):
    whole = dict(build(spec, (spec.layers,), 0).named_parameters())
    for stage in range(3):
        for name, parameter in build(spec, (1, 3, 1), stage).named_parameters():
            assert torch.equal(parameter, whole[name]), name


def test_weights_differ_between_layers_names_and_seeds():
    spec = SPECS[0]
    values = [
        initial_value(spec, seed, f"layers.{layer}.{name}.weight", (8, 8))
        for seed in (0, 1)
        for layer in (0, 1)
        for name in ("mlp.up", "mlp.down", "attention.query")
    ]
    assert len({float(value[0, 0]) for value in values}) == len(values)


def test_padded_rows_start_at_zero_and_the_others_don_t_depend_on_the_padding():
    spec = SPECS[0]
    plain = initial_value(spec, 0, "embedding.weight", (spec.vocab, spec.hidden))
    padded = initial_value(spec, 0, "embedding.weight", (spec.vocab + 3, spec.hidden))
    assert torch.equal(padded[: spec.vocab], plain)
    assert not padded[spec.vocab :].any()


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_loss_of_the_stages_in_a_row_is_that_of_the_reference_model(spec: ModelSpec):
    truth = reference(spec, 0, 4)
    split = spread_layers(spec.layers, 3)
    batch = Batch(0, 0, 0, 4, spec.sequence_length, spec.vocab, torch.device("cpu"))
    x = batch.inputs(0)
    for stage in range(3):
        module = build(spec, split, stage, 1 / (4 * spec.sequence_length))
        x = module(x, batch.targets(0)) if stage == 2 else module(x)
    assert float(x.detach()) == pytest.approx(truth.loss, rel=1e-6)


def test_layers_of_the_stages_are_consecutive_and_complete():
    split = (2, 0, 3, 1)
    assert [i for stage in range(4) for i in stage_layers(split, stage)] == list(range(6))
