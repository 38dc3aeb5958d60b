"""Memory of a training job: what each GPU holds, and which splits of the layers fit.

Memory holds parameters, gradients, optimizer, activations, and a reserve. Activations of a layer
are those of Korthikanti et al. ("Reducing activation recomputation in large transformer models",
2022, section 4), written for any widths and without dropout, whose masks no model has since GPT-3:
for each token 8 h bytes of norms and residuals, which sequence parallelism divides; 2 bytes for
each input of a product and of the activation in the tensor group's share, and 1 or less for those
of narrow products; 5 bytes for each score of plain attention. Each rank keeps as many
microbatches as its own schedule has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.extensions.explore.configuration import (
    SPLIT_BACKWARD,
    WEIGHT_BYTES,
    Configuration,
    Floats,
    schedule_of,
)
from perseus_planner.schedules.layouts import balance

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.explore.operations import LayerTimes, System
    from perseus_planner.extensions.explore.transformer import Transformer

_STATE_BYTES = 12  # of a weight: its float32 copy and the two moments of Adam
_RESERVE_BYTES = 2e9  # CUDA context, NCCL buffers, workspaces; assumed
_RESERVE_SHARE = 0.02  # fragmentation; assumed


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of the rank that needs most."""

    rank: int  #: Number of the rank
    parameters: float  #: Weights in bf16
    gradients: float  #: Their sums
    optimizer: float  #: Weights in float32 and the moments of Adam
    #: Activations of all microbatches in flight, and of the layer that is recomputed.
    activations: float
    reserve: float  #: What the driver and libraries take
    available: float  #: Device memory

    @property
    def total(self) -> float:
        """All of them."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.reserve

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.total <= self.available


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits in memory."""

    job: Configuration
    times: LayerTimes
    memory: Memory


def memory(job: Configuration, system: System) -> Memory:
    """Return the memory of the rank that needs most."""
    parts = _rank_bytes(job)
    most = int(parts.sum(axis=0).argmax())
    weights, gradients, states, kept_bytes = parts[:, most].tolist()
    reserve = _reserve_bytes(system)
    return Memory(most, weights, gradients, states, kept_bytes, reserve, system.memory_bytes)


def balanced(
    job: Configuration, system: System, times: LayerTimes, *, within_memory: bool = True
) -> Configuration | None:
    """Return the configuration with its layers where the slowest rank is fastest, of those that fit
    in memory, or of all; None if there is none.
    """
    # Layers are alike, and all else of a stage is a constant that no split changes.
    layer_s, beside_s = _stage_parts_s(job, system, times)
    room = dict[str, list[float]]()
    if within_memory:
        bytes_each = kept_layer_bytes(job.shape) * np.array(_counts_in_flight(job), dtype=float)
        bytes_each += _layer_state_bytes(job)
        # Bytes are linear in layers, so what a rank has beside them is the same in any split.
        taken = np.bincount(job.stage_ranks, np.multiply(bytes_each, job.split))
        free = system.memory_bytes - _reserve_bytes(system) - _rank_bytes(job).sum(axis=0) + taken
        room = {"layer_bytes": bytes_each.tolist(), "free_bytes": free.tolist()}
    split = balance(job.shape.layers, job.stage_ranks, layer_s, beside_s.tolist(), **room)
    return None if split is None else replace(job, split=split)


def slowest_rank_s(job: Configuration, system: System, times: LayerTimes) -> float:
    """Return the seconds of a microbatch's forward and backward on the rank that takes longest."""
    layer_s, beside_s = _stage_parts_s(job, system, times)
    all_s = np.bincount(job.stage_ranks, layer_s * np.array(job.split) + beside_s)
    return float(all_s.max())


def _stage_parts_s(
    job: Configuration, system: System, times: LayerTimes
) -> tuple[float, NDArray[np.float64]]:
    """Return the seconds of a layer, and of what each stage has beside its layers."""
    layer_s, first_s, last_s = times.training_s(system.top_mhz)
    beside_s = np.multiply(job.predictions or (0.0,) * len(job.split), layer_s + last_s)
    beside_s[0] += first_s
    beside_s[-1] += last_s
    return layer_s, beside_s


def _layer_state_bytes(job: Configuration) -> float:
    """Return the bytes of a layer's weights, gradients and optimizer on a GPU."""
    shape = job.shape
    # Each part with how many GPUs share it among replicas.
    others = shape.layer_parameters - shape.expert_parameters
    held = (
        (shape.expert_parameters / shape.expert_degree, job.expert_replicas),
        (others / shape.tensor_degree, job.replicas),
    )
    # Which stage of sharding divides what: weights last.
    sizes = ((WEIGHT_BYTES, 3), (shape.gradient_bytes, 2), (_STATE_BYTES, 1))
    return sum(
        size * parameters / (sharers if job.sharding >= stage else 1)
        for parameters, sharers in held
        for size, stage in sizes
    )


