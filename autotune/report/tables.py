"""The results table and the comparison for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from autotune.cost.memory import OVER_LIMIT
from autotune.errors import UserError
from autotune.report.numbers import bytes_text, count_text, number_text, seconds_text
from autotune.results.columns import COLUMNS, Row
from autotune.results.compare import Comparison, Contest
from autotune.results.text import first_line, printable
from autotune.results.verdict import is_over_limit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = [
    "comparison_table",
    "make_console",
    "over_limit_lines",
    "reason_lines",
    "results_table",
    "sort_rows",
    "summary_line",
    "without_the_slow_predictions",
]

_WIDTH_WITHOUT_TERMINAL = 220
_RATES = {"tokens_per_s", "tokens_per_s_per_device", "predicted_tokens_per_s", "speedup_vs_1f1b"}
_STATE_STYLES = {
    "ok": "green",
    "predicted": "cyan",
    "oom": "yellow",
    "timeout": "yellow",
    "failed": "red",
    "invalid": "red",
    "hang": "yellow",
    "launcher": "yellow",
    "killed": "red",
    "no-result": "red",
    "non-finite": "red",
}


def make_console(stderr: bool = False) -> Console:
    """A console that doesn't cut tables when its output goes to a file, and on which no text commands the terminal."""
    from rich.console import Console

    class SafeConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*(printable(one) if isinstance(one, str) else one for one in objects), **options)

    console = SafeConsole(stderr=stderr, highlight=False)
    if console.is_terminal:
        return console
    return SafeConsole(stderr=stderr, highlight=False, width=_WIDTH_WITHOUT_TERMINAL)


def sort_rows(rows: Sequence[Row], column: str) -> list[Row]:
    """Rows by one column: rates from the best down, plans that count first; else upwards; missing values last.

    Raises:
        UserError: there is no such column.
    """
    names = [one.name for one in COLUMNS]
    if column not in names:
        raise UserError(f"--sort {column}: no such column; columns are {', '.join(names)}")
    there = [row for row in rows if getattr(row, column) not in (None, "")]
    missing = [row for row in rows if getattr(row, column) in (None, "")]
    if column == "tokens_per_s":  # what nobody measured, by its prediction: profiled plans, then all others
        missing.sort(key=_by_prediction)
    if column in _RATES:
        counts = ("predicted", "ok") if column == "predicted_tokens_per_s" else ("ok",)
        there.sort(key=lambda row: (row.state not in counts or is_over_limit(row), -getattr(row, column)))
        return there + missing
    return sorted(there, key=lambda row: getattr(row, column)) + missing


def _by_prediction(row: Row) -> tuple[bool, bool, bool, float]:
    """Profiled plans before the others, of each those that fit before those that don't, then from the fastest down."""
    return row.state != "predicted", row.trial is None, is_over_limit(row), -(row.predicted_tokens_per_s or 0.0)


def over_limit_lines(rows: Sequence[Row]) -> list[str]:
    """What the mark of plans that are predicted not to fit means; nothing where none is."""
    if not any(map(is_over_limit, rows)):
        return []
    return [
        f"{OVER_LIMIT}: the predicted peak is over the memory limit; the plan isn't refused, because the prediction "
        "may be too high, but it doesn't compete unless a run shows that it fits"
    ]


def without_the_slow_predictions(rows: Sequence[Row], most: int) -> tuple[list[Row], int]:
    """The rows with only the first `most` of those that were predicted without a trial, and how many are left out."""
    shown, seen = [], 0
    for row in rows:
        untried = row.state == "predicted" and row.trial is None
        seen += untried
        if not untried or seen <= most:
            shown.append(row)
    return shown, len(rows) - len(shown)


