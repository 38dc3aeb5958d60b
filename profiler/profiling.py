"""From one stage on one rank to the profile of a pipeline: `measure_stage` on every rank, `assembled` on one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner import __version__
from perseus_planner.errors import ProfileError
from perseus_planner.profiler import rows
from perseus_planner.profiler.estimates import SPOILING
from perseus_planner.profiler.rows import Rows
from perseus_planner.profiler.stage import Alone, Group, Progress, Stage
from perseus_planner.profiler.sweep import Sweep, SweepSettings, Swept
from perseus_planner.profiler.windows import Windows
from perseus_planner.profiles.csv_file import unit_of
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiles.measurement import Measurement

__all__ = ["StageRows", "SweepSettings", "assembled", "forget_rows", "measure_stage", "rows_path"]


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
        control: of the settings.
        conditions: how it was measured, as in `Profile.conditions`.
    """

    stage: int
    measurements: Mapping[str, tuple[Measurement, ...]]
    blocking_power_w: float | None
    gpus: int
    gpu: str
    origin: str
    control: str
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
    settings, group = settings or SweepSettings(), group or Alone()
    kept = None
    if keep is not None:
        about = _about(gpu, stage, number, settings, group)
        kept = Rows(keep, number, settings.control, about, resume=resume)
    finished = next(filter(None, group.gathered(kept.finished if kept else {})), {})
    windows = Windows(gpu, stage.synchronize, group, settings.window_s, settings.cool_down_s)
    swept = Sweep(gpu, stage, number, settings, group, windows, kept, finished, progress).run()
    ordered = {kind: tuple(sorted(table.values(), key=_setting, reverse=True)) for kind, table in swept.rows.items()}
    return StageRows(
        stage=number,
        measurements=ordered,
        blocking_power_w=fmean(swept.blocking_w.values()) if swept.blocking_w else None,
        gpus=group.size,
        gpu=" + ".join(dict.fromkeys(group.gathered(gpu.name))),
        origin=gpu.origin,
        control=settings.control,
        conditions=_conditions(gpu, settings.control, windows, swept),
    )


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
        ProfileError: they are no profile: a stage is missing or there twice, they differ in what they were measured
            with, no blocking power is known.
    """
    stages = sorted(stages, key=lambda each: each.stage)
    if not stages:
        raise ProfileError("no stage was measured; give at least one")
    for each in stages:
        for name in ("control", "gpus"):
            if getattr(each, name) != getattr(stages[0], name):
                raise ProfileError(
                    f"stage {stages[0].stage} and stage {each.stage} differ in {name}; measure both alike"
                )
    numbers = [each.stage for each in stages]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise ProfileError(f"stage {twice} was measured twice; give it once")
    powers_w = _powers_w(stages, blocking_power_w)
    return Profile(
        {(each.stage, kind): rows for each in stages for kind, rows in each.measurements.items()},
        powers_w[0] if len(set(powers_w)) == 1 else powers_w,
        gpu=" + ".join(dict.fromkeys(each.gpu for each in stages)),
        origin="simulated" if any(each.origin == "simulated" for each in stages) else "measured",
        gpus_per_stage=stages[0].gpus,
        control=stages[0].control,
        conditions={**(conditions or {}), "planner": __version__, **_merged(stages)},
    )


def rows_path(output: Path, stage: int) -> Path:
    """Where the finished rows of a stage are kept until the profile `output` is written, beside it."""
    return output.with_suffix(f".rows-{stage}.csv")


def forget_rows(output: Path, stages: int) -> None:
    """Remove the kept rows of all stages, now that the profile `output` is written."""
    for stage in range(stages):
        rows.forget(rows_path(output, stage))


def _setting(row: Measurement) -> int:
    return row.clock_mhz


def _about(gpu: Gpu, stage: Stage, number: int, settings: SweepSettings, group: Group) -> dict[str, str]:
    """What rows are for: those of two sweeps that differ in it cannot be mixed."""
    kinds = [kind if timed.less is None else f"{kind} less {timed.less}" for kind, timed in stage.timed.items()]
    return {
        "gpu": gpu.uuid,
        "driver": gpu.driver,
        "stage": str(number),
        "kinds": ", ".join(kinds),
        "gpus of the stage": str(group.size),
        "control": settings.control,
        "settings": "all" if settings.full else "as few as a plan needs",
        "window": f"{settings.window_s!r} s",
        "cool-down": f"{settings.cool_down_s!r} s",
        "seed": str(settings.seed),
    }


def _conditions(gpu: Gpu, control: str, windows: Windows, swept: Swept) -> dict[str, str]:
    unit = unit_of(control)
    conditions = {
        "driver": gpu.driver,
        "measured on": gpu.text,
        "windows": f"{windows.window_s:g} s",
        "energy counter step": f"{windows.counter.step_s:.3f} s",
    }
    if swept.blocking_w:
        powers = (f"{power_w:.1f} W at {setting} {unit}" for setting, power_w in swept.blocking_w.items())
        conditions["blocking power"] = ", ".join(powers)
    hot = [
        f"{kind} at {row.clock_mhz} {unit}"
        for kind, table in swept.rows.items()
        for row in table.values()
        if row.evidence is not None and SPOILING.intersection(row.evidence.throttle)
    ]
    if hot:
        conditions["measured while too hot"] = ", ".join(hot) + "; cool the GPU and measure again"
    if gpu.warnings():
        conditions["warnings"] = " ".join(gpu.warnings())
    return conditions


def _powers_w(stages: Sequence[StageRows], blocking_power_w: float | None) -> tuple[float, ...]:
    """What each stage's GPUs draw while they wait."""
    if blocking_power_w is not None:
        return tuple(blocking_power_w * each.gpus for each in stages)
    known = [each.blocking_power_w / each.gpus for each in stages if each.blocking_power_w is not None]
    if not known:
        raise ProfileError(
            "the blocking power was not measured, as no stage has a neighbour to wait for; "
            "give it with --blocking-power W (in Python blocking_power_w=)"
        )
    common_w = math.fsum(known) / len(known)
    return tuple(common_w * each.gpus if each.blocking_power_w is None else each.blocking_power_w for each in stages)


def _merged(stages: Sequence[StageRows]) -> dict[str, str]:
    """The conditions of all: once what is the same everywhere, else by stage."""
    merged = {}
    for name in dict.fromkeys(name for each in stages for name in each.conditions):
        texts = {each.stage: each.conditions[name] for each in stages if name in each.conditions}
        alike = len(set(texts.values())) == 1 and len(texts) == len(stages)
        by_stage = "; ".join(f"stage {stage}: {text}" for stage, text in texts.items())
        merged[name] = next(iter(texts.values())) if alike else by_stage
    return merged
