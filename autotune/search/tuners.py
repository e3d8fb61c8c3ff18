"""The tuners at work on one study, and which of them have died.

Of a tuner on this machine its process says at once whether it lives. Of any other only its heartbeat does: a number in
the database that it raises. How long the number has stood still is measured by the clock of whoever watches, so that
clocks of machines are never compared.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import psutil

from autotune.profiling.process_tree import place, started_at
from autotune.space.cluster import ClusterSpec

__all__ = ["Tuner", "Watch", "local_clock_s", "share_devices", "this_tuner"]

_NODES = "nodes:"


@dataclass(frozen=True)
class Tuner:
    """One process that searches.

    Attributes:
        key: unlike that of any other tuner, ever.
        host: name of its machine, for people.
        place: where its pid means something: machine, boot and pid namespace.
        created: start time of the process, as text: a pid is given out again.
        devices: what its trials may use, as comparable text.
        beat: the number it raises while it lives.
    """

    key: str
    host: str
    place: str
    pid: int
    created: str
    devices: str = ""
    beat: int = 0

    def describe(self) -> str:
        """For messages."""
        return f"process {self.pid} on {self.host}"

    @property
    def started_s(self) -> float:
        """When its process started, by `local_clock_s` of its place."""
        return float(self.created) / (os.sysconf("SC_CLK_TCK") if sys.platform == "linux" else 1)

    @property
    def mark(self) -> str:
        """What its trials' processes are marked with, after the study's id (`autotune.profiling.supervised`)."""
        return f"{self.pid}/{self.created}"


def local_clock_s() -> float:
    """Now, by the clock that tells when processes of this place started; on Linux none that is ever set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.time()


def this_tuner(cluster: ClusterSpec, nodes: Sequence[str] = ()) -> Tuner:
    """This process, under a new key.

    Args:
        nodes: that its trials run on; empty: on this machine.
    """
    return Tuner(
        key=uuid.uuid4().hex,
        host=socket.gethostname()[:200],
        place=place(),
        pid=os.getpid(),
        created=started_at(os.getpid()),
        devices=_NODES + ",".join(nodes) if nodes else _devices(cluster.device),
    )


def share_devices(one: Tuner, other: Tuner) -> bool:
    """Whether trials of both may run on the same devices."""
    if any(tuner.devices.startswith(_NODES) for tuner in (one, other)):
        return not _machines(one).isdisjoint(_machines(other))
    if one.place.split("/")[0] != other.place.split("/")[0]:
        return False
    kinds, sets = zip(*(tuner.devices.split(":", 1) for tuner in (one, other)), strict=True)
    if kinds[0] != kinds[1]:
        return False
    return "all" in sets or not set(sets[0].split(",")).isdisjoint(sets[1].split(","))


def _machines(tuner: Tuner) -> set[str]:
    """Names of those that its trials run on."""
    if tuner.devices.startswith(_NODES):
        return set(tuner.devices.removeprefix(_NODES).split(","))
    return {tuner.host}


@dataclass
class Watch:
    """Tells which tuners have died, from what the database says of them again and again.

    Args:
        me: whoever watches.
        grace_s: a tuner whose beat stood still for so long, while the database answered, is dead.
    """

    me: Tuner
    grace_s: float
    seen: dict[str, tuple[int, float]] = field(default_factory=dict)
    looked_at: float | None = None

    def dead(self, tuners: Iterable[Tuner], now: float | None = None) -> list[Tuner]:
        """Those of `tuners`, as the database has them now, that are dead.

        Args:
            now: of `time.monotonic`, in seconds.
        """
        now = time.monotonic() if now is None else now
        # While nobody looked, the database may have been away, or this process stopped: that is nobody's silence.
        passed_s = 0.0 if self.looked_at is None else min(now - self.looked_at, self.grace_s / 4)
        self.looked_at = now
        found, seen = [], {}
        for tuner in tuners:
            if tuner.key == self.me.key:
                continue
            beat, still_s = self.seen.get(tuner.key, (tuner.beat, 0.0))
            still_s = still_s + passed_s if beat == tuner.beat and tuner.key in self.seen else 0.0
            seen[tuner.key] = (tuner.beat, still_s)
            if still_s >= self.grace_s or self._is_gone(tuner):
                found.append(tuner)
        self.seen = seen
        return found

    def _is_gone(self, tuner: Tuner) -> bool:
        return tuner.place == self.me.place and not _process_lives(tuner)


def _process_lives(tuner: Tuner) -> bool:
    """Whether the process of a tuner of this place lives; one that was stopped does."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(tuner.pid)
        return started_at(tuner.pid) == tuner.created and process.status() != psutil.STATUS_ZOMBIE
    return False


def _devices(device: str) -> str:
    if device == "cpu":
        affinity = getattr(os, "sched_getaffinity", None)
        return "cpu:" + (",".join(map(str, sorted(affinity(0)))) if affinity else "all")
    return "accelerator:" + (os.environ.get("CUDA_VISIBLE_DEVICES") or "all").replace(" ", "")
