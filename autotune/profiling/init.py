"""Initial weights that depend on the parameter alone, so that every partition of a model starts as the same model."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autotune.space.model import ModelSpec

__all__ = ["initial_value", "initialise"]

STD = 0.02


def initial_value(spec: ModelSpec, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole parameter `name` (float32, on the CPU), whatever rank holds which part of it.

    Norm weights are 1, biases 0, matrices normal with a deviation of 0.02, divided by sqrt(2 layers) for those that
    write to the residual stream (GPT-2, section 2.3). Each parameter has a random stream of its own, seeded by (seed,
    name); names carry the layer's number. Vocabulary rows beyond the model's are 0.

    Args:
        name: name in the whole model, for example `layers.3.attention.query.weight`.
        shape: global shape, vocabulary padded.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "norm" in name.rsplit(".", 2)[-2]:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
    std = STD / math.sqrt(2 * spec.layers) if residual else STD
    if name not in ("embedding.weight", "head.weight"):
        return torch.empty(shape).normal_(0.0, std, generator=generator)
    value = torch.zeros(shape)
    value[: spec.vocab] = torch.empty(spec.vocab, shape[1]).normal_(0.0, std, generator=generator)
    return value


@torch.no_grad()
def initialise(stage: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill a stage's parameters (plain, or DTensors evenly sharded over one mesh axis) with their initial values.

    One whole parameter at a time is made on the CPU; a tied head starts as the embedding it is tied to.
    """
    for name, parameter in stage.named_parameters():
        source = "embedding.weight" if name == "head.weight" and spec.tied_embeddings else name
        value = initial_value(spec, seed, source, tuple(parameter.shape))
        target: Tensor = parameter
        if isinstance(parameter, DTensor):
            mesh, (placement,) = parameter.device_mesh, parameter.placements
            if placement.is_shard():
                value = value.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
            target = parameter.to_local()
        target.copy_(value)
