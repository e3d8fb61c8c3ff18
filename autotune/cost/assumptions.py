"""What a prediction takes for granted about the software that will run the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from autotune.errors import UserError
from autotune.space.training import DType

__all__ = [
    "MEGATRON",
    "WORKER",
    "WORKER_CUDA",
    "ZERO_BUBBLE",
    "Assumptions",
    "Recomputation",
    "StateBytes",
    "element_bytes",
    "stack",
    "worker_assumptions",
]

Recomputation = Literal["none", "selective", "full"]

MIB = 1024**2


@dataclass(frozen=True)
class StateBytes:
    """Bytes that one parameter of a device costs for the whole step.

    Attributes:
        parameter: the copy that the passes read.
        gradient: the buffer that the passes accumulate into.
        optimizer: master copy and moments (already divided by the ranks that share them).
    """

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        """All bytes of one parameter."""
        return self.parameter + self.gradient + self.optimizer


@dataclass(frozen=True)
class Assumptions:
    """How the training software lays out tensors and calls kernels. docs/cost-model.md says what each one changes.

    Attributes:
        attention: `flash` never holds the score matrix; `unfused` holds softmax, dropout mask and dropped-out scores.
        dropout: dropout masks of one byte an element after attention and MLP (and on the scores when unfused).
        sequence_parallel: norms, dropout and residuals sharded over tp (Korthikanti et al., section 4.2.2).
        regathers: with sequence parallelism, matmul inputs are stored sharded and gathered again in the backward
            (Megatron-LM); otherwise the gathered input is kept (DTensor).
        selective_recompute: recompute the attention core (scores, softmax, dropout) in every plan that doesn't
            recompute everything.
        sharding: `none` replicates optimizer state over dp, `zero1` shards it, `fsdp` shards parameters as well but
            gathers them once a step (reshard_after_forward=False), so that a pipeline doesn't gather per microbatch.
        master_weights: half-precision training keeps a float32 copy of every parameter.
        gradient_bytes: bytes of an accumulated gradient; None: those of the training dtype.
        vocab_multiple: the vocabulary is padded to a multiple of this times tp.
        fused_projections: q, k, v are one matmul and so are gate and up; otherwise three and two.
        fused_activation: SwiGLU is one kernel that keeps gate and up; otherwise silu(gate) is kept as well. (GeLU keeps
            its input either way.)
        fused_norms: an RMS norm keeps its input alone; otherwise its input and the normalised input, both in float32
            (torch's composite kernel on the CPU). A layer norm always keeps its input alone.
        fused_loss: the loss reads the logits in place; otherwise a float32 copy and its softmax are held as well.
        fused_weight_gradients: weight-gradient matmuls add into the gradient buffer; otherwise each makes a tensor of
            the weight's size first.
        dummy_gradients: fused accumulation returns a persistent half-precision dummy per weight shape to autograd
            (Transformer Engine).
        copies_collectives: gathering and scattering over tp copies the tensor once more (gloo).
        message_buffers: boundary tensors under way on a device beside those its passes hold.
        workspace_bytes: scratch memory of the matmul library.
        dp_overlap: share of the dp traffic hidden behind passes (0: all exposed, Megatron-LM's default).
        tp_overlap: share of the tp collectives hidden behind matmuls.
        adapts_schedules: schedules with a search (zb-1p, zb-2p, zb) are searched with the plan's own pass times;
            otherwise with F = B = W.
        rolling_steps: a device begins the next step when its own passes and its own optimizer are done, so a step takes
            the longest span of a device (post-validation of the zero-bubble runtime); otherwise the makespan.
        loss_scaling: float16 gradients are unscaled before the optimizer.
        fused_optimizer: Adam reads and writes each tensor once; otherwise it runs one kernel an operation (torch's
            single-tensor loop).
        shards_messages: a pipeline message is split over the tp ranks even without sequence parallelism.
    """

    attention: Literal["flash", "unfused"] = "flash"
    dropout: bool = False
    sequence_parallel: bool = False
    regathers: bool = True
    selective_recompute: bool = False
    sharding: Literal["none", "zero1", "fsdp"] = "none"
    master_weights: bool = True
    gradient_bytes: int | None = None
    vocab_multiple: int = 1
    fused_projections: bool = True
    fused_activation: bool = True
    fused_norms: bool = True
    fused_loss: bool = False
    fused_weight_gradients: bool = True
    dummy_gradients: bool = False
    copies_collectives: bool = False
    message_buffers: int = 0
    workspace_bytes: int = 64 * MIB
    dp_overlap: float = 0.0
    tp_overlap: float = 0.0
    adapts_schedules: bool = False
    rolling_steps: bool = False
    loss_scaling: bool = False
    fused_optimizer: bool = True
    shards_messages: bool = False

    def __post_init__(self) -> None:
        for name in ("dp_overlap", "tp_overlap"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"{name} is a share from 0 to 1, not {getattr(self, name)}")
        if self.vocab_multiple < 1:
            raise UserError(f"vocab_multiple must be at least 1, not {self.vocab_multiple}")
        if self.gradient_bytes not in (None, 2, 4):
            raise UserError(f"gradient_bytes must be 2, 4 or None (those of the dtype), not {self.gradient_bytes}")

    def recomputation(self, plan_recompute: str) -> Recomputation:
        """What a plan's passes recompute: the plan's `full` wins over `selective_recompute`."""
        if plan_recompute == "full":
            return "full"
        return "selective" if self.selective_recompute or plan_recompute == "selective" else "none"

    def shards(self, tp: int) -> int:
        """Ranks over which norms, dropout and residuals are split (r of the formulas)."""
        return tp if self.sequence_parallel else 1

    def state_bytes(self, dtype: DType, dp: int) -> StateBytes:
        """Bytes per parameter of one device: Adam keeps two float32 moments, half precision a float32 master beside.

        Source: Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 3.1 (2 + 2 + 12 bytes) and 5 (divided by dp).
        """
        size = element_bytes(dtype)
        gradient = float(self.gradient_bytes or size)
        moments = 8.0
        master = 4.0 if size == 2 and self.master_weights else 0.0
        if self.sharding == "none" or dp == 1:
            return StateBytes(size, gradient, moments + master)
        if self.sharding == "fsdp" and not master:
            master = float(size)  # the rank's own shard, beside the gathered copy that the passes read
        return StateBytes(size, gradient, (moments + master) / dp)


def element_bytes(dtype: DType) -> int:
    """Bytes of one element of an activation, and of the parameter the passes read."""
    return 4 if dtype == "float32" else 2


MEGATRON = Assumptions(
    sequence_parallel=True,
    sharding="zero1",
    gradient_bytes=4,
    vocab_multiple=128,
    shards_messages=True,
)
"""Megatron-LM's defaults with sequence parallelism and the distributed optimizer: float32 main gradients."""

ZERO_BUBBLE = Assumptions(
    attention="unfused",
    dropout=True,
    gradient_bytes=2,
    vocab_multiple=128,
    adapts_schedules=True,
    rolling_steps=True,
    loss_scaling=True,
    shards_messages=True,
)
"""The zero-bubble fork of Megatron-LM as published: float16 gradients, unfused attention with dropout."""

WORKER = Assumptions(
    sequence_parallel=True,
    regathers=False,
    sharding="fsdp",
    gradient_bytes=4,
    fused_projections=False,
    fused_activation=False,
    fused_norms=False,
    copies_collectives=True,
    message_buffers=2,
    workspace_bytes=0,
)
"""The worker of this package, on CPUs: FSDP2, eager kernels, sequence parallelism whenever tp > 1.

In bfloat16 gradients are summed and reduced in float32, also without data parallelism.
"""

WORKER_CUDA = replace(WORKER, fused_norms=True, workspace_bytes=64 * MIB)
"""The worker on accelerators: torch has a fused RMS norm there."""

STACKS = {"megatron": MEGATRON, "worker": WORKER, "worker-cuda": WORKER_CUDA, "zero-bubble": ZERO_BUBBLE}


def stack(name: str) -> Assumptions:
    """The assumptions about a known training software.

    Raises:
        UserError: unknown name.
    """
    if name not in STACKS:
        raise UserError(f"no stack {name!r}: give one of {', '.join(STACKS)}")
    return STACKS[name]


def worker_assumptions(device: str) -> Assumptions:
    """What holds for this package's worker on a cluster's device."""
    return WORKER if device == "cpu" else WORKER_CUDA
