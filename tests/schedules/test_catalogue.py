"""The documentation shows the registry as it is."""

from __future__ import annotations

from pathlib import Path

from autotune.schedules.catalogue import catalogue, catalogue_markdown
from autotune.schedules.registry import SCHEDULES

DOCS = Path(__file__).parents[2] / "docs" / "schedules.md"


def test_the_table_of_the_documentation_is_the_registry() -> None:
    lines = DOCS.read_text().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("| name "))
    end = next(k for k in range(start, len(lines)) if not lines[k].startswith("|"))
    assert "\n".join(lines[start:end]) + "\n" == catalogue_markdown()


def test_every_schedule_documents_its_source_memory_and_bubble() -> None:
    for name, kind in SCHEDULES.items():
        assert kind.name == name
        assert all([kind.source, kind.peak_activation, kind.bubble]), name
    assert [row["name"] for row in catalogue()] == list(SCHEDULES)
