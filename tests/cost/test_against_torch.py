"""The formulas of the cost model against what torch counts on the real model, without running it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import cost_torch_stage as torch_stage
import pytest
from cost_models import FAMILIES, LLAMA_70B

from autotune.cost.activations import stage_memory
from autotune.cost.assumptions import WORKER
from autotune.cost.parameters import StageShape, stage_parameters
from autotune.cost.work import stage_work

SPLIT = (2, 2, 2)


@pytest.fixture(scope="module", params=[1, 4], ids=["tp1", "tp4"])
def mesh(request: pytest.FixtureRequest) -> Iterator[object]:
    tp = request.param
    with torch_stage.fake_ranks(tp) if tp > 1 else nullcontext() as found:
        yield found


def _tp(mesh) -> int:
    return 1 if mesh is None else mesh.size()


def _shape(stage: int, split: tuple[int, ...] = SPLIT) -> StageShape:
    return StageShape(split[stage], stage == 0, stage == len(split) - 1)


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_and_matmul_flops_equal_torchs_count(name: str, stage: int, mesh: object) -> None:
    model, tp = FAMILIES[name], _tp(mesh)
    counted = torch_stage.count_stage(model, SPLIT, stage, mesh, 2, "float32")
    assert stage_parameters(model, _shape(stage), tp) == counted.parameters
    work = stage_work(model, _shape(stage), tp, 2, "float32", WORKER, "none")
    assert work.forward.matmul_flops == counted.forward_flops
    assert work.backward.matmul_flops == counted.backward_flops
    assert work.weight.matmul_flops == counted.weight_flops


@pytest.mark.parametrize("name", FAMILIES)
def test_unfused_attention_has_the_flops_that_torch_counts(name: str) -> None:
    counted = torch_stage.count_stage(FAMILIES[name], SPLIT, 1, None, 2, "float32", unfused=True)
    unfused = replace(WORKER, attention="unfused")
    work = stage_work(FAMILIES[name], _shape(1), 1, 2, "float32", unfused, "none")
    assert work.forward.matmul_flops == counted.forward_flops
    assert work.backward.matmul_flops == counted.backward_flops


def test_flash_attention_has_half_the_flops_of_the_whole_square() -> None:
    model = FAMILIES["llama"]
    flash = stage_work(model, _shape(1), 1, 2, "float32", WORKER, "none").forward
    whole = stage_work(model, _shape(1), 1, 2, "float32", replace(WORKER, attention="unfused"), "none").forward
    assert whole.flops - whole.matmul_flops == 0
    assert flash.flops - flash.matmul_flops == (whole.matmul_flops - flash.matmul_flops) / 2


@pytest.mark.parametrize("stage", range(3))
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in FAMILIES), ("llama", "bfloat16")])
def test_activations_held_and_kept_are_torchs_within_two_percent(name: str, dtype: str, stage: int, mesh) -> None:
    model = FAMILIES[name]
    counted = torch_stage.count_stage(model, SPLIT, stage, mesh, 2, dtype)
    memory = stage_memory(model, _shape(stage), _tp(mesh), 2, dtype, WORKER, "none")
    assert memory.held == pytest.approx(counted.held, rel=0.02)
    assert memory.kept == pytest.approx(counted.kept, rel=0.02)


@pytest.mark.parametrize("name", FAMILIES)
def test_full_recomputation_holds_the_inputs_of_layers_alone(name: str) -> None:
    counted = torch_stage.count_stage(FAMILIES[name], SPLIT, 1, None, 2, "float32", recompute=True)
    memory = stage_memory(FAMILIES[name], _shape(1), 1, 2, "float32", WORKER, "full")
    assert memory.held == pytest.approx(counted.held, rel=0.02)
    work = stage_work(FAMILIES[name], _shape(1), 1, 2, "float32", WORKER, "full")
    assert work.backward.matmul_flops == counted.backward_flops


def test_a_70b_stage_is_as_large_as_torch_says(mesh) -> None:
    split, tp = (5, 70, 5), _tp(mesh)
    counted = torch_stage.count_stage(LLAMA_70B, split, 2, mesh, 1, "bfloat16")
    memory = stage_memory(LLAMA_70B, _shape(2, split), tp, 1, "bfloat16", WORKER, "none")
    assert stage_parameters(LLAMA_70B, _shape(2, split), tp) == counted.parameters
    assert memory.held == pytest.approx(counted.held, rel=0.01)
    assert memory.kept == pytest.approx(counted.kept, rel=0.01)
