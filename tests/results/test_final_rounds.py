"""A final decides by its own numbers: who wins, when it ends, and what an interrupted one has still to do."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.results.columns import Row
from autotune.results.compare import compare
from autotune.results.final import LEAST_ROUNDS, Final, FinalLaunch, Lineup, pick_lineup, read_final

Times = Callable[[int, str], float]


def launch(number: int, plan: str, step_s: float | None, state: str = "ok", reason: str = "") -> FinalLaunch:
    return FinalLaunch(number, plan, state, reason, step_s, "2026-01-01T00:00:00+00:00", 10.0)


def play(plans: str, times: Times, baseline: str | None = "B", interleaved: str | None = None, most: int = 8) -> Final:
    """A whole final between plans of one letter each."""
    final = Final(Lineup(tuple(plans), baseline, interleaved), 3, most)
    while (upcoming := final.upcoming()) is not None:
        final = final.with_launch(launch(*upcoming, times(*upcoming)))
    return final


def noisy(seed: int, noise: float, **step_s: float) -> Times:
    """Times of launches around a plan's own, on a machine that slows down by a tenth a round."""
    generator = random.Random(seed)
    return lambda number, plan: step_s[plan] * (1 + 0.1 * number) * math.exp(generator.gauss(0.0, noise))


def order(final: Final) -> str:
    return "".join(one.fingerprint for one in final.launches)


def test_plans_are_measured_in_turns() -> None:
    final = play("ABC", noisy(0, 0.001, A=1.0, B=1.5, C=1.2))
    assert order(final) == "ABC" * LEAST_ROUNDS


def test_real_gain_is_called_one_and_its_interval_covers_the_truth() -> None:
    finals = [play("AB", noisy(seed, 0.01, A=1.0, B=1.23)) for seed in range(300)]
    found = [final.ratio("A", "B") for final in finals]
    assert all(one is not None and one.faster for one in found)
    covered = sum(one is not None and one.low <= 1.23 <= one.high for one in found) / len(found)
    assert 0.93 <= covered <= 1.0
    assert sum(final.rounds for final in finals) / len(finals) < 3.5


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.04])
def test_equal_plans_are_seldom_called_a_gain(noise: float) -> None:
    found = [play("AB", noisy(seed, noise, A=1.0, B=1.0)).ratio("A", "B") for seed in range(400)]
    assert sum(one is not None and one.faster for one in found) / len(found) < 0.05
    assert all(one is not None for one in found)


def test_of_five_equal_plans_the_best_is_seldom_called_a_gain() -> None:
    gains = 0
    for seed in range(200):
        final = play("ABCDE", noisy(seed, 0.01, A=1.0, B=1.0, C=1.0, D=1.0, E=1.0), interleaved="E")
        assert final.best is not None
        found = final.ratio(final.best, "B")
        gains += final.best != "B" and found is not None and found.faster
    assert gains / 200 < 0.07


def test_luck_of_the_search_is_found_out() -> None:
    """The search's first was lucky; a later one is truly the fastest."""
    final = play("ABC", noisy(1, 0.002, A=1.2, B=1.1, C=1.0), baseline="B")
    assert final.best == "C"


def test_plans_that_are_equal_within_the_noise_keep_the_search_s_order() -> None:
    final = play("ABC", noisy(5, 0.01, A=1.0, B=1.3, C=0.999), baseline="B")
    assert final.best == "A"


def test_noise_asks_for_more_rounds_up_to_the_most_and_without_those_that_are_decided() -> None:
    final = play("ABC", noisy(3, 0.03, A=1.0, B=1.005, C=2.0))
    assert final.rounds == 8
    assert order(final) == "ABC" * LEAST_ROUNDS + "AB" * 5
    assert play("AB", noisy(3, 0.03, A=1.0, B=1.0), most=4).rounds == 4


def test_a_final_cut_short_anywhere_goes_on_as_if_nothing_had_been() -> None:
    whole = play("ABC", noisy(3, 0.03, A=1.0, B=1.005, C=2.0))
    for cut in range(len(whole.launches)):
        part = Final(whole.lineup, 3, 8, whole.launches[:cut])
        again = Final.from_dict(json.loads(json.dumps(part.to_dict())))
        assert again == part
        assert again.upcoming() == (whole.launches[cut].round, whole.launches[cut].fingerprint)
        assert again.decides == (again.rounds >= LEAST_ROUNDS)
    assert whole.upcoming() is None


