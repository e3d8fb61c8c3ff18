"""The final on the real command line: launches in turns, numbers of its own, and nothing lost when it is cut short."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
from typing import Any

import psutil
import pytest
from conftest import FAKE, Bench, wait_until

from autotune.results.columns import Row
from autotune.results.compare import compare
from autotune.results.final import Final, FinalLaunch, pick_lineup
from autotune.results.measurement import Measurement, TrialOutcome
from autotune.results.rows import row_of
from autotune.search.budget import Budget, Spent
from autotune.search.final import TAKEN_OVER, Held, final_to_hold, hold_final, least_launches
from autotune.search.observer import Silent
from autotune.search.options import Ended
from autotune.search.tables import CLAIMS, TUNERS
from autotune.space.plan import Plan
from autotune.space.space import Space, load_space

FAMILIES = ("1f1b", "interleaved-1f1b", "zb-h1")


@pytest.fixture
def three(bench: Bench) -> Bench:
    """A space of one plan each of three schedules."""
    bench.keep_three_plans("interleaved-1f1b, zb-h1")
    return bench


class Notes(Silent):
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def note(self, text: str) -> None:
        self.told.append(text)


def times(**step_s: Any) -> list[dict[str, Any]]:
    """Rules: the step time of each schedule, one for every launch or a list of them."""
    return [
        {"when": {"schedule": schedule.replace("_", "-").removeprefix("s-")}, "do": "succeed", "step_s": one}
        for schedule, one in step_s.items()
    ]


def launched(bench: Bench) -> list[str]:
    return [json.loads(plan)["schedule"] for plan in bench.launches()]


def final(bench: Bench) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((bench.study / "final.json").read_text())
    return told


def test_the_final_decides_in_turns_and_is_not_held_twice(three: Bench) -> None:
    # zb-h1 wins the search by one lucky launch; in truth interleaved is 1.25 times as fast as 1f1b, zb-h1 is not.
    three.tell_worker(
        *times(
            s_1f1b=[0.20, 0.200, 0.202, 0.201],
            interleaved_1f1b=[0.16, 0.160, 0.161, 0.162],
            zb_h1=[0.10, 0.210, 0.209, 0.211],
        )
    )
    done = three.search("--final", "3")
    assert done.returncode == 0, done.stderr
    assert launched(three)[:2] == ["1f1b", "interleaved-1f1b"]
    assert launched(three)[3:] == ["zb-h1", "interleaved-1f1b", "1f1b"] * 3
    assert "best: pp2 tp1 dp2 mbs2 m4 interleaved-1f1b" in done.stdout
    said = re.search(r"(\S+)x \((\S+) to (\S+)\) over 1F1B: pp2 tp1 dp2 mbs2 m4 interleaved-1f1b", done.stdout)
    assert said is not None
    ratio, low, high = map(float, said.groups())
    assert 1.1 < low <= ratio <= high < 1.4
    assert low <= 1.25 <= high
    best = json.loads((three.study / "best.json").read_text())
    assert best["plan"]["schedule"] == "interleaved-1f1b"
    assert [row["schedule"] for row in three.table() if row["is_best"] == "true"] == ["interleaved-1f1b"]
    assert len(final(three)["launches"]) == 9
    compared = three.run("compare", str(three.study))
    assert "over 1F1B" in compared.stdout
    assert "95 % interval" in compared.stdout
    told = json.loads(three.run("compare", str(three.study), "--json").stdout)
    assert len(told["final"]["launches"]) == 9
    assert told["baseline"]["ratio_low"] <= 1.25 <= told["baseline"]["ratio_high"]
    shown = three.run("results", str(three.study)).stdout
    assert "final, step time of each round:" in shown
    exported = three.run("export", str(three.study), "--to", "torchrun", "--out", "job")
    assert "interleaved-1f1b" in exported.stdout
    again = three.search("--final", "3", "--resume")
    assert "over 1F1B: pp2 tp1 dp2 mbs2 m4 interleaved-1f1b" in again.stdout
    assert len(three.launches()) == 12


def test_equal_plans_are_no_gain_and_trials_that_change_the_top_ask_for_another_final(three: Bench) -> None:
    three.edit_space("interleaved-1f1b, zb-h1", "zb-h1, zb-h2")
    wobble = [0.2, 0.2, 0.201, 0.202, 0.2, 0.201, 0.202, 0.2]
    three.tell_worker(*times(s_1f1b=wobble, zb_h1=[0.19, *reversed(wobble)], zb_h2=0.1))
    first = three.here(final=3, final_rounds=3, trials=2)
    assert compare(first.rows, first.final).sentences()[0].startswith("no significant gain over 1F1B (0.9")
    assert len(three.launches()) == 2 + 6
    second = three.here(resume=True, trials=3)
    assert "the final was between other plans than those that lead now" in three.run("compare", str(three.study)).stdout
    assert second.best is not None
    assert second.best.schedule == "zb-h2"
    third = three.here(final=3, final_rounds=3, resume=True)
    assert launched(three)[8:] == ["zb-h2", *["zb-h2", "zb-h1", "1f1b"] * 3]
    assert "over 1F1B: pp2 tp1 dp2 mbs2 m4 zb-h2" in compare(third.rows, third.final).sentences()[0]
    assert final(three)["earlier_s"] > 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_final_cut_short_is_finished_by_resume(three: Bench, number: int) -> None:
    slow_at = {"when": {"schedule": "zb-h1", "launch": 3}, "do": "sleep"}
    three.tell_worker(slow_at, *times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1))
    tuner = three.start("--final", "1")
    wait_until(lambda: len(three.launches()) == 3 + 3 + 1, limit_s=60)
    beside = three.here(resume=True, final=1)
    assert beside.no_final == "no final here: another search holds it"
    os.kill(tuner.pid, number)
    out, err = tuner.communicate(timeout=30)
    assert "Traceback" not in err
    assert len(final(three)["launches"]) == 3
    wait_until(lambda: not _workers(three), limit_s=10)
    if number == signal.SIGINT:
        assert tuner.returncode == 130
        assert "the final was interrupted after 1 of 3 to 8 rounds; --resume goes on with it" in out
        told = three.run("compare", str(three.study)).stdout
        assert "isn't over: 1 of 3 to 8 rounds so far, so it doesn't count yet" in told
    three.tell_worker(*times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1))
    done = three.search("--final", "1", "--resume")
    assert done.returncode == 0, done.stderr
    assert launched(three)[7:] == ["zb-h1", "interleaved-1f1b", "1f1b"] * 2
    assert [launch["round"] for launch in final(three)["launches"]] == [1] * 3 + [2] * 3 + [3] * 3
    assert "over 1F1B" in done.stdout


def test_a_search_whose_final_was_taken_over_says_so_and_was_not_interrupted(three: Bench) -> None:
    rates = times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1)
    three.tell_worker({"when": {"schedule": "zb-h1", "launch": 3}, "do": "sleep"}, *rates)
    slow = three.start("--final", "1", "--takeover-after", "4")
    wait_until(lambda: len(three.launches()) == 3 + 3 + 1, limit_s=60)
    with sqlite3.connect(three.study / "study.db", timeout=30) as connection:  # as a search does that takes it for dead
        assert connection.execute(f"DELETE FROM {CLAIMS.name} WHERE state = 'held'").rowcount == 1
        assert connection.execute(f"DELETE FROM {TUNERS.name}").rowcount == 1
    out, err = slow.communicate(timeout=60)
    assert (slow.returncode, err) == (0, "")
    assert "every legal plan was measured" in out
    assert "interrupted" not in out
    assert TAKEN_OVER in " ".join(out.split())
    assert len(final(three)["launches"]) == 3


def _workers(bench: Bench) -> list[int]:
    lines = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    return [pid for pid, line in lines.items() if str(FAKE) in line and any(str(bench.path) in word for word in line)]


def test_plan_that_fails_in_the_final_is_not_the_best(three: Bench) -> None:
    over = {"when": {"schedule": "zb-h1", "launch": 2}, "do": "succeed", "step_s": 0.1, "peak": 2 << 20}
    three.tell_worker(over, *times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1))
    notes = Notes()
    done = three.here(notes, final=2)
    assert launched(three)[3:] == ["zb-h1", *["interleaved-1f1b", "1f1b"] * 3]
    assert any("oom: rank 3 peaked at" in note and "it falls out of the final" in note for note in notes.told)
    assert done.best is not None
    assert done.best.schedule == "interleaved-1f1b"
    assert "(fell out: oom: rank" in three.run("results", str(three.study)).stdout


def test_final_that_no_plan_got_through_says_so_and_resume_holds_it_again(three: Bench) -> None:
    fails = {"when": {"launch": [2, 3, 4]}, "do": "fail"}
    three.tell_worker(fails, *times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1))
    done = three.search("--final", "1")
    assert done.returncode == 0, done.stderr
    assert len(three.launches()) == 3 + 3
    assert "\nthe final decided nothing, no plan got through it (" in done.stdout
    assert "--resume holds it again" in three.run("compare", str(three.study)).stdout
    three.tell_worker(*times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1))
    again = three.here(resume=True, final=1)
    assert again.no_final == ""
    assert len(three.launches()) == 6 + 9
    assert "over 1F1B" in compare(again.rows, again.final).sentences()[0]
    assert final(three)["earlier_s"] > 0


def test_the_final_ends_when_the_study_s_time_is_spent_and_goes_on_when_there_is_more(bench: Bench) -> None:
    space = load_space(bench.path / "tiny.yaml")
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    rows = [_measured(number, *pair, space) for number, pair in enumerate(plans.items())]
    seconds_a_launch = 10.0
    kept: list[Final] = []
    notes = Notes()

    def measure(trial: int, number: int, plan: Plan) -> TrialOutcome:
        return TrialOutcome("ok", "", _measurement(0.1 + 0.01 * trial), "2026-01-01T00:00:00+00:00", seconds_a_launch)

    def keep(final: Final) -> bool:
        kept.append(final)
        return True

    def held(limit_s: float, so_far: Final | None) -> Held:
        def spent(final: Final) -> str:
            return f"the time of {limit_s:g} s is spent" if final.spent_s >= limit_s else ""

        return hold_final(rows, plans, 1, 3, so_far, measure, keep, spent, notes)

    assert held(0.0, None) == Held(None, remark="no final: the time of 0 s is spent")
    assert notes.told == []  # what can't begin isn't announced
    cut = held(40.0, None)
    assert cut.remark == "the final was cut short after 2 of 3 rounds: the time of 40 s is spent"
    assert cut.final is not None
    assert cut.final == kept[-1]
    assert (len(kept), cut.final.decides) == (4, False)
    assert "isn't over: 2 of 3 rounds so far" in compare(rows, cut.final).sentences()[-1]
    whole = held(1000.0, cut.final)
    assert whole.remark == ""
    assert whole.final is not None
    assert (len(kept), whole.final.spent_s, whole.final.decides) == (6, 60.0, True)
    assert held(1000.0, whole.final) == whole
    assert len(kept) == 6
    assert hold_final(rows[:1], plans, 1, 3, None, measure, keep, lambda final: "", Silent()).remark == (
        "no final: only one plan ran within its limits"
    )
    old = hold_final(rows[:1], plans, 1, 3, whole.final, measure, keep, lambda final: "", Silent())
    assert old.remark.endswith("; the one before was between other plans, so it doesn't count")
    assert "--resume" not in compare(rows[:1], whole.final).sentences()[-1]
    lost = hold_final(rows, plans, 1, 3, cut.final, measure, lambda final: False, lambda final: "", Silent())
    assert lost == Held(cut.final, remark=TAKEN_OVER)  # another search has it: no launch more


def test_a_final_cut_short_wants_the_launches_that_it_lacks_and_one_that_is_over_none(bench: Bench) -> None:
    space = load_space(bench.path / "tiny.yaml")
    plans = [(space.fingerprint(plan), plan) for plan in space.plans()][:3]
    lineup = pick_lineup([_measured(number, *pair, space) for number, pair in enumerate(plans)], 3)

    def after(launches: int, state: str = "ok", most_rounds: int = 3) -> Final:
        final = Final(lineup, 3, most_rounds)
        for _ in range(launches):
            number, plan = final.upcoming() or pytest.fail("the final is over too early")
            step_s = 0.1 + 0.01 * ((number + lineup.plans.index(plan)) % 3) if state == "ok" else None
            final = final.with_launch(FinalLaunch(number, plan, state, "", step_s, "", 1.0))
        return final

    assert [least_launches(after(launches)) for launches in range(10)] == [9, 8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert least_launches(after(1, "oom")) == 6  # what fell out is measured no more
    # More rounds are asked for: of those that are needed one is certain.
    assert final_to_hold(lineup, 3, 8, after(9)).upcoming() is not None
    assert least_launches(final_to_hold(lineup, 3, 8, after(9))) == 1
    # Held anew, and between other plans: all of it, and its time counts on.
    lost = after(3, "oom")
    assert lost.decided_nothing
    assert least_launches(lost) == 0
    assert least_launches(final_to_hold(lineup, 3, 3, lost, again=True)) == 9
    fewer = pick_lineup([_measured(number, *pair, space) for number, pair in enumerate(plans[:2])], 2)
    assert (least_launches(final_to_hold(fewer, 2, 3, lost)), final_to_hold(fewer, 2, 3, lost).spent_s) == (6, 3.0)


def test_a_resumed_search_keeps_the_time_that_the_rest_of_its_final_takes(
    three: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[float] = []
    ended = Budget.ended

    def remember(self: Budget, spent: Spent, final_s: float = 0.0) -> Ended | None:
        kept.append(final_s)
        return ended(self, spent, final_s)

    rates = times(s_1f1b=0.2, interleaved_1f1b=0.18, zb_h1=0.1)
    three.tell_worker({"when": {"schedule": "zb-h1", "launch": 3}, "do": "sleep"}, *rates)
    tuner = three.start("--final", "1")
    wait_until(lambda: len(three.launches()) == 3 + 3 + 1, limit_s=60)
    os.kill(tuner.pid, signal.SIGINT)
    tuner.communicate(timeout=30)
    three.edit_space("micro_batch_size: [2]", "micro_batch_size: [2, 1]")  # there is something to spend time on
    three.tell_worker(*rates)
    monkeypatch.setattr(Budget, "ended", remember)
    each_s = max(float(row["duration_s"]) for row in three.table() if row["state"] == "ok")
    three.here(resume=True, final=1, timeout_s=1e6)
    assert kept[0] == pytest.approx(6 * each_s, rel=0.01)


def _measurement(step_s: float) -> Measurement:
    return Measurement("wall", step_s, step_s, step_s, 0.0, step_s, None, None, None, "", "")


def _measured(trial: int, fingerprint: str, plan: Plan, space: Space) -> Row:
    outcome = TrialOutcome("ok", "", _measurement(0.1 + 0.01 * trial), "2026-01-01T00:00:00+00:00", 1.0)
    return row_of(trial, plan, fingerprint, outcome, space.model, space.training)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--final", "-1"], "--final"),
        (["--final-rounds", "2"], "--final-rounds"),
        (["--final", "2", "--fidelity", "predict"], "--final"),
    ],
)
def test_a_final_that_makes_no_sense_is_refused(bench: Bench, arguments: list[str], said: str) -> None:
    done = bench.search(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
