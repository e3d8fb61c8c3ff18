"""Measured activation peaks follow theory, whatever the number of microbatches."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "memory_theory.py"


Peaks = dict[tuple[str, int], dict]


def measured(layers: int, microbatches: int, schedules: list[str], growth: list[int]) -> Peaks:
    """Rows of the memory benchmark on 4 ranks, by schedule and microbatches."""
    command = [sys.executable, str(BENCHMARK), "--json", "--devices", "4", "--layers-per-device", str(layers)]
    command += ["--microbatches", str(microbatches), "--schedules", *schedules, "--growth", *map(str, growth)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=480)
    assert output.returncode == 0, output.stderr[-4000:]
    return {(row["schedule"], row["microbatches"]): row for row in json.loads(output.stdout)}


@pytest.fixture(scope="module")
def peaks() -> Peaks:
    """2 layers a device: enough to tell schedules apart, and quick."""
    return measured(2, 16, ["1f1b", "zb-h1", "v-half", "v-min"], [6])


def test_v_min_holds_about_half_and_v_half_about_three_quarters_of_what_1f1b_holds(peaks):
    assert 0.45 < peaks["v-min", 16]["ratio"] < 0.60
    assert 0.70 < peaks["v-half", 16]["ratio"] < 0.85


def test_split_backward_holds_hardly_more_than_1f1b(peaks):
    # torch's native split backward holds 1.66 times as much.
    assert peaks["zb-h1", 16]["ratio"] < 1.15


def test_1f1b_holds_p_minus_r_microbatches_on_rank_r(peaks):
    first, second, third, fourth = peaks["1f1b", 16]["activation_peak_bytes"]
    unit = (first - third) / 2
    # Message buffers and temporaries add the same on every rank; the last rank has logits beside its microbatch.
    assert first - second == pytest.approx(unit, rel=0.1)
    assert unit < first / 4
    assert unit < fourth < 1.5 * unit


def test_1f1b_holds_no_more_with_more_microbatches(peaks):
    few, many = peaks["1f1b", 6], peaks["1f1b", 16]
    assert max(many["activation_peak_bytes"]) < 1.03 * max(few["activation_peak_bytes"])


@pytest.mark.slow
def test_at_full_size_controllable_memory_and_a_peak_that_does_not_grow_with_microbatches():
    # The bounds of Pipeline Parallelism with Controllable Memory (arXiv 2405.15362, section 3), 0.50 and 0.75 of
    # 1F1B at p = 4, and what buffers and temporaries add.
    rows = measured(4, 32, ["1f1b", "v-half", "v-min"], [8, 64])
    held = {run: max(row["activation_peak_bytes"]) for run, row in rows.items()}
    assert held["v-min", 32] < 0.60 * held["1f1b", 32]
    assert held["v-half", 32] < 0.85 * held["1f1b", 32]
    assert held["1f1b", 64] == pytest.approx(held["1f1b", 8], rel=0.02)