def test_plan_that_fails_falls_out_with_its_reason() -> None:
    final = Final(Lineup(("A", "B", "C"), "B", None), 3, 8)
    while (upcoming := final.upcoming()) is not None:
        bad = upcoming == (2, "A")
        times = {"A": 0.5, "B": 1.5, "C": 1.0}
        made = launch(*upcoming, None, "oom", "rank 0 ran out") if bad else launch(*upcoming, times[upcoming[1]])
        final = final.with_launch(made)
    assert order(final) == "ABCABCBC"
    assert final.lost == {"A": "oom: rank 0 ran out"}
    assert final.best == "C"


def test_launches_that_failed_by_no_fault_of_the_plan_leave_holes() -> None:
    final = Final(Lineup(("A", "B"), "B", None), 3, 8)
    while (upcoming := final.upcoming()) is not None:
        bad = upcoming == (2, "A")
        made = launch(*upcoming, None, "launcher", "port") if bad else launch(*upcoming, 1.0 + (upcoming[1] == "B"))
        final = final.with_launch(made)
    assert not final.lost
    found = final.ratio("A", "B")
    assert found is not None
    assert (found.ratio, found.rounds) == (pytest.approx(2.0), 2)
    never = Final(Lineup(("A", "B"), "B", None), 3, 8)
    while (upcoming := never.upcoming()) is not None:
        bad = upcoming[1] == "A"
        never = never.with_launch(launch(*upcoming, None, "launcher", "port") if bad else launch(*upcoming, 1.0))
    assert never.lost == {"A": "launcher: port"}
    assert never.best == "B"


def test_final_of_which_every_plan_failed_decides_nothing() -> None:
    final = Final(Lineup(("A", "B"), "B", None), 3, 8)
    while (upcoming := final.upcoming()) is not None:
        final = final.with_launch(launch(*upcoming, None, "hang", "silence"))
    assert order(final) == "AB"
    assert not final.decides


def row(fingerprint: str, schedule: str, step_s: float, state: str = "ok") -> Row:
    return Row(
        state=state, fidelity="run", schedule=schedule, fingerprint=fingerprint, step_time_s=step_s,
        tokens_per_s=1000.0 / step_s,
    )  # fmt: skip


ROWS = [
    row("a", "zb-v", 1.0), row("b", "1f1b", 1.3), row("c", "zb-v", 1.1), row("d", "zb-h1", 1.2),
    row("e", "zb-h2", 1.25),
    row("f", "interleaved-1f1b", 1.4), row("g", "1f1b", 1.5), row("h", "zb-v", 0.1, "oom"),
]  # fmt: skip


def test_the_fastest_and_both_baselines_take_part_each_once() -> None:
    assert pick_lineup(ROWS, 3) == Lineup(("a", "c", "d", "b", "f"), "b", "f")
    assert pick_lineup(ROWS, 1) == Lineup(("a", "b", "f"), "b", "f")
    assert pick_lineup(ROWS, 10).plans == ("a", "c", "d", "e", "b", "f", "g")
    assert pick_lineup([ROWS[0], ROWS[7]], 3) == Lineup(("a",), None, None)
    # The fastest is the baseline, and no interleaved plan ran: then the runner-up is its opponent.
    assert pick_lineup([ROWS[1], ROWS[4], ROWS[6]], 1) == Lineup(("e", "b"), "b", None)
    assert pick_lineup([row("b", "1f1b", 1.0), ROWS[3], ROWS[2]], 1) == Lineup(("b", "c"), "b", None)


def final_of(rows: list[Row], top: int = 3, **step_s: float) -> Final:
    final = Final(pick_lineup(rows, top), top, 8)
    times = noisy(0, 0.004, **step_s)
    while (upcoming := final.upcoming()) is not None:
        final = final.with_launch(launch(*upcoming, times(*upcoming)))
    return final


def test_comparison_tells_the_final_s_numbers_not_the_search_s_luck() -> None:
    found = compare(ROWS, final_of(ROWS, a=1.15, c=1.05, d=1.2, b=1.29, f=1.051))
    assert found.best is not None
    assert found.best.fingerprint == "c"
    over, beside = found.sentences()
    assert over.startswith("1.2")
    assert "over 1F1B: pp- tp- dp- mbs- m- zb-v against pp- tp- dp- mbs- m- 1f1b, 3 rounds of the final" in over
    assert beside.startswith("no significant gain over interleaved 1F1B (")
    assert found.baseline is not None
    assert found.baseline.low is not None
    assert found.baseline.high is not None
    assert found.baseline.low <= 1.29 / 1.05 <= found.baseline.high
    told: Any = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(told["final"]["launches"]) >= 15
    assert told["final"]["confidence"] == 0.95


