"""What one GPU of a tensor group runs for one microbatch: matrix products, passes over memory,
traffic; what that adds up to on each stage; and how long it takes on a system.

One list of operations serves all estimates: their FLOPs and bytes add up to op costs, and their
times on a GPU to those of the computations, by phases.

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

A matrix product takes the longer of its arithmetic and of loading its factors; elementwise
operations take their bytes at the bandwidth of the memory; a ring of t GPUs sends 2 (t - 1) / t of
a tensor to sum it. Where GPUs of several nodes share a layer, they sum in each node first and then
between nodes; tokens go to each node of their experts once, and there to the experts. A layer takes
the longer of its kernels and of the host that launches them.

A system is GPUs, the links between them, and how fast the kernels of training run there, by
`gpus.yaml` of `perseus_planner/gpu/simulated`, which also says what its numbers are fitted to.

System files hold measured kernels, as `planner calibrate --kernels` writes them:

    format: perseus-planner/system
    version: 1
    gpu: h100-sxm
    node_bytes_per_s: 200.0e+9
    kernels:
    - {hidden: 2048, heads: 16, vocabulary: 50304, sequence: 2048, microbatch: 2,
       layer_forward_s: 0.0021, layer_backward_s: 0.0042, head_s: 0.0055}

Numbers that a file leaves out are those of the catalogue.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import yaml

from perseus_planner.base.documents import read_document
from perseus_planner.base.errors import GpuError, UsageError, did_you_mean, shown
from perseus_planner.base.fields import dump
from perseus_planner.base.files import write_file
from perseus_planner.base.units import COUNT, TIME
from perseus_planner.extensions.explore.transformer import Transformer, transformer_of
from perseus_planner.gpu.simulated.model import CATALOG, GPUS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.gpu.simulated.model import GpuModel, Load


def kernel_key(shape: Transformer) -> Transformer:
    """Return what a measured time of the kernels of a model is for: all of a layer's shape, and how
    GPUs share and run it, without what does not change a layer or head.
    """
    alike = not (shape.dense_layers or shape.global_every)
    return replace(
        shape,
        layers=1 if alike else shape.layers,
        tied=True,
        gradient_bytes=4,
        embedding_norm=False,
    )


class KernelTimes(NamedTuple):
    """Measured seconds at the top clock on each GPU of a tensor group, traffic in the group
    included.

    The backward of a layer includes its recomputation; the head includes embedding and loss.
    """

    layer_forward_s: float
    layer_backward_s: float
    head_s: float


@dataclass(frozen=True)
class System:
    """GPUs, their links, and the speed of kernels."""

    gpu: GpuModel  #: Model of each GPU: clocks, memory bandwidth, power
    memory_bytes: float  #: Device memory of each GPU
    product_flops_per_cycle: float  #: bf16 FLOPs of long matrix products, over all SMs
    fp8_speedup: float  #: How many times as fast products in FP8 and MXFP8 are; 1 without
    fp4_speedup: float  #: How many times as fast products in NVFP4 are; 1 without
    fused_share: float  #: Speed of long flash attention, as a share of that of products
    #: Keys per query at which flash attention has half of that speed.
    fused_half_keys: float
    #: Power of flash attention above static power, as a share of that of products.
    fused_activity: float
    #: The same, of queries with at least `fused_long_keys` keys.
    fused_long_activity: float
    fused_long_keys: float  #: Keys per query from which attention counts as long
    grouped_share: float  #: Speed of the products of experts, as a share of that of others
    #: Speed of products with a size that is no multiple of 8, as a share of that of others.
    unaligned_share: float
    memory_share: float  #: Share of the memory's bandwidth that kernels reach
    #: How often elementwise kernels of layers and head pass over their tensors, as a multiple of
    #: the fewest.
    passes: float
    launch_s: float  #: Fixed time of a kernel
    host_forward_s: float  #: Time in which the host launches the forward of a layer
    host_backward_s: float  #: Time in which the host launches the backward of a layer
    host_exchange_s: float  #: Time in which the host launches a collective
    exchange_s: float  #: Fixed time of a collective of two GPUs of a node
    exchange_gpu_s: float  #: Fixed time that each further GPU adds
    link_bytes_per_s: float  #: Bandwidth of a GPU to many others of its node, each way
    link_lost: float  #: Share of it that is lost in a group of t GPUs, times t
    dispatch_share: float  #: Share of the bandwidth that an all-to-all of experts reaches
    transfer_bytes_per_s: float  #: Bandwidth of a transfer from one stage to the next in a node
    gpus_per_node: int  #: GPUs that NVLink joins: of a node, or of a rack
    node_bytes_per_s: float  #: Bandwidth of a node's network, each way
    network_s: float  #: Fixed time of a message between nodes
    optimizer_bytes: float  #: Bytes that the optimizer's step reads and writes for a parameter
    node_overhead_w: float  #: Power of a node beside its GPUs, watts: the least
    node_overhead_most_w: float  #: The most
    #: Measured times, which replace those of the model.
    kernels: Mapping[Transformer, KernelTimes] = field(default_factory=dict)

    @property
    def top_mhz(self) -> float:
        """Highest clock of the GPUs."""
        return float(self.gpu.clocks_mhz[0])

    def limited(self, power_limit_w: float | None) -> System:
        """Return the system with this power limit on each GPU, watts; itself for None.

        Raises:
            GpuError: If the GPU cannot have this limit.
        """
        if power_limit_w is None:
            return self
        least_w, most_w = self.gpu.power_limits_w
        if not least_w <= power_limit_w <= most_w:
            raise GpuError(
                f"{self.gpu.name}: a power limit of {power_limit_w:g} W is out of range; give one "
                f"from {least_w:g} to {most_w:g} W"
            )
        return replace(self, gpu=replace(self.gpu, power_limit_w=power_limit_w))


def with_link(system: System, bytes_per_s: float) -> System:
    """Return the system with this bandwidth of a GPU to its tensor group; infinite if traffic takes
    no time.

    Raises:
        UsageError: If it is not above 0.
    """
    if math.isinf(bytes_per_s):
        return replace(system, link_bytes_per_s=math.inf, exchange_s=0.0, exchange_gpu_s=0.0)
    if TIME.accept(bytes_per_s) is None:
        raise UsageError(f"link: {shown(bytes_per_s)} is not a bandwidth; give one above 0")
    return replace(system, link_bytes_per_s=bytes_per_s, link_lost=0.0)


NUMBERS = tuple(each.name for each in fields(System) if each.name not in ("gpu", "kernels"))
"""The attributes that are numbers, as a system file has them."""


def _system(
    name: str,
    *,
    memory_mib: float,
    link_gb_per_s: float,
    link_share: float,
    node_gb_per_s: float,
    network_share: float,
    overhead_w: tuple[float, float],
    **numbers: Any,
) -> System:
    """Return the system of one kind of GPU, as `gpus.yaml` says of it.

    Args:
        name: The GPU.
        memory_mib: Device memory that nvidia-smi reports, MiB.
        link_gb_per_s: Bandwidth of a GPU to its node, GB/s each way, by the datasheet.
        link_share: Share of it that many GPUs reach.
        node_gb_per_s: Bandwidth of a node's network, GB/s each way, by the datasheet.
        network_share: Share of it that is reached.
        overhead_w: The least and the most of a node's power beside its GPUs, watts.
        numbers: Other numbers of the system.
    """
    gpu = CATALOG[name]
    return System(
        gpu=gpu,
        memory_bytes=memory_mib * 2**20,
        product_flops_per_cycle=gpu.flops_per_cycle,
        memory_share=gpu.memory_share,
        link_bytes_per_s=link_share * link_gb_per_s * 1e9,
        node_bytes_per_s=network_share * node_gb_per_s * 1e9,
        node_overhead_w=overhead_w[0],
        node_overhead_most_w=overhead_w[1],
        **numbers,
    )


SYSTEMS: Mapping[str, System] = MappingProxyType(
    {name: _system(name, **row["system"]) for name, row in GPUS.items()}
)
"""The systems by the name of their GPU."""


def system_of(gpu: str) -> System:
    """Return the system of a kind of GPU.

    Raises:
        GpuError: If there is none.
    """
    name = gpu.removeprefix("simulated:")
    if name not in SYSTEMS:
        advice = did_you_mean(gpu, SYSTEMS) or f"choose one of: {', '.join(SYSTEMS)}"
        raise GpuError(f"--gpu: there is no GPU {gpu!r}; {advice}")
    return SYSTEMS[name]


_SHOWN = ("tensor_degree", "microbatch", "recomputation")
_OPTIONAL = tuple(
    each.name
    for each in fields(Transformer)
    if each.default is not MISSING and each.name not in _SHOWN
)
_FORMAT = "perseus-planner/system"
_VERSION = 1
_DIMENSIONS = ("hidden", "heads", "vocabulary", "sequence")
_TIMES = KernelTimes._fields


def save_system(system: System, path: Path, measured: tuple[str, ...] = ()) -> None:
    """Write a system file with the measured numbers and kernels.

    Raises:
        UsageError: If the file cannot be written.
    """
    view = system_view(system, measured)
    content = {"format": _FORMAT, "version": _VERSION, "gpu": view["gpu"], **view["measured"]}
    content["kernels"] = view["kernels"]
    write_file(path, yaml.safe_dump(content, sort_keys=False), UsageError)


def system_view(system: System, measured: tuple[str, ...]) -> dict[str, Any]:
    """Return the numbers that were measured of a system, and its kernels with their times, for
    JSON.
    """
    return {
        "gpu": system.gpu.name,
        "measured": {name: getattr(system, name) for name in measured},
        "kernels": [
            {**dump(key, optional=_OPTIONAL), **times._asdict()}
            for key, times in system.kernels.items()
        ],
    }


def load_system(path: Path) -> System:
    """Read a system file.

    Raises:
        UsageError: If it cannot be read or is not valid; the text names file and line.
        GpuError: If there is no such GPU.
    """
    document = read_document(path, _FORMAT, _VERSION, ("gpu",), ("kernels", *NUMBERS), UsageError)
    system = system_of(document.text("gpu"))
    # A file may change any number, and leaves all others as the catalogue has them.
    changes = {
        name: document.number(name, COUNT if name == "gpus_per_node" else TIME)
        for name in NUMBERS
        if name in document.values
    }
    kernels = {}
    if document.values.get("kernels", []) != []:
        names = [dimension.name for dimension in fields(Transformer)]
        for entry in document.sections("kernels", (*_DIMENSIONS, *_TIMES), names):
            # Kernels are found by the shape that they were measured for.
            times = KernelTimes(*(entry.number(name, TIME) for name in _TIMES))
            try:
                key = transformer_of({k: v for k, v in entry.values.items() if k not in _TIMES})
            except UsageError as error:
                raise entry.refusal("layer_forward_s", f"{error}") from None
            kernels[kernel_key(key)] = times
    return replace(system, **changes, kernels=kernels)


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
    #: Keys of each query, of attention whose factors and results stay on the chip; 0 of others.
    keys: float = 0.0
    grouped: bool = False  #: Whether a kernel has the products of several experts

    @property
    def flops(self) -> float:
        """FLOPs, two for each multiply-add."""
        return 2 * self.m * self.n * self.k * self.number

    @property
    def fused(self) -> bool:
        """Whether neither factors nor result are in memory, as in flash attention."""
        return self.keys > 0

    @property
    def aligned(self) -> bool:
        """Whether all rows of the matrices begin at multiples of 16 bytes, as tensor cores load
        them best.
        """
        return self.fused or self.grouped or (self.n % 8, self.k % 8) == (0, 0)


class Pass(NamedTuple):
    """Bytes that elementwise operations read and write, which no arithmetic hides."""

    bytes: float  #: Bytes


class Accumulation(NamedTuple):
    """Gradients of so many weights are added to their sums."""

    weights: float


class Exchange(NamedTuple):
    """Collectives in a group of GPUs."""

    #: Size of the tensor that is summed or gathered; of an all-to-all or ring what a GPU sends
    bytes: float
    #: Number of all-reduces, or of pairs of reduce-scatter and all-gather; a half is one of the
    #: two.
    sums: float
    group: str = "tensor"  #: "tensor", "context" (a ring) or "expert" (an all-to-all)


Operation: TypeAlias = "Product | Pass | Accumulation | Exchange"
Operations: TypeAlias = "Mapping[str, tuple[Operation, ...]]"
"""Operations by kind: F, I and W."""


def layer_operations(shape: Transformer) -> Operations:
    """Return the operations of one layer; of layers that differ the mean."""
    # Products with weights, whose kinds follow from those of the forward.
    linear = (*_linear(shape), *_expert_products(shape))
    core = _attention(shape)
    activation = shape.tokens * shape.hidden * shape.element_bytes
    # Two sums in each direction, after attention and after the feed-forward block.
    traffic = (Exchange(activation, 2.0),) if shape.tensor_degree > 1 else ()
    # The gather before the products is repeated for the gradients of weights (Korthikanti et al.,
    # section 4.2.2).
    gathered = (Exchange(activation, 1.0),) if traffic and shape.sequence_parallel else ()
    routed = _dispatches(shape)
    passed_on = _ring(shape)
    forward: tuple[Operation, ...] = (
        *linear,
        *core,
        _passes(shape, residual=10, gated=3, plain=2, rotary=2, moved=6),
        *_casts(linear, shape, columns=False),
        *traffic,
        *routed,
        *passed_on,
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
    # The gradient of the inputs has the product of the same size, with its sides exchanged.
    backward = (
        *(product._replace(n=product.k, k=product.n) for product in linear),
        *products,
        _passes(shape, residual=12, gated=5, plain=3, rotary=2, moved=6),
        *_casts(linear, shape, columns=True),
        Pass(7 * _score_bytes(shape)),
        *traffic,
        *routed,
        *passed_on,
        *passed_on,
    )
    # What is recomputed runs before the gradients that need it.
    again = {"none": (), "selective": core, "full": forward}[shape.recomputation]
    return {
        "F": forward,
        "I": (*again, *backward, *gathered),
        # The gradient of a weight has the same size again, and is added to its sum.
        "W": (
            *(product._replace(m=product.k, n=product.n, k=product.m) for product in linear),
            Accumulation(sum(product.n * product.k * product.number for product in linear)),
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
    # The vocabulary is shared by the tensor group, so each GPU has its part of the logits.
    element = shape.tokens * shape.hidden * shape.element_bytes
    logits = shape.tokens * shape.vocabulary_per_gpu
    tokens = shape.tokens
    hidden = shape.hidden
    words = shape.vocabulary_per_gpu
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
    """Return the forward's products with weights that a tensor group shares."""
    degree = shape.tensor_degree
    copied = 0.0
    if not shape.kv_latent:  # GPUs beyond the heads of keys and values have copies of them
        copied = 2 * shape.head_size * (shape.kv_heads_per_gpu - shape.kv_heads / degree)
    products = []
    for number_of_product, (n, k, number) in enumerate(shape.linear_widths):
        # The first product of a pair is divided by columns, the second by rows, as in Megatron.
        if k == shape.hidden and n != shape.hidden:
            products.append(
                Product(
                    shape.tokens, n / degree + (copied if number_of_product == 0 else 0), k, number
                )
            )
        else:
            products.append(Product(shape.tokens, n, k / degree, number))
    return tuple(products)


