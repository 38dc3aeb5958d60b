"""Real torch modules for the share of one GPU of each stage of a `Transformer`; needs torch.

They hold no communication: a shard computes with what it would have received.
"""

# ruff: noqa: TID253  # all of this file is torch; tests import it where that is installed

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from perseus_planner.engines.microbatch import StageOpCost, stage_op_cost
from perseus_planner.extensions.explore.transformer import Transformer

_OPTIONS: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}  # shapes without numbers


def scores_times_values(shape: Transformer, queries: Any, keys: Any, values: Any) -> Any:
    """Compute attention for tensors of shape (batch, heads, sequence, head size)."""
    if shape.attention != "plain":
        return torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values)[0]
    scores = (queries @ keys.transpose(-1, -2)) * shape.head_size**-0.5
    mask = torch.ones(scores.shape[-2:], device="meta", dtype=torch.bool).triu(1)
    return scores.masked_fill(mask, -1e4).softmax(-1) @ values


class Layer(nn.Module):
    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape
        linear = {"bias": shape.biases, **_OPTIONS}
        inner, kv = (
            heads * shape.head_size for heads in (shape.heads_per_gpu, shape.kv_heads_per_gpu)
        )
        norm = nn.LayerNorm if shape.biases else nn.RMSNorm
        self.norms = nn.ModuleList(norm(shape.hidden, **_OPTIONS) for _ in range(2))
        self.query, self.key, self.value = (
            nn.Linear(shape.hidden, width, **linear) for width in (inner, kv, kv)
        )
        self.out = nn.Linear(inner, shape.hidden, **linear)
        self.up = nn.Linear(shape.hidden, shape.ffn_per_gpu, **linear)
        self.gate = nn.Linear(shape.hidden, shape.ffn_per_gpu, **linear) if shape.gated else None
        self.down = nn.Linear(shape.ffn_per_gpu, shape.hidden, **linear)

    def forward(self, hidden: Any) -> Any:
        hidden = hidden + self.attention(self.norms[0](hidden))
        normed = self.norms[1](hidden)
        wide = (
            nn.functional.gelu(self.up(normed))
            if self.gate is None
            else nn.functional.silu(self.gate(normed))
        )
        return hidden + self.down(wide if self.gate is None else wide * self.up(normed))

    def attention(self, hidden: Any) -> Any:
        shape, repeated = self.shape, self.shape.heads_per_gpu // self.shape.kv_heads_per_gpu
        queries, keys, values = (
            each(hidden).unflatten(-1, (-1, shape.head_size)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        if shape.positions == "rotary":
            queries, keys = (each * 1.0 + each.roll(1, -1) * 1.0 for each in (queries, keys))
        keys, values = (each.repeat_interleave(repeated, 1) for each in (keys, values))
        if shape.recomputation == "selective":
            mixed = checkpoint(
                scores_times_values, shape, queries, keys, values, use_reentrant=False
            )
        else:
            mixed = scores_times_values(shape, queries, keys, values)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Stage(nn.Module):
    """Return `layers` layers, optionally with the embedding before and with head and loss after
    them.
    """

    def __init__(self, shape: Transformer, layers: int, *, first: bool, last: bool) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = (
            nn.Embedding(shape.vocabulary_per_gpu, shape.hidden, **_OPTIONS) if first else None
        )
        learned = first and shape.positions == "learned"
        self.positions = nn.Embedding(shape.sequence, shape.hidden, **_OPTIONS) if learned else None
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = nn.LayerNorm(shape.hidden, **_OPTIONS) if last else None
        self.head = (
            nn.Linear(shape.hidden, shape.vocabulary_per_gpu, bias=False, **_OPTIONS)
            if last
            else None
        )

    def forward(self, hidden: Any) -> Any:
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        if self.positions is not None:
            hidden = hidden + self.positions(torch.arange(self.shape.sequence, device="meta"))
        for layer in self.layers:
            full = self.shape.recomputation == "full"
            hidden = checkpoint(layer, hidden, use_reentrant=False) if full else layer(hidden)
        if self.head is None:
            return hidden
        labels = torch.zeros(self.shape.tokens, device="meta", dtype=torch.long)
        return nn.functional.cross_entropy(
            self.head(self.norm(hidden)).float().flatten(0, 1), labels
        )


def counted_flops(shape: Transformer, split: tuple[int, ...]) -> list[dict[str, int]]:
    """Return the FLOPs by kind of each stage of `split`, as torch counts them."""
    stages = []
    for number, layers in enumerate(split):
        stage = Stage(shape, layers, first=number == 0, last=number == len(split) - 1)
        forward, backward = _counted(stage)
        inner = [
            weight
            for part in (stage.layers, stage.head)
            if part is not None
            for weight in part.parameters()
        ]
        for weight in inner:
            weight.requires_grad_(False)
        _, inputs = _counted(stage)
        stages.append({"F": forward, "B": backward, "I": inputs, "W": backward - inputs})
    return stages


def counted_costs(shape: Transformer, split: tuple[int, ...]) -> list[StageOpCost]:
    """Return what the planner counts of each stage of `split`."""
    costs = []
    for number, layers in enumerate(split):
        first, last = number == 0, number == len(split) - 1
        stage = Stage(shape, layers, first=first, last=last)
        loss = torch.sum if last else None  # of what is the loss already
        costs.append(stage_op_cost(stage, _given(stage), loss, first=first))
    return costs


def _given(stage: Stage) -> Any:
    size = (stage.shape.microbatch, stage.shape.sequence)
    if stage.embedding is not None:
        return torch.zeros(size, device="meta", dtype=torch.long)
    return torch.zeros((*size, stage.shape.hidden), requires_grad=True, **_OPTIONS)


def _counted(stage: Stage) -> tuple[int, int]:
    """Return the FLOPs of a forward and of its backward for all gradients."""
    given = _given(stage)
    # torch's checkpoints end when the last tensor that is needed is there; Megatron's compute all
    # of the layer.
    with FlopCounterMode(display=False) as forward, set_checkpoint_early_stop(False):
        result = stage(given)
    with FlopCounterMode(display=False) as backward:
        result.backward(torch.zeros_like(result))
    return forward.get_total_flops(), backward.get_total_flops()
