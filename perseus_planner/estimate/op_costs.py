"""FLOPs and bytes of each stage of a transformer on one GPU, in closed form.

FLOPs are those of matrix products, two for each multiply-add, as torch's `FlopCounterMode` and Narayanan et al. (SC'21,
appendix) count them, without norms, softmax, activations and loss. The counter also counts the pairs of tokens that a
causal mask hides, which "flash-causal" attention does not compute.

Kinds are those of a `Profile`: F; I and W, the gradients of inputs and of weights; B = I + W. A product of the forward
with a weight has one product of its size in I and one in W; a product without weights (attention) has two in I.
Recomputation is counted in I, which comes first.

Bytes are those that no arithmetic hides: of norms, activations, residual sums, rotary positions, embedding and loss,
and of attention scores if those are written to memory. Each of these operations reads its inputs and writes its outputs
once, in `element_bytes`; only the loss computes in float32. The factors of matrix products are loaded during their
arithmetic and are not counted, which is true for microbatches of some hundred tokens and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.errors import UsageError, shown
from perseus_planner.estimate.transformer import Transformer, check_split
from perseus_planner.gpu.simulated.model import GpuModel, OpCost
from perseus_planner.quantities import TIME

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KINDS = ("F", "B", "I", "W")
"""The kinds of computations of a stage, in the order of a profile."""
_FLOAT32 = 4


@dataclass(frozen=True)
class TransformerPipeline:
    """A transformer on the stages of a pipeline.

    Attributes:
        name: Name for tables.
        transformer: The model.
        split: Layers of each stage, as from `split_layers`.
        link_bytes_per_s: Bandwidth to the tensor group of a GPU. Traffic takes time at that bandwidth, at the power of
            waiting for memory. None if traffic takes no time, for example because a calibration contains it.

    Raises:
        UsageError: If the stages do not add up to the layers of the transformer, or the bandwidth is not above 0.
    """

    name: str
    transformer: Transformer
    split: tuple[int, ...]
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_split(self.transformer, self.split)
        if self.link_bytes_per_s is not None and TIME.accept(self.link_bytes_per_s) is None:
            raise UsageError(f"link: {shown(self.link_bytes_per_s)} is not a bandwidth; give one above 0")

    def op_costs(self, gpu: GpuModel) -> list[dict[str, OpCost]]:
        """Return the cost of each kind for one microbatch on one GPU of each stage; traffic counts as memory bytes."""
        costs = stage_op_costs(self.transformer, self.split)
        if self.link_bytes_per_s is None:
            return costs
        slower = gpu.bytes_per_s / self.link_bytes_per_s
        sent = stage_traffic(self.transformer, self.split)
        return [
            {kind: cost + OpCost(0, slower * traffic[kind]) for kind, cost in stage.items()}
            for stage, traffic in zip(costs, sent, strict=True)
        ]


def stage_op_costs(transformer: Transformer, stages: int | Sequence[int]) -> list[dict[str, OpCost]]:
    """Return the cost of each kind for one microbatch on one GPU of each stage.

    The first stage also has the embedding; the last has the final norm, the language-model head and the loss.

    Args:
        transformer: The model.
        stages: Number of stages, or the number of layers of each.

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    split = check_split(transformer, stages)
    layer, costs = _layer(transformer), []
    for stage, layers in enumerate(split):
        parts = {kind: layer[kind] * layers for kind in "FIW"}
        if stage == 0:
            parts = _added(parts, _embedding(transformer))
        if stage == len(split) - 1:
            parts = _added(parts, _head(transformer))
        costs.append({**parts, "B": parts["I"] + parts["W"]})
    return costs


