"""Weight gradients as work of their own: the store that lets a backward pass be split into B and W.

torch's native split keeps the whole graph alive until W. Here B runs one ordinary backward in which every `Linear`
only computes the gradient of its input and leaves a task behind that holds its input and its output's gradient;
everything else is released. W runs the tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

__all__ = ["DeferredLinear", "WeightGradStore", "WeightGradTasks", "local_tensor"]


def local_tensor(tensor: Tensor) -> Tensor:
    """The rank's own part of a DTensor (sharing its storage), or the tensor itself."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


class WeightGradTasks:
    """Weight gradients one B pass left to do; each task holds a layer's input and its output's gradient."""

    def __init__(self, store: WeightGradStore) -> None:
        self._store = store
        self._tasks: deque[tuple[nn.Parameter, nn.Parameter | None, Tensor, Tensor]] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
        """Remember one layer's work; `x` (..., in) and `dy` (..., out) are the rank's own tensors."""
        self._tasks.append((weight, bias, x, dy))

    def run(self) -> None:
        """Accumulate every gradient into its parameter, freeing each task's tensors before the next runs."""
        while self._tasks:
            self._store.accumulate(*self._tasks.popleft())


class WeightGradStore:
    """Where the `DeferredLinear` layers of one device look whether to compute weight gradients now or later.

    Attributes:
        main_gradients: where the gradients of these parameters are summed instead of in their `.grad`, in a wider
            type; shared with whoever fills it before a step.
    """

    def __init__(self) -> None:
        self.main_gradients: dict[nn.Parameter, Tensor] = {}
        self._open: WeightGradTasks | None = None

    @contextmanager
    def deferred(self) -> Iterator[WeightGradTasks]:
        """Weight gradients of backwards run inside are collected instead of computed."""
        assert self._open is None, "a backward pass is being collected already"
        tasks = self._open = WeightGradTasks(self)
        try:
            yield tasks
        finally:
            self._open = None

    def take(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
        """Called by a layer's backward: collect its work, or do it at once."""
        if self._open is not None:
            self._open.add(weight, bias, x, dy)
        else:
            self.accumulate(weight, bias, x, dy)

    @torch.no_grad()  # a graph on a gradient would pin every dy
    def accumulate(self, weight: nn.Parameter, bias: nn.Parameter | None, x: Tensor, dy: Tensor) -> None:
        """Add one layer's gradients to those of its parameters."""
        rows, drows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        total = self.main_gradients.get(weight)
        if total is not None:
            local_tensor(total).add_(drows.t() @ rows)
        elif weight.grad is None:
            weight.grad = _like_parameter(drows.t() @ rows, weight)
        else:
            local_tensor(weight.grad).addmm_(drows.t(), rows)
        if bias is not None:
            self._accumulate_bias(bias, drows.sum(0))

    def _accumulate_bias(self, bias: nn.Parameter, gradient: Tensor) -> None:
        total = self.main_gradients.get(bias, bias.grad)
        if total is None:
            bias.grad = _like_parameter(gradient, bias)
        else:
            local_tensor(total).add_(gradient)


def _like_parameter(local: Tensor, parameter: nn.Parameter) -> Tensor:
    """`local` with the sharding of `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


class _Linear(torch.autograd.Function):
    """y = x w^T + b on the rank's own tensors; the weight's gradient goes to the store instead of to autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        store: WeightGradStore,
        add_bias: bool,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.bias, ctx.store = weight, bias, store
        return F.linear(x, local_tensor(weight), local_tensor(bias) if bias is not None and add_bias else None)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (dy,) = grads
        (x,) = ctx.saved_tensors
        dx = dy @ local_tensor(ctx.weight) if ctx.needs_input_grad[0] else None
        # Detached: a task that waits for W must not hold the graph, whose leaf holds the stage's input and gradient.
        ctx.store.take(ctx.weight, ctx.bias, x.detach(), dy)
        return dx, None, None, None, None


class DeferredLinear(nn.Linear):
    """A `Linear` whose weight and bias gradients go through a `WeightGradStore`.

    Its parameters may be DTensors sharded over tensor-parallel ranks; it reads and gives plain local tensors. A
    column-parallel one (weight sharded in dimension 0) reads the whole input and gives its columns of the output, a
    row-parallel one (dimension 1) reads its columns of the input and gives its part of a sum. In neither case does a
    weight's gradient need communication.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, store: WeightGradStore) -> None:
        super().__init__(in_features, out_features, bias=bias)
        self.store = store

    def forward(self, input: Tensor) -> Tensor:
        """(..., in_features or this rank's share) -> (..., out_features or this rank's share)."""
        # Of parts of a sum only one may add the bias; all see its whole gradient, as they see that of the sum.
        weight = self.weight
        add_bias = not (_is_row_parallel(weight) and weight.device_mesh.get_local_rank() != 0)
        return _Linear.apply(input, weight, self.bias, self.store, add_bias)


def _is_row_parallel(weight: Tensor) -> bool:
    return isinstance(weight, DTensor) and weight.placements == (Shard(1),)
