"""Work of passes against formulas printed in papers."""

from __future__ import annotations

import pytest
from cost_models import FAMILIES, GPT, LLAMA

from autotune.cost.activations import layer_held, layer_kept
from autotune.cost.assumptions import MEGATRON, WORKER, ZERO_BUBBLE, Assumptions
from autotune.cost.parameters import StageShape, padded_rows, stage_parameters
from autotune.cost.work import layer_work

MIDDLE = StageShape(1, False, False)
S, B, H, A = 256, 2, 512, 8


def test_a_gpt_layer_has_the_flops_of_table_1_of_the_zero_bubble_paper() -> None:
    work = layer_work(GPT, 1, B, "bfloat16", ZERO_BUBBLE, "none")
    assert work.forward.flops == S * B * H * (24 * H + 4 * S)
    assert work.backward.flops == S * B * H * (24 * H + 8 * S)
    assert work.weight.flops == S * B * H * 24 * H


def test_a_gpt_layer_holds_and_keeps_the_bytes_of_table_1_of_the_zero_bubble_paper() -> None:
    assert layer_held(GPT, 1, B, "bfloat16", ZERO_BUBBLE, "none") == S * B * (34 * H + 5 * A * S)
    assert layer_kept(GPT, 1, B, "bfloat16", ZERO_BUBBLE) == 32 * S * B * H


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_parallelism_shards_activations_as_in_table_2_of_korthikanti(tp: int) -> None:
    plain, scores = ZERO_BUBBLE, 5 * A * S * S * B / tp
    assert layer_held(GPT, tp, B, "bfloat16", plain, "none") == pytest.approx(S * B * H * (10 + 24 / tp) + scores)
    assert layer_held(GPT, tp, B, "bfloat16", plain, "selective") == pytest.approx(S * B * H * (10 + 24 / tp))
    assert layer_held(GPT, tp, B, "bfloat16", plain, "full") == 2 * S * B * H
    sharded = Assumptions(attention="unfused", dropout=True, sequence_parallel=True)
    assert layer_held(GPT, tp, B, "bfloat16", sharded, "none") == pytest.approx(S * B * H * 34 / tp + scores)


@pytest.mark.parametrize("name", FAMILIES)
def test_backward_and_weight_passes_cost_the_matmuls_of_the_forward(name: str) -> None:
    work = layer_work(FAMILIES[name], 1, B, "float32", WORKER, "none")
    assert work.backward.matmul_flops == work.weight.matmul_flops == work.forward.matmul_flops


@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_ranks_share_the_flops_evenly(tp: int) -> None:
    whole = layer_work(LLAMA, 1, B, "bfloat16", MEGATRON, "none")
    part = layer_work(LLAMA, tp, B, "bfloat16", MEGATRON, "none")
    for kind in ("forward", "backward", "weight"):
        assert getattr(part, kind).flops * tp == pytest.approx(getattr(whole, kind).flops)


def test_sequence_parallelism_moves_as_much_as_all_reduces_and_gathers_two_inputs_again() -> None:
    plain = layer_work(LLAMA, 4, B, "bfloat16", Assumptions(), "none")
    sharded = layer_work(LLAMA, 4, B, "bfloat16", MEGATRON, "none")
    assert plain.forward.gathers == sharded.forward.gathers == 4
    assert plain.backward.gathers == sharded.backward.gathers == 4
    assert (plain.weight.gathers, sharded.weight.gathers) == (0, 2)
    assert sharded.forward.gather_bytes == 4 * 2 * S * B * H
    assert sharded.forward.streamed_bytes < plain.forward.streamed_bytes


def test_one_rank_needs_no_collectives() -> None:
    work = layer_work(LLAMA, 1, B, "bfloat16", MEGATRON, "none")
    assert work.forward.gathers == work.backward.gathers == work.weight.gathers == 0


def test_full_recomputation_runs_the_forward_once_more() -> None:
    none = layer_work(GPT, 2, B, "bfloat16", ZERO_BUBBLE, "none")
    full = layer_work(GPT, 2, B, "bfloat16", ZERO_BUBBLE, "full")
    selective = layer_work(GPT, 2, B, "bfloat16", ZERO_BUBBLE, "selective")
    assert full.backward.flops == none.backward.flops + none.forward.flops
    assert selective.backward.flops == none.backward.flops + 4 * S * S * B * H / 2
    assert full.weight == selective.weight == none.weight


def test_stages_add_up_to_the_model_and_padding_counts_on_both_ends() -> None:
    stages = [StageShape(2, True, False), StageShape(2, False, False), StageShape(2, False, True)]
    assert sum(stage_parameters(LLAMA, stage, 1) for stage in stages) == LLAMA.parameter_count()
    padded = sum(stage_parameters(LLAMA, stage, 1, 128) for stage in stages)
    assert padded == LLAMA.parameter_count(padded_rows(LLAMA.vocab, 1, 128))
    assert padded_rows(128256, 8, 128) == 129024
    assert padded_rows(1000, 4, 1) == 1000
    assert padded_rows(1001, 4, 1) == 1004


def test_a_tied_head_costs_no_parameter_on_the_stage_that_embeds() -> None:
    tied = FAMILIES["qwen"]
    assert stage_parameters(tied, StageShape(6, True, True), 1) == tied.parameter_count()
    ends = StageShape(3, True, False), StageShape(3, False, True)
    copies = sum(stage_parameters(tied, stage, 1) for stage in ends)
    assert copies == tied.parameter_count() + tied.vocab * tied.hidden
