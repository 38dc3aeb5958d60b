"""All kernels in plain Python: the algorithms that are in C, statement by statement, for inputs so
small that this is fast enough.

Each has the name and the arguments of the Python function that declares the kernel. Functions of
the C library are called as C calls them, so results are equal bit by bit.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

_UNLIMITED = 2**62
_ROUNDING = 1e-11
_STEADY, _IDLE, _LONGEST = 256, 4, 4
_NEAR, _CHAINS, _MEETINGS = 0.7, 0.2, 0.5
_TASK, _SETTLE, _CALL = range(3)
_MODES, _TOGETHER = 0.25, 0.4
_LOOK = 4

_C = ctypes.CDLL(None)
_C.exp2.restype = ctypes.c_double
_C.exp2.argtypes = [ctypes.c_double]


class Random:
    """The generator of a search: NumPy's Mersenne Twister, seeded as `RandomState` is."""

    def seed(self, seed: int) -> None:
        """Begin anew."""
        self._words = np.random.MT19937()
        self._words._legacy_seeding(seed)
        self._normal: float | None = None

    def draw(self) -> float:
        """A number from 0 to below 1."""
        high, low = self._word() >> 5, self._word() >> 6
        return (high * 67108864.0 + low) / 9007199254740992.0

    def below(self, first: int, stop: int | None = None) -> int:
        """A whole number from `first`, or 0, to below `stop`."""
        first, stop = (0, first) if stop is None else (first, stop)
        count = int(stop - first)
        if count == 1:
            return first
        while True:
            drawn = self._word() & ((1 << (count - 1).bit_length()) - 1)
            if drawn < count:
                return first + drawn

    def normal(self) -> float:
        """A number of the standard normal distribution."""
        if self._normal is not None:
            kept, self._normal = self._normal, None
            return kept
        while True:
            one, other = 2.0 * self.draw() - 1.0, 2.0 * self.draw() - 1.0
            square = one * one + other * other
            if 0.0 < square < 1.0:
                break
        scale = math.sqrt(-2.0 * math.log(square) / square)
        self._normal = scale * one
        return scale * other

    def _word(self) -> int:
        return int(self._words.random_raw())


random = Random()


def compute_ends(problem: Any, chosen: Any, end_s: Any) -> float:
    """Fill `end_s` with the end of each node under the `chosen` points; return the makespan,
    seconds.
    """
    before_start = problem.before_start
    before = problem.before
    time_s = problem.time_s
    lag_s = problem.before_lag_s
    makespan_s = 0.0
    for k in range(len(chosen)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]] + lag_s[i])
        end_s[k] = start_s + time_s[chosen[k]]
        makespan_s = max(makespan_s, end_s[k])
    return makespan_s


def _grow_tree(network: Any, tree: Any, waiting: Any, ready: Any) -> None:
    """Fill the tree of the slow end."""
    source, sink, tail, head, first, _, vertex_time, _, start, residual, _, raising, lowering = (
        network
    )
    event, parent, far = tree
    taken = 0
    reached = 1
    while taken < reached:
        node = ready[taken]
        taken += 1
        for i in range(start[node], start[node + 1]):
            arc = residual[i]
            if arc >= 0:
                end = event[node] + vertex_time[first[arc]]
                if end >= event[head[arc]]:
                    event[head[arc]] = end
                    parent[head[arc]] = i
                waiting[head[arc]] -= 1
                if waiting[head[arc]] == 0:
                    ready[reached] = head[arc]
                    reached += 1
    for node in range(len(event)):
        if node != source:
            arc = residual[parent[node]]
            far[raising[arc]] |= 1
            far[lowering[arc]] |= 1
    # The root is the source so far: turn the path from there to the sink.
    node = sink
    turned = 0
    while node != source:
        arc = residual[parent[node]]
        parent[node] = turned
        turned = lowering[arc]
        node = tail[arc]
    parent[source] = turned


