"""How good the schedule engine is: against published generators and against lower bounds, per memory limit and costs.

For every setting of `generator_anchors.csv` and six memory limits this prints the makespan of the best generator row
within the limit, of the engine, their ratio and the gap to the lower bound; then geometric means. Minutes of CPU time.

    python benchmarks/schedule_quality.py [--fast] [--seed 0] [--quick]
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections import defaultdict
from pathlib import Path

from autotune.schedules.engine import FULL, QUICK, best_schedule, uniform_share

ANCHORS = Path(__file__).with_name("generator_anchors.csv")
Setting = tuple[int, int, float, float, float, float]


def read_anchors() -> dict[Setting, list[tuple[float, float, str]]]:
    """(p, m, F, B, W, latency) -> rows of (peak activation, makespan, generator)."""
    anchors: dict[Setting, list[tuple[float, float, str]]] = defaultdict(list)
    with ANCHORS.open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            f, b, w, comm = (float(row[name]) for name in ("forward", "backward", "weight", "comm"))
            setting = (int(row["devices"]), int(row["microbatches"]), f, b, w, comm)
            anchors[setting].append((float(row["peak_activation"]), float(row["makespan"]), row["generator"]))
    return anchors


def limits(p: int) -> dict[str, float]:
    """The memory limits of the comparison, in microbatches."""
    return {"(p+2)/3": (p + 2) / 3, "p/2": p / 2, "p/2+1": p / 2 + 1, "3p/4": 3 * p / 4, "p": p, "2p": 2 * p}


def mean(values: list[float]) -> float:
    """Geometric mean; nan of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true", help="every third setting only")
    parser.add_argument("--quick", action="store_true", help="the engine's quick mode")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    effort = QUICK if options.quick else FULL
    anchors = read_anchors()
    settings = sorted(anchors)[:: 3 if options.fast else 1]
    best_schedule(2, 2, limit=1, effort=effort)  # loads the compiled kernels
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    seconds: list[float] = []
    above = 0
    for p, m, f, b, w, comm in settings:
        costs = f"{f:g}:{b:g}:{w:g} latency {comm:g}"
        for name, limit in limits(p).items():
            rows = [
                (makespan, generator) for peak, makespan, generator in anchors[p, m, f, b, w, comm] if peak <= limit
            ]
            anchor, generator = min(rows, default=(math.nan, "none"))
            began = time.process_time()
            best = best_schedule(p, m, uniform_share(f, b, w, comm), limit, effort=effort, seed=options.seed)
            seconds.append(time.process_time() - began)
            assert max(best.timeline.peak_activation) <= limit + 1e-9
            chosen, ratio = best.chosen, best.makespan / anchor
            worse = ratio > 1 + 1e-9
            above += worse
            gaps[costs, name].append(1 + best.gap)
            if rows:
                ratios[costs, name].append(ratio)
            print(
                f"p {p:2} m {m:3} {costs:24} limit {name:7} generator {anchor:8.2f} {generator:34} "
                f"engine {best.makespan:8.2f} {chosen.placement} x{chosen.stages_per_device} {best.origin:14} "
                f"ratio {ratio:.4f}{' ABOVE' if worse else ''} gap {best.gap:6.2%} cpu {seconds[-1]:.2f} s",
                flush=True,
            )
    print(f"\n{'costs':24} {'limit':8} {'cases':>5} {'ratio':>7} {'smallest':>8} {'largest':>8} {'gap to bound':>12}")
    for costs in sorted({key[0] for key in gaps}):
        for name in limits(4):
            values = ratios[costs, name]
            if gaps[costs, name]:
                low, high = (min(values), max(values)) if values else (math.nan, math.nan)
                gap = mean(gaps[costs, name]) - 1
                print(f"{costs:24} {name:8} {len(values):5} {mean(values):7.4f} {low:8.4f} {high:8.4f} {gap:12.2%}")
        everything = [value for key, values in ratios.items() if key[0] == costs for value in values]
        print(f"{costs:24} {'all':8} {len(everything):5} {mean(everything):7.4f}")
    print(f"\nabove the best generator: {above}")
    print(f"CPU seconds a call: mean {sum(seconds) / len(seconds):.2f}, most {max(seconds):.2f}")


if __name__ == "__main__":
    main()