def _expert_products(shape: Transformer) -> tuple[Product, ...]:
    """Return the router's product and those of the experts of a GPU, which tokens of all GPUs of
    the expert group meet.
    """
    if not shape.experts:
        return ()
    # Tokens are divided among the tensor group before they are sent to experts.
    tokens = shape.tokens / shape.tensor_degree
    share = shape.expert_share
    # Each expert of a GPU meets its share of the tokens of the whole expert group.
    rows = tokens * shape.experts_used * shape.expert_degree / shape.experts
    local = share * shape.experts / shape.expert_degree
    wide = (2 if shape.gated else 1) * shape.expert_ffn
    return (
        # The router is as wide as there are experts, and stays in bf16.
        Product(tokens, shape.experts, shape.hidden, share, weights=False),
        Product(rows, wide, shape.hidden, local, grouped=True),
        Product(rows, shape.hidden, shape.expert_ffn, local, grouped=True),
    )


def _dispatches(shape: Transformer) -> tuple[Exchange, ...]:
    """Return the all-to-alls before and after experts: what a GPU sends of its tokens."""
    if shape.expert_degree == 1:
        return ()
    sent = shape.tokens / shape.tensor_degree * shape.hidden * shape.element_bytes
    return (Exchange(sent, 2.0 * shape.expert_share, "expert"),)


