"""lowtime, the solver published with Perseus, on the same pipelines; and its plans, costed from measurements.

lowtime fits an exponential to the effective energy of each computation, counts time in whole units (rounded down), and
walks down from the slowest iteration a unit at a time; each computation then gets the slowest clock whose rounded time
fits its planned one (Perseus artifact and Zeus' `run_optimization.py`).
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import networkx as nx
import numpy as np
from data import STAGES, Case, MissingError, dag_of, profile_of

from perseus_planner import Frontier, Profile, schedules, solve
from perseus_planner.dag import PipelineDag
from perseus_planner.profiles import Measurement
from perseus_planner.simulate import end_times

LOWTIME_VERSION = "0.3.0"


@dataclass(frozen=True, eq=False)
class Fits:
    """What lowtime makes of a profile.

    Attributes:
        unit_s: its step in time, seconds.
        blocking_power_w: subtracted from every option's energy, watts.
        options: (stage, kind) -> lowtime's CandidateExecutionOptions.
        models: (stage, kind) -> lowtime's ExponentialModel: units of time -> effective joules.
    """

    unit_s: float
    blocking_power_w: float
    options: Mapping[tuple[int, str], Any]
    models: Mapping[tuple[int, str], Any]


@dataclass(frozen=True)
class Replayed:
    """A plan of lowtime's.

    Attributes:
        claimed_s: the iteration time that lowtime gives it, seconds.
        time_s: the iteration time with the measured times of its clocks, seconds.
        effective_j: measured energy of its clocks less blocking power times their measured time, joules.
    """

    claimed_s: float
    time_s: float
    effective_j: float


@dataclass(frozen=True)
class LowtimeRun:
    """One run of lowtime: how long its solver took, seconds, and all its plans, slowest first."""

    solve_s: float
    plans: tuple[Replayed, ...]


def require_lowtime() -> None:
    """Load lowtime, and keep it quiet.

    Raises:
        MissingError: it cannot be loaded, or is of another version.
    """
    try:
        import lowtime.cost_model
        import lowtime.solver
    except ImportError as error:
        raise MissingError(f"lowtime cannot be loaded ({error}); pip install '.[bench]'") from error
    if lowtime.__version__ != LOWTIME_VERSION:
        raise MissingError(f"lowtime {lowtime.__version__} is installed, not {LOWTIME_VERSION}; pip install '.[bench]'")
    logging.getLogger("lowtime").setLevel(logging.ERROR)


@cache
def fits_of(case: Case, unit_s: float, *, filter_first: bool = False) -> Fits:
    """Fit the options of `case` as lowtime's users do.

    Args:
        case: the profile.
        unit_s: lowtime's step in time, seconds.
        filter_first: take out dominated options before the blocking energy is subtracted, as the Perseus artifact
            does, not afterwards, as Zeus does.
    """
    require_lowtime()
    from lowtime.cost_model import ExponentialModel

    options, models = {}, {}
    for key, measurements in profile_of(case).measurements.items():
        options[key] = _candidates(measurements, unit_s, case.blocking_power_w, filter_first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # overflows on the way of a fit that is then not taken
            models[key] = ExponentialModel(options[key], search_strategy="best")
    return Fits(unit_s, case.blocking_power_w, options, models)


def _candidates(measurements: Sequence[Measurement], unit_s: float, power_w: float, filter_first: bool) -> Any:
    from lowtime.operation import CandidateExecutionOptions, ExecutionOption

    options = [ExecutionOption(m.time_s, unit_s, m.energy_j, m.clock_mhz) for m in measurements]

    def subtract_blocking() -> None:
        for option in options:
            option.cost -= power_w * option.quant_time * unit_s

    if not filter_first:
        subtract_blocking()
    candidates = CandidateExecutionOptions(options)
    if len(candidates.options) <= 3:  # too few to fit: its users then filter softly
        candidates = CandidateExecutionOptions(options, noise_factor=0.95)
    if filter_first:
        subtract_blocking()
    return candidates


@cache
def lowtime_run(case: Case, microbatches: int, unit_s: float) -> LowtimeRun:
    """Run lowtime's solver over all of its frontier.

    Raises:
        MissingError: lowtime cannot be loaded.
    """
    fits, dag = fits_of(case, unit_s), dag_of(case, microbatches)
    from lowtime.solver import PhillipsDessouky

    graph = _graph(fits, dag)
    operations = [graph.nodes[place + 2]["op"] for place in range(len(dag.computations))]
    steps = PhillipsDessouky(graph).run()
    solve_s, chosen = 0.0, []
    while True:
        begin_s = time.perf_counter()
        step = next(steps, None)
        solve_s += time.perf_counter() - begin_s
        if step is None:
            break
        chosen.append((step.real_time, [operation.assigned_knob for operation in operations]))
    return LowtimeRun(solve_s, tuple(replayed(dag, claimed_s, clocks) for claimed_s, clocks in chosen))


def _graph(fits: Fits, dag: PipelineDag) -> nx.DiGraph:
    """The graph of `dag` as lowtime wants it: computation k is node k + 2, node 0 the source and 1 the sink."""
    from lowtime.graph_utils import add_sink_node, add_source_node
    from lowtime.operation import Operation, OperationSpec

    specs = {key: OperationSpec(fits.options[key], fits.models[key]) for key in fits.options}
    graph = nx.DiGraph(source_node=0, sink_node=1)
    for place, computation in enumerate(dag.computations):
        graph.add_node(place + 2, op=Operation(specs[computation[:2]]))
    for place, before in enumerate(dag.predecessors):
        graph.add_edges_from((other + 2, place + 2) for other in before)
    add_source_node(graph, 0)
    add_sink_node(graph, 1)
    return graph


def replayed(dag: PipelineDag, claimed_s: float, clocks: Iterable[int]) -> Replayed:
    """One iteration with the measured time and energy of every computation's clock."""
    table = {(*key, m.clock_mhz): m for key, points in dag.profile.measurements.items() for m in points}
    chosen = [table[(*c[:2], clock)] for c, clock in zip(dag.computations, clocks, strict=True)]
    busy_s = math.fsum(m.time_s for m in chosen)
    effective_j = math.fsum(m.energy_j for m in chosen) - dag.profile.blocking_power_w * busy_s
    return Replayed(claimed_s, max(end_times(dag, [m.time_s for m in chosen])), effective_j)


