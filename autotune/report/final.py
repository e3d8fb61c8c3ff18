"""The final of a study for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.report.numbers import seconds_text
from autotune.results.columns import Row
from autotune.results.compare import compare
from autotune.results.final import Final

__all__ = ["final_lines"]


def final_lines(rows: Sequence[Row], final: Final | None) -> list[str]:
    """The step time of every plan in every round of a final, and its result in words; nothing without one."""
    if final is None:
        return []
    lines = ["final, step time of each round:"]
    by_fingerprint = {row.fingerprint: row for row in rows}
    for fingerprint in final.lineup.plans:
        row = by_fingerprint.get(fingerprint)
        name = fingerprint if row is None else f"trial {row.trial}, {row.describe()}"
        lines.append(f"  {name}: {_times(final, fingerprint)}")
    return lines + compare(rows, final).sentences()


def _times(final: Final, fingerprint: str) -> str:
    made = [launch for launch in final.launches if launch.fingerprint == fingerprint]
    if not made:
        return "not measured"
    times = ", ".join(seconds_text(one.step_time_s) if one.state == "ok" else one.state for one in made)
    trouble = final.lost.get(fingerprint, "").split("\n")[0]
    return f"{times} (fell out: {trouble})" if trouble else times
