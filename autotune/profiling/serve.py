"""Ranks that run plan after plan: `python -m autotune.profiling.serve --inbox DIR`.

Started like `autotune.profiling.worker`; `autotune.profiling.pool` is the other end. Every rank reads `DIR/job-0.json`,
`job-1.json`, ... as they appear, runs the plan and writes its report. A rank that fails says why and ends the launch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autotune.profiling.device import Device, make_device
from autotune.profiling.failure import fail
from autotune.profiling.heartbeat import beat
from autotune.profiling.mesh import MeshCache
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.worker import run_plan
from autotune.schedules.checks import check

__all__ = ["main"]

_POLL_S = 0.02


def main(arguments: list[str] | None = None) -> None:
    """Serve jobs until the launch is ended."""
    parser = argparse.ArgumentParser(prog="python -m autotune.profiling.serve", description="one rank of warm ranks")
    parser.add_argument("--inbox", type=Path, required=True, help="folder in which the jobs appear")
    inbox = parser.parse_args(arguments).inbox
    device: Device | None = None
    meshes: MeshCache | None = None
    number = 0
    while True:
        job = _next_job(inbox / f"job-{number}.json")
        out, rank, request_id = Path(job["out"]), int(os.environ["RANK"]), ""
        _log_to(out / f"rank-{rank}.log")
        try:
            request = TrialRequest.from_dict(json.loads(Path(job["request"]).read_text(encoding="utf-8")))
            request_id = request.id
            check(request.schedule)
            beat()
            if device is None or meshes is None:
                device, meshes = _join(request)
            report = run_plan(request, device, meshes)
            # Nobody begins the next plan while a peer still runs this one.
            dist.barrier()
        except Exception as error:
            fail(out, rank, error, request_id)
        report.write(out)
        del report
        _release_memory()
        number += 1


def _next_job(path: Path) -> dict[str, str]:
    while not path.exists():
        time.sleep(_POLL_S)
    return json.loads(path.read_text(encoding="utf-8"))


def _join(request: TrialRequest) -> tuple[Device, MeshCache]:
    device = make_device(request.cluster.device, int(os.environ.get("LOCAL_RANK", "0")))
    timeout = timedelta(seconds=request.collective_timeout_s)
    dist.init_process_group(device.backend, timeout=timeout)
    return device, MeshCache(device.torch_device.type, timeout)


def _release_memory() -> None:
    """Give back what the plan held, so that the next one finds the device as the first did."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _log_to(path: Path) -> None:
    """Send both streams of this process to the log of the trial."""
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    main()
