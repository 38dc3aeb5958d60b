"""A job whose microbatches differ has a file of lengths, and other policies.

The file is a CSV of one of two sorts:

* `step,pipeline,microbatch,length` has a row for each sequence, with its tokens. Sequences that are
  packed into one microbatch have a row each.
* `step,pipeline,microbatch_0,microbatch_1,...` has a row for each pipeline and step, with the work
  of each microbatch, in any unit: measured seconds, say, or tokens.

All pipelines end each iteration together, with the slowest. A computation takes as long as
measured for a microbatch of mean work, and for others in proportion.

| policy          | clocks                                                                         |
|-----------------|--------------------------------------------------------------------------------|
| `max`           | all at maximum                                                                 |
| `planner-fixed` | the plan for microbatches that are alike, in every iteration                   |
| `on-time`       | the same, made to be on time for 95 % of such iterations: `Profile.jitter`     |
| `own-time`      | plans of the batch, each for the time of its own pipeline at maximum clocks    |
| `one-clock`     | one for each pipeline and iteration, which ends with the slowest pipeline      |
| `batch`         | plans of the batch, which end with the slowest pipeline                        |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner import Frontier, PipelineDag, solve_dag
from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.tables import CsvFile
from perseus_planner.base.units import COUNT, INDEX, SHARE
from perseus_planner.profiles.measurement import ClockChange

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.batches.solver import BatchPlan

LENGTH_POLICIES = ("max", "planner-fixed", "on-time", "own-time", "one-clock", "batch")
MOST_CHANGES = 8  #: of a rank's clock in an iteration, if changes cost time
_LENGTHS_HEADER = (
    "step,pipeline,microbatch,length, or step,pipeline,microbatch_0,microbatch_1 and so on"
)
_WORK = SHARE._replace(wanted="a work: write a number of 0 or more")
#: work of a squared length, in tokens: hidden size 4096, causal attention
_SQUARE = 1 / (12 * 4096)
WORK_OF_LENGTHS = "tokens + squared lengths / 49152, as in a transformer of hidden size 4096"


@dataclass(frozen=True, eq=False)
class Lengths:
    """The work of each microbatch of a job."""

    #: (iterations, pipelines, microbatches) as multiples of the mean.
    work: NDArray[np.float64]
    of_sequences: bool  #: whether it was computed from lengths of sequences

    @property
    def spread(self) -> float:
        """The standard deviation of a microbatch's work, as a part of its mean."""
        return float(self.work.std())

    @cached_property
    def of_pipelines(self) -> NDArray[np.float64]:
        """(iterations, pipelines) mean work of each pipeline's microbatches."""
        return np.asarray(self.work.mean(axis=2), dtype=np.float64)

    @property
    def slowest(self) -> float:
        """How many times the mean the pipeline with the most work has, on average."""
        return float((self.of_pipelines.max(axis=1) / self.of_pipelines.mean(axis=1)).mean())

    @property
    def moves(self) -> float:
        """The share of iterations in which another pipeline than before has the most work."""
        most = self.of_pipelines.argmax(axis=1)
        return float((most[1:] != most[:-1]).mean()) if len(most) > 1 else 0.0

    def first(self, iterations: int) -> Lengths:
        """Return the first iterations alone."""
        return replace(self, work=self.work[:iterations])


def read_lengths(path: Path) -> Lengths:
    """Read a file of lengths.

    Raises:
        UsageError: If the file cannot be read or a row is wrong; names the file, the line and the
            column. Or if iterations do not have the same pipelines, or pipelines not the same
            microbatches.
    """
    table = CsvFile(path, UsageError, f"the header {_LENGTHS_HEADER}")
    # The header tells which of the two sorts the file is.
    columns = [name for name in table.header if name.startswith("microbatch_")]
    of_sequences = not columns
    needed = ["step", "pipeline", *(["microbatch", "length"] if of_sequences else columns)]
    table.need(needed, _LENGTHS_HEADER)
    table.refuse_twice(needed)
    work: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for row in table:
        key = row.read("step", INDEX), row.read("pipeline", INDEX)
        if of_sequences:
            microbatch = row.read("microbatch", INDEX)
            length = row.read("length", COUNT)
            # Sequences of one microbatch are packed, so their work adds up.
            before = work[key].get(microbatch, 0.0)
            # Attention costs the square of a length, whatever it is packed with.
            work[key][microbatch] = before + length + _SQUARE * length**2
        elif key in work:
            raise UsageError(
                f"{row.where}: this step and pipeline are there twice; keep one of the rows"
            )
        else:
            work[key] = {i: row.read(name, _WORK) for i, name in enumerate(columns)}
    if not work:
        raise UsageError(f"{path}: has no rows below its header; write what each step had")
    # Numbers in the file may have gaps, so they are ranked.
    steps, pipelines = (sorted({key[i] for key in work}) for i in range(2))
    microbatches = sorted(
        {microbatch for microbatch_work in work.values() for microbatch in microbatch_work}
    )
    for step in steps:
        for pipeline in pipelines:
            # Every step needs every microbatch, as one schedule is replayed for all.
            missing = [m for m in microbatches if m not in work.get((step, pipeline), {})]
            if missing:
                raise UsageError(
                    f"{path}: step {step} has no microbatch {missing[0]} of pipeline {pipeline}; "
                    "give all steps the same pipelines and microbatches"
                )
    table_of_work = np.array(
        [[[work[s, p][m] for m in microbatches] for p in pipelines] for s in steps]
    )
    if not table_of_work.mean() > 0.0:
        raise UsageError(f"{path}: has no work at all; write numbers above 0")
    # Only ratios count, as the profile's times are those of mean work.
    return Lengths(table_of_work / table_of_work.mean(), of_sequences)


