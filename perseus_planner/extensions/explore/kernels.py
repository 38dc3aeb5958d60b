"""Measure what estimates know least: one layer, head and embedding, all-reduces, and memory, on one
GPU or one node.

A layer is measured as training runs it: four in a row, forward and then backward, so that launches
overlap as they do there. In a tensor group each GPU has its share of heads, feed-forward block and
vocabulary, and sums the outputs over the group. Times are medians over repetitions, the longest of
all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.engines.microbatch import describe_error
from perseus_planner.extensions.explore.operations import KernelTimes, System, kernel_key

if TYPE_CHECKING:
    from perseus_planner.extensions.explore.transformer import Transformer

_LAYERS = 4
_REPETITIONS = 10  # of what is timed
_EXCHANGES = (1 << 16, 1 << 26)  # bytes of the two all-reduces
_COPIED = 1 << 28  # bytes of the copy


def measure_kernels(
    shapes: Sequence[Transformer], system: System, layer: Callable[..., Any] | None = None
) -> System:
    """Return `system` with measured kernels, links and memory; every rank of a process group
    calls it.

    Args:
        shapes: The model with each tensor degree, which divides the ranks, microbatch and
            recomputation.
        system: The GPUs.
        layer: Returns a layer, which maps hidden states to hidden states, given the shape and its
            process group, None for one GPU; the planner's own if None.
    """
    ranks = _ranks()
    kernels = {kernel_key(shape): _measure_shape(shape, layer or _Layer) for shape in shapes}
    copied = _copy_bytes_per_s() / system.gpu.bytes_per_s
    measured = replace(system, kernels=kernels, memory_share=min(1.0, copied))
    return measured if ranks == 1 else _with_links(measured, ranks)


def _measure_shape(shape: Transformer, kind: Callable[..., Any]) -> KernelTimes:
    device, dtype = _device()
    # All ranks measure at once, as in a job, so that links carry what they carry there.
    group = _group(shape.tensor_degree)
    head = _Head(shape, group)
    # Sequence parallelism gives each GPU a part of the tokens.
    hidden = torch.randn(
        shape.microbatch,
        shape.sequence // (shape.tensor_degree if shape.sequence_parallel else 1),
        shape.hidden,
        device=device,
        dtype=dtype,
        requires_grad=True,
    )
    words = torch.randint(
        shape.vocabulary_per_gpu, (shape.microbatch, shape.sequence), device=device
    )

    # Several layers in a row, so that launches overlap as in training.
    def layers() -> torch.Tensor:
        value = hidden
        for _ in range(_LAYERS):
            if shape.recomputation == "full":
                value = checkpoint(layer, value, use_reentrant=False)
            else:
                value = layer(value)
        return value

    # A layer of the user may fail, and the message says that it is theirs.
    try:
        layer = kind(shape, group)
        forward_s, backward_s = _timed(layers)
    except PlannerError:
        raise
    except Exception as error:  # of the user
        raise UsageError(f"layer: {describe_error(error)}; correct it") from error
    # The head is run once for a microbatch, so both directions count together.
    head_s = sum(_timed(lambda: head.run(words)))
    return KernelTimes(forward_s / _LAYERS, backward_s / _LAYERS, head_s)


def _timed(run: Callable[[], torch.Tensor]) -> tuple[float, float]:
    """Return the seconds of a forward and of its backward: medians, the longest of all ranks."""
    forwards = []
    backwards = []
    for turn in range(_REPETITIONS + 3):
        # Ranks begin together, as a group is as slow as its slowest.
        _barrier()
        begin_s = time.perf_counter()
        out = run()
        # The host runs ahead, so the device is waited for before the time is read.
        _wait()
        middle_s = time.perf_counter()
        out.backward(torch.ones_like(out))
        _wait()
        end_s = time.perf_counter()
        # The first turns compile, choose kernels and allocate.
        if turn >= 3:
            forwards.append(middle_s - begin_s)
            backwards.append(end_s - middle_s)
    return _longest(median(forwards)), _longest(median(backwards))


class _Layer:
    """One GPU's share of a layer."""

    def __init__(self, shape: Transformer, group: Any) -> None:
        self._shape = shape
        self._group = group
        inner, keys = (
            heads * shape.head_size for heads in (shape.heads_per_gpu, shape.kv_heads_per_gpu)
        )
        wide = (2 if shape.gated else 1) * shape.ffn_per_gpu
        self._norms = [_weight(shape.hidden), _weight(shape.hidden)]
        self._qkv = _weight(inner + 2 * keys, shape.hidden)
        self._out = _weight(shape.hidden, inner)
        self._up = _weight(wide, shape.hidden)
        self._down = _weight(shape.hidden, shape.ffn_per_gpu)
        self._sizes = [inner, keys, keys]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        shape = self._shape
        into, summed = _exchanges(shape, self._group)
        normed = into(functional.layer_norm(hidden, (shape.hidden,), self._norms[0]))
        parts = functional.linear(normed, self._qkv).split(self._sizes, -1)
        queries, keys, values = (
            part.unflatten(-1, (-1, shape.head_size)).transpose(1, 2) for part in parts
        )
        # Grouped queries share keys and values, which are repeated for the heads that read them.
        repeated = shape.heads_per_gpu // shape.kv_heads_per_gpu
        if repeated > 1:
            keys = keys.repeat_interleave(repeated, 1)
            values = values.repeat_interleave(repeated, 1)
        # Plain attention writes all scores to memory, which is what is to be measured.
        if shape.attention == "plain":
            attended = (queries @ keys.transpose(-1, -2) * shape.head_size**-0.5).softmax(
                -1
            ) @ values
        else:
            causal = shape.attention == "flash-causal"
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=causal
            )
        # The output of each half is summed over the group.
        hidden = hidden + summed(functional.linear(attended.transpose(1, 2).flatten(-2), self._out))
        normed = into(functional.layer_norm(hidden, (shape.hidden,), self._norms[1]))
        wide = functional.linear(normed, self._up)
        if shape.gated:
            gate, wide = wide.chunk(2, -1)
            wide = functional.silu(gate) * wide
        else:
            wide = functional.gelu(wide)
        return hidden + summed(functional.linear(wide, self._down))


