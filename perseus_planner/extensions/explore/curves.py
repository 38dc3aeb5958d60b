"""Exact time-energy curves of configurations, and what else is read off their frontiers.

The exact curve of a configuration is that of `solver.solve`. In many microbatches every further one
adds the same, at every price of time, so the curves of few microbatches give those of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner import PipelineDag, Profile, solve_dag
from perseus_planner.extensions.explore.points import OperatingPoints, measurements_of
from perseus_planner.profiles.groups import on_each_gpu
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules.layouts import CONDITION

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner import Frontier
    from perseus_planner.extensions.explore.configuration import Configuration, Floats
    from perseus_planner.extensions.explore.memory import Candidate
    from perseus_planner.extensions.explore.operations import Phases, System

_SLOPES = 200  # prices of time at which many microbatches are extrapolated
_FEW = (3, 4)  # microbatches, in multiples of the ranks, from which many are extrapolated
_FEWER = (2, 3)  # the same for long pipelines
_LONG = 24  # stages from which on a pipeline is long
_LARGE = 2500  # computations above which a graph has few operating points of each
_MANY = 16  # the operating points of a computation in such a graph
_SOLVED_WHOLE = 1500  # computations of an iteration that is not extrapolated


@dataclass(frozen=True, eq=False)
class Curve:
    """Time and energy of iterations of a whole job."""

    times_s: NDArray[np.float64]  #: (points,) seconds, rising
    #: (points,) least joules over all GPUs at that time, waiting included.
    energies_j: NDArray[np.float64]

    def at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the least joules at each of `times_s`; infinite where that is too short."""
        return np.interp(times_s, self.times_s, self.energies_j, left=np.inf)


def _slopes(curve: Curve) -> NDArray[np.float64]:
    """Return the slopes of a curve, J/s; breakpoints that are one time in floats have none
    between them.
    """
    apart = np.flatnonzero(np.diff(curve.times_s))
    if len(apart) == 0:
        return np.zeros(1)
    return np.asarray(np.diff(curve.energies_j)[apart] / np.diff(curve.times_s)[apart])


def _extrapolated(fewer: Curve, more: Curve, steps: float) -> Curve:
    """Return the curve of an iteration with the microbatches of `fewer`, and `steps` times those
    that `more` has beyond them.

    In many microbatches the least of energy - price * time is linear in their number, at every
    price of time. So it is read off both curves, and carried on.
    """
    slopes = np.concatenate([_slopes(fewer), _slopes(more)])
    prices_w = np.quantile(slopes, np.linspace(0, 1, _SLOPES))
    fewer_j = _least_j(fewer, prices_w)
    more_j = _least_j(more, prices_w)
    least_j = fewer_j + steps * (more_j - fewer_j)
    # Ends of the curve grow with the microbatches as well.
    fewer_ends_s = fewer.times_s[[0, -1]]
    more_ends_s = more.times_s[[0, -1]]
    ends_s = fewer_ends_s + steps * (more_ends_s - fewer_ends_s)
    # Back from prices to times. Each price is a line below the curve, which turns where the lines
    # of two prices meet; equal prices meet nowhere.
    is_apart = np.diff(prices_w) > 0
    turns_s = np.diff(-least_j)[is_apart] / np.diff(prices_w)[is_apart]
    times_s = np.unique([ends_s[0], *turns_s.clip(*ends_s), ends_s[1]])
    lines_j = least_j + prices_w * times_s[:, np.newaxis]
    return Curve(times_s, lines_j.max(axis=1))


def _least_j(curve: Curve, prices_w: Floats) -> Floats:
    """Return the least of a curve's energy less the price of its time, at each price."""
    least_j: Floats = np.min(curve.energies_j - prices_w[:, np.newaxis] * curve.times_s, axis=1)
    return least_j


