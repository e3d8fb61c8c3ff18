"""Cross entropy over a vocabulary that may be sharded over tensor-parallel ranks and padded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["cross_entropy"]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, first: int, vocab: int, group: dist.ProcessGroup | None
    ) -> Tensor:
        padding_from = vocab - first
        if padding_from < logits.shape[-1]:
            columns = torch.arange(logits.shape[-1], device=logits.device)
            logits = logits.masked_fill(columns >= padding_from, float("-inf"))
        highest = logits.detach().amax(-1).float()
        if group is not None:
            dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
        probabilities = logits.float() - highest.unsqueeze(-1)
        column = targets - first
        held = (column >= 0) & (column < logits.shape[-1])
        column = column.where(held, 0)
        picked = probabilities.gather(-1, column.unsqueeze(-1)).squeeze(-1).where(held, 0.0)
        probabilities.exp_()
        sums = torch.stack((picked, probabilities.sum(-1)))
        if group is not None:
            dist.all_reduce(sums, group=group)
        picked, total = sums.unbind()
        probabilities.div_(total.unsqueeze(-1))
        ctx.save_for_backward(probabilities, column, held)
        ctx.dtype = logits.dtype
        return total.log() - picked

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (dloss,) = grads
        probabilities, column, held = ctx.saved_tensors
        # The graph is run once, so the saved tensor may become the result.
        dlogits = probabilities.mul_(dloss.unsqueeze(-1))
        dlogits.scatter_add_(-1, column.unsqueeze(-1), -(dloss * held).unsqueeze(-1))
        return dlogits.to(ctx.dtype), None, None, None, None


def cross_entropy(
    logits: Tensor, targets: Tensor, vocab: int, first: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Loss of every token, float32, shape of `targets`; equal on all ranks of `group`.

    Logits at or beyond `vocab` are padding: they take no part in the loss and get a gradient of zero.

    Args:
        logits: (..., columns) the rank's own columns of the logits, consumed by the backward.
        targets: (...) token ids below `vocab`.
        first: vocabulary index of the rank's first column.
        group: ranks the columns are sharded over; None when this rank has them all.
    """
    return _VocabParallelCrossEntropy.apply(logits, targets, first, vocab, group)