@cache
def same_problem(fits: Fits, microbatches: int) -> Frontier:
    """The exact frontier of the problem that lowtime solves: durations in whole units, energies by its fits.

    Its unit of time is `fits.unit_s`, in place of a second; joules are joules.
    """
    watts = fits.blocking_power_w * fits.unit_s  # joules per unit
    table = {}
    for key, candidates in fits.options.items():
        units = [option.quant_time for option in candidates.options]
        table[key] = tuple(
            Measurement(unit, float(unit), fits.models[key](unit) + watts * unit)
            for unit in range(min(units), max(units) + 1)
        )
    return solve(Profile(table, watts, origin="simulated"), schedules.one_f_one_b(STAGES, microbatches))


def same_plans(fits: Fits, dag: PipelineDag, times: Iterable[int]) -> Iterator[Replayed]:
    """The plans that lowtime's choice of clocks makes of its problem's exact solution, replayed.

    Args:
        fits: what lowtime makes of the profile.
        dag: the iteration.
        times: iteration times, in units, falling.
    """
    frontier = same_problem(fits, dag.schedule.microbatches)
    to_ticks = round(1 / frontier.scaled.tick_s)  # a power of two, so that units stay whole numbers
    units = list(times)
    place_of = np.argsort(dag.order)
    slowest = np.array([round(frontier.dag.options[c[:2]][-1].time_s) for c in dag.computations])
    for unit, at in zip(units, frontier.states_at([unit * to_ticks for unit in units]), strict=True):
        event = at.state.event[: 2 * len(place_of)] // to_ticks
        duration = np.minimum((event[1::2] - event[::2])[place_of], slowest)
        clocks = [
            fits.options[c[:2]].get_knob_for(units_given)
            for c, units_given in zip(dag.computations, duration.tolist(), strict=True)
        ]
        yield replayed(dag, unit * fits.unit_s, clocks)
