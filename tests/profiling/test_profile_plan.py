"""The `profile` fidelity: memory by walking the schedule, whole plans against real runs, the cache, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.profiling import profile_network
from autotune.profiling.assess import assess
from autotune.profiling.command import DEFAULT_WORKER
from autotune.profiling.pool import RankPool
from autotune.profiling.profile_cache import ProfileCache
from autotune.profiling.profile_errors import ProfileError
from autotune.profiling.profile_memory import walk
from autotune.profiling.profile_plan import PlanProfiler, Profile, profile_outcome, wanted_keys
from autotune.profiling.profile_records import DeviceKey, HostKey, PassesKey, PassFigures, StageFigures
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.stage_profiler import StageProfiler
from autotune.results.measurement import Measurement
from autotune.results.predicted import Predicted
from autotune.schedules.costs import PassCosts
from autotune.schedules.lowering import lower
from autotune.schedules.registry import SCHEDULES, build, find
from autotune.schedules.simulate import simulate
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, spread_layers
from autotune.space.training import TrainingSpec

MODEL = ModelSpec(
    layers=8, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn_hidden=64, vocab=101, sequence_length=32, name="small"
)
TRAINING = TrainingSpec(global_batch_size=8)
# On two ranks: plain and split pipelines, two stages a device, recomputation with stages of 4 and of 2 layers (of which
# 1, 2 and 3 are metered), tensor and data parallelism.
PLANS = (
    ("1f1b", 2, 1, 1, "none"),
    ("zb-h1", 2, 1, 1, "none"),
    ("v-half", 2, 1, 1, "none"),
    ("gpipe", 2, 1, 1, "full"),
    ("zb-h1", 2, 1, 1, "full"),
    ("v-half", 2, 1, 1, "full"),
    TENSOR := ("1f1b", 1, 2, 1, "none"),
    DATA := ("1f1b", 1, 1, 2, "none"),
)


def request(schedule: str, pp: int, tp: int, dp: int, recompute: str = "none", layers: int = 8) -> TrialRequest:
    stages = find(schedule).min_stages_per_device
    model = dataclasses.replace(MODEL, layers=layers)
    microbatches = TRAINING.global_batch_size // dp
    plan = Plan(
        pp,
        tp,
        dp,
        1,
        microbatches,
        schedule,
        stages,
        spread_layers(layers, pp * stages),
        recompute,  # type: ignore[arg-type]
    )
    link = Link(1e-4, 1e9)
    cluster = ClusterSpec(1, plan.devices, "cpu", None, link, link)
    built = build(schedule, pp, microbatches, stages)
    return TrialRequest(0, plan, built, model, cluster, TRAINING, measured_steps=3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ProfileCache:
    return ProfileCache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="module")
def one_core() -> Iterator[None]:
    """Profiles here are those of crowded ranks, as on a machine of one core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile_network, "usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="module")
def profiles(cache: ProfileCache) -> list[Profile]:
    with PlanProfiler(MODEL, "float32", "cpu", cache) as profiler:
        return [profiler.profile(request(*plan)) for plan in PLANS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Measurement]]:
    folder = tmp_path_factory.mktemp("runs")
    pool = RankPool(DEFAULT_WORKER, folder / "ranks")
    found = []
    try:
        for number, plan in enumerate(PLANS):
            where = folder / str(number)
            asked = request(*plan)
            outcome = assess(asked, pool.run(asked, where, 120.0), where, cores=1)
            assert outcome.measurement is not None, outcome.reason
            found.append(outcome.measurement)
        yield found
    finally:
        pool.close()


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_walked_activations_are_those_of_the_simulated_timeline(schedule: str) -> None:
    kind = find(schedule)
    built = build(schedule, 4, 8, kind.min_stages_per_device)
    held, kept = [2.0 + 0.25 * s for s in range(built.stages)], [1.0 + 0.125 * s for s in range(built.stages)]
    nothing = (0.0,) * built.stages
    costs = PassCosts((1.0,) * built.stages, nothing, nothing, 0.0, tuple(held), tuple(kept))
    item = PassFigures(1.0, 0.0, 0.0, 0.0)
    figures = {
        s: StageFigures(dict.fromkeys(("F", "B", "W", "BW"), item), held[s], kept[s], 0.0) for s in range(built.stages)
    }
    walked = [walk(actions, figures, 0.0, built.stages - 1).total_bytes for actions in lower(built)]
    assert walked == pytest.approx(simulate(built, costs).peak_activation)