class _Head:
    """One GPU's share of embedding, head and loss."""

    def __init__(self, shape: Transformer, group: Any) -> None:
        self._shape = shape
        self._group = group
        self._table = _weight(shape.vocabulary_per_gpu, shape.hidden)
        self._norm = _weight(shape.hidden)

    def run(self, words: torch.Tensor) -> torch.Tensor:
        """Run embedding, norm, head and loss."""
        into, summed = _exchanges(self._shape, self._group)
        hidden = summed(functional.embedding(words, self._table))
        logits = functional.linear(
            into(functional.layer_norm(hidden, (self._shape.hidden,), self._norm)), self._table
        )
        return functional.cross_entropy(logits.float().flatten(0, 1), words.flatten())


def _exchanges(
    shape: Transformer, group: Any
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Return what goes before the products of a group and after them; nothing without a group.

    Before, the backward sums gradients; after, outputs are summed. With sequence parallelism sums
    are scattered over the tokens, and gathered on the way through the other.
    """
    if group is None:
        return lambda value: value, lambda value: value
    before, after = (_gathered, _scattered) if shape.sequence_parallel else (_kept, _summed)
    return (
        lambda value: _Through.apply(value, group, before, after),
        lambda value: _Through.apply(value, group, after, before),
    )


def _kept(value: torch.Tensor, group: Any) -> torch.Tensor:
    return value.view_as(value)


def _summed(value: torch.Tensor, group: Any) -> torch.Tensor:
    value = value.clone()
    dist.all_reduce(value, group=group)
    return value


def _gathered(value: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(value).contiguous() for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value.contiguous(), group=group)
    return torch.cat(parts, 1)


def _scattered(value: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [part.contiguous() for part in value.chunk(dist.get_world_size(group), 1)]
    part_of_sum = torch.empty_like(parts[0])
    dist.reduce_scatter(part_of_sum, parts, group=group)
    return part_of_sum


class _Through(torch.autograd.Function):  # type: ignore[misc]
    """A step over a group on the way forth, and another one on the way back: Megatron's f and g, or
    those of sequence parallelism.
    """

    @staticmethod
    def forward(context: Any, value: torch.Tensor, group: Any, *steps: Any) -> torch.Tensor:
        context.group = group
        context.back = steps[1]
        return steps[0](value, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return context.back(gradient, context.group), None, None, None


def _with_links(system: System, ranks: int) -> System:
    """Return the system with the times of two all-reduces over all ranks: fixed time and
    bandwidth.
    """
    device, _ = _device()
    values = [torch.ones(size // 4, device=device) for size in _EXCHANGES]
    # Two sizes tell a fixed time and a bandwidth.
    times_s = [_median_s(partial(dist.all_reduce, value)) for value in values]
    few, many = _EXCHANGES
    # A larger sum cannot be faster, so noise must not make the bandwidth infinite.
    per_byte_s = max(times_s[1] - times_s[0], 0.01 * times_s[1]) / (many - few)
    fixed_s = max(times_s[0] - few * per_byte_s, 1e-6)
    # Fixed times grow with the group in the catalogue's proportion, of which this is one point.
    usual_s = system.exchange_s + system.exchange_gpu_s * (ranks - 2)
    return replace(
        system,
        link_bytes_per_s=2 * (ranks - 1) / ranks / per_byte_s / (1 - system.link_lost / ranks),
        exchange_s=fixed_s * system.exchange_s / usual_s,
        exchange_gpu_s=fixed_s * system.exchange_gpu_s / usual_s,
    )


def _copy_bytes_per_s() -> float:
    device, _ = _device()
    source = torch.ones(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / _median_s(partial(target.copy_, source))


def _median_s(run: Callable[[], object]) -> float:
    """Return the seconds of a call after a first one: the median, the longest of all ranks."""
    times_s = []
    for _ in range(_REPETITIONS + 1):
        _barrier()
        begin_s = time.perf_counter()
        run()
        _wait()
        times_s.append(time.perf_counter() - begin_s)
    return _longest(median(times_s[1:]))


def _weight(*sizes: int) -> torch.Tensor:
    device, dtype = _device()
    return (0.02 * torch.randn(*sizes, device=device)).to(dtype).requires_grad_()


def _device() -> tuple[torch.device, torch.dtype]:
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device()), torch.bfloat16
    return torch.device("cpu"), torch.float32


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _group(degree: int) -> Any:
    """Return this rank's group of `degree` ranks; None for one. All ranks measure at once, as in
    training.
    """
    if degree == 1:
        return None

    return dist.new_subgroups(degree)[0]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _barrier() -> None:
    _wait()
    if _ranks() > 1:
        dist.barrier()


def _longest(seconds: float) -> float:
    if _ranks() == 1:
        return seconds

    value = torch.tensor([seconds], device=_device()[0], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value.item())
