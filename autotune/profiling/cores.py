"""How many processor cores the ranks of a trial can share."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores() -> float:
    """Cores this process may use: those it may be scheduled on, less what a container's CPU quota takes away."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = _container_quota(Path("/sys/fs/cgroup"))
    return cores if quota is None else min(cores, quota)


def _container_quota(root: Path) -> float | None:
    """Cores' worth of time a cgroup (version 2 or 1) grants; None without a limit."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (root / "cpu.max").read_text(encoding="ascii").split()
        return None if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        granted = int((root / "cpu" / "cpu.cfs_quota_us").read_text(encoding="ascii"))
        return granted / int((root / "cpu" / "cpu.cfs_period_us").read_text(encoding="ascii")) if granted > 0 else None
    return None
