"""What makes a resumed study another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.profiling.command import DEFAULT_WORKER
from autotune.search.identity import differences, identity
from autotune.space.space import load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"


def test_a_study_on_cpu_keeps_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    space = load_space(QUICKSTART)
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 2.0)
    crowded = identity(space, DEFAULT_WORKER)
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 8.0)
    assert differences(crowded, identity(space, DEFAULT_WORKER)) == ["clock: 'virtual' -> 'wall'"]
    assert "clock" not in identity(space, DEFAULT_WORKER, "predict")
