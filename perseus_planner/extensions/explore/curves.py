"""Time-energy curves of configurations, lower bounds in microseconds and the exact ones; and the
profile of a pipeline, corrected by one measured stage.

The bound: a rank runs M forwards and backwards in whatever time the pipeline leaves it. Before its
first forward the ranks before it run one each, and after its last backward those run one backward
each. Under 1F1B and ZB-H1 a rank with w ranks after it also waits, after its first and after its
last forward, for a forward and a backward of each of them. While it waits, it runs w forwards, then
w backwards: for one of the two waits they may count as what it runs beside. What remains for the
other M - w forwards and backwards bounds their energy from below.

The exact curve of a configuration is that of `solver.solve`. In many microbatches every further one
adds the same, at every price of time, so the curves of few microbatches give those of many.

The correction of each kind is the ratio of measured to modelled time, and of energies, at each
measured clock, interpolated linearly in between and constant beyond. So a full sweep determines the
shape of the estimate over clocks, a single clock only its level. All clocks have a row then, also
those that the model's power limit does not allow, as measured stages may run at them. A stage that
draws more than this limit shows that the measured GPU has another one: then the highest measured
clock is not capped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_planner import PipelineDag, Profile, solve_dag
from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.explore.operations import Phases
from perseus_planner.extensions.explore.transformer import split_layers
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.groups import on_each_gpu
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement, lower_hull
from perseus_planner.schedules.layouts import CONDITION

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner import Frontier
    from perseus_planner.extensions.explore.configuration import Configuration, Floats
    from perseus_planner.extensions.explore.memory import Candidate
    from perseus_planner.extensions.explore.operations import System
    from perseus_planner.gpu.simulated.model import GpuModel, Load

_SLOPES = 200
_FEW = (3, 4)  # multiples of the ranks from which many microbatches are extrapolated
_FEWER = (2, 3)  # the same for long pipelines
_LONG = 24  # stages
# Computations above which not all operating points are used, but so many
_LARGE = 2500
_MANY = 16
# Measured power over the model's power limit, above which the limit is another one: sensors and
# measured energies are off by a few percent. By hand.
_ABOVE_LIMIT = 1.05
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


def points_of(phases: Phases, system: System, count: int = 0) -> Floats:
    """Return clocks (MHz), seconds and joules of a computation on one GPU, highest clock first.

    A clock that the power limit does not allow is none: the lowest clock above what the limit
    allows stands for all of them, with the time and energy of what is achieved.

    Args:
        phases: The computation.
        system: The GPU.
        count: Number of points to keep, evenly spaced down to the one of least effective energy; 0
            for all.
    """
    gpu = system.gpu
    clocks = np.array(gpu.clocks_mhz, dtype=float)
    if phases == Phases():  # an empty stage
        return np.stack([clocks, *np.zeros((2, len(clocks)))])
    load = phases.load(system)
    # Clocks above what the power limit allows are all achieved as one, for which the lowest stands.
    top_mhz = load.achieved_mhz(clocks[0])
    set_mhz = clocks[max(0, np.count_nonzero(clocks > top_mhz) - 1) :]
    achieved: Any = np.minimum(set_mhz, top_mhz)
    times_s: Any = load.free_time_s(achieved)
    energies_j: Any = load.free_power_w(achieved) * times_s
    places = np.arange(len(set_mhz))
    # Points that are slower than that of least effective energy are never part of a plan.
    if count:
        least = int(np.argmin(energies_j - gpu.blocking_power_w * times_s))
        places = np.unique(np.linspace(0, least, count).round().astype(int))
    return np.stack([set_mhz, times_s, energies_j])[:, places]


def measurements_of(phases: Phases, system: System, count: int = 0) -> tuple[Measurement, ...]:
    """Return the operating points of a computation as rows of a profile, highest clock first."""
    rows = points_of(phases, system, count).T.tolist()
    return tuple(Measurement(int(clock), time_s, energy_j) for clock, time_s, energy_j in rows)


class BoundParts(NamedTuple):
    """What bounds the energy of ranks with equal computations, counted twice, as without and with
    the waits of their schedule: (2, ranks) each.
    """

    fixed_s: Floats  #: Seconds of an iteration in which the rank runs nothing that is counted
    shared: Floats  #: Microbatches that share the rest of the time
    slow: Floats  #: Microbatches that run while it waits, at their least energy


@dataclass(frozen=True, eq=False)
class Bound:
    """A lower bound on time and energy of iterations of a whole job."""

    least_s: float  #: Seconds
    gpus_per_rank: float  #: GPUs of all pipelines that a rank stands for
    blocking_w: float  #: Power of all of them while they wait
    #: The hull of computations that run one after the other; see `CurveMaker`.
    hull_of: Callable[[tuple[Phases, ...]], Floats]
    #: By the computations of a microbatch, those of the ranks that have them.
    parts: Mapping[tuple[Phases, ...], BoundParts]

    def at(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the least joules at each of `times_s`; infinite where that is too short."""
        # Floats of the least time may differ in the last bits.
        is_enough = times_s >= self.least_s * (1 - 1e-9)
        if not is_enough.any():
            return np.full(len(times_s), np.inf)
        total_j = np.zeros(len(times_s))
        # Ranks with equal computations have equal hulls, so each group is looked up once.
        for computations, parts in self.parts.items():
            total_j += self._above_waiting_j(computations, parts, times_s)
        # Energies are above waiting, which all GPUs draw for the whole time.
        energy_j = self.gpus_per_rank * total_j + self.blocking_w * times_s
        return np.where(is_enough, energy_j, np.inf)

    def _above_waiting_j(
        self, computations: tuple[Phases, ...], parts: BoundParts, times_s: Floats
    ) -> Floats:
        """Return the least joules above waiting of ranks with equal computations, on one GPU of
        each, together: (times,).
        """
        hull_s, hull_j = self.hull_of(computations)
        # Times are a third axis, behind the two counts and the ranks.
        fixed_s = parts.fixed_s[..., np.newaxis]
        shared = parts.shared[..., np.newaxis]
        slow = parts.slow[..., np.newaxis]
        # What the pipeline leaves of the time is shared evenly, which is best on a convex hull.
        microbatch_s = (times_s - fixed_s) / shared
        microbatch_j = np.interp(microbatch_s, hull_s, hull_j)
        bounds_j = microbatch_j * shared + slow * hull_j[-1]
        # Each of the two counts is a bound by itself, so the larger one holds.
        of_ranks_j: Floats = bounds_j.max(axis=0)
        total_j: Floats = of_ranks_j.sum(axis=0)
        return total_j