def _ring(shape: Transformer) -> tuple[Exchange, ...]:
    """Return the passing on of keys and values in the context group (Liu et al., "Ring attention
    with blockwise transformers", 2023).
    """
    if shape.context_degree == 1:
        return ()
    width = 2 * shape.kv_heads_per_gpu * shape.head_size
    if shape.kv_latent:
        width = 2 * shape.heads_per_gpu * shape.head_size
    sent = shape.tokens * width * shape.element_bytes * (shape.context_degree - 1)
    return (Exchange(sent, 1.0, "context"),)


def _casts(products: Iterable[Product], shape: Transformer, *, columns: bool) -> tuple[Pass, ...]:
    """Return the pass that makes the inputs of the products narrow, or the gradients of their
    results: read once, and written by rows and by columns.
    """
    if shape.narrow_bytes is None:
        return ()
    moved = shape.element_bytes + 2 * shape.narrow_bytes
    return (
        Pass(
            sum(
                moved * product.m * (product.n if columns else product.k) * product.number
                for product in products
                if product.weights
            )
        ),
    )


def _attention(shape: Transformer) -> tuple[Operation, ...]:
    """Return the products of queries with keys and of scores with values, and the passes over
    the scores.
    """
    count = shape.microbatch * shape.heads_per_gpu
    rows = shape.sequence / shape.context_degree
    pairs = _pairs(shape)
    # A ring attends to the keys of one GPU at a time.
    keys = 0.0 if shape.attention == "plain" else pairs / shape.context_degree
    width = shape.head_size + shape.rotary_size
    scores = Product(rows, pairs, width, count, weights=False, keys=keys)
    values = Product(rows, shape.head_size, pairs, count, weights=False, keys=keys)
    # Scores written, the softmax's read and write, read with the values.
    return (scores, values, Pass(4 * _score_bytes(shape)))


