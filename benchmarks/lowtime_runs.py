"""Runs lowtime, the solver published with Perseus, on the same pipelines, and costs its plans
from the measurements.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
from data import STAGES, Case, MissingError, dag_of, profile_of
from lowtime_walk import Fits, Walk, fit, load_lowtime

from perseus_planner import Frontier, Profile, schedules, solve
from perseus_planner.base.errors import UsageError
from perseus_planner.plans.replay import end_times
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.mincut import walk


@dataclass(frozen=True)
class Replayed:
    """A plan of lowtime, replayed.

    Attributes:
        claimed_s: the iteration time that lowtime gives it, seconds.
        time_s: the iteration time with the measured times of its clocks, seconds.
        effective_j: measured energy of its clocks less blocking power times their measured time,
            joules.
    """

    claimed_s: float
    time_s: float
    effective_j: float


@dataclass(frozen=True)
class LowtimeRun:
    """One run of lowtime: the time of its solver, seconds, and all its plans, slowest first."""

    solve_s: float
    plans: tuple[Replayed, ...]


def require_lowtime() -> None:
    """Load lowtime.

    Raises:
        MissingError: If it cannot be loaded, or is another version.
    """
    try:
        load_lowtime()
    except UsageError as error:
        raise MissingError(str(error)) from error


@cache
def fits_of(case: Case, unit_s: float, *, filter_first: bool = False) -> Fits:
    """Fit lowtime's cost models to the profile of `case`.

    Raises:
        MissingError: If lowtime cannot be loaded.
    """
    require_lowtime()
    return fit(profile_of(case), unit_s, filter_first=filter_first)


@cache
def lowtime_run(case: Case, microbatches: int, unit_s: float) -> LowtimeRun:
    """Run lowtime's solver over its whole frontier.

    Raises:
        MissingError: If lowtime cannot be loaded.
    """
    fits, dag = fits_of(case, unit_s), dag_of(case, microbatches)
    walk = Walk(fits, dag, dag.iteration.keys)
    steps = iter(walk)
    solve_s, chosen = 0.0, []
    while True:
        begin_s = time.perf_counter()
        claimed_s = next(steps, None)
        solve_s += time.perf_counter() - begin_s
        if claimed_s is None:
            break
        chosen.append((claimed_s, walk.clocks))
    return LowtimeRun(
        solve_s, tuple(replayed(dag, claimed_s, clocks) for claimed_s, clocks in chosen)
    )


def replayed(dag: PipelineDag, claimed_s: float, clocks: Iterable[int]) -> Replayed:
    """Replay an iteration with the measured time and energy of every computation's clock."""
    table = {
        (key, m.clock_mhz): m for key, points in dag.profile.measurements.items() for m in points
    }
    chosen = [table[key, clock] for key, clock in zip(dag.iteration.keys, clocks, strict=True)]
    busy_s = math.fsum(m.time_s for m in chosen)
    effective_j = math.fsum(m.energy_j for m in chosen) - dag.profile.blocking_power_w * busy_s
    return Replayed(claimed_s, max(end_times(dag, [m.time_s for m in chosen])), effective_j)


@cache
def same_problem(fits: Fits, microbatches: int) -> Frontier:
    """Solve lowtime's problem exactly: durations in whole units, energies by its fits.

    The unit of time of the frontier is `fits.unit_s` instead of a second; energies are in joules.
    """
    watts = fits.blocking_power_w * fits.unit_s  # joules per unit
    table = {}
    for key, candidates in fits.options.items():
        units = [option.quant_time for option in candidates.options]
        table[key] = tuple(
            Measurement(unit, float(unit), fits.models[key](unit) + watts * unit)
            for unit in range(min(units), max(units) + 1)
        )
    return solve(
        Profile(table, watts, origin="simulated"), schedules.one_f_one_b(STAGES, microbatches)
    )


def same_plans(fits: Fits, dag: PipelineDag, times: Iterable[int]) -> Iterator[Replayed]:
    """Yield plans made from the exact solution of lowtime's problem by its choice of clocks,
    replayed.

    Args:
        fits: the profile as lowtime models it.
        dag: the iteration.
        times: iteration times in units, falling.
    """
    frontier = same_problem(fits, dag.schedule.microbatches)
    to_ticks = round(1 / frontier.scaled.tick_s)  # a power of two, so that units stay whole numbers
    units = list(times)
    place_of = np.argsort(dag.order)
    slowest = np.array([round(frontier.dag.points[c[:2]][-1].time_s) for c in dag.computations])
    steps = walk(frontier.scaled.network, [unit * to_ticks for unit in units])
    for unit, step in zip(units, steps, strict=True):
        event = step.state.event[: 2 * len(place_of)] // to_ticks
        duration = np.minimum((event[1::2] - event[::2])[place_of], slowest)
        clocks = [
            fits.options[key].get_knob_for(units_given)
            for key, units_given in zip(dag.iteration.keys, duration.tolist(), strict=True)
        ]
        yield replayed(dag, unit * fits.unit_s, clocks)
