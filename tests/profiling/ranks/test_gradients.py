"""Every schedule, with every parallelism the rules allow, trains the same model as one process does."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import pytest

from autotune.schedules.checks import InvalidScheduleError, check
from autotune.schedules.placement import placement_kind
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.schedule import Schedule
from autotune.space.model import padded_vocab

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from cases import DEGREES, FAMILIES, Case, all_cases, bfloat16_cases, controls, searched_cases  # noqa: E402
from launch import run_ranks  # noqa: E402

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5


@pytest.fixture(scope="session")
def proof(tmp_path_factory):
    """What every rank found for a case; the first case of a world size launches all of that size."""

    @functools.cache
    def launch(world: int) -> list[dict]:
        out = tmp_path_factory.mktemp(f"proof-{world}")
        run_ranks(world, HERE / "prove.py", str(out))
        return [json.loads((out / f"proof-{rank}.json").read_text()) for rank in range(world)]

    return lambda case: [rank[case.name] for rank in launch(case.world)]


@pytest.mark.parametrize("case", all_cases() + searched_cases(), ids=lambda case: case.name)
def test_gradients_equal_those_of_the_single_process_model(case: Case, proof):
    found = proof(case)
    errors = [(error, name) for rank in found for name, error in rank["errors"].items()]
    worst, name = max(errors)
    assert worst < TOLERANCE, f"{name} is off by {worst}"


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_loss_and_update_are_the_same_for_every_schedule(case: Case, proof):
    found = proof(case)
    losses = [rank["losses"] for rank in found if rank["losses"]]
    assert len(losses) == case.dp * case.tp
    for steps in losses:
        assert steps == pytest.approx(found[0]["reference_losses"], rel=1e-6)
    # AdamW changes every parameter as its formula says, whatever the sharding.
    assert max(rank["update_error"] for rank in found) < 1e-3


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_parameter_is_trained_once_per_replica(case: Case, proof):
    found = proof(case)
    spec = case.request().model
    names = [name for rank in found[:: case.dp * case.tp] for name in rank["errors"]]
    tied_copy = spec.tied_embeddings and "head.weight" in names
    assert len(names) == len(set(names))
    vocab = padded_vocab(spec.vocab, case.tp)
    expected = spec.parameter_count(vocab) + tied_copy * vocab * spec.hidden
    if case.tp == 1:
        assert sum(rank["parameters"] for rank in found[:: case.dp]) == expected
    else:
        # Norms, row-parallel biases and positions are on every tp rank, the rest on one.
        assert expected < sum(rank["parameters"] for rank in found[0 : case.world]) / case.dp < case.tp * expected


@pytest.mark.parametrize("case", bfloat16_cases(), ids=lambda case: case.name)
def test_bfloat16_plans_train_the_same_model_to_the_precision_of_bfloat16(case: Case, proof):
    found = proof(case)
    assert max(error for rank in found for error in rank["errors"].values()) < 0.06
    for rank in found:
        assert rank["losses"] == pytest.approx(found[0]["reference_losses"] if rank["losses"] else [], rel=1e-3)
        # Parameters and optimizer state are float32.
        assert rank["update_error"] < 1e-3


def test_schedules_of_the_engine_are_proved_on_every_placement():
    schedules = [case.request().schedule for case in searched_cases()]
    kinds = {(placement_kind(schedule.placement), schedule.stages_per_device) for schedule in schedules}
    assert {kind for kind, _ in kinds} == {"linear", "v", "loop"}
    assert max(stages for _, stages in kinds) >= 3


def test_each_model_family_meets_each_degree():
    met = {(case.family, case.pp, case.dp, case.tp) for case in all_cases()}
    assert met >= {(family, *degrees) for family in FAMILIES for degrees in DEGREES}


def test_tied_embeddings_are_proved_on_one_device_and_on_two_with_every_parallelism():
    tied = [case for case in all_cases() if FAMILIES[case.family].tied_embeddings]
    for on_one_device in (True, False):
        placed = [c for c in tied if (SCHEDULES[c.schedule].placement == "v") == on_one_device]
        assert {(c.pp, c.dp, c.tp) for c in placed} >= set(DEGREES)


def test_recomputation_is_proved_with_split_and_fused_backward():
    recomputed = {SCHEDULES[case.schedule].split_backward for case in all_cases() if case.recompute == "full"}
    assert recomputed == {True, False}


@pytest.mark.parametrize("case", controls(), ids=lambda case: case.name)
def test_one_changed_weight_fails_the_comparison(case: Case, proof):
    assert max(error for rank in proof(case) for error in rank["errors"].values()) > 10 * TOLERANCE


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_broken_pass_order_fails_the_check_before_any_process_starts(name: str):
    kind = SCHEDULES[name]
    good = build(name, 2, 4, kind.min_stages_per_device)
    check(good)
    # The last pass of device 0 moved to the front runs before what it needs.
    order = (good.order[0][-1:] + good.order[0][:-1], *good.order[1:])
    with pytest.raises(InvalidScheduleError, match="before"):
        check(Schedule(good.name, good.microbatches, good.placement, order))
