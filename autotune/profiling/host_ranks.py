"""Starts the ranks that measure what collectives cost their callers, and reads what they found. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from autotune.profiling.process_tree import die_with_parent
from autotune.profiling.profile_errors import ProfileError
from autotune.profiling.profile_records import HostKey
from autotune.space.model import ModelSpec
from autotune.space.training import DType

__all__ = ["measure_host", "run_ranks"]

_POLL_S = 0.05


def measure_host(
    key: HostKey, model: ModelSpec, dtype: DType, timeout_s: float, stop: Callable[[], bool] = lambda: False
) -> dict[str, Any]:
    """Plain values of `HostFigures`, from `key.world` CPU processes of this machine. Raises ProfileError."""
    question = {"key": asdict(key), "model": asdict(model), "dtype": dtype}
    return run_ranks("autotune.profiling.host_cost", key.world, question, timeout_s, stop)


def run_ranks(
    module: str,
    ranks: int,
    question: dict[str, Any],
    timeout_s: float,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any]:
    """Run `python -m module RANK RANKS FOLDER` on every rank and read `FOLDER/answer.json`, which one of them writes.

    `FOLDER/question.json` holds the question, `FOLDER/store` is free for a file store. No process outlives this call.

    Raises:
        ProfileError: a rank failed, they took more than `timeout_s`, or `stop` said True.
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        Path(folder, "question.json").write_text(json.dumps(question), encoding="utf-8")
        processes = []
        try:
            for rank in range(ranks):
                with open(Path(folder, f"{rank}.log"), "wb") as log:
                    processes.append(
                        subprocess.Popen(
                            [sys.executable, "-m", module, str(rank), str(ranks), folder],
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=subprocess.STDOUT,
                            preexec_fn=partial(die_with_parent, os.getpid()),
                            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
                        )
                    )
            _wait(processes, folder, module, timeout_s, stop)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads(Path(folder, "answer.json").read_text(encoding="utf-8"))


def _wait(
    processes: list[subprocess.Popen[bytes]], folder: str, module: str, timeout_s: float, stop: Callable[[], bool]
) -> None:
    """Until all have ended well. Raises ProfileError as soon as one fails or time is up."""
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                log = Path(folder, f"{rank}.log").read_text(encoding="utf-8", errors="replace")
                last = "\n".join(log.splitlines()[-6:])
                raise ProfileError("failed", f"rank {rank} of {module} ended with exit code {code}: {last}")
        if None not in codes:
            return
        if stop():
            raise ProfileError("failed", "profiling was stopped")
        if time.monotonic() > deadline:
            raise ProfileError("timeout", f"{module} took more than {timeout_s:g} s")
        time.sleep(_POLL_S)
