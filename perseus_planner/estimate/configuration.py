"""How a training job shares a model among GPUs, and the time of its iterations.

An iteration is replayed over the graph of its own schedule: computations, transfers between stages,
then the sum of gradients over the data-parallel GPUs and the optimizer's step.
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
_SETTLED = (
    12  # multiples of the ranks after which further microbatches take the same time, within 0.1 %
)


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
        found = [0.0] * self.ranks
        for stage, rank in enumerate(stage_ranks(self.schedule, self.ranks, self.virtual_stages)):
            held = self.split[stage] * layer + (words + positions if stage == 0 else 0)
            held += words if stage == stages - 1 and (stages > 1 or not shape.tied) else 0
            found[rank] += held / shape.tensor_degree
        return tuple(found)

    @property
    def name(self) -> str:
        """What tells it from others of the same model, in one word."""
        shape, virtual = self.shape, f"x{self.virtual_stages}" if self.virtual_stages > 1 else ""
        runs = [
            f"{layers}" if count == 1 else f"{count}*{layers}"
            for layers, count in _runs(self.split)
        ]
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
                max(one / layers, one - hidden)
                for one, hidden in zip(sums_s, backward_s, strict=True)
            ]
        return [one + step for one, step in zip(sums_s, steps_s, strict=True)]

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

    def time_s(self, system: System, times: LayerTimes | None = None) -> float:
        """Return the seconds of an iteration at the top clocks, as far as the power limit allows
        them.
        """
        top_mhz = system.top_mhz
        stages = [
            {kind: phases.load(system).time_s(top_mhz) for kind, phases in kinds.items()}
            for kinds in self.stage_phases(system, times)
        ]
        return self.replay_s(system, stages)

    def replay_s(self, system: System, stages: Sequence[dict[str, float]]) -> float:
        """Return the seconds of an iteration whose computations take so many seconds, by stage
        and kind.
        """
        ranks = stage_ranks(self.schedule, self.ranks, self.virtual_stages)
        backward_s = [0.0] * self.ranks
        for stage, rank in enumerate(ranks):
            backward_s[rank] += stages[stage]["B"]
        hop_s, ends_s = self.transfer_s(system), self.end_s(system, backward_s)
        settled = _SETTLED * self.ranks
        if self.microbatches <= settled + self.ranks:
            count, more = self.microbatches, 0
        else:
            more, count = divmod(self.microbatches - settled, self.ranks)
            count += settled
        first_s = self._replayed_s(count, stages, hop_s, ends_s)
        if more:
            first_s += more * (
                self._replayed_s(count + self.ranks, stages, hop_s, ends_s) - first_s
            )
        return first_s

    def _replayed_s(
        self,
        microbatches: int,
        stages: Sequence[dict[str, float]],
        hop_s: float,
        ends_s: Sequence[float],
    ) -> float:
        nodes, last = _nodes(self.schedule, len(self.split), microbatches, self.virtual_stages)
        ends: list[float] = [0.0] * len(nodes)
        for place, stage, kind, before, sent in nodes:
            start = ends[before] if before >= 0 else 0.0
            if sent is not None:
                other, away = sent
                arrived = ends[other] + hop_s if away else ends[other]
                start = arrived if arrived > start else start
            ends[place] = start + stages[stage][kind]
        return max(ends[place] + end_s for place, end_s in zip(last, ends_s, strict=True))


@lru_cache(maxsize=256)
def stage_ranks(schedule: str, ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the rank that holds each stage."""
    made = schedule_of(schedule, ranks * virtual_stages, ranks, virtual_stages)
    return tuple(made.stage_ranks[stage] for stage in range(made.stages))


def _runs(split: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return the layers of stages that follow each other, and how many those stages are."""
    return [(layers, len(list(same))) for layers, same in groupby(split)]


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


@lru_cache(maxsize=512)
def _nodes(
    name: str, stages: int, microbatches: int, virtual_stages: int
) -> tuple[tuple[tuple[int, int, str, int, tuple[int, bool] | None], ...], tuple[int, ...]]:
    """Return the computations in an order in which they can be replayed, and the last of each rank.

    A computation is its place, stage and kind, the place before it on its rank (or -1), and the
    place whose result it takes, with whether that is on another rank.
    """
    iteration = pipeline_iteration(schedule_of(name, stages, microbatches, virtual_stages))
    previous: dict[int, int] = {}
    for program in iteration.programs:
        previous.update(zip(program, (-1, *program), strict=False))
    nodes = []
    for place in iteration.order:
        others = [other for other in iteration.predecessors[place] if other != previous[place]]
        sent = (
            (others[0], iteration.rank_of[others[0]] != iteration.rank_of[place])
            if others
            else None
        )
        computation = iteration.computations[place]
        nodes.append((place, computation.stage, computation.kind, previous[place], sent))
    return tuple(nodes), tuple(program[-1] for program in iteration.programs)
