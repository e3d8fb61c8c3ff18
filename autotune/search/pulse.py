"""The heartbeat of a tuner: a thread that raises its number in the database while trials run."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType

import optuna
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import UserError
from autotune.search.claims import Claims

__all__ = ["Pulse"]

_LONGEST_S, _PER_GRACE = 5.0, 6


class Pulse:
    """Beats from `start` to `stop`; `lost` tells that others took this tuner for dead and its claims with it.

    Args:
        grace_s: silence after which others do that.
    """

    def __init__(self, claims: Claims, grace_s: float) -> None:
        self._claims = claims
        self._every_s = min(_LONGEST_S, grace_s / _PER_GRACE)
        self._end = threading.Event()
        self.lost = False
        self._thread = threading.Thread(target=self._beat, name="autotune-pulse", daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join(timeout=10)

    def _beat(self) -> None:
        while not self._end.wait(self._every_s):
            # A database that is away is the search's trouble; the next beat tries again.
            with suppress(SQLAlchemyError, optuna.exceptions.StorageInternalError, UserError):
                key = self._claims.me.key
                if not self._claims.beat() and key == self._claims.me.key:
                    self.lost = True
