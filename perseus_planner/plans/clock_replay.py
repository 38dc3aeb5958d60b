"""Replay an iteration in which clock changes take time: a discrete-event simulation, independent of
the solver.

The rules are those of a driver that has one lock for each node (`ClockChange`), and of a controller
that must never hold up the training:

- A rank requests the clock of its next computation when the computation or operation before it
  ends. It requests the clock of its first one when its last one of the previous iteration ends.
- The calls for the GPUs of a node run one after another, the earliest request first and equal ones
  by rank. If a rank makes a new request while the previous one waits for the lock, the new clock
  takes its place; if the new clock is the one that was set last, the request leaves the queue, as
  equal values are not set again. A call that has begun is not taken back.
- A computation starts as soon as everything that it waits for is done, at the clock in force then.
  When another clock settles while it runs, the rest of it runs at that clock: it takes the rest's
  share of that clock's time and energy.

The previous iteration is assumed to end as this one does when changes take no time. That determines
how long before time 0 the first clocks are requested; all earlier changes are over by then. A
request that still waits for the lock when the iteration ends is served after its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from perseus_planner.base.errors import UsageError
from perseus_planner.base.units import COUNT
from perseus_planner.profiles.measurement import nearest_clock

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from perseus_planner.profiles.measurement import ClockChange, Measurement

# The kinds of events, in the order in which they happen at one moment: all requests of a moment
# reach the lock together, and a task that starts then sees the clocks that settle then.
_REQUEST, _END, _LOCK, _SETTLE, _START = range(5)


class FixedCost(NamedTuple):
    """Seconds and joules of a fixed operation."""

    time_s: float
    energy_j: float


Cost: TypeAlias = "Measurement | FixedCost"


class Task(NamedTuple):
    """One computation at its planned clock, or one operation of fixed time."""

    #: MHz -> cost; tasks may share a table. An operation has one entry, under any key.
    costs: Mapping[int, Cost]
    clock_mhz: int | None  #: planned clock, one of `costs`; None for an operation

    @classmethod
    def operation(cls, cost: Cost) -> Task:
        """Make a task that costs the same at any clock and for which no clock is set."""
        return cls({0: cost}, None)

    @property
    def planned(self) -> Cost:
        """The cost at the planned clock."""
        return (
            next(iter(self.costs.values()))
            if self.clock_mhz is None
            else self.costs[self.clock_mhz]
        )

    def at(self, clock_mhz: int) -> Cost:
        """Return the cost at any clock: that of the nearest measured one, as `nearest_clock`
        chooses it.
        """
        return self.costs[nearest_clock(self.costs, clock_mhz)]


class Call(NamedTuple):
    """One change of the clock of one rank's GPUs; times in seconds from the start of the
    iteration.
    """

    node: int  #: the node whose lock the call held
    rank: int
    clock_mhz: int
    requested_s: float  #: when the rank requested this clock
    start_s: float  #: when the call took the lock
    end_s: float  #: when the call released the lock; the clock settles from then on
    settled_s: float  #: when the clock was in force


@dataclass(frozen=True)
class ChangeReplay:
    """One iteration with clock changes that take time; tasks are counted as in the arguments of the
    replay.
    """

    starts_s: tuple[float, ...]  #: when each task starts, seconds from the start of the iteration
    ends_s: tuple[float, ...]  #: when each task ends
    #: how long each task takes; exactly the time of its cost if no clock settled meanwhile.
    durations_s: tuple[float, ...]
    energies_j: tuple[float, ...]  #: joules of each task
    calls: tuple[Call, ...]  #: the changes that were made, in the order in which they began


def replay_with_changes(
    tasks: Sequence[Task],
    programs: Sequence[Sequence[int]],
    waits: Sequence[Sequence[tuple[int, float]]],
    change: ClockChange,
    *,
    node_of_rank: Sequence[int],
    gpus_per_rank: int = 1,
) -> ChangeReplay:
    """Run one of many equal iterations by the rules above; O(n log n) for n tasks and waits.

    If changes take no time, the result equals that of a replay without them, to the last bit.

    Args:
        tasks: all tasks of the iteration.
        programs: for each rank, the indices of its tasks in the order in which they run, at least
            one.
        waits: for each task, the indices of those that it waits for, each with the least seconds
            between its end and the start. A task also waits for the one before it on its rank,
            whether that is listed or not.
        change: the cost of setting the clock of one GPU.
        node_of_rank: the node that the GPUs of each rank are in, by any number.
        gpus_per_rank: GPUs of a tensor group. A change of a rank's clock takes as many calls, one
            right after another, and the clock is in force when the last one has settled.

    Raises:
        UsageError: If `node_of_rank` does not fit the ranks, or `gpus_per_rank` is not a whole
            number of at least 1.
    """
    if len(node_of_rank) != len(programs):
        raise UsageError(
            f"node_of_rank: has {len(node_of_rank)} entries for {len(programs)} ranks; give as many"
        )
    COUNT.check(gpus_per_rank, "gpus_per_rank")
    replay = _Replay(
        tasks, programs, waits, node_of_rank, (gpus_per_rank * change.call_s, change.settle_s)
    )
    replay.run()
    return replay.result()


class _Rank:
    """The state of a rank's GPUs."""

    __slots__ = (
        *(
            "program",
            "position",
            "cost",
            "since_s",
            "left",
            "version",
            "wanted",
            "set_last",
            "in_force",
        ),
        "waiting",
    )

    def __init__(self, program: Sequence[int], clock_mhz: int | None) -> None:
        # The tasks of the rank, and the one that runs or comes next
        self.program = program
        self.position = 0
        #: Of that task at the clock in force; None while the rank waits.
        self.cost: Cost | None = None
        self.since_s = 0.0  #: when the task began to run at that clock
        self.left = 1.0  #: share of the task that was left then
        self.version = 0  #: of the task's end event, which moves when a clock settles
        # The clock that was asked for last, that was set last, and that the GPU has: they differ
        # while a change is on its way.
        self.wanted = self.set_last = self.in_force = clock_mhz
        #: Clock that waits for the lock, and when it was requested.
        self.waiting: tuple[int, float] | None = None

    @property
    def task(self) -> int:
        return self.program[self.position]


