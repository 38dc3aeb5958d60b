"""A small GPT over bytes, as layers that the examples split into stages, and a text to train it
on.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # bytes


@dataclass(frozen=True)
class Size:
    """Size of the GPT."""

    layers: int = 4
    hidden: int = 64
    heads: int = 4
    sequence: int = 32


class Embedding(nn.Module):
    """Maps bytes (rows, sequence) to hidden states (rows, sequence, hidden)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, size.hidden)
        self.position = nn.Embedding(size.sequence, size.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) + self.position(positions)


class Layer(nn.Module):
    """Attention and a feed-forward network, each after a normalization and with a residual
    connection.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norms = nn.ModuleList(nn.LayerNorm(size.hidden) for _ in range(2))
        self.attend = nn.Linear(size.hidden, 3 * size.hidden)
        self.gather = nn.Linear(size.hidden, size.hidden)
        self.widen = nn.Linear(size.hidden, 4 * size.hidden)
        self.narrow = nn.Linear(4 * size.hidden, size.hidden)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.gather(self._attention(self.norms[0](states)))
        return states + self.narrow(functional.gelu(self.widen(self.norms[1](states))))

    def _attention(self, states: Tensor) -> Tensor:
        split = self.attend(states).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = split.unbind(2)
        return (
            functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )


class Head(nn.Module):
    """Maps hidden states to logits (rows, sequence, bytes)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.hidden)
        self.project = nn.Linear(size.hidden, VOCABULARY, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.project(self.norm(states))


def layers(size: Size, seed: int = 0) -> list[nn.Module]:
    """Return all layers in order; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return [Embedding(size), *(Layer(size) for _ in range(size.layers)), Head(size)]


def stage(size: Size, number: int, stages: int) -> nn.Sequential:
    """Return stage `number` of `stages`: its share of the layers, with the embedding first and
    the head last.
    """
    embedding, *inner, head = layers(size)
    begin, end = (len(inner) * each // stages for each in (number, number + 1))
    first, last = number == 0, number == stages - 1
    return nn.Sequential(
        *([embedding] if first else []), *inner[begin:end], *([head] if last else [])
    )


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next byte, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text() -> bytes:
    """Return sums such as "17 and 5 is 22.", in a shuffled order."""
    pairs = itertools.product(range(50), repeat=2)
    lines = (
        f"{a} and {b} is {a + b}."
        for a, b in sorted(pairs, key=lambda pair: (pair[0] * 31 + pair[1] * 17) % 101)
    )
    return " ".join(lines).encode()


def batch(step: int, rows: int, size: Size) -> tuple[Tensor, Tensor]:
    """Return the bytes of `rows` windows of the text, and the byte after each; equal steps give
    equal batches.
    """
    data = torch.frombuffer(bytearray(text()), dtype=torch.uint8).long()
    chosen = torch.randint(
        len(data) - size.sequence - 1, (rows,), generator=torch.Generator().manual_seed(step)
    )
    windows = torch.stack([data[begin : begin + size.sequence + 1] for begin in chosen])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
