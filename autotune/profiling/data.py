"""Synthetic training data that is the same for every partition of the batch."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Batch", "sample_tokens"]


def sample_tokens(seed: int, step: int, sample: int, length: int, vocab: int) -> Tensor:
    """(length + 1,) token ids of one sample of the global batch; inputs are all but the last, targets all but first.

    Args:
        sample: index of the sample in the global batch of `step`.
    """
    digest = hashlib.sha256(f"tokens:{seed}:{step}:{sample}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))
    return torch.randint(vocab, (length + 1,), generator=generator)


@dataclass(frozen=True)
class Batch:
    """One step's microbatches of one data-parallel replica, made when they are read so that none lies in memory.

    Replica d of dp takes samples [d m b, (d + 1) m b) of the global batch, b being the micro-batch size.

    Attributes:
        first: global index of the replica's first sample.
    """

    seed: int
    step: int
    first: int
    micro_batch_size: int
    length: int
    vocab: int
    device: torch.device

    def inputs(self, microbatch: int) -> Tensor:
        """(micro_batch_size, length) token ids the first stage reads."""
        return self._tokens(microbatch)[:, :-1].to(self.device)

    def targets(self, microbatch: int) -> Tensor:
        """(micro_batch_size, length) token ids the last stage predicts."""
        return self._tokens(microbatch)[:, 1:].to(self.device)

    def _tokens(self, microbatch: int) -> Tensor:
        start = self.first + microbatch * self.micro_batch_size
        samples = range(start, start + self.micro_batch_size)
        return torch.stack([sample_tokens(self.seed, self.step, s, self.length, self.vocab) for s in samples])
