"""The search of a space: opens its folder and its study, then lets a tuner work, alone or beside others."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

from autotune.errors import UserError
from autotune.profiling.refit import Refit, refit, timed_plans
from autotune.search.book import Book
from autotune.search.evaluators import make_evaluator, reach_nodes
from autotune.search.folder import StudyFolder
from autotune.search.folder_lock import locked_folder, table_lock
from autotune.search.forecast import Forecaster, forecast_all
from autotune.search.identity import identity
from autotune.search.interrupt import Interrupt
from autotune.search.observer import Observer, Silent
from autotune.search.opening import open_store, require_deletable, sqlite_url
from autotune.search.options import Ended, Isolation, SearchOptions, SearchResult
from autotune.search.ranking import rank
from autotune.search.sqlite_file import require_usable, sqlite_path
from autotune.search.tuners import this_tuner
from autotune.search.tuning import Tuning
from autotune.search.worker_plans import settle_worker
from autotune.space.space import Space

__all__ = ["Ended", "Isolation", "SearchOptions", "SearchResult", "search"]

# With fewer trials a refit says more about their noise than about the machine.
_LEAST_TO_REFIT = 3
# More of them, taken evenly, make the fit slower and no better.
_MOST_TO_REFIT = 100
# A database that another search is making just now is empty for a moment.
_BIRTH_S = 5.0


def search(
    space: Space, options: SearchOptions, observer: Observer | None = None, interrupt: Interrupt | None = None
) -> SearchResult:
    """Run a study of `space` to its end, its budget, or an interrupt.

    Raises:
        UserError: no legal plan, the study can't be opened or continued, its folder can't be written, or the fidelity
            is `predict` and nothing is known of the space's device.
    """
    space, options, worker = settle_worker(space, options)
    folder, observer = StudyFolder(options.folder), observer or Silent()
    # An Interrupt that was not raised yet is false: `or` would lose it.
    interrupt = Interrupt() if interrupt is None else interrupt
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    if not plans:
        raise UserError(f"space {space.name} has no legal plan; --dry-run counts the rules that refuse them")
    _refuse_existing(folder, options)
    forecaster = _make_forecaster(space, options, observer)
    with locked_folder(folder.path, join=options.resume and options.fidelity != "predict") as lock:
        # What may refuse the start comes before anything is deleted or begun.
        reach_nodes(options, folder.logs, observer.note)
        url = options.storage or sqlite_url(folder.database)
        clear_first = options.fresh and _lies_at(url, folder.database)
        if clear_first:
            if options.storage is not None:
                require_usable(url)
            require_deletable(folder.database, options.folder.name, this_tuner(space.cluster))
            folder.clear()
        predictor = forecaster.identity() if forecaster is not None and options.fidelity == "predict" else None
        opened = open_store(
            url,
            options,
            identity(space, worker, options.fidelity, predictor, len(options.hosts.names) if options.hosts else None),
            plans,
            space.cluster,
            must_exist=options.resume and folder.csv.exists(),
            note=observer.note,
            stop=lambda: bool(interrupt),
        )
        with opened as store:
            if options.fresh and not clear_first:
                folder.clear()
            with table_lock(folder.path):
                folder.write_text(folder.space, space.to_yaml())
            lock.keep()
            if options.fidelity == "predict":
                assert forecaster is not None
                return rank(space, folder, plans, forecaster, observer, interrupt)
            lock.share()
            forecasts = forecast_all(forecaster, plans.values(), lambda: interrupt)
            book = Book(space, options.fidelity, folder, plans, forecasts)
            evaluator = make_evaluator(space, options, folder.logs, store.study_id, observer.note)
            result = Tuning(space, options, store, book, evaluator, observer, interrupt).run()
    return replace(result, refit=_refit(space, result, forecaster))


def _lies_at(url: str, path: Path) -> bool:
    """Whether a database is the file at `path`: then it can't be opened before the file is deleted."""
    file = sqlite_path(url)
    return file is not None and file.resolve() == path.resolve()


def _refuse_existing(folder: StudyFolder, options: SearchOptions) -> None:
    if not options.resume and not options.fresh and folder.holds_study():
        raise UserError(
            f"{folder.path} holds a study; --resume goes on with it, --fresh deletes it and starts anew, "
            "--name or --results-dir puts the new one elsewhere"
        )
    if options.resume and options.storage is None and folder.csv.exists() and not folder.database.exists():
        raise UserError(
            f"{folder.csv} is there but {folder.database} is not, so the study can't be continued; "
            "--storage names its database if it lies elsewhere, --fresh starts anew"
        )
    if options.resume and options.storage is None:
        _refuse_empty(folder)


def _refuse_empty(folder: StudyFolder) -> None:
    deadline = time.monotonic() + _BIRTH_S
    while folder.database.is_file() and folder.database.stat().st_size == 0:
        if time.monotonic() > deadline:
            raise UserError(
                f"{folder.database} is empty, so it holds no study to go on with, and is left as it is; --fresh "
                "deletes it and starts anew"
            )
        time.sleep(0.05)


def _make_forecaster(space: Space, options: SearchOptions, observer: Observer) -> Forecaster | None:
    """None where nothing is known of the device, unless predictions are all that is wanted."""
    try:
        return Forecaster(space, options.assumptions, options.figures, options.refuses)
    except UserError as error:
        if options.fidelity == "predict":
            raise
        observer.note(f"no predictions: {error}")
        return None


def _refit(space: Space, result: SearchResult, forecaster: Forecaster | None) -> Refit | None:
    """The device's efficiency fitted to finished trials, for the error of predictions before and after."""
    trials = timed_plans(result.rows)
    if forecaster is None or result.ended == "interrupted" or len(trials) < _LEAST_TO_REFIT:
        return None
    trials = trials[:: math.ceil(len(trials) / _MOST_TO_REFIT)]
    figures, assumptions = forecaster.figures, forecaster.assumptions
    return refit(trials, space.model, space.cluster, space.training, figures, assumptions=assumptions)