class CurveMaker:
    """Makes the curves of many configurations on one system; what they share is computed once."""

    def __init__(self, system: System, points: int = 0) -> None:
        """Make curves on `system` with so many operating points of a computation; 0 for all, or
        16 in large jobs.
        """
        self.system = system
        self.operating = OperatingPoints(system, points)
        self._points = points
        self._rows = cache(lambda phases, count: measurements_of(phases, system, count))
        self._frontiers: dict[Configuration, Frontier] = {}

    def size(self, job: Configuration) -> int:
        """Return the number of computations that the exact curve takes."""
        return sum(len(job.kinds) * len(job.split) * count for count in self._solved_counts(job))

    def exact(self, candidate: Candidate) -> Curve:
        """Return the exact curve of the whole job."""
        job = candidate.job
        few = self._solved_counts(job)
        if len(few) == 1:
            return self._solved(candidate, job.microbatches)
        fewer = self._solved(candidate, few[0])
        more = self._solved(candidate, few[1])
        return _extrapolated(fewer, more, (job.microbatches - few[0]) / (few[1] - few[0]))

    def _solved_counts(self, job: Configuration) -> list[int]:
        """Return the microbatches of the iterations that are solved: the job's, or two smaller
        numbers.
        """
        multiples = _FEWER if len(job.split) >= _LONG else _FEW
        few = [multiple * job.ranks for multiple in multiples]
        is_small = len(job.kinds) * len(job.split) * job.microbatches <= _SOLVED_WHOLE
        return [job.microbatches] if is_small or job.microbatches <= few[1] else few

    def clocks_mhz(self, candidate: Candidate, slowdown: float) -> tuple[int, int]:
        """Return the lowest and the highest clock of a plan that takes `slowdown` times the least
        time.

        The plan is that of the microbatches that were solved, at most.
        """
        frontier = self._frontiers[candidate.job]
        deadline_s = frontier.min_time_s * max(1.0, slowdown)
        plan = frontier.plan_until(deadline_s, on_time=None)  # its rows are a model's
        return min(plan.clocks.values()), max(plan.clocks.values())

    def saved_share(self, candidate: Candidate, slowdown: float) -> float:
        """Return the share of energy saved at `slowdown` times the least time, against all clocks
        at maximum.

        It is that of the microbatches that were solved, at most.
        """
        frontier = self._frontiers[candidate.job]
        deadline_s = frontier.min_time_s * max(1.0, slowdown)
        return 1 - frontier.bound_j(deadline_s) / frontier.baseline_energy_j

    def energy_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the shares of a job's energy at full clocks by what GPUs do.

        Static power counts with what takes the time; the iteration is that of the microbatches that
        were solved, at most.
        """
        job = candidate.job
        memory_w_per_mhz = self.system.gpu.memory_w_per_mhz
        frontier = self._frontiers[job]
        # Joules of one microbatch on one GPU of each stage.
        parts_j = dict.fromkeys(("arithmetic", "memory", "traffic"), 0.0)
        for phases in job.stage_phases(self.system, candidate.times):
            for kind in job.kinds:
                computation = phases[kind]
                load = computation.load(self.system)
                clock = load.achieved_mhz(self.system.top_mhz)
                # Dynamic power grows with the clock and the square of the voltage.
                square = clock * load.voltage(clock) ** 2
                arithmetic_s = load.megacycles / clock
                # The load's time in memory is also that of traffic.
                memory_s = computation.memory_s
                traffic_s = load.memory_s - memory_s
                # What GPUs exchange counts half as much in memory, as the model of the system has
                # it.
                exchange_j = computation.exchange_s * 0.5 * memory_w_per_mhz * square
                arithmetic_w = load.static_w + load.arithmetic_w_per_mhz * square
                parts_j["arithmetic"] += arithmetic_s * arithmetic_w
                parts_j["memory"] += memory_s * (load.static_w + memory_w_per_mhz * square)
                parts_j["traffic"] += traffic_s * load.static_w + exchange_j
        # Solved iterations are of few microbatches, and shares do not depend on how many.
        gpus = job.shape.tensor_degree * job.shape.context_degree
        computations = self._solved_counts(job)[0] * gpus
        shares = {
            name: part_j * computations / frontier.baseline_energy_j
            for name, part_j in parts_j.items()
        }
        return {**shares, "waiting": 1 - sum(shares.values())}

    def profile(
        self,
        job: Configuration,
        stages: list[dict[str, Phases]],
        points: int = 0,
        kinds: str = "",
    ) -> Profile:
        """Return the profile of one pipeline, with so many points of a computation, or all;
        energies are of a stage's GPUs.
        """
        rows = {
            Key(stage, kind): self._rows(phases[kind], points)
            for stage, phases in enumerate(stages)
            for kind in kinds or job.kinds
        }
        shape = job.shape
        one_gpu = Profile(
            rows,
            blocking_power_w=self.system.gpu.blocking_power_w,
            gpu=f"simulated {self.system.gpu.name}",
            origin="simulated",
            conditions={
                "estimate": f"{job.name}, operations in closed form on a model of the system; "
                "nothing was measured on these stages",
                "workload": f"{shape.microbatch} x {shape.sequence} tokens a microbatch, layers "
                f"{','.join(map(str, job.split))}, {shape.attention} attention, {shape.precision}",
                CONDITION: str(job.layout),
            },
        )
        # Rows are of one GPU until here, and a profile's are of all GPUs of a stage.
        return on_each_gpu(one_gpu, shape.tensor_degree * shape.context_degree)

    def dag(self, candidate: Candidate, microbatches: int | None = None) -> PipelineDag:
        """Return the graph of an iteration of one pipeline."""
        job = candidate.job
        stages = job.stage_phases(self.system, candidate.times)
        points = self._points or (_MANY if self.size(job) > _LARGE else 0)
        return PipelineDag(
            self.profile(job, stages, points),
            job.iteration(self.system, self.operating.ends_s(job, stages), microbatches),
        )

    def _solved(self, candidate: Candidate, microbatches: int) -> Curve:
        frontier = solve_dag(self.dag(candidate, microbatches))
        self._frontiers.setdefault(candidate.job, frontier)
        return Curve(
            frontier.times_s[::-1].copy(), candidate.job.data_degree * frontier.energies_j[::-1]
        )