def _slopes(curve: Curve) -> NDArray[np.float64]:
    """Return the slopes of a curve, J/s; breakpoints that are one time in floats have none
    between them.
    """
    apart = np.flatnonzero(np.diff(curve.times_s))
    if len(apart) == 0:
        return np.zeros(1)
    return np.asarray(np.diff(curve.energies_j)[apart] / np.diff(curve.times_s)[apart])


def _least_j(curve: Curve, prices_w: Floats) -> Floats:
    """Return the least of a curve's energy less the price of its time, at each price."""
    least_j: Floats = np.min(curve.energies_j - prices_w[:, np.newaxis] * curve.times_s, axis=1)
    return least_j


def _alike_ranks(stages: Sequence[object], ranks: int) -> list[list[int]]:
    """Return the ranks that have the same stages, together: these share one hull."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in range(ranks):
        alike.setdefault(tuple(map(id, stages[rank::ranks])), []).append(rank)
    return list(alike.values())


class CurveMaker:
    """Makes the curves of many configurations on one system; what they share is computed once."""

    def __init__(self, system: System, points: int = 0) -> None:
        """Make curves on `system` with so many operating points of a computation; 0 for all, or
        16 in large jobs.
        """
        self.system = system
        self.points = points
        self._points = cache(lambda phases: points_of(phases, system, points))
        self._rows = cache(lambda phases, count: measurements_of(phases, system, count))
        self._hull = cache(self._hull_of)
        self._frontiers: dict[Configuration, Frontier] = {}

    def bound(self, candidate: Candidate) -> Bound:
        """Return a lower bound on the time of an iteration, and on the energy of the whole job."""
        job = candidate.job
        stages = job.stage_phases(self.system, candidate.times)
        ranks = job.ranks
        microbatches = job.microbatches
        # A rank computes all its stages for every microbatch, at full clocks at best.
        stages_s = self._top_s(stages, job.kinds)
        microbatch_s = np.bincount(job.stage_ranks, stages_s).astype(float)
        outside_s = self._outside_s(job, stages)
        # What a rank runs while it waits is not counted in the rest of its time.
        waits = self._waits(job)
        waited_s = self._waited_s(job, stages, waits, microbatch_s)
        without_waits_s = microbatches * microbatch_s
        with_waits_s = waited_s + (microbatches - waits) * microbatch_s
        least_s = outside_s + np.maximum(without_waits_s, with_waits_s)
        none = np.zeros(ranks)
        fixed_s = np.array([outside_s, outside_s + waited_s])
        shared = np.array([none + microbatches, microbatches - waits])
        slow = np.array([none, waits])
        parts = {
            self._computations(stages[some[0] :: ranks], job.kinds): BoundParts(
                fixed_s[:, some], shared[:, some], slow[:, some]
            )
            for some in _alike_ranks(stages, ranks)
        }
        return Bound(
            float(least_s.max()),
            gpus_per_rank=job.gpus / ranks,
            blocking_w=job.gpus * self._gpu.blocking_power_w,
            hull_of=self._hull,
            parts=parts,
        )

    def _outside_s(self, job: Configuration, stages: list[dict[str, Phases]]) -> Floats:
        """Return the seconds of an iteration before the first and after the last computation of
        each rank.
        """
        hop_s = job.transfer_s(self.system)
        forward_s = self._top_s(stages[: job.ranks], "F")
        end_s = self.ends_s(job, stages)
        # After its last backward the ranks before it run one each, and then have an end of their
        # own.
        if job.kinds == "FB":  # else gradients of weights may wait
            backward_s = self._top_s(stages[: job.ranks], "B")
            back_s = np.cumsum(backward_s + hop_s) - backward_s - hop_s
            end_s = back_s + np.maximum.accumulate(end_s - back_s)
        # Before its first forward the ranks before it run one each.
        outside_s: Floats = end_s + np.cumsum(forward_s + hop_s) - forward_s - hop_s
        return outside_s

    def _waits(self, job: Configuration) -> NDArray[np.int64]:
        """Return for how many microbatches each rank waits, twice: those of the ranks after it;
        none where it is not known that ranks wait so.
        """
        after = np.arange(job.ranks)[::-1]
        waits_so = job.schedule in ("1f1b", "zb-h1") and job.microbatches > after + 1
        return np.where(waits_so, after, 0)

    def _waited_s(
        self,
        job: Configuration,
        stages: list[dict[str, Phases]],
        waits: NDArray[np.int64],
        microbatch_s: Floats,
    ) -> Floats:
        """Return the seconds of both waits of each rank, one of which may be filled.

        Args:
            job: The configuration.
            stages: The computations of its stages.
            waits: (ranks,) for how many microbatches each rank waits.
            microbatch_s: (ranks,) seconds of all its computations of one.
        """
        # A forward and a backward on each rank after it, and a transfer before and after.
        hop_s = job.transfer_s(self.system)
        trip_s = self._top_s(stages[-job.ranks :], job.kinds[:2])
        after = np.arange(job.ranks)[::-1]
        wait_s = (trip_s.sum() - np.cumsum(trip_s) + 2 * hop_s * after) * (waits > 0)
        # One of its two waits may be filled by the computations that it runs beside.
        forward_s = self._top_s(stages[: job.ranks], "F")
        beside_s = waits * (microbatch_s - forward_s)
        waited_s: Floats = wait_s + np.maximum(wait_s, beside_s)
        return waited_s

    @staticmethod
    def _computations(stages: Sequence[Mapping[str, Phases]], kinds: str) -> tuple[Phases, ...]:
        """Return the computations of a microbatch on a rank with these stages."""
        return tuple(phases[kind] for phases in stages for kind in kinds)

    def size(self, job: Configuration) -> int:
        """Return the number of computations that the exact curve takes."""
        return sum(len(job.kinds) * len(job.split) * count for count in self._solved_counts(job))

    def exact(self, candidate: Candidate) -> Curve:
        """Return the exact curve of the whole job."""
        job = candidate.job
        few = self._solved_counts(job)
        if len(few) == 1:
            return self._solved(candidate, job.microbatches)
        # In many microbatches the least of energy - price * time is linear in their number, at
        # every price of time. So it is read off two curves, and carried on.
        fewer = self._solved(candidate, few[0])
        more = self._solved(candidate, few[1])
        slopes = np.concatenate([_slopes(fewer), _slopes(more)])
        prices_w = np.quantile(slopes, np.linspace(0, 1, _SLOPES))
        fewer_j = _least_j(fewer, prices_w)
        more_j = _least_j(more, prices_w)
        steps = (job.microbatches - few[0]) / (few[1] - few[0])
        least_j = fewer_j + steps * (more_j - fewer_j)
        # Ends of the curve grow with the microbatches as well.
        fewer_ends_s = fewer.times_s[[0, -1]]
        more_ends_s = more.times_s[[0, -1]]
        ends_s = fewer_ends_s + steps * (more_ends_s - fewer_ends_s)
        # Back from prices to times. Each price is a line below the curve, which turns where the
        # lines of two prices meet; equal prices meet nowhere.
        is_apart = np.diff(prices_w) > 0
        turns_s = np.diff(-least_j)[is_apart] / np.diff(prices_w)[is_apart]
        times_s = np.unique([ends_s[0], *turns_s.clip(*ends_s), ends_s[1]])
        lines_j = least_j + prices_w * times_s[:, np.newaxis]
        return Curve(times_s, lines_j.max(axis=1))

    def _solved_counts(self, job: Configuration) -> list[int]:
        """Return the microbatches of the iterations that are solved: the job's, or two smaller
        numbers.
        """
        few = [multiple * job.ranks for multiple in (_FEWER if len(job.split) >= _LONG else _FEW)]
        whole = len(job.kinds) * len(job.split) * job.microbatches <= _SOLVED_WHOLE
        return [job.microbatches] if whole or job.microbatches <= few[1] else few

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
        return (
            1
            - frontier.bound_j(frontier.min_time_s * max(1.0, slowdown))
            / frontier.baseline_energy_j
        )

    def energy_shares(self, candidate: Candidate) -> dict[str, float]:
        """Return the shares of a job's energy at full clocks by what GPUs do.

        Static power counts with what takes the time; the iteration is that of the microbatches that
        were solved, at most.
        """
        job = candidate.job
        gpu = self._gpu
        frontier = self._frontiers[job]
        parts = dict.fromkeys(("arithmetic", "memory", "traffic"), 0.0)
        for phases in job.stage_phases(self.system, candidate.times):
            for kind in job.kinds:
                load = phases[kind].load(self.system)
                clock = load.achieved_mhz(self.system.top_mhz)
                # Dynamic power grows with the clock and the square of the voltage.
                square = clock * load.voltage(clock) ** 2
                # Time that waits for memory, apart from that of traffic.
                still_s = phases[kind].memory_s
                parts["arithmetic"] += (
                    load.megacycles / clock * (load.static_w + load.arithmetic_w_per_mhz * square)
                )
                parts["memory"] += still_s * (load.static_w + gpu.memory_w_per_mhz * square)
                # What GPUs exchange counts half as much in memory, as the model of the system has
                # it.
                parts["traffic"] += (load.memory_s - still_s) * load.static_w + phases[
                    kind
                ].exchange_s * 0.5 * gpu.memory_w_per_mhz * square
        # Solved iterations are of few microbatches, and shares do not depend on how many.
        per_gpu = self._solved_counts(job)[0] * job.shape.tensor_degree * job.shape.context_degree
        shares = {name: j * per_gpu / frontier.baseline_energy_j for name, j in parts.items()}
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
        points = self.points or (_MANY if self.size(job) > _LARGE else 0)
        return PipelineDag(
            self.profile(job, stages, points),
            job.iteration(self.system, self.ends_s(job, stages), microbatches),
        )

    def ends_s(self, job: Configuration, stages: list[dict[str, Phases]]) -> Floats:
        """Return the seconds of each rank after its last computation."""
        both_s = np.bincount(job.stage_ranks, self._top_s(stages, "FB"))
        return job.end_s(self.system, both_s.astype(float))

    def _top_s(self, stages: Sequence[Mapping[str, Phases]], kinds: str) -> Floats:
        """Return the seconds of computations of each stage at the top clock."""
        alike = {id(stage): stage for stage in stages}
        times_s = {
            key: sum(self._points(stage[kind])[1, 0] for kind in kinds)
            for key, stage in alike.items()
        }
        return np.array([times_s[id(stage)] for stage in stages])

    def _solved(self, candidate: Candidate, microbatches: int) -> Curve:
        frontier = solve_dag(self.dag(candidate, microbatches))
        self._frontiers.setdefault(candidate.job, frontier)
        return Curve(
            frontier.times_s[::-1].copy(), candidate.job.data_degree * frontier.energies_j[::-1]
        )

    def _hull_of(self, parts: tuple[Phases, ...]) -> Floats:
        """Return the lower convex hull of seconds, rising, and of energy less what waiting for that
        long would take, falling, of computations that run one after the other.
        """
        # A sum of hulls has the segments of all, in the order of their slopes.
        if len(parts) > 1:  # their segments, the steepest first
            every = [self._hull((part,)) for part in parts]
            steps = np.concatenate([np.diff(hull) for hull in every], axis=1)
            order = np.argsort(steps[1] / steps[0], kind="stable")
            first = sum(hull[:, :1] for hull in every)
            return np.cumsum(np.hstack([first, steps[:, order]]), axis=1)
        _, times_s, energies_j = self._points(*parts)
        effective_j = energies_j - self._gpu.blocking_power_w * times_s
        # Of equal times the cheapest first, so that the others drop out.
        order = np.lexsort((effective_j, times_s))
        front: list[tuple[float, float]] = []
        for time_s, joules in zip(
            times_s[order].tolist(), effective_j[order].tolist(), strict=True
        ):
            # A point that is slower and not cheaper is never part of a plan.
            if not front or joules < front[-1][1]:
                front.append((time_s, joules))
        return np.array(lower_hull(front)).T

    @property
    def _gpu(self) -> GpuModel:
        return self.system.gpu


def estimate(
    job: Configuration,
    system: System,
    calibration: Calibration | None = None,
    *,
    kinds: str = "FB",
) -> Profile:
    """Return the profile of every stage of a pipeline, marked as simulated; `conditions` record its
    sources.

    Args:
        job: The model and its stages. Energies are sums over the GPUs of a stage.
        system: GPUs and their links.
        calibration: A measured stage.
        kinds: Of the computations.
    """
    stages = job.stage_phases(system)
    profile = CurveMaker(system).profile(job, stages, kinds=kinds)
    if calibration is None:
        return profile
    gpus = profile.gpus_per_stage
    rows = {}
    for key in profile.measurements:
        # The measured GPU may have had another power limit, so its own load is asked for.
        load = calibration.load(stages[key.stage][key.kind], system)
        clocks = system.gpu.clocks_mhz
        # The load is that of one GPU, and the profile has sums over the GPUs of a stage.
        rows[key] = tuple(
            Measurement(clock, load.time_s(clock) * time, load.energy_j(clock) * gpus * energy)
            for clock, time, energy in zip(
                clocks, *calibration.factors(key.kind, clocks), strict=True
            )
        )
    return replace(
        profile,
        measurements=rows,
        blocking_power_w=calibration.blocking_power_w * profile.gpus_per_stage,
        conditions={**profile.conditions, "calibration": calibration.source},
    )


@dataclass(frozen=True)
class Calibration:
    """A measured stage, with what the model says of it."""

    #: (clock, measured over modelled time, the same of energy) of each kind, clocks rising.
    ratios: Mapping[str, NDArray[np.float64]]
    source: str  #: What was measured
    blocking_power_w: float  #: Power of one GPU while it waits
    #: Power limit of the model, watts, where the stage drew more than the model's own: what the
    #: model has at the highest measured clock. None for its own.
    power_limit_w: float | None = None

    def load(self, phases: Phases, system: System) -> Load:
        """Return a computation on the GPU that was measured."""
        load = phases.load(system)
        return (
            load if self.power_limit_w is None else replace(load, power_limit_w=self.power_limit_w)
        )

    def factors(
        self, kind: str, clocks_mhz: Sequence[int]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the factors of time and energy at clocks; I and W have those of B if they were not
        measured.
        """
        clocks, times, energies = self.ratios.get(kind, self.ratios["B"])
        return np.interp(clocks_mhz, clocks, times), np.interp(clocks_mhz, clocks, energies)


