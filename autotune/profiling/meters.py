"""Meters for steps that aren't timed: peak memory and the bytes of collectives."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CollectiveCounter", "MemoryMeter", "MemoryPeak", "StorageMeter", "memory_meter"]


@dataclass(frozen=True)
class MemoryPeak:
    """Most bytes a rank held at any moment of a step.

    Attributes:
        total_bytes: everything: parameters, gradients, optimizer state, activations, message buffers, temporaries.
        activation_bytes: the most held beside parameters, gradients and optimizer state.
        reserved_bytes: what the CUDA allocator took from the device; None on CPU.
    """

    total_bytes: int
    activation_bytes: int
    reserved_bytes: int | None


class MemoryMeter(Protocol):
    """Context manager around the step to be metered."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: Any) -> Any: ...

    def refresh(self) -> None:
        """Parameters, gradients or optimizer state may have new tensors: look again."""

    def peak(self) -> MemoryPeak:
        """The peak so far."""


def memory_meter(
    device: torch.device,
    lasting: Callable[[], Iterable[Tensor]],
    resized: Callable[[], Iterable[Tensor]] = list,
) -> MemoryMeter:
    """The meter for `device`.

    Args:
        lasting: the rank's own tensors of parameters, gradients and optimizer state, as they are now.
        resized: tensors of gathered parameters, which FSDP empties and fills again; they are lasting, too.
    """
    return StorageMeter(lasting, resized) if device.type == "cpu" else _CudaMeter(device, lasting, resized)


class StorageMeter(TorchDispatchMode):
    """Follows every storage that an operation of this thread reads or makes, from then until it is freed.

    torch keeps no memory statistics on the CPU. Tensor subclasses are looked through to the rank's own tensors.
    Backward runs on the calling thread, so it is seen, too; buffers inside kernels are not.

    What an operation makes may turn out to last (a new gradient). So the course of the other bytes is kept from one
    `refresh` to the next, and corrected from a tensor's birth on when it is found among the lasting ones.
    """

    def __init__(self, lasting: Callable[[], Iterable[Tensor]], resized: Callable[[], Iterable[Tensor]] = list) -> None:
        super().__init__()
        self._lasting_tensors, self._resized_tensors = lasting, resized
        self._bytes: dict[int, int] = {}
        self._lasting: set[int] = set()
        self._resizable: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        # Finalizers may run on another thread (a send's) or inside of this class: they only leave a note.
        self._freed: deque[int] = deque()
        self._live = self._live_lasting = self._peak = self._peak_activation = 0
        self._course: list[int] = []
        self._born: dict[int, int] = {}
        self.refresh()

    def refresh(self) -> None:
        """Count the lasting tensors of now as such, wherever they came from."""
        self._forget_freed()
        for tensor in self._lasting_tensors():
            self._follow_lasting(tensor)
        for tensor in self._resized_tensors():
            key = self._follow_lasting(tensor)
            if key is not None:
                self._resizable[key] = weakref.ref(tensor.untyped_storage())
        self._peak = max(self._peak, self._live)
        self._peak_activation = max(self._peak_activation, *self._course, self._live - self._live_lasting)
        self._course.clear()
        self._born.clear()

    @property
    def live_bytes(self) -> int:
        """Bytes held now."""
        self._forget_freed()
        return self._live

    def peak(self) -> MemoryPeak:
        """The peak since the meter was made."""
        self.refresh()
        return MemoryPeak(self._peak, self._peak_activation, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self._forget_freed()
        self._follow_resizes()
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor):
                self._follow(leaf)
        self._peak = max(self._peak, self._live)
        self._course.append(self._live - self._live_lasting)
        return result

    def _follow(self, tensor: Tensor) -> int | None:
        if isinstance(tensor, (DTensor, AsyncCollectiveTensor)) or tensor.device.type != "cpu":
            return None
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._bytes:
            self._bytes[key] = 0
            self._born[key] = len(self._course)
            weakref.finalize(storage, self._freed.append, key).atexit = False
        self._resize(key, storage.nbytes())
        return key

    def _follow_lasting(self, tensor: Tensor) -> int | None:
        key = self._follow(tensor)
        if key is not None and key not in self._lasting:
            self._lasting.add(key)
            self._live_lasting += self._bytes[key]
            for moment in range(self._born.get(key, len(self._course)), len(self._course)):
                self._course[moment] -= self._bytes[key]
        return key

    def _resize(self, key: int, size: int) -> None:
        change = size - self._bytes[key]
        self._bytes[key] = size
        self._live += change
        if key in self._lasting:
            self._live_lasting += change

    def _follow_resizes(self) -> None:
        # FSDP does it to the storage itself, not by an operation.
        for key, reference in self._resizable.items():
            storage = reference()
            if storage is not None and key in self._bytes:
                self._resize(key, storage.nbytes())

    def _forget_freed(self) -> None:
        while self._freed:
            key = self._freed.popleft()
            self._resize(key, 0)
            self._bytes.pop(key, None)
            self._lasting.discard(key)
            self._resizable.pop(key, None)


class _CudaMeter:
    """The caching allocator's own peaks."""

    def __init__(
        self,
        device: torch.device,
        lasting: Callable[[], Iterable[Tensor]],
        resized: Callable[[], Iterable[Tensor]],
    ) -> None:
        self._device, self._lasting_tensors, self._resized_tensors = device, lasting, resized
        self._lasting_bytes = 0

    def __enter__(self) -> _CudaMeter:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self.refresh()
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.cuda.synchronize(self._device)

    def refresh(self) -> None:
        tensors = chain(self._lasting_tensors(), self._resized_tensors())
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        self._lasting_bytes = max(self._lasting_bytes, sum(storages.values()))

    def peak(self) -> MemoryPeak:
        total = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        return MemoryPeak(total, max(0, total - self._lasting_bytes), reserved)


# Bytes a rank sends in a ring, of a collective over n ranks whose input is `size` bytes on each.
_RING = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) / n,
    "all_gather": lambda size, n: size * (n - 1),
    "reduce_scatter": lambda size, n: size * (n - 1) / n,
}
# Rounds of the ring: an all-reduce is a reduce-scatter and an all-gather.
_RINGS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
# Operation, and where its input is among the arguments.
_COLLECTIVES = {
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
}


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives of this thread by mesh axis.

    Attributes:
        calls: all-gathers and reduce-scatters of each axis; an all-reduce is one of each.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup]) -> None:
        """`groups`: the groups to count, by the axis they are counted under; others are left out."""
        super().__init__()
        self._axes = {group.group_name: (axis, group.size()) for axis, group in groups.items()}
        self._sent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank sends, by axis, were every collective a ring."""
        return {axis: round(sent) for axis, sent in self._sent.items()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented
        known = _COLLECTIVES.get(func.name().partition(".")[0])
        if known is not None:
            self._count(known[0], args, args[known[1]])
        return func(*args, **(kwargs or {}))

    def _count(self, kind: str, args: tuple[Any, ...], given: Any) -> None:
        axis, ranks = self._axes.get(_group_name(args), (None, 1))
        if axis is None or ranks == 1:
            return
        size = sum(t.numel() * t.element_size() for t in tree_leaves(given) if isinstance(t, Tensor))
        self._sent[axis] += _RING[kind](size, ranks)
        self.calls[axis] += _RINGS[kind]


def _group_name(args: tuple[Any, ...]) -> str:
    if isinstance(args[-1], str):
        return args[-1]
    for value in args:
        if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
            return dist.ProcessGroup.unbox(value).group_name
    return ""
