"""What one GPU of a tensor group runs for one microbatch: matrix products, passes over memory,
traffic; and what that adds up to on each stage.

One list of operations serves all estimates: their FLOPs and bytes add up to op costs, and their
times on a GPU to those of the computations (`kernel_times.py`).

Kinds are those of a `Profile`: F; I and W, the gradients of inputs and of weights; B = I + W. A
product of the forward with a weight has one product of its size in I and one in W; a product
without weights (attention) has two in I. Recomputation is in I, which comes first.

FLOPs are those of matrix products, two for each multiply-add, as torch's `FlopCounterMode` and
Narayanan et al. (SC'21, appendix) count them, without norms, softmax, activations and loss. The
counter also counts the pairs of tokens that a causal mask hides, which "flash-causal" attention
does not compute.

Bytes are those that no arithmetic hides: of norms, activations, residual sums, rotary positions,
embedding and loss, and of attention scores if those are written to memory. Each of these operations
reads its inputs and writes its outputs once, in `element_bytes`; only the loss computes in float32.
The factors of matrix products are loaded during their arithmetic and are not counted, which is true
for microbatches of some hundred tokens and more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from perseus_planner.estimate.transformer import Transformer, check_split
from perseus_planner.gpu.simulated.model import OpCost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence


_FLOAT32 = 4
ACCUMULATED = 10.0
"""Bytes that adding the gradient of a weight in bf16 to its sum in float32 moves: 2 and 4 read,
4 written.
"""


class Product(NamedTuple):
    """Matrix products of one size."""

    m: float  #: Rows of the result
    n: float  #: Columns of the result
    k: float  #: Length of the sums
    number: float = 1  #: Number of such products that run as one
    #: Whether one factor is a weight, or the result its gradient; such products may run in FP8.
    weights: bool = True
    fused: bool = False  #: Whether neither factors nor result are in memory, as in flash attention

    @property
    def flops(self) -> float:
        """FLOPs, two for each multiply-add."""
        return 2 * self.m * self.n * self.k * self.number

    @property
    def aligned(self) -> bool:
        """Whether all rows of the matrices begin at multiples of 16 bytes, as tensor cores load
        them best.
        """
        return self.fused or (self.n % 8, self.k % 8) == (0, 0)


class Pass(NamedTuple):
    """Bytes that elementwise operations read and write, which no arithmetic hides."""

    bytes: float  #: Bytes


class Accumulation(NamedTuple):
    """Gradients of so many weights are added to their sums."""

    weights: float


class Exchange(NamedTuple):
    """Collectives in the tensor group."""

    bytes: float  #: Size of the tensor that is summed or gathered
    #: Number of all-reduces, or of pairs of reduce-scatter and all-gather; a half is one of the
    #: two.
    sums: float


Operation: TypeAlias = "Product | Pass | Accumulation | Exchange"
Operations: TypeAlias = "Mapping[str, tuple[Operation, ...]]"
"""Operations by kind: F, I and W."""


def layer_operations(shape: Transformer) -> Operations:
    """Return the operations of one layer."""
    linear, core = _linear(shape), _attention(shape)
    activation = shape.tokens * shape.hidden * shape.element_bytes
    traffic = (Exchange(activation, 2.0),) if shape.tensor_degree > 1 else ()
    # The gather before the products is repeated for the gradients of weights (Korthikanti et al.,
    # section 4.2.2).
    gathered = (Exchange(activation, 1.0),) if traffic and shape.sequence_parallel else ()
    forward: tuple[Operation, ...] = (
        *linear,
        *core,
        _passes(shape, residual=10, gated=3, plain=2, rotary=2),
        *traffic,
    )
    # Flash attention does not store the scores, so it computes them once more than plain attention.
    products = tuple(
        product
        for operation in core
        if isinstance(operation, Product)
        for product in (operation, operation)
    )
    if shape.attention != "plain":
        products += tuple(operation for operation in core if isinstance(operation, Product))[:1]
    backward = (
        *(Product(product.m, product.k, product.n) for product in linear),
        *products,
        _passes(shape, residual=12, gated=5, plain=3, rotary=2),
        Pass(7 * _score_bytes(shape)),
        *traffic,
    )
    again = {"none": (), "selective": core, "full": forward}[shape.recomputation]
    return {
        "F": forward,
        "I": (*again, *backward, *gathered),
        "W": (
            *(Product(product.k, product.n, product.m) for product in linear),
            Accumulation(_weights(shape)),
        ),
    }


def embedding_operations(shape: Transformer) -> Operations:
    """Return the operations of the embedding, on the first stage."""
    element = shape.tokens * shape.hidden * shape.element_bytes
    learned = 3 if shape.positions == "learned" else 0  # two summands read, their sum written
    norm = 1 if shape.embedding_norm else 0
    traffic = (Exchange(element, 1.0),) if shape.tensor_degree > 1 else ()
    return {
        "F": (Pass(element * (2 + learned + 2 * norm)), *traffic),
        "I": (Pass(element * 3 * norm),),
        "W": (
            Pass(element * (3 + learned)),
        ),  # gradients read, the rows of the table read and written
    }


def head_operations(shape: Transformer) -> Operations:
    """Return the operations of the final norm, the language-model head and the loss, on the last
    stage.
    """
    element, logits = (
        shape.tokens * shape.hidden * shape.element_bytes,
        shape.tokens * shape.vocabulary_per_gpu,
    )
    tokens, hidden, words = shape.tokens, shape.hidden, shape.vocabulary_per_gpu
    # Logits are read and written in float32, and once more by the logarithm of the softmax.
    forward = shape.element_bytes + 3 * _FLOAT32
    # The gradient of the losses is written; with the logarithms it is read and the gradient of the
    # logits written, which is then rounded.
    backward = 5 * _FLOAT32 + shape.element_bytes
    traffic = (Exchange(element, 1.0),) if shape.tensor_degree > 1 else ()
    # The head stays in bf16 where layers run in FP8.
    return {
        "F": (Product(tokens, words, hidden, weights=False), Pass(2 * element + forward * logits)),
        "I": (
            Product(tokens, hidden, words, weights=False),
            Pass(3 * element + backward * logits),
            *traffic,
        ),
        "W": (Product(hidden, words, tokens, weights=False), Accumulation(hidden * words)),
    }


def _linear(shape: Transformer) -> tuple[Product, ...]:
    """Return the forward's products with weights."""
    inner, keys_values = (
        shape.heads_per_gpu * shape.head_size,
        2 * shape.kv_heads_per_gpu * shape.head_size,
    )
    return (
        Product(shape.tokens, inner + keys_values, shape.hidden),
        Product(shape.tokens, shape.hidden, inner),
        Product(shape.tokens, (2 if shape.gated else 1) * shape.ffn_per_gpu, shape.hidden),
        Product(shape.tokens, shape.hidden, shape.ffn_per_gpu),
    )