def calibration_of(
    profile: Profile, job: Configuration, system: System, source: str = "profile"
) -> Calibration:
    """Return the calibration by a stage of a measured profile: the one in the middle, which from
    three stages on has neither embedding nor head. Of two it is the first, with the embedding.

    Args:
        profile: Profile of one GPU of each stage, or of all of them. It may be of the same model on
            another number of stages, which then share the layers evenly; modules of multi-token
            prediction are in the last one, where Megatron builds them without a layout.
        job: The pipeline that was measured.
        system: GPUs that were measured.
        source: Where the profile is from, for error messages and `Profile.conditions`.

    Raises:
        UsageError: If the profile does not fit the pipeline, or lacks forwards, backwards or
            energies.
    """
    shape = job.shape
    # The layout of the job says nothing of a pipeline with another number of stages.
    if profile.stages != len(job.split):
        modules = sum(job.predictions)
        job = replace(
            job,
            split=split_layers(shape.layers, profile.stages),
            predictions=(*[0] * (profile.stages - 1), modules) if modules else (),
        )
    # Most stages are like the middle one: from three stages on it has layers alone.
    stage = (profile.stages - 1) // 2
    gpus = profile.gpus_per_stage
    # Ratios are by clock, and limits have no fixed one.
    if profile.control == "power-limit":
        raise UsageError(f"{source}: was measured over power limits; give a profile over clocks")
    # Energies are of one GPU or of all of a stage, and nothing in between.
    if gpus not in (1, shape.tensor_degree):
        raise UsageError(
            f"{source}: its stages have {gpus} GPUs, but those of the model {shape.tensor_degree}; "
            "give the tensor degree that was measured"
        )
    phases = job.stage_phases(system)[stage]
    limit_w = _seen_limit_w(profile, stage, phases, system)
    ratios = _ratios_of(profile, stage, phases, system, limit_w, source)
    origin = "of unknown origin" if profile.origin == "unknown" else profile.origin
    return Calibration(
        ratios,
        f"stage {stage} of {source} ({origin})",
        profile.blocking_w(stage) / gpus,
        limit_w,
    )


