"""Estimates the profile of a transformer pipeline from its dimensions and a model of its GPU.

The system predicts time and energy of each computation from its operations (`kernel_times.py`), and
measured stages correct the prediction. The energy of a stage is its FLOPs divided by an efficiency
in FLOPs per joule, which the GPU model predicts and a measurement corrects, separately for each
kind. For sequences of s tokens the correction is

    efficiency(s) = modelled efficiency(s) * c * (s / s0)^k

where c follows from one measured stage, and k is 0 or follows from two measured stages with
different s; likewise for FLOPs per second. The correction is computed at each measured clock,
interpolated linearly in between and constant beyond. So a full sweep determines the shape of the
estimate over clocks, a single clock only its level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.units import TIME
from perseus_planner.estimate.kernel_times import layer_times
from perseus_planner.estimate.transformer import Transformer, check_split, split_layers
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.groups import on_each_gpu
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from perseus_planner.estimate.system import System
    from perseus_planner.gpu.simulated.model import Load


def estimate(
    pipeline: TransformerPipeline,
    system: System,
    calibrations: Sequence[StageCalibration] = (),
    *,
    split_backward: bool = False,
) -> Profile:
    """Return the profile of every stage at every clock of a GPU, marked as simulated; `conditions`
    record its sources.

    Args:
        pipeline: The model and its stages. With a tensor degree above 1, energies are sums over the
            GPUs of a stage.
        system: GPUs and their links.
        calibrations: A measured stage, two with different sequence lengths, or none. The blocking
            power is that of the first calibration that has one.
        split_backward: Whether to estimate the gradients of inputs and of weights separately as
            well.

    Raises:
        UsageError: If the calibrations contradict each other.
    """
    gpu = system.gpu
    factors = correction_factors(calibrations, gpu.clocks_mhz, pipeline.transformer.sequence)
    measurements = {}
    for stage, loads in enumerate(pipeline.loads(system)):
        for kind in "FBIW" if split_backward else "FB":
            load, (times, energies) = loads[kind], factors[kind]
            measurements[stage, kind] = tuple(
                Measurement(
                    clock,
                    load.time_s(clock) * float(times[index]),
                    load.energy_j(clock) * float(energies[index]),
                )
                for index, clock in enumerate(gpu.clocks_mhz)
            )
    powers_w = [
        calibration.blocking_power_w
        for calibration in calibrations
        if calibration.blocking_power_w is not None
    ]
    one_gpu = Profile(
        measurements,
        blocking_power_w=(powers_w or [gpu.blocking_power_w])[0],
        gpu=f"simulated {gpu.name}",
        origin="simulated",
        conditions=_conditions(pipeline, system, calibrations),
    )
    return on_each_gpu(one_gpu, pipeline.transformer.tensor_degree)


def _conditions(
    pipeline: TransformerPipeline, system: System, calibrations: Sequence[StageCalibration]
) -> dict[str, str]:
    shape, link = pipeline.transformer, pipeline.on(system).link_bytes_per_s
    return {
        "estimate": "operations in closed form, on a model of the system; nothing was measured on "
        "these stages",
        "workload": f"{pipeline.name}, {shape.microbatch} x {shape.sequence} tokens a microbatch, "
        f"layers {','.join(map(str, pipeline.split))}, tensor degree {shape.tensor_degree}, "
        f"{shape.attention} attention, recomputation {shape.recomputation}",
        "tensor_traffic": f"at {link / 1e9:g} GB/s",
        "calibration": "; ".join(
            f"{calibration.source} at {calibration.sequence} tokens" for calibration in calibrations
        )
        or "none",
    }


KINDS = ("F", "B", "I", "W")
"""The kinds of computations of a stage, in the order of a profile."""
Factors = Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
"""Ratios of measured to modelled time, and of measured to modelled energy, at each clock of a
GPU, by kind.
"""


@dataclass(frozen=True)
class TransformerPipeline:
    """A transformer on the stages of a pipeline.

    Raises:
        UsageError: If the stages do not add up to the layers of the transformer, or the bandwidth
            is not above 0.
    """

    name: str  #: Name for tables
    transformer: Transformer  #: The model
    split: tuple[int, ...]  #: Layers of each stage, as from `split_layers`
    #: Bandwidth of a GPU to its tensor group, if it is not that of the system; infinite if traffic
    #: takes no time.
    link_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        check_split(self.transformer, self.split)
        if (
            self.link_bytes_per_s not in (None, math.inf)
            and TIME.accept(self.link_bytes_per_s) is None
        ):
            raise UsageError(
                f"link: {shown(self.link_bytes_per_s)} is not a bandwidth; give one above 0"
            )

    def on(self, system: System) -> System:
        """Return `system` with the bandwidth of the links, if one was given."""
        if self.link_bytes_per_s is None:
            return system
        if math.isinf(self.link_bytes_per_s):
            return replace(system, link_bytes_per_s=math.inf, exchange_s=0.0)
        return replace(system, link_bytes_per_s=self.link_bytes_per_s)

    def loads(self, system: System) -> list[dict[str, Load]]:
        """Return time and power over clocks of each kind for one microbatch on one GPU of each
        stage.
        """
        system = self.on(system)
        stages = layer_times(self.transformer, system).stages(self.split)
        return [{kind: phases.load(system) for kind, phases in stage.items()} for stage in stages]


@dataclass(frozen=True)
class StageCalibration:
    """A measured stage, with what the model predicts for it.

    Raises:
        UsageError: If the forward or the backward is missing, or an energy is 0.
    """

    loads: Mapping[str, Load]  #: Predicted time and power of each kind on one GPU
    #: Measurements of each kind on one GPU, at one clock or more. B may be given as I and W.
    measurements: Mapping[str, tuple[Measurement, ...]]
    sequence: int  #: Tokens of a sequence
    source: str  #: What was measured, for messages, such as "stage 3 of profile.yaml"
    #: Power of one GPU while it waits, watts; None if it was not measured.
    blocking_power_w: float | None = None

    def __post_init__(self) -> None:
        for kind in "FB":
            if not self.rows(kind):
                raise UsageError(
                    f"{self.source}: the {word_of(kind)} is missing; measure it at one clock or "
                    "more"
                )
            if any(row.energy_j == 0 for row in self.rows(kind)):
                raise UsageError(
                    f"{self.source}: the energy of a {word_of(kind)} is 0 J; measure it again"
                )

    def rows(self, kind: str) -> tuple[Measurement, ...]:
        """Return the measurements of a kind; those of B may be the sums of I and W."""
        if kind in self.measurements or kind == "F":
            return tuple(self.measurements.get(kind, ()))
        if kind != "B":
            return ()
        parts = [{row.clock_mhz: row for row in self.measurements.get(part, ())} for part in "IW"]
        return tuple(
            Measurement(
                clock, row.time_s + parts[1][clock].time_s, row.energy_j + parts[1][clock].energy_j
            )
            for clock, row in parts[0].items()
            if clock in parts[1]
        )


def stage_calibration(
    profile: Profile,
    pipeline: TransformerPipeline,
    system: System,
    stage: int | None = None,
    source: str = "profile",
) -> StageCalibration:
    """Return the calibration by one stage of a measured profile.

    Args:
        profile: Profile of one GPU of each stage, or of all `tensor_degree` of them. It may be a
            profile of `pipeline`, of its stage `stage` alone, or of the same model on another
            number of stages, which then share the layers evenly.
        pipeline: The pipeline that was measured.
        system: GPUs that were measured.
        stage: Number of the stage; None for one in the middle, which has neither embedding nor head
            if there are three.
        source: Where the profile is from, for error messages and `Profile.conditions`.

    Raises:
        UsageError: If there is no such stage, or the profile does not fit the pipeline.
    """
    shape = pipeline.transformer
    if profile.stages not in (1, len(pipeline.split)):
        pipeline = replace(pipeline, split=split_layers(shape.layers, profile.stages))
    number = (len(pipeline.split) - 1) // 2 if stage is None else stage
    if not 0 <= number < len(pipeline.split):
        raise UsageError(
            f"{source}: there is no stage {number}; give one from 0 to {len(pipeline.split) - 1}"
        )
    if profile.control == "power-limit":
        raise UsageError(f"{source}: was measured over power limits; give a profile over clocks")
    gpus = profile.gpus_per_stage
    if gpus not in (1, shape.tensor_degree):
        raise UsageError(
            f"{source}: its stages have {gpus} GPUs, but those of the model {shape.tensor_degree}; "
            "give the tensor degree that was measured"
        )
    row_stage = 0 if profile.stages == 1 else number
    origin = "of unknown origin" if profile.origin == "unknown" else profile.origin
    return StageCalibration(
        loads=pipeline.loads(system)[number],
        measurements={
            kind: tuple(replace(row, energy_j=row.energy_j / gpus) for row in rows)
            for (measured_stage, kind), rows in profile.measurements.items()
            if measured_stage == row_stage
        },
        sequence=shape.sequence,
        source=f"stage {number} of {source} ({origin})",
        blocking_power_w=profile.blocking_w(row_stage) / gpus,
    )


def correction_factors(
    calibrations: Sequence[StageCalibration], clocks_mhz: Sequence[int], sequence: int
) -> Factors:
    """Return the ratios of measured to modelled values for sequences of `sequence` tokens; all 1
    without calibrations.

    Raises:
        UsageError: If there are more than two calibrations, or two with the same sequence length.
    """
    if len(calibrations) > 2:
        raise UsageError(
            f"{len(calibrations)} measured stages are too many; give one, or two with different "
            "sequence lengths"
        )
    if len({calibration.sequence for calibration in calibrations}) < len(calibrations):
        raise UsageError("both measured stages have the same sequence length; give only one")
    ones = np.ones(len(clocks_mhz))
    if not calibrations:
        return dict.fromkeys(KINDS, (ones, ones))
    factors = {}
    for kind in KINDS:
        times, energies = zip(
            *(_stage_factors(calibration, kind, clocks_mhz) for calibration in calibrations),
            strict=True,
        )
        lengths = [calibration.sequence for calibration in calibrations]
        factors[kind] = (_at(sequence, lengths, times), _at(sequence, lengths, energies))
    return factors


def _stage_factors(
    calibration: StageCalibration, kind: str, clocks_mhz: Sequence[int]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the ratios for one measured stage; I and W have those of B if they were not
    measured.
    """
    kind = kind if calibration.rows(kind) else "B"
    rows = sorted(calibration.rows(kind), key=lambda row: row.clock_mhz)
    load = calibration.loads[kind]
    clocks = [row.clock_mhz for row in rows]
    times = [row.time_s / load.time_s(row.clock_mhz) for row in rows]
    energies = [row.energy_j / load.energy_j(row.clock_mhz) for row in rows]
    return np.interp(clocks_mhz, clocks, times), np.interp(clocks_mhz, clocks, energies)


def _at(
    sequence: int, lengths: Sequence[int], found: Sequence[npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """Return the factors at a sequence length, by a power law through those at one or two
    lengths.
    """
    if len(found) == 1:
        return found[0]
    position = math.log(sequence / lengths[0]) / math.log(lengths[1] / lengths[0])
    return np.asarray(found[0] ** (1 - position) * found[1] ** position)
