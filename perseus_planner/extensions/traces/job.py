"""What traces of a job say, whichever files it was read from: when each computation ran, in each
step of each pipeline.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.base.prefixes import counted
from perseus_planner.extensions.traces.align import find_offsets
from perseus_planner.extensions.traces.classes import CLASSES, COMMUNICATION
from perseus_planner.extensions.traces.kineto import read_trace
from perseus_planner.extensions.traces.order import find_layout, with_first_inputs, with_grid
from perseus_planner.extensions.traces.steps import rank_steps
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules.pipeline import pipeline_iteration

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import TypeAlias

    from numpy.typing import NDArray

    from perseus_planner.extensions.traces.order import Layout
    from perseus_planner.extensions.traces.steps import RankSteps
    from perseus_planner.schedules import Computation, Schedule
    from perseus_planner.schedules.iteration import Iteration

    Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class TracedJob:
    """Computations as they ran. Arrays have the shape (pipelines, steps, computations), with
    computations in the order of `schedule.computations()`.
    """

    schedule: Schedule
    #: when each began, seconds; the clocks of a pipeline's ranks are those of its first one
    begins_s: Floats
    ends_s: Floats  #: when each ended
    computing_s: Floats  #: how long kernels ran meanwhile
    iterations_s: Floats  #: (pipelines, steps) how long each iteration took
    workers: tuple[tuple[str, ...], ...]  #: name of each rank of each pipeline
    #: (pipelines, ranks) plus or minus how well the clocks of ranks are aligned, seconds; None if
    #: the times are of one clock
    widths_s: Floats | None
    offsets_s: Floats | None  #: (pipelines, ranks) by how much each clock is ahead, likewise
    #: whether times are those of the GPU; else those of the host, where only the order is known
    has_gpu_times: bool
    gpu: str | None  #: name of the GPU, as the files have it
    remarks: tuple[str, ...] = ()  #: what was seen while reading
    #: class of kernels (`classes`) -> share of the kernels' time; empty where none are known
    kernel_shares: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def iteration(self) -> Iteration:
        """The computations, and what they wait for."""
        return pipeline_iteration(self.schedule)

    @property
    def has_computing_times(self) -> bool:
        """Whether it is known when kernels ran inside computations."""
        return self.has_gpu_times and bool((self.computing_s > 0.0).any())

    @property
    def computations(self) -> tuple[Computation, ...]:
        """The computations, in the order of the arrays."""
        return self.iteration.computations

    @property
    def times_s(self) -> Floats:
        """How long each computation ran."""
        return self.ends_s - self.begins_s

    @property
    def pipelines(self) -> int:
        """The number of pipelines side by side."""
        return len(self.begins_s)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return int(self.begins_s.shape[1])

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """The stages and kinds, in order."""
        return tuple(
            sorted({Key(computation.stage, computation.kind) for computation in self.computations})
        )

    def places(self, key: Key) -> list[int]:
        """Return the places of the computations of a stage and kind."""
        return [
            position
            for position, computation in enumerate(self.computations)
            if Key(computation.stage, computation.kind) == key
        ]

    def busy_spans(self) -> list[list[tuple[float, float]]]:
        """Return when each GPU computed: begin and end of each computation."""
        # What lies beyond the computations in an iteration has no traced times.
        rank_of = np.array(self.iteration.rank_of[: len(self.computations)])
        spans = []
        for pipeline in range(self.pipelines):
            for rank in range(len(self.schedule.ranks)):
                begins_s = self.begins_s[pipeline][:, rank_of == rank].ravel()
                ends_s = self.ends_s[pipeline][:, rank_of == rank].ravel()
                spans.append(list(zip(begins_s.tolist(), ends_s.tolist(), strict=True)))
        return spans

    def span_s(self) -> tuple[float, float]:
        """Return when the first computation began, and when the last iteration ended."""
        begin_s = float(self.begins_s.min())
        last_s = self.begins_s[:, -1].min(axis=-1) + self.iterations_s[:, -1]
        return begin_s, float(last_s.max())

    def of_steps(self, chosen: slice) -> TracedJob:
        """Return the same job with some of its steps."""
        return TracedJob(
            self.schedule,
            self.begins_s[:, chosen],
            self.ends_s[:, chosen],
            self.computing_s[:, chosen],
            self.iterations_s[:, chosen],
            self.workers,
            self.widths_s,
            self.offsets_s,
            self.has_gpu_times,
            self.gpu,
            self.remarks,
            self.kernel_shares,
        )


def read_kineto_job(
    paths: Sequence[Path], grid: Schedule | None = None, pipelines: int | None = None
) -> TracedJob:
    """Read the files of PyTorch's profiler of one rank of each stage, or more.

    Args:
        paths: the files.
        grid: the schedule that they ran, if it is known.
        pipelines: how many pipelines they are, if it is known.

    Raises:
        UsageError: If a file cannot be read, or they are not those of a pipeline.
    """
    ranks: list[RankSteps] = []
    with_kernels: list[str] = []
    without: list[str] = []
    gpus: list[str] = []
    remarks: list[str] = []
    class_us: Counter[str] = Counter()
    for path in paths:
        trace = read_trace(path)
        class_us.update(trace.class_us)
        rank = rank_steps(trace)
        # Kernels of a graph belong to no operation, so their computations would look empty.
        if trace.graph_kernels:
            raise UsageError(
                f"{path}: {counted(trace.graph_kernels, 'kernel')} were launched by CUDA graphs, "
                "which record no operations, so they belong to no computation; trace a run without "
                "graphs (without torch.compile's reduce-overhead, or Megatron's --cuda-graph-impl)"
            )
        # Kept apart, as ranks with and without kernels cannot be compared.
        (without if trace.kernels is None else with_kernels).append(rank.name)
        if trace.gpu is not None:
            gpus.append(trace.gpu)
        if trace.unlaunched:
            remarks.append(
                f"{rank.name}: {counted(trace.unlaunched, 'kernel')} were launched before the "
                "trace began; they are left out."
            )
        ranks.append(rank)
    if with_kernels and without:
        raise UsageError(
            f"{without[0]} has no kernels and {with_kernels[0]} has; trace all ranks with "
            "ProfilerActivity.CPU and ProfilerActivity.CUDA"
        )
    # By number in the job, as files are named in any order.
    ranks.sort(key=lambda rank: (rank.rank is None, rank.rank or 0, rank.name))
    _check_ranks(ranks)
    layout = find_layout(ranks, pipelines) if grid is None else with_grid(ranks, grid, pipelines)
    if len(set(gpus)) > 1:
        raise UsageError(
            f"the traces are of {gpus[0]} and of {next(g for g in gpus if g != gpus[0])}; GPUs of "
            "one kind are planned for: name their files alone"
        )
    ranks = with_first_inputs(ranks, layout)
    job = _job(ranks, layout, bool(with_kernels), gpus[0] if gpus else None, remarks)
    # Communication contains the wait for other ranks, so its share says nothing.
    class_us.pop(COMMUNICATION, None)
    total_us = sum(class_us.values())
    shares = {name: class_us[name] / total_us for name in CLASSES if class_us[name] > 0.0}
    return replace(job, kernel_shares=shares)


def _check_ranks(ranks: Sequence[RankSteps]) -> None:
    seen: dict[int, str] = {}
    for rank in ranks:
        if rank.rank is not None and rank.rank in seen:
            raise UsageError(
                f"two traces are of rank {rank.rank}; name each rank's file once, of the same steps"
            )
        if rank.rank is not None:
            seen[rank.rank] = rank.name


def _job(
    ranks: Sequence[RankSteps],
    layout: Layout,
    has_kernels: bool,
    gpu: str | None,
    remarks: list[str],
) -> TracedJob:
    """Put the ranks of each pipeline together, in the steps that all of them traced."""
    # Steps are compared between ranks, so only those that all have traced whole are used.
    common = set.intersection(*(set(rank.numbers) for rank in ranks))
    if not common:
        first, *others = ranks
        unlike = next(rank for rank in others if not set(rank.numbers) & set(first.numbers))
        raise UsageError(
            f"{first.name} traced steps {_range(first.numbers)} and {unlike.name} steps "
            f"{_range(unlike.numbers)}; trace the same steps on all ranks"
        )
    numbers = sorted(common)
    lost = max(len(rank.numbers) for rank in ranks) - len(numbers)
    if lost:
        remarks.append(f"{counted(lost, 'step')} that not all ranks traced whole are left out.")
    # Each pipeline's arrays have its ranks one after the other, as the schedule has its
    # computations.
    tables = [
        [_table(ranks[number_of_rank], numbers) for number_of_rank in pipeline]
        for pipeline in layout.pipelines
    ]
    begins_s, ends_s, computing_s = (
        np.array([np.concatenate([table[field] for table in row], axis=1) for row in tables])
        for field in range(3)
    )
    # All ranks see the same iteration, each by its own clock, so their mean has the least error.
    iterations_s = np.array(
        [
            np.mean(
                [_iterations(ranks[number_of_rank], numbers) for number_of_rank in pipeline], axis=0
            )
            for pipeline in layout.pipelines
        ]
    )
    widths_s: Floats | None = np.zeros((len(tables), len(layout.schedule.ranks)))
    offsets_s = np.zeros_like(widths_s)
    rank_of = [rank for rank, row in enumerate(layout.schedule.ranks) for _ in row]
    for number in range(len(tables)):
        try:
            offsets = find_offsets(layout.schedule, begins_s[number], ends_s[number])
        except UsageError:
            # With kernels the times are those of the GPU, and then the order must hold.
            if has_kernels:
                raise
            # Hosts that run ahead of their GPUs begin computations before their input is there.
            remarks.append(
                "Hosts run ahead of GPUs here: only the order of computations can be told; trace "
                "with ProfilerActivity.CUDA too."
            )
            widths_s = None
            break
        assert widths_s is not None
        offsets_s[number] = offsets.middle_s
        widths_s[number] = offsets.width_s
        # From here on all times of a pipeline are by its first rank's clock.
        begins_s[number] -= offsets_s[number][rank_of]
        ends_s[number] -= offsets_s[number][rank_of]
    workers = tuple(
        tuple(ranks[number_of_rank].name for number_of_rank in pipeline)
        for pipeline in layout.pipelines
    )
    return TracedJob(
        layout.schedule,
        begins_s,
        ends_s,
        computing_s,
        iterations_s,
        workers,
        widths_s,
        offsets_s,
        has_kernels,
        gpu,
        tuple(remarks),
    )


def _table(rank: RankSteps, numbers: Sequence[int]) -> tuple[Floats, Floats, Floats]:
    """Return begins, ends and computing times of a rank, each (steps, computations)."""
    chosen = [rank.steps[rank.numbers.index(number)] for number in numbers]
    begins_s = np.array([[ran.begin_s for ran in step] for step in chosen])
    ends_s = np.array([[ran.end_s for ran in step] for step in chosen])
    computing_s = np.array([[ran.computing_s for ran in step] for step in chosen])
    return begins_s, ends_s, computing_s


def _iterations(rank: RankSteps, numbers: Sequence[int]) -> list[float]:
    return [rank.iterations_s[rank.numbers.index(number)] for number in numbers]


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
