"""Make profiles of profiles: tensor-parallel groups, stages that were measured apart, slower
stages, limited GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.units import COUNT, FACTOR, POWER_BOUND
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Evidence, Measurement

if TYPE_CHECKING:
    from perseus_planner.profiles.profiles import Profile

_SENSOR_ERROR = 0.02  #: a GPU that runs at its limit is read to draw a little more or less


def tensor_group(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of groups of GPUs that compute each stage together, at one clock for the
    group.

    A computation takes the longest time and the sum of the energies of the GPUs, as in Zeus.

    Args:
        profiles: one for each GPU of a group, of the same stages and kinds. Clocks that not all of
            them have are dropped.

    Raises:
        ProfileError: If there are none, or they differ in stages, kinds or control, or have no
            clock in common.
    """
    # GPUs of a group run one computation together, so they must have the same.
    first = _first(profiles)
    for number, other in enumerate(profiles):
        if set(other.measurements) != set(first.measurements):
            raise ProfileError(
                f"GPU {number} of the group has other stages or kinds than GPU 0; measure the same"
            )
        if other.control != first.control:
            raise ProfileError(
                f"GPU {number} of the group was measured by {other.control}, GPU 0 by "
                f"{first.control}; use one"
            )
    rows = {key: [profile.measurements[key] for profile in profiles] for key in first.measurements}
    measurements = {key: tuple(_merge(per_gpu, key)) for key, per_gpu in rows.items()}
    # All GPUs of the group wait together.
    powers_w = tuple(
        math.fsum(profile.blocking_w(stage) for profile in profiles)
        for stage in range(first.stages)
    )
    return replace(
        first,
        measurements=measurements,
        blocking_power_w=one_or_each(powers_w),
        gpus_per_stage=sum(profile.gpus_per_stage for profile in profiles),
        gpu=_common(profile.gpu for profile in profiles),
        origin=common_origin(profile.origin for profile in profiles),
        # A group is as wrong as the worst of its GPUs.
        **_shared_errors(
            [
                [profile.shared_errors(stage) for profile in profiles]
                for stage in range(first.stages)
            ]
        ),
    )


def on_each_gpu(profile: Profile, gpus: int) -> Profile:
    """Return the profile of groups of `gpus` GPUs, each like the one that was profiled.

    Raises:
        ProfileError: If `gpus` is not a whole number of at least 1.
    """
    COUNT.check(gpus, "gpus", ProfileError)
    return tensor_group([profile] * gpus)


def stage_by_stage(profiles: Sequence[Profile]) -> Profile:
    """Return the profile of a pipeline whose stages were profiled apart, or run on different GPUs.

    Args:
        profiles: one for each stage; of a profile with one stage that stage is taken, else the
            stage of that number.

    Raises:
        ProfileError: If there are none, one lacks its stage, or they differ in `gpus_per_stage`,
            `overhead_s`, the three parts of jitter, `gpu_spread`, `clock_change` or `control`.
    """
    first = _first(profiles)
    measurements: dict[Key, tuple[Measurement, ...]] = {}
    powers_w = []
    errors = []
    for stage, profile in enumerate(profiles):
        # A profile of one stage stands for whichever stage it is given for.
        source = 0 if profile.stages == 1 else stage
        if source >= profile.stages:
            raise ProfileError(
                f"the profile of stage {stage} has only {profile.stages} stages; give one that has "
                "it"
            )
        # A pipeline has one of each of these, so they cannot differ from stage to stage.
        for name in (
            "gpus_per_stage",
            "overhead_s",
            "jitter",
            "jitter_common",
            "jitter_tail",
            "gpu_spread",
            "clock_change",
            "control",
        ):
            if getattr(profile, name) != getattr(first, name):
                raise ProfileError(
                    f"the profiles of stage 0 and stage {stage} differ in {name}; give both the "
                    "same"
                )
        powers_w.append(profile.blocking_w(source))
        errors.append([profile.shared_errors(source)])
        measurements |= {
            Key(stage, key.kind, key.mode): rows
            for key, rows in profile.measurements.items()
            if key.stage == source
        }
    return replace(
        first,
        measurements=measurements,
        blocking_power_w=one_or_each(powers_w),
        gpu=_common(profile.gpu for profile in profiles),
        origin=common_origin(profile.origin for profile in profiles),
        **_shared_errors(errors),
    )


def slowed(profile: Profile, slowdowns: Mapping[int, float]) -> Profile:
    """Return the profile of the same pipeline while some stages are slower, because a GPU
    throttles, say.

    A slower stage is assumed to draw unchanged power, so its joules grow as its seconds do.

    Args:
        profile: the measured profile.
        slowdowns: stage -> how many times as long its computations take, such as 1.15.

    Raises:
        ProfileError: If a stage does not exist, or a slowdown is not above 0.
    """
    for stage, slowdown in slowdowns.items():
        if stage not in range(profile.stages):
            raise ProfileError(
                f"slow stage {stage!r}: does not exist; stages are 0 to {profile.stages - 1}"
            )
        FACTOR.check(slowdown, f"slow stage {stage}", ProfileError)

    # Power stays, so joules and both errors grow as seconds do.
    def slower(key: Key, row: Measurement) -> Measurement:
        slowdown = slowdowns.get(key.stage, 1.0)
        evidence = row.evidence
        if evidence is not None:
            time_s = evidence.time_stderr_s
            energy_j = evidence.energy_stderr_j
            evidence = replace(
                evidence, time_stderr_s=time_s * slowdown, energy_stderr_j=energy_j * slowdown
            )
        return Measurement(row.clock_mhz, row.time_s * slowdown, row.energy_j * slowdown, evidence)

    return _with_rows(profile, slower)


