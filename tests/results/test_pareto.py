"""The Pareto front: no plan on it is beaten in both throughput and memory, every plan off it is."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.report.pareto import pareto_lines, pareto_sentence
from autotune.results.columns import Row
from autotune.results.pareto import pareto_front
from autotune.results.table import read_csv
from autotune.results.verdict import judge

EXAMPLE = Path(__file__).parents[2] / "results" / "example"


def ran(tokens_per_s: float, peak: int | None, state: str = "ok") -> Row:
    return Row(state=state, fidelity="run", tokens_per_s=tokens_per_s, peak_memory_bytes=peak)


def numbers(rows: list[Row]) -> list[tuple[float | None, int | None]]:
    return [(row.tokens_per_s, row.peak_memory_bytes) for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_front_is_what_pairwise_comparison_leaves(seed: int) -> None:
    chance = random.Random(seed)
    rows = [ran(float(chance.randint(1, 12)), chance.randint(1, 12)) for _ in range(40)]

    def beaten(row: Row) -> bool:
        own = (-(row.tokens_per_s or 0), row.peak_memory_bytes or 0)
        others = [(-(other.tokens_per_s or 0), other.peak_memory_bytes or 0) for other in rows]
        return any(other[0] <= own[0] and other[1] <= own[1] and other != own for other in others)

    front = pareto_front(rows)
    assert {id(row) for row in front} == {id(row) for row in rows if not beaten(row)}
    assert numbers(front) == sorted(numbers(front), key=lambda pair: -(pair[0] or 0))


def test_only_plans_that_ran_within_their_limits_and_whose_memory_is_known_are_on_it() -> None:
    rows = [ran(9.0, 1, "oom"), ran(8.0, None), ran(5.0, 5), ran(4.0, 6), ran(3.0, 2), ran(99.0, 1, "failed")]
    assert numbers(pareto_front(rows)) == [(5.0, 5), (3.0, 2)]
    assert pareto_front([ran(1.0, None)]) == []


def test_measured_plans_never_meet_predicted_ones() -> None:
    def told(state: str, tokens_per_s: float, peak: int, fits: bool = True) -> Row:
        return Row(
            state=state,
            fidelity="predict",
            predicted_tokens_per_s=tokens_per_s,
            predicted_peak_memory_bytes=peak,
            predicted_fits=fits,
        )

    predicted = [told("predicted", 9.0, 3), told("predicted", 7.0, 4), told("predicted", 10.0, 9, fits=False)]
    assert pareto_front(predicted) == predicted[:1]
    assert numbers(pareto_front([*predicted, ran(1.0, 50)])) == [(1.0, 50)]


def test_results_command_shows_the_front_as_a_table_and_as_json() -> None:
    rows = read_csv(EXAMPLE / "trials.csv")
    front = pareto_front(rows)
    assert 1 < len(front) < len(rows)
    assert front[0].is_best
    printed = CliRunner().invoke(app, ["results", str(EXAMPLE), "--pareto"])
    assert printed.exit_code == 0
    assert pareto_sentence(front) in printed.output
    told = json.loads(CliRunner().invoke(app, ["results", str(EXAMPLE), "--pareto", "--json"]).stdout)
    assert [row["fingerprint"] for row in told] == [row.fingerprint for row in front]


def test_sentence_names_both_ends() -> None:
    rows = judge([ran(5000.0, 5 << 20), ran(3000.0, 2 << 20)])
    assert pareto_sentence(pareto_front(rows)) == (
        "2 plans than which none is both faster and smaller: from 5,000 tokens/s with 5.00 MiB "
        "to 3,000 tokens/s with 2.00 MiB"
    )
    assert len(pareto_lines(pareto_front(rows))) == 3
    assert pareto_sentence(pareto_front(rows[:1])).startswith("one plan is both the fastest and the smallest")
    assert pareto_sentence([]).startswith("no plan")
