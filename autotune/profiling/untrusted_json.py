"""Reads JSON that a rank wrote: of any size, shape or number, since a worker may write anything. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["MOST_BYTES", "read_json", "read_object"]

MOST_BYTES = 64 << 20
"""More than a report of any pipeline; what is longer is no report and isn't read into memory."""


def read_json(path: Path, most_bytes: int = MOST_BYTES) -> Any:
    """The value in a file.

    Raises:
        OSError: the file can't be read.
        ValueError: it is no file, too long, no UTF-8, or no JSON.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
        raise ValueError(f"{path.name} is no file")
    with open(path, "rb") as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"{path.name} is longer than {most_bytes} bytes")
    try:
        return json.loads(data.decode("utf-8"))
    except RecursionError:
        raise ValueError(f"{path.name} is nested too deep") from None


def read_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """The same, of a JSON object. Raises OSError, ValueError."""
    value = read_json(path, most_bytes)
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no object")
    return value
