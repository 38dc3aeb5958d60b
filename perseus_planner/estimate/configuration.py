"""How a training job shares a model among GPUs: the graph of its iterations, and its memory.

An iteration has the graph of its own schedule: computations, transfers between stages, then the sum
of gradients over the data-parallel GPUs and the optimizer's step.

Memory holds parameters, gradients, optimizer, activations, and a reserve. Activations of a layer
are those of Korthikanti et al. ("Reducing activation recomputation in large transformer models",
2022, section 4), written for any widths: for each token 10 h bytes of norms, residuals and dropout
masks, which sequence parallelism divides; 2 bytes for each input of a product and of the activation
in the tensor group's share; 5 bytes for each score of plain attention. Each rank keeps as many
microbatches as its own schedule has in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.estimate.kernel_times import LayerTimes, layer_times
from perseus_planner.estimate.transformer import Transformer, check_split
from perseus_planner.schedules import generate_for_stages
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, pipeline_iteration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.estimate.kernel_times import Phases
    from perseus_planner.estimate.system import System
    from perseus_planner.schedules import Schedule
    from perseus_planner.schedules.iteration import Iteration

SPLIT_BACKWARD = ("zb-h1", "zbv", "interleaved-zb", "dualpipe-v")
"""Schedules whose computations are F, I and W instead of F and B."""


@dataclass(frozen=True)
class Configuration:
    """A model on GPUs.

    Raises:
        UsageError: If the stages do not add up to the layers of the model.
    """

    shape: Transformer  #: The model, its microbatch, tensor degree and recomputation
    split: tuple[int, ...]  #: Layers of each stage, in the order of the model
    data_degree: int  #: Data-parallel pipelines
    microbatches: int  #: Microbatches of a pipeline in an iteration
    schedule: str = "1f1b"  #: Name of the schedule
    virtual_stages: int = 1  #: Stages that each rank holds
    #: Whether the data-parallel GPUs share gradients' sums and the optimizer's state.
    distributed_optimizer: bool = False
    #: Whether gradients are summed during the backward of the last microbatch.
    overlap_reduction: bool = False

    def __post_init__(self) -> None:
        check_split(self.shape, self.split)
        if len(self.split) % self.virtual_stages:
            raise UsageError(
                f"virtual_stages: {self.virtual_stages} does not divide the {len(self.split)} "
                "stages; choose a divisor"
            )

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return len(self.split) // self.virtual_stages

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.ranks * self.shape.tensor_degree * self.data_degree

    @property
    def batch(self) -> int:
        """Sequences of an iteration over all pipelines."""
        return self.microbatches * self.shape.microbatch * self.data_degree

    @property
    def tokens(self) -> int:
        """Tokens of an iteration over all pipelines."""
        return self.batch * self.shape.sequence

    @property
    def kinds(self) -> str:
        """Kinds of the computations of the schedule."""
        return "FIW" if self.schedule in SPLIT_BACKWARD else "FB"

    @cached_property
    def rank_parameters(self) -> tuple[float, ...]:
        """Parameters on each GPU of each rank."""
        shape, stages = self.shape, len(self.split)
        words = shape.vocabulary * shape.hidden
        positions = shape.sequence * shape.hidden if shape.positions == "learned" else 0
        layer = (shape.parameters - words * (1 if shape.tied else 2) - positions) / shape.layers
        parameters = [0.0] * self.ranks
        for stage, rank in enumerate(stage_ranks(self.schedule, self.ranks, self.virtual_stages)):
            held = self.split[stage] * layer + (words + positions if stage == 0 else 0)
            held += words if stage == stages - 1 and (stages > 1 or not shape.tied) else 0
            parameters[rank] += held / shape.tensor_degree
        return tuple(parameters)

    @property
    def name(self) -> str:
        """What tells it from others of the same model, in one word."""
        shape, virtual = self.shape, f"x{self.virtual_stages}" if self.virtual_stages > 1 else ""
        counts = [(layers, len(list(same))) for layers, same in groupby(self.split)]
        runs = [f"{layers}" if count == 1 else f"{count}*{layers}" for layers, count in counts]
        even = f"({','.join(runs)})" if len(runs) > 1 else ""
        return (
            f"t{shape.tensor_degree}-p{self.ranks}{virtual}{even}-d{self.data_degree}-mb{shape.microbatch}-"
            f"{self.schedule}-{shape.recomputation}"
        )

    def stage_phases(
        self, system: System, times: LayerTimes | None = None
    ) -> list[dict[str, Phases]]:
        """Return the phases of each kind of each stage, on one GPU."""
        return (times or layer_times(self.shape, system)).stages(self.split)

    def transfer_s(self, system: System) -> float:
        """Return the seconds of an activation from one rank to the next; between nodes the
        tensor group shares it.
        """
        if self.ranks == 1:
            return 0.0
        size = self.shape.tokens * self.shape.hidden * self.shape.element_bytes
        if self.gpus > system.gpus_per_node:
            share = size / self.shape.tensor_degree
            return system.gpus_per_node * share / system.node_bytes_per_s + system.network_s
        return size / system.transfer_bytes_per_s

    def reduction_s(self, system: System) -> list[float]:
        """Return the seconds in which each rank sums its gradients over the pipelines.

        In a node two GPUs were measured to take as long as eight.
        """
        # With a distributed optimizer gradients are scattered and parameters gathered in bf16.
        sent = (
            system.reduction_bytes / 2 + 2 if self.distributed_optimizer else system.reduction_bytes
        )
        if self.gpus > system.gpus_per_node:
            share = (self.data_degree - 1) / self.data_degree
            per_byte_s = (
                share
                * min(self.shape.tensor_degree, system.gpus_per_node)
                / system.node_bytes_per_s
            )
        else:
            per_byte_s = (self.data_degree > 1) / system.link_bytes_per_s
        return [sent * held * per_byte_s for held in self.rank_parameters]

    def optimizer_s(self, system: System) -> list[float]:
        """Return the seconds of the optimizer's step on each rank."""
        pieces = self.data_degree if self.distributed_optimizer else 1
        per_byte_s = 1 / (system.memory_share * system.gpu.bytes_per_s)
        return [
            system.optimizer_bytes * held / pieces * per_byte_s for held in self.rank_parameters
        ]

    def end_s(self, system: System, backward_s: Sequence[float]) -> list[float]:
        """Return the seconds of each rank after its last computation.

        Args:
            system: The GPUs.
            backward_s: Seconds of a microbatch's backward on each rank, which hide the reduction
                where they overlap.
        """
        steps_s = self.optimizer_s(system)
        sums_s = self.reduction_s(system)
        if self.overlap_reduction:
            layers = max(1, min(self.split))
            sums_s = [
                max(reduction_s / layers, reduction_s - hidden)
                for reduction_s, hidden in zip(sums_s, backward_s, strict=True)
            ]
        return [reduction_s + step for reduction_s, step in zip(sums_s, steps_s, strict=True)]

    def iteration(
        self, system: System, backward_s: Sequence[float], microbatches: int | None = None
    ) -> Iteration:
        """Return the graph of an iteration."""
        hop_s = self.transfer_s(system)
        ends = [
            FixedOperation("step", "end", end_s, where=(rank,))
            for rank, end_s in enumerate(self.end_s(system, backward_s))
        ]
        schedule = schedule_of(
            self.schedule, len(self.split), microbatches or self.microbatches, self.virtual_stages
        )
        return pipeline_iteration(schedule, transfer=Transfer(hop_s, hop_s), operations=ends)


@lru_cache(maxsize=256)
def stage_ranks(schedule: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the rank that holds each stage."""
    pipeline_schedule = schedule_of(schedule, ranks * virtual_stages, ranks, virtual_stages)
    return tuple(pipeline_schedule.stage_ranks[stage] for stage in range(pipeline_schedule.stages))


@lru_cache(maxsize=512)
def schedule_of(name: str, stages: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Return the schedule of a pipeline."""
    virtual = virtual_stages if virtual_stages > 1 else None
    return generate_for_stages(
        name,
        stages,
        microbatches=microbatches,
        ranks=stages // virtual_stages,
        virtual_stages=virtual,
    )


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
    kept = [0] * stages
    for program in schedule_of(schedule, stages, microbatches, virtual_stages).ranks:
        counts, most = dict.fromkeys({computation.stage for computation in program}, 0), 0
        last = "W" if any(computation.kind == "W" for computation in program) else "B"
        for computation in program:
            counts[computation.stage] += (computation.kind == "F") - (computation.kind == last)
            if sum(counts.values()) > most:
                most = sum(counts.values())
                for stage, count in counts.items():
                    kept[stage] = count
    return tuple(kept)
