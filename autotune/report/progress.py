"""A search as it goes on: a live display in a terminal, a line per event elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from autotune.cost.memory import OVER_LIMIT
from autotune.report.numbers import bytes_text, count_text, duration_text, seconds_text
from autotune.results.columns import Row
from autotune.results.text import printable
from autotune.results.verdict import is_over_limit

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from autotune.search.observer import Outlook
    from autotune.space.plan import Plan

__all__ = ["LiveProgress", "PlainProgress", "make_progress"]


def make_progress(console: Console) -> LiveProgress | PlainProgress:
    """The display that fits where `console` writes to."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


def _result_text(row: Row) -> str:
    """How a trial ended, in one line, fit to be shown."""
    return printable(_raw_result_text(row))


def _raw_result_text(row: Row) -> str:
    if row.state == "predicted":
        step, peak = seconds_text(row.predicted_step_time_s), bytes_text(row.predicted_peak_memory_bytes)
        return f"{_rate_text(row)}, step {step}, peak {peak}" + (f", {OVER_LIMIT}" if is_over_limit(row) else "")
    if row.step_time_s is None:
        first = row.reason.splitlines()[0] if row.reason else ""
        return f"{row.state}: {first}"
    numbers = f"{count_text(row.tokens_per_s)} tokens/s, step {seconds_text(row.step_time_s)}"
    if row.peak_memory_bytes is not None:
        numbers += f", peak {bytes_text(row.peak_memory_bytes)}"
    return numbers if row.state == "ok" else f"{row.state}: {row.reason.splitlines()[0]} ({numbers})"


def _rate_text(row: Row) -> str:
    if row.state == "predicted":
        return f"predicted {count_text(row.predicted_tokens_per_s)} tokens/s"
    return f"{count_text(row.tokens_per_s)} tokens/s"


def _place(outlook: Outlook, offset: int = 0) -> str:
    return f"{outlook.done + offset}/{outlook.goal}"


def _device_hours(outlook: Outlook) -> str:
    """What is spent of the budget of device-hours."""
    return f"{outlook.device_hours:.3g} of {outlook.device_hours_limit:.3g} device-hours spent"


class PlainProgress:
    """A line for every trial that ends."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def __enter__(self) -> PlainProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass

    def note(self, text: str) -> None:
        self._line(text)

    def trial_begins(self, trial: int, plan: Plan, outlook: Outlook) -> None:
        self._line(f"[{_place(outlook, 1)}] trial {trial}: {plan.describe()} ...")

    def trial_ended(self, row: Row, best: Row | None, outlook: Outlook) -> None:
        left = "" if outlook.seconds_left is None else f"; about {duration_text(outlook.seconds_left)} left"
        left += f"; {_device_hours(outlook)}" if outlook.device_hours_limit is not None else ""
        leader = "" if best is None else f"; best {_rate_text(best)} ({best.describe()})"
        self._line(f"[{_place(outlook)}] trial {row.trial}: {_result_text(row)}{leader}{left}")

    def _line(self, text: str) -> None:
        # No wrapping and no markup: these lines are for logs, and a plan or an error may hold brackets.
        self.console.print(text, markup=False, soft_wrap=True)


class LiveProgress:
    """The plan that runs, the last result, the best so far and the time left; finished trials scroll up above."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self.console = console
        self.plan = ""
        self.last = "-"
        self.best = "-"
        self.began = time.monotonic()
        self.outlook: Outlook | None = None
        self.live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveProgress:
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, style="dim")

    def trial_begins(self, trial: int, plan: Plan, outlook: Outlook) -> None:
        self.plan, self.began, self.outlook = f"trial {trial}: {plan.describe()}", time.monotonic(), outlook

    def trial_ended(self, row: Row, best: Row | None, outlook: Outlook) -> None:
        self.plan, self.outlook = "", outlook
        self.last = f"{row.describe()}: {_result_text(row)}"
        if best is not None:
            self.best = f"{best.describe()}: {_result_text(best)}"
        style = None if row.state in ("ok", "predicted") else "yellow"
        self.console.print(f"[{_place(outlook)}] {self.last}", markup=False, style=style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim")
        grid.add_column(overflow="ellipsis", no_wrap=True)
        elapsed = time.monotonic() - self.began
        grid.add_row("plan", Text(f"{self.plan}  ({duration_text(elapsed)})" if self.plan else "-"))
        grid.add_row("last", Text(self.last.splitlines()[0]))
        grid.add_row("best", Text(self.best))
        if self.outlook is not None:
            left = self.outlook.seconds_left
            left_text = "unknown until the first result" if left is None else f"about {duration_text(left)}"
            if self.outlook.device_hours_limit is not None:
                left_text += f"; {_device_hours(self.outlook)}"
            grid.add_row("left", Text(left_text))
            bar = ProgressBar(total=max(1, self.outlook.goal), completed=self.outlook.done, width=40)
            grid.add_row(_place(self.outlook), bar)
        yield Panel(grid, title="autotune", title_align="left", expand=True)
