"""Peak activation memory of pipeline schedules, measured on real ranks beside what theory says.

    python benchmarks/memory_theory.py                     # 4 CPU ranks, 4 layers a device, 32 microbatches
    python benchmarks/memory_theory.py --json --out f.json

One launch runs every schedule on the same ranks. Theory is the largest number of microbatches' activations that the
schedule holds on one device (simulation with F = B = W), against 1F1B's p: 0.50 for V-Min and 0.75 for V-Half at p = 4
(Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, section 3).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.schedules.costs import PassCosts
from autotune.schedules.registry import build, find
from autotune.schedules.schedule import Schedule
from autotune.schedules.simulate import simulate
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.model import ModelSpec
from autotune.space.plan import Plan, spread_layers
from autotune.space.training import TrainingSpec

SCHEDULES = ("1f1b", "zb-h1", "zb-v", "v-half", "v-min")


def main() -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4, help="pipeline devices, a rank each")
    parser.add_argument("--layers-per-device", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), help="the first is the one compared with")
    parser.add_argument(
        "--growth", type=int, nargs="*", default=[8, 64], help="microbatches to run the first with, too"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    first = options.schedules[0]
    runs = [(name, options.microbatches) for name in options.schedules] + [(first, m) for m in options.growth]
    requests = [make_request(options, name, microbatches) for name, microbatches in dict.fromkeys(runs)]
    results = summarise(requests, measure(requests))
    if options.out is not None:
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1) if options.json else table(results))


def make_request(options: argparse.Namespace, name: str, microbatches: int) -> TrialRequest:
    """A plan of `devices` CPU ranks. The vocabulary is small, so that logits don't blur what stages hold."""
    devices, stages_per_device = options.devices, find(name).min_stages_per_device
    layers = devices * options.layers_per_device
    spec = ModelSpec(
        layers=layers,
        hidden=options.hidden,
        heads=4,
        kv_heads=4,
        head_dim=options.hidden // 4,
        ffn_hidden=4 * options.hidden,
        vocab=32,
        sequence_length=options.sequence_length,
        activation="gelu",
        norm="layernorm",
    )
    plan = Plan(
        pp=devices,
        tp=1,
        dp=1,
        micro_batch_size=1,
        microbatches=microbatches,
        schedule=name,
        stages_per_device=stages_per_device,
        layer_split=spread_layers(layers, devices * stages_per_device),
    )
    return TrialRequest(
        trial=0,
        plan=plan,
        schedule=build(name, devices, microbatches, stages_per_device),
        model=spec,
        cluster=ClusterSpec(1, devices, "cpu", None, Link(0.0, 1e9), Link(0.0, 1e9)),
        training=TrainingSpec(global_batch_size=microbatches),
        warmup_steps=1,
        measured_steps=1,
    )


def measure(requests: list[TrialRequest]) -> list[list[RankReport]]:
    """Run every request on the ranks of one launch; for each the reports of all ranks."""
    devices = requests[0].plan.devices
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "requests.json")
        path.write_text(json.dumps([request.to_dict() for request in requests]), encoding="utf-8")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(devices)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
        subprocess.run(
            [*command, __file__, "--rank-of", str(path)], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True
        )
        by_rank = [json.loads(Path(folder, f"reports-{rank}.json").read_text()) for rank in range(devices)]
    return [[RankReport.from_dict(reports[k]) for reports in by_rank] for k in range(len(requests))]


def rank_main(path: Path) -> None:
    """One rank of `measure`."""
    import torch.distributed as dist

    from autotune.profiling.device import CpuDevice
    from autotune.profiling.mesh import MeshCache
    from autotune.profiling.worker import run_plan

    timeout = timedelta(seconds=120)
    device = CpuDevice()
    dist.init_process_group("gloo", timeout=timeout)
    meshes = MeshCache("cpu", timeout)
    requests = [TrialRequest.from_dict(values) for values in json.loads(path.read_text(encoding="utf-8"))]
    reports = [run_plan(request, device, meshes).to_dict() for request in requests]
    path.with_name(f"reports-{dist.get_rank()}.json").write_text(json.dumps(reports), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def theory(schedule: Schedule) -> list[float]:
    """Most microbatches whose activations each device holds at once; W needs what B needs, so nothing goes at B."""
    costs = replace(PassCosts.uniform(schedule.placement), kept=PassCosts.uniform(schedule.placement).activation)
    return list(simulate(schedule, costs).peak_activation)


def summarise(requests: list[TrialRequest], reports: list[list[RankReport]]) -> list[dict]:
    """For every run its measured and theoretical peaks, and both against those of the first run."""
    results: list[dict] = []
    for request, ranks in zip(requests, reports, strict=True):
        expected = theory(request.schedule)
        peaks = [rank.activation_peak_bytes or 0 for rank in ranks]
        base = results[0] if results else {"activation_peak_bytes": peaks, "theory_microbatches": expected}
        results.append(
            {
                "schedule": request.plan.schedule,
                "microbatches": request.plan.microbatches,
                "activation_peak_bytes": peaks,
                "theory_microbatches": expected,
                "ratio": max(peaks) / max(base["activation_peak_bytes"]),
                "theory_ratio": max(expected) / max(base["theory_microbatches"]),
            }
        )
    return results


def table(results: list[dict]) -> str:
    """The results as text."""
    name = results[0]["schedule"]
    lines = [
        f"{'schedule':<18}{'m':>4}  {'peak / ' + name:>12} {'theory':>7}   peak activation per rank, MiB (theory, m)"
    ]
    for row in results:
        ranks = "  ".join(
            f"{peak / 2**20:6.2f} ({held:g})"
            for peak, held in zip(row["activation_peak_bytes"], row["theory_microbatches"], strict=True)
        )
        run = f"{row['schedule']:<18}{row['microbatches']:>4}"
        lines.append(f"{run}  {row['ratio']:>12.3f} {row['theory_ratio']:>7.3f}   {ranks}")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--rank-of" in sys.argv:
        rank_main(Path(sys.argv[-1]))
    else:
        main()
