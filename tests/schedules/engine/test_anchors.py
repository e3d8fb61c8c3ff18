"""Never above the best published generator within the same memory."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from autotune.schedules.engine import best_schedule, uniform_share

ANCHORS = Path(__file__).parents[3] / "benchmarks" / "generator_anchors.csv"


def settings(devices: tuple[int, ...]) -> list[tuple[int, int, float, float, float, float]]:
    """The settings (p, m, F, B, W, latency) of the table with one of these numbers of devices."""
    found = {
        tuple(
            map(
                float,
                (row["devices"], row["microbatches"], row["forward"], row["backward"], row["weight"], row["comm"]),
            )
        )
        for row in rows()
    }
    return [(int(p), int(m), *rest) for p, m, *rest in sorted(found) if p in devices]  # type: ignore[misc]


def rows() -> list[dict[str, str]]:
    with ANCHORS.open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def check(p: int, m: int, f: float, b: float, w: float, comm: float) -> None:
    key = [str(p), str(m)]
    mine = [
        row
        for row in rows()
        if [row["devices"], row["microbatches"]] == key
        and tuple(float(row[n]) for n in ("forward", "backward", "weight", "comm")) == (f, b, w, comm)
    ]
    for limit in ((p + 2) / 3, p / 2, p / 2 + 1, 3 * p / 4, p, 2 * p):
        reached = [float(row["makespan"]) for row in mine if float(row["peak_activation"]) <= limit]
        best = best_schedule(p, m, uniform_share(f, b, w, comm), limit)
        assert max(best.timeline.peak_activation) <= limit * (1 + 1e-9)
        if reached:
            assert best.makespan <= min(reached) * (1 + 1e-9), f"limit {limit}"


@pytest.mark.parametrize("setting", [s for s in settings((4,)) if s[1] == 8 and s[5] > 0], ids=str)
def test_never_above_the_best_generator_on_four_devices(setting) -> None:
    check(*setting)


@pytest.mark.slow
@pytest.mark.parametrize("setting", settings((4, 8, 16)), ids=str)
def test_never_above_the_best_generator(setting) -> None:
    check(*setting)


@pytest.mark.parametrize("p", [4, 8])
@pytest.mark.parametrize("limit", [1.5, 2.0])
def test_limits_where_no_generator_has_a_schedule_have_one(p: int, limit: float) -> None:
    best = best_schedule(p, 2 * p, uniform_share(1, 1.5, 0.6, 0.2), limit)
    assert max(best.timeline.peak_activation) <= limit