def results_table(rows: Sequence[Row]) -> Table:
    """One line a plan. The first column marks best, baseline and plans that are predicted not to fit.

    Predictions stand in columns of their own.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("trial", "pp", "tp", "dp", "mbs", "m"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("schedule", no_wrap=True)
    table.add_column("state", no_wrap=True)
    measured = not rows or any(row.fidelity in ("", "run") for row in rows)
    predicted = any(row.predicted_step_time_s is not None for row in rows)
    beside = () if not predicted else _PREDICTED_BESIDE if measured else _PREDICTED_ALONE
    several = {"profile", "predict"} <= {row.fidelity for row in rows}
    names = [*(("fidelity",) if several else ()), *(_MEASURED if measured else ()), *beside, "vs 1F1B"]
    for name in names:
        table.add_column(name, justify="left" if name == "fidelity" else "right", no_wrap=True)
    for row in rows:
        style = "bold" if row.is_best else None
        cells = _measured_cells(row) | _predicted_cells(row)
        table.add_row(*_plan_cells(row), *(cells[name] for name in names), style=style)
    return table


_MEASURED = ("step time", "+/-", "tokens/s", "per device", "peak memory", "bubble", "clock")
_PREDICTED_ALONE = ("predicted step", "predicted tokens/s", "predicted peak", "predicted bubble")
_PREDICTED_BESIDE = ("predicted step", "predicted peak")


def _plan_cells(row: Row) -> list[str]:
    mark = {(True, True): "best, baseline", (True, False): "best", (False, True): "baseline"}
    chunks = f" x{row.stages_per_device}" if (row.stages_per_device or 1) > 1 else ""
    recompute = "" if row.recompute in ("", "none") else f" +{row.recompute} recompute"
    state = row.state
    if row.state in _STATE_STYLES:
        state = f"[{_STATE_STYLES[row.state]}]{row.state}[/]"
    numbers = (row.trial, row.pp, row.tp, row.dp, row.micro_batch_size, row.microbatches)
    return [
        OVER_LIMIT if is_over_limit(row) else mark.get((bool(row.is_best), bool(row.is_baseline)), ""),
        *("-" if value is None else str(value) for value in numbers),
        f"{row.schedule}{chunks}{recompute}",
        state,
    ]


def _measured_cells(row: Row) -> dict[str, str]:
    return {
        "step time": seconds_text(row.step_time_s),
        "+/-": seconds_text(row.step_time_std_s),
        "tokens/s": count_text(row.tokens_per_s),
        "per device": count_text(row.tokens_per_s_per_device),
        "peak memory": bytes_text(row.peak_memory_bytes),
        "bubble": _share_text(row.bubble_rate),
        "vs 1F1B": "-" if row.speedup_vs_1f1b is None else f"{row.speedup_vs_1f1b:.3f}x",
        "clock": row.clock or "-",
    }


def _predicted_cells(row: Row) -> dict[str, str]:
    return {
        "fidelity": row.fidelity or "-",
        "predicted step": seconds_text(row.predicted_step_time_s) + _error_text(row.predicted_step_time_error),
        "predicted tokens/s": count_text(row.predicted_tokens_per_s),
        "predicted peak": bytes_text(row.predicted_peak_memory_bytes) + _error_text(row.predicted_peak_memory_error),
        "predicted bubble": _share_text(_predicted_bubble(row)),
    }


def _error_text(error: float | None) -> str:
    """The error of a prediction, to stand behind it; nothing where nothing was measured."""
    return "" if error is None else f" ({error:+.1%})"


def _predicted_bubble(row: Row) -> float | None:
    """What `bubble_rate` is expected to be: 1 - work of the busiest device / time of the pipeline."""
    outside = (row.predicted_dp_s, row.predicted_optimizer_s)
    bubble = (row.predicted_bubble_s, row.predicted_pp_s)
    if row.predicted_step_time_s is None or None in outside or None in bubble:
        return None
    pipeline_s = row.predicted_step_time_s - sum(part or 0.0 for part in outside)
    return sum(part or 0.0 for part in bubble) / pipeline_s if pipeline_s > 0 else None


def _share_text(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def reason_lines(rows: Sequence[Row], whole: bool = False) -> list[str]:
    """Why plans that were run are not ok: one line for all whose reasons differ only in numbers.

    Args:
        whole: instead every plan with every line of its reason, which may hold a traceback.
    """
    troubled = [row for row in rows if row.state not in ("ok", "refused", "predicted")]
    if whole:
        return [line for row in troubled for line in _whole_reason(row)]
    kinds: dict[tuple[str, str], list[Row]] = {}
    for row in troubled:
        kinds.setdefault((row.state, _NUMBERS.sub("", first_line(row.reason))), []).append(row)
    lines = [_kind_line(alike) for alike in kinds.values()]
    if len(kinds) < len(troubled) or any("\n" in row.reason for row in troubled):
        lines.append("--all lists every reason in full")
    return lines


_NUMBERS = re.compile(r"\d[\d.,]*")


def _whole_reason(row: Row) -> list[str]:
    first, *more = row.reason.splitlines() or [""]
    return [f"{row.state}: trial {row.trial}, {row.describe()}: {first}", *(f"    {line}" for line in more)]


def _kind_line(alike: Sequence[Row]) -> str:
    row = alike[0]
    which = f"trial {row.trial}, {row.describe()}: {first_line(row.reason)}"
    return f"{row.state}: {which}" if len(alike) == 1 else f"{row.state}: {len(alike)} plans, such as {which}"


def summary_line(rows: Sequence[Row]) -> str:
    """How many rows there are in each state."""
    counts = Counter(row.state for row in rows)
    return f"{len(rows)} plans: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())


def comparison_table(comparison: Comparison) -> Table:
    """The best plan and its baselines, side by side; with the final's step times where it decided."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=comparison.source or None, title_justify="left")
    table.add_column("", no_wrap=True)
    table.add_column("plan", no_wrap=True)
    final = comparison.final
    in_search = ("step time", "tokens/s", "peak memory", "bubble")
    in_final = () if final is None else ("step time in the final",)
    for name in (*in_search, *in_final, "best is faster by", "spread" if final is None else "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)

    def times(row: Row) -> list[str]:
        return [] if final is None else [seconds_text(final.step_time_s(row.fingerprint))]

    best = comparison.best
    if best is not None:
        table.add_row("best plan", *_compared(best), *times(best), "", "", style="bold")
    challenger = comparison.challenger if comparison.baseline and comparison.baseline.other is best else None
    shown: list[Row] = []
    for contest in (comparison.baseline, comparison.interleaved, challenger):
        if contest is not None and contest.other not in shown:
            shown.append(contest.other)
            table.add_row(contest.name, *_compared(contest.other), *times(contest.other), *_ratio(contest, best))
    return table


def _compared(row: Row) -> list[str]:
    if row.state == "predicted":
        return [
            row.describe(),
            seconds_text(row.predicted_step_time_s),
            count_text(row.predicted_tokens_per_s),
            bytes_text(row.predicted_peak_memory_bytes),
            _share_text(_predicted_bubble(row)),
        ]
    return [
        row.describe(),
        seconds_text(row.step_time_s),
        count_text(row.tokens_per_s),
        bytes_text(row.peak_memory_bytes),
        _share_text(row.bubble_rate),
    ]


def _ratio(contest: Contest, best: Row | None) -> list[str]:
    if contest.other is best:
        return ["the same plan", ""]
    if contest.ratio is None:
        return ["-", "fell out of the final"]
    if contest.low is None or contest.high is None:
        return [f"{number_text(contest.ratio)}x", "not measured"]
    return [f"{number_text(contest.ratio)}x", f"{number_text(contest.low)}x to {number_text(contest.high)}x"]
