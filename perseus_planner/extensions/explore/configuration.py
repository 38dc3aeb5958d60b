"""How a training job shares a model among GPUs: the graph of its iterations, and its memory.

An iteration has the graph of its own schedule: computations, transfers between stages, then the sum
of gradients over the data-parallel GPUs and the optimizer's step.

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
from functools import cache, cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from perseus_planner.extensions.explore.operations import LayerTimes, Phases, layer_times, sum_s
from perseus_planner.extensions.explore.transformer import Transformer, check_split
from perseus_planner.schedules import generate_for_stages
from perseus_planner.schedules.layouts import Layout, balance
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, pipeline_iteration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from perseus_planner.extensions.explore.operations import System
    from perseus_planner.schedules import Schedule
    from perseus_planner.schedules.iteration import Iteration

Floats: TypeAlias = "NDArray[np.float64]"

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
    #: What the data-parallel GPUs share, as the stages of ZeRO (Rajbhandari et al., 2020): 0
    #: nothing, 1 the optimizer's state, 2 gradients' sums too, 3 weights too (FSDP).
    sharding: int = 0
    #: Whether gradients are summed during the backward of the last microbatch.
    overlap_reduction: bool = False
    #: Modules of multi-token prediction of each stage; empty for none.
    predictions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_split(self.shape, self.split)

    @property
    def layout(self) -> Layout:
        """What each stage holds."""
        predictions = self.predictions or (0,) * len(self.split)
        cells = ["t" * n + "m" * m for n, m in zip(self.split, predictions, strict=True)]
        cells[0] = f"E{cells[0]}"
        cells[-1] = f"{cells[-1]}L"
        return Layout(tuple(cells))

    @property
    def held_layers(self) -> NDArray[np.int64]:
        """Layers of each stage, with those in modules of multi-token prediction."""
        return np.add(self.split, self.predictions or 0)

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return len(self.split) // self.virtual_stages

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """The rank that holds each stage."""
        return _stage_ranks(self.schedule, len(self.split), self.virtual_stages)

    @property
    def gpus(self) -> int:
        """GPUs of the job."""
        return self.ranks * self.shape.tensor_degree * self.replicas

    @property
    def replicas(self) -> int:
        """GPUs that hold the same weights but for experts, and sum their gradients."""
        return self.data_degree * self.shape.context_degree

    @property
    def expert_replicas(self) -> int:
        """GPUs that hold the same experts."""
        return max(1, self.replicas * self.shape.tensor_degree // self.shape.expert_degree)

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
    def rank_parameters(self) -> Floats:
        """Parameters on each GPU of each rank: a row of those of experts, one of all others."""
        shape = self.shape
        layers = np.bincount(self.stage_ranks, self.held_layers)
        words = shape.vocabulary * shape.hidden
        # Experts are divided among more GPUs than the rest, so they are counted apart.
        experts = layers * (shape.expert_parameters / shape.expert_degree)
        others = layers * (shape.layer_parameters - shape.expert_parameters)
        first = self.stage_ranks[0]
        last = self.stage_ranks[-1]
        # The embedding is on the first rank, the final norm and the head on the last.
        others[first] += words
        others[first] += shape.sequence * shape.hidden if shape.positions == "learned" else 0
        others[last] += shape.hidden * (2 if shape.biases else 1)
        # A tied head on the first rank shares the matrix of the embedding; elsewhere it has a copy.
        others[last] += words if len(self.split) > 1 or not shape.tied else 0
        return np.stack([experts, others / shape.tensor_degree])

    @property
    def name(self) -> str:
        """What tells it from others of the same model, in one word."""
        shape = self.shape
        virtual = f"x{self.virtual_stages}" if self.virtual_stages > 1 else ""
        counts = [(layers, len(list(same))) for layers, same in groupby(self.split)]
        runs = [f"{layers}" if count == 1 else f"{count}*{layers}" for layers, count in counts]
        even = f"({','.join(runs)})" if len(runs) > 1 else ""
        others = (("c", shape.context_degree), ("e", shape.expert_degree), ("z", self.sharding))
        more = "".join(f"-{letter}{n}" for letter, n in others if n > 1)
        more += f"-m{sum(self.predictions)}" if self.predictions else ""
        return (
            f"t{shape.tensor_degree}-p{self.ranks}{virtual}{even}-d{self.data_degree}{more}-mb{shape.microbatch}-"
            f"{self.schedule}-{shape.recomputation}"
        )

    def stage_phases(
        self, system: System, times: LayerTimes | None = None
    ) -> list[dict[str, Phases]]:
        """Return the phases of each kind of each stage, on one GPU."""
        times = times or layer_times(self.shape, system)
        if self.sharding >= 2:
            times = replace(times, layer=self._with_shares(times.layer, system))
        return times.stages(self.split, self.predictions)

    def _with_shares(self, layer: Mapping[str, Phases], system: System) -> dict[str, Phases]:
        """Return the phases of a layer whose gradients are scattered while the next one computes,
        and, if weights are shared too, whose weights are gathered while the one before does (Zhao
        et al., "PyTorch FSDP", 2023).
        """
        # A layer's weights on one GPU are what is gathered and scattered for it.
        shape = self.shape
        experts = shape.expert_parameters / shape.expert_degree
        held = np.array(
            [experts, (shape.layer_parameters - shape.expert_parameters) / shape.tensor_degree]
        )
        # Half of a sum's traffic, as a gather or a scatter is one of its two halves.
        gather_s, scatter_s = (
            float(self._sum_s(held, size / 2, system))
            for size in (shape.narrow_bytes or _WEIGHT, shape.gradient_bytes)
        )
        # Weights are gathered only if they are shared.
        gather_s = gather_s if self.sharding == 3 else 0.0
        traffic_s = {"F": gather_s, "B": gather_s + scatter_s, "I": gather_s, "W": scatter_s}
        return {
            kind: phases
            # Only what a computation does not hide takes time of its own.
            + Phases(exchange_s=max(0.0, traffic_s[kind] - phases.time_s(system.top_mhz)))
            for kind, phases in layer.items()
        }

    def _sum_s(self, held: Floats, size: float, system: System) -> Floats:
        """Return the seconds in which replicas sum `size` bytes of each parameter on a GPU, of
        which there are so many, those of experts first.
        """
        seconds = np.zeros(held.shape[1:])
        shape = self.shape
        for parameters, replicas, groups in zip(
            held,
            (self.expert_replicas, self.replicas),
            (shape.expert_degree, shape.tensor_degree),
            strict=True,
        ):
            # Within a node the ring takes the links between GPUs, beyond it the network of the
            # nodes.
            if groups * replicas <= system.gpus_per_node:
                few = min(replicas, 2)  # in a node eight were measured to take as long as two
                seconds += (parameters > 0) * sum_s(size * parameters, few, system)
            else:  # as many rings as a node has groups
                per_byte_s = min(groups, system.gpus_per_node) / system.node_bytes_per_s
                seconds += 2 * (1 - 1 / replicas) * size * parameters * per_byte_s
        return seconds

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

    def reduction_s(self, system: System) -> Floats:
        """Return the seconds in which each rank sums its gradients over the pipelines.

        Where the optimizer's state is shared, gradients are scattered, and weights gathered in
        bf16. Where gradients are shared too, they are scattered in each microbatch; so are weights
        gathered in FSDP.
        """
        size = float(self.shape.gradient_bytes)
        sizes = size, (size + _WEIGHT) / 2, _WEIGHT / 2, 0.0
        return self._sum_s(self.rank_parameters, sizes[self.sharding], system)

    def optimizer_s(self, system: System) -> Floats:
        """Return the seconds of the optimizer's step on each rank."""
        per_byte_s = system.optimizer_bytes / (system.memory_share * system.gpu.bytes_per_s)
        return per_byte_s * self.kept_parameters(1)

    def kept_parameters(self, stage: int) -> Floats:
        """Return the parameters of which a GPU of each rank keeps what stage `stage` of ZeRO
        shares.
        """
        sharers = (
            [[self.expert_replicas], [self.replicas]] if self.sharding >= stage else [[1], [1]]
        )
        kept: Floats = (self.rank_parameters / sharers).sum(axis=0)
        return kept

    def end_s(self, system: System, microbatch_s: Floats) -> Floats:
        """Return the seconds of each rank after its last computation.

        Args:
            system: The GPUs.
            microbatch_s: Seconds of a microbatch's forward and backward on each rank. Those of the
                last microbatch hide sums where they overlap, the forward of the first one the
                gathers; with virtual stages those of as many microbatches as there are ranks, but
                for one stage. What is first in the model, the embedding too, has nothing to hide
                behind.
        """
        # Without overlap nothing hides the sums, so all of them come after the last computation.
        sums_s = self.reduction_s(system)
        if self.overlap_reduction:
            shape = self.shape
            virtual = self.virtual_stages
            # What is first in the model, a layer and the embedding, has nothing to hide behind.
            bare = np.full(
                self.ranks,
                (shape.layer_parameters - shape.expert_parameters) / shape.tensor_degree
                + shape.expert_parameters / shape.expert_degree,
            )
            bare[0] += shape.vocabulary * shape.hidden / shape.tensor_degree
            # With virtual stages the last backwards of more microbatches can hide sums.
            window = (self.ranks * (virtual - 1) + 1) / virtual
            share = np.minimum(1.0, bare / self.rank_parameters.sum(axis=0))
            sums_s = np.maximum(sums_s * share, sums_s - window * microbatch_s)
        return sums_s + self.optimizer_s(system)

    def iteration(
        self, system: System, ends_s: Floats, microbatches: int | None = None
    ) -> Iteration:
        """Return the graph of an iteration."""
        hop_s = self.transfer_s(system)
        ends = [
            FixedOperation("step", "end", end_s, where=(rank,))
            for rank, end_s in enumerate(ends_s.tolist())
        ]
        schedule = schedule_of(
            self.schedule, len(self.split), microbatches or self.microbatches, self.virtual_stages
        )
        return pipeline_iteration(schedule, transfer=Transfer(hop_s, hop_s), operations=ends)


@lru_cache(maxsize=32)
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


@cache
def _stage_ranks(name: str, stages: int, virtual_stages: int) -> tuple[int, ...]:
    return schedule_of(name, stages, stages // virtual_stages, virtual_stages).stage_ranks


# Bytes: bf16, and the float32 weight and two moments of Adam
_WEIGHT = 2
_STATE = 12
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
    sizes = ((_WEIGHT, 3), (shape.gradient_bytes, 2), (_STATE, 1))
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
    if (
        job.sharding >= 2
    ):  # weights of two layers are gathered, or their gradients not yet scattered
        layer = shape.layer_parameters - shape.expert_parameters * (1 - 1 / shape.expert_degree)
        activations += 2 * _WEIGHT * layer / shape.tensor_degree
    return np.stack(
        [
            _WEIGHT * job.kept_parameters(3),
            shape.gradient_bytes * job.kept_parameters(2),
            _STATE * job.kept_parameters(1),
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