def _pairs(shape: Transformer) -> float:
    """Return the tokens that a token attends to and that are computed: the mean over tokens and
    layers.
    """
    length = shape.sequence
    if shape.attention != "flash-causal":
        return length
    every = (length + 1) / 2
    window = min(shape.window or length, length)
    inside = (window + 1) / 2 if shape.chunked else window - window * (window - 1) / (2 * length)
    whole = shape.layers // shape.global_every / shape.layers if shape.global_every else 0.0
    return whole * every + (1 - whole) * inside


def _score_bytes(shape: Transformer) -> int:
    """Return the bytes of one pass over the attention scores; 0 if they stay on the chip."""
    if shape.attention != "plain":
        return 0
    pairs = shape.sequence**2 // shape.context_degree
    return shape.microbatch * shape.heads_per_gpu * pairs * shape.element_bytes


def _passes(
    shape: Transformer, residual: int, gated: int, plain: int, rotary: int, moved: int
) -> Pass:
    """Return passes over the residual stream, the inside of the feed-forward blocks, queries and
    keys, and the tokens on their way to experts.

    Forward: two norms (2 each) and two residual sums (3 each); the activation reads one or two
    tensors and writes one; tokens are copied for their experts, sorted on arrival, and summed.
    Backward: norms and activation also read their inputs.
    """
    # Tokens of experts are divided, and each is sent to several of them.
    used = shape.experts_used / shape.tensor_degree
    share = shape.expert_share
    inside = (1 - share) * shape.ffn_per_gpu + share * (
        shape.shared_ffn / shape.tensor_degree + used * shape.expert_ffn
    )
    # Rotary positions turn queries and keys, or the rotary part of them.
    rotated = (
        (shape.heads_per_gpu + shape.kv_heads_per_gpu) * (shape.rotary_size or shape.head_size)
        if shape.positions == "rotary"
        else 0
    )
    # Sequence parallelism divides norms and residuals.
    stream = residual * shape.hidden / shape.stream_degree
    widths = stream + inside * (gated if shape.gated else plain) + rotary * rotated
    return Pass(shape.tokens * shape.element_bytes * (widths + share * moved * used * shape.hidden))


