"""What the passes of a stage have to do on one device: matmuls, memory-bound kernels and collectives.

Letters as in `activations`: n tokens of a microbatch, h hidden, f MLP width, q and kv projection widths, t = tp,
r = t with sequence parallelism and 1 without, e bytes of an element, S elements of the score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from autotune.cost.assumptions import Assumptions, Recomputation, element_bytes
from autotune.cost.parameters import StageShape, padded_rows
from autotune.space.model import ModelSpec
from autotune.space.training import DType

__all__ = [
    "EMPTY",
    "Attention",
    "Matmul",
    "PassWork",
    "StageWork",
    "embedding_work",
    "head_work",
    "layer_work",
    "stage_work",
]


class Matmul(NamedTuple):
    """`batch` products of (rows x inner) and (inner x columns); `moved` bytes read and written by all of them."""

    rows: float
    inner: float
    columns: float
    moved: float
    batch: float = 1.0

    @property
    def flops(self) -> float:
        """Two per multiply-add."""
        return 2.0 * self.rows * self.inner * self.columns * self.batch


class Attention(NamedTuple):
    """Work of one fused (flash) attention kernel."""

    flops: float


@dataclass(frozen=True)
class PassWork:
    """Work of one pass on one device.

    Attributes:
        matmuls: dense kernels that read weights or, unfused, the score matrix.
        attention: flash attention kernels.
        streamed_bytes: memory traffic of kernels that compute next to nothing: norms, activations, residuals, loss.
        streams: number of those kernels.
        gathers: all-gathers or reduce-scatters over tp (an all-reduce is two); `gather_bytes` is the whole tensor's
            size, summed over them.
    """

    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[Attention, ...] = ()
    streamed_bytes: float = 0.0
    streams: int = 0
    gathers: int = 0
    gather_bytes: float = 0.0

    @property
    def matmul_flops(self) -> float:
        """FLOPs of the matmuls on one device, batched products of unfused attention included."""
        return sum(m.flops for m in self.matmuls)

    @property
    def flops(self) -> float:
        """Matmul and attention FLOPs on one device."""
        return self.matmul_flops + sum(a.flops for a in self.attention)

    def __add__(self, other: PassWork) -> PassWork:
        return PassWork(
            self.matmuls + other.matmuls,
            self.attention + other.attention,
            self.streamed_bytes + other.streamed_bytes,
            self.streams + other.streams,
            self.gathers + other.gathers,
            self.gather_bytes + other.gather_bytes,
        )


EMPTY = PassWork()


@dataclass(frozen=True)
class StageWork:
    """F, B and W of one stage (or one layer); BW does B and W."""

    forward: PassWork
    backward: PassWork
    weight: PassWork

    def __add__(self, other: StageWork) -> StageWork:
        return StageWork(self.forward + other.forward, self.backward + other.backward, self.weight + other.weight)


def layer_work(
    model: ModelSpec,
    tp: int,
    micro_batch_size: int,
    dtype: DType,
    assumptions: Assumptions,
    recomputation: Recomputation,
) -> StageWork:
    """Work of one layer on one tp rank.

    Matmuls: 2 rows inner columns FLOPs each; B and W of a matmul cost the same as its F (Narayanan et al.,
    arXiv 2104.04473, appendix). Full recomputation runs the whole F again at the start of B, selective only the core
    of unfused attention (Korthikanti et al., arXiv 2205.05198, section 5).
    """
    n, e, t = micro_batch_size * model.sequence_length, element_bytes(dtype), tp
    matrices = _layer_matrices(model, t, assumptions)
    forward_core, backward_core = _attention_core(model, n, e, t, assumptions)
    forward = PassWork(tuple(_matmul(n, k, c, e) for k, c in matrices)) + forward_core
    backward = PassWork(tuple(_matmul(n, c, k, e) for k, c in matrices)) + backward_core
    weight = PassWork(tuple(_matmul(k, n, c, e) for k, c in matrices))
    forward_streams, backward_streams = _layer_streams(model, n, e, t, assumptions)
    forward += forward_streams
    backward += backward_streams
    if t > 1:
        whole = float(e * n * model.hidden)
        branches = 1 if model.parallel_residual else 2
        forward += PassWork(gathers=2 * branches, gather_bytes=2 * branches * whole)
        backward += PassWork(gathers=2 * branches, gather_bytes=2 * branches * whole)
        if assumptions.sequence_parallel and assumptions.regathers:
            weight += PassWork(gathers=2, gather_bytes=2 * whole)
    if recomputation == "full":
        backward = forward + backward
    elif recomputation == "selective":
        backward = _recomputed_core(forward_core, assumptions) + backward
    return StageWork(forward, backward, weight)


def _matmul(rows: float, inner: float, columns: float, e: int, batch: float = 1.0) -> Matmul:
    moved = e * (rows * inner + inner * columns + rows * columns) * batch
    return Matmul(rows, inner, columns, moved, batch)


def _layer_matrices(model: ModelSpec, t: int, assumptions: Assumptions) -> list[tuple[float, float]]:
    """(inner, columns) of every weight matmul of a layer on one rank."""
    h, f = model.hidden, model.ffn_hidden / t
    q, kv = model.heads * model.head_dim / t, model.kv_heads * model.head_dim / t
    gated = model.activation == "swiglu"
    if assumptions.fused_projections:
        return [(h, q + 2 * kv), (q, h), (h, (2 if gated else 1) * f), (f, h)]
    return [(h, q), (h, kv), (h, kv), (q, h), *([(h, f)] * (2 if gated else 1)), (f, h)]


def _attention_core(model: ModelSpec, n: int, e: int, t: int, assumptions: Assumptions) -> tuple[PassWork, PassWork]:
    """Everything between the projections, in F and B.

    Unfused: two batched products forward (QK^T, PV) and four backward over the whole square, each moving one score
    matrix; softmax reads and writes it forward, reads two and writes one backward; dropout reads, writes and moves a
    one-byte mask. Flash, causal: half the square, and 2.5 times the forward's FLOPs backward, because scores are
    computed again (Dao, arXiv 2307.08691, section 4.1).
    """
    s, d = model.sequence_length, model.head_dim
    heads = model.heads * n / s / t  # score matrices of s x s on this rank
    if assumptions.attention == "flash":
        flops = 2.0 * heads * s * s * d
        return PassWork(attention=(Attention(flops),)), PassWork(attention=(Attention(2.5 * flops),))
    scores = heads * s * s
    to_scores = _matmul(s, d, s, e, heads)
    from_scores = _matmul(s, s, d, e, heads)
    dropout = (2 * e + 1) * scores if assumptions.dropout else 0.0
    streams = 2 if assumptions.dropout else 1
    forward = PassWork((to_scores, from_scores), streamed_bytes=2 * e * scores + dropout, streams=streams)
    backward = PassWork((to_scores, from_scores) * 2, streamed_bytes=3 * e * scores + dropout, streams=streams)
    return forward, backward


def _recomputed_core(core: PassWork, assumptions: Assumptions) -> PassWork:
    """Selective recomputation repeats scores, softmax and dropout; the product with v too, to feed the projection."""
    return core if assumptions.attention == "unfused" else EMPTY


def _layer_streams(model: ModelSpec, n: int, e: int, t: int, assumptions: Assumptions) -> tuple[PassWork, PassWork]:
    """The memory-bound kernels of a layer, in F and B; each tensor's bytes counted once per read or write.

    Two norms: F reads and writes (2), B reads input and gradient and writes one (3) and reads both again for the
    weight's gradient (2). Two residual adds: F reads two and writes one (3), B adds the gradients of the branches (3).
    Dropout: a one-byte mask written in F; B reads gradient and mask and writes. The activation function: GeLU 2 and 3,
    SwiGLU 3 and 5 tensors of the MLP's width. Turning q, k, v and the output into and out of the attention's layout
    (and rotating q and k): read and write of each, both ways.
    """
    wide = e * n * model.hidden / assumptions.shards(t)
    norms_and_residuals = 2 * (2 + 3) * wide
    backward_norms_and_residuals = 2 * (5 + 3) * wide
    if assumptions.dropout:
        mask = n * model.hidden / assumptions.shards(t)
        norms_and_residuals += 2 * mask
        backward_norms_and_residuals += 2 * (2 * wide + mask)
    mlp = e * n * model.ffn_hidden / t
    forward_mlp, backward_mlp = (3 * mlp, 5 * mlp) if model.activation == "swiglu" else (2 * mlp, 3 * mlp)
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    layout = 2 * e * n * (2 * q + 2 * kv) / t
    qk_norm = e * n * (q + kv) / t if model.qk_norm else 0.0
    forward = norms_and_residuals + forward_mlp + layout + 2 * qk_norm
    backward = backward_norms_and_residuals + backward_mlp + layout + 5 * qk_norm
    masks, qk_norms = 2 * assumptions.dropout, 2 * model.qk_norm
    return (
        PassWork(streamed_bytes=forward, streams=9 + qk_norms),
        PassWork(streamed_bytes=backward, streams=11 + masks + 2 * qk_norms),
    )


def embedding_work(model: ModelSpec, n: int, e: int, t: int, assumptions: Assumptions) -> StageWork:
    """Token lookup: F reads rows and writes them, adds positions; B reads the gradient, reads and writes rows.

    With tp every rank holds part of the rows, so the output is summed over tp (an all-reduce, or a reduce-scatter with
    sequence parallelism, whose backward is an all-gather).
    """
    whole = float(e * n * model.hidden)
    forward, backward = PassWork(streamed_bytes=2 * whole, streams=1), PassWork(streamed_bytes=3 * whole, streams=1)
    if model.positions == "learned":
        forward += PassWork(streamed_bytes=3 * whole, streams=1)
        backward += PassWork(streamed_bytes=2 * whole, streams=1)
    if t > 1:
        gathers = 1 if assumptions.sequence_parallel else 2
        forward += PassWork(gathers=gathers, gather_bytes=gathers * whole)
        if assumptions.sequence_parallel:
            backward += PassWork(gathers=1, gather_bytes=whole)
    return StageWork(forward, backward, EMPTY)


def head_work(model: ModelSpec, n: int, e: int, t: int, assumptions: Assumptions) -> StageWork:
    """Final norm, output matmul and loss.

    Bytes a logit: a fused loss reads and writes it once forward and once backward. Otherwise, forward: cast to
    float32 (e + 4), maximum (4), subtract (8), exponential (8), sum (4), divide (8), target lookup counted as nothing;
    backward: scale (8) and cast back (4 + e): 38 and 14 with e = 2.
    """
    rows = padded_rows(model.vocab, t, assumptions.vocab_multiple) / t
    logits, whole = n * rows, float(e * n * model.hidden)
    forward_loss, backward_loss = (2 * e, 2 * e) if assumptions.fused_loss else (36 + e, 12 + e)
    norm = whole / assumptions.shards(t)
    forward_streams, backward_streams = (2, 3) if assumptions.fused_loss else (7, 4)  # one of F and two of B: the norm
    forward = PassWork(
        (_matmul(n, model.hidden, rows, e),),
        streamed_bytes=forward_loss * logits + 2 * norm,
        streams=forward_streams,
    )
    backward = PassWork(
        (_matmul(n, rows, model.hidden, e),),
        streamed_bytes=backward_loss * logits + 5 * norm,
        streams=backward_streams,
    )
    weight = PassWork((_matmul(model.hidden, n, rows, e),))
    if t > 1:
        if assumptions.sequence_parallel:
            forward += PassWork(gathers=1, gather_bytes=whole)
            backward += PassWork(gathers=1, gather_bytes=whole)
            if assumptions.regathers:
                weight += PassWork(gathers=1, gather_bytes=whole)
        else:
            backward += PassWork(gathers=2, gather_bytes=2 * whole)
    return StageWork(forward, backward, weight)


def stage_work(
    model: ModelSpec,
    stage: StageShape,
    tp: int,
    micro_batch_size: int,
    dtype: DType,
    assumptions: Assumptions,
    recomputation: Recomputation,
) -> StageWork:
    """Work of one stage for one microbatch on one tp rank."""
    n, e = micro_batch_size * model.sequence_length, element_bytes(dtype)
    work = StageWork(EMPTY, EMPTY, EMPTY)
    for _ in range(stage.layers):
        work += layer_work(model, tp, micro_batch_size, dtype, assumptions, recomputation)
    if stage.embeds:
        work += embedding_work(model, n, e, tp, assumptions)
    if stage.heads:
        work += head_work(model, n, e, tp, assumptions)
    return work