def stage_traffic(transformer: Transformer, stages: int | Sequence[int]) -> list[dict[str, float]]:
    """Return the bytes that one GPU of each stage sends to its tensor group for one microbatch, for each kind.

    A layer of Megatron sums its output over the group twice in the forward, and the gradient of its input twice in the
    backward (Narayanan et al., section 2.3); embedding and head do so once. A ring sends 2 (t - 1) / t of the summed
    tensor. With sequence parallelism the volume is the same (Korthikanti et al., section 4.2.2).

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    split, degree = check_split(transformer, stages), transformer.tensor_degree
    one = 2 * (degree - 1) / degree * transformer.tokens * transformer.hidden * transformer.element_bytes
    again = 2 if transformer.recomputation == "full" else 0
    traffic = []
    for stage, layers in enumerate(split):
        forward = one * (2 * layers + (stage == 0))
        backward = one * ((2 + again) * layers + (stage == len(split) - 1))
        traffic.append({"F": forward, "B": backward, "I": backward, "W": 0.0})
    return traffic


def _layer(shape: Transformer) -> dict[str, OpCost]:
    linear, product = _linear_flops(shape), _attention_product_flops(shape)
    scores = _score_bytes(shape)
    core = OpCost(2 * product, 4 * scores)  # scores written, the softmax's read and write, read with the values
    forward = OpCost(linear, _passes(shape, residual=10, gated=3, plain=2, rotary=2)) + core
    backward = OpCost(linear, _passes(shape, residual=12, gated=5, plain=3, rotary=2))
    # Flash attention does not store the scores, so it computes them once more than plain attention.
    backward += OpCost((4 if shape.attention == "plain" else 5) * product, 7 * scores)
    again = {"none": OpCost(0, 0), "selective": core, "full": forward}[shape.recomputation]
    return {"F": forward, "I": backward + again, "W": OpCost(linear, 0)}


def _embedding(shape: Transformer) -> dict[str, OpCost]:
    element = shape.tokens * shape.hidden * shape.element_bytes
    learned = 3 if shape.positions == "learned" else 0  # two summands read, their sum written
    norm = 1 if shape.embedding_norm else 0
    return {
        "F": OpCost(0, element * (2 + learned + 2 * norm)),
        "I": OpCost(0, element * 3 * norm),
        "W": OpCost(0, element * (3 + learned)),  # gradients read, the rows of the table read and written
    }


def _head(shape: Transformer) -> dict[str, OpCost]:
    flops = 2 * shape.tokens * shape.hidden * shape.vocabulary_per_gpu
    element, logits = shape.tokens * shape.hidden * shape.element_bytes, shape.tokens * shape.vocabulary_per_gpu
    # Logits are read and written in float32, and once more by the logarithm of the softmax.
    forward = shape.element_bytes + 3 * _FLOAT32
    # The gradient of the losses is written; with the logarithms it is read and the gradient of the logits written,
    # which is then rounded.
    backward = 5 * _FLOAT32 + shape.element_bytes
    return {
        "F": OpCost(flops, 2 * element + forward * logits),
        "I": OpCost(flops, 3 * element + backward * logits),
        "W": OpCost(flops, 0),
    }


def _linear_flops(shape: Transformer) -> int:
    """Return the forward FLOPs of a layer's products with weights."""
    heads = 2 * shape.heads_per_gpu + 2 * shape.kv_heads_per_gpu  # queries, keys, values, output
    matrices = 3 if shape.gated else 2
    return 2 * shape.tokens * shape.hidden * (heads * shape.head_size + matrices * shape.ffn_per_gpu)


def _attention_product_flops(shape: Transformer) -> int:
    """Return the FLOPs of one attention product: queries with keys, or scores with values."""
    pairs = shape.sequence**2
    if shape.attention == "flash-causal":
        pairs = shape.sequence * (shape.sequence + 1) // 2
    return 2 * shape.microbatch * shape.heads_per_gpu * shape.head_size * pairs


def _score_bytes(shape: Transformer) -> int:
    """Return the bytes of one pass over the attention scores; 0 if they stay on the chip."""
    if shape.attention != "plain":
        return 0
    return shape.microbatch * shape.heads_per_gpu * shape.sequence**2 * shape.element_bytes


def _passes(shape: Transformer, residual: int, gated: int, plain: int, rotary: int) -> int:
    """Return the bytes of passes over the residual stream, the inside of the feed-forward block, queries and keys.

    Forward: two norms (2 each) and two residual sums (3 each); the activation reads one or two tensors and writes one.
    Backward: norms and activation also read their inputs.
    """
    inside = shape.ffn_per_gpu * (gated if shape.gated else plain)
    rotated = (shape.heads_per_gpu + shape.kv_heads_per_gpu) * shape.head_size if shape.positions == "rotary" else 0
    return shape.tokens * shape.element_bytes * (residual * shape.hidden + inside + rotary * rotated)


def _added(parts: Mapping[str, OpCost], more: Mapping[str, OpCost]) -> dict[str, OpCost]:
    return {kind: cost + more[kind] for kind, cost in parts.items()}
