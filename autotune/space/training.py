"""What one optimizer step trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["DType", "TrainingSpec"]

DType = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class TrainingSpec:
    """One optimizer step: `global_batch_size` samples of the model's sequence length.

    Attributes:
        sum_tied_gradients: whether the worker adds the gradients of a tied embedding that lives on two devices. Our
            worker does; a worker that doesn't makes such plans illegal (rule `tied-embeddings`).
        seed: seed of the initial weights and of the token stream.
    """

    global_batch_size: int
    dtype: DType = "float32"
    optimizer: Literal["adamw"] = "adamw"
    sum_tied_gradients: bool = True
    seed: int = 0
