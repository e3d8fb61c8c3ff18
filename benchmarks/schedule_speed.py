"""How fast schedules are built, searched and simulated on this machine, in CPU seconds after compilation.

python benchmarks/schedule_speed.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from autotune.schedules import kernel
from autotune.schedules.engine import FULL, QUICK, best_schedule, uniform_share
from autotune.schedules.registry import SCHEDULES, build


def cpu(run: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def named() -> None:
    """Build time of every named schedule."""
    for name, kind in SCHEDULES.items():
        stages = kind.default_stages_per_device()
        print(f"build {name:18} p 32 m 256 v {stages}: {cpu(lambda n=name, v=stages: build(n, 32, 256, v)):.3f} s")


def searches() -> None:
    """Time of the engine, for three costs and three limits."""
    for effort, name, p, m in (
        (QUICK, "quick", 8, 64),
        (FULL, "best", 8, 64),
        (FULL, "best", 16, 64),
        (FULL, "best", 32, 256),
    ):
        times = [
            cpu(lambda c=costs, k=limit: best_schedule(p, m, uniform_share(*c), k, effort=effort))  # noqa: B023
            for costs in ((1, 1, 1, 0), (1, 1.2, 0.7, 0.05), (1, 1.5, 0.6, 0.2))
            for limit in (p / 2, p / 2 + 1, 0.75 * p, p, 2 * p)
        ]
        print(f"{name:6} p {p} m {m}: mean {sum(times) / len(times):.3f} s, most {max(times):.3f} s")


def simulation() -> None:
    """Passes a second of the compiled simulation kernel, on complete orders."""
    schedule = build("v-half", 16, 128)
    order, first = kernel.encode(schedule)
    tables = kernel.cost_tables(schedule.placement, uniform_share(1, 1.5, 0.6, 0.2)(schedule.placement)[0].costs)
    run = kernel.compiled().run
    ints = {"order": order, "first": first, "every": tables.every}
    floats = {"duration": tables.duration, "hop": tables.hop}
    fixed = {name: np.array(values, np.int64) for name, values in ints.items()}
    fixed |= {name: np.array(values, np.float64) for name, values in floats.items()}

    def once() -> None:
        work = kernel.scratch(schedule.devices, schedule.stages, schedule.microbatches, len(order))
        arrays = {
            name: np.array(values, np.float64 if name in ("finished", "start", "end") else np.int64)
            for name, values in work.items()
        }
        nonlocal seconds
        began = time.process_time()
        run(stages=schedule.stages, microbatches=schedule.microbatches, **fixed, **arrays)
        seconds += time.process_time() - began

    seconds = 0.0
    once()
    seconds, runs = 0.0, 50
    for _ in range(runs):
        once()
    print(f"simulation: {runs * len(order) / seconds / 1e6:.1f} million passes a second ({len(order)} passes)")


def main() -> None:
    # Compiled or read from the disk's cache once a process: annealing and all.
    best_schedule(4, 8, uniform_share(1, 1.5, 0.6, 0.2), 2, effort=QUICK)
    simulation()
    named()
    searches()


if __name__ == "__main__":
    main()
