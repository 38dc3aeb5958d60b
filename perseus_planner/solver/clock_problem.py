"""The clocks of an iteration, laid out in arrays, and the compiled replay of a choice of them.

Where modes are chosen too, the number of a clock has that of the mode as its last bits: it is an
option. A change of the mode alone takes no time. Option 0 is the highest clock in the training's
own way, so a program of zeros is one of full clocks.

Where clock changes take time, the rules are those of `plans.clock_replay`, for many equal
iterations; `plans` has the readable replays, with which tests compare this one. Programs hold
computations only, not fixed operations, which have no clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.solver.kernels import kernel
from perseus_planner.solver.point_problem import lay_out_waits

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.schedules.iteration import Iteration
    from perseus_planner.solver.network import Floats, Integers


class ClockProblem(NamedTuple):
    """n nodes in topological order; m of them are computations: the programs of all ranks, one
    after the other. Classes are those of computations, clocks are numbered, the highest first.
    """

    before_start: Integers  #: (n + 1,) where the predecessors of each node begin in `before`
    before: Integers  #: the predecessors of all nodes
    before_lag_s: Floats  #: aligned with `before`: least seconds from their end to the node's start
    fixed_s: Floats  #: (n,) durations of fixed operations
    time_s: Floats  #: (classes, clocks), infinite if not measured
    cost_j: Floats  #: (classes, clocks) effective energy, infinite if not measured
    node: Integers  #: (m,) node of each computation, in the order of the programs
    member: Integers  #: (m,) its class
    rank: Integers  #: (m,) its rank
    rank_start: Integers  #: (ranks + 1,) where the program of each rank begins
    #: (ranks, clocks) the clocks that any class of the rank has, rising numbers first
    usable: Integers
    usable_count: Integers  #: (ranks,) how many clocks that are
    place: Integers  #: (ranks, clocks) the index of each clock in `usable`
    #: (m,) when each computation runs, as a part of the iteration; never falls along a program
    wave: Floats
    last: Integers  #: nodes without successors
    mode_bits: int  #: how many last bits of a clock's number are that of a mode
    #: (m,) the next computation that has one mode with it, around; itself where none has
    tied: Integers


class ClockState(NamedTuple):
    """The clocks, and the durations and ends that follow from them. The kernels change it in
    place.
    """

    clock: Integers  #: (m,)
    duration_s: Floats  #: (n,)
    end_s: Floats  #: (n,) as of the last replay
    #: (1,) the first node whose duration changed since then; n if nothing changed
    touched: Integers


class ChangeCost(NamedTuple):
    """What a clock change costs in time; ranks of one lock change their clocks one by one."""

    lock: Integers  #: (ranks,) numbered from 0
    hold_s: float  #: for which a change holds the lock
    settle_s: float  #: from then on until the clock is in force
    tail_s: Floats  #: (ranks,) from the end of a rank's last node to that of the iteration before
    queue: Integers  #: (n,) the nodes of all ranks, operations as well, in the order they run
    queue_start: Integers  #: (ranks + 1,) where those of each rank begin
    computation: Integers  #: (n,) which computation each node is, -1 for an operation
    final: Integers  #: (ranks,) the last computation of each rank
    seconds: Floats  #: (7, ranks) for the replay to write on
    numbers: Integers  #: (7, ranks) for the replay to write whole numbers on
    #: (calls,) from each call on until its clock is in force, seconds; those of a rank begin at
    #: `call_start`.
    call_settles_s: Floats
    call_clock: Integers  #: (calls,)
    call_start: Integers  #: (ranks,)
    #: (m, clocks) when each computation must start at the latest to end in time at each clock. A
    #: rank that is late then takes a faster clock. No rows for ranks that keep to their clocks.
    latest_start_s: Floats
    first_start_s: Floats  #: (ranks,) when its first computation starts, which counts as in time


def clock_problem(
    iteration: Iteration,
    classes: Sequence[Key],
    time_s: Floats,
    cost_j: Floats,
    mode_bits: int = 0,
    tied: Integers | None = None,
) -> ClockProblem:
    """Lay out an iteration, without waves.

    Args:
        iteration: the iteration.
        classes: the key of each class.
        time_s: (classes, clocks), infinite if not measured.
        cost_j: (classes, clocks) effective energy.
        mode_bits: as in `ClockProblem`.
        tied: as in `ClockProblem`; None if each computation has a mode of its own.
    """
    node_of = {place: k for k, place in enumerate(iteration.order)}
    number = {key: i for i, key in enumerate(classes)}
    before_start, before, before_lag_s, *_ = lay_out_waits(iteration)
    fixed_s = np.zeros(len(node_of))
    for place, operation in enumerate(iteration.operations, len(iteration.keys)):
        fixed_s[node_of[place]] = operation.time_s
    programs = iteration.schedule.ranks
    member = np.array([number[key] for key in iteration.keys], dtype=np.int64)
    rank_start = np.cumsum([0, *map(len, programs)], dtype=np.int64)
    # A rank may use a clock if any of its computations was measured at it.
    usable = [np.isfinite(time_s[member[a:b]]).any(axis=0) for a, b in pairwise(rank_start)]
    problem = ClockProblem(
        before_start=before_start,
        before=before,
        before_lag_s=before_lag_s,
        fixed_s=fixed_s,
        time_s=time_s,
        cost_j=cost_j,
        node=np.array([node_of[place] for place in range(len(member))], dtype=np.int64),
        member=member,
        rank=np.repeat(np.arange(len(programs)), np.diff(rank_start)),
        rank_start=rank_start,
        # Three fields are filled below; any array will do until then.
        usable=member,
        usable_count=member,
        place=member,
        wave=np.zeros(len(member)),
        last=np.setdiff1d(np.arange(len(node_of)), before),
        mode_bits=mode_bits,
        tied=np.arange(len(member)) if tied is None else tied,
    )
    return with_usable(problem, np.array(usable))


def with_usable(problem: ClockProblem, usable: NDArray[np.bool_]) -> ClockProblem:
    """Return the problem with these clocks for each rank: (ranks, clocks)."""
    return problem._replace(
        usable=np.argsort(~usable, axis=1, kind="stable"),
        usable_count=usable.sum(axis=1),
        place=np.cumsum(usable, axis=1) - 1,
    )


def clock_problem_of(dag: PipelineDag) -> tuple[ClockProblem, list[int]]:
    """Lay out `dag` with every measured clock; also return the clocks, MHz, highest first.

    Raises:
        UsageError: If its modes are open, as only clocks are chosen here.
    """
    if dag.has_open_modes:
        raise UsageError(
            "modes: clocks that follow the batch are for one way of running; leave the other modes "
            "out of the profile"
        )
    tables = {
        key: rows
        for key, rows in dag.profile.measurements.items()
        if key in set(dag.iteration.keys)
    }
    clocks = sorted({m.clock_mhz for rows in tables.values() for m in rows}, reverse=True)
    column = {clock: i for i, clock in enumerate(clocks)}
    # What was not measured takes forever, so no search takes it.
    time_s = np.full((len(tables), len(clocks)), np.inf)
    cost_j = time_s.copy()
    for row, (key, rows) in enumerate(tables.items()):
        for m in rows:
            time_s[row, column[m.clock_mhz]] = m.time_s
            cost_j[row, column[m.clock_mhz]] = (
                m.energy_j - dag.profile.blocking_w(key.stage) * m.time_s
            )
    return clock_problem(dag.iteration, list(tables), time_s, cost_j), clocks


def change_cost(iteration: Iteration, change: ClockChange, gpus_per_rank: int) -> ChangeCost:
    """Lay out what changes of clocks cost in `iteration`; ranks end with it, and do not catch
    up.
    """
    ranks = len(iteration.programs)
    # One call at most for each computation; one more for each that catches up.
    calls = 2 * len(iteration.keys)
    node_of = {place: k for k, place in enumerate(iteration.order)}
    computation = np.full(len(iteration.order), -1)
    for i in range(len(iteration.keys)):
        computation[node_of[i]] = i
    return ChangeCost(
        # Ranks on one node share the lock of its driver.
        lock=np.unique(change.node_of_rank(ranks, gpus_per_rank), return_inverse=True)[1],
        hold_s=change.calls_per_change(gpus_per_rank) * change.call_s,
        settle_s=change.settle_s,
        tail_s=np.zeros(ranks),
        queue=np.array([node_of[place] for program in iteration.programs for place in program]),
        queue_start=np.cumsum([0, *map(len, iteration.programs)], dtype=np.int64),
        computation=computation,
        final=np.array(
            [[i for i in program if i < len(iteration.keys)][-1] for program in iteration.programs]
        ),
        seconds=np.zeros((7, ranks)),
        numbers=np.zeros((7, ranks), dtype=np.int64),
        call_settles_s=np.zeros(calls),
        call_clock=np.zeros(calls, dtype=np.int64),
        call_start=2 * np.cumsum([0, *map(len, iteration.schedule.ranks)])[:-1],
        latest_start_s=np.zeros((0, 1)),
        first_start_s=np.zeros(ranks),
    )


def with_waves(problem: ClockProblem, clock: Integers) -> ClockProblem:
    """Return the problem with the waves of a plan of these clocks."""
    state, _ = load_state(problem, clock)
    makespan_s = replay(problem, state)
    middle = (state.end_s - state.duration_s / 2)[problem.node] / makespan_s
    for first, stop in pairwise(problem.rank_start.tolist()):
        # Waves never fall along a program, as the kernels search them by halving.
        middle[first:stop] = np.maximum.accumulate(middle[first:stop])
    return problem._replace(wave=middle)


def load_state(problem: ClockProblem, clock: Integers) -> tuple[ClockState, float]:
    """Return a state with these clocks, not yet replayed, and its effective energy, joules."""
    duration_s = problem.fixed_s.copy()
    duration_s[problem.node] = problem.time_s[problem.member, clock]
    # Node 0 counts as touched, so the first replay goes through all nodes.
    state = ClockState(
        clock.copy(), duration_s, np.zeros(len(duration_s)), np.zeros(1, dtype=np.int64)
    )
    return state, float(np.cumsum(problem.cost_j[problem.member, clock])[-1])


@kernel("state")
def replay(problem: ClockProblem, state: ClockState) -> float:
    """Bring `state.end_s` up to date if clock changes take no time; return the makespan,
    seconds.
    """
    raise NotImplementedError


def replay_changes(
    problem: ClockProblem, state: ClockState, change: ChangeCost
) -> tuple[float, float]:
    """Fill `state.end_s` if clock changes take time; return the makespan, seconds, and the
    effective energy of all computations, joules.
    """
    spent_j = np.zeros(1)
    makespan_s = _replay_changes(problem, state, change, spent_j)
    return makespan_s, float(spent_j[0])


@kernel("state", "change", "spent_j")
def _replay_changes(
    problem: ClockProblem, state: ClockState, change: ChangeCost, spent_j: Floats
) -> float:
    """Do as `replay_changes` does; `spent_j`, (1,), gets the energy."""
    raise NotImplementedError