class _Replay:
    """The state of a replay at the moment of the current event."""

    def __init__(
        self,
        tasks: Sequence[Task],
        programs: Sequence[Sequence[int]],
        waits: Sequence[Sequence[tuple[int, float]]],
        node_of_rank: Sequence[int],
        times_s: tuple[float, float],
    ) -> None:
        count = len(tasks)
        self.tasks = tasks
        self.node_of_rank = node_of_rank
        self.hold_s, self.settle_s = times_s
        self.successors, self.unfinished = _successors(programs, waits)
        self.starts_s = [0.0] * count
        self.ends_s = [0.0] * count
        self.durations_s = [0.0] * count
        self.energies_j = [0.0] * count
        self.rank_of = {task: number for number, program in enumerate(programs) for task in program}
        # Waiting since, rank.
        self.queues: dict[int, list[tuple[float, int]]] = {node: [] for node in node_of_rank}
        self.locked = dict.fromkeys(node_of_rank, False)
        self.calls: list[Call] = []
        self.costs: dict[tuple[int, int], Cost] = {}  # cache of costs at a clock
        # When, kind, which rank, node or task, and a value.
        self.events: list[tuple[float, int, int, int]] = []
        self.ranks = []
        # The last clock of the previous iteration, which is that of this one, is in force at its
        # begin.
        for program in programs:
            clocks_mhz = [
                tasks[task].clock_mhz for task in program if tasks[task].clock_mhz is not None
            ]
            self.ranks.append(_Rank(program, clocks_mhz[-1] if clocks_mhz else None))

    def run(self) -> None:
        """Handle events until there are none left."""
        # The first clock is requested when the previous iteration's last task ends, which is before
        # time 0.
        ends_s = self._planned_ends_s()
        time_s = max(ends_s)
        self.events += [
            (ends_s[rank.program[-1]] - time_s, _REQUEST, n, 0) for n, rank in enumerate(self.ranks)
        ]
        self.events += [
            (0.0, _START, task, 0) for task, count in enumerate(self.unfinished) if not count
        ]
        heapify(self.events)
        while self.events:
            now_s, kind, which, value = heappop(self.events)
            # A clock that settled has moved the end; the event of the old one is still in the
            # queue.
            if kind == _END:
                if value == self.ranks[which].version:
                    self._end(now_s, which)
            elif kind == _START:
                self._start(now_s, which)
            elif kind == _LOCK:
                self._lock(now_s, which, bool(value))
            elif kind == _SETTLE:
                self._settle(now_s, which, value)
            else:
                self._request(now_s, which)

    def _planned_ends_s(self) -> list[float]:
        """Return when each task ends, seconds, if clock changes take no time."""
        unfinished = list(self.unfinished)
        starts_s = [0.0] * len(self.tasks)
        ends_s = [0.0] * len(self.tasks)
        ready = [task for task, count in enumerate(unfinished) if not count]
        for task in ready:  # grows meanwhile
            ends_s[task] = starts_s[task] + self.tasks[task].planned.time_s
            for later, lag_s in self.successors[task]:
                starts_s[later] = max(starts_s[later], ends_s[task] + lag_s)
                unfinished[later] -= 1
                if not unfinished[later]:
                    ready.append(later)
        return ends_s

    def _start(self, now_s: float, task: int) -> None:
        number = self.rank_of[task]
        self.starts_s[task] = now_s
        self.ranks[number].left = 1.0
        self._continue(now_s, number)

    def _continue(self, now_s: float, number: int) -> None:
        """Run what is left of the rank's task at the clock in force."""
        rank = self.ranks[number]
        rank.cost = self._cost(rank)
        rank.since_s = now_s
        rank.version += 1
        heappush(self.events, (now_s + rank.left * rank.cost.time_s, _END, number, rank.version))

    def _cost(self, rank: _Rank) -> Cost:
        task = self.tasks[rank.task]
        if task.clock_mhz is None or rank.in_force is None:
            return task.planned
        key = id(task.costs), rank.in_force
        # Tasks share tables, so a cost at a clock is looked for once.
        if key not in self.costs:
            self.costs[key] = task.at(rank.in_force)
        return self.costs[key]

    def _end(self, now_s: float, number: int) -> None:
        rank = self.ranks[number]
        task = rank.task
        self._account(rank, rank.left)
        self.ends_s[task] = now_s
        rank.cost = None
        for later, lag_s in self.successors[task]:
            self.starts_s[later] = max(self.starts_s[later], now_s + lag_s)
            self.unfinished[later] -= 1
            if not self.unfinished[later]:
                heappush(self.events, (self.starts_s[later], _START, later, 0))
        # The next clock is requested now, however long its task still has to wait.
        if rank.position + 1 < len(rank.program):
            rank.position += 1
            self._request(now_s, number)

    def _account(self, rank: _Rank, share: float) -> None:
        """Count `share` of the running task at the clock in force."""
        assert rank.cost is not None
        self.durations_s[rank.task] += share * rank.cost.time_s
        self.energies_j[rank.task] += share * rank.cost.energy_j

    def _request(self, now_s: float, number: int) -> None:
        """Request the clock of the rank's next task, unless it has none or that clock was
        requested last.
        """
        rank = self.ranks[number]
        node = self.node_of_rank[number]
        clock_mhz = self.tasks[rank.task].clock_mhz
        if clock_mhz is None or clock_mhz == rank.wanted:
            return
        rank.wanted = clock_mhz
        # It is what was set last, so the request that waits for the lock is not needed any more.
        if clock_mhz == rank.set_last:
            self.queues[node] = [entry for entry in self.queues[node] if entry[1] != number]
            heapify(self.queues[node])
            rank.waiting = None
            return
        # One place in the queue for each rank: a newer clock takes the place of the older one.
        if rank.waiting is None:
            heappush(self.queues[node], (now_s, number))
            heappush(self.events, (now_s, _LOCK, node, False))
        rank.waiting = (clock_mhz, now_s)

    def _lock(self, now_s: float, node: int, has_returned: bool) -> None:
        """Make the next call if the lock is free: a call has returned, or there is a new
        request.
        """
        # A call that returned has given the lock back.
        self.locked[node] &= not has_returned
        if self.locked[node] or not self.queues[node]:
            return
        _, number = heappop(self.queues[node])
        rank = self.ranks[number]
        assert rank.waiting is not None
        clock_mhz, requested_s = rank.waiting
        rank.waiting = None
        end_s = now_s + self.hold_s
        settled_s = end_s + self.settle_s
        # Known from now on, not from when it settles: the call cannot be taken back.
        rank.set_last = clock_mhz
        self.locked[node] = True
        self.calls.append(Call(node, number, clock_mhz, requested_s, now_s, end_s, settled_s))
        heappush(self.events, (end_s, _LOCK, node, True))
        heappush(self.events, (settled_s, _SETTLE, number, clock_mhz))

    def _settle(self, now_s: float, number: int, clock_mhz: int) -> None:
        rank = self.ranks[number]
        # Nothing runs that depends on the clock.
        if rank.cost is None or self.tasks[rank.task].clock_mhz is None:
            rank.in_force = clock_mhz
            return
        # What has run by now counts at the old clock, and the rest goes on at the new one.
        time_s = rank.cost.time_s
        done = min((now_s - rank.since_s) / time_s, rank.left) if time_s else rank.left
        self._account(rank, done)
        rank.left -= done
        rank.in_force = clock_mhz
        self._continue(now_s, number)

    def result(self) -> ChangeReplay:
        """Return the outcome once there are no events left."""
        return ChangeReplay(
            tuple(self.starts_s),
            tuple(self.ends_s),
            tuple(self.durations_s),
            tuple(self.energies_j),
            tuple(self.calls),
        )


def _successors(
    programs: Sequence[Sequence[int]], waits: Sequence[Sequence[tuple[int, float]]]
) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """Return the tasks that wait for each task with their lags, and for how many of these
    entries each task waits.
    """
    after: list[list[tuple[int, float]]] = [[] for _ in waits]
    count = [len(before) for before in waits]
    for task, before in enumerate(waits):
        for earlier, lag_s in before:
            after[earlier].append((task, lag_s))
    # A rank runs one task after another.
    for program in programs:
        for previous, task in pairwise(program):
            after[previous].append((task, 0.0))
            count[task] += 1
    return after, count
