"""Search for the clocks of an iteration in which clock changes take time: a compiled replay, and
annealing with it.

The rules of the replay are those of `plans.clock_replay`, for many equal iterations. It is
compiled, so that thousands of programs can be compared between two iterations of a training job.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.solver.kernels import allocating_kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.schedules.iteration import Iteration

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]


class Layout(NamedTuple):
    """n nodes, rank by rank in the order in which they run; ranks, locks and classes are
    numbered from 0.
    """

    rank_start: Integers  #: (ranks + 1,) where the nodes of each rank begin
    member: Integers  #: (n,) class of each computation, -1 for a fixed operation
    fixed_s: Floats  #: (n,) seconds of a fixed operation
    fixed_j: Floats  #: (n,) joules of a fixed operation, beyond what its GPUs draw while they wait
    rank: Integers  #: (n,)
    waits: Integers  #: (n,) for how many nodes of other ranks each one waits
    after_start: (
        Integers  #: (n + 1,) where the nodes of other ranks that wait for each one begin in `after`
    )
    after: Integers
    after_lag_s: Floats  #: aligned with `after`
    lock: Integers  #: (ranks,)
    call_s: float  #: for which a change holds the lock
    settle_s: float


def layout(
    iteration: Iteration, change: ClockChange, gpus_per_rank: int, waiting_w: Floats
) -> tuple[Layout, list[int]]:
    """Lay out an iteration; also return the place in `iteration` of each node."""
    places = [place for program in iteration.programs for place in program]
    node = {place: k for k, place in enumerate(places)}
    keys = list(dict.fromkeys(sorted(iteration.keys)))
    classes = {key: i for i, key in enumerate(keys)}
    count = len(iteration.keys)
    after: list[list[tuple[int, float]]] = [[] for _ in places]
    waits = np.zeros(len(places), dtype=np.int64)
    previous = {b: a for program in iteration.programs for a, b in pairwise(program)}
    for place, before in enumerate(iteration.waits):
        for other, lag_s in before:
            if previous.get(place) != other or lag_s:
                after[node[other]].append((node[place], lag_s))
                waits[node[place]] += 1
    fixed_s, fixed_j = np.zeros(len(places)), np.zeros(len(places))
    for number, operation in enumerate(iteration.operations):
        k = node[count + number]
        fixed_s[k] = operation.time_s
        if operation.energy_j is not None:
            fixed_j[k] = operation.energy_j - waiting_w[operation.rank] * operation.time_s
    ranks = len(iteration.schedule.ranks)
    return Layout(
        np.cumsum([0, *map(len, iteration.programs)], dtype=np.int64),
        np.array(
            [classes[iteration.keys[place]] if place < count else -1 for place in places],
            dtype=np.int64,
        ),
        fixed_s,
        fixed_j,
        np.array([iteration.rank_of[place] for place in places], dtype=np.int64),
        waits,
        np.cumsum([0, *map(len, after)], dtype=np.int64),
        np.array([k for followers in after for k, _ in followers], dtype=np.int64),
        np.array([lag_s for followers in after for _, lag_s in followers], dtype=np.float64),
        np.array(change.node_of_rank(ranks, gpus_per_rank), dtype=np.int64),
        change.calls_per_change(gpus_per_rank) * change.call_s,
        change.settle_s,
    ), places


@allocating_kernel
def replay(
    layout: Layout,
    time_s: Floats,
    power_w: Floats,
    waiting_w: Floats,
    clock: Integers,
    tail_s: Floats,
    end_s: Floats,
) -> tuple[float, float]:
    """Return the seconds of an iteration, and its joules with waiting.

    Args:
        layout: the iteration.
        time_s: (classes, clocks) seconds.
        power_w: (classes, clocks) watts meanwhile.
        waiting_w: (ranks,) watts while a rank waits.
        clock: (n,) the clock of each computation; for a fixed operation, that of the computation
            before it.
        tail_s: (ranks,) seconds from the end of a rank's last node to the end of the iteration
            before.
        end_s: (n,) is filled with the end of each node.
    """
    rank_start, member, fixed_s, fixed_j = (
        layout.rank_start,
        layout.member,
        layout.fixed_s,
        layout.fixed_j,
    )
    rank_of, after_start, after, after_lag_s = (
        layout.rank,
        layout.after_start,
        layout.after,
        layout.after_lag_s,
    )
    lock, call_s, settle_s = layout.lock, layout.call_s, layout.settle_s
    ranks, never = len(rank_start) - 1, np.inf
    waits = layout.waits.copy()
    ready_s = np.zeros(len(member))
    position = rank_start[:-1].copy()
    running = np.zeros(ranks, dtype=np.bool_)
    next_s, since_s, left = np.full(ranks, never), np.zeros(ranks), np.ones(ranks)
    force, set_last, wanted = (
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
        np.zeros(ranks, np.int64),
    )
    settles_s, settling = np.full(ranks, never), np.zeros(ranks, np.int64)
    asked_s = np.full(ranks, never)  # when the request that waits for the lock was made
    free_s = np.full(ranks, -never)  # of each lock
    joules = 0.0
    for r in range(ranks):
        force[r] = set_last[r] = clock[rank_start[r + 1] - 1]
        wanted[r] = clock[rank_start[r]]
        if wanted[r] != set_last[r]:
            asked_s[r] = -tail_s[r]
        if waits[position[r]] == 0:
            next_s[r] = 0.0
    while True:
        now_s, which, kind = never, -1, 0
        for r in range(ranks):
            if next_s[r] < now_s:
                now_s, which, kind = next_s[r], r, 0
            if settles_s[r] <= now_s and settles_s[r] < never:
                now_s, which, kind = settles_s[r], r, 1
        for r in range(
            ranks
        ):  # a call that begins before anything else happens, the earliest request first
            begin_s = max(asked_s[r], free_s[lock[r]])
            if asked_s[r] < never and begin_s < now_s:
                first = True
                for other in range(ranks):
                    if lock[other] == lock[r] and asked_s[other] < asked_s[r]:
                        first = False
                if first:
                    now_s, which, kind = begin_s, r, 2
        if which < 0:
            break
        r = which
        if kind == 2:
            asked_s[r], set_last[r] = never, wanted[r]
            free_s[lock[r]] = now_s + call_s
            settles_s[r], settling[r] = now_s + call_s + settle_s, wanted[r]
            continue
        k = position[r]
        if kind == 1:
            settles_s[r] = never
            if running[r] and member[k] >= 0:
                c = member[k]
                done = min((now_s - since_s[r]) / time_s[c, force[r]], left[r])
                joules += done * time_s[c, force[r]] * (power_w[c, force[r]] - waiting_w[r])
                left[r] -= done
                since_s[r], force[r] = now_s, settling[r]
                next_s[r] = now_s + left[r] * time_s[c, force[r]]
            else:
                force[r] = settling[r]
            continue
        if not running[r]:
            running[r], since_s[r], left[r] = True, now_s, 1.0
            next_s[r] = now_s + (time_s[member[k], force[r]] if member[k] >= 0 else fixed_s[k])
            continue
        running[r], end_s[k], next_s[r] = False, now_s, never
        if member[k] >= 0:
            joules += (
                left[r]
                * time_s[member[k], force[r]]
                * (power_w[member[k], force[r]] - waiting_w[r])
            )
        else:
            joules += fixed_j[k]
        for i in range(after_start[k], after_start[k + 1]):
            other = after[i]
            ready_s[other] = max(ready_s[other], now_s + after_lag_s[i])
            waits[other] -= 1
            o = rank_of[other]
            if waits[other] == 0 and position[o] == other and not running[o] and o != r:
                next_s[o] = ready_s[other]
        if k + 1 < rank_start[r + 1]:
            position[r] = k + 1
            ready_s[k + 1] = max(ready_s[k + 1], now_s)
            if waits[k + 1] == 0:
                next_s[r] = ready_s[k + 1]
            if clock[k + 1] != wanted[r]:
                wanted[r] = clock[k + 1]
                asked_s[r] = never if wanted[r] == set_last[r] else min(asked_s[r], now_s)
    total_s = 0.0
    for r in range(ranks):
        total_s = max(total_s, end_s[rank_start[r + 1] - 1])
    for r in range(ranks):
        joules += waiting_w[r] * total_s
    return total_s, joules


@allocating_kernel
def changes_of(clock: Integers, first: int, stop: int) -> int:
    """Return how often the clock changes from node `first` to before `stop`, with the change
    back to the first one.
    """
    count = 0
    for k in range(first, stop):
        count += clock[k] != clock[k - 1 if k > first else stop - 1]
    return count


@allocating_kernel
def _vary(layout: Layout, usable: Integers, counts: Integers, clock: Integers, up: int) -> int:
    """Change the clocks of a rank at random, slower if `up` is 1, else faster; return the rank."""
    rank_start = layout.rank_start
    k = np.random.randint(len(clock))
    r = layout.rank[k]
    first, stop = rank_start[r], rank_start[r + 1]
    if counts[r] == 0:
        return int(r)
    begin, end = k, k + 1
    while begin > first and clock[begin - 1] == clock[k]:
        begin -= 1
    while end < stop and clock[end] == clock[k]:
        end += 1
    what = np.random.random()
    if what < 0.3:  # move a border
        by = 1 + np.random.randint(4)
        if np.random.random() < 0.5 and begin > first:
            low = max(first, begin - by)
            clock[low:begin] = clock[k]
        elif end < stop:
            clock[end : min(stop, end + by)] = clock[k]
        return int(r)
    old = clock[k]
    if what < 0.8:  # the phase at another clock
        position = 0
        while position < counts[r] - 1 and usable[r, position] < old:
            position += 1
        far = (
            1 + np.random.randint(3)
            if np.random.random() < 0.8
            else 1 + np.random.randint(counts[r])
        )
        position = min(max(position + up * far, 0), counts[r] - 1)
        new = usable[r, position]
    else:  # a block at any clock
        begin = max(first, k - np.random.randint(6))
        end = min(stop, k + 1 + np.random.randint(6))
        new = usable[r, np.random.randint(counts[r])]
    clock[begin:end] = new
    return int(r)


@allocating_kernel
def anneal(
    layout: Layout,
    time_s: Floats,
    power_w: Floats,
    waiting_w: Floats,
    usable: Integers,
    counts: Integers,
    start: Integers,
    tail_s: Floats,
    deadline_s: float,
    budget: Integers,
    tries: int,
    heat: float,
    seed: int,
) -> Integers:
    """Return the program of least energy that was found, within the deadline if one was.

    Args:
        layout: the iteration.
        time_s: (classes, clocks) seconds.
        power_w: (classes, clocks) watts.
        waiting_w: (ranks,) watts.
        usable: (ranks, clocks) the clocks that a rank may have, fastest first.
        counts: (ranks,) how many there are.
        start: (n,) a program; if its clocks are not usable any more, they may stay.
        tail_s: (ranks,) as in `replay`.
        deadline_s: seconds.
        budget: (ranks,) most changes of each rank.
        tries: how many programs are tried.
        heat: first temperature, as a share of the energy.
        seed: of the random choices.
    """
    np.random.seed(seed)
    end_s = np.empty(len(start))
    now, trial = start.copy(), start.copy()
    spent_s, spent_j = replay(layout, time_s, power_w, waiting_w, now, tail_s, end_s)
    price_w = 200.0 * spent_j / deadline_s
    worth = spent_j + price_w * max(0.0, spent_s - deadline_s)
    best, least = now.copy(), worth
    rank_start = layout.rank_start
    for attempt in range(tries):
        heat_j = heat * spent_j * 0.02 ** (attempt / tries)
        up = 1 if np.random.random() < 0.5 else -1
        r = _vary(layout, usable, counts, trial, up)
        other = r
        if np.random.random() < 0.4:
            other = _vary(layout, usable, counts, trial, -up)
        within = changes_of(trial, rank_start[r], rank_start[r + 1]) <= budget[r]
        within = (
            within and changes_of(trial, rank_start[other], rank_start[other + 1]) <= budget[other]
        )
        changed, added_j = False, 0.0
        if within:
            for q in (r, other):
                for k in range(rank_start[q], rank_start[q + 1]):
                    if trial[k] != now[k] and layout.member[k] >= 0:
                        c = layout.member[k]
                        changed = True
                        added_j += time_s[c, trial[k]] * (power_w[c, trial[k]] - waiting_w[q])
                        added_j -= time_s[c, now[k]] * (power_w[c, now[k]] - waiting_w[q])
                if other == r:
                    break
        most = worth - heat_j * np.log(1.0 - np.random.random())
        good = (
            within and changed and (worth > spent_j or spent_j + added_j <= most + 0.001 * spent_j)
        )
        if good:
            trial_s, trial_j = replay(layout, time_s, power_w, waiting_w, trial, tail_s, end_s)
            trial_worth = trial_j + price_w * max(0.0, trial_s - deadline_s)
            good = trial_worth <= most
        for q in (r, other):
            if good:
                now[rank_start[q] : rank_start[q + 1]] = trial[rank_start[q] : rank_start[q + 1]]
            else:
                trial[rank_start[q] : rank_start[q + 1]] = now[rank_start[q] : rank_start[q + 1]]
        if good:
            worth, spent_j = trial_worth, trial_j
            if worth < least:
                least = worth
                best[:] = now
    return best
