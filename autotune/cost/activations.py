"""Bytes of activations that one stage holds for one microbatch, and its largest temporary beside them.

Letters, as in Korthikanti et al. (arXiv 2205.05198): n = s b tokens of a microbatch, h hidden, f MLP width,
q = heads x head_dim, kv = kv_heads x head_dim, t = tp, r = t with sequence parallelism and 1 without,
e = bytes of an element, S = heads s n / t elements of the score matrix, V rows of the padded vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.cost.assumptions import Assumptions, Recomputation, element_bytes
from autotune.cost.parameters import StageShape, layer_matrix_parameters, padded_rows
from autotune.space.model import ModelSpec
from autotune.space.training import DType

__all__ = ["StageMemory", "layer_held", "layer_kept", "stage_memory"]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage and one microbatch on one device.

    Attributes:
        held: from the F to the B of the microbatch.
        kept: from its B to its W: inputs and output gradients of the matmuls whose weight gradient is still owed.
        forward, backward, weight, fused: largest temporary of an F, B, W or BW pass beyond what is held when it starts
            (F: beyond what is held when it ends).
        persistent: buffers of the whole step that belong to the stage's shape.
    """

    held: float
    kept: float
    forward: float
    backward: float
    weight: float
    fused: float
    persistent: float


@dataclass(frozen=True)
class _Sizes:
    """The letters of the module's docstring, for one device."""

    n: int
    h: float
    f: float
    q: float
    kv: float
    t: int
    r: int
    e: int
    scores: float
    columns: int  # matmul outputs of the MLP's width: 2 for swiglu, 1 for gelu


def _sizes(model: ModelSpec, tp: int, micro_batch_size: int, dtype: DType, assumptions: Assumptions) -> _Sizes:
    n = micro_batch_size * model.sequence_length
    return _Sizes(
        n=n,
        h=model.hidden,
        f=model.ffn_hidden,
        q=model.heads * model.head_dim,
        kv=model.kv_heads * model.head_dim,
        t=tp,
        r=assumptions.shards(tp),
        e=element_bytes(dtype),
        scores=model.heads * model.sequence_length * n / tp,
        columns=2 if model.activation == "swiglu" else 1,
    )


def _score_bytes(z: _Sizes, assumptions: Assumptions) -> float:
    """Softmax output, and with dropout its mask (1 byte) and the dropped-out scores: 5 a s^2 b in half precision."""
    if assumptions.attention == "flash":
        return 0.0
    return (2 * z.e + 1) * z.scores if assumptions.dropout else z.e * z.scores


def _gathered(z: _Sizes, assumptions: Assumptions) -> int:
    """Ranks over which the input of a column-parallel matmul is stored."""
    return z.r if assumptions.regathers else 1


def _norm_bytes(model: ModelSpec, z: _Sizes, assumptions: Assumptions) -> int:
    """Bytes an element that a norm over hidden keeps beside its output."""
    return z.e if assumptions.fused_norms or model.norm == "layernorm" else 8


def layer_held(
    model: ModelSpec,
    tp: int,
    micro_batch_size: int,
    dtype: DType,
    assumptions: Assumptions,
    recomputation: Recomputation,
) -> float:
    """Bytes that one layer holds from F to B.

    Source: Korthikanti et al., section 4 (n h (10/r + 24/t) + 5 S for GPT with dropout, 34 sbh + 5 as^2b at t = 1);
    flash attention keeps a float32 log-sum-exp per head and token (Dao, arXiv 2307.08691, section 3.1).
    """
    z = _sizes(model, tp, micro_batch_size, dtype, assumptions)
    if recomputation == "full":
        return z.e * z.n * z.h / z.r
    inputs = 1 if model.parallel_residual else 2
    norms = z.n * z.h * inputs * _norm_bytes(model, z, assumptions) / z.r
    norms += 2 * z.e * z.n * z.h / _gathered(z, assumptions)
    attention = z.e * z.n * (2 * z.q + 2 * z.kv) / z.t
    if model.qk_norm:
        attention += (z.e if assumptions.fused_norms else 8) * z.n * (z.q + z.kv) / z.t
    if assumptions.attention == "flash":
        attention += 4 * z.n * model.heads / z.t
    elif recomputation != "selective":
        attention += _score_bytes(z, assumptions)
    copies = z.columns + (model.activation == "swiglu" and not assumptions.fused_activation)
    mlp = z.e * z.n * z.f * (copies + 1) / z.t
    masks = 2 * z.n * z.h / z.r if assumptions.dropout else 0.0
    return norms + attention + mlp + masks