@dataclass(frozen=True)
class BatchOutcome:
    """What a job of unlike microbatches comes to under one policy."""

    policy: str  #: name of the policy
    times_s: tuple[float, ...]  #: of each iteration, seconds
    energy_j: float  #: over all GPUs, waiting included, joules


class UnlikeJob:
    """A job whose microbatches differ.

    Args:
        frontier: of a pipeline whose microbatches are alike.
        lengths: the work of each microbatch.
        slowdown: the target, as a multiple of the time of the slowest pipeline with all clocks at
            maximum.

    Raises:
        UsageError: If the schedule has other microbatches than the lengths.
    """

    def __init__(self, frontier: Frontier, lengths: Lengths, slowdown: float = 1.0) -> None:
        # Loaded here, as whoever only reads lengths does not need it.
        from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, Law

        self.frontier = frontier
        self.lengths = lengths
        self._slowdown = slowdown
        microbatches = lengths.work.shape[2]
        # The frontier's schedule is replayed, so its microbatches must be those of the file.
        if frontier.schedule.microbatches != microbatches:
            raise UsageError(
                f"lengths: have {microbatches} microbatches in an iteration, and the schedule "
                f"{frontier.schedule.microbatches}; solve for {microbatches}"
            )
        dag = frontier.dag
        change = frontier.profile.clock_change
        rows = dag.profile.measurements
        # Work is in multiples of the mean, so a law is proportional, with the measured time as
        # slope.
        laws = {key: Law(0.0, (rows[key][0].time_s,)) for key in dict.fromkeys(dag.iteration.keys)}
        # Free changes need no limit.
        self._most_changes = None if change is None else MOST_CHANGES
        self.planner = BatchPlanner(dag, laws, max_changes=self._most_changes)
        self._change = change or ClockChange(0.0)
        self._as_said = np.ones(len(dag.computations))

    def full_clocks_s(self, iteration: int) -> list[float]:
        """Return the seconds of each pipeline in an iteration with all clocks at maximum."""
        return [self.planner.full_clocks_s(work[:, None]) for work in self.lengths.work[iteration]]

    def outcome(self, policy: str) -> BatchOutcome:
        """Replay the job under one of `LENGTH_POLICIES`.

        Raises:
            InfeasibleError: If no iteration is as fast as the target of the policy.
            UsageError: If there is no such policy.
        """
        times_s = []
        effective_j = []
        # A static plan is made once and used for all iterations.
        make = self._maker(policy)
        for iteration, pipelines in enumerate(self.lengths.work):
            # The slowest pipeline at full clocks decides, as all end together.
            target_s = self._slowdown * max(self.full_clocks_s(iteration))
            came = [
                self.planner.replay(
                    make(work, target_s),
                    self._as_said,
                    self._change,
                    # Only plans of the batch tell ranks when they are late.
                    is_catching_up=policy in ("batch", "own-time"),
                )
                for work in pipelines[:, :, None]
            ]
            times_s.append(max(replayed.time_s for replayed in came))
            effective_j += [replayed.effective_j for replayed in came]
        # Effective energy leaves out waiting, which is added for the whole time of all pipelines.
        waiting_w = self.frontier.dag.waiting_w * self.lengths.work.shape[1]
        energy_j = math.fsum([*effective_j, waiting_w * math.fsum(times_s)])
        return BatchOutcome(policy, tuple(times_s), energy_j)

    def _maker(self, policy: str) -> Callable[[NDArray[np.float64], float], BatchPlan]:
        """Return what makes the plan of a pipeline from its work and the target."""
        planner = self.planner
        frontier = self.frontier
        if policy == "batch":
            return planner.plan
        if policy == "one-clock":
            return planner.one_clock
        if policy == "own-time":
            return lambda work, _: planner.plan(work, self._slowdown * planner.full_clocks_s(work))
        if policy == "max":
            return lambda work, target_s: planner.plan_of(work, None, target_s)
        if policy not in LENGTH_POLICIES:
            raise UsageError(
                f"policy {shown(policy)} does not apply to lengths; choose from "
                f"{', '.join(LENGTH_POLICIES)}"
            )
        deadline_s = self._slowdown * frontier.baseline_time_s
        most = self._most_changes
        if policy == "planner-fixed":
            # This plan is for microbatches that are alike, so it has no slack for others.
            plan = frontier.plan_until(deadline_s, max_changes=most, on_time=None)
        else:
            plan = self._wary_frontier().plan_until(deadline_s, max_changes=most)
        # A plan that is on time may have clocks that were not measured: the next higher ones are.
        rows = frontier.profile.measurements
        clocks = [
            min(m.clock_mhz for m in rows[key] if m.clock_mhz >= mhz)
            for key, mhz in zip(frontier.dag.iteration.keys, plan.clocks.values(), strict=True)
        ]
        return lambda work, target_s: planner.plan_of(work, clocks, target_s)

    def _wary_frontier(self) -> Frontier:
        # The cluster is replayed from the very rows of the profile.
        profile = replace(self.frontier.profile, jitter=self.lengths.spread, gpu_spread=0.0)
        return solve_dag(PipelineDag(profile, self.frontier.dag.iteration))

    def reordered_s(self) -> tuple[float, float]:
        """Return the seconds of all iterations at full clocks: as they are, and if each pipeline
        ran its microbatches in the best order that was tried.
        """
        as_is_s = 0.0
        reordered_s = 0.0
        for iteration, pipelines in enumerate(self.lengths.work):
            as_is_s += max(self.full_clocks_s(iteration))
            reordered_s += max(
                self.planner.full_clocks_s(work[list(self.planner.best_order(work))])
                for work in pipelines[:, :, None]
            )
        return as_is_s, reordered_s