def within_power_limit(profile: Profile, limit_w: float) -> Profile:
    """Return the profile without the clocks that a power limit of each GPU would cap.

    A computation is capped if it drew more than the limit on average, beyond the error of a power
    sensor. What is left are its operating points under that limit, whoever sets it: a site, a job
    scheduler or DCGM. A profile that has none to lose is returned as it is.

    Args:
        profile: measured under this limit or a higher one.
        limit_w: watts of one GPU, above 0.

    Raises:
        ProfileError: If `limit_w` is not a power, or a computation is capped at all of its clocks.
    """
    POWER_BOUND.check(limit_w, "gpu_power_limit_w", ProfileError)
    # Sensors are a little off, so a row at the limit is not capped yet.
    most_w = limit_w * (1 + _SENSOR_ERROR)

    # Limits are of one GPU, and rows may be of several, or limits themselves.
    def power_w(row: Measurement) -> float:
        if profile.control == "power-limit":
            return row.clock_mhz
        return row.power_w / profile.gpus_per_stage

    kept = {
        key: tuple(row for row in rows if power_w(row) <= most_w)
        for key, rows in profile.measurements.items()
    }
    for key, rows in kept.items():
        if not rows:
            least_w = min(map(power_w, profile.measurements[key]))
            raise ProfileError(
                f"stage {key.stage} {word_of(key.name)}: draws {least_w:.0f} W at its least clock, "
                f"and the power limit of its GPU is {limit_w:g} W; measure lower clocks, or raise "
                "the limit"
            )
    return profile if kept == profile.measurements else replace(profile, measurements=kept)


def waiting_longer(profile: Profile, factors: Mapping[str, float]) -> Profile:
    """Return the profile with computations that take longer than measured, as GPUs wait within
    them.

    Args:
        profile: the measured profile.
        factors: kind of the schedule, such as "F" -> how many times as long its computations take.
    """

    # The added time is waiting, so it costs what waiting draws and not what computing does.
    def longer(key: Key, row: Measurement) -> Measurement:
        factor = factors.get(key.kind[0], 1.0)
        evidence = row.evidence and replace(
            row.evidence, time_stderr_s=row.evidence.time_stderr_s * factor
        )
        waiting_j = profile.blocking_w(key.stage) * (factor - 1) * row.time_s
        return Measurement(
            row.clock_mhz, row.time_s * factor, max(0.0, row.energy_j + waiting_j), evidence
        )

    return _with_rows(profile, longer)


def _with_rows(profile: Profile, change: Callable[[Key, Measurement], Measurement]) -> Profile:
    """Return the profile with each measurement of a stage and kind changed."""
    rows = {
        key: tuple(change(key, row) for row in key_rows)
        for key, key_rows in profile.measurements.items()
    }
    return replace(profile, measurements=rows)


def _first(profiles: Sequence[Profile]) -> Profile:
    if not profiles:
        raise ProfileError("no profiles: give at least one")
    return profiles[0]


def _merge(rows: Sequence[Sequence[Measurement]], key: Key) -> Iterable[Measurement]:
    """Yield the measurements of a group from those of its GPUs, highest clock first."""
    # Each GPU has a row at a clock or none, and the group needs all of them.
    tables = [{m.clock_mhz: m for m in gpu_rows} for gpu_rows in rows]
    common = sorted(set.intersection(*map(set, tables)), reverse=True)
    if not common:
        where = f"stage {key.stage} {word_of(key.name)}"
        raise ProfileError(f"{where}: the GPUs of the group have no clock in common; measure one")
    for clock in common:
        # The slowest GPU decides the time, and all of them draw.
        points = [table[clock] for table in tables]
        yield Measurement(
            clock,
            max(m.time_s for m in points),
            math.fsum(m.energy_j for m in points),
            _merged(points),
        )


def _merged(points: Sequence[Measurement]) -> Evidence | None:
    """Return the evidence of the slowest GPU, with the sum of the energies' errors: those of
    like GPUs may agree.
    """
    evidence = [m.evidence for m in points if m.evidence is not None]
    slowest = max(points, key=lambda m: m.time_s).evidence
    if slowest is None or len(evidence) < len(points):
        return None
    throttle = tuple(
        dict.fromkeys(reason for gpu_evidence in evidence for reason in gpu_evidence.throttle)
    )
    return replace(
        slowest,
        energy_stderr_j=math.fsum(gpu_evidence.energy_stderr_j for gpu_evidence in evidence),
        throttle=throttle,
    )


def one_or_each(values: Iterable[float]) -> float | tuple[float, ...]:
    """Return the value of all stages, or one for each if they differ."""
    of_stages = tuple(values)
    return of_stages[0] if len(set(of_stages)) == 1 else of_stages


def _shared_errors(of_stages: Sequence[Sequence[tuple[float, float]]]) -> dict[str, Any]:
    """Return the fields of a profile for stages of which each GPU has such errors: the largest."""
    largest = [map(max, zip(*of_gpus, strict=True)) for of_gpus in of_stages]
    times, energies = zip(*largest, strict=True)
    return {
        "shared_time_error": one_or_each(times),
        "shared_energy_error": one_or_each(energies),
    }


def _common(names: Iterable[str | None]) -> str | None:
    """Return the common name, or all names."""
    distinct = list(dict.fromkeys(name for name in names if name is not None))
    return " + ".join(distinct) if distinct else None


def common_origin(origins: Iterable[str]) -> str:
    """Return the origin of numbers that come from all of `origins`: the least trustworthy one."""
    return max(origins, key=("measured", "unknown", "simulated").index)
