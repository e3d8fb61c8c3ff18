"""The executor and torch's own pipeline runtime, given the same table, compute the same gradients."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
from launch import run_ranks  # noqa: E402

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-v", "v-half")


@pytest.mark.ranks
def test_torch_s_runtime_computes_the_same_gradients_from_the_same_tables(tmp_path):
    run_ranks(2, HERE / "oracle.py", str(tmp_path), *SCHEDULES)
    for rank in range(2):
        found = json.loads((tmp_path / f"oracle-{rank}.json").read_text())
        assert found.keys() == set(SCHEDULES)
        assert max(found.values()) < 1e-5, found
