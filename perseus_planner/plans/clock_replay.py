"""Replays an iteration in which clock changes take time: a discrete-event simulation, with nothing of the solver in it.

The rules are those of a driver that has one lock per node (`ClockChange`), and of a controller that must never hold up
the training:

- A rank asks for the clock of its next computation when what it runs before that, computation or operation, ends. It
  asks for the clock of its first one when its last one of the iteration before ends.
- The calls of the GPUs of a node run one after another, first asked first, at equal times by rank. A request that still
  waits for the lock when its rank asks again is overtaken: the later value takes its place, or leaves the queue if the
  rank's GPUs were set to it last, as equal values are not set again. A call that has begun is not taken back.
- A computation starts as soon as all that it waits for is done, at the clock in force then. When a clock settles while
  it runs, the rest of it runs at that one: shares of the work add up, and so do shares of the energy.

The iteration before is taken to end as this one does when changes take no time: that says how long before time 0 the
first clocks are asked for, and all earlier changes are over then. What still waits for the lock when the iteration ends
is set after its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.errors import UsageError
from perseus_planner.quantities import COUNT, POWER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.plans.tasks import Cost, TaskGraph
    from perseus_planner.profiles.clock_changes import ClockChange

# What happens at one moment, in this order: all requests of that moment reach the lock together, and whatever starts
# then sees the clocks that settle then.
_REQUEST, _END, _LOCK, _SETTLE, _START = range(5)


class Call(NamedTuple):
    """One change of the clock of one rank's GPUs, as it was made; times in seconds from the start of the iteration."""

    node: int  #: whose lock it held
    rank: int
    clock_mhz: int
    requested_s: float  #: when the rank asked for this clock
    start_s: float  #: from when it held the lock
    end_s: float  #: until when; from then on it settles
    settled_s: float  #: from when the clock was in force


@dataclass(frozen=True)
class RankChanges:
    """What the clock changes of one rank came to in an iteration.

    Attributes:
        requested: changes asked for, overtaken ones included.
        off_plan_s: seconds that it computed at another clock than the planned one.
        longest_s: the longest time from a request to the moment when its clock was in force, seconds; of requests that
            were not overtaken, 0 if there was none.
    """

    requested: int
    off_plan_s: float
    longest_s: float


@dataclass(frozen=True)
class ChangeReplay:
    """One iteration with clock changes that take time.

    Attributes:
        starts_s: when each task starts, seconds from the start of the iteration; by place, as the next three.
        ends_s: when each task ends.
        durations_s: how long each task takes; where no clock settled meanwhile, the very number of its cost.
        energies_j: joules of each task.
        time_s: iteration time, when the last task ends, seconds.
        energy_j: energy over all ranks until then, joules, waiting included.
        ranks: what the changes of each rank came to.
        calls: the changes that were made, in the order in which they began.
    """

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    durations_s: tuple[float, ...]
    energies_j: tuple[float, ...]
    time_s: float
    energy_j: float
    ranks: tuple[RankChanges, ...]
    calls: tuple[Call, ...]


def replay_with_changes(
    iteration: TaskGraph,
    change: ClockChange,
    *,
    node_of_rank: Sequence[int],
    blocking_power_w: Sequence[float],
    gpus_per_rank: int = 1,
) -> ChangeReplay:
    """Run one of many equal iterations by the rules above; O(n log n) for n tasks and waits.

    If changes take no time, the result is that of a replay without them, to the last bit.

    Args:
        iteration: what the ranks run.
        change: what setting the clock of one GPU takes.
        node_of_rank: which node the GPUs of each rank sit in, by any number.
        blocking_power_w: what each rank draws while it waits, all its GPUs together, watts.
        gpus_per_rank: GPUs of a tensor group. A change of a rank's clock is as many calls, one right after another,
            and its clock is in force when the last has settled.

    Raises:
        UsageError: one of the last three is not of that kind.
    """
    for name, values in (("node_of_rank", node_of_rank), ("blocking_power_w", blocking_power_w)):
        if len(values) != len(iteration.ranks):
            raise UsageError(f"{name}: has {len(values)} entries for {len(iteration.ranks)} ranks; give as many")
    for power_w in blocking_power_w:
        POWER.check(power_w, "blocking_power_w")
    COUNT.check(gpus_per_rank, "gpus_per_rank")
    run = _Run(iteration, node_of_rank, gpus_per_rank * change.call_s, change.settle_s)
    run.until_all_is_over()
    return run.result(blocking_power_w)


