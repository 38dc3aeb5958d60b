"""Calibration: by how much a measured stage takes longer, and more energy, than the model of its GPU says.

A stage's joules are its FLOPs over an efficiency in FLOPs per joule, which the GPU model gives and a measurement
corrects, separately for each kind. With sequences of s tokens the correction is

    efficiency(s) = modelled efficiency(s) * c * (s / s0)^k

where c is what one measured stage shows and k is 0, or what two of them at different s show; likewise FLOPs per second.
It is taken at each clock that was measured, linear in between and constant beyond, so a full sweep gives its shape to
the estimate, and a single point only its level.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from perseus_planner.errors import UsageError
from perseus_planner.estimate.op_costs import KINDS, Workload
from perseus_planner.estimate.transformer import split_layers
from perseus_planner.profiles.csv_file import word_of
from perseus_planner.profiles.measurement import Measurement

if TYPE_CHECKING:
    from perseus_planner.gpu.simulated.model import GpuModel, OpCost
    from perseus_planner.profiles.profiles import Profile

Factors = Mapping[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]
"""Kind -> measured over modelled seconds, and joules, at each of a GPU's clocks."""


@dataclass(frozen=True)
class Calibration:
    """One stage that was measured, and what it did.

    Attributes:
        works: kind -> what one of its GPUs did.
        measurements: kind -> what one of its GPUs took, at one clock or more. B may be given as I and W.
        sequence: tokens of its sequences.
        source: what was measured, for people, such as "stage 3 of profile.yaml".
        blocking_power_w: what one of its GPUs draws while it waits, watts; None where that was not measured.

    Raises:
        UsageError: F is missing, or B and one of I and W; or an energy is 0.
    """

    works: Mapping[str, OpCost]
    measurements: Mapping[str, tuple[Measurement, ...]]
    sequence: int
    source: str
    blocking_power_w: float | None = None

    def __post_init__(self) -> None:
        for kind in "FB":
            if not self.rows(kind):
                raise UsageError(f"{self.source}: has no {word_of(kind)}; measure it at one clock or more")
            if any(row.energy_j == 0 for row in self.rows(kind)):
                raise UsageError(f"{self.source}: a {word_of(kind)} of 0 J calibrates no energy; measure it again")

    def rows(self, kind: str) -> tuple[Measurement, ...]:
        """What a kind took; the parts of a backward take what it took, in proportion, where they were not measured."""
        if kind in self.measurements or kind == "F":
            return tuple(self.measurements.get(kind, ()))
        if kind != "B":
            return ()
        parts = [{row.clock_mhz: row for row in self.measurements.get(part, ())} for part in "IW"]
        return tuple(
            Measurement(clock, one.time_s + parts[1][clock].time_s, one.energy_j + parts[1][clock].energy_j)
            for clock, one in parts[0].items()
            if clock in parts[1]
        )


def measured_stage(
    profile: Profile, workload: Workload, gpu: GpuModel, stage: int | None = None, source: str = "profile"
) -> Calibration:
    """The calibration that `stage` of a measured profile gives.

    Args:
        profile: of one GPU of each stage, or of all `tensor_degree` of them. It is of the pipeline of `workload`; or of
            one stage alone, which is then number `stage` of that pipeline; or of the same model on another number of
            stages, whose layers are then taken to be shared evenly.
        workload: as it was measured.
        gpu: the model of what it was measured on.
        stage: its number; None for one in the middle, which has neither embedding nor head if there are three.
        source: where the profile is from, for error messages and `conditions`.

    Raises:
        UsageError: there is no such stage, or the profile is not of such a pipeline.
    """
    shape = workload.transformer
    if profile.stages not in (1, len(workload.split)):
        workload = replace(workload, split=split_layers(shape.layers, profile.stages))
    number = (len(workload.split) - 1) // 2 if stage is None else stage
    if not 0 <= number < len(workload.split):
        raise UsageError(f"{source}: there is no stage {number}; give one from 0 to {len(workload.split) - 1}")
    if profile.control == "power-limit":
        raise UsageError(f"{source}: was measured by power limits; give one that was measured by clocks")
    gpus = profile.gpus_per_stage
    if gpus not in (1, shape.tensor_degree):
        raise UsageError(
            f"{source}: its stages have {gpus} GPUs and those of the workload {shape.tensor_degree}; "
            "give the tensor degree that was measured"
        )
    row_stage = 0 if profile.stages == 1 else number
    return Calibration(
        works=workload.works(gpu)[number],
        measurements={
            kind: tuple(replace(row, energy_j=row.energy_j / gpus) for row in rows)
            for (of, kind), rows in profile.measurements.items()
            if of == row_stage
        },
        sequence=shape.sequence,
        source=f"stage {number} of {source} ({profile.origin})",
        blocking_power_w=profile.blocking_w(row_stage) / gpus,
    )


def factors(calibrations: Sequence[Calibration], gpu: GpuModel, sequence: int) -> Factors:
    """Measured over modelled, for each kind and clock of `gpu`, at sequences of so many tokens; all 1 without any.

    Raises:
        UsageError: three calibrations or more.
    """
    if len(calibrations) > 2:
        raise UsageError(f"{len(calibrations)} measured stages calibrate; give one, or two of different sequences")
    if len({each.sequence for each in calibrations}) < len(calibrations):
        raise UsageError("both measured stages have the same sequence length; give one of them")
    ones = np.ones(len(gpu.clocks_mhz))
    if not calibrations:
        return dict.fromkeys(KINDS, (ones, ones))
    found = {}
    for kind in KINDS:
        times, energies = zip(*(_factors(each, kind, gpu) for each in calibrations), strict=True)
        lengths = [each.sequence for each in calibrations]
        found[kind] = (_at(sequence, lengths, times), _at(sequence, lengths, energies))
    return found


def _factors(
    calibration: Calibration, kind: str, gpu: GpuModel
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Those of one measured stage; I and W have those of B where they were not measured."""
    kind = kind if calibration.rows(kind) else "B"
    rows = sorted(calibration.rows(kind), key=lambda row: row.clock_mhz)
    load = gpu.load(calibration.works[kind])
    clocks = [row.clock_mhz for row in rows]
    times = [row.time_s / load.time_s(row.clock_mhz) for row in rows]
    energies = [row.energy_j / load.energy_j(row.clock_mhz) for row in rows]
    return np.interp(gpu.clocks_mhz, clocks, times), np.interp(gpu.clocks_mhz, clocks, energies)


def _at(sequence: int, lengths: Sequence[int], found: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """The factors at a sequence length, on the power of it that goes through those found at one or two lengths."""
    if len(found) == 1:
        return found[0]
    position = math.log(sequence / lengths[0]) / math.log(lengths[1] / lengths[0])
    return np.asarray(found[0] ** (1 - position) * found[1] ** position)
