"""Choose the mode of each computation, if modes of several are tied to each other: by memory, by a
microbatch or a stage that they share, or by what a change of the mode costs.

Without such ties the frontier itself has all modes: a computation's curve is the hull of their
points, and rounding picks mode and clock. With them:

* Small problems are solved exactly, modes and clocks together, as a mixed-integer programme.
* Else modes are priced. The flow of a minimum cut is the price of each computation's time, so a
  group in a mode costs the least sum of effective energy and priced time of its computations. The
  modes of least cost within memory are an integer programme, nearly one of intervals, which HiGHS
  solves at once. They have a frontier of their own, and so other prices: this repeats, also with
  the mean of all prices so far, which is a flow too. Where memory is limited, it begins with the
  modes nearest to those of the relaxed programme of modes and clocks, whose cost is a bound too.

For any flow, the least priced cost less the flow times the deadline bounds every plan from below,
by weak duality: so chosen modes come with their distance from the best. That is Lagrangian
decomposition, as in `point_problem`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.base.errors import ProfileError, how_to_install
from perseus_planner.base.prefixes import si
from perseus_planner.plans.replay import end_times, time_and_energy
from perseus_planner.profiles.measurement import lower_hull
from perseus_planner.profiles.modes import OWN
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.network import scaled_network
from perseus_planner.solver.programme import Programme

if TYPE_CHECKING:
    from perseus_planner.profiles.keys import Key
    from perseus_planner.profiles.measurement import OperatingPoint
    from perseus_planner.profiles.modes import Modes
    from perseus_planner.schedules import Computation
    from perseus_planner.solver.network import Floats

_SMALL = 120  #: points of all computations in all modes, up to which HiGHS solves modes and clocks
_NEAR = 1e-9  #: relative; so far from its fast end a frontier still has a finite slope
_RELAXED = 40_000  #: points as in `_SMALL`, up to which HiGHS solves modes and clocks relaxed
_ROUNDS = 12  #: of pricing, at most
_SAME = 1e-9  #: relative; what takes as much more memory
_UNIT = 1e-3  #: of the deadline: the programmes' unit of time, as HiGHS is exact to 1e-6

Assignment = tuple[str, ...]
"""The mode of each computation, by its place."""


class Choice(NamedTuple):
    """The modes that were chosen, and what is known of them."""

    modes: Assignment
    #: effective energy that no plan of the deadline is below, whatever its modes, joules.
    effective_bound_j: float
    clocks: tuple[int, ...] | None = None  #: MHz of each computation, where they were chosen too


def in_modes(
    dag: PipelineDag, modes: Sequence[str], base: PipelineDag | None = None
) -> PipelineDag:
    """Return the iteration with the mode of each computation fixed, and what changes take.

    Args:
        dag: the iteration, with open modes.
        modes: the mode of each computation.
        base: what savings are compared with; itself by default.
    """
    iteration = dag.iteration
    waits = [dict(waits) for waits in iteration.waits]
    change_s = dag.profile.modes.change_s if dag.profile.modes is not None else 0.0
    # A change of the mode takes its time after what runs just before on the rank: a longer wait.
    for place, before, latest in _successions(dag) if change_s else ():
        if modes[place] != modes[latest]:
            waits[place][before] = waits[place].get(before, 0.0) + change_s
    fixed = replace(
        iteration,
        modes=tuple(modes),
        predecessors=tuple(tuple(others) for others in waits),
        lags_s=tuple(tuple(others.values()) for others in waits),
    )
    return PipelineDag(dag.profile, fixed, fixed if base is None else base.iteration)


def _successions(dag: PipelineDag) -> list[tuple[int, int, int]]:
    """Return each computation with the node before it on its rank, and with the computation before
    it there.
    """
    successions = list[tuple[int, int, int]]()
    count = len(dag.computations)
    for program in dag.iteration.programs:
        # The latest computation; operations between have no mode.
        latest: int | None = None
        for i, place in enumerate(program):
            if place < count:
                if latest is not None:
                    successions.append((place, program[i - 1], latest))
                latest = place
    return successions


def baseline(dag: PipelineDag) -> PipelineDag:
    """Return what savings are compared with: the one mode for all that is fastest at full clocks
    and fits into memory; the iteration itself where modes are not open.

    Raises:
        ProfileError: If the training's own way does not fit.
    """
    if not dag.has_open_modes:
        return dag
    problem = ModeProblem(dag)
    best = (math.inf, dag)
    for mode in problem.modes.usable:
        modes = (mode,) * len(dag.computations)
        if problem.fits(modes):
            single = in_modes(dag, modes)
            time_s, _ = time_and_energy(single, single.baseline_measurements())
            best = min(best, (time_s, single), key=lambda entry: entry[0])
    return best[1]


class _Row(NamedTuple):
    """A sum of modes that is at most a limit: (group, mode) -> its part."""

    parts: dict[tuple[int, str], float]
    limit: float


@dataclass(frozen=True, eq=False)
class ModeProblem:
    """Which modes of an iteration go together, and the memory that they take.

    Raises:
        ProfileError: If the training's own way does not fit into memory.
    """

    dag: PipelineDag  #: with open modes

    def __post_init__(self) -> None:
        as_trained = (OWN,) * len(self.dag.computations)
        for row in self.memory_rows:
            if (taken := self._taken(row, as_trained)) > row.limit:
                raise ProfileError(
                    f"modes, memory_bytes: the mode {OWN} takes {si(taken, 'B', 4)} of "
                    f"{si(row.limit, 'B', 4)}, and training runs in it without a plan; measure a "
                    f"way that fits as {OWN}, or correct the limit"
                )

    @property
    def modes(self) -> Modes:
        """The modes of the profile."""
        assert self.dag.profile.modes is not None
        return self.dag.profile.modes

    @cached_property
    def groups(self) -> tuple[int, ...]:
        """The number of the group of each computation: all of a group have one mode."""
        joined: dict[object, object] = {}

        def of_all(tie: object) -> object:
            while tie in joined:
                tie = joined[tie]
            return tie

        # A pair has one mode, so what its halves belong to has one mode together.
        for computation in self.dag.computations:
            forward = self.dag.forward_in(computation)
            if forward is not None:
                one = of_all(self._tied_to(computation))
                other = of_all(self._tied_to(forward))
                if one != other:
                    joined[other] = one
        number: dict[object, int] = {}
        ties = [of_all(self._tied_to(computation)) for computation in self.dag.computations]
        return tuple(number.setdefault(tie, len(number)) for tie in ties)

    def _tied_to(self, computation: Computation) -> object:
        """Return what a computation belongs to, which has one mode."""
        return {
            "computation": computation,
            "microbatch": (computation.stage, computation.microbatch),
            "stage": computation.stage,
            "pipeline": None,
        }[self.modes.shared_by]

    @cached_property
    def points(self) -> list[dict[str, tuple[OperatingPoint, ...]]]:
        """The operating points of each computation in each mode."""
        of_key = {key: self.dag.mode_points(key) for key in dict.fromkeys(self.dag.iteration.keys)}
        return [of_key[key] for key in self.dag.iteration.keys]

    @cached_property
    def memory_rows(self) -> list[_Row]:
        """What is kept and taken while each computation runs, on each GPU of its rank."""
        if self.modes.memory_bytes is None:
            return []
        rows = dict[tuple[object, ...], _Row]()
        dag = self.dag
        for program in dag.iteration.programs:
            places = [place for place in program if place < len(dag.computations)]
            # (stage, microbatch) -> its last computation on the rank, after which nothing of it is
            # kept.
            last = {dag.computations[place][::2]: place for place in places}
            alive: dict[tuple[int, int], int] = {}  # (stage, microbatch) -> group of its forward
            for place in places:
                stage, kind, microbatch = dag.computations[place]
                # The forward of a pair keeps what any other does.
                forward = (
                    dag.computations[place]
                    if kind == "F"
                    else dag.forward_in(dag.computations[place])
                )
                if forward is not None:
                    alive[forward.stage, forward.microbatch] = self.groups[place]
                parts: dict[tuple[int, str], float] = defaultdict(float)
                for name in self.modes.usable:
                    mode = self.modes.ways[name]
                    # What forwards before this moment keep for their backwards.
                    for (of_stage, _), group in alive.items():
                        parts[group, name] += mode.bytes_of(of_stage)[0]
                    if kind != "F":
                        # A backward takes some more while it runs.
                        parts[self.groups[place], name] += mode.bytes_of(stage)[1]
                limit = self.modes.limit_bytes(stage)
                assert limit is not None
                # Many moments take the same, so one row stands for them all.
                rows.setdefault((limit, *sorted(parts.items())), _Row(dict(parts), limit))
                if kind != "F" and last[stage, microbatch] == place:
                    alive.pop((stage, microbatch), None)
        return list(rows.values())

    def _taken(self, row: _Row, modes: Sequence[str]) -> float:
        mode = dict(zip(self.groups, modes, strict=True))
        return math.fsum(part for (group, name), part in row.parts.items() if mode[group] == name)

    def fits(self, modes: Sequence[str]) -> bool:
        """Return whether these modes fit into memory on every rank."""
        return all(self._taken(row, modes) <= row.limit for row in self.memory_rows)

    def choose(self, deadline_s: float) -> Choice:
        """Return the modes for an iteration that may take so long; if none is that fast, the
        fastest that were found.

        Raises:
            UsageError: If scipy is not installed.
        """
        if self._size <= _SMALL:
            exact = self._exact(deadline_s)
            if exact is not None:
                return exact
        return self._priced(deadline_s)

    @property
    def _size(self) -> int:
        return sum(len(front) for modes in self.points for front in modes.values())

    def _priced(self, deadline_s: float) -> Choice:
        within_s = deadline_s - self.dag.profile.overhead_s
        starts = [tuple(key.mode for key in baseline(self.dag).iteration.keys)]
        priced: dict[Assignment, tuple[float, float]] = {}
        bound_j = -math.inf
        # Where memory is short, prices alone start far off; the relaxed programme knows the memory.
        if self.memory_rows and self._size <= _RELAXED:
            relaxed = self._exact(deadline_s, whole=False)
            if relaxed is not None:
                starts.append(relaxed.modes)
                bound_j = relaxed.effective_bound_j
        for start in starts:
            bound_j = max(bound_j, self._priced_from(start, within_s, priced))
        # In time before late, and then the cheapest.
        return Choice(min(priced, key=lambda modes: priced[modes]), bound_j)

    def _priced_from(
        self, modes: Assignment, within_s: float, known: dict[Assignment, tuple[float, float]]
    ) -> float:
        """Add modes, and those that follow from them, to what is known: by how much each is late,
        and its cost. Return a bound on the cost of all.
        """
        bound_j = -math.inf
        mean = None
        for rounds in range(_ROUNDS):
            late_s, prices = self._prices(modes, within_s)
            least_j = math.fsum(
                costs[mode] for costs, mode in zip(self._costs_j(prices), modes, strict=True)
            )
            known[modes] = late_s, self._dual_j(prices, least_j, within_s, modes)
            # Prices jump from choice to choice. Their mean settles, and a mean of flows is a flow.
            mean = prices if mean is None else mean.mixed(prices, 1 / (rounds + 1))
            new = list[Assignment]()
            for flow in (mean, prices):
                cheapest, least_j = self._cheapest(flow)
                # Weak duality: any flow bounds all choices, so the largest bound counts.
                bound_j = max(bound_j, self._dual_j(flow, least_j, within_s))
                if cheapest not in known:
                    new.append(cheapest)
            # Both flows lead to modes that are known, so nothing new follows from them.
            if not new:
                break
            modes = new[0]
        return bound_j

    def _prices(self, modes: Assignment, within_s: float) -> tuple[float, _Prices]:
        """Return by how much an iteration in these modes is late at its fastest, seconds, and the
        prices of time in its cheapest relaxed one.
        """
        from perseus_planner.solver.mincut import slowest_tree, walk

        fixed = in_modes(self.dag, modes)
        scaled = scaled_network(fixed)
        network = scaled.network
        durations_s = [fixed.points[key][0].time_s for key in fixed.iteration.keys]
        fastest_s = max(end_times(fixed, durations_s))
        tree = slowest_tree(network)
        # Not at the fast end itself, where the frontier's slope, which is the flow, has no bound.
        target = 1 + int(max(within_s, fastest_s * (1 + _NEAR)) / scaled.tick_s)
        step = next(walk(network, [min(target, int(tree.event[network.sink]))], tree))
        flow_w = step.state.flow * scaled.power_unit_w
        count = len(fixed.order)
        nodes = np.empty(count)
        # Arcs are in topological order, prices are by place.
        nodes[list(fixed.order)] = flow_w[:count]
        # Arcs of waits follow those of the nodes, in this order (`network._ends`).
        waits = [
            (place, other)
            for place, predecessors in enumerate(fixed.iteration.predecessors)
            for other in predecessors
        ]
        waiting = dict(zip(waits, flow_w[count:].tolist(), strict=False))
        total_w = float(flow_w[network.tail == network.source].sum())
        return max(fastest_s - within_s, 0.0), _Prices(nodes, waiting, total_w)

    def _costs_j(self, prices: _Prices) -> list[dict[str, float]]:
        """Return the least priced cost of each computation in each mode, joules."""
        costs: list[dict[str, float]] = [{} for _ in self.dag.computations]
        # Computations of one key have the same points, and so are priced together.
        places_of: dict[Key, list[int]] = defaultdict(list)
        for place, key in enumerate(self.dag.iteration.keys):
            places_of[key].append(place)
        for places in places_of.values():
            for mode, front in self.points[places[0]].items():
                effective_j = np.array([point.effective_j for point in front])
                time_s = np.array([point.time_s for point in front])
                each_j = (effective_j + np.outer(prices.nodes_w[places], time_s)).min(axis=1)
                for place, cost_j in zip(places, each_j.tolist(), strict=True):
                    costs[place][mode] = cost_j
        return costs

    def _dual_j(
        self, prices: _Prices, least_j: float, within_s: float, modes: Assignment | None = None
    ) -> float:
        """Return the priced cost of an iteration less what its time is worth: a bound on its
        effective energy, joules.

        Args:
            prices: of time.
            least_j: of its computations.
            within_s: the replayed time of the iteration, seconds.
            modes: of the computations, if the changes between them are not a part of `least_j`.
        """
        dag = self.dag
        count = len(self.dag.computations)
        operations = dag.keys[count:]
        # Operations and lags take time as well, which is priced like that of computations.
        fixed_j = [
            dag.points[key][0].effective_j + prices.nodes_w[count + i] * dag.points[key][0].time_s
            for i, key in enumerate(operations)
        ]
        lags_j = [
            prices.waits_w.get((place, other), 0.0) * lag_s
            for place, waits in enumerate(dag.iteration.waits)
            for other, lag_s in waits
            if lag_s
        ]
        if modes is not None:
            lags_j += [
                prices.waits_w.get((place, before), 0.0) * self.modes.change_s
                for place, before, latest in self._changes
                if modes[place] != modes[latest]
            ]
        return math.fsum([least_j, *fixed_j, *lags_j]) - prices.total_w * within_s

    @cached_property
    def _changes(self) -> list[tuple[int, int, int]]:
        """Where a change of the mode costs time, as `_successions` returns it."""
        return [
            succession
            for succession in (_successions(self.dag) if self.modes.change_s else ())
            if self.groups[succession[0]] != self.groups[succession[2]]
        ]

    def _cheapest(self, prices: _Prices) -> tuple[Assignment, float]:
        """Return the modes of least priced cost within memory, and a bound on that cost, joules."""
        costs: dict[tuple[int, str], float] = defaultdict(float)
        for group, of_mode in zip(self.groups, self._costs_j(prices), strict=True):
            for mode, cost_j in of_mode.items():
                costs[group, mode] += cost_j
        count = 1 + max(self.groups)
        ways = self.modes.usable
        # Without ties between groups, each takes its cheapest mode.
        if not self.memory_rows and not self._changes:
            of_group = [min(ways, key=lambda mode: costs[group, mode]) for group in range(count)]
            least_j = math.fsum(costs[group, mode] for group, mode in enumerate(of_group))
            return tuple(of_group[group] for group in self.groups), least_j
        return self._within_memory(costs, prices)

    def _within_memory(
        self, costs: Mapping[tuple[int, str], float], prices: _Prices | None = None
    ) -> tuple[Assignment, float]:
        """Return the modes of least cost within memory, with what changes cost at these prices."""
        programme = _ModeProgramme()
        modes = programme.add_modes(self, costs)
        waits_w = {} if prices is None else prices.waits_w
        for place, before, latest in self._changes if waits_w else ():
            price_j = waits_w.get((place, before), 0.0) * self.modes.change_s
            programme.add_change(self.groups[place], self.groups[latest], modes, price_j)
        solved = programme.solve()
        assert solved is not None  # the training's own way fits
        return self._assigned(modes, solved.x), solved.bound

    def _assigned(self, modes: dict[tuple[int, str], int], x: Floats) -> Assignment:
        ways = self.modes.usable
        return tuple(
            max(ways, key=lambda mode: float(x[modes[group, mode]])) for group in self.groups
        )

    def _exact(self, deadline_s: float, *, whole: bool = True) -> Choice | None:
        """Return the best modes and clocks; None if no choice of them is in time. Those that are
        not `whole` are parts of several, of which the modes are the nearest within memory.
        """
        dag = self.dag
        count = len(self.dag.computations)
        unit_s = _UNIT * deadline_s
        within = (deadline_s - dag.profile.overhead_s) / unit_s
        programme = _ModeProgramme()
        modes = programme.add_modes(self, defaultdict(float), whole=whole)
        # When each place starts, in units.
        starts = [programme.add(0.0, within) for _ in dag.order]
        # Whether the modes differ where a change would take time.
        changed = {
            (place, before): programme.add_change(
                self.groups[place], self.groups[latest], modes, 0.0
            )
            for place, before, latest in self._changes
        }
        # Of each computation: variable -> the operating point of which it is the part.
        columns: list[dict[int, OperatingPoint]] = []
        for place, fronts in enumerate(self.points):
            columns.append({})
            for mode, front in fronts.items():
                # The cheapest parts of points are always of points on the hull.
                hull = front if whole else _hull(front)
                of_mode = {programme.add(p.effective_j, 1.0, whole=whole): p for p in hull}
                in_it = modes[self.groups[place], mode]
                # The points of a mode add up to 1 where the group has the mode, else to 0.
                programme.limit({**dict.fromkeys(of_mode, 1.0), in_it: -1.0}, 0.0, 0.0)
                columns[-1] |= of_mode
        durations = [
            *({i: p.time_s / unit_s for i, p in column.items()} for column in columns),
            *({} for _ in dag.iteration.operations),
        ]
        fixed = [0.0] * count + [
            operation.time_s / unit_s for operation in dag.iteration.operations
        ]
        waits = [dict(lags) for lags in dag.iteration.waits]
        for place, before in changed:
            waits[place].setdefault(before, 0.0)
        # Each place ends within the deadline, and starts after the end of what it waits for.
        for place, lags in enumerate(waits):
            programme.limit({starts[place]: 1.0, **durations[place]}, within - fixed[place])
            for other, lag_s in lags.items():
                row = {starts[other]: 1.0, starts[place]: -1.0, **durations[other]}
                if (place, other) in changed:
                    row[changed[place, other]] = self.modes.change_s / unit_s
                programme.limit(row, -fixed[other] - lag_s / unit_s)
        solved = programme.solve()
        if solved is None:
            return None
        fixed_j = [dag.points[key][0].effective_j for key in dag.keys[count:]]
        bound_j = math.fsum([solved.bound, *fixed_j])
        # Parts of modes are no choice: the nearest whole modes that fit into memory are.
        if not whole:
            far = {key: -float(solved.x[variable]) for key, variable in modes.items()}
            return Choice(self._within_memory(far)[0], bound_j)
        # Of whole variables one is 1, but for rounding errors of HiGHS.
        clocks = [max(column, key=lambda i: float(solved.x[i])) for column in columns]
        return Choice(
            self._assigned(modes, solved.x),
            bound_j,
            tuple(column[i].clock_mhz for column, i in zip(columns, clocks, strict=True)),
        )


@dataclass(frozen=True)
class _Prices:
    """What a second of each node, and of each wait, is worth, watts: a flow from begin to end."""

    nodes_w: Floats  #: (n,) by place
    waits_w: dict[tuple[int, int], float]  #: (place, what it waits for)
    total_w: float  #: of the iteration

    def mixed(self, other: _Prices, part: float) -> _Prices:
        """Return the mean with `part` of another one."""
        waits = {
            wait: (1 - part) * self.waits_w.get(wait, 0.0) + part * other.waits_w.get(wait, 0.0)
            for wait in self.waits_w | other.waits_w
        }
        nodes_w = (1 - part) * self.nodes_w + part * other.nodes_w
        return _Prices(nodes_w, waits, (1 - part) * self.total_w + part * other.total_w)


class _ModeProgramme(Programme):
    """A programme of which some variables are the modes of groups."""

    def __init__(self) -> None:
        super().__init__(
            "modes that are tied to each other need scipy, which is not installed; "
            f"{how_to_install('modes')}"
        )

    def add_modes(
        self,
        problem: ModeProblem,
        costs: Mapping[tuple[int, str], float],
        *,
        whole: bool = True,
    ) -> dict[tuple[int, str], int]:
        """Add the mode of each group, at a cost each, within memory; return its variables.

        Where all that take more than the least of their group take as much more, a limit is one on
        their number, a whole one: so parts of modes are nearer to whole ones.
        """
        groups = range(1 + max(problem.groups))
        modes = {
            (group, mode): self.add(costs[group, mode], 1.0, whole=whole)
            for group in groups
            for mode in problem.modes.usable
        }
        for group in groups:
            # Each group has one mode.
            self.limit({modes[group, mode]: 1.0 for mode in problem.modes.usable}, 1.0, 1.0)
        for row in problem.memory_rows:
            # Any mode of a group takes the least of them, so only what a mode takes more is a
            # choice.
            least: dict[int, float] = {}
            for (group, _), part in row.parts.items():
                least[group] = min(part, least.get(group, part))
            more = {key: part - least[key[0]] for key, part in row.parts.items()}
            # HiGHS is exact to absolute numbers, so the largest part is 1.
            unit = max(more.values()) or 1.0
            taken = {modes[key]: part / unit for key, part in more.items() if part > _SAME * unit}
            most = (row.limit - math.fsum(least.values())) / unit + _SAME
            is_number = all(part > 1 - _SAME for part in taken.values())
            self.limit(taken, math.floor(most) if is_number else most)
        return modes

    def add_change(
        self, group: int, other: int, modes: Mapping[tuple[int, str], int], cost: float
    ) -> int:
        """Add whether two groups have different modes, and return its variable."""
        changed = self.add(cost, 1.0)
        for (of_group, mode), variable in modes.items():
            if of_group == group:
                self.limit({variable: 1.0, modes[other, mode]: -1.0, changed: -1.0}, 0.0)
        return changed


def _hull(front: Sequence[OperatingPoint]) -> list[OperatingPoint]:
    """Return the points of which some deadline has parts."""
    hull = set(lower_hull((point.time_s, point.effective_j) for point in front))
    return [point for point in front if (point.time_s, point.effective_j) in hull]
