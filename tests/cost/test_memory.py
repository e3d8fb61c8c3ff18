"""States by dtype and sharding, peaks over time, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cost_models import GPT, LLAMA_70B

from autotune.cost.assumptions import MEGATRON, WORKER, ZERO_BUBBLE, Assumptions
from autotune.cost.memory import DeviceMemory, memory_refusal
from autotune.cost.predict import predict_plan
from autotune.errors import UserError
from autotune.schedules import registry
from autotune.schedules.simulate import simulate
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.plan import Plan, spread_layers
from autotune.space.training import TrainingSpec

GIB = 1024**3
CLUSTER = ClusterSpec(8, 8, "a100-80g", 76 * GIB, Link(3e-6, 300e9), Link(5e-6, 25e9))


def _plan(pp: int, schedule: str = "1f1b", *, tp: int = 1, dp: int = 1, m: int = 16, layers: int = 6) -> Plan:
    v = registry.find(schedule).min_stages_per_device
    return Plan(pp, tp, dp, 1, m, schedule, v, spread_layers(layers, pp * v))


@pytest.mark.parametrize(
    ("assumptions", "dtype", "dp", "total"),
    [
        (Assumptions(), "float32", 1, 16),
        (Assumptions(), "bfloat16", 4, 16),
        (replace(Assumptions(), gradient_bytes=4), "bfloat16", 4, 18),
        (MEGATRON, "bfloat16", 4, 2 + 4 + 12 / 4),
        (ZERO_BUBBLE, "bfloat16", 1, 16),
        (WORKER, "float32", 1, 16),
        (WORKER, "float32", 4, 4 + 4 + 12 / 4),
        (WORKER, "bfloat16", 1, 2 + 4 + 12),
        (WORKER, "bfloat16", 4, 2 + 4 + 12 / 4),
    ],
)
def test_states_take_the_bytes_of_the_zero_paper(assumptions: Assumptions, dtype, dp: int, total: float) -> None:
    assert assumptions.state_bytes(dtype, dp).total == total


def test_assumptions_refuse_nonsense_and_name_the_legal_values() -> None:
    with pytest.raises(UserError, match="share from 0 to 1"):
        Assumptions(dp_overlap=1.5)
    with pytest.raises(UserError, match="2, 4 or None"):
        Assumptions(gradient_bytes=3)


@pytest.mark.parametrize("schedule", sorted(registry.SCHEDULES))
def test_the_peak_holds_the_activations_that_the_simulated_memory_curve_holds(schedule: str) -> None:
    plan, fixed = _plan(3, schedule, m=12), replace(ZERO_BUBBLE, adapts_schedules=False)
    got = predict_plan(plan, GPT, CLUSTER, TrainingSpec(12, "bfloat16"), fixed, exact=True)
    timeline = simulate(registry.build(schedule, 3, 12, plan.stages_per_device), got.pass_costs)
    for device, memory in enumerate(got.memory):
        most = max(held for _, held in timeline.memory_curve(device))
        assert memory.activations <= most * (1 + 1e-9)
        assert memory.activations + memory.temporary >= most * (1 - 1e-9)


def test_the_first_device_is_not_always_the_heaviest() -> None:
    cut = replace(LLAMA_70B, layers=14, vocab=1024)
    plan = _plan(4, layers=14)
    assert plan.layer_split == (3, 4, 4, 3)
    got = predict_plan(plan, cut, CLUSTER, TrainingSpec(16, "bfloat16"), MEGATRON)
    assert got.heaviest == 1


def test_parts_of_the_memory_sum_to_the_peak() -> None:
    got = predict_plan(_plan(2), GPT, CLUSTER, TrainingSpec(16, "bfloat16"), MEGATRON)
    for memory in got.memory:
        assert sum(memory.parts().values()) == pytest.approx(memory.total)
        assert list(memory.parts().values()) == sorted(memory.parts().values(), reverse=True)
    assert got.peak_memory_bytes == round(max(memory.total for memory in got.memory))


def test_recomputation_and_sharding_shrink_the_peak() -> None:
    def peak(assumptions: Assumptions, plan: Plan) -> int:
        training = TrainingSpec(32, "bfloat16")
        return predict_plan(plan, GPT, CLUSTER, training, assumptions).peak_memory_bytes

    plain, plan = ZERO_BUBBLE, _plan(2, dp=2, m=16)
    full = replace(plan, recompute="full")
    assert peak(plain, full) < peak(replace(plain, selective_recompute=True), plan) < peak(plain, plan)
    assert peak(replace(plain, sharding="zero1"), plan) < peak(plain, plan)
    tp = replace(plan, tp=2, dp=1)
    assert peak(replace(plain, sequence_parallel=True), tp) < peak(plain, tp)


def _device(gib: float) -> DeviceMemory:
    return DeviceMemory(gib / 4 * GIB, gib / 4 * GIB, gib / 2 * GIB, 0.0, 0.0, 0.0)


def test_sizes_are_told_in_the_unit_they_have() -> None:
    tiny = DeviceMemory(2048.0, 100.0, 3 * 1024.0**2, 0.0, 0.0, 0.0)
    told = memory_refusal((tiny,), 1.5 * 1024**2)
    assert told is not None
    assert "would need 3.00 MiB of 1.50 MiB" in told
    assert "optimizer 3.00 MiB, parameters 2.00 KiB, gradients 100 B" in told


def test_a_plan_is_refused_only_beyond_the_proven_error() -> None:
    light = _device(10.0)
    assert memory_refusal((light, _device(102.0)), 100 * GIB, proven_error=0.03) is None
    assert memory_refusal((light, _device(104.0)), None) is None
    refusal = memory_refusal((light, _device(104.0)), 100 * GIB, proven_error=0.03)
    assert refusal is not None
    assert refusal.startswith("refused (estimate): pipeline device 1 ")
    assert "optimizer 52.00" in refusal
