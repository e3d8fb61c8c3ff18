"""How fast plans are predicted: 10,000 plans of a 512-GPU space, CPU seconds and memory, and how they grow.

python benchmarks/prediction_speed.py [--plans 10000] [--limit-s 20]
"""

from __future__ import annotations

import argparse
import itertools
import random
import resource
import sys
import time
from collections.abc import Iterator

from autotune.cost.devices import machine
from autotune.cost.predict import Predictor
from autotune.schedules import registry
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, spread_layers
from autotune.space.training import TrainingSpec

MODEL = ModelSpec(80, 8192, 64, 8, 128, 28672, 128256, 4096, name="70b")
CLUSTER = ClusterSpec(64, 8, "h100", 76 * 1024**3, Link(3e-6, 450e9), Link(5e-6, 50e9))
TRAINING = TrainingSpec(global_batch_size=3072, dtype="bfloat16")


def plans() -> Iterator[Plan]:
    """Legal plans of the space: every divisor, all schedules, one to eight stages a device."""
    sizes = itertools.product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8), (1, 2, 3, 4, 6, 8, 12, 16), ("none", "full"))
    for pp, tp, samples, recompute in sizes:
        dp, rest = divmod(CLUSTER.devices, pp * tp)
        m, left = divmod(TRAINING.global_batch_size, dp * samples)
        if rest or left or not dp or not m:
            continue
        for kind, v in itertools.product(registry.SCHEDULES.values(), range(1, 9)):
            legal = not kind.stages_problem(v) and not kind.microbatches_problem(pp, m) and pp * v <= MODEL.layers
            if legal and (pp > 1 or kind.name == "1f1b"):
                split = spread_layers(MODEL.layers, pp * v)
                yield Plan(pp, tp, dp, samples, m, kind.name, v, split, recompute)  # type: ignore[arg-type]


def main() -> int:
    """Prints the figures; exit code 1 above the limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=10_000)
    parser.add_argument("--limit-s", type=float, default=20.0)
    arguments = parser.parse_args()
    every = list(plans())
    step = max(1, len(every) // arguments.plans)
    chosen = every[::step][: arguments.plans]
    random.Random(0).shuffle(chosen)  # a search meets large and small pipelines in any order
    predictor = Predictor(MODEL, CLUSTER, TRAINING, machine_figures=machine("h100"))
    begun = last = time.process_time()
    for number, plan in enumerate(chosen, 1):
        predictor.predict(plan)
        if number % max(1, len(chosen) // 5) == 0:
            now = time.process_time()
            print(f"{number:>6} plans  {now - begun:6.2f} CPU s, the last fifth {now - last:5.2f}")
            last = now
    spent = time.process_time() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    print(
        f"{len(chosen)} of {len(every)} plans in {spent:.2f} CPU s ({1e3 * spent / len(chosen):.2f} ms each), "
        f"peak memory {peak:.2f} GiB, torch imported: {'torch' in sys.modules}"
    )
    return int(spent > arguments.limit_s or peak > 1)


if __name__ == "__main__":
    raise SystemExit(main())