class Total(NamedTuple):
    """What operations add up to, on one GPU."""

    flops: float  #: FLOPs
    bytes: float  #: Bytes that elementwise operations move to and from memory
    #: Bytes that a GPU sends to its tensor group: a ring sends 2 (t - 1) / t of what it sums.
    sent_bytes: float


def stage_totals(shape: Transformer, split: Sequence[int]) -> list[dict[str, Total]]:
    """Return the totals of each kind for one microbatch on one GPU of stages with so many layers.

    The first stage also has the embedding; the last has the final norm, the language-model head and
    the loss.
    """
    # Parts add up to stages: layers, and embedding or head where they are.
    parts = layer_operations(shape), embedding_operations(shape), head_operations(shape)
    stages = []
    for stage, layers in enumerate(split):
        times = layers, stage == 0, stage == len(split) - 1
        totals = {
            kind: _total(zip(times, (part[kind] for part in parts), strict=True), shape)
            for kind in "FIW"
        }
        totals["B"] = Total(*map(sum, zip(totals["I"], totals["W"], strict=True)))
        stages.append(totals)
    return stages


def _total(parts: Iterable[tuple[int, Iterable[Operation]]], shape: Transformer) -> Total:
    flops = moved = sent = 0.0
    for times, operations in parts:
        for operation in operations:
            if isinstance(operation, Product):
                flops += times * operation.flops
            elif isinstance(operation, Pass):
                moved += times * operation.bytes
            elif isinstance(operation, Exchange) and operation.group == "tensor":
                sent += times * operation.bytes * operation.sums
    # A ring sends twice the tensor, but for each GPU's own part of it.
    return Total(flops, moved, 2 * (1 - 1 / shape.tensor_degree) * sent)


