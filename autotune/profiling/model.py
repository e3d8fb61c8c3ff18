"""The decoder-only transformer that trials train, built stage by stage so that no rank holds the whole model."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from autotune.profiling.loss import cross_entropy
from autotune.profiling.sequence_parallel import SequenceParallel
from autotune.profiling.weight_grad import DeferredLinear, WeightGradStore
from autotune.space.model import ModelSpec, padded_vocab
from autotune.space.rope import rope_frequencies

__all__ = ["Block", "DeviceStages", "Rotary", "Stage", "StageContext", "stage_layers"]


@dataclass(frozen=True)
class StageContext:
    """What a stage needs to know beside the model.

    Attributes:
        store: takes the weight gradients of the stage's linear layers.
        tp: place in the tensor-parallel group; with more than one rank the stage's tensors at its borders are this
            rank's slice of the sequence.
        recompute: keep only the input of every block and run its forward again in the backward.
        loss_scale: factor of the summed token losses; one over the tokens of a step and replica gives their mean.
    """

    store: WeightGradStore
    tp: SequenceParallel = field(default_factory=SequenceParallel)
    recompute: bool = False
    loss_scale: float = 1.0


def stage_layers(layer_split: tuple[int, ...], stage: int) -> range:
    """Indices of the layers that `stage` holds.

    >>> stage_layers((2, 3, 3), 1)
    range(2, 5)
    """
    start = sum(layer_split[:stage])
    return range(start, start + layer_split[stage])


class Rotary:
    """Turns the leading `rotary_fraction` of every head by its position (rotate-half convention, as in GPT-NeoX).

    The tables are made once per device and dtype; they are no parameters, so they live outside the module tree.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.width = int(spec.head_dim * spec.rotary_fraction) // 2 * 2
        self.length = spec.sequence_length
        self.frequencies = rope_frequencies(self.width, spec.rope_theta, spec.rope_scaling)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (sequence, 1, width)."""
        key = (device, dtype)
        if key not in self._tables:
            frequencies = torch.tensor(self.frequencies, dtype=torch.float32, device=device)
            angles = torch.outer(torch.arange(self.length, device=device).float(), frequencies)
            angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
            self._tables[key] = (angles.cos().to(dtype), angles.sin().to(dtype))
        return self._tables[key]

    def __call__(self, x: Tensor) -> Tensor:
        """(batch, sequence, heads, head_dim) -> the same shape."""
        cos, sin = self.tables(x.device, x.dtype)
        turned, kept = x[..., : self.width], x[..., self.width :]
        left, right = turned.chunk(2, dim=-1)
        turned = turned * cos + torch.cat((-right, left), dim=-1) * sin
        return turned if kept.shape[-1] == 0 else torch.cat((turned, kept), dim=-1)


def _norm(spec: ModelSpec, width: int) -> nn.Module:
    if spec.norm == "layernorm":
        return nn.LayerNorm(width, eps=spec.norm_epsilon)
    return nn.RMSNorm(width, eps=spec.norm_epsilon)


class Attention(nn.Module):
    """Causal self-attention with grouped key and value heads."""

    def __init__(self, spec: ModelSpec, store: WeightGradStore) -> None:
        super().__init__()
        q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.head_dim, self.grouped = spec.head_dim, spec.kv_heads != spec.heads
        self.query = DeferredLinear(spec.hidden, q, spec.qkv_bias, store)
        self.key = DeferredLinear(spec.hidden, kv, spec.qkv_bias, store)
        self.value = DeferredLinear(spec.hidden, kv, spec.qkv_bias, store)
        self.output = DeferredLinear(q, spec.hidden, spec.attention_output_bias, store)
        self.query_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_epsilon) if spec.qk_norm else None
        self.key_norm = nn.RMSNorm(spec.head_dim, eps=spec.norm_epsilon) if spec.qk_norm else None

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """(batch, sequence, hidden) -> the same; of several tensor-parallel ranks each computes its heads' part."""
        q, k, v = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if rotary is not None:
            q, k = rotary(q), rotary(k)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=self.grouped
        )
        return self.output(mixed.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, store: WeightGradStore) -> None:
        super().__init__()
        self.gate = DeferredLinear(spec.hidden, spec.ffn_hidden, spec.mlp_bias, store)
        self.up = DeferredLinear(spec.hidden, spec.ffn_hidden, spec.mlp_bias, store)
        self.down = DeferredLinear(spec.ffn_hidden, spec.hidden, spec.mlp_bias, store)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GeluMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, spec: ModelSpec, store: WeightGradStore) -> None:
        super().__init__()
        self.approximate = "tanh" if spec.gelu_tanh else "none"
        self.up = DeferredLinear(spec.hidden, spec.ffn_hidden, spec.mlp_bias, store)
        self.down = DeferredLinear(spec.ffn_hidden, spec.hidden, spec.mlp_bias, store)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, hidden) -> the same."""
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, spec: ModelSpec, context: StageContext) -> None:
        super().__init__()
        self.attention_norm = _norm(spec, spec.hidden)
        self.attention = Attention(spec, context.store)
        self.mlp_norm = _norm(spec, spec.hidden)
        mlp = SwiGLU if spec.activation == "swiglu" else GeluMLP
        self.mlp = mlp(spec, context.store)
        self.tp = context.tp
        self.parallel, self.recompute = spec.parallel_residual, context.recompute

    def forward(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        """(batch, sequence or this rank's slice of it, hidden) -> the same."""
        if self.recompute and torch.is_grad_enabled():
            # There is no dropout, so no random state needs to be kept.
            return checkpoint(self._compute, x, rotary, use_reentrant=False, preserve_rng_state=False)
        return self._compute(x, rotary)

    def _compute(self, x: Tensor, rotary: Rotary | None) -> Tensor:
        tp = self.tp
        attended = tp.scatter_sum(self.attention(tp.gather(self.attention_norm(x)), rotary))
        if self.parallel:
            return x + attended + tp.scatter_sum(self.mlp(tp.gather(self.mlp_norm(x))))
        x = x + attended
        return x + tp.scatter_sum(self.mlp(tp.gather(self.mlp_norm(x))))


class Stage(nn.Module):
    """A contiguous part of the model: the first also embeds tokens, the last also computes the loss.

    Layers keep their number in the whole model, so a parameter has the same name in every partition.
    """

    def __init__(self, spec: ModelSpec, layer_split: tuple[int, ...], stage: int, context: StageContext) -> None:
        super().__init__()
        self.vocab, self.sequence, self.context = spec.vocab, spec.sequence_length, context
        self.is_first, self.is_last = stage == 0, stage == len(layer_split) - 1
        rows = padded_vocab(spec.vocab, context.tp.size)
        self.embedding = nn.Embedding(rows, spec.hidden) if self.is_first else None
        learned = self.is_first and spec.positions == "learned"
        self.positions = nn.Embedding(spec.max_positions, spec.hidden) if learned else None
        self.layers = nn.ModuleDict({str(i): Block(spec, context) for i in stage_layers(layer_split, stage)})
        self.norm = _norm(spec, spec.hidden) if self.is_last else None
        self.head = DeferredLinear(spec.hidden, rows, False, context.store) if self.is_last else None
        self.rotary = Rotary(spec) if spec.positions == "rope" else None

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """One microbatch.

        Args:
            x: (batch, sequence) token ids on the first stage, else (batch, sequence / tp, hidden).
            targets: (batch, sequence) token ids, on the last stage.

        Returns:
            (batch, sequence / tp, hidden); on the last stage the scaled sum of the token losses.
        """
        if self.embedding is not None:
            x = self._embed(x)
        for block in self.layers.values():
            x = block.forward(x, self.rotary)  # not by a call: no hooks, see `DeviceStages`
        if self.norm is None or self.head is None:
            return x
        assert targets is not None, "the last stage needs targets"
        tp = self.context.tp
        logits = self.head(tp.gather(self.norm(x)))
        losses = cross_entropy(logits, targets, self.vocab, tp.rank * logits.shape[-1], tp.group)
        return losses.sum() * self.context.loss_scale

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        tp = self.context.tp
        table = self.embedding.weight
        if isinstance(table, DTensor):
            # Each rank looks up the tokens of its rows of the table; for the others it adds zero.
            table = table.to_local()
            row = tokens - tp.rank * table.shape[0]
            held = (row >= 0) & (row < table.shape[0])
            x = tp.scatter_sum(F.embedding(row.where(held, 0), table) * held.unsqueeze(-1))
        else:
            x = F.embedding(tokens, table)
        if self.positions is not None:
            length = self.sequence // tp.size
            x = x + self.positions.weight[tp.rank * length : (tp.rank + 1) * length]
        return x


class DeviceStages(nn.Module):
    """All stages of one device: one module, so that data parallelism has one root and tied weights one owner.

    FSDP2 shards it and its blocks and hangs hooks on their calls, which gather, reduce and register themselves in every
    pass. Here that is done once a step, by hand, so passes run `forward` itself.
    """

    def __init__(self, stages: dict[int, Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})

    def forward(self, stage: int, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """One microbatch through one stage, see `Stage.forward`."""
        return self.stages[str(stage)](x, targets)

    def blocks(self) -> list[Block]:
        """Every transformer layer of the device, in model order."""
        return [block for block in self.modules() if isinstance(block, Block)]
