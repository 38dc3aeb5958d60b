"""What a plan at the same speed would save: an interval, as a trace shows one clock only.

Times and watts at other clocks follow from two numbers of the GPU's model, each with a spread
(`gpus.yaml`): the share of the time that follows the clock, and the exponent of the power above
that of waiting, a mean over the clocks that are worth it. Latin hypercube draws (McKay, Beckman and
Conover, 1979) of these, of the watts and of the clock that are not known exactly give the interval,
from 5 to 95 %. A second trace at a lower clock replaces the two numbers by measured ones; what is
below that clock has an exponent of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.traces.analysis import healthy_times_s
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from typing import TypeAlias

    from numpy.typing import NDArray

    from perseus_planner.extensions.traces.job import TracedJob
    from perseus_planner.extensions.traces.power import SeenPower
    from perseus_planner.profiles.keys import Key
    from perseus_planner.solver.frontier import Frontier

    Floats: TypeAlias = NDArray[np.float64]

DRAWS = 24  #: of the interval; 48 change its ends by less than a point (benchmark 44)
_ENDS = (0.05, 0.95)  #: of the interval, as shares of the draws
_STEPS = 24  #: clocks of the profile, by hand
_LOWEST = 0.55  #: of the traced clock: lower ones take more energy on every GPU that was measured
_SEED = 54
_WAITING_SPREAD = 0.2  #: relative, of assumed watts while waiting, by hand
_COMPUTING_SHARE = (0.6, 0.9, 1.2)
"""Watts while computing over the power limit, where none were seen: least, usual, most. Measured
trainings are between .6 (vision, small batches) and 1.19 (GPT-3 on an A100 whose limit was
raised)."""
_CLOCK_SPREAD = 0.03  #: relative, of a clock that was read from a log
_UNSEEN_CLOCK = (0.85, 0.95, 1.0)
"""The clock over the highest one, where none was seen: power limits hold it below."""


class Spread(NamedTuple):
    """A number that is not known exactly: least, usual and most; triangular between."""

    least: float
    usual: float
    most: float

    def at(self, share: float) -> float:
        """Return the number below which it is with this probability."""
        if self.most <= self.least:
            return self.usual
        turn = (self.usual - self.least) / (self.most - self.least)
        # The inverse of the triangular distribution, rising to the usual number and falling after
        # it.
        if share < turn:
            rise = np.sqrt(share * (self.most - self.least) * (self.usual - self.least))
            return self.least + float(rise)
        fall = np.sqrt((1.0 - share) * (self.most - self.least) * (self.most - self.usual))
        return self.most - float(fall)


class Below(NamedTuple):
    """What is taken for power below the lower one of two traced clocks."""

    clock_mhz: float
    exponent: Spread


@dataclass(frozen=True)
class GpuGuess:
    """What is taken for a GPU in a trace."""

    name: str  #: in `gpus.yaml`
    clock_mhz: Spread  #: at which it was traced
    computing_w: Mapping[str, Spread]  #: kind of computation -> watts
    waiting_w: Spread
    clock_share: Spread  #: the share of the time that follows the clock
    power_exponent: Spread
    clocks_mhz: tuple[int, ...]  #: that it supports, highest first
    sources: tuple[str, ...]  #: what was seen, and what is assumed
    below: Below | None = None  #: the exponent below a clock, where it is another one


@dataclass(frozen=True)
class Saving:
    """What a plan at the same speed is expected to save."""

    middle: float  #: share of the GPUs' energy, at the usual numbers
    least: float  #: the truth is above this with a probability of 95 %
    most: float
    power_w: float  #: what all traced GPUs draw now, watts
    time_ratio: float  #: the plan's iteration over today's
    gpu: GpuGuess
    profile: Profile  #: at the usual numbers
    frontier: Frontier
    plan: Any  #: `Plan` at the same speed
    draws: tuple[float, ...]  #: the shares of all draws


def find_gpu(name: str | None, device: str | None) -> str:
    """Return the name in `gpus.yaml` of a GPU.

    Args:
        name: as the user gave it.
        device: as the driver calls it, such as "NVIDIA A100-SXM4-80GB".

    Raises:
        UsageError: If it is not known; says which are.
    """
    from perseus_planner.gpu.simulated.model import CATALOG, find_model

    # What the user gives counts, and must be known.
    if name is not None:
        return find_model(name.removeprefix("simulated:"), name, "kind of GPU", "{}").name
    words = re.split(r"[^a-z0-9]+", (device or "").lower())
    words_in_common: dict[str, int] = {}
    for catalogued in CATALOG:
        # The chip must be named, and of its forms the one with the most words in common counts.
        chip, *form = catalogued.split("-")
        if chip in words:
            words_in_common[catalogued] = sum(
                any(word.startswith(part) for word in words) for part in form
            )
    if not words_in_common:
        problem = "the traces name no GPU" if device is None else f"the GPU {device!r} is not known"
        raise UsageError(
            f"--gpu: is missing, and {problem}; give its kind, one of {', '.join(CATALOG)}"
        )
    closest = max(words_in_common.values())
    alike = [catalogued for catalogued, count in words_in_common.items() if count == closest]
    # "NVIDIA H100 80GB HBM3" is the SXM: other forms are in their names.
    return next((catalogued for catalogued in alike if catalogued.endswith("-sxm")), alike[0])


def guess_gpu(name: str, kinds: list[str], seen: SeenPower | None) -> GpuGuess:
    """Return what is taken for a GPU: what power logs show, else what its model has."""
    from perseus_planner.gpu.simulated.model import CATALOG, GPUS

    model = CATALOG[name]
    sources = []
    top_mhz = model.clocks_mhz[0]
    # A clock that was seen has a small spread, and one that was not lies below the highest.
    if seen is not None and seen.clock_mhz is not None:
        clock = seen.clock_mhz
        clock_mhz = Spread((1 - _CLOCK_SPREAD) * clock, clock, (1 + _CLOCK_SPREAD) * clock)
        sources.append(f"clock seen: {clock:.0f} MHz")
    else:
        clock_mhz = Spread(*(share * top_mhz for share in _UNSEEN_CLOCK))
        # The rows are at the nearest clock that the GPU supports.
        usual_mhz = _nearest(model.clocks_mhz, clock_mhz.usual)
        sources.append(f"clock assumed: {usual_mhz} MHz, of {top_mhz} at most")
    # Two standard errors on both sides are the least and the most.
    if seen is not None:
        computing = Spread(
            seen.computing_w - 2 * seen.computing_error_w,
            seen.computing_w,
            seen.computing_w + 2 * seen.computing_error_w,
        )
        sources.append(f"power seen: {seen.computing_w:.0f} W computing")
        if seen.computing_w > model.power_limit_w:
            sources.append(
                f"more than the {model.power_limit_w:.0f} W of {name}: its limit was raised, and "
                "what was seen counts"
            )
    else:
        computing = Spread(*(share * model.power_limit_w for share in _COMPUTING_SHARE))
        sources.append(f"power assumed: {computing.usual:.0f} W computing")
    # A log tells the watts of waiting only where its samples differ in their busy shares.
    if seen is not None and seen.waiting_w is not None:
        error_w = 2 * (seen.waiting_error_w or 0.0)
        waiting = Spread(seen.waiting_w - error_w, seen.waiting_w, seen.waiting_w + error_w)
        sources.append(f"{seen.waiting_w:.0f} W waiting")
    else:
        usual_w = model.blocking_power_w
        waiting = Spread((1 - _WAITING_SPREAD) * usual_w, usual_w, (1 + _WAITING_SPREAD) * usual_w)
        sources.append(f"{usual_w:.0f} W waiting, assumed")
    return GpuGuess(
        name,
        clock_mhz,
        dict.fromkeys(kinds, computing),
        waiting,
        Spread(*GPUS[name]["clock_share"]),
        Spread(*GPUS[name]["power_exponent"]),
        model.clocks_mhz,
        tuple(sources),
    )


@dataclass(frozen=True)
class _Numbers:
    """One choice of all numbers that are not known exactly."""

    clock_mhz: float
    computing_w: float
    waiting_w: float
    clock_share: float
    power_exponent: float
    exponent_below: float = 0.0  #: where the guess has a `Below`


@dataclass(frozen=True)
class SecondClock:
    """What a second trace at a lower clock shows."""

    clock_mhz: float
    times_s: Mapping[Key, Floats]  #: of each stage and kind
    computing_w: float | None = None  #: watts, if they were seen


def estimate_saving(
    job: TracedJob,
    gpu: GpuGuess,
    jitter: float,
    rest_s: float,
    second: SecondClock | None = None,
    draws: int = DRAWS,
) -> Saving:
    """Return what a plan as fast as today's iterations would save.

    Args:
        job: the traced job.
        gpu: what is taken for its GPUs.
        jitter: relative standard deviation of a computation.
        rest_s: what an iteration takes beside its replay.
        second: a trace at a lower clock.
        draws: how many draws make the interval.
    """
    # Slow workers are to be mended first, so the saving is that of the healthy ones.
    times_s = healthy_times_s(job)
    if second is not None:
        gpu = _with_second(gpu, times_s, second)
    # The middle is at the usual numbers, which are not the mean of the draws.
    usual = _Numbers(
        gpu.clock_mhz.usual,
        next(iter(gpu.computing_w.values())).usual,
        gpu.waiting_w.usual,
        gpu.clock_share.usual,
        gpu.power_exponent.usual,
        0.0 if gpu.below is None else gpu.below.exponent.usual,
    )
    profile = _profile(job, gpu, usual, times_s, jitter, rest_s)
    frontier, plan = _planned(job, profile)
    shares = []
    # Each draw is a whole plan, as savings do not follow from the numbers in a line.
    for numbers in _drawn(gpu, draws):
        drawn = _profile(job, gpu, numbers, times_s, jitter, rest_s)
        _, drawn_plan = _planned(job, drawn)
        shares.append(_share(drawn_plan))
    shares.sort()
    least, most = np.quantile(shares, _ENDS).tolist() if shares else (0.0, 0.0)
    middle = _share(plan)
    # The plan is of one pipeline, and the power is of all.
    power_w = plan.baseline_energy_j / plan.baseline_time_s * job.pipelines
    profile = _with_evidence(profile, gpu, times_s)
    # The usual numbers may lie outside of few draws.
    least = min(least, middle)
    most = max(most, middle)
    conditions = {
        "traced": (
            f"a plan at the same speed is expected to save {100 * least:.0f} to {100 * most:.0f} % "
            f"(middle {100 * middle:.0f}) of the GPUs' energy"
        ),
        "assumed": "; ".join(gpu.sources),
    }
    return Saving(
        middle,
        least,
        most,
        power_w,
        plan.time_s / plan.baseline_time_s,
        gpu,
        replace(profile, conditions=conditions),
        frontier,
        plan,
        tuple(shares),
    )


def _share(plan: Any) -> float:
    return float(1.0 - plan.energy_j / plan.baseline_energy_j)


def _planned(job: TracedJob, profile: Profile) -> tuple[Frontier, Any]:
    """Return the frontier and the plan that is as fast as full clocks at the mean times, without a
    margin for jitter.
    """
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.frontier import solve_dag

    frontier = solve_dag(PipelineDag(profile, job.iteration))
    return frontier, frontier.plan_for(frontier.baseline_time_s, on_time=None)


def _drawn(gpu: GpuGuess, count: int) -> list[_Numbers]:
    """Return Latin hypercube draws of the numbers of a GPU."""
    random = np.random.default_rng(_SEED)
    spreads = [
        gpu.clock_mhz,
        next(iter(gpu.computing_w.values())),
        gpu.waiting_w,
        gpu.clock_share,
        gpu.power_exponent,
    ]
    if gpu.below is not None:
        spreads.append(gpu.below.exponent)
    columns = []
    # One draw in each of equally likely parts, in random order, so that few draws cover all.
    for spread in spreads:
        shares = (random.permutation(count) + random.random(count)) / count
        columns.append([spread.at(float(share)) for share in shares])
    return [_Numbers(*row) for row in zip(*columns, strict=True)]


def _profile(
    job: TracedJob,
    gpu: GpuGuess,
    numbers: _Numbers,
    times_s: Mapping[Key, Floats],
    jitter: float,
    rest_s: float,
) -> Profile:
    """Return the profile at one choice of numbers."""
    measurements: dict[Key, tuple[Measurement, ...]] = {}
    # A draw may have waiting above computing, which no GPU does.
    waiting_w = min(numbers.waiting_w, 0.9 * numbers.computing_w)
    traced_mhz, clocks_mhz = _clocks(gpu, numbers.clock_mhz)
    for key, of_key_s in times_s.items():
        time_s = float(of_key_s.mean())
        # A computation without work has one row of nothing.
        if time_s <= 0.0:
            measurements[key] = (Measurement(traced_mhz, 0.0, 0.0),)
            continue
        rows = []
        for clock_mhz in clocks_mhz:
            # Only a share of the time follows the clock; memory does not.
            slower = numbers.clock_share * traced_mhz / clock_mhz + 1.0 - numbers.clock_share
            lower = _lower(gpu, numbers, clock_mhz, traced_mhz)
            # Power above waiting falls with the clock, and waiting is drawn at any.
            power_w = waiting_w + (numbers.computing_w - waiting_w) * lower
            rows.append(Measurement(clock_mhz, time_s * slower, power_w * time_s * slower))
        measurements[key] = tuple(rows)
    return Profile(
        measurements,
        blocking_power_w=waiting_w,
        gpu=gpu.name,
        origin="traced",
        overhead_s=rest_s,
        jitter=jitter,
        gpu_spread=0.0,  # the job runs on the GPUs that were traced
    )


def _lower(gpu: GpuGuess, numbers: _Numbers, clock_mhz: float, traced_mhz: float) -> float:
    """Return the power above that of waiting at a clock, as a share of that at the traced one."""
    if gpu.below is None or clock_mhz >= gpu.below.clock_mhz:
        return float((clock_mhz / traced_mhz) ** numbers.power_exponent)
    at_second = (gpu.below.clock_mhz / traced_mhz) ** numbers.power_exponent
    return float(at_second * (clock_mhz / gpu.below.clock_mhz) ** numbers.exponent_below)


def _nearest(clocks_mhz: Sequence[int], clock_mhz: float) -> int:
    return min(clocks_mhz, key=lambda clock: abs(clock - clock_mhz))


def _clocks(gpu: GpuGuess, clock_mhz: float) -> tuple[int, list[int]]:
    """Return the supported clock nearest to the traced one, and those below it that are rows."""
    traced_mhz = _nearest(gpu.clocks_mhz, clock_mhz)
    below = [clock for clock in gpu.clocks_mhz if _LOWEST * traced_mhz <= clock <= traced_mhz]
    if len(below) > _STEPS:
        places = np.linspace(0, len(below) - 1, _STEPS).round().astype(int)
        below = [below[position] for position in places.tolist()]
    return traced_mhz, below


def _with_evidence(profile: Profile, gpu: GpuGuess, times_s: Mapping[Key, Floats]) -> Profile:
    """Return the profile with standard errors: of the traced row its own, of the others those of
    the numbers that they were estimated with.
    """
    # The standard deviation of a triangle is its width over the root of 24, if it is symmetric.
    share_error = (gpu.clock_share.most - gpu.clock_share.least) / np.sqrt(24)
    exponent_error = (gpu.power_exponent.most - gpu.power_exponent.least) / np.sqrt(24)
    measurements = {}
    for key, rows in profile.measurements.items():
        if not rows[0].has_work:
            measurements[key] = rows
            continue
        of_key_s = times_s[key]
        # The traced row has the error of its own mean.
        own_s = float(of_key_s.std() / np.sqrt(len(of_key_s)))
        traced_mhz = rows[0].clock_mhz
        marked = []
        for row in rows:
            # At other clocks the share of the time adds its error, the more the lower they are.
            slower_s = rows[0].time_s * share_error * (traced_mhz / row.clock_mhz - 1.0)
            time_error_s = float(np.hypot(own_s, slower_s))
            power_error = exponent_error * np.log(traced_mhz / row.clock_mhz)
            energy_error = float(np.hypot(time_error_s / row.time_s, power_error))
            evidence = Evidence(
                achieved_mhz=float(row.clock_mhz),
                time_stderr_s=time_error_s,
                energy_stderr_j=energy_error * row.energy_j,
                windows=len(of_key_s),
                temperature_c=0.0,
            )
            marked.append(replace(row, evidence=evidence))
        measurements[key] = tuple(marked)
    return replace(profile, measurements=measurements)


def _with_second(gpu: GpuGuess, times_s: Mapping[Key, Floats], second: SecondClock) -> GpuGuess:
    """Return the guess with the numbers that a second clock shows.

    Raises:
        UsageError: If the second clock is not lower, or of other stages.
    """
    # Two clocks that are near each other tell no slope.
    ratio = gpu.clock_mhz.usual / second.clock_mhz
    if ratio < 1.05:
        raise UsageError(
            f"--slower-clock: {second.clock_mhz:.0f} MHz is not below the traced clock of "
            f"{gpu.clock_mhz.usual:.0f} MHz by 5 % or more; trace at about 80 % of it"
        )
    if times_s.keys() != second.times_s.keys():
        raise UsageError("--slower: has other stages than FILE; trace the same job at both clocks")
    # Each stage and kind tells a share of its own, and their spread is the error.
    shares_of_keys = []
    for key, of_key_s in times_s.items():
        before_s = float(of_key_s.mean())
        if before_s > 0.0:
            slower = float(second.times_s[key].mean()) / before_s
            shares_of_keys.append((slower - 1.0) / (ratio - 1.0))
    # Noise may put a share out of its range.
    share = float(np.clip(np.median(shares_of_keys), 0.0, 1.0))
    spread = 2 * float(np.std(shares_of_keys)) / np.sqrt(len(shares_of_keys)) + _CLOCK_SPREAD
    shares = Spread(max(0.0, share - spread), share, min(1.0, share + spread))
    gpu = replace(
        gpu,
        clock_share=shares,
        sources=(*gpu.sources, f"{share:.2f} of the time follows the clock, by the second trace"),
    )
    if second.computing_w is None:
        return gpu
    waiting_w = gpu.waiting_w.usual
    computing_w = next(iter(gpu.computing_w.values())).usual
    fall = (second.computing_w - waiting_w) / (computing_w - waiting_w)
    # Power falls at least in proportion to the clock, and no faster than with its third power.
    exponent = float(np.clip(np.log(max(fall, 1e-3)) / np.log(1.0 / ratio), 1.0, 3.0))
    # Where the voltage falls no more, power is in proportion to the clock. That begins at about
    # 75 % of the highest clock, near the second one, and nothing was seen below it.
    below = Spread(1.0, (1.0 + exponent) / 2, exponent)
    return replace(
        gpu,
        power_exponent=Spread(exponent - 0.15, exponent, exponent + 0.15),
        below=Below(second.clock_mhz, below),
        sources=(*gpu.sources, f"power rises with the clock to the {exponent:.2f}, likewise"),
    )