@dataclass(frozen=True)
class Phases:
    """What the time of a computation consists of."""

    megacycles: float = 0.0  #: Cycles of arithmetic, in millions
    memory_s: float = 0.0  #: Seconds that wait for memory
    exchange_s: float = 0.0  #: Seconds of traffic between GPUs
    idle_s: float = 0.0  #: Seconds in which the GPU waits for its host
    fused_megacycles: float = 0.0  #: Those cycles of `megacycles` in which attention computes
    #: The same, times the power above static power that they draw, as a share of products'.
    fused_active_megacycles: float = 0.0

    def __add__(self, other: Phases) -> Phases:
        """Return both, one after the other."""
        return Phases(*map(operator.add, vars(self).values(), vars(other).values()))

    def __mul__(self, times: float) -> Phases:
        """Return `times` such computations."""
        return Phases(*(value * times for value in vars(self).values()))

    def time_s(self, clock_mhz: float) -> float:
        """Return the seconds at a clock that no power limit lowers."""
        return self.megacycles / clock_mhz + self.memory_s + self.exchange_s + self.idle_s

    def load(self, system: System) -> Load:
        """Return time and power over clocks on a GPU of `system`."""
        # What attention draws less than products would.
        saved = self.fused_megacycles - self.fused_active_megacycles
        intensity = 1 - saved / self.megacycles if self.megacycles else 1.0
        return system.gpu.phases(
            self.megacycles, self.memory_s, self.exchange_s, self.idle_s, intensity
        )


@dataclass(frozen=True)
class LayerTimes:
    """Phases of each kind, F, B, I and W, on one GPU of a tensor group, for one microbatch."""

    layer: Mapping[str, Phases]
    embedding: Mapping[str, Phases]
    head: Mapping[str, Phases]

    def training_s(self, clock_mhz: float) -> tuple[float, float, float]:
        """Return the seconds of forward and backward of a layer, embedding and head at a clock that
        no power limit lowers.
        """
        layer_s, first_s, last_s = (
            part["F"].time_s(clock_mhz) + part["B"].time_s(clock_mhz)
            for part in (self.layer, self.embedding, self.head)
        )
        return layer_s, first_s, last_s

    def stages(
        self, split: Sequence[int], predictions: Sequence[int] = ()
    ) -> list[dict[str, Phases]]:
        """Return the phases of stages with so many layers, and modules of multi-token prediction.

        Such a module counts as a layer and the head once more; its projection is left out.
        """
        # Stages of equal layers are one object, by which equal ranks are found.
        alike = {
            layers: {kind: layer * layers for kind, layer in self.layer.items()}
            for layers in set(split)
        }
        stage_phases = [alike[layers] for layers in split]
        for stage, modules in enumerate(predictions):
            if modules:
                stage_phases[stage] = {
                    kind: phases + (self.layer[kind] + self.head[kind]) * modules
                    for kind, phases in stage_phases[stage].items()
                }
        for stage, more in ((0, self.embedding), (-1, self.head)):
            stage_phases[stage] = {
                kind: phases + more[kind] for kind, phases in stage_phases[stage].items()
            }
        return stage_phases


