"""Unequal stages: better than named schedules on the same costs, and a layer split that levels the devices."""

from __future__ import annotations

import pytest

from autotune.errors import UserError
from autotune.schedules.costs import PassCosts
from autotune.schedules.engine import QUICK, LayerCosts, balanced_split, best_schedule, layer_cuts
from autotune.schedules.engine.balance import even_split
from autotune.schedules.placement import make_placement
from autotune.schedules.registry import SCHEDULES, build
from autotune.schedules.simulate import simulate


def model(layers: int) -> LayerCosts:
    """Equal layers, an embedding worth a fifth of one and a head worth half a 1F1B stage's forward."""
    one = (1.0,) * layers
    head = 0.5 * layers / 8
    return LayerCosts(
        forward=one,
        backward=(1.2,) * layers,
        weight=(0.8,) * layers,
        activation=one,
        kept=one,
        first=(0.2, 0.0, 0.2, 0.1, 0.1),
        last=(head, head, head, 0.5, 0.5),
        hop=0.05,
    )


def best_named(p: int, m: int, costs_of, limit: float) -> float:
    """The fastest named schedule within the limit, each on the costs of its own placement."""
    fastest = float("inf")
    for name, kind in SCHEDULES.items():
        stages = (2, 3, 4) if kind.max_stages_per_device is None else (kind.min_stages_per_device,)
        for v in stages:
            costs = costs_of(make_placement(kind.placement, p, v))
            if costs is None or kind.microbatches_problem(p, m):
                continue
            if kind.search is not None:
                schedule = kind.search(p, m, limit, costs)
            else:
                schedule = build(name, p, m, v)
            timeline = simulate(schedule, costs)
            if max(timeline.peak_activation) <= limit * (1 + 1e-9):
                fastest = min(fastest, timeline.makespan)
    return fastest


@pytest.mark.parametrize("p", [4, 8, 16])
def test_best_beats_every_named_schedule_on_unequal_stages_and_more_so_with_a_balanced_split(p: int) -> None:
    m, layers = 2 * p, 8 * p
    layered = model(layers)
    even = layer_cuts(layered, balance=False)

    def costs_of(placement: tuple[int, ...]) -> PassCosts | None:
        cuts = even(placement)
        return cuts[0].costs if cuts else None

    limit = 8.0 * p
    named = best_named(p, m, costs_of, limit)
    plain = best_schedule(p, m, even, limit, effort=QUICK)
    assert plain.makespan < named * (1 - 1e-9)
    balanced = best_schedule(p, m, layer_cuts(layered, balance=True), limit, effort=QUICK)
    assert balanced.makespan <= plain.makespan
    assert balanced.chosen.layer_split is not None
    assert sum(balanced.chosen.layer_split) == layers


def test_a_heavy_head_takes_layers_from_the_last_stage() -> None:
    layered = LayerCosts(
        forward=(1.0,) * 32,
        backward=(1.0,) * 32,
        weight=(1.0,) * 32,
        activation=(1.0,) * 32,
        kept=(1.0,) * 32,
        last=(3.0, 3.0, 3.0, 0.0, 0.0),
    )
    placement = make_placement("linear", 4, 1)
    split = balanced_split(layered, placement)
    assert sum(split) == 32
    assert split[-1] == min(split) == 6
    costs = layered.costs(split)
    work = [sum(times) for times in zip(costs.forward, costs.backward, costs.weight, strict=True)]
    assert max(work) == 27
    even = best_schedule(4, 8, layer_cuts(layered, balance=False), placement="linear", effort=QUICK)
    chosen = best_schedule(4, 8, layer_cuts(layered, balance=True), placement="linear", effort=QUICK)
    assert chosen.makespan < 0.95 * even.makespan
    assert chosen.chosen.layer_split == split


@pytest.mark.parametrize(("layers", "stages"), [(10, 4), (8, 8), (33, 16)])
def test_even_splits_keep_every_layer_and_differ_by_one(layers: int, stages: int) -> None:
    split = even_split(layers, stages)
    assert sum(split) == layers
    assert max(split) - min(split) <= 1


def test_mistakes_are_told() -> None:
    with pytest.raises(UserError, match="at least 4 layers"):
        even_split(3, 4)
    with pytest.raises(UserError, match="must sum to 8 layers"):
        model(8).costs((4, 3))
    with pytest.raises(UserError, match="the costs cut the model for no stages"):
        best_schedule(8, 8, layer_cuts(model(4), balance=False))
