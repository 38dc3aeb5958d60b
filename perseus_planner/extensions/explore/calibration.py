"""The profile of a pipeline by the model of its GPU, and its correction by one measured stage.

The correction of each kind is the ratio of measured to modelled time, and of energies, at each
measured clock, interpolated linearly in between and constant beyond. So a full sweep determines the
shape of the estimate over clocks, a single clock only its level. All clocks have a row then, also
those that the model's power limit does not allow, as measured stages may run at them. A stage that
draws more than this limit shows that the measured GPU has another one: then the highest measured
clock is not capped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.explore.curves import CurveMaker
from perseus_planner.extensions.explore.transformer import split_layers
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner import Profile
    from perseus_planner.extensions.explore.configuration import Configuration, Floats
    from perseus_planner.extensions.explore.operations import Phases, System
    from perseus_planner.gpu.simulated.model import Load

# Measured power over the model's power limit, above which the limit is another one: sensors and
# measured energies are off by a few percent. By hand.
_ABOVE_LIMIT = 1.05


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
    # From three stages on, the middle one has neither embedding nor head, like most others.
    stage = (profile.stages - 1) // 2
    gpus = profile.gpus_per_stage
    # Ratios are by clock, and limits have no fixed one.
    if profile.control == "power-limit":
        raise UsageError(f"{source}: was measured over power limits; give a profile over clocks")
    # Energies are of one GPU or of all of a stage, and nothing in between.
    wanted_gpus = shape.tensor_degree * shape.context_degree
    if gpus not in (1, wanted_gpus):
        raise UsageError(
            f"{source}: its stages have {gpus} GPUs, but those of the model {wanted_gpus}; "
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
