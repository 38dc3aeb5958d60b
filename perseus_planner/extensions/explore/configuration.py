"""How a training job shares a model among GPUs: the graph of its iterations.

An iteration has the graph of its own schedule: computations, transfers between stages, then the sum
of gradients over the data-parallel GPUs and the optimizer's step.
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
from perseus_planner.schedules.layouts import Layout
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

WEIGHT_BYTES = 2  #: of a weight in bf16


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
            for size in (shape.narrow_bytes or WEIGHT_BYTES, shape.gradient_bytes)
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
        sizes = size, (size + WEIGHT_BYTES) / 2, WEIGHT_BYTES / 2, 0.0
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
