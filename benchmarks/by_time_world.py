"""The world of number 46: pipelines whose GPUs run computations at the clock in force, with jitter,
and take some time to set a clock. It computes iterations by itself; the planner's own hook, decider
and controller decide when which clock is asked for, by an injected clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np

from perseus_planner import Plan, Profile
from perseus_planner.runtime.controller.protocol import (
    LATEST_BYTES,
    SETTLE_NS,
    AttachRequest,
    ControlChange,
    GpuSample,
    LatestStarts,
)
from perseus_planner.runtime.controller.rank import Rank
from perseus_planner.runtime.controller.scheduler import RESET
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import IterationTimes, Marks
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.timed_plan import TimedPlan

JITTER = 0.015  #: relative standard deviation of a computation's time
COMMON = 0.3  #: of its variance, common to a GPU for an iteration
TAIL_SHARE, TAIL = 0.01, 1.3  #: of computations, which take so much longer
DRIFT, DRIFT_PERIOD = 0.01, 60  #: of all GPUs together: amplitude, and iterations of a wave
SETTING_S, SETTING_DEVIATION_S = 0.005, 0.002  #: from asking for a clock until it is in force
BEGIN_DEVIATION_S = 0.005  #: of when the begin of an iteration is seen
PAUSE_SHARE, PAUSE_DEVIATION = 0.12, 0.02  #: between iterations: of the iteration, and of itself
_WHOLE = (0, "F", 0)


@dataclass(frozen=True)
class Work:
    """The work of one iteration: how much longer than its row each computation takes."""

    factors: np.ndarray  #: of each computation, by place
    begin_errors_s: np.ndarray  #: of each rank: when its begin is seen, after it is
    pause_s: float  #: before the iteration

    @classmethod
    def draw(cls, plan: Plan, number: int, seed: int) -> Work:
        """Draw the work of an iteration, which is the same for all ways to set clocks."""
        draw = np.random.default_rng([seed, number])
        iteration = plan.iteration
        ranks = len(plan.schedule.ranks)
        count = len(iteration.computations)
        of_gpu = draw.normal(0.0, JITTER * COMMON**0.5, ranks)
        own = draw.normal(0.0, JITTER * (1.0 - COMMON) ** 0.5, count)
        factors = np.exp(of_gpu[list(iteration.rank_of[:count])] + own)
        factors *= np.where(draw.random(count) < TAIL_SHARE, TAIL, 1.0)
        factors *= 1.0 + DRIFT * np.sin(2.0 * np.pi * number / DRIFT_PERIOD)
        pause_s = plan.baseline_time_s * PAUSE_SHARE * (1.0 + draw.normal(0.0, PAUSE_DEVIATION))
        return cls(factors, draw.normal(0.0, BEGIN_DEVIATION_S, ranks), pause_s)


@dataclass
class Gpu:
    """The clocks of one GPU: when which is in force."""

    top: int
    seed: int
    since_s: list[float] = field(default_factory=lambda: [0.0])
    clocks: list[int] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=lambda: [0.0])
    asked: list[int] = field(default_factory=lambda: [RESET])

    def __post_init__(self) -> None:
        self.clocks = [self.top]
        self._draw = np.random.default_rng([self.seed, 46])

    def ask(self, at_s: float, clock: int) -> float | None:
        """Ask for a clock; return when it is in force, None if it was asked for already."""
        if clock == self.asked[-1]:
            return None
        setting_s = max(0.0005, self._draw.normal(SETTING_S, SETTING_DEVIATION_S))
        in_force_s = max(at_s, self.since_s[-1]) + setting_s
        self.since_s.append(in_force_s)
        self.clocks.append(clock or self.top)
        self.asked_s.append(at_s)
        self.asked.append(clock)
        return in_force_s

    def drop(self, since_s: float) -> None:
        """Drop what was to be asked for since a moment."""
        while self.asked_s[-1] >= since_s:
            for each in (self.since_s, self.clocks, self.asked_s, self.asked):
                each.pop()

    def forget(self, before_s: float) -> None:
        """Forget what was in force before."""
        while len(self.since_s) > 1 and self.since_s[1] <= before_s:
            for each in (self.since_s, self.clocks, self.asked_s, self.asked):
                del each[0]

    def run(
        self, begin_s: float, rows: dict[int, tuple[float, float]], factor: float
    ) -> tuple[float, float]:
        """Return when a computation that begins now ends, and its joules."""
        left = factor
        now_s = begin_s
        energy_j = 0.0
        place = 0
        while place + 1 < len(self.since_s) and self.since_s[place + 1] <= now_s:
            place += 1
        while True:
            time_s, joules = rows[self.clocks[place]]
            until_s = self.since_s[place + 1] if place + 1 < len(self.since_s) else float("inf")
            part = min(left, (until_s - now_s) / time_s)
            energy_j += part * joules
            left -= part
            now_s += part * time_s
            if left <= 1e-12:
                return now_s, energy_j
            now_s = until_s
            place += 1


class Pipeline:
    """The GPUs of one pipeline, and how its computations depend on each other.

    Args:
        plan: Whose iteration it runs.
        profile: What computations really take and use.
        seed: Of the times to set clocks.
    """

    def __init__(self, plan: Plan, profile: Profile, seed: int) -> None:
        self.plan = plan
        self.profile = profile
        iteration = plan.iteration
        count = len(iteration.computations)
        self.count = count
        keys = iteration.keys
        self.rows = [
            {row.clock_mhz: (row.time_s, row.energy_j) for row in profile.measurements[key]}
            for key in keys
        ]
        self.rank_of = iteration.rank_of
        self.gpus = [
            Gpu(profile.measurements[keys[iteration.programs[rank][0]]][0].clock_mhz, seed + rank)
            for rank in range(len(plan.schedule.ranks))
        ]
        self.now_s = 1.0

    def run(
        self, work: Work, asked_at_ends: dict[int, tuple[int, int]] | None = None
    ) -> tuple[list[float], float, float]:
        """Run an iteration that begins now.

        Args:
            work: Its work.
            asked_at_ends: What is asked for when a computation ends, by its place: rank and clock.

        Returns:
            The ends of the ranks, and the joules of their computations and busy seconds.
        """
        iteration = self.plan.iteration
        ends_s = [0.0] * self.count
        of_ranks_s = [self.now_s] * len(self.gpus)
        energy_j = busy_s = 0.0
        for place in iteration.order:
            begin_s = max(
                (ends_s[other] + lag_s for other, lag_s in iteration.waits[place]),
                default=self.now_s,
            )
            rank = self.rank_of[place]
            factor = float(work.factors[place])
            end_s, joules = self.gpus[rank].run(begin_s, self.rows[place], factor)
            ends_s[place] = end_s
            of_ranks_s[rank] = max(of_ranks_s[rank], end_s)
            energy_j += joules
            busy_s += end_s - begin_s
            if asked_at_ends is not None and place in asked_at_ends:
                asked_rank, clock = asked_at_ends[place]
                self.gpus[asked_rank].ask(end_s, clock)
        return of_ranks_s, energy_j, busy_s


@dataclass(frozen=True)
class Outcome:
    """One iteration."""

    time_s: float
    energy_j: float  #: of all GPUs, waiting until its end included


class Run:
    """Trains some iterations; each subclass sets clocks in its own way."""

    def __init__(self, plan: Plan, profile: Profile, seed: int) -> None:
        self.plan = plan
        self.pipeline = Pipeline(plan, profile, seed)
        self.waiting_w = plan.rank_waiting_w

    def iteration(self, work: Work) -> Outcome:
        """Run the next iteration."""
        pipeline = self.pipeline
        pipeline.now_s += work.pause_s
        begin_s = pipeline.now_s
        for gpu in pipeline.gpus:
            gpu.forget(begin_s - 1.0)
        self.before(begin_s, work)
        ends_s, energy_j, busy_s = pipeline.run(work, self.asked_at_ends())
        time_s = max(ends_s) - begin_s
        waiting_s = len(pipeline.gpus) * time_s - busy_s
        self.after(begin_s, ends_s, work)
        pipeline.now_s = max(ends_s)
        return Outcome(time_s, energy_j + self.waiting_w[0] * waiting_s)

    def before(self, begin_s: float, work: Work) -> None:
        """Prepare the clocks of an iteration."""

    def after(self, begin_s: float, ends_s: Sequence[float], work: Work) -> None:
        """Take note of its end."""

    def asked_at_ends(self) -> dict[int, tuple[int, int]] | None:
        """See `Pipeline.run`."""
        return None


class Hooked(Run):
    """Each clock is asked for when the computation before it ends, as hooks do."""

    def asked_at_ends(self) -> dict[int, tuple[int, int]]:
        """See `Pipeline.run`."""
        asked = {}
        for rank, places in enumerate(self.plan.iteration.programs):
            names = self.plan.iteration.names
            clocks = [self.plan.clocks[names[place]] for place in places]
            nexts = [*clocks[1:], clocks[0]]
            asked |= {place: (rank, clock) for place, clock in zip(places, nexts, strict=True)}
        return asked


class ByTime(Run):
    """The planner's own: hook and decider of each rank, and what the controller has of it.

    Args:
        microbatches: Of each iteration that is shown.
    """

    def __init__(self, plan: Plan, profile: Profile, seed: int) -> None:
        super().__init__(plan, profile, seed)
        self.ranks = [TimedRank(plan, rank) for rank in range(len(plan.schedule.ranks))]
        self.is_evaluation = False
        self.microbatches: int | None = plan.iteration.schedule.microbatches
        self.begin_shift_s: Sequence[float] = [0.0] * len(self.ranks)

    def before(self, begin_s: float, work: Work) -> None:
        """See `Run.before`."""
        for rank, gpu, error_s, shift_s in zip(
            self.ranks, self.pipeline.gpus, work.begin_errors_s, self.begin_shift_s, strict=True
        ):
            if not self.is_evaluation:
                rank.begin(begin_s, begin_s + float(error_s) + shift_s, gpu, self.microbatches)

    def after(self, begin_s: float, ends_s: Sequence[float], work: Work) -> None:
        """See `Run.after`."""
        for rank, gpu, end_s in zip(self.ranks, self.pipeline.gpus, ends_s, strict=True):
            if not self.is_evaluation:
                rank.end(end_s, gpu)


class TimedRank:
    """One rank of `ByTime`."""

    def __init__(self, plan: Plan, rank: int) -> None:
        memory = bytearray(LATEST_BYTES)
        self.shared = SimpleNamespace(
            request=memoryview(bytearray(8)).cast("Q"), latest=LatestStarts(memoryview(memory))
        )
        request = AttachRequest(rank, "nvml:0", "clock", None)
        self.controlled = Rank(Mock(), request, self.shared, os.getpid())
        self.decider = TimedPlan()
        self.decider.begin(SimpleNamespace(latest=self.shared.latest))  # type: ignore[arg-type]
        self.program = self.decider.followed(Program.of_plan(1, plan, rank))
        self.hook = Hook(Marks(self.shared.request), self, self.program)
        self.number = -1
        self.messages: list[Any] = []
        self.began_s = 0.0

    # What a `ProgramSource` does:
    def program_for(self, iteration: int) -> Program | None:
        """See `ProgramSource.program_for`."""
        return self.decider.program_for(iteration, self.program)

    def on_end(self, iteration: int, program: Any, deviation: Any, order: Any = None) -> None:
        """See `ProgramSource.on_end`."""
        self.decider.on_end(iteration, program, deviation, order)

    def on_unfollowed(self, problem: str) -> None:
        """See `ProgramSource.on_unfollowed`."""

    def begin(self, begin_s: float, seen_s: float, gpu: Gpu, microbatches: int | None) -> None:
        """Show the begin of an iteration, and ask for the clocks that the controller sets in it,
        all ahead, as they depend on nothing that happens in it.
        """
        self.number += 1
        self.began_s = begin_s
        self._poll(round((begin_s - 0.001) * 1e9), gpu)
        self.hook.begin_iteration(microbatches, number=self.number)
        self.hook.begin(*_WHOLE)
        self._poll(round(seen_s * 1e9), gpu)
        while (due_ns := self.controlled.due_ns) is not None:
            self._poll(due_ns, gpu)

    def end(self, end_s: float, gpu: Gpu) -> None:
        """Show the end of the iteration."""
        self.hook.end()
        self.hook.end_iteration()
        gpu.drop(end_s)  # what was asked for ahead, when the iteration had ended
        end_ns = round(end_s * 1e9)
        self.messages = [each for each in self.messages if each.seen_ns < end_ns]
        self._poll(round(end_s * 1e9), gpu)
        times = IterationTimes(
            self.number,
            round(self.began_s * 1e9),
            ((round(self.began_s * 1e9), round(end_s * 1e9)),),
            round(end_s * 1e9),
        )
        self.decider.look([times], self.messages)
        self.messages = []

    def _poll(self, now_ns: int, gpu: Gpu) -> None:
        request = self.controlled.poll_request(now_ns)
        if request is None:
            return
        if request.is_new_iteration:
            self.messages.append(_sample(now_ns))
        asked_ns = now_ns if request.due_ns is None else request.due_ns
        in_force_s = gpu.ask(asked_ns / 1e9, request.value)
        if in_force_s is not None and request.value != RESET:
            ended_ns = round(in_force_s * 1e9) - SETTLE_NS
            self.messages.append(
                ControlChange(request.position, request.value, asked_ns, asked_ns, ended_ns, None)
            )


def _sample(seen_ns: int) -> GpuSample:
    return GpuSample(seen_ns, seen_ns, None, None, None, None, {}, 0, 0, None)
