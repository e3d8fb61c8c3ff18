"""What accelerators can do: the catalogue of figures that a time prediction needs, each with its source."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources

from autotune.errors import UserError
from autotune.space.machine import Machine

__all__ = ["Machine", "catalogue", "machine"]


@cache
def catalogue() -> dict[str, Machine]:
    """All devices of `data/devices.csv`, by name."""
    text = resources.files("autotune.cost").joinpath("data/devices.csv").read_text(encoding="utf-8")
    figures: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(line for line in text.splitlines() if not line.startswith("#")):
        figures.setdefault(row["device"], {})[row["figure"]] = float(row["value"])
    return {name: _machine(name, values) for name, values in figures.items()}


def _machine(name: str, values: dict[str, float]) -> Machine:
    known = set(Machine.__dataclass_fields__) - {"name"}
    numbers: dict[str, float | None] = {key: values[key] for key in values if key in known}
    numbers.setdefault("memory_bytes", None)
    return Machine(name=name, **numbers)  # type: ignore[arg-type]


def machine(name: str) -> Machine:
    """The catalogue's machine of that name.

    Raises:
        UserError: no such device.
    """
    found = catalogue().get(name)
    if found is None:
        raise UserError(f"no figures for device {name!r}: give one of {', '.join(sorted(catalogue()))}, or calibrate")
    return found
