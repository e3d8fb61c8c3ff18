"""The finals of studies in the database: written in the transaction that proves who holds them."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import delete, insert, select
from sqlalchemy.engine import Connection

from autotune.search.tables import FINALS

__all__ = ["read_final", "write_final"]


def read_final(connection: Connection, study: int) -> dict[str, Any] | None:
    """The final of a study, as it was written last; None without one. Raises ValueError if it is damaged."""
    text = connection.execute(select(FINALS.c.told).where(FINALS.c.study == study)).scalar()
    if text is None:
        return None
    values = json.loads(text)
    if not isinstance(values, dict):
        raise ValueError(f"a final is no {type(values).__name__}")
    return values


def write_final(connection: Connection, study: int, values: dict[str, Any]) -> None:
    """Replace the final of a study, within the transaction of `connection`."""
    connection.execute(delete(FINALS).where(FINALS.c.study == study))
    connection.execute(insert(FINALS).values(study=study, told=json.dumps(values)))
