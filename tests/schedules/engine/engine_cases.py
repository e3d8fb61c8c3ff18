"""Problems and checks that several engine tests share."""

from __future__ import annotations

from hypothesis import strategies as st

from autotune.schedules.checks import problems
from autotune.schedules.costs import PassCosts
from autotune.schedules.engine import Effort
from autotune.schedules.engine.problem import Problem
from autotune.schedules.placement import PlacementKind, make_placement
from autotune.schedules.simulate import Timeline

__all__ = ["REAL_COSTS", "TINY", "assert_sound", "problem_of", "random_problems", "shapes"]

REAL_COSTS = ((1.0, 1.0, 1.0, 0.0), (1.0, 1.2, 0.7, 0.05), (1.0, 1.5, 0.6, 0.2))

TINY = Effort(
    sites=2,
    climb_passes=10_000,
    short_anneal=10_000,
    long_anneal=50_000,
    gain_after=(0.12, 0.08, 0.045, 0.03, 0.008),
    starts=6,
)
"""A few milliseconds of search: for properties that must hold however little is searched."""

times = st.floats(0.1, 2.0).map(lambda value: round(value, 2))


def problem_of(kind: PlacementKind, p: int, m: int, v: int, costs: tuple[float, float, float, float]) -> Problem:
    """A problem with equal stages."""
    placement = make_placement(kind, p, v)
    return Problem(placement, m, PassCosts.uniform(placement, *costs))


def shapes() -> st.SearchStrategy[tuple[PlacementKind, int]]:
    """Placement kinds with their stages per device."""
    return st.sampled_from([("linear", 1), ("v", 2), ("loop", 2), ("loop", 3), ("loop", 4)])


@st.composite
def random_problems(draw: st.DrawFn, most_devices: int = 4, most_microbatches: int = 8) -> Problem:
    """Unequal stages, latencies per link, activations of which a part is kept."""
    kind, v = draw(shapes())
    p = draw(st.integers(2, most_devices))
    placement = make_placement(kind, p, v)
    stages = len(placement)

    def each() -> tuple[float, ...]:
        return tuple(draw(st.lists(times, min_size=stages, max_size=stages)))

    activation = each()
    share = draw(st.sampled_from([0.0, 0.3, 1.0]))
    hop = tuple(tuple(draw(st.sampled_from([0.0, 0.1, 0.5])) for _ in range(p)) for _ in range(p))
    costs = PassCosts(each(), each(), each(), hop, activation, tuple(share * a for a in activation))
    return Problem(placement, draw(st.integers(1, most_microbatches)), costs, fused=draw(st.booleans()))


def assert_sound(timeline: Timeline, caps: tuple[float, ...]) -> None:
    """Valid, free of deadlocks, within the caps, and its numbers those of the simulator."""
    assert problems(timeline.schedule) == []
    for peak, cap in zip(timeline.peak_activation, caps, strict=True):
        assert peak <= cap * (1 + 1e-8)