class _Rank:
    """What a rank's GPUs do, and what they are to do."""

    __slots__ = (
        *("place", "cost", "since_s", "left", "version", "wanted", "set_last", "in_force"),
        *("waiting", "requested", "off_plan_s", "longest_s"),
    )

    def __init__(self, place: int, clock_mhz: int | None) -> None:
        self.place = place  #: of the task that runs or comes next
        self.cost: Cost | None = None  #: of that task at the clock in force; None while the rank waits
        self.since_s = 0.0  #: since when it runs at that clock
        self.left = 1.0  #: share of the task that was left then
        self.version = 0  #: of its end, which may still move
        self.wanted = self.set_last = self.in_force = clock_mhz
        self.waiting: tuple[int, float] | None = None  #: the clock that waits for the lock, and when it was asked for
        self.requested, self.off_plan_s, self.longest_s = 0, 0.0, 0.0


class _Run:
    """The state of a replay, at the moment of the event at hand."""

    def __init__(self, iteration: TaskGraph, node_of_rank: Sequence[int], hold_s: float, settle_s: float) -> None:
        count = len(iteration.tasks)
        self.iteration, self.node_of_rank, self.hold_s, self.settle_s = iteration, node_of_rank, hold_s, settle_s
        self.starts_s, self.ends_s = [0.0] * count, [0.0] * count
        self.durations_s, self.energies_j = [0.0] * count, [0.0] * count
        self.awaited = list(iteration.awaited)
        self.queues: dict[int, list[tuple[float, int]]] = {node: [] for node in node_of_rank}  # since when, rank
        self.locked = dict.fromkeys(node_of_rank, False)
        self.calls: list[Call] = []
        self.costs: dict[tuple[int, int], Cost] = {}  # of costs that are looked up again and again
        self.events: list[tuple[float, int, int, int]] = []  # when, what, of which rank, node or place, and its value
        self.ranks = []
        for first, tasks in zip(iteration.firsts, iteration.ranks, strict=True):
            clocks_mhz = [task.clock_mhz for task in tasks if task.clock_mhz is not None]
            self.ranks.append(_Rank(first, clocks_mhz[-1] if clocks_mhz else None))

    def until_all_is_over(self) -> None:
        ends_s = self.iteration.planned_ends_s
        time_s = max(ends_s)
        self.events += [(ends_s[last] - time_s, _REQUEST, rank, 0) for rank, last in enumerate(self.iteration.lasts)]
        self.events += [(0.0, _START, place, 0) for place, count in enumerate(self.awaited) if not count]
        heapify(self.events)
        while self.events:
            now_s, what, which, value = heappop(self.events)
            if what == _END:
                if value == self.ranks[which].version:
                    self._end(now_s, which)
            elif what == _START:
                self._start(now_s, which)
            elif what == _LOCK:
                self._lock(now_s, which, bool(value))
            elif what == _SETTLE:
                self._settle(now_s, which, value)
            else:
                self._request(now_s, which)

    def _start(self, now_s: float, place: int) -> None:
        number = self.iteration.rank_of_task[place]
        self.starts_s[place] = now_s
        self.ranks[number].left = 1.0
        self._go_on(now_s, number)

    def _go_on(self, now_s: float, number: int) -> None:
        """Run what is left of the rank's task at the clock in force."""
        rank = self.ranks[number]
        rank.cost, rank.since_s = self._cost(rank), now_s
        rank.version += 1
        heappush(self.events, (now_s + rank.left * rank.cost.time_s, _END, number, rank.version))

    def _cost(self, rank: _Rank) -> Cost:
        task = self.iteration.tasks[rank.place]
        if task.clock_mhz is None or rank.in_force is None:
            return task.planned
        key = id(task.costs), rank.in_force
        if key not in self.costs:
            self.costs[key] = task.at(rank.in_force)
        return self.costs[key]

    def _end(self, now_s: float, number: int) -> None:
        rank = self.ranks[number]
        place = rank.place
        self._account(rank, rank.left)
        self.ends_s[place], rank.cost = now_s, None
        for other, lag_s in self.iteration.successors[place]:
            self.starts_s[other] = max(self.starts_s[other], now_s + lag_s)
            self.awaited[other] -= 1
            if not self.awaited[other]:
                heappush(self.events, (self.starts_s[other], _START, other, 0))
        if place < self.iteration.lasts[number]:
            rank.place += 1
            self._request(now_s, number)

    def _account(self, rank: _Rank, share: float) -> None:
        """Count `share` of the task that runs, at the clock in force."""
        assert rank.cost is not None
        seconds = share * rank.cost.time_s
        self.durations_s[rank.place] += seconds
        self.energies_j[rank.place] += share * rank.cost.energy_j
        if self.iteration.tasks[rank.place].clock_mhz not in (None, rank.in_force):
            rank.off_plan_s += seconds

    def _request(self, now_s: float, number: int) -> None:
        """Ask for the clock of the rank's next task, if it has one and that was not asked for last."""
        rank, node = self.ranks[number], self.node_of_rank[number]
        clock_mhz = self.iteration.tasks[rank.place].clock_mhz
        if clock_mhz is None or clock_mhz == rank.wanted:
            return
        rank.wanted = clock_mhz
        rank.requested += 1
        if clock_mhz == rank.set_last:
            self.queues[node] = [entry for entry in self.queues[node] if entry[1] != number]
            heapify(self.queues[node])
            rank.waiting = None
            return
        if rank.waiting is None:
            heappush(self.queues[node], (now_s, number))
            heappush(self.events, (now_s, _LOCK, node, False))
        rank.waiting = (clock_mhz, now_s)

    def _lock(self, now_s: float, node: int, returned: bool) -> None:
        """A call has returned, or there is a new request: make the next call if the lock is free."""
        self.locked[node] &= not returned
        if self.locked[node] or not self.queues[node]:
            return
        _, number = heappop(self.queues[node])
        rank = self.ranks[number]
        assert rank.waiting is not None
        (clock_mhz, requested_s), rank.waiting = rank.waiting, None
        end_s = now_s + self.hold_s
        settled_s = end_s + self.settle_s
        rank.set_last, self.locked[node] = clock_mhz, True
        rank.longest_s = max(rank.longest_s, settled_s - requested_s)
        self.calls.append(Call(node, number, clock_mhz, requested_s, now_s, end_s, settled_s))
        heappush(self.events, (end_s, _LOCK, node, True))
        heappush(self.events, (settled_s, _SETTLE, number, clock_mhz))

    def _settle(self, now_s: float, number: int, clock_mhz: int) -> None:
        rank = self.ranks[number]
        if rank.cost is None or self.iteration.tasks[rank.place].clock_mhz is None:
            rank.in_force = clock_mhz
            return
        done = min((now_s - rank.since_s) / rank.cost.time_s, rank.left)
        self._account(rank, done)
        rank.left -= done
        rank.in_force = clock_mhz
        self._go_on(now_s, number)

    def result(self, blocking_power_w: Sequence[float]) -> ChangeReplay:
        time_s = max(self.ends_s)
        return ChangeReplay(
            tuple(self.starts_s),
            tuple(self.ends_s),
            tuple(self.durations_s),
            tuple(self.energies_j),
            time_s,
            math.fsum(self.energies_j) + self._waiting_j(time_s, blocking_power_w),
            tuple(RankChanges(rank.requested, rank.off_plan_s, rank.longest_s) for rank in self.ranks),
            tuple(self.calls),
        )

    def _waiting_j(self, time_s: float, blocking_power_w: Sequence[float]) -> float:
        busy_s: list[list[float]] = [[] for _ in blocking_power_w]
        for number, duration_s in zip(self.iteration.rank_of_task, self.durations_s, strict=True):
            busy_s[number].append(duration_s)
        return math.fsum(w * (time_s - math.fsum(each)) for w, each in zip(blocking_power_w, busy_s, strict=True))
