"""How a rank of the built-in worker says why it failed."""

from __future__ import annotations

import errno
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Literal, NoReturn

import torch
import torch.distributed as dist

from autotune.profiling.protocol import RankReport

__all__ = ["fail", "failure_state"]

_ERROR_LINES = 12
# The hooks of any Python rank have the same list.
_NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE)


def fail(out: Path, rank: int, error: Exception, request_id: str) -> NoReturn:
    """Report the failure and leave at once: tearing process groups down would wait for peers that wait for us.

    Args:
        request_id: of the request that failed; empty if it could not be read.
    """
    failed_at = time.time()
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    print("\n".join(lines), file=sys.stderr, flush=True)
    RankReport(
        rank,
        failure_state(error),
        request_id,
        "\n".join(lines[-_ERROR_LINES:]),
        failed_at,
        torch=torch.__version__,
        device=_current_device(),
    ).write(out)
    sys.stdout.flush()
    os._exit(1)


def failure_state(error: BaseException) -> Literal["oom", "failed", "launcher"]:
    """`oom` if the error says that memory ran out, by its type or by where torch raises it.

    `launcher` if the ranks can't reach each other's rendezvous, or their disk is full or gone: that tells nothing about
    the plan.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return "oom"
    # The CPU allocator has no type of its own: a plain RuntimeError whose text starts with the failing source line.
    text = str(error)
    if type(error) is RuntimeError and text.startswith("[enforce fail at alloc_cpu.cpp:"):
        return "oom"
    if isinstance(error, OSError) and error.errno in _NO_DISK:
        return "launcher"
    return "launcher" if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)) else "failed"


def _current_device() -> str:
    """The device of this rank, as far as it came to use one: `cuda:1`."""
    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