def _seen_limit_w(
    profile: Profile, stage: int, phases: Mapping[str, Phases], system: System
) -> float | None:
    """Return the power limit of the measured GPU, watts, if it draws more than its model may; None
    if it does not.
    """
    # More power than the limit allows shows that the measured GPU had another one.
    most_w = max(
        (
            row.energy_j / profile.gpus_per_stage / row.time_s
            for key, rows in profile.measurements.items()
            for row in rows
            if key.stage == stage and row.time_s
        ),
        default=0.0,
    )
    if most_w <= _ABOVE_LIMIT * system.gpu.power_limit_w:
        return None
    # The measured GPU has another limit, which its highest clock was within.
    return max(
        load.free_power_w(row.clock_mhz)
        for kind, load in ((kind, of_kind.load(system)) for kind, of_kind in phases.items())
        for row in profile.measurements.get(Key(stage, kind), ())
    )


def _ratios_of(
    profile: Profile,
    stage: int,
    phases: Mapping[str, Phases],
    system: System,
    limit_w: float | None,
    source: str,
) -> dict[str, Floats]:
    """Return kind -> (3, rows) clocks, and times and energies over those of the model.

    Raises:
        UsageError: If rows or their energies are missing.
    """
    ratios = {}
    for kind in "FBIW":
        rows = sorted(profile.measurements.get(Key(stage, kind), ()), key=lambda row: row.clock_mhz)
        # Gradients of inputs and weights may be missing, and those of B stand for them.
        if not rows and kind in "IW":
            continue
        # A level needs a forward and a backward with their energies at one clock at least.
        if not rows or any(row.energy_j == 0 for row in rows):
            raise UsageError(
                f"{source}: a {word_of(kind)} of stage {stage} is missing, or its energy; measure "
                "it at one clock or more"
            )
        load = phases[kind].load(system)
        if limit_w is not None:
            load = replace(load, power_limit_w=limit_w)
        # Measured over modelled, so that factors correct any other stage.
        ratios[kind] = np.array(
            [
                (
                    row.clock_mhz,
                    row.time_s / load.time_s(row.clock_mhz),
                    row.energy_j / profile.gpus_per_stage / load.energy_j(row.clock_mhz),
                )
                for row in rows
            ]
        ).T
    return ratios
