"""The final of a study: its best plans and its baselines measured again, in turns, to decide the answer.

The fastest of many measurements is fast in part by luck, so the number that made a plan win a search says too much for
it. The final measures the few plans that matter again in rounds A-B-C-A-B-C, each in fresh processes, and its numbers
alone decide. Everything here follows from the launches made so far: an interrupted final goes on where it stood.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.ratios import RatioInterval, paired_ratio
from autotune.results.text import first_line
from autotune.results.verdict import INTERLEAVED_SCHEDULE, fastest, is_baseline_schedule

__all__ = ["LEAST_ROUNDS", "NARROW", "Final", "FinalLaunch", "Lineup", "pick_lineup", "read_final", "too_few"]

LEAST_ROUNDS = 3
"""Rounds before anything is decided: the scatter of two says next to nothing."""

NARROW = 0.03
"""Width of the interval of a ratio below which more rounds aren't worth their time."""

_VERSION = 1
_KEYS = ("version", "top", "most_rounds", "plans", "baseline", "interleaved", "earlier_s", "launches")


@dataclass(frozen=True)
class Lineup:
    """Who takes part, by fingerprint.

    Attributes:
        plans: in the search's order, the fastest first.
        baseline, interleaved: which of them is the best measured 1F1B plan, and the best interleaved one, if any.
    """

    plans: tuple[str, ...]
    baseline: str | None
    interleaved: str | None


def pick_lineup(rows: Sequence[Row], top: int) -> Lineup:
    """The `top` fastest measured plans of a study and both baselines, each once.

    Where that is one plan alone, the fastest itself a baseline, the next fastest is its opponent.
    """
    measured = [row for row in rows if row.state == "ok" and row.tokens_per_s is not None]
    ranked = sorted(measured, key=lambda row: -(row.tokens_per_s or 0.0))
    baseline = fastest(measured, is_baseline_schedule, "run")
    interleaved = fastest(measured, lambda row: row.schedule == INTERLEAVED_SCHEDULE, "run")
    first = {row.fingerprint for row in ranked[:top]}
    wanted = first | {row.fingerprint for row in (baseline, interleaved) if row is not None}
    if len(wanted) == 1:
        wanted |= {row.fingerprint for row in ranked[:2]}
    return Lineup(
        tuple(row.fingerprint for row in ranked if row.fingerprint in wanted),
        None if baseline is None else baseline.fingerprint,
        None if interleaved is None else interleaved.fingerprint,
    )


def too_few(lineup: Lineup) -> str:
    """Why there is nothing to hold a final between; empty if there is."""
    if len(lineup.plans) > 1:
        return ""
    return "only one plan ran within its limits" if lineup.plans else "no plan ran within its limits"


@dataclass(frozen=True)
class FinalLaunch:
    """One measurement of one plan.

    Attributes:
        round: from 1.
        step_time_s: median step of this launch; None unless the state is `ok`.
        started: UTC, ISO 8601.
        duration_s: wall time, start-up included.
    """

    round: int
    fingerprint: str
    state: str
    reason: str
    step_time_s: float | None
    started: str
    duration_s: float


