"""What differs between CPU and CUDA ranks: clocks, how long a sent tensor must live, and synchronisation."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

__all__ = ["CpuDevice", "CudaDevice", "Device", "PassClock", "Seconds", "SendKeeper", "make_device"]


class Seconds(NamedTuple):
    """How long a piece of work took: on the calling thread's CPU clock, and by the wall (or the GPU's own) clock."""

    cpu_s: float
    wall_s: float


class PassClock(Protocol):
    """Times pieces of work that follow each other on one device."""

    def start(self) -> None:
        """The work's inputs are there; it begins."""

    def stop(self) -> None:
        """It has been issued."""

    def read(self) -> list[Seconds]:
        """Times of all pieces since the last read, in order. May wait for the device."""


class SendKeeper(Protocol):
    """Keeps sent tensors alive until they have left, and not a pass longer."""

    def add(self, work: dist.Work) -> None:
        """A send was posted."""

    def poll(self) -> None:
        """Let go of what is done; never waits."""

    def flush(self) -> None:
        """Wait until everything has left. Raises what a send raised."""


class Device(Protocol):
    """The processor a rank computes on."""

    torch_device: torch.device
    backend: str

    def pass_clock(self) -> PassClock: ...

    def send_keeper(self) -> SendKeeper: ...

    def synchronize(self) -> None:
        """Wait until all work issued so far is done."""

    def describe(self) -> str:
        """Name of the hardware, for the results table."""


class _CpuClock:
    """`thread_time` leaves out waiting; the CPU autograd engine runs on the calling thread, so backwards count."""

    def __init__(self) -> None:
        self._seconds: list[Seconds] = []
        self._cpu = self._wall = 0

    def start(self) -> None:
        self._cpu, self._wall = time.thread_time_ns(), time.perf_counter_ns()

    def stop(self) -> None:
        cpu, wall = time.thread_time_ns() - self._cpu, time.perf_counter_ns() - self._wall
        self._seconds.append(Seconds(cpu / 1e9, wall / 1e9))

    def read(self) -> list[Seconds]:
        seconds, self._seconds = self._seconds, []
        return seconds


class _GlooSends:
    """A thread that waits for sends: gloo's `is_completed` stays false until somebody does."""

    def __init__(self) -> None:
        self._posted: queue.SimpleQueue[dist.Work | None] = queue.SimpleQueue()
        self._flushed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: dist.Work) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_sends, name="sends", daemon=True)
            self._thread.start()
        self._posted.put(work)

    def poll(self) -> None:
        """Nothing to do: the thread lets go by itself."""

    def flush(self) -> None:
        if self._thread is None:
            return
        self._posted.put(None)
        error = self._flushed.get()
        self._thread = None
        if error is not None:
            raise error

    def _wait_for_sends(self) -> None:
        error: BaseException | None = None
        while (work := self._posted.get()) is not None:
            try:
                work.wait()
            except Exception as problem:
                error = error or problem
            del work
        self._flushed.put(error)


class CpuDevice:
    """A process that stands for a device: gloo, CPU clocks."""

    backend = "gloo"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        # More threads would compute outside the thread whose CPU time is read.
        torch.set_num_threads(1)

    def pass_clock(self) -> PassClock:
        return _CpuClock()

    def send_keeper(self) -> SendKeeper:
        return _GlooSends()

    def synchronize(self) -> None:
        return

    def describe(self) -> str:
        return "cpu"


class _CudaClock:
    """Event pairs on the current stream. A receive's wait is issued before the start event, so it doesn't count."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._cpu_s: list[float] = []
        self._start = torch.cuda.Event(enable_timing=True)
        self._cpu = 0

    def start(self) -> None:
        self._cpu = time.thread_time_ns()
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()

    def stop(self) -> None:
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        self._events.append((self._start, end))
        self._cpu_s.append((time.thread_time_ns() - self._cpu) / 1e9)

    def read(self) -> list[Seconds]:
        torch.cuda.synchronize()
        seconds = [
            Seconds(cpu_s, start.elapsed_time(end) / 1e3)
            for cpu_s, (start, end) in zip(self._cpu_s, self._events, strict=True)
        ]
        self._events, self._cpu_s = [], []
        return seconds


class _NcclSends:
    """NCCL sends end with an event on their stream, which can be asked without waiting."""

    def __init__(self) -> None:
        self._posted: deque[dist.Work] = deque()

    def add(self, work: dist.Work) -> None:
        self._posted.append(work)

    def poll(self) -> None:
        while self._posted and self._posted[0].is_completed():
            # The wait returns at once and lets the backend drop the tensor it stashed.
            self._posted.popleft().wait()

    def flush(self) -> None:
        while self._posted:
            self._posted.popleft().wait()


class CudaDevice:
    """One GPU of this host: NCCL, event clocks."""

    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        self.torch_device = torch.device("cuda", local_rank)
        torch.cuda.set_device(self.torch_device)

    def pass_clock(self) -> PassClock:
        return _CudaClock()

    def send_keeper(self) -> SendKeeper:
        return _NcclSends()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)


def make_device(name: str, local_rank: int) -> Device:
    """The device of a rank: `cpu`, or a GPU for `cuda` and every named accelerator (which all are GPUs)."""
    return CpuDevice() if name == "cpu" else CudaDevice(local_rank)
