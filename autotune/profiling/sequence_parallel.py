"""The collectives of tensor parallelism with sequence parallelism, on plain tensors.

Between layers a tensor-parallel rank holds its slice of the sequence. `gather` precedes a column-parallel layer, whose
ranks all read the whole sequence; `scatter_sum` follows a row-parallel one, whose ranks each made a part of the sum
(Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4.2.2). Each is the
other's backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["SequenceParallel"]


class SequenceParallel:
    """One rank's place in a tensor-parallel group; with one rank nothing is moved.

    Attributes:
        group: None when the tensor-parallel degree is 1.
        rank, size: of this rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else group.size()

    def gather(self, x: Tensor) -> Tensor:
        """(batch, sequence / size, width) -> (batch, sequence, width); gradients are summed over ranks and cut."""
        return x if self.group is None else _Gather.apply(x, self.group)

    def scatter_sum(self, x: Tensor) -> Tensor:
        """(batch, sequence, width), this rank's part of a sum -> (batch, sequence / size, width) of the sum."""
        return x if self.group is None else _ScatterSum.apply(x, self.group)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, length, width = x.shape
    # gloo wants the parts one after the other in the first dimension.
    parts = x.new_empty(group.size() * batch, length, width)
    dist.all_gather_single(parts, x.contiguous(), group=group)
    return parts.unflatten(0, (-1, batch)).transpose(0, 1).reshape(batch, -1, width)


def _scatter_sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    batch, _, width = x.shape
    parts = x.view(batch, group.size(), -1, width).transpose(0, 1).contiguous()
    mine = torch.empty_like(parts[0])
    dist.reduce_scatter_single(mine, parts.flatten(0, 1), group=group)
    return mine


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter_sum(grads[0].contiguous(), ctx.group), None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter_sum(x.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None
