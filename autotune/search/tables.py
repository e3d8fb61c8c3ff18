"""The tables beside those of Optuna: studies, the tuners at work on them, who measures which plan, and finals."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Integer, MetaData, String, Table, Text
from sqlalchemy.engine import Engine

__all__ = ["CLAIMS", "FINALS", "STUDIES", "TABLES", "TUNERS", "create_tables"]

_METADATA = MetaData()
STUDIES = Table(
    "autotune_studies",
    _METADATA,
    Column("study", Integer, primary_key=True, autoincrement=False),
    Column("mark", String(32), nullable=False),
    Column("identity", Text, nullable=False),
    Column("turn", Integer, nullable=False),
)
TUNERS = Table(
    "autotune_tuners",
    _METADATA,
    Column("key", String(32), primary_key=True),
    Column("study", Integer, ForeignKey("autotune_studies.study"), nullable=False, index=True),
    Column("host", String(255), nullable=False),
    Column("place", String(255), nullable=False),
    Column("pid", Integer, nullable=False),
    Column("created", String(32), nullable=False),
    Column("devices", Text, nullable=False),
    Column("beat", Integer, nullable=False),
)
CLAIMS = Table(
    "autotune_claims",
    _METADATA,
    Column("study", Integer, ForeignKey("autotune_studies.study"), primary_key=True),
    Column("fingerprint", String(16), primary_key=True),
    Column("owner", String(32), nullable=False),
    Column("state", String(16), nullable=False),
    Column("trial", Integer),
)
FINALS = Table(
    "autotune_finals",
    _METADATA,
    Column("study", Integer, ForeignKey("autotune_studies.study"), primary_key=True, autoincrement=False),
    Column("told", Text, nullable=False),
)

TABLES = (STUDIES, TUNERS, CLAIMS, FINALS)


def create_tables(engine: Engine) -> None:
    """Make the tables where they are missing."""
    _METADATA.create_all(engine)
