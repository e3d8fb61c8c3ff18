"""The table of a study as it grows: a row for every point of the space, written to its folder."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from autotune.results.columns import Row
from autotune.results.compare import compare, in_force
from autotune.results.final import Final
from autotune.results.measurement import Fidelity, State
from autotune.results.pareto import pareto_front
from autotune.results.predicted import Predicted
from autotune.results.rows import row_without_trial, tokens_per_step
from autotune.results.verdict import fidelity_of, is_over_limit, judge
from autotune.search.folder import StudyFolder
from autotune.search.forecast import Forecast
from autotune.search.history import refused_by_history
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Book"]

# The table is rewritten after every trial unless that would take more than a twentieth of the time.
_WRITE_SHARE = 20


@dataclass
class Book:
    """Rows of a study.

    Attributes:
        plans: the legal plans by fingerprint.
        forecasts: what the cost model says of them.
        troubles: why a plan has no forecast.
        unpredicted: why others have none; empty: they wait for a trial as those with one do.
        rows: of the plans that had a trial, by fingerprint.
        history: of plans that are refused because of what other trials showed.
        final: the study's, as far as it came; it names the best plan if it decides.
    """

    space: Space
    fidelity: Fidelity
    folder: StudyFolder
    plans: Mapping[str, Plan]
    forecasts: Mapping[Plan, Forecast]
    troubles: Mapping[Plan, str] = field(default_factory=dict)
    unpredicted: str = ""
    rows: dict[str, Row] = field(default_factory=dict)
    history: dict[str, Row] = field(default_factory=dict)
    final: Final | None = None
    next_write: float = 0.0

    def __post_init__(self) -> None:
        self.refused = tuple(
            Row(state="refused", reason=candidate.reason, **candidate.point._asdict())
            for candidate in self.space.candidates()
            if candidate.plan is None
        )
        self.estimates = {
            fingerprint: self._row(plan, fingerprint, "refused", told.refusal, told.predicted)
            for fingerprint, plan in self.plans.items()
            if (told := self.forecasts.get(plan)) is not None and told.refusal is not None
        }

    def left(self) -> dict[str, Plan]:
        """Legal plans that were neither evaluated nor refused by their estimate or by history, by fingerprint."""
        done = self.rows.keys() | self.estimates.keys() | self.history.keys()
        return {fingerprint: plan for fingerprint, plan in self.plans.items() if fingerprint not in done}

    def refuse_by_history(self, proving: Collection[str]) -> list[str]:
        """Refuse plans that can't fit, by the trials so far; the reasons of those that are new.

        Args:
            proving: plans whose trials prove something, by fingerprint.
        """
        left = {fingerprint: plan for fingerprint, plan in self.plans.items() if fingerprint not in self.rows}
        proofs = [row for fingerprint, row in self.rows.items() if fingerprint in proving]
        reasons = refused_by_history(proofs, left)
        new = [reason for fingerprint, reason in reasons.items() if fingerprint not in self.history]
        self.history = {}
        for fingerprint, reason in reasons.items():
            plan = left[fingerprint]
            told = self.forecasts.get(plan)
            predicted = None if told is None else told.predicted
            self.history[fingerprint] = self._row(plan, fingerprint, "refused", reason, predicted)
        return new

    def table(self, waiting: str) -> tuple[Row, ...]:
        """Every row, judged: trials in order, predictions (those that fit first, from the fastest down), refusals.

        Args:
            waiting: the reason in the rows of plans that had no trial.
        """
        tried = sorted(self.rows.values(), key=lambda row: row.trial or 0)
        refused = {**self.history, **self.estimates}
        estimates = [row for fingerprint, row in refused.items() if fingerprint not in self.rows]
        rows = [*tried, *self._waiting_rows(waiting), *estimates, *self.refused]
        deciding = in_force(self.final, rows)
        return tuple(judge(rows, None if deciding is None else deciding.best))

    def write(self, waiting: str) -> tuple[Row, ...]:
        """Replace the files of the table; its rows."""
        began = time.monotonic()
        rows = self.table(waiting)
        self.folder.write_tables(rows)
        self.folder.write_text(self.folder.best, json.dumps(self._best(rows), indent=1) + "\n")
        self.write_final(rows)
        now = time.monotonic()
        self.next_write = now + _WRITE_SHARE * (now - began)
        return rows

    def write_final(self, rows: Sequence[Row]) -> None:
        """Replace the file of the final, if the study has one."""
        if self.final is None:
            return
        plans = {row.fingerprint: row.describe() for row in rows if row.fingerprint in self.final.lineup.plans}
        told = {**self.final.to_dict(), "described": plans, "summary": compare(rows, self.final).sentences()}
        self.folder.write_text(self.folder.final, json.dumps(told, indent=1) + "\n")

    def is_due(self) -> bool:
        """Whether replacing the files of the table would take no more than a small part of the time."""
        return time.monotonic() >= self.next_write

    def _waiting_rows(self, reason: str) -> list[Row]:
        rows = []
        for fingerprint, plan in self.plans.items():
            if fingerprint in self.rows or fingerprint in self.estimates or fingerprint in self.history:
                continue
            told = self.forecasts.get(plan)
            why, predicted = reason, None if told is None else told.predicted
            if predicted is None:
                why = self.troubles.get(plan, self.unpredicted or reason)
            rows.append(self._row(plan, fingerprint, "predicted", why, predicted))
        return sorted(rows, key=lambda row: (is_over_limit(row), row.predicted_step_time_s or float("inf")))

    def _row(self, plan: Plan, fingerprint: str, state: State, reason: str, predicted: Predicted | None) -> Row:
        tokens = tokens_per_step(self.space.model, self.space.training)
        limit = self.space.cluster.memory_limit_bytes
        return row_without_trial(plan, fingerprint, state, reason, predicted, tokens, limit)

    def _best(self, rows: tuple[Row, ...]) -> dict[str, object]:
        """What best.json holds: the best plan with everything an exporter needs, and how it compares."""
        best = next((row for row in rows if row.is_best), None)
        plan = None if best is None else self.plans[best.fingerprint]
        return {
            "study": self.space.name,
            "fidelity": fidelity_of(rows),
            "plan": None if plan is None else plan.to_dict(),
            "row": None if best is None else best.to_dict(),
            "comparison": compare(rows, self.final).to_dict(),
            "pareto": [row.fingerprint for row in pareto_front(rows)],
            "model": asdict(self.space.model),
            "cluster": asdict(self.space.cluster),
            "training": asdict(self.space.training),
        }
