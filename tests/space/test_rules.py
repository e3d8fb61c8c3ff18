"""Each rule refuses alone, with its numbers, and a point that breaks several is told all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.schedules.registry import SCHEDULES, build
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.rules import RULES, Point, broken_rules, derive_dp, derive_microbatches
from autotune.space.training import TrainingSpec

LINK = Link(1e-5, 1e9)
MODEL = ModelSpec(layers=8, hidden=128, heads=4, kv_heads=2, head_dim=32, ffn_hidden=256, vocab=500, sequence_length=64)
CLUSTER = ClusterSpec(1, 8, "cpu", None, LINK, LINK)
TRAINING = TrainingSpec(global_batch_size=16)


def broken(
    pp: int = 2,
    tp: int = 2,
    micro_batch_size: int = 1,
    schedule: str = "1f1b",
    stages: int = 1,
    model: ModelSpec = MODEL,
    cluster: ClusterSpec = CLUSTER,
    training: TrainingSpec = TRAINING,
) -> dict[str, str]:
    """Broken rules (id -> message) of one point."""
    dp = derive_dp(pp, tp, cluster)
    microbatches = derive_microbatches(dp, micro_batch_size, training)
    point = Point(pp, tp, dp, micro_batch_size, microbatches, schedule, stages, "none")
    return dict(broken_rules(point, model, cluster, training))


def test_a_fitting_point_breaks_no_rule() -> None:
    assert broken() == {}


CASES = {
    "world": ({"pp": 3, "tp": 2}, ["3", "2", "6", "8"]),
    "tp-heads": (
        {"tp": 4, "model": replace(MODEL, heads=6, kv_heads=6, head_dim=32)},
        ["tp 4", "6 attention heads"],
    ),
    "tp-kv-heads": ({"tp": 4}, ["tp 4", "2 key/value heads"]),
    "tp-hidden": ({"model": replace(MODEL, hidden=129)}, ["tp 2", "129"]),
    "tp-ffn": ({"model": replace(MODEL, ffn_hidden=255)}, ["tp 2", "255"]),
    "sequence-parallel": ({"model": replace(MODEL, sequence_length=63)}, ["tp 2", "63"]),
    "layers-cover-stages": (
        {"schedule": "interleaved-1f1b", "stages": 5},
        ["pp 2", "5 stages per device", "10 stages", "8 layers"],
    ),
    "global-batch": ({"micro_batch_size": 3}, ["dp 2", "micro_batch_size 3", "6", "16"]),
    "schedule-stages": ({"schedule": "v-half", "stages": 1}, ["v-half", "exactly 2", "1"]),
    "schedule-microbatches": (
        {"schedule": "interleaved-1f1b", "stages": 2, "training": TrainingSpec(global_batch_size=6)},
        ["interleaved-1f1b", "multiple of 2", "3"],
    ),
    "schedule-size": (
        {"pp": 1, "tp": 1, "training": TrainingSpec(global_batch_size=4 * 10**8)},
        ["1 x 1 stages", "50,000,000 microbatches", "100,000,000 passes", "1,000,000"],
    ),
    "tied-embeddings": (
        {"model": replace(MODEL, tied_embeddings=True), "training": replace(TRAINING, sum_tied_gradients=False)},
        ["devices 0 and 1", "sum_tied_gradients"],
    ),
}


@pytest.mark.parametrize("rule", [rule.id for rule in RULES])
def test_every_rule_can_be_the_only_one_that_refuses_and_shows_its_numbers(rule: str) -> None:
    point, numbers = CASES[rule]
    problems = broken(**point)  # type: ignore[arg-type]
    assert list(problems) == [rule]
    for number in numbers:
        assert number in problems[rule]


def test_all_rules_that_a_point_breaks_are_listed() -> None:
    problems = broken(pp=2, tp=8, stages=5, schedule="v-half", model=replace(MODEL, hidden=100, ffn_hidden=9))
    assert set(problems) == {
        "world",
        "tp-heads",
        "tp-kv-heads",
        "tp-hidden",
        "tp-ffn",
        "layers-cover-stages",
        "schedule-stages",
    }


def test_tied_embeddings_are_legal_where_the_first_and_last_stage_share_a_device() -> None:
    tied = replace(MODEL, tied_embeddings=True)
    apart = replace(TRAINING, sum_tied_gradients=False)
    assert broken(schedule="v-half", stages=2, model=tied, training=apart) == {}
    assert broken(pp=1, model=tied, training=apart) == {}
    assert broken(model=tied) == {}  # our worker adds the two gradients
    assert "tied-embeddings" in broken(schedule="interleaved-1f1b", stages=2, model=tied, training=apart)


@pytest.mark.parametrize("schedule", [name for name, kind in SCHEDULES.items() if kind.max_stages_per_device == 2])
def test_whether_the_ends_are_apart_follows_from_the_placement_of_the_schedule(schedule: str) -> None:
    tied, apart = replace(MODEL, tied_embeddings=True), replace(TRAINING, sum_tied_gradients=False)
    placement = build(schedule, 2, 4, 2).placement
    refused = "tied-embeddings" in broken(schedule=schedule, stages=2, model=tied, training=apart)
    assert refused == (placement[0] != placement[-1])


def test_a_pipeline_longer_than_the_simulator_takes_is_refused() -> None:
    cluster = replace(CLUSTER, nodes=512)
    problems = broken(pp=4096, tp=1, model=replace(MODEL, layers=4096), cluster=cluster)
    assert "4,096 devices" in problems["schedule-size"]
    assert "2,048" in problems["schedule-size"]


def test_a_batch_smaller_than_one_microbatch_of_every_replica_is_refused() -> None:
    problems = broken(pp=1, tp=1, micro_batch_size=4)
    assert list(problems) == ["global-batch"]
    assert "32" in problems["global-batch"]
