"""What other planners would choose: clocks for the same iteration, to be replayed beside ours.

Each gives "3F17" -> MHz over `dag.computations`, clocks that were measured of that computation. They use the graph and
the replay, and nothing of the solver. A deadline is for the replayed iteration; of what meets it they take the least
effective energy (energy less what the GPUs would draw if they waited meanwhile), as where others wait until the
deadline anyway.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from perseus_planner.cluster.envpipe import reconfigured
from perseus_planner.cluster.lowtime_walk import Walk, fit
from perseus_planner.errors import InfeasibleError, UsageError
from perseus_planner.plans.simulate import time_and_energy
from perseus_planner.quantities import TIME
from perseus_planner.schedules import one_f_one_b

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.schedules.dag import PipelineDag

_TICKS = (1000, 10)  #: lowtime's steps in an iteration and in its shortest computation, at least, unless told


def all_maximum(dag: PipelineDag) -> dict[str, int]:
    """Every computation at its highest measured clock: what every saving is counted from."""
    return _clocks(dag, [points[0] for points in _measured(dag)])


def one_clock(dag: PipelineDag, deadline_s: float) -> dict[str, int]:
    """One clock for the whole job, as an operator sets it by hand.

    Of the clocks measured of all computations, that of the least effective energy whose iteration meets the deadline;
    `all_maximum` where none does.

    Args:
        dag: the iteration.
        deadline_s: the iteration time to meet, seconds.

    Raises:
        UsageError: no clock was measured of all computations, or `deadline_s` is no time.
    """
    deadline_s = _seconds("deadline_s", deadline_s)
    tables = [{point.clock_mhz: point for point in points} for points in _measured(dag)]
    shared = _shared_clocks(_measured(dag))
    if not shared:
        raise UsageError("no clock was measured of every computation, so a job cannot run at one; measure one of all")
    chosen = _cheapest(dag, ([table[clock] for table in tables] for clock in shared), deadline_s)
    return all_maximum(dag) if chosen is None else _clocks(dag, chosen)


def one_per_stage(dag: PipelineDag, deadline_s: float) -> dict[str, int]:
    """One clock for each stage, forwards and backwards alike: Zeus (NSDI 2023) made to balance a pipeline.

    The rule is ZeusPerStage of the Perseus artifact, with clocks in place of its power limits. The heaviest stage is
    the one of the longest forward at the highest clocks. For each of its clocks, from the highest, every other stage
    goes down from where it was, and from no higher clock than the heaviest has, as long as that brings its forward no
    farther from the heaviest's in time; where a lower clock is faster, it goes on. The family ends once any stage is at
    its lowest clock. Of the family, the one of the least effective energy that meets the deadline; `all_maximum` where
    none does, as is common close to its time. (The artifact has no deadline: it weighs energy against time by a
    factor.) Only forwards are balanced, so a stage that is light in them alone becomes slow in its backwards.

    Args:
        dag: the iteration.
        deadline_s: the iteration time to meet, seconds.

    Raises:
        UsageError: the computations of a stage share no clock, or `deadline_s` is no time.
    """
    deadline_s = _seconds("deadline_s", deadline_s)
    measured = _measured(dag)
    tables = [{point.clock_mhz: point for point in points} for points in measured]
    stages = [computation.stage for computation in dag.computations]
    family = _balanced_clocks(dag, measured, stages)
    choices = ([table[clocks[stage]] for table, stage in zip(tables, stages, strict=True)] for clocks in family)
    chosen = _cheapest(dag, choices, deadline_s)
    return all_maximum(dag) if chosen is None else _clocks(dag, chosen)


def envpipe(dag: PipelineDag) -> dict[str, int]:
    """EnvPipe's clocks (USENIX ATC 2023), on the 1F1B order; see `perseus_planner.cluster.envpipe` for its rule.

    It knows one point only: no deadline, and nothing better where a straggler leaves time. Replayed, it is no slower
    than `all_maximum`.

    Args:
        dag: the iteration.

    Raises:
        UsageError: the schedule is not 1F1B, the only one for which the rule is known.
    """
    schedule = dag.schedule
    if schedule.ranks != one_f_one_b(schedule.stages, schedule.microbatches).ranks:
        raise UsageError(f"EnvPipe's rule is for 1F1B only, and this schedule is {schedule}; give it a 1F1B schedule")
    return _clocks(dag, reconfigured(dag, _measured(dag)))


def lowtime(dag: PipelineDag, deadline_s: float, tick_s: float | None = None) -> dict[str, int]:
    """The plan of lowtime 0.3.0, the solver published with Perseus, for a deadline.

    All of its frontier is walked, each step replayed with the measured times of its clocks (lowtime's own times are
    rounded down), and of those that meet the deadline the one of the least effective energy is taken. That takes long:
    for 8 stages at the step it takes by itself, 9 s at 12 microbatches, 20 s at 24, and more than 9 minutes at 96.

    Args:
        dag: the iteration.
        deadline_s: the replayed iteration time to meet, seconds.
        tick_s: lowtime's step in time, seconds. Unless given, a thousandth of the iteration time of `all_maximum`, but
            at most a tenth of its shortest computation, as lowtime needs some steps between clocks for its fit. Finer
            steps make other plans, mostly better ones, and take longer in proportion.

    Raises:
        InfeasibleError: none of its plans meets the deadline when replayed.
        UsageError: lowtime is not installed, cannot fit the profile, the iteration has lags or fixed operations, which
            it does not know, or `deadline_s` or `tick_s` is no time.
    """
    deadline_s = _seconds("deadline_s", deadline_s)
    plans = _walked(dag, tick_s)
    chosen = _cheapest(dag, plans, deadline_s)
    if chosen is None:
        least_s = min(time_and_energy(dag, plan)[0] for plan in plans)
        raise InfeasibleError(
            f"no plan of lowtime's finishes an iteration within {deadline_s:.6g} s: its fastest takes {least_s:.6g} s "
            f"when replayed; ask for more, or give it a finer step than {_tick_s(dag, tick_s):.3g} s"
        )
    return _clocks(dag, chosen)


def lowtime_plans(dag: PipelineDag, tick_s: float | None = None) -> list[dict[str, int]]:
    """The plans of all steps of lowtime's walk, slowest first: what `lowtime` chooses from, for many deadlines.

    Raises:
        UsageError: as `lowtime`.
    """
    return [_clocks(dag, plan) for plan in _walked(dag, tick_s)]


def _walked(dag: PipelineDag, tick_s: float | None) -> list[list[Measurement]]:
    if dag.iteration.lags_s or dag.iteration.operations:
        raise UsageError("lowtime knows no transfer lags and no fixed operations; leave it out, or them")
    walk = Walk(fit(dag.profile, _seconds("tick_s", _tick_s(dag, tick_s))), dag, _keys(dag))
    tables = [{point.clock_mhz: point for point in points} for points in _measured(dag)]
    return [[table[clock] for table, clock in zip(tables, clocks, strict=True)] for clocks in _all_steps(walk)]


def _tick_s(dag: PipelineDag, tick_s: float | None) -> float:
    if tick_s is not None:
        return tick_s
    fastest = [points[0] for points in _measured(dag)]
    return min(time_and_energy(dag, fastest)[0] / _TICKS[0], min(point.time_s for point in fastest) / _TICKS[1])


def _all_steps(walk: Walk) -> Iterator[list[int]]:
    yield walk.clocks  # where it starts, all at its slowest
    for _ in walk:
        yield walk.clocks


def _keys(dag: PipelineDag) -> list[tuple[int, str]]:
    """What the profile has measured each computation as, by its place in `dag.computations`."""
    return list(dag.iteration.keys)


def _measured(dag: PipelineDag) -> list[tuple[Measurement, ...]]:
    """What was measured of each computation, highest clock first, by its place in `dag.computations`."""
    return [dag.profile.measurements[key] for key in _keys(dag)]


def _clocks(dag: PipelineDag, points: Iterable[Measurement]) -> dict[str, int]:
    return {str(c): point.clock_mhz for c, point in zip(dag.computations, points, strict=True)}


def _seconds(name: str, value: float) -> float:
    seconds: float | None = TIME.accept(value)
    if seconds is None:
        raise UsageError(f"{name}: {value!r} is not {TIME.wanted}")
    return seconds


def _cheapest(dag: PipelineDag, choices: Iterable[list[Measurement]], deadline_s: float) -> list[Measurement] | None:
    """Of the choices whose iteration meets the deadline, the first of the least effective energy."""
    best, best_j = None, math.inf
    for points in choices:
        time_s, energy_j = time_and_energy(dag, points)
        effective_j = energy_j - dag.waiting_w * time_s
        if time_s <= deadline_s and effective_j < best_j:
            best, best_j = points, effective_j
    return best


def _shared_clocks(measured: Iterable[Sequence[Measurement]]) -> list[int]:
    """The clocks, MHz, that all of `measured` have, highest first."""
    clocks = [frozenset(point.clock_mhz for point in points) for points in set(measured)]
    return sorted(frozenset.intersection(*clocks), reverse=True)


def _balanced_clocks(
    dag: PipelineDag, measured: Sequence[tuple[Measurement, ...]], stages: Sequence[int]
) -> list[list[int]]:
    """The family of ZeusPerStage: MHz of each stage, for clocks of the heaviest stage from its highest."""
    ladders, times_s = [], []
    for stage in range(dag.profile.stages):
        ladder = _shared_clocks(points for points, other in zip(measured, stages, strict=True) if other == stage)
        if not ladder:
            raise UsageError(f"stage {stage}: no clock was measured of all its computations; measure one of all")
        forward_s = {point.clock_mhz: point.time_s for point in dag.profile.measurements[stage, "F"]}
        ladder = [clock for clock in ladder if clock in forward_s]
        ladders.append(ladder)
        times_s.append([forward_s[clock] for clock in ladder])
    heaviest = max(range(len(ladders)), key=lambda stage: times_s[stage][0])
    at, family = [0] * len(ladders), []
    for step, clock in enumerate(ladders[heaviest]):
        for stage, ladder in enumerate(ladders):
            lowest = len(ladder) - 1
            start = next((i for i in range(at[stage], lowest) if ladder[i] <= clock), lowest)
            at[stage] = _nearest_below(times_s[stage], start, times_s[heaviest][step])
        at[heaviest] = step
        family.append([ladder[i] for ladder, i in zip(ladders, at, strict=True)])
        if any(i == len(ladder) - 1 for i, ladder in zip(at, ladders, strict=True)):
            break
    return family


def _nearest_below(times_s: Sequence[float], start: int, target_s: float) -> int:
    """From `start` on, the last place before the distance to `target_s` grows while times rise."""
    for i in range(start + 1, len(times_s)):
        farther = abs(times_s[i] - target_s) > abs(times_s[i - 1] - target_s)
        if farther and times_s[i] >= times_s[i - 1]:
            return i - 1
    return len(times_s) - 1
