"""A training job in virtual time: GPUs with noise, slow clock changes and stale energy counters. No
planner's code.

All ranks of all pipelines begin an iteration together. A computation takes its true time at the
clock in force, times a jitter of its own; if the clock changes while it runs, the rest of it runs
at the new one. Ranks request clocks as the runtime does: the next computation's when one ends, the
first one's when the last ends, and the first one's of a new program when the iteration begins. The
calls of a node wait for one lock, in the order in which they were requested, and the newest request
of a GPU takes the place of an older one that still waits.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from perseus_planner import Profile
from perseus_planner.extensions.autopilot import ComputationObservation, RankObservation
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules.iteration import Iteration

Floats = NDArray[np.float64]
_REQUEST, _END, _LOCK, _SETTLE, _START = range(5)
Programs = Sequence[
    Sequence[Sequence[int]]
]  #: of each pipeline and rank, the clock of each computation, MHz


@dataclass
class Physics:
    """What GPUs do in an iteration.

    Attributes:
        jitter: standard deviation of a computation's time, relative.
        marks: of the times that are observed of it, relative.
        drift: of the power of a GPU over a few hundred iterations, relative.
        counter_step_s: seconds between updates of an energy counter.
        call_s: seconds for which setting a clock holds the lock of a node.
        settle_s: seconds from then until the clock is in force.
        gpus_per_lock: how many GPUs share a lock.
        tails: of computations, by how much a tenth of them are longer, in the mean of an
            exponential, relative.
        outliers: share of computations that take 2 to 5 times as long.
        shared: standard deviation of what all computations of an iteration have in common,
            relative; nine tenths of it stay in the next one.
        growth: by how much all computations take longer in 100 iterations, relative.
        lengths: standard deviation of the lengths of microbatches, relative.
        loader: share of an iteration for which each tenth one waits for its data.
        pauses: share of iterations that stand still for half of one.
    """

    jitter: float = 0.003
    marks: float = 0.003
    drift: float = 0.02
    counter_step_s: float = 0.1
    call_s: float = 0.0045
    settle_s: float = 0.0009
    gpus_per_lock: int = 8
    tails: float = 0.0
    outliers: float = 0.0
    shared: float = 0.0
    growth: float = 0.0
    lengths: float = 0.0
    loader: float = 0.0
    pauses: float = 0.0


REAL = Physics(tails=0.1, outliers=3e-4, shared=0.005, growth=0.01, loader=0.05)
"""The noise of real training."""


class _Gpu:
    """A GPU: its clock, and what it runs."""

    def __init__(self, clock: int, phase_s: float) -> None:
        self.clock = self.wanted = self.set_last = clock
        self.requested_s: float | None = (
            None  #: when the clock that waits for the lock was requested
        )
        self.phase_s = phase_s  #: of its counter
        self.position = 0
        self.running = False
        self.since_s = 0.0  #: when it began to run, or to wait, at this power
        self.left = 1.0  #: share of the computation that is left
        self.version = 0
        self.energy_j = 0.0
        self.recent: list[
            tuple[float, float, float]
        ] = []  #: begin, end and power of what it did since the last tick
        self.read_j = 0.0  #: what the counter showed at the begin of the iteration


@dataclass(frozen=True)
class Ran:
    """An iteration that ran: its time, its true energy over all GPUs, what was observed, the
    most changes of a GPU.
    """

    time_s: float
    energy_j: float
    observations: tuple[RankObservation, ...]
    changes: int


class World:
    """A job of equal pipelines.

    Args:
        truth: the true time and energy of every stage, kind and clock.
        iteration: of one pipeline.
        physics: the GPUs.
        pipelines: how many there are, each on nodes of its own.
        seed: of all noise.
    """

    def __init__(
        self,
        truth: Profile,
        iteration: Iteration,
        physics: Physics,
        pipelines: int = 1,
        seed: int = 0,
    ) -> None:
        self.iteration, self.physics, self.pipelines = iteration, physics, pipelines
        self.set_truth(truth)
        self._random = np.random.default_rng([seed, 23])
        self._ranks = len(iteration.schedule.ranks)
        count = pipelines * self._ranks
        phases = self._random.uniform(0.0, physics.counter_step_s, count).tolist()
        self._gpus = [_Gpu(self.clocks[0], phase) for phase in phases]
        self._noise = np.random.default_rng([seed, 29])  # of what all programs have in common
        self._drift = np.zeros(count)
        self._shared, self._full_s = 0.0, 0.0
        self.slowdown = np.ones(count)  #: of each GPU, pipeline by pipeline
        self._now_s, self._number = 0.0, 0
        self.set_modes(())
        operations = [0] * (len(iteration.waits) - len(iteration.keys))
        microbatches = [0] * len(iteration.keys)
        for rank, program in enumerate(iteration.programs):
            computed = [place for place in program if place < len(iteration.keys)]
            for place, each in zip(computed, iteration.schedule.ranks[rank], strict=True):
                microbatches[place] = each.microbatch
        self._microbatch = np.array([*microbatches, *operations])
        self._microbatches = max(microbatches) + 1
        self._programs: Programs | None = None
        self._successors: list[list[tuple[int, float]]] = [[] for _ in iteration.predecessors]
        self._waits = [len(before) for before in iteration.waits]
        for place, before in enumerate(iteration.waits):
            for other, lag_s in before:
                self._successors[other].append((place, lag_s))
        # of each rank, how many computations come before each place of its program
        self._computed = [
            list(accumulate((place < len(iteration.keys) for place in program), initial=0))
            for program in iteration.programs
        ]
        for program in iteration.programs:
            for earlier, later in pairwise(program):
                if all(other != earlier for other, _ in iteration.waits[later]):
                    self._successors[earlier].append((later, 0.0))
                    self._waits[later] += 1

    def set_truth(self, truth: Profile) -> None:
        """Change what clocks cost from now on."""
        rows = {
            key: {m.clock_mhz: (m.time_s, m.energy_j) for m in ms}
            for key, ms in truth.measurements.items()
        }
        self._costs: Mapping[Key, Mapping[int, tuple[float, float]]] = rows
        self.clocks = sorted({clock for row in rows.values() for clock in row}, reverse=True)
        self._idle_w = [truth.blocking_w(stage) for stage in range(truth.stages)]

    def set_modes(self, modes: Sequence[Sequence[Sequence[str]]]) -> None:
        """Run computations in these modes from now on, as programs have clocks; all are "own" if
        there are none.
        """
        of_all = [mode for ranks in modes for of_rank in ranks for mode in of_rank]
        self._modes = of_all or ["own"] * (self.pipelines * len(self.iteration.keys))

    def full(self) -> Programs:
        """Return programs of all pipelines at full clocks."""
        ranks = [[self.clocks[0]] * len(program) for program in self.iteration.schedule.ranks]
        return [ranks] * self.pipelines

    def run(self, programs: Programs, versions: Sequence[int] | None = None) -> Ran:
        """Run an iteration; `versions` are what ranks report of each pipeline's program."""
        self._begin(programs)
        events, count = self._events, self.pipelines * len(self._waits)
        while self._done < count:
            now_s, kind, which, value = heapq.heappop(events)
            if kind == _END and value == self._gpus[which].version:
                self._end(now_s, which)
            elif kind == _START:
                self._start(now_s, which)
            else:
                self._handle(now_s, kind, which, value)
        end_s = max(self._ends)
        while events and events[0][0] <= end_s:
            self._handle(*heapq.heappop(events))
        return self._finish(end_s, versions or [1] * self.pipelines)

    def _handle(self, now_s: float, kind: int, which: int, value: int) -> None:
        if kind == _REQUEST:
            self._request(now_s, which, value)
        elif kind == _LOCK:
            self._lock(now_s, which, bool(value))
        elif kind == _SETTLE:
            self._settle(now_s, which, value)

    def _begin(self, programs: Programs) -> None:
        begin_s, physics = self._now_s, self.physics
        nodes = len(self._waits)
        total = nodes * self.pipelines
        if not hasattr(self, "_events"):
            self._events: list[tuple[float, int, int, int]] = []
            self._queues: dict[int, list[tuple[float, int]]] = {}
            self._locked: dict[int, bool] = {}
        jitters = (
            np.exp(physics.jitter * self._random.standard_normal(total))
            if physics.jitter
            else np.ones(total)
        )
        self._jitter = (jitters * self._common(total)).tolist()
        data_s = self._waited_s() * self._full_s
        self._left = self._waits * self.pipelines
        self._ready = [begin_s] * total
        self._begins, self._ends = [0.0] * total, [begin_s] * total
        self._at: list[int | None] = [None] * total
        self._straddled: dict[int, list[tuple[float, int]]] = {}
        self._done = 0
        self._changes = [0] * len(self._gpus)
        if physics.drift:
            size = physics.drift / 10.0
            self._drift += (
                size * self._random.standard_normal(len(self._drift)) - 0.005 * self._drift
            )
        self._power = np.exp(self._drift).tolist()
        is_new, self._programs = self._programs, programs
        for number, gpu in enumerate(self._gpus):
            pipeline, rank = divmod(number, self._ranks)
            gpu.position, gpu.running = 0, False
            self._now_idle(number, begin_s)
            gpu.read_j = self._read(number, begin_s)
            if is_new is None or list(is_new[pipeline][rank]) != list(programs[pipeline][rank]):
                heapq.heappush(
                    self._events, (begin_s, _REQUEST, number, programs[pipeline][rank][0])
                )
        for node in range(total):
            if not self._left[node]:
                heapq.heappush(self._events, (begin_s + data_s, _START, node, 0))

    def _common(self, total: int) -> Floats:
        """Return by how much each node is longer, whatever its program."""
        physics, noise = self.physics, self._noise
        longer = np.ones(total)
        if physics.tails:
            longer += (noise.random(total) < 0.1) * noise.exponential(physics.tails, total)
        if physics.outliers:
            longer *= np.where(
                noise.random(total) < physics.outliers, noise.uniform(2, 5, total), 1
            )
        if physics.lengths:
            lengths = np.exp(
                physics.lengths * noise.standard_normal((self.pipelines, self._microbatches))
            )
            longer *= lengths[:, self._microbatch].ravel()
        if physics.shared:
            fresh = math.sqrt(1 - 0.9**2) * noise.standard_normal()
            self._shared = 0.9 * self._shared + physics.shared * fresh
        grown: Floats = longer * math.exp(self._shared) * (1 + physics.growth * self._number / 100)
        return grown

    def _waited_s(self) -> float:
        """Return for what share of an iteration this one waits before it begins."""
        waited = self.physics.loader * (self._number % 10 == 9)
        if self.physics.pauses:
            waited += 0.5 * (self._noise.random() < self.physics.pauses)
        return waited

    def _gpu_of(self, node: int) -> int:
        pipeline, place = divmod(node, len(self._waits))
        return pipeline * self._ranks + self.iteration.rank_of[place]

    def _cost(self, node: int, number: int) -> tuple[float, float]:
        """Return the seconds of a node at the clock in force, and the watts meanwhile."""
        place, gpu = node % len(self._waits), self._gpus[number]
        if place >= len(self.iteration.keys):
            operation = self.iteration.operations[place - len(self.iteration.keys)]
            idle_w = self._idle(number)
            return (
                operation.time_s,
                idle_w if operation.energy_j is None else operation.energy_j / operation.time_s,
            )
        row = self._costs[self.iteration.keys[place].in_mode(self._mode_of(node))]
        time_s, energy_j = row[gpu.clock]
        return time_s * self._jitter[node] * float(self.slowdown[number]), self._power[
            number
        ] * energy_j / time_s

    def _mode_of(self, node: int) -> str:
        pipeline, place = divmod(node, len(self._waits))
        return self._modes[pipeline * len(self.iteration.keys) + place]

    def _idle(self, number: int) -> float:
        return self._idle_w[self.iteration.schedule.ranks[number % self._ranks][0].stage]

    def _spend(self, number: int, now_s: float, power_w: float) -> None:
        gpu = self._gpus[number]
        gpu.energy_j += power_w * (now_s - gpu.since_s)
        gpu.recent.append((gpu.since_s, now_s, power_w))
        if len(gpu.recent) > 64:
            gpu.recent = [
                each for each in gpu.recent if each[1] > now_s - 2 * self.physics.counter_step_s
            ]
        gpu.since_s = now_s

    def _now_idle(self, number: int, now_s: float) -> None:
        self._spend(number, now_s, self._idle(number))

    def _read(self, number: int, now_s: float) -> float:
        """Return what the counter shows: the energy up to its last update."""
        gpu, step_s = self._gpus[number], self.physics.counter_step_s
        tick_s = math.floor((now_s - gpu.phase_s) / step_s) * step_s + gpu.phase_s
        later = sum(
            power_w * max(0.0, end_s - max(begin_s, tick_s))
            for begin_s, end_s, power_w in gpu.recent
        )
        return gpu.energy_j - later

    def _start(self, now_s: float, node: int) -> None:
        number = self._gpu_of(node)
        self._now_idle(number, now_s)
        gpu = self._gpus[number]
        gpu.running, gpu.left = True, 1.0
        self._begins[node], self._at[node] = now_s, gpu.clock
        self._go_on(now_s, number)

    def _node_of(self, number: int) -> int:
        pipeline, rank = divmod(number, self._ranks)
        return (
            pipeline * len(self._waits) + self.iteration.programs[rank][self._gpus[number].position]
        )

    def _go_on(self, now_s: float, number: int) -> None:
        gpu = self._gpus[number]
        gpu.version += 1
        time_s, _ = self._cost(self._node_of(number), number)
        heapq.heappush(self._events, (now_s + gpu.left * time_s, _END, number, gpu.version))

    def _end(self, now_s: float, number: int) -> None:
        gpu, node = self._gpus[number], self._node_of(number)
        self._spend(number, now_s, self._cost(node, number)[1])
        gpu.running, self._ends[node] = False, now_s
        self._done += 1
        first = node - node % len(self._waits)
        for place, lag_s in self._successors[node - first]:
            after = first + place
            self._ready[after] = max(self._ready[after], now_s + lag_s)
            self._left[after] -= 1
            if not self._left[after]:
                heapq.heappush(self._events, (self._ready[after], _START, after, 0))
        assert self._programs is not None
        pipeline, rank = divmod(number, self._ranks)
        clocks, program = self._programs[pipeline][rank], self.iteration.programs[rank]
        gpu.position += 1
        ahead = [
            place
            for place in program[gpu.position : gpu.position + 1]
            if place < len(self.iteration.keys)
        ]
        if ahead:
            self._request(now_s, number, clocks[self._computed[rank][gpu.position]])
        elif gpu.position == len(program):
            self._request(now_s, number, clocks[0])

    def _request(self, now_s: float, number: int, clock: int) -> None:
        gpu, lock = self._gpus[number], number // self.physics.gpus_per_lock
        if clock == gpu.wanted:
            return
        gpu.wanted = clock
        self._changes[number] += 1
        queue = self._queues.setdefault(lock, [])
        if clock == gpu.set_last:
            self._queues[lock] = [each for each in queue if each[1] != number]
            gpu.requested_s = None
            return
        if gpu.requested_s is None:
            queue.append((now_s, number))
            heapq.heappush(self._events, (now_s, _LOCK, lock, 0))
        gpu.requested_s = now_s

    def _lock(self, now_s: float, lock: int, returned: bool) -> None:
        if returned:
            self._locked[lock] = False
        queue = self._queues.get(lock)
        if self._locked.get(lock) or not queue:
            return
        first = min(queue)
        queue.remove(first)
        gpu = self._gpus[first[1]]
        gpu.requested_s, gpu.set_last, self._locked[lock] = None, gpu.wanted, True
        end_s = now_s + self.physics.call_s
        heapq.heappush(self._events, (end_s, _LOCK, lock, 1))
        heapq.heappush(
            self._events, (end_s + self.physics.settle_s, _SETTLE, first[1], gpu.set_last)
        )

    def _settle(self, now_s: float, number: int, clock: int) -> None:
        gpu = self._gpus[number]
        if not gpu.running or clock == gpu.clock:
            gpu.clock = clock
            return
        node = self._node_of(number)
        time_s, power_w = self._cost(node, number)
        gpu.left = max(0.0, gpu.left - (now_s - gpu.since_s) / time_s)
        self._spend(number, now_s, power_w)
        gpu.clock = clock
        self._straddled.setdefault(node, []).append((now_s, clock))
        self._go_on(now_s, number)

    def _finish(self, end_s: float, versions: Sequence[int]) -> Ran:
        begin_s, seen, energy_j = self._now_s, [], 0.0
        time_s = end_s - begin_s
        for number, gpu in enumerate(self._gpus):
            self._now_idle(number, end_s)
            pipeline, rank = divmod(number, self._ranks)
            read_j = self._read(number, end_s)
            seen.append(
                RankObservation(
                    pipeline,
                    rank,
                    self._number,
                    versions[pipeline],
                    time_s,
                    tuple(self._observed(pipeline, rank, begin_s)),
                    max(0.0, read_j - gpu.read_j),
                    self.physics.counter_step_s,
                )
            )
            energy_j += gpu.energy_j
        spent_j = energy_j - getattr(self, "_energy_j", 0.0)
        self._energy_j = energy_j
        self._full_s = self._full_s or time_s
        self._now_s, self._number = end_s, self._number + 1
        return Ran(time_s, spent_j, tuple(seen), max(self._changes))

    def _observed(self, pipeline: int, rank: int, begin_s: float) -> list[ComputationObservation]:
        found, first = [], pipeline * len(self._waits)
        computed = [
            place for place in self.iteration.programs[rank] if place < len(self.iteration.keys)
        ]
        noise = self._random.standard_normal(len(computed)) * self.physics.marks
        for place, miss in zip(computed, noise.tolist(), strict=True):
            node = first + place
            start_s, stop_s = self._begins[node] - begin_s, self._ends[node] - begin_s
            stop_s = start_s + (stop_s - start_s) * math.exp(miss)
            changes = self._straddled.get(node, [])
            seen = ComputationObservation(start_s, stop_s, None, mode=self._mode_of(node))
            if len(changes) <= 1:
                seen = seen._replace(clock_mhz=self._at[node])
            if len(changes) == 1:
                ((when_s, clock),) = changes
                seen = seen._replace(change_s=when_s - begin_s, changed_mhz=clock)
            found.append(seen)
        return found


def steady(
    truth: Profile,
    iteration: Iteration,
    physics: Physics,
    ranks: Sequence[Sequence[int]],
    modes: Sequence[Sequence[str]] = (),
) -> tuple[float, float]:
    """Return the seconds and joules of an iteration of one pipeline that repeats without noise."""
    quiet = Physics(0.0, 0.0, 0.0, 1e-9, physics.call_s, physics.settle_s, physics.gpus_per_lock)
    world = World(truth, iteration, quiet)
    world.set_modes([modes] if modes else ())
    for _ in range(3):
        ran = world.run([ranks])
    return ran.time_s, ran.energy_j