def _advance(
    network: Any,
    tree: Any,
    flow: Any,
    walker: Any,
    target: int,
    times: Any,
    powers: Any,
    most_times: int,
) -> int:
    """Move tree and flow along the frontier from `times[0]` down to `target`, to its fast end, or
    until `times` is full.

    `times` gets the total times at which the walk arrives, falling, and `powers`, whose first one
    is the flow so far, the power just below each: the frontier's slope between one time and the
    next is minus that power. Below a time with _UNLIMITED power nothing is feasible. The other
    arguments are fields of the network, the tree, and the walker. Returns how many times there are.
    """
    source, sink, tail, head, first, last, vertex_time, vertex_slope, *more = network
    start, residual, _, raising, lowering = more
    event, parent, far = tree
    level, taken_in, side, piece, piece_moved, across, heap_moved, heap_arc, kept = walker
    assert most_times == len(times)
    time = times[0]
    power = powers[0]
    count = 1
    mark = kept[0]
    is_within = kept[1]
    reached = kept[2]
    waiting = kept[3]
    moved = kept[4]
    pieces = kept[5]
    begin = time + moved  # the time at which this round began
    while True:
        leaving = -1
        entry = source
        if is_within == 0:
            # Raise the flow along the tree: first see by how much, and which arc is full then.
            least = _UNLIMITED
            node = source
            while node != sink:
                arc = residual[parent[node]]
                room = _UNLIMITED
                if arc >= 0:
                    room = flow[arc] - vertex_slope[level[arc]]
                elif level[~arc] < last[~arc]:
                    room = vertex_slope[level[~arc] + 1] - flow[~arc]
                if room < least:
                    least = room
                    leaving = parent[node]
                node = tail[arc] if arc >= 0 else head[~arc]
            if least == _UNLIMITED:
                powers[count - 1] = _UNLIMITED
                kept[1] = 0
                kept[4] = 0
                return count
            node = source
            while node != sink:
                arc = residual[parent[node]]
                if arc >= 0:
                    flow[arc] -= least
                    node = tail[arc]
                else:
                    flow[~arc] += least
                    node = head[~arc]
            power += least
            powers[count - 1] = power
            mark = mark + 1
            reached = 0
            waiting = 0
            moved = 0
            pieces = 0
            begin = time
        while True:
            if leaving >= 0:
                # The full arc leaves the tree, and what is before it joins the source's side.
                arc = residual[leaving]
                if arc < 0:
                    arc = ~arc
                    level[arc] += 1
                far[raising[arc]] ^= 1
                far[lowering[arc]] ^= 1
                piece[pieces] = reached
                piece_moved[pieces] = moved
                pieces += 1
                looked = reached
                listed = 0
                side[reached] = entry
                taken_in[entry] = mark
                reached += 1
                while looked < reached:
                    node = side[looked]
                    looked += 1
                    for i in range(start[node], start[node + 1]):
                        other = far[i] >> 1
                        if taken_in[other] != mark:
                            if far[i] & 1:
                                taken_in[other] = mark
                                parent[other] = i
                                side[reached] = other
                                reached += 1
                            else:
                                across[listed] = i
                                listed += 1
                for place in range(listed):
                    i = across[place]
                    if taken_in[far[i] >> 1] == mark:
                        continue
                    # How far the sink's side moves until this arc is at a vertex.
                    arc = residual[i]
                    if arc >= 0:
                        further = event[head[arc]] - event[tail[arc]] - vertex_time[level[arc]]
                    else:
                        arc = ~arc
                        if level[arc] == first[arc]:
                            continue  # it may have any time, at no saving
                        further = vertex_time[level[arc] - 1] - event[head[arc]] + event[tail[arc]]
                    further += moved
                    child = waiting
                    waiting += 1
                    while child > 0 and heap_moved[(child - 1) // 2] > further:
                        above = (child - 1) // 2
                        heap_moved[child], heap_arc[child] = heap_moved[above], heap_arc[above]
                        child = above
                    heap_moved[child] = further
                    heap_arc[child] = i
            # Arcs in the heap are no longer across the cut if the source's side took in both ends.
            while taken_in[far[heap_arc[0]] >> 1] == mark:
                waiting -= 1
                further = heap_moved[waiting]
                i = heap_arc[waiting]
                above = 0
                child = 1
                while child < waiting:
                    if child + 1 < waiting and heap_moved[child + 1] < heap_moved[child]:
                        child += 1
                    if further <= heap_moved[child]:
                        break
                    heap_moved[above], heap_arc[above] = heap_moved[child], heap_arc[child]
                    above = child
                    child = 2 * child + 1
                heap_moved[above] = further
                heap_arc[above] = i
            if heap_moved[0] > moved:
                # One time for each round is enough: the power is the same.
                is_first = count == 1 or times[count - 1] == begin
                if time <= target or (is_first and count == len(times)):
                    kept[0] = mark
                    kept[1] = 1
                    kept[2] = reached
                    kept[3] = waiting
                    kept[4] = moved
                    kept[5] = pieces
                    return count
                is_short = begin - heap_moved[0] < target
                moved = begin - target if is_short else heap_moved[0]
                time = begin - moved
                if is_first:
                    count += 1
                times[count - 1] = time
                powers[count - 1] = power
                if is_short:
                    leaving = -1
                    continue
            # The nearest arc enters the tree: from `node` on the source's side to `entry`.
            entering = heap_arc[0]
            arc = residual[entering]
            if arc >= 0:
                node = tail[arc]
                entry = head[arc]
            else:
                arc = ~arc
                node = head[arc]
                entry = tail[arc]
                level[arc] -= 1
            far[raising[arc]] ^= 1
            far[lowering[arc]] ^= 1
            # The first full arc from there to the sink, if there is one, leaves.
            leaving = -1
            above = entry
            while above != sink and leaving < 0:
                i = parent[above]
                arc = residual[i]
                if arc >= 0:
                    is_full = flow[arc] == vertex_slope[level[arc]]
                    above = tail[arc]
                else:
                    arc = ~arc
                    is_full = level[arc] < last[arc] and flow[arc] == vertex_slope[level[arc] + 1]
                    above = head[arc]
                if is_full:
                    leaving = i
            if leaving < 0:
                break
            parent[entry] = entering
        is_within = 0
        # Nodes that were taken in late moved with the sink's side before. The sink stays where it
        # is, so all others move the other way.
        piece[pieces] = reached
        for number in range(pieces):
            later = moved - piece_moved[number]
            if later > 0:
                for place in range(piece[number], piece[number + 1]):
                    event[side[place]] += later
        moved = 0
        # The source's side has the source as its root: turn the path from there to the arc.
        turned = entering
        while True:
            arc = residual[turned]
            turned = lowering[arc] if arc >= 0 else raising[~arc]
            old = parent[node]
            parent[node] = turned
            if node == source:
                break
            turned = old
            arc = residual[old]
            node = tail[arc] if arc >= 0 else head[~arc]


def _set_limits(problem: Any, deadline_s: float, limit_s: Any) -> None:
    """Fill `limit_s` with the latest end of each computation that leaves time for all successors
    at their fastest.
    """
    after_start = problem.after_start
    after = problem.after
    time_s = problem.time_s
    fastest = problem.point_start
    lag_s = problem.after_lag_s
    for k in range(len(limit_s) - 1, -1, -1):
        limit_s[k] = deadline_s
        for i in range(after_start[k], after_start[k + 1]):
            fastest_s = time_s[fastest[problem.member[after[i]]]]
            limit_s[k] = min(limit_s[k], limit_s[after[i]] - fastest_s - lag_s[i])


def _dispatch(problem: Any, guide: Any, limit_s: Any, begin: int, chosen: Any, end_s: Any) -> None:
    """Choose a point for each computation from `begin` on in turn; the search begins at the points
    that `chosen` holds.
    """
    member = problem.member
    point_start = problem.point_start
    time_s = problem.time_s
    cost_j = problem.cost_j
    gain_w = problem.gain_w
    loss_w = problem.loss_w
    before_start = problem.before_start
    before = problem.before
    lag_s = problem.before_lag_s
    wanted_s = guide.end_s
    price_w = guide.price_w
    early = guide.stiffness[0]
    late = guide.stiffness[1]
    for k in range(begin, len(chosen)):
        start_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            start_s = max(start_s, end_s[before[i]] + lag_s[i])
        first = point_start[member[k]]
        stop = point_start[member[k] + 1]
        price = price_w[k]
        wanted = wanted_s[k] - start_s
        limit = limit_s[k] - start_s
        middle = chosen[k]
        while middle + 1 < stop and time_s[middle] < wanted:
            middle += 1
        while middle > first and (time_s[middle - 1] >= wanted or time_s[middle] > limit):
            middle -= 1
        best = first
        least = math.inf
        point = middle
        while point < stop and (time_s[point] <= limit or point == first):
            cost = cost_j[point] + price * (time_s[point] + late * max(0.0, time_s[point] - wanted))
            cost += price * early * max(0.0, wanted - time_s[point])
            if cost < least:
                best = point
                least = cost
            if time_s[point] >= wanted and gain_w[point] <= price * (1.0 + late):
                break  # no slower point can be better
            point += 1
        point = middle
        while point > first and loss_w[point] <= price * (
            1.0 - early
        ):  # else no faster point can be better
            point -= 1
            cost = cost_j[point] + price * (time_s[point] + early * (wanted - time_s[point]))
            if cost < least:
                best = point
                least = cost
        chosen[k] = best
        end_s[k] = start_s + time_s[best]


def _fill(problem: Any, deadline_s: float, chosen: Any, end_s: Any) -> float:
    """Slow computations into the slack behind them, last ones first; return the effective energy
    then, joules.

    `end_s` then holds their latest starts.
    """
    point_start = problem.point_start
    time_s = problem.time_s
    cost_j = problem.cost_j
    after_start = problem.after_start
    after = problem.after
    lag_s = problem.after_lag_s
    total_j = 0.0
    for k in range(len(chosen) - 1, -1, -1):
        latest_s = deadline_s
        for i in range(after_start[k], after_start[k + 1]):
            latest_s = min(latest_s, end_s[after[i]] - lag_s[i])
        point = chosen[k]
        slowest = point_start[problem.member[k] + 1] - 1
        room_s = latest_s - (end_s[k] - time_s[point])
        while point < slowest and time_s[point + 1] <= room_s:
            point += 1
        chosen[k] = point
        end_s[k] = latest_s - time_s[point]
        total_j += cost_j[point]
    return total_j


def _fill_exactly(
    problem: Any,
    deadline_s: float,
    chosen: Any,
    end_s: Any,
    before: Any,
    worth_j: float,
) -> float:
    """Do as `_fill` does, but take what fits exactly, and not what misses by a rounding error.

    This is checked only if the effective energy is at most `worth_j`; otherwise the plan may be
    late. `before` is scratch space.
    """
    for k in range(len(before)):
        before[k] = chosen[k]
    total_j = _fill(problem, deadline_s * (1 + _ROUNDING), chosen, end_s)
    if total_j <= worth_j and compute_ends(problem, chosen, end_s) > deadline_s:
        for k in range(len(before)):
            chosen[k] = before[k]
        compute_ends(problem, chosen, end_s)
        total_j = _fill(problem, deadline_s * (1 - _ROUNDING), chosen, end_s)
    return total_j


def _vary_all(guide: Any, step_s: float, size: float) -> None:
    """Change one of the two stiffnesses, or move all ends."""
    what = random.below(0, 3)
    if what < 2:
        guide.stiffness[what] *= math.exp(0.5 * size)
    else:
        end_s = guide.end_s
        moved_s = 0.3 * step_s * size
        for k in range(len(end_s)):
            end_s[k] += moved_s


def _vary_group(problem: Any, guide: Any, step_s: float, size: float) -> int:
    """Change the ends, or the prices, of a group: some classes, from one computation to a later
    one or to the last. Return the first computation.
    """
    count = len(problem.member)
    classes = len(problem.point_start) - 1
    first = random.below(0, count)
    stop = count if random.draw() < 0.2 else min(count, first + int(count ** random.draw()))
    which = random.below(0, classes)
    what = random.below(0, 4)
    moved_s = 2.0 * step_s * size * math.exp(-3.0 * random.draw())
    prices = random.draw() < 0.25
    for k in range(first, stop):
        member = problem.member[k]
        # the class itself; all classes of its kind; all classes up to it; every class
        if (member == which, problem.kind[member] == problem.kind[which], member <= which, True)[
            what
        ]:
            if prices:
                guide.price_w[k] *= math.exp(0.2 * size)
            else:
                guide.end_s[k] += moved_s
    return int(first)


def _copy(source: Any, target: Any) -> None:
    from_s = source.end_s
    from_w = source.price_w
    to_s = target.end_s
    to_w = target.price_w
    for k in range(len(to_s)):
        to_s[k], to_w[k] = from_s[k], from_w[k]
    for what in range(2):
        target.stiffness[what] = source.stiffness[what]


def _improve_guide(
    problem: Any,
    deadline_s: float,
    guide: Any,
    best: Any,
    plans: Any,
    times_s: Any,
    cost_j: float,
    tries: int,
    step_s: float,
    group: bool,
) -> float:
    """Do as `improve` does, with equal guides; the best plan is the first one of `plans`."""
    random.seed(1)
    chosen = plans[0]
    trial = plans[1]
    before = plans[2]
    limit_s = times_s[0]
    end_s = times_s[1]
    _set_limits(problem, deadline_s * (1 - _ROUNDING), limit_s)
    for attempt in range(tries):
        begin = 0
        if attempt > 0:
            size = random.normal()
            if group and random.draw() < 0.75:
                begin = _vary_group(problem, guide, step_s, size)
            else:
                _vary_all(guide, step_s, size)
        trial[:begin] = plans[3, :begin]
        end_s[:begin] = times_s[3, :begin]
        _dispatch(problem, guide, limit_s, begin, trial, end_s)
        times_s[2] = end_s
        trial_j = _fill_exactly(problem, deadline_s, trial, end_s, before, cost_j)
        if attempt == 0 or trial_j <= cost_j:
            plans[3] = before
            times_s[3] = times_s[2]
        if trial_j <= cost_j:
            cost_j = trial_j
            for k in range(len(trial)):
                chosen[k] = trial[k]
            _copy(guide, best)
        else:
            _copy(best, guide)
    return cost_j


def _try_all(problem: Any, deadline_s: float, trial: Any, best: Any, end_s: Any) -> None:
    """Count `trial` up from the fastest points, and keep the `best` one."""
    point_start = problem.point_start
    member = problem.member
    cost_j = problem.cost_j
    best_j = math.inf
    k = 0
    while k < len(trial):
        trial_j = 0.0
        for point in trial:
            trial_j += cost_j[point]
        if trial_j < best_j and compute_ends(problem, trial, end_s) <= deadline_s:
            best_j = trial_j
            for k in range(len(trial)):
                best[k] = trial[k]
        k = 0
        while k < len(trial) and trial[k] == point_start[member[k] + 1] - 1:
            trial[k] = point_start[member[k]]
            k += 1
        if k < len(trial):
            trial[k] += 1


def _window(deadline: int, start: Any, after_start: Any, after: Any, lag: Any, k: int) -> int:
    """Return how long node k may take, ticks."""
    end = deadline
    for i in range(after_start[k], after_start[k + 1]):
        end = min(end, start[after[i]] - lag[i])
    return end - start[k]


def _take_along(
    starts: tuple[Any, Any],
    others: tuple[Any, Any],
    chain: int,
    moved: Any,
    taken: Any,
    move: int,
) -> int:
    """Add nodes to `moved` that move along with its first one; return how many they are in all.

    `starts` and `others` are those of the predecessors and of the successors; `chain` tells along
    which of them a chain goes.
    """
    meets = random.draw() < _MEETINGS
    last = random.draw() < 0.5
    links = random.below(0, _LONGEST) + 1 if random.draw() < _CHAINS else 0
    count = 1
    k = moved[0]
    taken[k] = move
    while True:
        first = starts[0][k]
        stop = starts[0][k + 1]
        if meets and first < stop:
            before = others[0][random.below(first, stop)]
            for i in range(starts[1][before], starts[1][before + 1]):
                other = others[1][i]
                if taken[other] != move:
                    taken[other] = move
                    moved[count] = other
                    count += 1
        first = starts[chain][k]
        stop = starts[chain][k + 1]
        if links == 0 or first == stop:
            return count
        k = others[chain][stop - 1 if last else first]
        if taken[k] == move:
            return count
        taken[k] = move
        moved[count] = k
        count += 1
        links -= 1


def _anneal_starts(
    problem: Any,
    ticks: Any,
    best: Any,
    start: Any,
    scratch: Any,
    moves: int,
    hot_j: float,
    cooling: float,
) -> None:
    """Change `best`, whose nodes start at `start`, into the points of the best plan found from
    it.
    """
    random.seed(1)
    # Local names: an array taken out of a tuple inside the loop costs more than the loop's own
    # work.
    member = problem.member
    point_start = problem.point_start
    cost_j = problem.cost_j
    time = ticks.point
    before_start = problem.before_start
    before = problem.before
    before_lag = ticks.before_lag
    deadline = ticks.deadline
    after_start = problem.after_start
    after = problem.after
    after_lag = ticks.after_lag
    now = scratch[0]
    cost = 0.0
    least = 0.0
    heat_j = hot_j
    seen = scratch[1]  # 1 + the move in which each node was last looked at
    moved = scratch[2]
    nodes = scratch[3]
    points = scratch[4]
    taken = scratch[5]
    found = 0
    for node in range(len(best)):
        now[node] = best[node]
    for move in range(moves):
        if move % _STEADY == 0:
            if move - found > moves // _IDLE:
                break
            heat_j = hot_j * cooling ** (move / moves)
        k = random.below(0, len(start))
        befores = before_start[k + 1] - before_start[k]
        own = (
            befores == 0 or random.draw() < 0.5
        )  # whether the window that changes is that of k or of one before
        which = 0 if own else before_start[k] + random.below(0, befores)
        node = k if own else before[which]
        first = point_start[member[node]]
        stop = point_start[member[node] + 1]
        point = now[node] + (1 if random.draw() < 0.5 else -1)
        if random.draw() >= _NEAR:
            point = random.below(first, stop)
        if point < first or point >= stop:
            continue
        if own:
            shift = _window(deadline, start, after_start, after, after_lag, k) - time[point]
        else:
            shift = start[node] + time[point] + before_lag[which] - start[k]
        if shift == 0:
            continue
        moved[0] = k
        count = _take_along(
            (before_start, after_start), (before, after), 0 if own else 1, moved, taken, move + 1
        )
        for k in moved[:count]:
            start[k] += shift
        changed = 0
        added = 0.0
        fits = True
        for k in moved[:count]:
            fits = fits and start[k] >= 0
            for i in range(before_start[k] - 1, before_start[k + 1]):
                node = k if i < before_start[k] else before[i]
                if not fits or seen[node] == move + 1:
                    continue
                seen[node] = move + 1
                window = _window(deadline, start, after_start, after, after_lag, node)
                point = now[node]
                first = point_start[member[node]]
                stop = point_start[member[node] + 1]
                while point + 1 < stop and time[point + 1] <= window:
                    point += 1
                while point > first and time[point] > window:
                    point -= 1
                fits = time[point] <= window
                if point != now[node]:
                    added += cost_j[point] - cost_j[now[node]]
                    nodes[changed] = node
                    points[changed] = point
                    changed += 1
        if fits and (added <= 0.0 or random.draw() < math.exp(-added / heat_j)):
            for i in range(changed):
                now[nodes[i]] = points[i]
            cost += added
            if cost < least - 1e-9 * hot_j:
                least = cost
                found = move
                for node in range(len(best)):
                    best[node] = now[node]
        else:
            for k in moved[:count]:
                start[k] -= shift


def replay(problem: Any, state: Any) -> float:
    """Bring `state.end_s` up to date if clock changes take no time; return the makespan,
    seconds.
    """
    before_start = problem.before_start
    before = problem.before
    lag_s = problem.before_lag_s
    duration_s = state.duration_s
    end_s = state.end_s
    for k in range(state.touched[0], len(end_s)):
        latest_s = 0.0
        for i in range(before_start[k], before_start[k + 1]):
            latest_s = max(latest_s, end_s[before[i]] + lag_s[i])
        end_s[k] = latest_s + duration_s[k]
    state.touched[0] = len(end_s)
    makespan_s = 0.0
    for k in problem.last:
        makespan_s = max(makespan_s, end_s[k])
    return makespan_s


def _clock_in_time(latest_start_s: Any, i: int, clock: int, now_s: float) -> int:
    """Return the slowest clock, `clock` or a faster one, at which a computation that starts now
    ends in time; the fastest one if there is none.
    """
    if len(latest_start_s) > 0:
        while clock > 0 and latest_start_s[i, clock] < now_s:
            clock -= 1
    return clock


def _replay_changes(problem: Any, state: Any, change: Any, found_j: Any) -> float:
    """Fill `state.end_s` if clock changes take time; return the makespan, seconds, and the
    effective energy of all computations, joules.
    """
    before_start = problem.before_start
    before = problem.before
    lag_s = problem.before_lag_s
    time_s = problem.time_s
    cost_j = problem.cost_j
    member = problem.member
    fixed_s = problem.fixed_s
    clock = state.clock
    end_s = state.end_s
    queue = change.queue
    queue_start = change.queue_start
    computation = change.computation
    lock = change.lock
    hold_s = change.hold_s
    settle_s = change.settle_s
    # Of each rank: when its task starts or ends; since when it runs at the clock in force, or the
    # rank waits; the share that was left then; when the request was made that waits; when a clock
    # settles. Of each lock: when it is free. Of each rank: how late its first computation was.
    next_s, since_s, left, asked_s, settles_s, free_s, late_s = change.seconds
    position, running, in_force, set_last, wanted, call, settled = change.numbers
    call_settles_s = change.call_settles_s
    call_clock = change.call_clock
    latest_start_s = change.latest_start_s
    bits = problem.mode_bits
    mask = (1 << bits) - 1
    never = math.inf
    spent_j = 0.0
    makespan_s = 0.0
    has_ended = True
    for k in range(len(end_s)):
        end_s[k] = never
    for r in range(len(lock)):
        position[r] = queue_start[r]
        running[r] = 0
        next_s[r] = never
        since_s[r] = 0.0
        asked_s[r] = never
        settles_s[r] = never
        free_s[lock[r]] = -never
        late_s[r] = never
        in_force[r] = set_last[r] = wanted[r] = clock[change.final[r]] >> bits
        call[r] = settled[r] = change.call_start[r]
        i = computation[queue[queue_start[r]]]
        if i >= 0 and clock[i] >> bits != wanted[r]:
            wanted[r], asked_s[r] = clock[i] >> bits, -change.tail_s[r]
    while True:
        now_s = never
        r = -1
        event = _TASK
        for o in range(len(lock)):
            if has_ended and next_s[o] == never and position[o] < queue_start[o + 1]:
                k = queue[position[o]]
                next_s[o] = since_s[o]
                for i in range(before_start[k], before_start[k + 1]):
                    next_s[o] = max(next_s[o], end_s[before[i]] + lag_s[i])
            if next_s[o] < now_s:
                now_s = next_s[o]
                r = o
                event = _TASK
            if settles_s[o] <= now_s and settles_s[o] < never:
                now_s = settles_s[o]
                r = o
                event = _SETTLE
        for o in range(len(lock)):  # a call that begins before all else, the first request first
            begin_s = max(asked_s[o], free_s[lock[o]])
            earlier = event == _CALL and begin_s == now_s and asked_s[o] < asked_s[r]
            if begin_s < now_s or earlier:
                now_s = begin_s
                r = o
                event = _CALL
        if r < 0:
            found_j[0] = spent_j
            return makespan_s
        has_ended = event == _TASK and running[r] == 1
        if event == _CALL:
            free_s[lock[r]], asked_s[r], set_last[r] = now_s + hold_s, never, wanted[r]
            call_settles_s[call[r]], call_clock[call[r]] = now_s + hold_s + settle_s, wanted[r]
            settles_s[r] = call_settles_s[settled[r]]
            call[r] += 1
            continue
        k = queue[position[r]] if position[r] < queue_start[r + 1] else -1
        i = computation[k] if k >= 0 else -1
        c, mode = (member[i], clock[i] & mask) if i >= 0 else (0, 0)
        option = in_force[r] << bits | mode
        if event == _SETTLE:
            if running[r] and i >= 0:
                done = left[r]
                if time_s[c, option] > 0.0:
                    done = min((now_s - since_s[r]) / time_s[c, option], done)
                spent_j += done * cost_j[c, option]
                left[r] = left[r] - done
                since_s[r] = now_s
                next_s[r] = now_s + left[r] * time_s[c, call_clock[settled[r]] << bits | mode]
            in_force[r], settled[r] = call_clock[settled[r]], settled[r] + 1
            settles_s[r] = call_settles_s[settled[r]] if settled[r] < call[r] else never
            continue
        if running[r]:
            spent_j += left[r] * cost_j[c, option] if i >= 0 else 0.0
            end_s[k], since_s[r], makespan_s = now_s, now_s, max(makespan_s, now_s)
            running[r], next_s[r], position[r] = 0, never, position[r] + 1
            i = computation[queue[position[r]]] if position[r] < queue_start[r + 1] else -1
        else:
            running[r] = 1
            since_s[r] = now_s
            left[r] = 1.0
            next_s[r] = now_s + (time_s[c, option] if i >= 0 else fixed_s[k])
            if i >= 0 and late_s[r] == never:
                late_s[r] = now_s - change.first_start_s[r]
        if i >= 0:
            next_clock = _clock_in_time(latest_start_s, i, clock[i] >> bits, now_s - late_s[r])
            if next_clock != wanted[r]:
                wanted[r] = next_clock
                asked_s[r] = never if wanted[r] == set_last[r] else min(asked_s[r], now_s)


def max_changes(
    rank_start: Any, clock: Any, first_rank: int, last_rank: int, mode_bits: int
) -> int:
    """Return the most changes of the clock in an iteration of any of these ranks, including the
    change back.
    """
    most = 0
    for rank in range(first_rank, last_rank + 1):
        first = rank_start[rank]
        stop = rank_start[rank + 1]
        count = 0
        for i in range(first, stop):
            before = clock[i - 1 if i > first else stop - 1]
            count += clock[i] >> mode_bits != before >> mode_bits
        most = max(most, count)
    return most


def _random_count(mean: float) -> int:
    """Draw a whole number of at least 1, on average a bit less than 1 + `mean`."""
    return 1 + int(-math.log(1.0 - random.draw()) * mean)


def _segment(clock: Any, bits: int, first: int, stop: int, i: int) -> tuple[int, int]:
    """Return the begin and end of the segment around computation i in a program from `first` to
    before `stop`; what is before `first` or from `stop` on is around its end.
    """
    begin = i
    end = i + 1
    count = stop - first
    at = clock[i] >> bits
    while end - begin < count and clock[first + (begin - 1 - first) % count] >> bits == at:
        begin -= 1
    while end - begin < count and clock[first + (end - first) % count] >> bits == at:
        end += 1
    return begin, end


def _first_at_wave(wave: Any, first: int, stop: int, at: float) -> int:
    """Return the first computation from `first` to before `stop` that runs at that wave or
    later, or `stop`.
    """
    while first < stop:
        middle = (first + stop) // 2
        if wave[middle] < at:
            first = middle + 1
        else:
            stop = middle
    return first


def _set(problem: Any, state: Any, k: int, new: int) -> float:
    """Give a computation another clock; return the effective energy added, joules: infinite where
    its rank may not have it in that mode.
    """
    old = state.clock[k]
    if new == old:
        return 0.0
    if problem.mode_bits > 0:
        rank = problem.rank[k]
        place = problem.place[rank, new]
        if place < 0 or problem.usable[rank, place] != new:
            return math.inf
    member = problem.member[k]
    state.clock[k] = new
    state.duration_s[problem.node[k]] = problem.time_s[member, new]
    state.touched[0] = min(state.touched[0], problem.node[k])
    added_j: float = problem.cost_j[member, new] - problem.cost_j[member, old]
    return added_j


def _change(
    problem: Any,
    state: Any,
    ranks: tuple[int, int],
    at: int,
    sign: int,
    library: Any,
) -> float:
    """Make the same random change at the same time on several ranks, of clocks or of modes; return
    the effective energy added, joules.

    Args:
        problem: the problem.
        state: changed in place.
        ranks: the first and the last rank that change.
        at: the computation that is changed, or that runs when others are.
        sign: 1 for later clocks in the list and longer segments, -1 for earlier and shorter ones.
        library: (plans, m) clocks of plans, parts of which may be taken.
    """
    kind = random.draw()
    how = random.draw()
    ahead = random.draw() < 0.5
    steps = sign * _random_count(0.5 if random.draw() < 0.7 else 4.0)
    far = _random_count(1.0 if random.draw() < 0.5 else 8.0)
    length = math.exp(-6.0 * random.draw())
    model = library[random.below(len(library))]
    wave = problem.wave
    added_j = 0.0
    bits = problem.mode_bits
    mask = (1 << bits) - 1
    mode = -1
    if bits > 0 and random.draw() < _MODES:
        mode = random.below(mask + 1)
    for rank in range(ranks[0], ranks[1] + 1):
        first = problem.rank_start[rank]
        stop = problem.rank_start[rank + 1]
        i = at
        if problem.rank[at] != rank:
            i = min(_first_at_wave(wave, first, stop, wave[at]), stop - 1)
        begin, end = _segment(state.clock, bits, first, stop, i)
        place = problem.place[rank, state.clock[i]] + (steps << bits)
        place = min(max(place, 0), problem.usable_count[rank] - 1)
        clock = problem.usable[rank, place]
        if 0.3 <= kind < 0.7:
            neighbour = state.clock[
                first + ((end if ahead else begin - 1) - first) % (stop - first)
            ]
            if kind >= 0.62:  # the segment joins the one before or after it
                clock = neighbour
            elif sign > 0:  # it takes from that one
                begin, end = (end, end + far) if ahead else (begin - far, begin)
                clock = state.clock[i]
            else:
                begin, end = (
                    (max(begin, end - far), end) if ahead else (begin, min(end, begin + far))
                )
                clock = neighbour
        elif kind >= 0.7:  # a part of the iteration
            if how < 0.5:
                begin = i
                end = _first_at_wave(wave, i, stop, wave[at] + length)
            elif how < 0.75:
                begin, end = (i, end) if ahead else (begin, i + 1)
            else:
                begin, end = (i, stop) if ahead else (first, i + 1)
        for j in range(begin, min(end, begin + stop - first)):
            k = first + (j - first) % (stop - first)
            if mode < 0:
                new = model[k] if kind >= 0.85 else clock
                added_j += _set(problem, state, k, new & ~mask | state.clock[k] & mask)
                continue
            other = k if problem.member[k] == problem.member[i] else -1
            while other >= 0:
                added_j += _set(problem, state, other, state.clock[other] & ~mask | mode)
                other = problem.tied[other] if problem.tied[other] != k else -1
    return added_j


def _restore(node: Any, source: Any, target: Any, first: int, stop: int) -> None:
    """Copy clocks and durations from `source` to `target`, for the computations from `first` to
    before `stop`.
    """
    for i in range(first, stop):
        if target.clock[i] != source.clock[i]:
            target.clock[i] = source.clock[i]
            target.duration_s[node[i]] = source.duration_s[node[i]]


def _anneal_clocks(
    problem: Any,
    now: Any,
    trial: Any,
    best: Any,
    time_s: float,
    cost_j: float,
    margin_j: float,
    goal: Any,
    heat: Any,
    library: Any,
    plans: int,
    change: Any,
) -> None:
    """Do as `anneal` does, with two equal states of the start, replayed, whose clocks are `best`,
    its seconds and joules, and the rounding error of a sum of joules.
    """
    random.seed(heat.seed)
    node = problem.node
    rank = problem.rank
    rank_start = problem.rank_start
    nodes = len(now.end_s)
    ranks = len(rank_start) - 1
    best_s = time_s
    best_j = cost_j
    stale = nodes  # the first node whose end in `trial` differs from `now`
    for attempt in range(heat.tries):
        part = attempt / heat.tries
        heat_j = heat.first_j * (heat.last_j / heat.first_j) ** part
        price_w = goal.price_w * _C.exp2(3.0 * part)
        worth_j = cost_j + price_w * max(0.0, time_s - goal.deadline_s)
        most_j = worth_j - heat_j * math.log(1.0 - random.draw())
        sign = 1 if random.draw() < 0.5 else -1
        turns = 2 if random.draw() < 0.4 else 1
        at = random.below(len(best))
        first = last = rank[at]
        if random.draw() < _TOGETHER:
            first = 0
            last = ranks - 1
            if random.draw() < 0.5:
                first = random.below(ranks)
                last = min(ranks - 1, first + random.below(ranks))
        low = first
        high = last
        trial_j = cost_j
        for turn in range(turns):
            if turn == 1:  # something else, the other way, on the same ranks or on any
                at = random.below(rank_start[first], rank_start[last + 1])
                if first == last and random.draw() < 0.5:
                    at = random.below(len(best))
                    first = last = rank[at]
            trial_j += _change(problem, trial, (first, last), at, sign, library)
            sign = -sign
        low = min(low, first)
        high = max(high, last)
        good = trial.touched[0] < nodes and trial_j <= most_j + heat.slack_j
        changes = max_changes(rank_start, trial.clock, low, high, problem.mode_bits) if good else 0
        good = good and changes <= goal.budget
        if good:
            if change is None:
                trial.touched[0] = stale = min(trial.touched[0], stale)
                trial_s = replay(problem, trial)
            else:
                spent_j = np.zeros(1)
                trial_s = _replay_changes(problem, trial, change, spent_j)
                trial_j = spent_j[0]
                trial_j += goal.waiting_w * trial_s
            good = trial_j + price_w * max(0.0, trial_s - goal.deadline_s) <= most_j
        trial.touched[0] = nodes
        begin = rank_start[low]
        end = rank_start[high + 1]
        if not good:
            _restore(node, now, trial, begin, end)
            continue
        _restore(node, trial, now, begin, end)
        cost_j = trial_j
        time_s = trial_s
        stale = nodes
        late = time_s > goal.deadline_s
        better = time_s < best_s if late else best_s > goal.deadline_s or cost_j < best_j - margin_j
        if better and (late or best_s > goal.deadline_s or cost_j >= goal.floor_j - margin_j):
            best_s = time_s
            best_j = cost_j
            for i in range(len(best)):
                best[i] = now.clock[i]


def _latest_ends(problem: Any, state: Any, deadline_s: float, latest_s: Any) -> None:
    """Fill `latest_s` with the latest end of each node after which all others still end by
    `deadline_s`.
    """
    before_start = problem.before_start
    before = problem.before
    lag_s = problem.before_lag_s
    for k in range(len(latest_s)):
        latest_s[k] = deadline_s
    # Backward, so that all that follow a node are known before what it waits for is.
    for k in range(len(latest_s) - 1, -1, -1):
        start_s = latest_s[k] - state.duration_s[k]
        for i in range(before_start[k], before_start[k + 1]):
            latest_s[before[i]] = min(latest_s[before[i]], start_s - lag_s[i])


def _makespans(problem: Any, state: Any, computation_s: Any, rows: int, makespan_s: Any) -> None:
    """Fill `makespan_s` with that of each row of `computation_s`: (rows, m)."""
    for row in range(rows):
        for i in range(len(problem.node)):
            state.duration_s[problem.node[i]] = computation_s[row, i]
        state.touched[0] = 0
        makespan_s[row] = replay(problem, state)


def _raised_to(problem: Any, scale: Any, column: Any, first: int, stop: int) -> tuple[int, float]:
    """Return the lowest clock found at which no computation from `first` to before `stop` takes
    longer than now, and what that costs, joules; -1 if there is none.
    """
    member = problem.member
    time_s = problem.time_s
    cost_j = problem.cost_j
    # Columns count downward from the highest clock, so the smallest one is the fastest clock in
    # use.
    clock = column[first]
    for i in range(first, stop):
        clock = min(clock, column[i])
    i = first
    added_j = 0.0
    # A class takes infinitely long at a clock at which it was not measured, so the next higher one
    # is tried for all.
    while i < stop and clock >= 0:
        c = member[i]
        if time_s[c, clock] > time_s[c, column[i]]:
            clock = clock - 1
            i = first
            added_j = 0.0
        else:
            added_j += scale[i] * (cost_j[c, clock] - cost_j[c, column[i]])
            i += 1
    return clock, added_j


def _merge(
    problem: Any,
    scale: Any,
    most_segments: int,
    column: Any,
    begin: Any,
    raised: Any,
    added_j: Any,
) -> bool:
    """Merge neighbouring segments of one clock, those first that cost least, until no rank has
    more than `most_segments`; return whether that was possible.

    `begin`, `raised` and `added_j` are scratch space: where each segment of a rank begins, and the
    clock and cost of it with the one before.
    """
    rank_start = problem.rank_start
    for rank in range(len(rank_start) - 1):
        first = rank_start[rank]
        stop = rank_start[rank + 1]
        count = 0
        for i in range(first, stop):
            if i == first or column[i] != column[i - 1]:
                begin[count] = i
                count += 1
        begin[count] = stop
        # The cost of merging each segment with the one before it, which the loop keeps up to date.
        for s in range(1, count):
            raised[s], added_j[s] = _raised_to(problem, scale, column, begin[s - 1], begin[s + 1])
        while count > most_segments:
            # The cheapest merge first, of those that have a clock in common.
            best = 0
            for s in range(1, count):
                if raised[s] >= 0 and (best == 0 or added_j[s] < added_j[best]):
                    best = s
            # Classes may have no clock in common at which none takes longer.
            if best == 0:
                return False
            for i in range(begin[best - 1], begin[best + 1]):
                column[i] = raised[best]
            count -= 1
            for s in range(best, count + 1):
                begin[s], raised[s], added_j[s] = begin[s + 1], raised[s + 1], added_j[s + 1]
            # Only merges with the new segment cost something else now.
            for s in range(max(best - 1, 1), min(best + 1, count)):
                raised[s], added_j[s] = _raised_to(
                    problem, scale, column, begin[s - 1], begin[s + 1]
                )
    return True


def _lower(problem: Any, scale: Any, deadline_s: float, state: Any) -> None:
    """Lower the clock of one segment after the other, as long as that saves and all is in time."""
    rank_start = problem.rank_start
    member = problem.member
    node = problem.node
    time_s = problem.time_s
    cost_j = problem.cost_j
    column = state.clock
    duration_s = state.duration_s
    # Each lowering may leave room for another, so it goes on until a whole round finds none.
    lowered = True
    while lowered:
        lowered = False
        for rank in range(len(rank_start) - 1):
            first = rank_start[rank]
            while first < rank_start[rank + 1]:
                stop = first + 1
                # A whole segment is lowered at once, so that the number of changes never grows.
                now = column[first]
                while stop < rank_start[rank + 1] and column[stop] == now:
                    stop += 1
                # Only a few lower clocks are looked at, as each costs a replay.
                for clock in range(now + 1, min(now + 1 + _LOOK, time_s.shape[1])):
                    saved_j = 0.0
                    for i in range(first, stop):
                        saved_j += scale[i] * (cost_j[member[i], now] - cost_j[member[i], clock])
                    # A lower clock may cost more energy, so the next one is looked at as well.
                    if not saved_j > 0.0:
                        continue
                    for i in range(first, stop):
                        duration_s[node[i]] = scale[i] * time_s[member[i], clock]
                    # A replay resumes at the first node that changed, which may be any here, so it
                    # begins anew.
                    state.touched[0] = 0
                    if replay(problem, state) <= deadline_s:
                        for i in range(first, stop):
                            column[i] = clock
                        lowered = True
                        break
                    # Too late, so the durations go back before the next clock is tried.
                    for i in range(first, stop):
                        duration_s[node[i]] = scale[i] * time_s[member[i], now]
                first = stop


def replay_all(
    waits: Any, row_s: Any, row: Any, draws: int, end_s: Any, width: int, latest_s: Any
) -> None:
    """Write when all places have ended in each draw to `latest_s`, and when each has to `end_s`,
    which has room for `width` draws.
    """
    latest_s[:] = 0.0
    for d in range(draws):
        column = end_s[:, d % width]
        for place in waits.order:
            start_s = 0.0
            for i in range(waits.before_start[place], waits.before_start[place + 1]):
                start_s = max(start_s, column[waits.before[i]] + waits.before_lag_s[i])
            column[place] = start_s + row_s[row[place], d]
            latest_s[d] = max(latest_s[d], column[place])


def mark_longest(waits: Any, end_s: Any, latest_s: Any, draws: int, on_path: Any) -> None:
    """Write 1 to `on_path`, of zeros, where a place is on the longest path of a draw."""
    for place in reversed(waits.order):
        before = range(waits.before_start[place], waits.before_start[place + 1])
        for d in range(draws):
            if end_s[place, d] > 0.0 and end_s[place, d] >= latest_s[d]:
                on_path[place, d] = 1.0
            if on_path[place, d]:
                arrivals_s = [end_s[waits.before[i], d] + waits.before_lag_s[i] for i in before]
                start_s = max([0.0, *arrivals_s])
                for i, arrival_s in zip(before, arrivals_s, strict=True):
                    if arrival_s >= start_s:
                        on_path[waits.before[i], d] = 1.0
