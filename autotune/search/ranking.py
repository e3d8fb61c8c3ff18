"""The fidelity `predict`: every plan of a space ranked by the cost model, thousands in seconds. Starts no process."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.predicted import Predicted
from autotune.results.table import read_csv
from autotune.search.book import Book
from autotune.search.folder import StudyFolder
from autotune.search.forecast import Forecast, Forecaster
from autotune.search.interrupt import Interrupt
from autotune.search.observer import Observer
from autotune.search.options import Ended, SearchResult
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["rank"]

PREDICTED = "predicted by the cost model; nothing was run"
SAVE_EVERY_S = 30.0
# Saving takes at most this part of the time.
_SAVE_SHARE = 20


def rank(
    space: Space,
    folder: StudyFolder,
    plans: Mapping[str, Plan],
    forecaster: Forecaster,
    observer: Observer,
    interrupt: Interrupt,
) -> SearchResult:
    """Predict every plan and write the table, the fastest that fit first.

    Rows that the folder's table has already are taken over: a study that was interrupted goes on.

    Raises:
        UserError: the folder's table is damaged or can't be written.
    """
    known = _stored_forecasts(folder, plans)
    if known:
        observer.note(f"resuming with {len(known)} predicted plans")
    observer.note(f"predicting {len(plans) - len(known)} plans")
    ended: Ended = "complete"
    troubles: dict[Plan, str] = {}
    due = time.monotonic() + SAVE_EVERY_S
    try:
        for plan in plans.values():
            if interrupt:
                ended = "interrupted"
                break
            if plan in known:
                continue
            try:
                known[plan] = forecaster.forecast(plan)
            except UserError as error:
                troubles[plan] = f"not predicted: {error}"
            if (began := time.monotonic()) > due:
                _book(space, folder, plans, known, troubles).write(PREDICTED)
                took = time.monotonic() - began
                due = began + max(SAVE_EVERY_S, _SAVE_SHARE * took)
    finally:
        rows = _book(space, folder, plans, known, troubles).write(PREDICTED)
    return SearchResult(ended, rows, len(plans), "predict")


def _book(
    space: Space,
    folder: StudyFolder,
    plans: Mapping[str, Plan],
    known: Mapping[Plan, Forecast],
    troubles: Mapping[Plan, str],
) -> Book:
    return Book(space, "predict", folder, plans, known, troubles, unpredicted="not predicted: interrupted")


def _stored_forecasts(folder: StudyFolder, plans: Mapping[str, Plan]) -> dict[Plan, Forecast]:
    if not folder.csv.exists():
        return {}
    rows = {row.fingerprint: row for row in read_csv(folder.csv) if row.fidelity == "predict"}
    found = {plan: _forecast_of(rows[fingerprint]) for fingerprint, plan in plans.items() if fingerprint in rows}
    return {plan: told for plan, told in found.items() if told is not None}


def _forecast_of(row: Row) -> Forecast | None:
    values = {field.name: getattr(row, f"predicted_{field.name}") for field in fields(Predicted)}
    if None in values.values():
        return None
    return Forecast(Predicted(**values), row.reason if row.state == "refused" else None)
