"""What a search tells whoever watches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autotune.results.columns import Row
from autotune.space.plan import Plan

__all__ = ["Observer", "Outlook", "Silent"]


@dataclass(frozen=True)
class Outlook:
    """Where a search stands.

    Attributes:
        done, goal: trials finished and wanted in all, earlier runs of the study included.
        seconds_left: estimate from the trials so far and the tuners at work; None before the first.
        device_hours, device_hours_limit: spent, and how many may be; None for no limit.
    """

    done: int
    goal: int
    seconds_left: float | None
    device_hours: float = 0.0
    device_hours_limit: float | None = None


class Observer(Protocol):
    """Told of everything a user would want to see, in order."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def trial_begins(self, trial: int, plan: Plan, outlook: Outlook) -> None:
        """A plan is about to be launched."""

    def trial_ended(self, row: Row, best: Row | None, outlook: Outlook) -> None:
        """A plan has its row; `best` is the fastest so far."""


class Silent:
    """An observer that shows nothing."""

    def note(self, text: str) -> None: ...

    def trial_begins(self, trial: int, plan: Plan, outlook: Outlook) -> None: ...

    def trial_ended(self, row: Row, best: Row | None, outlook: Outlook) -> None: ...
