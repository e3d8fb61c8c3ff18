"""Compares predictions with every published table: errors of each row, mean, maximum, and what was fitted.

Every figure says how many machine numbers were fitted to it, and what the error becomes when the rows of one model are
left out of the fit and predicted from the others ("left out").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autotune.cost.devices import Machine, machine
from autotune.cost.fit import fit_machine
from autotune.cost.formulas import formula_figures
from autotune.cost.predict import Prediction, Predictor
from autotune.cost.published import PublishedRun, PublishedTable, load_tables

__all__ = ["Figure", "RowError", "render", "validate"]


@dataclass(frozen=True)
class RowError:
    """One row: predicted and published value, in the figure's unit."""

    row: str
    predicted: float
    published: float

    @property
    def error(self) -> float:
        """Relative error, positive when the prediction is too high."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Figure:
    """One comparison.

    Attributes:
        name: table and quantity.
        unit: of the rows' values.
        fitted: numbers fitted to this figure's rows, with their values.
        left_out_mean: mean error of rows whose model was left out of the fit; None when nothing is fitted.
        note: what else a reader should know.
    """

    name: str
    source: str
    unit: str
    rows: tuple[RowError, ...]
    fitted: dict[str, float] = field(default_factory=dict)
    left_out_mean: float | None = None
    note: str = ""

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return _mean([row.error for row in self.rows])

    @property
    def maximum(self) -> float:
        """Largest absolute relative error."""
        return max(abs(row.error) for row in self.rows)


def validate(folder: Path | None = None) -> list[Figure]:
    """All figures of the package's tables, or of a folder's.

    Raises:
        UserError: the folder's files are wrong.
    """
    figures: list[Figure] = []
    for table in load_tables(folder):
        figures += _table_figures(table)
    if folder is None:
        figures += [
            Figure(name, source, unit, tuple(RowError(*row) for row in rows), note=note)
            for name, source, unit, rows, note in formula_figures()
        ]
    return figures


Predict = Callable[[PublishedRun, Machine], Prediction]


def _table_figures(table: PublishedTable) -> list[Figure]:
    figures = []
    base = machine(table.device).with_numbers(**table.fixed)
    timed = [run for run in table.runs if run.step_time_s is not None]
    given = [run for run in timed if run.passes is not None]
    own = _own_passes()
    if given:
        time = _time_figure(
            table, given, _printed_passes(), base, ("visit_s",), f"{table.name}: step time, passes given"
        )
        figures += [time, _order_figure(table, given, time)]
        base = base.with_numbers(**time.fitted)
    if timed:
        time = _time_figure(table, timed, own, base, table.fitted, f"{table.name}: step time")
        figures.append(time)
        if given:
            figures.append(_order_figure(table, timed, time))
    weighed = [run for run in table.runs if run.peak_memory_bytes is not None]
    if weighed:
        figures.append(_memory_figure(table, weighed, own, base))
    return figures


def _own_passes() -> Predict:
    return lambda run, figures: _predictor(run, figures).predict(run.plan)


def _printed_passes() -> Predict:
    return lambda run, figures: _predictor(run, figures).predict(run.plan, passes=run.passes)


def _predictor(run: PublishedRun, figures: Machine) -> Predictor:
    return Predictor(run.model, run.cluster, run.training, run.assumptions, figures, compiled=True)


def _time_figure(
    table: PublishedTable,
    runs: Sequence[PublishedRun],
    predict: Predict,
    base: Machine,
    numbers: tuple[str, ...],
    name: str,
) -> Figure:
    chosen = [run for run in runs if not table.fit_rows or run.row in table.fit_rows]
    fitted = _fit(chosen, predict, base, numbers)
    rows = tuple(RowError(run.row, predict(run, fitted).step_time_s, _step(run)) for run in runs)
    left_out = []
    models = {run.model.name for run in runs}
    for model in models if numbers and len(models) > 1 else ():
        others = _fit([run for run in runs if run.model.name != model], predict, base, numbers)
        left_out += _errors([run for run in runs if run.model.name == model], predict, others)
    return Figure(
        name,
        table.source,
        "s",
        rows,
        {number: getattr(fitted, number) for number in numbers},
        _mean(left_out) if left_out else None,
        note=f"fitted on {len(chosen)} of {len(runs)} rows",
    )


def _fit(runs: Sequence[PublishedRun], predict: Predict, base: Machine, numbers: tuple[str, ...]) -> Machine:
    if not numbers:
        return base
    return fit_machine(base, numbers, lambda figures: _errors(runs, predict, figures))


def _errors(runs: Sequence[PublishedRun], predict: Predict, figures: Machine) -> list[float]:
    return [predict(run, figures).step_time_s / _step(run) - 1 for run in runs]


def _step(run: PublishedRun) -> float:
    assert run.step_time_s is not None
    return run.step_time_s


def _memory_figure(table: PublishedTable, runs: Sequence[PublishedRun], predict: Predict, base: Machine) -> Figure:
    unit = 1024.0**3 if table.memory_unit == "GiB" else 1e9
    rows = []
    for run in runs:
        assert run.peak_memory_bytes is not None
        rows.append(RowError(run.row, predict(run, base).peak_memory_bytes / unit, run.peak_memory_bytes / unit))
    return Figure(f"{table.name}: peak memory", table.source, table.memory_unit, tuple(rows), note="nothing fitted")


def _order_figure(table: PublishedTable, runs: Sequence[PublishedRun], time: Figure) -> Figure:
    """Of every two schedules of one model and number of microbatches: is the faster one predicted faster?"""
    groups: dict[tuple[str, int], list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.model.name, run.plan.microbatches), []).append(index)
    wrong, pairs, rows = 0, 0, []
    for (model, m), members in groups.items():
        right = total = 0
        for place, a in enumerate(members):
            for b in members[place + 1 :]:
                gap = _step(runs[a]) - _step(runs[b])
                if gap == 0:
                    continue
                total += 1
                right += gap * (time.rows[a].predicted - time.rows[b].predicted) > 0
        pairs, wrong = pairs + total, wrong + total - right
        rows.append(RowError(f"{model} m{m}", right, total))
    note = f"{wrong} of {pairs} pairs in the wrong order (ties as printed left out)"
    return Figure(f"{time.name}, order of schedules", table.source, "pairs", tuple(rows), note=note)


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)


def render(figures: Sequence[Figure], rows: bool = True) -> str:
    """The comparison as text: a summary line a figure, under it (with `rows`) every row."""
    lines = []
    for figure in figures:
        fitted = ", ".join(f"{name}={value:.4g}" for name, value in figure.fitted.items()) or "none"
        left_out = "" if figure.left_out_mean is None else f", left out {figure.left_out_mean:.2%}"
        lines += [
            figure.name,
            f"  mean {figure.mean:.2%}, max {figure.maximum:.2%} over {len(figure.rows)} rows{left_out}; "
            f"{len(figure.fitted)} fitted ({fitted})",
            f"  {figure.source}{'; ' + figure.note if figure.note else ''}",
        ]
        if rows:
            width = max(len(row.row) for row in figure.rows)
            lines += [
                f"    {row.row:<{width}}  predicted {row.predicted:10.4g} {figure.unit:<5} "
                f"published {row.published:10.4g}  {row.error:+7.2%}"
                for row in figure.rows
            ]
        lines.append("")
    return "\n".join(lines)
