"""A stage of the real model under FakeTensorMode: what torch itself counts, for the formulas to be held against."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from autotune.profiling.meters import StorageMeter
from autotune.profiling.model import Stage, StageContext
from autotune.profiling.parallel import _shard_over_tensor
from autotune.profiling.sequence_parallel import SequenceParallel
from autotune.profiling.weight_grad import WeightGradStore, local_tensor
from autotune.space.model import ModelSpec
from autotune.space.training import DType

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Counted:
    """What torch counted for one microbatch of a stage; bytes and FLOPs of one rank."""

    parameters: int
    held: int
    kept: int
    forward_flops: int
    backward_flops: int
    weight_flops: int


@contextmanager
def fake_ranks(count: int) -> Iterator[DeviceMesh]:
    """A process group of `count` ranks of which only this one exists."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (count,))
    finally:
        dist.destroy_process_group()


@cache
def count_stage(
    spec: ModelSpec,
    layer_split: tuple[int, ...],
    stage: int,
    mesh: DeviceMesh | None,
    samples: int,
    dtype: DType,
    *,
    recompute: bool = False,
    unfused: bool = False,
) -> Counted:
    """Runs F, B and W of one stage on fake tensors and meters them."""
    tp = 1 if mesh is None else mesh.size()
    store = WeightGradStore()
    group = mesh.get_group() if mesh is not None and tp > 1 else None
    context = StageContext(store=store, tp=SequenceParallel(group), recompute=recompute)
    torch.set_default_dtype(DTYPES[dtype])
    try:
        with torch.device("meta"):
            module = Stage(spec, layer_split, stage, context)
    finally:
        torch.set_default_dtype(torch.float32)
    if tp > 1:
        _shard_over_tensor(module, mesh)
    backends = [SDPBackend.MATH] if unfused else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(backends):
        return _count(module.to_empty(device="cpu"), spec, layer_split, stage, tp, samples, DTYPES[dtype], store)


def _count(module, spec, layer_split, stage, tp, samples, dtype, store) -> Counted:  # type: ignore[no-untyped-def]
    length = spec.sequence_length
    last = stage == len(layer_split) - 1
    boundary = (samples, length // tp, spec.hidden)
    x = torch.zeros(samples, length, dtype=torch.long) if stage == 0 else torch.empty(boundary, dtype=dtype)
    x.requires_grad_(stage > 0)
    targets = torch.zeros(samples, length, dtype=torch.long) if last else None
    parameters = [local_tensor(p) for p in module.parameters()]
    # Without .grad the weight's gradient is a plain product, which FlopCounterMode knows.
    meter = StorageMeter(lambda: parameters + [local_tensor(p.grad) for p in module.parameters() if p.grad is not None])
    with meter, FlopCounterMode(display=False) as flops:
        meter._follow(x)
        if spec.positions == "rope":
            module.rotary.tables(x.device, dtype)
        before = _live(meter) - x.untyped_storage().nbytes() - (0 if targets is None else targets.nbytes)
        output = module(x, targets)
        shape, kind = output.shape, output.dtype
        edge = torch.autograd.graph.get_gradient_edge(output)
        output = targets = None
        held = _live(meter) - before
        forward = flops.get_total_flops()
        with store.deferred() as tasks:
            torch.autograd.backward(edge, torch.ones(shape, dtype=kind))
        leaf = weakref.ref(x)
        edge = x = None
        kept = _live(meter) - before - _pinned(leaf)
        both = flops.get_total_flops()
        tasks.run()
        whole = flops.get_total_flops()
    count = sum(p.numel() for p in parameters)
    return Counted(count, held, kept, forward, both - forward, whole - both)


def _pinned(leaf: weakref.ref[torch.Tensor]) -> int:
    """Bytes of the stage's input and its gradient: messages, even where a graph happens to hold them longer."""
    x = leaf()
    return 0 if x is None or x.grad is None else x.untyped_storage().nbytes() + x.grad.untyped_storage().nbytes()


def _live(meter: StorageMeter) -> int:
    meter.refresh()
    return meter._live - meter._live_lasting
