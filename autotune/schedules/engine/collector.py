"""Searches without the cyclic garbage collector: they make tens of thousands of tuples, and not one cycle."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

__all__ = ["without_collector"]

P = ParamSpec("P")
R = TypeVar("R")


def without_collector(function: Callable[P, R]) -> Callable[P, R]:
    """The function, during which the collector stands still: it would look through all those tuples again and again.

    In a quick search it took a fifth of the time. What is counted down to no reference is freed all the same.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return function(*args, **kwargs)
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            gc.enable()

    return run
