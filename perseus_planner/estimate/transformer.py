"""Transformer: the shape of a decoder that is trained, from which its work follows in closed form.

The letters of the formulas in `works.py` are those of Narayanan et al., "Efficient large-scale language model
training on GPU clusters using Megatron-LM" (SC'21), appendix: s sequence, b microbatch, h hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError, shown
from perseus_planner.quantities import COUNT

if TYPE_CHECKING:
    from collections.abc import Sequence

CHOICES = {
    "positions": ("learned", "rotary", "alibi"),
    "recomputation": ("none", "selective", "full"),
    "attention": ("plain", "flash", "flash-causal"),
}
"""What the attributes of a `Transformer` that are words may be."""


@dataclass(frozen=True)
class Transformer:
    """A decoder, how much of it a microbatch is, and how a stage's GPUs share a layer.

    Attributes:
        layers: decoder layers.
        hidden: width of the residual stream.
        heads: attention heads.
        kv_heads: heads of keys and values; fewer than `heads` with grouped queries.
        head_size: width of a head.
        ffn: inner width of the feed-forward block.
        vocabulary: tokens; each GPU of a tensor group has its part, rounded up. Give the padded number where the
            training framework pads.
        sequence: tokens of a sequence; with learned positions also how many of those there are.
        microbatch: sequences of a microbatch.
        gated: the feed-forward block has three matrices (SwiGLU), not two.
        biases: linear layers have biases, and norms too (LayerNorm, not RMSNorm).
        tied: the language-model head uses the embedding's matrix.
        embedding_norm: a norm follows the embedding.
        positions: "learned", "rotary" or "alibi".
        tensor_degree: GPUs that share each layer as Megatron shards it, without sequence parallelism: heads, the
            feed-forward block and the vocabulary are divided, norms and residuals are not.
        recomputation: what the backward computes again (Korthikanti et al., "Reducing activation recomputation in large
            transformer models", 2022): "none"; "selective": the products of scores and values; "full": the layers.
        attention: "plain" writes the scores of all pairs of tokens to memory; "flash" keeps them on the chip, and
            computes them again in the backward (Dao et al., "FlashAttention", 2022); "flash-causal" moreover skips the
            pairs that a causal mask hides.
        element_bytes: bytes of an activation, 2 in bf16.

    Raises:
        UsageError: the values are no such shape; the text begins with the attribute's name.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    vocabulary: int
    sequence: int
    microbatch: int = 1
    gated: bool = False
    biases: bool = True
    tied: bool = True
    embedding_norm: bool = False
    positions: str = "learned"
    tensor_degree: int = 1
    recomputation: str = "none"
    attention: str = "flash-causal"
    element_bytes: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name), field.type)
        self._check_shares()

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch."""
        return self.sequence * self.microbatch

    @property
    def heads_per_gpu(self) -> int:
        """Attention heads of one GPU."""
        return self.heads // self.tensor_degree

    @property
    def kv_heads_per_gpu(self) -> int:
        """Heads of keys and values of one GPU; where there are fewer than GPUs, each has a copy of one."""
        return max(1, self.kv_heads // self.tensor_degree)

    @property
    def ffn_per_gpu(self) -> int:
        """Inner width of the feed-forward block on one GPU."""
        return self.ffn // self.tensor_degree

    @property
    def vocabulary_per_gpu(self) -> int:
        """Tokens of the vocabulary on one GPU, rounded up."""
        return -(-self.vocabulary // self.tensor_degree)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, whatever the tensor degree."""
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        embedding += self.sequence * self.hidden if self.positions == "learned" else 0
        norm = self.hidden * (2 if self.biases else 1)
        return self.layers * self._layer_parameters + embedding + norm * (2 if self.embedding_norm else 1)

    @property
    def _layer_parameters(self) -> int:
        inner = (self.heads + 2 * self.kv_heads) * self.head_size
        wide = self.ffn * (2 if self.gated else 1)
        weights = self.hidden * (inner + self.heads * self.head_size + wide + self.ffn)
        if not self.biases:
            return weights + 2 * self.hidden
        return weights + 4 * self.hidden + inner + wide + 2 * self.hidden

    def _check_shares(self) -> None:
        for name in ("heads", "ffn"):
            if getattr(self, name) % self.tensor_degree:
                raise UsageError(
                    f"tensor_degree: {self.tensor_degree} GPUs cannot share {name} of {getattr(self, name)}; "
                    "choose a degree that divides it"
                )
        if self.heads % self.kv_heads:
            raise UsageError(f"kv_heads: {self.kv_heads} does not divide heads of {self.heads}; choose one that does")
        if self.kv_heads % self.tensor_degree and self.tensor_degree % self.kv_heads:
            raise UsageError(
                f"tensor_degree: {self.tensor_degree} GPUs cannot share kv_heads of {self.kv_heads}; choose a degree "
                "that divides it, or a multiple of it"
            )


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each of so many stages: equal, and the first stages have one more where that does not come out even.

    Raises:
        UsageError: `stages` is no positive whole number, or more than there are layers.
    """
    if COUNT.accept(stages) is None or stages > layers:
        raise UsageError(f"stages is {shown(stages)}; give a whole number from 1 to the {layers} layers of the model")
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def checked_split(transformer: Transformer, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage, where `stages` is how many there are, or that list itself.

    Raises:
        UsageError: there are no such stages.
    """
    if isinstance(stages, int):
        return split_layers(transformer.layers, stages)
    for each in stages:
        if COUNT.accept(each) is None:
            raise UsageError(f"layers: {shown(each)} is no number of layers of a stage; give a whole number from 1")
    if sum(stages) != transformer.layers:
        raise UsageError(
            f"layers: the stages have {sum(stages)} in all and the model {transformer.layers}; give each stage its "
            "layers so that the sums agree"
        )
    return tuple(stages)


def _check(name: str, value: object, kind: object) -> None:
    if name in CHOICES and value not in CHOICES[name]:
        raise UsageError(f"{name}: {shown(value)} is unknown; give {' or '.join(CHOICES[name])}")
    if kind == "bool" and not isinstance(value, bool):
        raise UsageError(f"{name}: {shown(value)} is neither true nor false; give one of them")
    if kind == "int" and COUNT.accept(value) is None:
        raise UsageError(f"{name}: {shown(value)} is not {COUNT.wanted}")
