"""Device memory of a training job: parameters, gradients, optimizer, activations, and a reserve.

Activations of a layer are those of Korthikanti et al. ("Reducing activation recomputation in large
transformer models", 2022, section 4), written for any widths: for each token 10 h bytes of norms,
residuals and dropout masks, which sequence parallelism divides; 2 bytes for each input of a product
and of the activation in the tensor group's share; 5 bytes for each score of plain attention. Each
rank keeps as many microbatches as its own schedule has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.estimate.configuration import schedule_of, stage_ranks

if TYPE_CHECKING:
    from perseus_planner.estimate.configuration import Configuration
    from perseus_planner.estimate.system import System
    from perseus_planner.estimate.transformer import Transformer

_WEIGHT, _GRADIENT, _STATE = (
    2,
    4,
    12,
)  # bytes: bf16, float32, and the float32 weight and two moments of Adam
_RESERVE_BYTES = 2e9  # CUDA context, NCCL buffers, workspaces; assumed
_RESERVE_SHARE = 0.02  # fragmentation; assumed


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU of the rank that needs most."""

    rank: int  #: Number of the rank
    parameters: float  #: Weights in bf16
    gradients: float  #: Their sums in float32
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


def memory(job: Configuration, system: System) -> Memory:
    """Return the memory of the rank that needs most."""
    shape, held = job.shape, job.rank_parameters
    pieces = job.data_degree if job.distributed_optimizer else 1
    # Where forwards and backwards alternate, further microbatches keep no more.
    count = (
        job.microbatches
        if job.schedule in ("gpipe", "looped-bfs")
        else min(job.microbatches, 2 * job.ranks)
    )
    counts = _in_flight(job.schedule, len(job.split), count, job.virtual_stages)
    kept = kept_layer_bytes(shape)
    again = (
        _all_layer_bytes(shape, scores=shape.attention == "plain")
        if shape.recomputation == "full"
        else 0.0
    )
    activations = [again] * job.ranks
    logits = 6 * shape.tokens * shape.vocabulary_per_gpu  # in bf16 and float32
    ranks = stage_ranks(job.schedule, job.ranks, job.virtual_stages)
    for stage, rank in enumerate(ranks):
        activations[rank] += counts[stage] * job.split[stage] * kept
    activations[ranks[-1]] += logits
    state = _WEIGHT + _GRADIENT + _STATE / pieces
    most = max(range(job.ranks), key=lambda rank: state * held[rank] + activations[rank])
    return Memory(
        rank=most,
        parameters=_WEIGHT * held[most],
        gradients=_GRADIENT * held[most],
        optimizer=_STATE * held[most] / pieces,
        activations=activations[most],
        reserve=_RESERVE_BYTES + _RESERVE_SHARE * system.memory_bytes,
        available=system.memory_bytes,
    )


def kept_layer_bytes(shape: Transformer) -> float:
    """Return the bytes that one layer keeps of a microbatch until its backward."""
    if shape.recomputation == "full":
        return 2 * shape.tokens * shape.hidden / _divided(shape)
    return _all_layer_bytes(
        shape, scores=shape.attention == "plain" and shape.recomputation == "none"
    )


def _all_layer_bytes(shape: Transformer, *, scores: bool) -> float:
    """Return the bytes of all activations of a layer."""
    inner, keys_values = shape.heads * shape.head_size, 2 * shape.kv_heads * shape.head_size
    shared = 2 * (2 * inner + keys_values) + 2 * shape.ffn * (3 if shape.gated else 2)
    if scores:
        shared += 5 * shape.heads * shape.sequence
    return shape.tokens * (10 * shape.hidden / _divided(shape) + shared / shape.tensor_degree)


def _divided(shape: Transformer) -> int:
    return shape.tensor_degree if shape.sequence_parallel else 1


@lru_cache(maxsize=512)
def _in_flight(
    schedule: str, stages: int, microbatches: int, virtual_stages: int
) -> tuple[int, ...]:
    """Return the microbatches of each stage whose activations its rank keeps when it keeps most."""
    found = [0] * stages
    for program in schedule_of(schedule, stages, microbatches, virtual_stages).ranks:
        counts, most = dict.fromkeys({each.stage for each in program}, 0), 0
        last = "W" if any(each.kind == "W" for each in program) else "B"
        for each in program:
            counts[each.stage] += (each.kind == "F") - (each.kind == last)
            if sum(counts.values()) > most:
                most = sum(counts.values())
                for stage, count in counts.items():
                    found[stage] = count
    return tuple(found)
