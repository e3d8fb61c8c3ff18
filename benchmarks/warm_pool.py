"""Time and peak memory of short trials on warm ranks beside the same trials on ranks of their own.

    OMP_NUM_THREADS=1 python benchmarks/warm_pool.py               # 30 plans on 4 CPU ranks
    OMP_NUM_THREADS=1 python benchmarks/warm_pool.py --json --out f.json

Every plan runs twice by the built-in worker, first on the warm ranks (`--isolation pool`), then on new ones
(`--isolation trial`), plan after plan, so that both share whatever else the machine does. Prints the time of both,
their ratio, and the largest difference between the peak memories of any plan (of its heaviest rank, as everywhere). The
exit code is 1 if warm ranks take half the time or more, a plan's peak differs by more than 1 %, or a trial is not `ok`.

The largest difference of a single rank is printed beside it and not judged: a lighter rank's peak varies by a message
or two from launch to launch, also between fresh launches, with the moment at which a message arrives.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.report.numbers import bytes_text, duration_text
from autotune.results.measurement import TrialOutcome
from autotune.search.evaluators import PlanRunner
from autotune.search.options import SearchOptions
from autotune.space.plan import Plan
from autotune.space.space import Space, load_space

MOST_TIME = 0.5
MOST_DIFFERENCE = 0.01

SPACE = """
name: warm-pool
model: {layers: 8, hidden: 64, heads: 4, kv_heads: 2, ffn_hidden: 176, vocab: 256, sequence_length: 32}
cluster: {nodes: 1, devices_per_node: 4, device: cpu}
training: {global_batch_size: 16}
search:
  pp: [1, 2, 4]
  tp: [1, 2]
  micro_batch_size: [1, 2]
  schedule: [1f1b, interleaved-1f1b, zb-h1, zb-v, v-half, v-min]
trial: {warmup_steps: 1, measured_steps: 3}
"""


@dataclass(frozen=True)
class Pair:
    """One plan both ways.

    Attributes:
        states: how the trials ended, warm first.
        warm_s, alone_s: wall time of the whole trials.
        warm_peak_bytes, alone_peak_bytes: of every rank.
    """

    plan: str
    states: tuple[str, str]
    warm_s: float
    alone_s: float
    warm_peak_bytes: tuple[int, ...]
    alone_peak_bytes: tuple[int, ...]

    @property
    def difference(self) -> float:
        """Of the plan's peaks, relative to that alone."""
        if not self.warm_peak_bytes or not self.alone_peak_bytes:
            return 0.0
        return abs(max(self.warm_peak_bytes) / max(self.alone_peak_bytes) - 1.0)

    @property
    def rank_difference(self) -> float:
        """Largest of any rank's peaks, relative to its peak alone."""
        both = zip(self.warm_peak_bytes, self.alone_peak_bytes, strict=False)
        return max((abs(warm / alone - 1.0) for warm, alone in both), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether both ran and measured their memory."""
        return self.states == ("ok", "ok") and bool(self.warm_peak_bytes and self.alone_peak_bytes)


def main() -> None:
    """Parse the command line, measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30, help="plans, taken evenly from all legal ones of the space")
    parser.add_argument("--space", type=Path, help="space file; default: a tiny model on 4 CPU ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        pairs = measure(_space(options.space, Path(folder)), options.trials, Path(folder))
    found = summarise(pairs)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1) if options.json else table(pairs, found))
    sys.exit(0 if found["held"] else 1)


def measure(space: Space, trials: int, folder: Path) -> list[Pair]:
    """Both trials of each plan."""
    plans = list(space.plans())
    chosen = [plans[index * len(plans) // trials] for index in range(min(trials, len(plans)))]
    if len(chosen) < trials:
        sys.exit(f"the space has {len(plans)} legal plans, fewer than --trials {trials}")
    warm = PlanRunner(space, SearchOptions(folder, isolation="pool"), folder / "warm" / "logs", "warm-pool")
    alone = PlanRunner(space, SearchOptions(folder, isolation="trial"), folder / "alone" / "logs", "warm-pool")
    try:
        pairs = []
        for number, plan in enumerate(chosen):
            pairs.append(_pair(plan, _run(warm, number, plan), _run(alone, number, plan)))
            print(f"{number + 1}/{len(chosen)} {_line(pairs[-1])}", file=sys.stderr)
        return pairs
    finally:
        warm.close()
        alone.close()


def summarise(pairs: list[Pair]) -> dict[str, object]:
    """What the trials say in all."""
    warm_s, alone_s = sum(pair.warm_s for pair in pairs), sum(pair.alone_s for pair in pairs)
    difference = max(pair.difference for pair in pairs)
    failed = [pair.plan for pair in pairs if not pair.ok]
    return {
        "trials": len(pairs),
        "warm_s": warm_s,
        "alone_s": alone_s,
        "ratio": warm_s / alone_s,
        "largest_peak_difference": difference,
        "largest_rank_difference": max(pair.rank_difference for pair in pairs),
        "failed": failed,
        "held": warm_s / alone_s < MOST_TIME and difference <= MOST_DIFFERENCE and not failed,
        "pairs": [asdict(pair) | {"difference": pair.difference} for pair in pairs],
    }


def table(pairs: list[Pair], found: dict[str, object]) -> str:
    """One line a plan, then what they say in all."""
    worst = max(pairs, key=lambda pair: pair.difference)
    lines = [_line(pair) for pair in pairs]
    lines += [f"failed: {plan}" for plan in found["failed"]]  # type: ignore[attr-defined]
    lines += [
        f"{len(pairs)} trials: {duration_text(sum(pair.warm_s for pair in pairs))} on warm ranks, "
        f"{duration_text(sum(pair.alone_s for pair in pairs))} on ranks of their own: {found['ratio']:.3f} of the time "
        f"(target: below {MOST_TIME})",
        f"largest difference of a plan's peak memory: {worst.difference:.3%}, of {worst.plan} "
        f"(target: at most {MOST_DIFFERENCE:.0%}); of a single rank's: {found['largest_rank_difference']:.3%}",
        "held" if found["held"] else "MISSED",
    ]
    return "\n".join(lines)


def _space(path: Path | None, folder: Path) -> Space:
    if path is None:
        path = folder / "space.yaml"
        path.write_text(SPACE, encoding="utf-8")
    return load_space(path)


def _run(runner: PlanRunner, number: int, plan: Plan) -> TrialOutcome:
    outcome = runner.evaluate(number, plan, lambda: False)
    assert outcome is not None
    if outcome.state != "ok":
        print(f"{plan.describe()}: {outcome.state}: {outcome.reason}", file=sys.stderr)
    return outcome


def _pair(plan: Plan, warm: TrialOutcome, alone: TrialOutcome) -> Pair:
    return Pair(
        plan.describe(), (warm.state, alone.state), warm.duration_s, alone.duration_s, _peaks(warm), _peaks(alone)
    )


def _peaks(outcome: TrialOutcome) -> tuple[int, ...]:
    measured = outcome.measurement
    return () if measured is None else measured.peak_memory_bytes_per_rank or ()


def _line(pair: Pair) -> str:
    peak = bytes_text(max(pair.alone_peak_bytes)) if pair.ok else "/".join(pair.states)
    return f"{pair.plan:45} {pair.warm_s:7.2f} s {pair.alone_s:7.2f} s   {peak} {pair.difference:+.3%}"


if __name__ == "__main__":
    main()
