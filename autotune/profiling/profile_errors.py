"""What goes wrong when a stage is measured."""

from __future__ import annotations

from typing import Literal

__all__ = ["ProfileError"]


class ProfileError(RuntimeError):
    """A stage could not be measured; `state` says whether memory was the reason."""

    def __init__(self, state: Literal["oom", "failed", "timeout"], message: str) -> None:
        super().__init__(message)
        self.state = state
