"""The dimensions of a decoder-only transformer, from which `op_costs.py` computes FLOPs and
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.units import COUNT

CHOICES = {
    "positions": ("learned", "rotary", "alibi"),
    "recomputation": ("none", "selective", "full"),
    "attention": ("plain", "flash", "flash-causal"),
    "precision": ("bf16", "fp16", "fp8"),
}
"""Values of the text attributes of a `Transformer`."""


@dataclass(frozen=True)
class Transformer:
    """A decoder, the size of a microbatch, and how the GPUs of a stage share a layer.

    Raises:
        UsageError: If the values contradict each other; the text begins with the attribute's name.
    """

    layers: int  #: Decoder layers
    hidden: int  #: Width of the residual stream
    heads: int  #: Attention heads
    kv_heads: int  #: Heads of keys and values; fewer than `heads` with grouped queries
    head_size: int  #: Width of a head
    ffn: int  #: Inner width of the feed-forward block
    #: Size of the vocabulary; give the padded size if the training framework pads. The GPUs of a
    #: tensor group share it, rounded up.
    vocabulary: int
    sequence: int  #: Tokens of a sequence; with learned positions also the number of positions
    microbatch: int = 1  #: Sequences of a microbatch
    #: Whether the feed-forward block has three matrices (SwiGLU) instead of two.
    gated: bool = False
    biases: bool = True  #: Whether linear layers and norms have biases (LayerNorm, not RMSNorm)
    tied: bool = True  #: Whether the language-model head uses the matrix of the embedding
    embedding_norm: bool = False  #: Whether a norm follows the embedding
    positions: str = "learned"  #: "learned", "rotary" or "alibi"
    #: Number of GPUs that share each layer as in Megatron: heads, feed-forward block and vocabulary
    #: are divided.
    tensor_degree: int = 1
    #: Whether these GPUs divide norms and residuals too, by tokens (Korthikanti et al., 2022).
    sequence_parallel: bool = False
    #: Whether what these GPUs send is sent in pieces during the layers' matrix products.
    overlap_traffic: bool = False
    #: What the backward recomputes (Korthikanti et al., "Reducing activation recomputation in large
    #: transformer models", 2022): "none", "selective" (the products of scores and values) or "full"
    #: (the layers).
    recomputation: str = "none"
    #: "plain" writes the scores of all pairs of tokens to memory; "flash" keeps them on the chip,
    #: and recomputes them in the backward (Dao et al., "FlashAttention", 2022); "flash-causal" also
    #: skips the pairs that a causal mask hides.
    attention: str = "flash-causal"
    element_bytes: int = 2  #: Bytes of an activation, 2 in bf16
    #: Of the layers' products with weights; "fp8" leaves attention and head in bf16.
    precision: str = "bf16"

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
        """Heads of keys and values of one GPU; if there are fewer heads than GPUs, each GPU has
        a copy of one.
        """
        return max(1, self.kv_heads // self.tensor_degree)

    @property
    def ffn_per_gpu(self) -> int:
        """Inner width of the feed-forward block on one GPU."""
        return self.ffn // self.tensor_degree

    @property
    def vocabulary_per_gpu(self) -> int:
        """Size of the vocabulary on one GPU, rounded up."""
        return -(-self.vocabulary // self.tensor_degree)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model on all GPUs."""
        embedding = self.vocabulary * self.hidden * (1 if self.tied else 2)
        embedding += self.sequence * self.hidden if self.positions == "learned" else 0
        norm = self.hidden * (2 if self.biases else 1)
        return (
            self.layers * self._layer_parameters
            + embedding
            + norm * (2 if self.embedding_norm else 1)
        )

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
                    f"tensor_degree: {self.tensor_degree} GPUs cannot share {name} of "
                    f"{getattr(self, name)}; choose a degree that divides it"
                )
        if self.heads % self.kv_heads:
            raise UsageError(
                f"kv_heads: {self.kv_heads} does not divide heads of {self.heads}; choose one that "
                "does"
            )
        if self.kv_heads % self.tensor_degree and self.tensor_degree % self.kv_heads:
            raise UsageError(
                f"tensor_degree: {self.tensor_degree} GPUs cannot share kv_heads of "
                f"{self.kv_heads}; choose a degree that divides it, or a multiple of it"
            )


def split_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, as even as possible; the first stages have one
    more if needed.

    Raises:
        UsageError: If `stages` is not a whole number from 1 to `layers`.
    """
    if COUNT.accept(stages) is None or stages > layers:
        raise UsageError(
            f"stages is {shown(stages)}; give a whole number from 1 to the {layers} layers of the "
            "model"
        )
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def check_split(transformer: Transformer, stages: int | Sequence[int]) -> tuple[int, ...]:
    """Return the number of layers of each stage.

    Args:
        transformer: The model.
        stages: Number of stages, which share the layers evenly, or the number of layers of each.

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    if isinstance(stages, int):
        return split_layers(transformer.layers, stages)
    for layers in stages:
        if COUNT.accept(layers) is None:
            raise UsageError(
                f"layers: {shown(layers)} is not a number of layers; give a whole number from 1"
            )
    if sum(stages) != transformer.layers:
        raise UsageError(
            f"layers: the stages have {sum(stages)} in total, but the model has "
            f"{transformer.layers}; change the stages so that the sums agree"
        )
    return tuple(stages)


def _check(name: str, value: object, kind: object) -> None:
    if name in CHOICES and value not in CHOICES[name]:
        raise UsageError(f"{name}: {shown(value)} is unknown; give {' or '.join(CHOICES[name])}")
    if kind == "bool" and not isinstance(value, bool):
        raise UsageError(f"{name}: {shown(value)} is neither true nor false; give one of them")
    if kind == "int":
        COUNT.check(value, name)