@pytest.mark.ranks
def test_profiled_peaks_are_those_of_runs(profiles: list[Profile], runs: list[Measurement]) -> None:
    for profile, measured in zip(profiles, runs, strict=True):
        assert profile.peak_memory_bytes == pytest.approx(measured.peak_memory_bytes, rel=0.03), profile.plan.describe()


@pytest.mark.ranks
def test_profiled_steps_are_near_those_of_runs(profiles: list[Profile], runs: list[Measurement]) -> None:
    # The machine of a test may be busy; benchmarks/prediction_accuracy.py measures how good profiles are.
    for profile, measured in zip(profiles, runs, strict=True):
        assert 1 / 3 < profile.step_time_s / measured.step_time_s < 3, profile.plan.describe()


def test_breakdown_sums_to_the_step(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert sum(dataclasses.astuple(profile.breakdown)) == pytest.approx(profile.step_time_s)
        assert all(part >= 0 for part in dataclasses.astuple(profile.breakdown))


def test_parallelism_shows_in_the_breakdown(profiles: list[Profile]) -> None:
    pipeline, tensor, data = (profiles[PLANS.index(plan)].breakdown for plan in (PLANS[0], TENSOR, DATA))
    assert pipeline.bubble_s > 0
    assert pipeline.tp_s == 0
    assert tensor.tp_s > 0
    assert tensor.bubble_s == data.bubble_s == 0
    assert data.dp_s > pipeline.dp_s


def test_every_rank_has_a_peak(profiles: list[Profile]) -> None:
    for profile in profiles:
        per_rank = profile.measurement.peak_memory_bytes_per_rank
        assert per_rank is not None
        assert len(per_rank) == profile.plan.devices
        assert max(per_rank) == profile.peak_memory_bytes


def test_second_profile_comes_from_the_cache(profiles: list[Profile], cache: ProfileCache) -> None:
    with PlanProfiler(MODEL, "float32", "cpu", cache) as profiler:
        again = [profiler.profile(request(*plan)) for plan in PLANS]
        assert profiler.stages.measured == 0
    assert again == profiles


def test_deeper_models_of_the_same_layers_need_no_new_measurement(profiles: list[Profile], cache: ProfileCache) -> None:
    deeper = request("1f1b", 2, 1, 1, layers=24)
    with PlanProfiler(deeper.model, "float32", "cpu", cache) as profiler:
        profile = profiler.profile(deeper)
        assert profiler.stages.measured == 0
    assert profile.step_time_s > 1.5 * profiles[0].step_time_s
    assert profile.peak_memory_bytes > 2 * profiles[0].peak_memory_bytes


def test_shapes_grow_with_the_kinds_of_stages_not_with_the_plans() -> None:
    requests = [
        request(name, pp, 1, 1) for name in sorted(SCHEDULES) for pp in (2, 4) if find(name).min_stages_per_device <= 2
    ]
    keys = wanted_keys(requests)
    assert len(requests) > 20
    assert [key for key in keys if isinstance(key, PassesKey)] == [
        PassesKey(1, 1, "none", False, 2),
        PassesKey(1, 1, "none", False, 4),
    ]
    # Outside the passes devices differ by their ends; 2 and 4 ranks crowd the cores differently.
    assert len([key for key in keys if isinstance(key, DeviceKey)]) == 8


def test_plan_beyond_its_memory_is_refused_and_says_what_fills_it(profiles: list[Profile], cache: ProfileCache) -> None:
    asked = request(*PLANS[0])
    peak = profiles[0].peak_memory_bytes
    with PlanProfiler(MODEL, "float32", "cpu", cache) as profiler:
        fits = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, memory_limit_bytes=peak))
        outcome, profile = profile_outcome(profiler, fits)
        assert outcome.state == "predicted"
        assert outcome.measurement == profiles[0].measurement
        assert profile is not None
        tight = dataclasses.replace(asked, cluster=dataclasses.replace(asked.cluster, memory_limit_bytes=peak // 2))
        outcome, _ = profile_outcome(profiler, tight)
    assert outcome.state == "refused"
    assert outcome.reason.startswith("refused (estimate): pipeline device")
    assert "parameters" in outcome.reason


@pytest.mark.ranks
def test_wall_clock_of_ranks_with_a_core_each_is_profiled_with_the_machines_own_communication(
    cache: ProfileCache, runs: list[Measurement], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_network, "usable_cores", lambda: 2)
    with PlanProfiler(MODEL, "float32", "cpu", cache) as profiler:
        for plan in (PLANS[0], TENSOR, DATA):
            profile, measured = profiler.profile(request(*plan)), runs[PLANS.index(plan)]
            # The links of the space say nothing about this machine: with ones that take an hour nothing changes.
            slow = request(*plan)
            hour = Link(3600.0, 1.0)
            slow = dataclasses.replace(
                slow, cluster=dataclasses.replace(slow.cluster, intra_node=hour, inter_node=hour)
            )
            assert profiler.profile(slow).step_time_s == profile.step_time_s
            assert sum(dataclasses.astuple(profile.breakdown)) == pytest.approx(profile.step_time_s)
            assert 1 / 4 < profile.step_time_s / measured.step_time_wall_s < 4, profile.plan.describe()


def test_profiles_refuse_alike_with_and_without_recomputation(profiles: list[Profile]) -> None:
    for profile in profiles:
        assert profile.refusal(profile.peak_memory_bytes / 1.04) is None
        assert profile.refusal(profile.peak_memory_bytes / 1.06) is not None


def test_profile_fills_the_predicted_columns_of_the_table(profiles: list[Profile]) -> None:
    profile = profiles[0]
    columns = Predicted.of(profile).columns(1000, None)
    assert columns["predicted_step_time_s"] == profile.step_time_s
    assert columns["predicted_peak_memory_bytes"] == profile.peak_memory_bytes
    parts = ("compute", "bubble", "tp", "pp", "dp", "optimizer", "overhead")
    assert sum(columns[f"predicted_{part}_s"] or 0 for part in parts) == pytest.approx(profile.step_time_s)


def test_measuring_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    profiler = StageProfiler(MODEL, "float32", "cpu", ProfileCache(tmp_path), timeout_s=0.01)
    with pytest.raises(ProfileError, match=r"more than 0\.01 s") as failure:
        profiler.device_figures(DeviceKey(1, 1, "middle"))
    assert failure.value.state == "timeout"
    assert profiler._processes == []


def test_shape_that_cannot_be_built_fails_alone(cache: ProfileCache, profiles: list[Profile]) -> None:
    with StageProfiler(MODEL, "float32", "cpu", cache) as profiler:
        with pytest.raises(ProfileError) as failure:
            profiler.passes(PassesKey(3, 1, "none", False))  # 3 does not divide the heads
        assert failure.value.state == "failed"
        assert profiler.device_figures(DeviceKey(1, 1, "middle"))[1].parameters > 0


def test_measuring_ends_soon_after_it_is_told_to_stop(tmp_path: Path) -> None:
    profiler = StageProfiler(MODEL, "float32", "cpu", ProfileCache(tmp_path))
    profiler.stop = lambda: True
    for measure in (
        lambda: profiler.device_figures(DeviceKey(1, 1, "middle")),
        lambda: profiler.host_figures(HostKey("tp", 2, 2)),
    ):
        with pytest.raises(ProfileError, match="profiling was stopped"):
            measure()
    assert not profiler._processes