def _weights(shape: Transformer) -> float:
    return sum(product.n * product.k for product in _linear(shape))


def _attention(shape: Transformer) -> tuple[Operation, ...]:
    """Return the products of queries with keys and of scores with values, and the passes over
    the scores.
    """
    count, length = shape.microbatch * shape.heads_per_gpu, shape.sequence
    fused = shape.attention != "plain"
    pairs = (length + 1) / 2 if shape.attention == "flash-causal" else length
    scores = Product(length, pairs, shape.head_size, count, weights=False, fused=fused)
    values = Product(length, shape.head_size, pairs, count, weights=False, fused=fused)
    # Scores written, the softmax's read and write, read with the values.
    return (scores, values, Pass(4 * _score_bytes(shape)))


def _score_bytes(shape: Transformer) -> int:
    """Return the bytes of one pass over the attention scores; 0 if they stay on the chip."""
    if shape.attention != "plain":
        return 0
    return shape.microbatch * shape.heads_per_gpu * shape.sequence**2 * shape.element_bytes


def _passes(shape: Transformer, residual: int, gated: int, plain: int, rotary: int) -> Pass:
    """Return passes over the residual stream, the inside of the feed-forward block, queries and
    keys.

    Forward: two norms (2 each) and two residual sums (3 each); the activation reads one or two
    tensors and writes one. Backward: norms and activation also read their inputs.
    """
    inside = shape.ffn_per_gpu * (gated if shape.gated else plain)
    rotated = (
        (shape.heads_per_gpu + shape.kv_heads_per_gpu) * shape.head_size
        if shape.positions == "rotary"
        else 0
    )
    stream = residual * shape.hidden / (shape.tensor_degree if shape.sequence_parallel else 1)
    return Pass(shape.tokens * shape.element_bytes * (stream + inside + rotary * rotated))


_Sum = TypeVar("_Sum", OpCost, float)


def stage_op_costs(
    transformer: Transformer, stages: int | Sequence[int]
) -> list[dict[str, OpCost]]:
    """Return the cost of each kind for one microbatch on one GPU of each stage.

    The first stage also has the embedding; the last has the final norm, the language-model head and
    the loss.

    Args:
        transformer: The model.
        stages: Number of stages, or the number of layers of each.

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    return _by_stage(transformer, stages, _cost)


def stage_traffic(transformer: Transformer, stages: int | Sequence[int]) -> list[dict[str, float]]:
    """Return the bytes that one GPU of each stage sends to its tensor group for one microbatch, for
    each kind.

    A layer of Megatron sums its output over the group twice in the forward, and the gradient of its
    input twice in the backward (Narayanan et al., section 2.3); embedding and head do so once. A
    ring sends 2 (t - 1) / t of the summed tensor. Sequence parallelism gathers once more in the
    backward (Korthikanti et al., section 4.2.2).

    Raises:
        UsageError: If the layers cannot be split in this way.
    """
    degree = transformer.tensor_degree

    def sent(operations: Iterable[Operation]) -> float:
        return sum(
            2 * (degree - 1) / degree * operation.bytes * operation.sums
            for operation in operations
            if isinstance(operation, Exchange)
        )

    return _by_stage(transformer, stages, sent)


def _by_stage(
    transformer: Transformer,
    stages: int | Sequence[int],
    measure: Callable[[Iterable[Operation]], _Sum],
) -> list[dict[str, _Sum]]:
    """Return the sum over the operations of each kind on each stage."""
    split = check_split(transformer, stages)
    layer, embedding, head = (
        {kind: measure(some) for kind, some in operations(transformer).items()}
        for operations in (layer_operations, embedding_operations, head_operations)
    )
    sums = []
    for stage, layers in enumerate(split):
        parts = {kind: layer[kind] * layers for kind in "FIW"}
        for there, more in ((stage == 0, embedding), (stage == len(split) - 1, head)):
            parts = {kind: parts[kind] + more[kind] for kind in "FIW"} if there else parts
        sums.append({**parts, "B": parts["I"] + parts["W"]})
    return sums


def _cost(operations: Iterable[Operation]) -> OpCost:
    flops = sum(operation.flops for operation in operations if isinstance(operation, Product))
    return OpCost(
        flops, sum(operation.bytes for operation in operations if isinstance(operation, Pass))
    )