def layer_times(shape: Transformer, system: System) -> LayerTimes:
    """Return the times of the parts of a model for one microbatch; measured ones where `system`
    has them.
    """
    parts: dict[str, dict[str, Phases]] = {}
    for name, operations in (
        ("layer", layer_operations(shape)),
        ("embedding", embedding_operations(shape)),
        ("head", head_operations(shape)),
    ):
        # The list of the embedding's passes is complete; that of a layer lacks copies and dropout.
        on = replace(system, passes=1.0) if name == "embedding" else system
        parts[name] = {kind: phases_of(some, shape, on) for kind, some in operations.items()}
        parts[name]["B"] = parts[name]["I"] + parts[name]["W"]
    # Times of the host are known of layers alone.
    parts["layer"] = {
        kind: _with_host(phases, kind, shape, system) for kind, phases in parts["layer"].items()
    }
    # What was measured replaces what is modelled.
    return _measured(LayerTimes(**parts), shape, system)


def phases_of(operations: Iterable[Operation], shape: Transformer, system: System) -> Phases:
    """Return the phases of operations, one after the other."""
    megacycles = fused = active = memory_s = idle_s = ring_s = 0.0
    exchange_s = dict.fromkeys(("tensor", "context", "expert"), 0.0)
    bytes_per_s = system.memory_share * system.gpu.bytes_per_s
    for operation in operations:
        if isinstance(operation, Product):
            narrow = shape.narrow_bytes if operation.weights else None
            cycles = product_megacycles(operation, system, shape.precision)
            # A product loads its factors and writes its result, unless it stays on the chip.
            size = (
                0.0
                if operation.fused
                else (narrow or shape.element_bytes) * (operation.m + operation.n) * operation.k
                + shape.element_bytes * operation.m * operation.n
            )
            load_s = operation.number * size / bytes_per_s
            # The longer of loading and computing counts, as one hides the other.
            if load_s * system.top_mhz > cycles:
                memory_s += load_s
            else:
                megacycles += cycles
            # Attention draws less power, so its cycles are known apart.
            if operation.fused:
                fused += cycles
                active += cycles * _fused_activity(operation.keys, system)
            # Every kernel has a fixed time, whatever it does.
            idle_s += system.launch_s
        elif isinstance(operation, Pass):
            memory_s += system.passes * operation.bytes / bytes_per_s
        elif isinstance(operation, Accumulation):
            memory_s += ACCUMULATED * operation.weights / bytes_per_s
        elif operation.group == "tensor":
            exchange_s["tensor"] += operation.sums * sum_s(
                operation.bytes, shape.tensor_degree, system
            )
        elif operation.group == "expert":
            exchange_s["expert"] += operation.sums * dispatch_s(operation.bytes, shape, system)
        else:
            near = shape.tensor_degree * shape.context_degree <= system.gpus_per_node
            # Within a node keys and values go over its links, beyond it over each GPU's part of the
            # network.
            ring_s += operation.bytes / (
                system.link_bytes_per_s if near else system.node_bytes_per_s / system.gpus_per_node
            )
    if shape.overlap_traffic:
        # Factors and results are sent in as many pieces as there are GPUs, of which one waits for
        # nothing to hide it (Wang et al., "Overlap communication with dependent computation via
        # decomposition", ASPLOS 2023).
        exchange_s["tensor"] -= min(
            megacycles / system.top_mhz, exchange_s["tensor"] * (1 - 1 / shape.tensor_degree)
        )
    # Keys and values are passed on while attention computes with those before.
    exchange_s["context"] = max(0.0, ring_s - fused / system.top_mhz)
    return Phases(megacycles, memory_s, sum(exchange_s.values()), idle_s, fused, active)


def _fused_activity(keys: float, system: System) -> float:
    """Return the power of flash attention, as a share of that of products."""
    is_long = keys >= system.fused_long_keys
    return system.fused_long_activity if is_long else system.fused_activity


