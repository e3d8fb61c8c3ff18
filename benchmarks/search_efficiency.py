"""How many trials samplers need to come near the best plan, replayed on recorded landscapes (benchmarks/landscapes/).

    python benchmarks/search_efficiency.py                          # auto, tpe and random on every landscape, 20 seeds
    python benchmarks/search_efficiency.py cpu-small --samplers auto gp --seeds 5

A replay is a study whose trials are looked up: both baselines first, then what the sampler proposes. Each seed draws
every measurement anew, around its recorded median with the standard error that the spread of its steps gives, and
seeds the sampler. What a study has found so far is the plan that it measured as the fastest; it is judged by that
plan's recorded throughput, as a share of the highest of all.

Exit code 1 if `auto` is not within 1 % of the best plan after a tenth of the plans, by the median over the seeds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parent))

import optuna
from landscape import LANDSCAPES, Landscape, load_landscape

from autotune.search.samplers import SAMPLERS, Observation, SamplerName, baselines, make_proposer

SHARE_OF_PLANS = 0.1
WITHIN = 0.01
_MARKS = (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 80)


@dataclass(frozen=True)
class Replay:
    """One study.

    Attributes:
        found: after each trial, the share of the best plan's throughput that the best plan found so far has.
        why: why the sampler stopped; empty if the trials ended first.
    """

    found: tuple[float, ...]
    why: str

    def after(self, trials: int) -> float:
        """What was found after so many trials; a study that stopped before keeps what it has."""
        return self.found[min(trials, len(self.found)) - 1]


def replay(landscape: Landscape, sampler: SamplerName, seed: int, trials: int) -> Replay:
    """A study of at most `trials` trials."""
    noise = random.Random(f"{landscape.name}/{seed}")
    deviates = {plan: noise.gauss(0.0, 1.0) for plan in landscape.plans}
    proposer = make_proposer(sampler, landscape.plans, seed, landscape.predicted, landscape.limit_bytes)
    first = baselines(landscape.plans, landscape.predicted, landscape.limit_bytes)
    left = dict.fromkeys(landscape.plans)
    known: list[Observation] = []
    found: list[float] = []
    best_value, best_share = 0.0, 0.0
    while left and len(known) < trials:
        plan = first.pop(0) if first else proposer.propose(list(left), known)
        if plan is None:
            break
        del left[plan]
        recorded = landscape.recorded[plan]
        known.append(observed := recorded.observe(deviates[plan], landscape.limit_bytes))
        if (observed.value or 0.0) > best_value:
            best_value = observed.value or 0.0
            best_share = (recorded.tokens_per_s or 0.0) / (landscape.best.tokens_per_s or 1.0)
        found.append(best_share)
    return Replay(tuple(found), proposer.why_stopped)


def curve(replays: Sequence[Replay], marks: Sequence[int]) -> list[float]:
    """Median over the seeds of what is found after each number of trials."""
    return [statistics.median(one.after(mark) for one in replays) for mark in marks]


def study_landscape(landscape: Landscape, samplers: Sequence[SamplerName], seeds: int) -> bool:
    """Print the curves of one landscape; whether `auto`, if among them, meets the target."""
    plans, best = len(landscape.plans), landscape.best
    budget = int(SHARE_OF_PLANS * plans)
    feasible = sum(one.tokens_per_s is not None for one in landscape.recorded.values())
    close = sum(
        (one.tokens_per_s or 0.0) >= (1 - WITHIN) * (best.tokens_per_s or 0.0) for one in landscape.recorded.values()
    )
    print(f"{landscape.name}: {plans} plans, {feasible} within their limits, {close} within {WITHIN:.0%} of the best")
    print(f"  best: {best.plan.describe()}: {best.tokens_per_s:,.0f} tokens/s; by prediction {_rank(landscape)}")
    marks = [mark for mark in _MARKS if mark <= 2 * budget]
    marks = sorted({*marks, budget})
    print("  best plan found so far, median of the seeds (share of the best)")
    print("  " + "trials".ljust(10) + "".join(f"{mark:8d}" for mark in marks))
    good = True
    for sampler in samplers:
        replays = [replay(landscape, sampler, seed, marks[-1]) for seed in range(seeds)]
        print("  " + sampler.ljust(10) + "".join(f"{share:8.1%}" for share in curve(replays, marks)))
        if sampler == "auto":
            good = _judge(landscape, budget, seeds)
    return good


def _judge(landscape: Landscape, budget: int, seeds: int) -> bool:
    """Print whether auto meets the target, and when it stops by itself."""
    whole = [replay(landscape, "auto", seed, len(landscape.plans)) for seed in range(seeds)]
    at_budget = [one.after(budget) for one in whole]
    met = statistics.median(at_budget) >= 1 - WITHIN
    reached = sum(share >= 1 - WITHIN for share in at_budget)
    print(
        f"  auto after {budget} trials ({SHARE_OF_PLANS:.0%} of the plans): median {statistics.median(at_budget):.2%}, "
        f"worst {min(at_budget):.2%}, {reached} of {seeds} seeds within {WITHIN:.0%}{'' if met else ' MISSED'}"
    )
    stops, ends = [len(one.found) for one in whole], [one.found[-1] for one in whole]
    print(
        f"  auto stops by itself after {statistics.median(stops):.0f} trials ({min(stops)} to {max(stops)}), then at "
        f"{statistics.median(ends):.2%} (worst {min(ends):.2%})"
    )
    print(f"  seed 0: {whole[0].why}")
    return met


def _rank(landscape: Landscape) -> str:
    """Where the cost model puts the best plan."""
    feasible = [one.plan for one in landscape.recorded.values() if one.tokens_per_s is not None]
    order = sorted(feasible, key=lambda plan: landscape.predicted[plan].step_time_s)
    return f"number {order.index(landscape.best.plan) + 1} of them"


def main() -> None:
    """Replay and print; exit code 1 if the target is missed."""
    names = sorted(path.parent.name for path in LANDSCAPES.glob("*/trials.csv"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("landscapes", nargs="*", metavar="LANDSCAPE", help=f"default: all, {', '.join(names)}")
    parser.add_argument("--samplers", nargs="+", default=["auto", "tpe", "random"], choices=SAMPLERS)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    if unknown := set(options.landscapes) - set(names):
        parser.error(f"no landscape {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    met = True
    for name in options.landscapes or names:
        samplers = cast(list[SamplerName], options.samplers)
        met &= study_landscape(load_landscape(LANDSCAPES / name), samplers, options.seeds)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
