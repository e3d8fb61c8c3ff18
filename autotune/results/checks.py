"""What holds of every row of a table: a damaged file is told by line and column before anything counts on it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from autotune.results.columns import COLUMNS, Row
from autotune.results.measurement import Fidelity, State

__all__ = ["problems_of"]

_COUNTS = ("pp", "tp", "dp", "micro_batch_size", "microbatches", "stages_per_device")
_PLAN = (*_COUNTS, "schedule", "layer_split", "recompute")
# What is divided by: a time or a rate of 0 was measured by nobody.
_POSITIVE = (
    "step_time_s",
    "step_time_min_s",
    "step_time_max_s",
    "step_time_wall_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "predicted_step_time_s",
    "predicted_tokens_per_s",
)


def problems_of(row: Row) -> Iterator[tuple[str, str]]:
    """(column, what is wrong with it) of every value that no search writes; the message goes on after the column."""
    yield from _known_words(row)
    yield from _legal_numbers(row)
    if row.state != "refused" or row.fidelity:  # a point that a rule refused may be no whole plan
        yield from _whole_plan(row)
    if row.state == "ok":
        yield from _needed(row, ("step_time_s", "tokens_per_s"), "an ok plan has one")
    if row.predicted_tokens_per_s is not None:
        yield from _needed(row, ("predicted_step_time_s",), "predicted_tokens_per_s follows from it")


def _known_words(row: Row) -> Iterator[tuple[str, str]]:
    for name, known in (("state", get_args(State)), ("fidelity", ("", *get_args(Fidelity)))):
        if (value := getattr(row, name)) not in known:
            yield name, f"must be one of {', '.join(filter(None, known))}, not {value!r}"


def _legal_numbers(row: Row) -> Iterator[tuple[str, str]]:
    for column in COLUMNS:
        value = getattr(row, column.name)
        if value is None:
            continue
        if column.type == "integer" and value < (least := int(column.name in _COUNTS)):
            yield column.name, f"must be at least {least}, not {value}"
        elif column.type == "number" and not math.isfinite(value):
            yield column.name, f"must be a finite number, not {value}"
        elif column.name in _POSITIVE and value <= 0:
            yield column.name, f"must be above 0, not {value}"
        elif column.type == "integers" and min(value, default=0) < (least := int(column.name == "layer_split")):
            yield column.name, f"must list whole numbers of at least {least}, not {list(value)}"


def _whole_plan(row: Row) -> Iterator[tuple[str, str]]:
    missing = list(_needed(row, _PLAN, "the plan isn't whole without it"))
    yield from missing
    if missing:
        return
    assert row.pp is not None
    assert row.stages_per_device is not None
    assert row.layer_split is not None
    stages = row.pp * row.stages_per_device
    if len(row.layer_split) != stages:
        yield "layer_split", f"must list the layers of pp x stages_per_device = {stages} stages, not {row.layer_split}"


def _needed(row: Row, names: tuple[str, ...], why: str) -> Iterator[tuple[str, str]]:
    for name in names:
        if getattr(row, name) in (None, ""):
            yield name, f"is empty, but {why}"
