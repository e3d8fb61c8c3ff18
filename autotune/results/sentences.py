"""What a comparison says in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autotune.results.columns import Row
from autotune.results.text import first_line

if TYPE_CHECKING:
    from autotune.results.compare import Contest

__all__ = ["final_sentence", "interval_text", "search_sentence"]


def search_sentence(best: Row, contest: Contest | None, family: str, predicted: bool, tried: bool = True) -> str:
    """The best plan against a family's, by the numbers of the search itself.

    Args:
        tried: whether the study has plans of the family at all.
    """
    if contest is None:
        return _none_of(family, "fits" if predicted else "ran within its limits", tried)
    if contest.other is best:
        return f"the best plan is itself {_a(family)} plan: {best.describe()}"
    other = f"the {contest.name} ({contest.other.describe()})"
    if contest.low is None or contest.high is None:
        return f"the best plan is {contest.ratio:.3f}x as fast as {other}"
    said = (
        f"the best plan is {contest.ratio:.3f}x (measured steps: {contest.low:.3f}x to {contest.high:.3f}x) "
        f"as fast as {other}"
    )
    if contest.beyond_spread:
        return said
    return f"{said}: the difference is inside the spread, so no gain over {family} is shown"


def final_sentence(
    best: Row, contest: Contest | None, challenger: Contest | None, family: str, tried: bool = True
) -> str:
    """The best plan against a family's, by the final.

    Args:
        challenger: the fastest other plan, for the case that the family's plan is the best.
        tried: whether the study has plans of the family at all.
    """
    if contest is None:
        return _none_of(family, "ran within its limits", tried)
    if contest.other is best:
        said = f"no gain over {family}: the best plan is itself {_a(family)} plan, {best.describe()}"
        return said if challenger is None else f"{said}; {_behind(challenger)}"
    plans = f"{best.describe()} against {contest.other.describe()}, {contest.rounds} rounds of the final"
    if contest.ratio is None or contest.low is None or contest.high is None:
        why = first_line(contest.trouble)
        return f"no ratio over {family}: {contest.other.describe()} fell out of the final ({why})"
    ratio, interval = interval_text(contest.ratio, contest.low, contest.high)
    if contest.beyond_spread:
        return f"{ratio} ({interval}) over {family}: {plans}"
    return f"no significant gain over {family} ({interval.replace(' to ', 'x to ')}x): {plans}"


def interval_text(ratio: float, low: float, high: float) -> tuple[str, str]:
    """`1.23x` and `1.19 to 1.27`, with as many digits as the interval is worth and as tell it from 1."""
    digits = 2
    while digits < 4 and (high - low < 2 * 10**-digits or (low > 1.0 and round(low, digits) <= 1.0)):
        digits += 1
    return f"{ratio:.{digits}f}x", f"{low:.{digits}f} to {high:.{digits}f}"


def _behind(challenger: Contest) -> str:
    if challenger.ratio is None or challenger.low is None or challenger.high is None:
        return "no other plan got through the final"
    # The contest says how much faster the best is; here the other way round.
    ratio, interval = interval_text(1 / challenger.ratio, 1 / challenger.high, 1 / challenger.low)
    return f"the fastest other plan, {challenger.other.describe()}, is {ratio} ({interval}) as fast"


def _none_of(family: str, did: str, tried: bool) -> str:
    return f"no {family} plan of this study {did}" if tried else f"this study has no {family} plan to compare with"


def _a(family: str) -> str:
    return f"{'an' if family.startswith('interleaved') else 'a'} {family}"
