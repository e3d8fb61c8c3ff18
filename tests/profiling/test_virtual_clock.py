"""The virtual clock replays measured passes; what it must give is computed by hand here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.cost.communication import gather_s
from autotune.profiling.protocol import PassTime, RankReport, TrialRequest
from autotune.profiling.virtual_clock import pick_clock, replay
from autotune.schedules import registry
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan
from autotune.space.training import TrainingSpec

FREE = Link(0.0, 1e30)


def make_request(
    pp: int = 2, tp: int = 1, dp: int = 1, m: int = 4, schedule: str = "1f1b", **cluster: object
) -> TrialRequest:
    stages = registry.find(schedule).default_stages_per_device()
    plan = Plan(pp, tp, dp, 1, m, schedule, stages, (1,) * (pp * stages))
    model = ModelSpec(pp * stages, 8, 2, 2, 4, 8, 16, 4)
    spec = ClusterSpec(1, pp * tp * dp, "cpu", None, FREE, FREE)
    built = registry.build(schedule, pp, m, stages)
    return TrialRequest(0, plan, built, model, replace(spec, **cluster), TrainingSpec(m * dp), measured_steps=1)  # type: ignore[arg-type]


def report(
    rank: int, stages: tuple[int, ...], f: float, b: float, w: float | None = None, **values: object
) -> RankReport:
    """A report whose CPU times are f, b, w and whose wall times are ten times that."""
    kinds = [("F", f), ("BW", b)] if w is None else [("F", f), ("B", b), ("W", w)]
    passes = tuple(PassTime(kind, stage, time, 10 * time) for stage in stages for kind, time in kinds)
    return RankReport(rank, "ok", step_wall_s=(99.0,), passes=(passes,), **values)  # type: ignore[arg-type]


def test_1f1b_takes_p_minus_1_plus_m_forwards_and_backwards() -> None:
    step = replay(make_request(pp=2, m=4), [report(0, (0,), 1.0, 2.0), report(1, (1,), 1.0, 2.0)], "virtual")[0]
    assert step.step_time_s == pytest.approx((2 - 1 + 4) * 3.0)
    assert step.bubble_rate == pytest.approx(1 - 12 / 15)


def test_split_backward_fills_the_bubble_of_zb_h1() -> None:
    fused = replay(make_request(pp=2, m=8), [report(r, (r,), 1.0, 2.0) for r in range(2)], "virtual")[0]
    split = make_request(pp=2, m=8, schedule="zb-h1")
    step = replay(split, [report(r, (r,), 1.0, 1.0, 1.0) for r in range(2)], "virtual")[0]
    # published bubble of ZB-H1: (p - 1)(F + B - W)
    assert step.step_time_s == pytest.approx(8 * 3.0 + 1.0)
    assert step.step_time_s < fused.step_time_s


def test_slowest_rank_of_a_stage_counts() -> None:
    request = make_request(pp=1, dp=2, m=4)
    step = replay(request, [report(0, (0,), 1.0, 2.0), report(1, (0,), 1.5, 2.0)], "virtual")[0]
    assert step.step_time_s == pytest.approx(4 * 3.5)


def test_message_costs_latency_and_bytes_over_bandwidth() -> None:
    # 4 tokens x hidden 8 x 4 bytes = 128 bytes a message, over a link that carries 128 of its nominal 160 bytes/s
    request = make_request(pp=2, m=1, intra_node=Link(0.5, 160.0))
    step = replay(request, [report(0, (0,), 1.0, 2.0), report(1, (1,), 1.0, 2.0)], "virtual")[0]
    assert step.step_time_s == pytest.approx(1 + 1.5 + 1 + 2 + 1.5 + 2)


def test_links_whose_bandwidth_was_measured_are_used_in_full() -> None:
    request = replace(make_request(pp=2, m=1, intra_node=Link(0.5, 128.0)), link_efficiency=1.0)
    step = replay(request, [report(0, (0,), 1.0, 2.0), report(1, (1,), 1.0, 2.0)], "virtual")[0]
    assert step.step_time_s == pytest.approx(1 + 1.5 + 1 + 2 + 1.5 + 2)
    assert TrialRequest.from_dict(request.to_dict()) == request


def test_hops_between_nodes_take_the_network_between_nodes() -> None:
    request = make_request(pp=2, m=1, nodes=2, devices_per_node=1, inter_node=Link(0.25, 1e30))
    step = replay(request, [report(0, (0,), 1.0, 2.0), report(1, (1,), 1.0, 2.0)], "virtual")[0]
    assert step.step_time_s == pytest.approx(6 + 2 * 0.25)


def test_counted_tp_collectives_lengthen_the_passes_they_are_in() -> None:
    request = make_request(pp=1, tp=2, m=4, intra_node=Link(0.01, 100.0))
    counts = {"collective_bytes": {"tp": 200}, "collective_calls": {"tp": 16}}
    reports = [report(r, (0,), 1.0, 2.0, **counts) for r in range(2)]
    step = replay(request, reports, "virtual")[0]
    assert step.step_time_s == pytest.approx(4 * 3.0 + 200 / 80 + 16 * 0.01)
    # wall times hold the collectives already
    assert replay(request, reports, "wall")[0].step_time_s == pytest.approx(4 * 30.0)


def test_tp_4_costs_what_the_cost_model_says_of_the_same_collectives() -> None:
    link = Link(0.01, 1000.0)
    request = make_request(pp=1, tp=4, m=1, intra_node=link)
    # as counted: 3 gathers of 400 bytes, of which each rank sends 3/4, and an all-reduce of 80, which are 2 rings
    counts = {"collective_bytes": {"tp": 3 * 300 + 2 * 60}, "collective_calls": {"tp": 3 + 2}}
    step = replay(request, [report(r, (0,), 1.0, 2.0, **counts) for r in range(4)], "virtual")[0]
    assert step.parts.tp_s == pytest.approx(3 * gather_s(400, 4, link, 0.8) + 2 * gather_s(80, 4, link, 0.8))
    # by hand: every ring has 3 steps, each with the latency
    assert step.parts.tp_s == pytest.approx((900 + 120) / 800 + 5 * 3 * 0.01)


def test_reduction_and_optimizer_follow_the_last_pass_of_each_device() -> None:
    request = make_request(pp=2, dp=2, m=2, intra_node=Link(0.0, 100.0))
    slow = {"collective_bytes": {"dp": 100}, "collective_calls": {"dp": 1}, "optimizer_cpu_s": (0.25,)}
    reports = [report(rank, (rank // 2,), 1.0, 2.0, **(slow if rank == 0 else {})) for rank in range(4)]
    quick = replay(request, [report(rank, (rank // 2,), 1.0, 2.0) for rank in range(4)], "virtual")[0]
    step = replay(request, reports, "virtual")[0]
    assert step.step_time_s == pytest.approx(quick.step_time_s + 100 / 80 + 0.25)
    assert step.bubble_rate == pytest.approx(quick.bubble_rate)


def test_pass_that_no_rank_timed_is_named() -> None:
    with pytest.raises(ValueError, match="pass BW of stage 1"):
        replay(
            make_request(),
            [report(0, (0,), 1.0, 2.0), replace(report(1, (1,), 1.0, 2.0), passes=((PassTime("F", 1, 1.0, 1.0),),))],
            "virtual",
        )


def test_clock_is_virtual_only_when_cpu_ranks_outnumber_cores_and_passes_were_timed() -> None:
    timed = [report(rank, (0,), 1.0, 2.0) for rank in range(4)]
    assert pick_clock("cpu", 4, 2.0, timed) == "virtual"
    assert pick_clock("cpu", 4, 4.0, timed) == "wall"
    assert pick_clock("cuda", 4, 2.0, timed) == "wall"
    assert pick_clock("cpu", 4, 2.0, [RankReport(0, "ok")] * 4) == "wall"
