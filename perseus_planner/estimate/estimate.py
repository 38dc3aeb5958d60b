"""Estimates the profile of a pipeline from the dimensions of its model and a model of its GPU,
corrected by one measured stage.

The correction of each kind is the ratio of measured to modelled time, and of energies, at each
measured clock, interpolated linearly in between and constant beyond. So a full sweep determines the
shape of the estimate over clocks, a single clock only its level. All clocks have a row then, also
those that the model's power limit does not allow, as measured stages may run at them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.estimate.curves import CurveMaker
from perseus_planner.estimate.transformer import split_layers
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.measurement import Measurement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.estimate.configuration import Configuration
    from perseus_planner.estimate.system import System
    from perseus_planner.profiles.profiles import Profile


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
    gpus, rows = profile.gpus_per_stage, {}
    for stage, kind in profile.measurements:
        load, clocks = stages[stage][kind].load(system), system.gpu.clocks_mhz
        rows[stage, kind] = tuple(
            Measurement(clock, load.time_s(clock) * time, load.energy_j(clock) * gpus * energy)
            for clock, time, energy in zip(clocks, *calibration.factors(kind, clocks), strict=True)
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
    """Return the calibration by a stage of a measured profile: the one in the middle, which has
    neither embedding nor head if there are three.

    Args:
        profile: Profile of one GPU of each stage, or of all of them. It may be of the same model on
            another number of stages, which then share the layers evenly.
        job: The pipeline that was measured.
        system: GPUs that were measured.
        source: Where the profile is from, for error messages and `Profile.conditions`.

    Raises:
        UsageError: If the profile does not fit the pipeline, or lacks forwards, backwards or
            energies.
    """
    shape = job.shape
    if profile.stages != len(job.split):
        job = replace(job, split=split_layers(shape.layers, profile.stages))
    stage, gpus = (profile.stages - 1) // 2, profile.gpus_per_stage
    if profile.control == "power-limit":
        raise UsageError(f"{source}: was measured over power limits; give a profile over clocks")
    if gpus not in (1, shape.tensor_degree):
        raise UsageError(
            f"{source}: its stages have {gpus} GPUs, but those of the model {shape.tensor_degree}; "
            "give the tensor degree that was measured"
        )
    phases, ratios = job.stage_phases(system)[stage], {}
    for kind in "FBIW":
        rows = sorted(profile.measurements.get((stage, kind), ()), key=lambda row: row.clock_mhz)
        if not rows and kind in "IW":
            continue
        if not rows or any(row.energy_j == 0 for row in rows):
            raise UsageError(
                f"{source}: a {word_of(kind)} of stage {stage} is missing, or its energy; measure "
                "it at one clock or more"
            )
        load = phases[kind].load(system)
        ratios[kind] = np.array(
            [
                (
                    row.clock_mhz,
                    row.time_s / load.time_s(row.clock_mhz),
                    row.energy_j / gpus / load.energy_j(row.clock_mhz),
                )
                for row in rows
            ]
        ).T
    origin = "of unknown origin" if profile.origin == "unknown" else profile.origin
    return Calibration(
        ratios, f"stage {stage} of {source} ({origin})", profile.blocking_w(stage) / gpus
    )
