"""From one stage on one rank to the profile of a pipeline: `measure_stage` on every rank, `assembled` on one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from perseus_planner.gpu import Gpu
from perseus_planner.measurement import Measurement
from perseus_planner.profiler.stage import Alone, Group, Progress, Stage
from perseus_planner.profiles import Profile


@dataclass(frozen=True)
class SweepSettings:
    """How a stage is measured.

    Attributes:
        knob: what is set for each row: "clock", "power-limit", or "observed": nothing, one row of each kind.
        full: measure at every setting; otherwise at as few as a plan needs.
        window_s: the least length of one measuring window, seconds.
        cool_down_s: the longest wait for the GPU to cool down before each setting, seconds.
        seed: chooses when, after a step of the energy counter, each window begins.

    Raises:
        UsageError: a value is not of that kind.
    """

    knob: str = "clock"
    full: bool = False
    window_s: float = 5.0
    cool_down_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True)
class StageRows:
    """What was measured of one stage; can be pickled, so that ranks can send it to each other.

    Attributes:
        stage: its number.
        measurements: kind -> rows, highest setting first. Times are the longest of the stage's GPUs, energies sums.
        blocking_power_w: what its GPUs draw while they wait for a neighbour, watts, in all; None where it has none.
        gpus: how many GPUs share the stage.
        gpu: the name of its GPUs.
        origin: "measured" or "simulated".
        knob: of the settings.
        conditions: how it was measured, as in `Profile.conditions`.
    """

    stage: int
    measurements: Mapping[str, tuple[Measurement, ...]]
    blocking_power_w: float | None
    gpus: int
    gpu: str
    origin: str
    knob: str
    conditions: Mapping[str, str] = field(default_factory=dict)


def measure_stage(
    gpu: Gpu,
    stage: Stage,
    number: int,
    settings: SweepSettings | None = None,
    *,
    group: Group | None = None,
    keep: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> StageRows:
    """Measure `stage` on `gpu`; whatever happens, what was set on it is reset on return.

    Args:
        gpu: the GPU that the stage runs on. Whoever calls this holds it, so that no other process sets it.
        stage: what is measured.
        number: of the stage in its pipeline, from 0.
        settings: how; the defaults where None.
        group: the GPUs that share the stage and call this at the same time; this one alone where None.
        keep: the file that finished rows are kept in, see `rows_path`. Of a group, one gives it, the others None.
        resume: go on from the rows in that file; else it is replaced. The same for all of a group.
        progress: told after every row.

    Raises:
        GpuError: the GPU cannot be read or set, or its energy counter stands still.
        ProfileError: the rows that were kept cannot be read, or are of another GPU, stage or settings.
    """
    raise NotImplementedError


def assembled(
    stages: Sequence[StageRows],
    *,
    blocking_power_w: float | None = None,
    conditions: Mapping[str, str] | None = None,
) -> Profile:
    """The profile of a pipeline from the rows of its stages, in any order.

    Args:
        stages: one for each stage.
        blocking_power_w: watts of one waiting GPU; used instead of what was measured. Without it, a stage that has no
            measured power gets the mean, per GPU, of those that have one.
        conditions: further conditions to write down, such as the date.

    Raises:
        ProfileError: they are no profile: a stage is missing or there twice, their knobs differ, no blocking power is
            known.
    """
    raise NotImplementedError


def rows_path(output: Path, stage: int) -> Path:
    """Where the finished rows of a stage are kept until the profile `output` is written, beside it."""
    return output.with_suffix(f".rows-{stage}.csv")


def forget_rows(output: Path, stages: int) -> None:
    """Remove the kept rows of all stages, now that the profile `output` is written."""
    raise NotImplementedError