def _reserve_bytes(system: System) -> float:
    return _RESERVE_BYTES + _RESERVE_SHARE * system.memory_bytes


def _counts_in_flight(job: Configuration) -> tuple[int, ...]:
    """Return the microbatches of each stage whose activations its rank keeps."""
    # Where forwards and backwards alternate, further microbatches keep no more.
    count = (
        job.microbatches
        if job.schedule in ("gpipe", "looped-bfs")
        else min(job.microbatches, 2 * job.ranks)
    )
    return _in_flight(job.schedule, len(job.split), count, job.virtual_stages)


def _rank_bytes(job: Configuration) -> Floats:
    """Return the bytes of weights, gradients, optimizer and activations of each rank."""
    shape = job.shape
    counts = _counts_in_flight(job)
    kept = kept_layer_bytes(shape)
    # Full recomputation holds one layer's activations again, whatever is kept otherwise.
    again = (
        _all_layer_bytes(shape, scores=shape.attention == "plain")
        if shape.recomputation == "full"
        else 0.0
    )
    in_flight = np.multiply(counts, job.held_layers)
    # A rank keeps as many microbatches of each of its stages as the schedule has in flight.
    activations = again + kept * np.bincount(job.stage_ranks, in_flight)
    # Logits are in bf16 and float32, once more for each module of multi-token prediction.
    logits = 6 * shape.tokens * shape.vocabulary_per_gpu
    activations[job.stage_ranks[-1]] += logits
    if job.predictions:
        activations += logits * np.bincount(job.stage_ranks, job.predictions)
    # Weights of two layers are gathered, or their gradients not yet scattered.
    if job.sharding >= 2:
        layer = shape.layer_parameters - shape.expert_parameters * (1 - 1 / shape.expert_degree)
        activations += 2 * WEIGHT_BYTES * layer / shape.tensor_degree
    return np.stack(
        [
            WEIGHT_BYTES * job.kept_parameters(3),
            shape.gradient_bytes * job.kept_parameters(2),
            _STATE_BYTES * job.kept_parameters(1),
            activations,
        ]
    )


def kept_layer_bytes(shape: Transformer) -> float:
    """Return the bytes that one layer keeps of a microbatch until its backward."""
    if shape.recomputation == "full":
        return 2 * shape.tokens * shape.hidden / shape.stream_degree
    return _all_layer_bytes(
        shape, scores=shape.attention == "plain" and shape.recomputation == "none"
    )


def _all_layer_bytes(shape: Transformer, *, scores: bool) -> float:
    """Return the bytes of all activations of a layer: in bf16 what norms, attention and the
    activation read, and in `precision` what products read.
    """
    # Products read narrow inputs where the precision has them, and all else is 2 bytes wide.
    low = shape.narrow_bytes or 2.0
    inner = shape.heads * shape.head_size
    # The activation reads one or two tensors, and writes one.
    wide = 2 * (2 if shape.gated else 1)
    # Latent attention makes keys and values for all heads.
    keys_values = 2 * (shape.heads if shape.kv_latent else shape.kv_heads) * shape.head_size
    shared = 2 * (2 * inner + keys_values) + (low if shape.narrow_bytes else 0) * inner
    # Layers with and without experts differ, so the mean counts by their share.
    dense = 1 - shape.expert_share
    shared += (dense * shape.ffn + shape.expert_share * shape.shared_ffn) * (wide + low)
    if scores:
        shared += 5 * shape.heads * shape.sequence
    # Experts keep the copies of tokens that they read and wrote.
    routed = shape.expert_ffn * (wide + low) + (low + 2) * shape.hidden
    shared += shape.expert_share * shape.experts_used * routed
    # Norms and residuals are divided by sequence parallelism alone.
    residual = (4 + 2 * low) * shape.hidden / shape.stream_degree
    return shape.tokens * (residual + shared / shape.tensor_degree)


@cache
def _in_flight(
    schedule: str, stages: int, microbatches: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the microbatches of each stage whose activations its rank keeps when it keeps most."""
    kept = [0] * stages
    # A microbatch is kept until the last computation that reads it.
    last = "W" if schedule in SPLIT_BACKWARD else "B"
    for program in schedule_of(schedule, stages, microbatches, virtual_stages).ranks:
        counts = dict.fromkeys({computation.stage for computation in program}, 0)
        total = 0
        most = 0
        for computation in program:
            more = (computation.kind == "F") - (computation.kind == last)
            counts[computation.stage] += more
            total += more
            # Stages of one rank have their most at different times, so only the rank's most counts.
            if total > most:
                most = total
                for stage, count in counts.items():
                    kept[stage] = count
    return tuple(kept)