def layer_kept(model: ModelSpec, tp: int, micro_batch_size: int, dtype: DType, assumptions: Assumptions) -> float:
    """Bytes that one layer keeps from B to W: input and output gradient of each matmul.

    Source: Qi et al. (arXiv 2401.10241), Table 1: M_W = 32 sbh for GPT at t = 1 in half precision. The output
    gradients of row-parallel matmuls are whole on every rank, as the matmul needs them.
    """
    z = _sizes(model, tp, micro_batch_size, dtype, assumptions)
    inputs = 2 * z.h / _gathered(z, assumptions) + (z.q + z.f) / z.t
    shared = model.parallel_residual and z.t == 1 and not assumptions.dropout  # one gradient for both branches
    gradients = (z.q + 2 * z.kv) / z.t + z.columns * z.f / z.t + (1 if shared else 2) * z.h
    return z.e * z.n * (inputs + gradients)


def _layer_backward(z: _Sizes, assumptions: Assumptions) -> float:
    """Largest temporary of a layer's B: gradients inside the MLP, or of scores and softmax when unfused."""
    mlp = z.e * z.n * z.f * (z.columns + 1) / z.t
    scores = 2 * z.e * z.scores if assumptions.attention == "unfused" else 0.0
    copies = 4 if assumptions.copies_collectives and z.t > 1 else 0  # gathered gradient, its parts, the sum's and its
    return max(mlp, scores) + (1 + copies) * z.e * z.n * z.h


def stage_memory(
    model: ModelSpec,
    stage: StageShape,
    tp: int,
    micro_batch_size: int,
    dtype: DType,
    assumptions: Assumptions,
    recomputation: Recomputation,
) -> StageMemory:
    """Activation bytes of one stage and microbatch, and its temporaries; sizes as in the module's docstring."""
    z = _sizes(model, tp, micro_batch_size, dtype, assumptions)
    rows = padded_rows(model.vocab, tp, assumptions.vocab_multiple) / tp
    hidden = z.e * z.n * z.h
    held = stage.layers * layer_held(model, tp, micro_batch_size, dtype, assumptions, recomputation)
    kept = stage.layers * layer_kept(model, tp, micro_batch_size, dtype, assumptions)
    forward = backward = 0.0
    if stage.layers:
        forward = hidden * (1 + 2 / z.r + (z.r > 1))  # output of the MLP, attention's, and their sum
        backward = _layer_backward(z, assumptions)
        if recomputation == "full":
            backward += layer_held(model, tp, micro_batch_size, dtype, assumptions, "none")
        elif recomputation == "selective":
            backward += _score_bytes(z, assumptions)
    weight = 0.0 if assumptions.fused_weight_gradients else z.e * _largest_matrix(model, tp, stage)
    fused = backward + weight
    if stage.embeds:
        held += z.n * z.h / z.r if assumptions.dropout else 0.0
        scatter = z.e * rows * z.h + hidden - held  # after the layers' activations are gone
        backward, fused = max(backward, scatter), max(fused, scatter)
    if stage.heads:
        head = _head(model, z, rows, assumptions)
        held += head.held
        kept += head.kept
        forward = max(forward, head.forward)
        backward = max(backward - head.held, head.backward)
        fused = max(fused - head.held, head.fused)
        weight = max(weight, head.weight)
    if not stage.embeds and not assumptions.fused_norms and model.norm == "rmsnorm" and z.e == 2:
        held += hidden / z.r  # the received input itself, beside its float32 copy in the first norm
    dummies = 2 * layer_matrix_parameters(model) / tp if assumptions.dummy_gradients and stage.layers else 0.0
    return StageMemory(held, kept, forward, backward, weight, fused, dummies)


def _head(model: ModelSpec, z: _Sizes, rows: float, assumptions: Assumptions) -> StageMemory:
    """Final norm, output matrix and loss.

    A fused loss turns the logits into their gradient in place. Otherwise softmax is held in float32; half-precision
    logits with their float32 copy live beside it in F, both gradients in B (10 bytes a logit in half precision).
    """
    hidden = z.e * z.n * z.h
    logits = z.n * rows
    inputs = z.n * z.h * _norm_bytes(model, z, assumptions) / z.r + hidden / _gathered(z, assumptions)
    softmax = (z.e if assumptions.fused_loss else 4) * logits
    extra = 0.0 if assumptions.fused_loss else (z.e + (4 if z.e == 2 else 0)) * logits
    regathered = hidden if z.r > 1 and assumptions.regathers else 0.0
    weight = z.e * rows * z.h
    backward = extra + regathered + hidden
    return StageMemory(
        held=inputs + softmax,
        kept=hidden / _gathered(z, assumptions) + z.e * logits,
        forward=extra + regathered,
        backward=backward,
        weight=weight,
        fused=backward + weight,
        persistent=0.0,
    )


def _largest_matrix(model: ModelSpec, tp: int, stage: StageShape) -> float:
    """Elements of the largest weight matrix of the stage's layers on one rank."""
    if not stage.layers:
        return 0.0
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    return model.hidden * max(model.ffn_hidden, q, kv) / tp