def test_comparison_says_by_how_much_1f1b_leads() -> None:
    found = compare(ROWS, final_of(ROWS, a=1.4, c=1.5, d=1.6, b=1.0, f=1.7))
    assert found.sentences()[0].startswith("no gain over 1F1B: the best plan is itself a 1F1B plan, pp-")
    assert "is 0.71x (0.7" in found.sentences()[0]


def test_final_between_other_plans_than_now_lead_does_not_count() -> None:
    final = final_of(ROWS, a=1.15, c=1.05, d=1.2, b=1.29, f=1.051)
    found = compare([*ROWS, row("n", "zb-v", 0.9)], final)
    assert found.final is None
    assert found.best is not None
    assert found.best.fingerprint == "n"
    assert "measured steps" in found.sentences()[0]
    assert "between other plans" in found.sentences()[-1]
    cut = Final(final.lineup, 3, 8, final.launches[:7])
    assert "isn't over: 1 of 3 to 8 rounds so far, so it doesn't count yet" in compare(ROWS, cut).sentences()[-1]


def test_final_that_decides_already_but_is_not_over_says_so() -> None:
    noise = {"a": 1.0, "c": 1.002, "d": 1.2, "b": 1.003, "f": 1.3}
    final = Final(pick_lineup(ROWS, 3), 3, 8)
    times = noisy(3, 0.03, **noise)
    while final.rounds < LEAST_ROUNDS and (upcoming := final.upcoming()) is not None:
        final = final.with_launch(launch(*upcoming, times(*upcoming)))
    assert final.upcoming() is not None
    found = compare(ROWS, final)
    assert found.final is final
    assert found.sentences()[-1].startswith("the final isn't over: 3 of 3 to 8 rounds so far; ")
    over = compare(ROWS, final_of(ROWS, **noise))
    assert not any("isn't over" in said for said in over.sentences())


def test_no_other_final_is_promised_where_none_can_be_held() -> None:
    """As after a smaller memory limit: of the plans of the final one alone is left."""
    found = compare(ROWS[:1], final_of(ROWS, a=1.15, c=1.05, d=1.2, b=1.29, f=1.051))
    assert "there is none to hold now, only one plan ran within its limits" in found.sentences()[-1]
    assert "--resume" not in found.sentences()[-1]


def test_final_without_a_survivor_says_why_in_one_line_and_how_to_repeat_it() -> None:
    final = Final(pick_lineup(ROWS, 3), 3, 8)
    while (upcoming := final.upcoming()) is not None:
        failed = "failed" if upcoming[1] != "b" else "killed"
        final = final.with_launch(launch(*upcoming, None, failed, "rank 1 failed first: boom\nTraceback\n  more"))
    said = compare(ROWS, final).sentences()[-1]
    assert said == (
        "the final decided nothing, no plan got through it (4 plans failed: rank 1 failed first: boom; "
        "1 plan killed: rank 1 failed first: boom); --resume holds it again"
    )


def test_traceback_of_a_baseline_that_fell_out_is_told_by_its_first_line() -> None:
    final = Final(pick_lineup(ROWS, 1), 1, 8)
    while (upcoming := final.upcoming()) is not None:
        state, step_s = ("failed", None) if upcoming[1] == "b" else ("ok", 1.0)
        final = final.with_launch(launch(*upcoming, step_s, state, "" if step_s else "boom\nTraceback\n  more"))
    said = compare(ROWS, final).sentences()[0]
    assert said.startswith("no ratio over 1F1B: ")
    assert said.endswith("fell out of the final (failed: boom)")


def test_file_of_a_final_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = tmp_path / "final.json"
    assert read_final(path) is None
    final = final_of(ROWS, a=1.15, c=1.05, d=1.2, b=1.29, f=1.051)
    path.write_text(json.dumps(final.to_dict()))
    assert read_final(path) == final
    for text in ("{", "[]", '{"version": 9}', json.dumps(final.to_dict() | {"launches": [{"round": 1}]})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"final\.json is damaged"):
            read_final(path)
    for text, why in (
        ("[]", "it must be an object"),
        ("{}", "it lacks version, top, most_rounds, plans"),
        ('{"version": 9}', "its version is 9, not 1"),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=f": {why}"):
            read_final(path)
