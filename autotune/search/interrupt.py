"""Ctrl-C and termination as a flag that the search reads between its steps, so that no state is torn."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupt", "catch_interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """Whether the user, or the batch system, wants the search to end."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __bool__(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended: 130 for Ctrl-C, 143 for SIGTERM."""
        assert self.signal is not None
        return 128 + self.signal


@contextlib.contextmanager
def catch_interrupts() -> Iterator[Interrupt]:
    """Set the flag at the first SIGINT, SIGTERM or SIGHUP; a second SIGINT raises KeyboardInterrupt at once."""
    interrupt = Interrupt()

    def note(number: int, frame: FrameType | None) -> None:
        if interrupt.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        interrupt.signal = interrupt.signal or number

    before = {number: signal.signal(number, note) for number in _SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