@dataclass(frozen=True)
class Final:
    """A final, finished or not.

    Attributes:
        top: how many of the fastest plans were asked for.
        most_rounds: rounds after which it ends in any case.
        earlier_s: time that finals of other lineups of the same study took.
    """

    lineup: Lineup
    top: int
    most_rounds: int
    launches: tuple[FinalLaunch, ...] = ()
    earlier_s: float = 0.0

    def with_launch(self, launch: FinalLaunch) -> Final:
        """The final after one more measurement."""
        return replace(self, launches=(*self.launches, launch))

    def holds_for(self, rows: Sequence[Row]) -> bool:
        """Whether the plans that took part are those that `rows` of the study call for."""
        return pick_lineup(rows, self.top) == self.lineup

    @property
    def spent_s(self) -> float:
        """Time of all its launches, and of earlier finals."""
        return self.earlier_s + sum(launch.duration_s for launch in self.launches)

    @cached_property
    def lost(self) -> dict[str, str]:
        """The plans that fell out, and why: a failure, or a measurement over the memory limit.

        Launches that failed for reasons outside of the plan leave a hole in their round and aren't held against it,
        unless no launch of the plan's went well.
        """
        found: dict[str, str] = {}
        for launch in self.launches:
            if launch.state not in ("ok", "launcher"):
                found.setdefault(launch.fingerprint, f"{launch.state}: {launch.reason}")
        for launch in self.launches:
            if launch.round == LEAST_ROUNDS and not self._times[launch.fingerprint]:
                found.setdefault(launch.fingerprint, f"{launch.state}: {launch.reason}")
        return found

    @cached_property
    def rounds(self) -> int:
        """Rounds that are complete."""
        upcoming = self._next
        return self._last if upcoming is None else upcoming[0] - 1

    @property
    def progress(self) -> str:
        """How far it came: `1 of 3 to 8 rounds`."""
        most = f" to {self.most_rounds}" if self.most_rounds > LEAST_ROUNDS else ""
        return f"{self.rounds} of {LEAST_ROUNDS}{most} rounds"

    def upcoming(self) -> tuple[int, str] | None:
        """Round and plan of the next measurement; None when the final is over."""
        return self._next

    @property
    def decides(self) -> bool:
        """Whether it has rounds enough to decide the study, and a plan that got through them."""
        return self.best is not None

    @property
    def decided_nothing(self) -> str:
        """That no plan got through a final that is over, and why not; empty of every other final."""
        if not self.launches or self._next is not None or self.best is not None:
            return ""
        causes = Counter(first_line(cause) for cause in self.lost.values())
        told = "; ".join(f"{count} plan{'s' * (count > 1)} {cause}" for cause, count in causes.most_common())
        return f"the final decided nothing, no plan got through it ({told}); --resume holds it again"

    @cached_property
    def best(self) -> str | None:
        """The plan that won; of plans that are equal within the noise the search's first. None: not decided."""
        enough = self.launches and (self.rounds >= LEAST_ROUNDS or self._next is None)
        return self._leader(self.rounds) if enough else None

    def ratio(self, own: str, other: str) -> RatioInterval | None:
        """How much faster `own` is than `other`, over the complete rounds that both have; None for fewer than two."""
        return self._ratio(own, other, self.rounds)

    def challenger(self) -> str | None:
        """The fastest plan beside the best."""
        return None if self.best is None else self._runner_up(self.best, self.rounds)

    def step_time_s(self, fingerprint: str) -> float | None:
        """Mean of the step times of one plan's rounds."""
        times = list(self._times[fingerprint].values())
        return sum(times) / len(times) if times else None

    @cached_property
    def _times(self) -> dict[str, dict[int, float]]:
        times: dict[str, dict[int, float]] = {plan: {} for plan in self.lineup.plans}
        for launch in self.launches:
            if launch.state == "ok" and launch.step_time_s is not None:
                times[launch.fingerprint][launch.round] = launch.step_time_s
        return times

    @property
    def _last(self) -> int:
        return max((launch.round for launch in self.launches), default=0)

    @cached_property
    def _next(self) -> tuple[int, str] | None:
        if len(self.lineup.plans) < 2:
            return None
        made = {(launch.round, launch.fingerprint) for launch in self.launches}
        # A plan that falls out may change who should have been in earlier rounds; those are over.
        for number in range(max(1, self._last), self.most_rounds + 1):
            in_it = [plan for plan in self._in_round(number) if plan not in self.lost]
            # Who is left alone has won, but not before one launch of its own went well.
            if len(in_it) < 2 and number > 1:
                return None
            for plan in in_it:
                if (number, plan) not in made:
                    return number, plan
        return None

    def _in_round(self, number: int) -> list[str]:
        """Who is measured in a round: at first all, later those that may still win and those whose ratio is open."""
        before = number - 1
        if before < LEAST_ROUNDS:
            return list(self.lineup.plans)
        open_pairs = [
            pair for pair in self._pairs(before) if (found := self._ratio(*pair, before)) and not found.is_clear(NARROW)
        ]
        leader = self._leader(before)
        if not open_pairs or leader is None:
            return []
        needed = {plan for pair in open_pairs for plan in pair} | {leader}
        return [plan for plan in self.lineup.plans if plan in needed or not self._is_behind(plan, leader, before)]

    def _is_behind(self, plan: str, leader: str, rounds: int) -> bool:
        found = self._ratio(plan, leader, rounds)
        return found is not None and found.slower

    def _pairs(self, rounds: int) -> Iterator[tuple[str, str]]:
        """Whose ratios the final is about: the leader over each baseline; over the next where it is one itself."""
        leader = self._leader(rounds)
        if leader is None:
            return
        baselines = [self.lineup.baseline, self.lineup.interleaved]
        others = [plan for plan in baselines if plan is not None and plan not in self.lost and plan != leader]
        yield from ((leader, other) for other in others)
        if (leader == self.lineup.baseline or not others) and (next_one := self._runner_up(leader, rounds)) is not None:
            yield leader, next_one

    def _leader(self, rounds: int) -> str | None:
        """The first in the search's order that no later one beats beyond the noise."""
        left = [plan for plan in self.lineup.plans if plan not in self.lost]
        leader = left[0] if left else None
        for plan in left[1:]:
            assert leader is not None
            found = self._ratio(plan, leader, rounds)
            if found is not None and found.faster:
                leader = plan
        return leader

    def _runner_up(self, leader: str, rounds: int) -> str | None:
        """The plan with the best ratio against the leader."""
        ratios = {
            plan: found.ratio
            for plan in self.lineup.plans
            if plan not in self.lost and plan != leader and (found := self._ratio(plan, leader, rounds)) is not None
        }
        return max(ratios, key=lambda plan: ratios[plan], default=None)

    def _ratio(self, own: str, other: str, rounds: int) -> RatioInterval | None:
        both = sorted(number for number in self._times[own].keys() & self._times[other].keys() if number <= rounds)
        looks = self.most_rounds - LEAST_ROUNDS + 1
        return paired_ratio(
            [self._times[own][number] for number in both], [self._times[other][number] for number in both], looks
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, all that `from_dict` needs."""
        return {
            "version": _VERSION,
            "top": self.top,
            "most_rounds": self.most_rounds,
            "plans": list(self.lineup.plans),
            "baseline": self.lineup.baseline,
            "interleaved": self.lineup.interleaved,
            "earlier_s": self.earlier_s,
            "launches": [asdict(launch) for launch in self.launches],
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Final:
        """What `to_dict` gave. Raises ValueError, TypeError or KeyError if it is something else."""
        if not isinstance(values, dict):
            raise ValueError("it must be an object")
        if values.get("version", _VERSION) != _VERSION:
            raise ValueError(f"its version is {values['version']!r}, not {_VERSION}")
        if missing := [name for name in _KEYS if name not in values]:
            raise ValueError(f"it lacks {', '.join(missing)}")
        final = Final(
            Lineup(tuple(values["plans"]), values["baseline"], values["interleaved"]),
            values["top"],
            values["most_rounds"],
            tuple(FinalLaunch(**launch) for launch in values["launches"]),
            values["earlier_s"],
        )
        if not all(isinstance(number, int) for number in (final.top, final.most_rounds)):
            raise ValueError("top and most_rounds must be whole numbers")
        for launch in final.launches:
            if launch.fingerprint not in final.lineup.plans:
                raise ValueError(f"plan {launch.fingerprint!r} was launched but takes no part")
            if launch.state == "ok" and not (launch.step_time_s is not None and launch.step_time_s > 0):
                raise ValueError(f"a step time must be above 0, not {launch.step_time_s!r}")
        return final


def read_final(path: Path) -> Final | None:
    """The final in a file `final.json`; None if there is none.

    Raises:
        UserError: the file can't be read, or is damaged.
    """
    try:
        return Final.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{path} is damaged, or of another version: {error}") from None
