"""AdamW over the rank's own part of every parameter."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from autotune.profiling.weight_grad import local_tensor

__all__ = ["LocalAdamW"]


class LocalAdamW:
    """A real AdamW step on local tensors.

    AdamW works element by element, so on shards it needs no communication and no DTensor dispatch. Parameters without
    a gradient are left alone.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float = 3e-4) -> None:
        self._parameters = list(parameters)
        # An FSDP parameter's own part is a view of storage that stays, so the update shows in the parameter.
        self._locals = [nn.Parameter(local_tensor(parameter.detach())) for parameter in self._parameters]
        self.adamw = torch.optim.AdamW(self._locals, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(self) -> None:
        """Update every parameter in place by its gradient."""
        for parameter, local in zip(self._parameters, self._locals, strict=True):
            local.grad = None if parameter.grad is None else local_tensor(parameter.grad)
        self.adamw.step()
        for local in self._locals:
            local.grad = None

    def state_tensors(self) -> list[Tensor]:
        """Moments and step counts; empty before the first step."""
        return [value for state in self.adamw.state.values() for value in state.values() if isinstance(value, Tensor)]