def product_megacycles(product: Product, system: System, precision: str = "bf16") -> float:
    """Return the cycles of a product's arithmetic, in millions."""
    rate = system.product_flops_per_cycle
    if product.weights:
        rate *= {"fp8": system.fp8_speedup, "mxfp8": system.fp8_speedup}.get(precision, 1.0)
        rate *= system.fp4_speedup if precision == "nvfp4" else 1.0
    if product.fused:
        # Each query has a fixed time beside that of its keys.
        rate *= system.fused_share * product.keys / (product.keys + system.fused_half_keys)
    rate *= system.grouped_share if product.grouped else 1.0
    rate *= 1.0 if product.aligned else system.unaligned_share
    return product.flops / rate / 1e6


def sum_s(size: float, gpus: int, system: System) -> float:
    """Return the seconds in which `gpus` GPUs sum tensors of `size` bytes.

    Within a node GPUs add to the latency, and few have less bandwidth than many.
    """
    if gpus == 1:
        return 0.0
    near = min(gpus, system.gpus_per_node)
    nodes = gpus / near
    share = 1 - system.link_lost / near
    inside_s = system.exchange_s + system.exchange_gpu_s * (near - 2)
    inside_s += 2 * (near - 1) / near * size / system.link_bytes_per_s / share
    if nodes <= 1:
        return inside_s
    return (
        inside_s + system.network_s / 2 + 2 * (nodes - 1) / nodes * size / system.node_bytes_per_s
    )


def dispatch_s(size: float, shape: Transformer, system: System) -> float:
    """Return the seconds of an all-to-all of a GPU's tokens of `size` bytes with their experts.

    Experts are drawn evenly: of n nodes k draws touch n (1 - (1 - 1 / n)^k).
    """
    degree = shape.expert_degree
    used = shape.experts_used
    nodes = max(1.0, degree / system.gpus_per_node)
    touched = nodes * (1 - (1 - 1 / nodes) ** used)
    far = min(touched, shape.routed_nodes or touched) * (1 - 1 / nodes)
    near_s = used * (1 - 1 / degree) / system.link_bytes_per_s
    per_byte_s = near_s + far * system.gpus_per_node / system.node_bytes_per_s
    return system.exchange_s + size * per_byte_s / system.dispatch_share


def _with_host(phases: Phases, kind: str, shape: Transformer, system: System) -> Phases:
    """Return the phases, and the idle time of a GPU that runs ahead of its host, which launches
    the kernels of a layer and of its collectives.
    """
    sums_s = 2 * system.host_exchange_s if shape.tensor_degree > 1 else 0.0
    forward_s = system.host_forward_s + sums_s
    backward_s = system.host_backward_s + sums_s
    if shape.recomputation == "full":
        backward_s += forward_s
    host_s = {"F": forward_s, "B": backward_s}.get(kind, backward_s / 2)
    gpu_s = phases.time_s(system.top_mhz)
    return phases + Phases(idle_s=(gpu_s**4 + host_s**4) ** 0.25 - gpu_s)


def _measured(times: LayerTimes, shape: Transformer, system: System) -> LayerTimes:
    """Scale the phases to the measured times, if there are any for this shape."""
    measured = system.kernels.get(kernel_key(shape))
    if measured is None:
        return times
    wanted_s = {"F": measured.layer_forward_s, "B": measured.layer_backward_s}
    # Phases keep their shares, so clocks act on the measured time as on the modelled one.
    ratios = {
        kind: seconds / _top_s(times.layer[kind], system) for kind, seconds in wanted_s.items()
    }
    # I and W have no measurement of their own, so they follow B.
    layer = {
        kind: phases * ratios["F" if kind == "F" else "B"] for kind, phases in times.layer.items()
    }
    # Head and embedding were measured as one, so they have one factor.
    ends_s = sum(
        _top_s(part[kind], system) for part in (times.embedding, times.head) for kind in "FB"
    )
    ratio = measured.head_s / ends_s
    embedding, head = (
        {k: p * ratio for k, p in part.items()} for part in (times.embedding, times.head)
    )
    return LayerTimes(layer, embedding, head)


def _top_s(phases: Phases, system: System) -> float:
    """Return the seconds at the top clock that is set, under the power limit."""
    return phases.load(system).time_s(system.top_mhz)
