"""docs/results.md defines every column the table has, in its words and its order."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from autotune.results.columns import COLUMNS
from autotune.results.measurement import State

DOC = Path(__file__).parents[2] / "docs" / "results.md"


def test_every_column_is_defined_as_in_the_code() -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    wanted = [f"| `{c.name}` | {c.unit} | {c.meaning} |" for c in COLUMNS]
    start = lines.index(wanted[0])
    assert lines[start : start + len(wanted)] == wanted


def test_every_state_is_explained() -> None:
    text = DOC.read_text(encoding="utf-8")
    assert all(f"| `{state}` |" in text for state in get_args(State))
