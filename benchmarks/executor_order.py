"""Does the executor finish passes when the simulation says? Stages that sleep, real ranks, real messages.

Every pass sleeps for its given time instead of computing, so no core has to be free; the shortest of three runs counts.
Printed for every named schedule and for some that the engine finds: the makespan of the run over the simulated one, and
the largest difference of a pass's end from its simulated end, as a share of the makespan. Run on a machine with little
else to do:

    python benchmarks/executor_order.py [--devices 4] [--microbatches 8]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FORWARD_S, BACKWARD_S, WEIGHT_S = 0.060, 0.072, 0.048  # of a device's whole share of the model
LIMIT = 0.08
RUNS = 3  # other load can only make a run longer, so the shortest counts


def schedules(devices: int, microbatches: int) -> list[Any]:
    """Every named schedule these numbers allow, and the engine's for three memory limits."""
    from autotune.schedules.engine import QUICK, best_schedule, uniform_share
    from autotune.schedules.registry import SCHEDULES, build

    found = []
    for name, kind in SCHEDULES.items():
        if kind.microbatches_problem(devices, microbatches) is None:
            found.append(build(name, devices, microbatches))
    costs = uniform_share(FORWARD_S, BACKWARD_S, WEIGHT_S, 0.0)
    for limit in (devices / 2, 0.75 * devices, float(devices)):
        best = best_schedule(devices, microbatches, costs, limit, effort=QUICK)
        found.append(best.timeline.schedule)
    return found


def run_rank(folder: Path) -> None:
    """One rank: execute every schedule of `folder` with sleeping stages and write when each pass ended."""
    import torch
    import torch.distributed as dist

    from autotune.profiling.data import Batch
    from autotune.profiling.device import CpuDevice
    from autotune.profiling.executor import Executor
    from autotune.schedules.schedule import Pass, Schedule

    class Tasks:
        def __init__(self) -> None:
            self.seconds = 0.0

        def run(self) -> None:
            time.sleep(self.seconds)

    class Store:
        """Stands in for the weight-gradient store: W is put off inside `deferred`, else done at once."""

        open: Tasks | None = None

        @contextmanager
        def deferred(self) -> Iterator[Tasks]:
            self.open = tasks = Tasks()
            try:
                yield tasks
            finally:
                self.open = None

        def take(self, seconds: float) -> None:
            if self.open is None:
                time.sleep(seconds)
            else:
                self.open.seconds += seconds

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, store: Store, share: float) -> torch.Tensor:
            ctx.store, ctx.share = store, share
            time.sleep(FORWARD_S * share)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
            time.sleep(BACKWARD_S * ctx.share)
            ctx.store.take(WEIGHT_S * ctx.share)
            return grads[0].clone(), None, None

    class Stages:
        def __init__(self, schedule: Schedule, store: Store) -> None:
            self.share, self.last, self.store = 1 / schedule.stages_per_device, schedule.stages - 1, store

        def forward(self, stage: int, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
            if stage == 0:
                x = torch.zeros(1, 8, 16, requires_grad=True)
            y = Sleep.apply(x, self.store, self.share)
            return y.sum() if stage == self.last else y

    dist.init_process_group("gloo")
    rank, device = dist.get_rank(), CpuDevice()
    for number, values in enumerate(json.loads((folder / "schedules.json").read_text())):
        schedule, store = Schedule.from_dict(values), Store()
        ends: list[tuple[Pass, float]] = []
        running: list[Pass] = []

        def around(item: Pass | None, ends: list[tuple[Pass, float]] = ends, running: list[Pass] = running) -> None:
            if item is None:
                ends.append((running.pop(), time.monotonic()))
            else:
                running.append(item)

        stages: Any = Stages(schedule, store)
        executor = Executor(
            stages, store, schedule, rank, dist.group.WORLD, device, (1, 8, 16), torch.float32, around_pass=around
        )
        batch = Batch(0, 0, 0, 1, 8, 32, device.torch_device)
        runs = []
        for _ in range(1 + RUNS):  # the first run opens the connections
            ends.clear()
            dist.barrier()
            begun = time.monotonic()
            executor.run(batch)
            runs.append([[list(item), end - begun] for item, end in ends])
        (folder / f"ends-{number}-{rank}.json").write_text(json.dumps(runs[1:]))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        run_rank(options.rank_of)
        return 0
    from autotune.schedules.costs import PassCosts
    from autotune.schedules.schedule import Pass
    from autotune.schedules.simulate import simulate

    wanted = schedules(options.devices, options.microbatches)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "schedules.json").write_text(json.dumps([schedule.to_dict() for schedule in wanted]))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.devices)]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
        subprocess.run([*launcher, __file__, "--rank-of", name], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        print(f"{'schedule':22} {'v':>2} {'simulated s':>12} {'run / simulated':>16} {'largest end difference':>23}")
        worst = 0.0
        for number, schedule in enumerate(wanted):
            costs = PassCosts.uniform(schedule.placement, FORWARD_S, BACKWARD_S, WEIGHT_S, 0.0)
            timeline = simulate(schedule, costs)
            expected = {
                item: end
                for passes, ends in zip(schedule.order, timeline.end, strict=True)
                for item, end in zip(passes, ends, strict=True)
            }
            ranks = [json.loads((folder / f"ends-{number}-{rank}.json").read_text()) for rank in range(options.devices)]
            runs = [{Pass(*item): end for rank in ranks for item, end in rank[run]} for run in range(RUNS)]
            measured = min(runs, key=lambda run: max(run.values()))
            ratio = max(measured.values()) / timeline.makespan
            difference = max(abs(measured[item] - end) for item, end in expected.items()) / timeline.makespan
            worst = max(worst, difference, abs(ratio - 1))
            print(
                f"{schedule.name:22} {schedule.stages_per_device:2} {timeline.makespan:12.3f} {ratio:16.3f} "
                f"{difference:22.1%}"
            )
    print(f"largest difference {worst:.1%}; wanted: at most {LIMIT:.0%}")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
