"""Typed values out of the config of a Hugging Face model, with every problem collected."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeGuard

__all__ = ["Reader", "is_whole", "listed", "show"]

# The most that a space takes for the same fields when they are written out.
_LARGEST_COUNT = 2**31 - 1


@dataclass
class Reader:
    """Takes typed values out of a config and collects every problem, so that all are told at once."""

    values: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    def refuse(self, key: str, message: str) -> None:
        self.problems.append(f"{key}: {message}")

    def whole(self, key: str, default: int | None, aliases: tuple[str, ...] = ()) -> int:
        """A whole number from 1 to 2^31 - 1.

        `default` when absent, or when null and the family reads null as its default.
        """
        for name in (key, *aliases):
            if self.values.get(name) is not None:
                value = self.values[name]
                if is_whole(value) and 1 <= value <= _LARGEST_COUNT:
                    return value
                self.refuse(name, f"{show(value)} is not a whole number from 1 to {_LARGEST_COUNT}")
                return 1
        if default is None or (key in self.values and key not in _NULL_MEANS_DEFAULT):
            self.refuse(key, "null, but the model needs a whole number above 0")
            return 1
        return default

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max:
            return float(value)
        self.refuse(key, f"{show(value)} is not a finite number above 0")
        return default

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        self.refuse(key, f"{show(value)} is neither true nor false")
        return default

    def activation(self, key: str, default: str, legal: frozenset[str]) -> str:
        value = self.values.get(key, default)
        if isinstance(value, str) and value in legal:
            return value
        self.refuse(key, f"activation {show(value)} is not modelled for this family; modelled: {listed(legal)}")
        return default

    def fixed(self, key: str, expected: bool, why: str) -> None:
        """Refuses a flag that, set otherwise, makes another model of it."""
        if self.flag(key, expected) is not expected:
            self.refuse(key, f"{json.dumps(not expected)} is not modelled ({why})")


_NULL_MEANS_DEFAULT = frozenset({"num_key_value_heads", "n_inner", "head_dim"})


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def show(value: object) -> str:
    """A JSON value as the file writes it, shortened."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def listed(names: Iterable[str]) -> str:
    """Names in alphabetical order."""
    return ", ".join(sorted(names))
