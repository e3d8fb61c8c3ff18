"""Start a script on several ranks and wait for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


def run_ranks(world: int, script: Path, *arguments: str, timeout_s: float = 300.0) -> None:
    """Run `script` under torchrun with `world` ranks on a free port; fail with its last output if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--local-addr", "localhost"]
    process = subprocess.Popen(
        [*command, str(script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{script.name} on {world} ranks took over {timeout_s} s:\n{output[-4000:]}") from None
    # The ranks' own tracebacks, not the launcher's.
    told = "\n".join(line for line in output.splitlines() if line.startswith("[rank")) or output
    assert process.returncode == 0, f"{script.name} on {world} ranks failed:\n{told[-6000:]}"
