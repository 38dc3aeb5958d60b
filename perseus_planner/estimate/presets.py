"""Published models by name, each with the source of its numbers; one sequence of the published length a microbatch."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from perseus_planner.estimate.transformer import Transformer

if TYPE_CHECKING:
    from collections.abc import Mapping


def _gpt3(layers: int, hidden: int, heads: int) -> Transformer:
    """Brown et al., "Language models are few-shot learners" (2020), table 2.1: layers, width, heads, 2048 tokens.

    The feed-forward block is four times as wide (section 2.1); the vocabulary is GPT-2's.
    """
    return Transformer(
        layers, hidden, heads, heads, head_size=hidden // heads, ffn=4 * hidden, vocabulary=50257, sequence=2048
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Transformer:
    """Llama team, "The Llama 3 herd of models" (2024), table 3: layers, width, FFN width, heads, 8 key/value heads.

    The vocabulary is that of the released checkpoints, 128256 (config.json), and 8192 tokens the length of most of the
    training (section 3.4.1).
    """
    return Transformer(
        layers,
        hidden,
        heads,
        kv_heads=8,
        head_size=hidden // heads,
        ffn=ffn,
        vocabulary=128256,
        sequence=8192,
        gated=True,
        biases=False,
        tied=False,
        positions="rotary",
    )


PRESETS: Mapping[str, Transformer] = MappingProxyType(
    {
        # The table's 24 heads of 128 are wider than its 2048; 16 heads of 128 give the 1.3 billion parameters.
        "gpt3-1.3b": _gpt3(24, 2048, 16),
        "gpt3-2.7b": _gpt3(32, 2560, 32),
        "gpt3-6.7b": _gpt3(32, 4096, 32),
        # The table's 5140 is no multiple of its 40 heads of 128; 5120 is.
        "gpt3-13b": _gpt3(40, 5120, 40),
        "gpt3-175b": _gpt3(96, 12288, 96),
        "llama3-8b": _llama3(32, 4096, 32, 14336),
        "llama3-70b": _llama3(80, 8192, 64, 28672),
        "llama3-405b": _llama3(126, 16384, 128, 53248),
        # BigScience, "BLOOM: A 176B-parameter open-access multilingual language model" (2022), table 3 and section 3.2:
        # ALiBi, a norm after the embedding, a vocabulary of 250680 padded to 250880.
        "bloom-176b": Transformer(
            layers=70,
            hidden=14336,
            heads=112,
            kv_heads=112,
            head_size=128,
            ffn=4 * 14336,
            vocabulary=250880,
            sequence=2048,
            embedding_norm=True,
            positions="alibi",
        ),
    }
)
"""Name -> the model."""
