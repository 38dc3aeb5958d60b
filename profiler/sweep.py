"""Measure all kinds of a stage at one setting after another, from the highest down, at as few as
a plan needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Index, Minutes, Seconds, Share, Wait
from perseus_planner.profiler.choosing import MAX_SETTINGS, RowTable, next_of_descent, next_setting
from perseus_planner.profiler.control import common_settings, opened_control
from perseus_planner.profiler.lock_check import LockCheck
from perseus_planner.profiler.row_file import RowFile
from perseus_planner.profiler.row_meter import RowMeter
from perseus_planner.profiler.stage import GpuGroup, Progress, SingleGpu, Stage, StageRows
from perseus_planner.profiler.windows import TRANSIENT_REASONS, merge, subtract
from perseus_planner.profiles.csv_file import CONTROLS, unit_of

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu
    from perseus_planner.profiles.measurement import Measurement

_LEAST_SETTINGS = 2  # with one, no plan could save anything


@dataclass(frozen=True)
class SweepSettings(Checked):
    """How a stage is measured.

    Raises:
        UsageError: If a value is out of range.
    """

    #: What is set for each row: "clock", "power-limit", or "observed" to set nothing and measure
    #: one row of each kind.
    control: str = "clock"
    full: bool = False  #: Whether to measure at every setting, instead of at as few as a plan needs
    window_s: Seconds = 5.0  #: The minimum length of a measuring window, seconds
    #: The longest wait for the GPU to cool down before each setting, seconds.
    cool_down_s: Wait = 5.0
    seed: Index = 0  #: Draws when, after an update of the energy counter, each window begins
    #: Whether to keep rows for which the GPU was too hot, also when they were measured again.
    allow_hot: bool = False
    #: How long one repetition of a computation may take, seconds; a longer one ends the profile.
    repetition_s: Seconds = 60.0
    #: How long each GPU measures at most, minutes, all of its stages together; None for no limit.
    #: The row in progress is finished, and two settings are always measured.
    minutes: Minutes | None = None
    #: How far the share of energy that plans save is to be known, such as 0.003: settings are
    #: measured, and measured again, until half of its 90 % interval is no more. With neither this
    #: nor `minutes`, at most 12 settings are measured, each once.
    saving_within: Share | None = None

    def __post_init__(self) -> None:
        if self.control not in CONTROLS:
            raise UsageError(
                f"control: {self.control!r} is unknown; choose one of: {', '.join(CONTROLS)}"
            )
        super().__post_init__()
        if self.has_goal and (self.full or self.control == "observed"):
            raise UsageError(
                "minutes and saving_within choose what is measured; leave out full, or "
                "control='observed'"
            )

    @property
    def has_goal(self) -> bool:
        """Whether the sweep goes on until its time is up, or the saving is known."""
        return self.minutes is not None or self.saving_within is not None

    def for_one_of(self, stages: int) -> SweepSettings:
        """Return the settings for each of so many stages that a GPU measures one after another."""
        return self if self.minutes is None else replace(self, minutes=self.minutes / stages)


def measure_stage(
    gpu: Gpu,
    stage: Stage,
    number: int,
    settings: SweepSettings | None = None,
    *,
    group: GpuGroup | None = None,
    rows_file: Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    stages: int = 1,
) -> StageRows:
    """Measure `stage` on `gpu`. The GPU's settings are reset on return, also after an exception.

    Args:
        gpu: The GPU that the stage runs on. The caller holds its lease, so that no other process
            sets it.
        stage: What to measure.
        number: The number of the stage in its pipeline, from 0.
        settings: How to measure; the defaults if None.
        group: The GPUs that hold the stage, each of which calls this at the same time; None for a
            single GPU.
        rows_file: Keeps finished rows, see `rows_path`. In a group only one GPU gives it.
        resume: Go on from the rows in `rows_file` instead of deleting them. It must be the same for
            all of a group.
        progress: Called after every row.
        stages: The number of stages of the pipeline: the noise of so many averages out, where
            `saving_within` is given.

    Raises:
        GpuError: If the GPU cannot be read or set, its energy counter does not move, it stays too
            hot, or locking its clock has no effect.
        ProfileError: If the kept rows cannot be read, or were measured on another GPU, stage or
            with other settings.
    """
    settings, group = settings or SweepSettings(), group or SingleGpu()
    kept = None
    if rows_file is not None:
        subject = _subject(gpu, stage, number, settings, group)
        kept = RowFile(rows_file, number, settings.control, subject, resume=resume)
    return _Sweep(gpu, stage, number, settings, group, kept, progress, stages).measure()


class _Sweep:
    """A sweep of one stage on one GPU, or on one of the GPUs that share it; the arguments are those
    of `measure_stage`.
    """

    def __init__(
        self,
        gpu: Gpu,
        stage: Stage,
        number: int,
        settings: SweepSettings,
        group: GpuGroup,
        kept: RowFile | None,
        progress: Progress | None,
        stages: int,
    ) -> None:
        self.gpu, self.stage, self.number, self.settings = gpu, stage, number, settings
        self.group, self.kept, self.progress, self.stages = group, kept, progress, stages
        # Of a sweep to resume, the rows are the same on all GPUs of the group.
        finished: RowTable = next(filter(None, group.gather(kept.finished if kept else {})), {})
        self.meter = RowMeter(
            gpu, stage.synchronize, group, settings.window_s, settings.cool_down_s
        )
        self._rows = {kind: dict(finished.get(kind, {})) for kind in stage.runs}
        self._begin_s = gpu.now_s()
        self._longest_s = 0.0  # of measuring all kinds at a setting
        self._doubt: float | None = None
        self._locks = {kind: LockCheck(gpu.text) for kind in stage.runs}
        for kind, table in self._rows.items():
            for setting in sorted(table, reverse=True):
                self._check_lock(kind, table[setting], setting, None)

    def measure(self) -> StageRows:
        """Measure the missing rows, and return all."""
        control = self.settings.control
        blocking_w = self._observe() if control == "observed" else self._set_and_measure()
        done = sum(map(len, self._rows.values()))
        if self.progress is not None:
            self.progress(done, done)
        return StageRows(
            stage=self.number,
            measurements={
                kind: tuple(table[setting] for setting in sorted(table, reverse=True))
                for kind, table in self._rows.items()
            },
            blocking_power_w=fmean(blocking_w.values()) if blocking_w else None,
            gpus=self.group.size,
            gpu=" + ".join(dict.fromkeys(self.group.gather(self.gpu.name))),
            origin=self.gpu.origin,
            control=control,
            conditions=self._conditions(blocking_w),
        )

    def _set_and_measure(self) -> Mapping[int, float]:
        """Measure at one setting after another; return setting -> power of the blocked GPUs, watts,
        empty if the stage has no neighbour.
        """
        with opened_control(self.gpu, self.settings.control) as (own, set_to):
            settings = common_settings(self.group.gather(own))
            set_to(settings[0])
            self._heat()
            power_w = self.meter.measure_blocking_w(self.stage.block)
            waiting_w = self.meter.measure_rest_w() if power_w is None else power_w
            while (setting := self._next_setting(settings, waiting_w)) is not None:
                self._measure_all(setting, set_to, self._expected(settings))
            self._measure_hot_again(set_to)
            for lock in self._locks.values():
                lock.finish()
            if power_w is None:
                return {}
            lowest = min(next(iter(self._rows.values())))
            set_to(lowest)
            lowest_w = self.meter.measure_blocking_w(self.stage.block)
            assert lowest_w is not None
            return {settings[0]: power_w, lowest: lowest_w}

    def _measure_all(self, setting: int, set_to: Callable[[int], None], expected: int) -> None:
        """Measure the kinds that are missing at `setting`, or all of them again."""
        begin_s = self.gpu.now_s()
        set_to(setting)
        self.meter.cool_down()
        missing = [kind for kind in self.stage.runs if setting not in self._rows[kind]]
        for kind in missing or self.stage.runs:
            row = self._measure(kind, setting)
            earlier = self._rows[kind].get(setting)
            self._add(kind, row if earlier is None else merge(earlier, row), expected)
        self._longest_s = max(self._longest_s, self.gpu.now_s() - begin_s)

    def _observe(self) -> Mapping[int, float]:
        self._heat()
        power_w = self.meter.measure_blocking_w(self.stage.block)
        for kind in self.stage.runs:
            if not self._rows[kind]:
                self.meter.cool_down()
                self._add(kind, self._measure(kind, None), 1)
        self._measure_hot_again(None)
        clock_mhz = max(next(iter(self._rows.values())))
        return {} if power_w is None else {clock_mhz: power_w}

    def _measure_hot_again(self, set_to: Callable[[int], None] | None) -> None:
        """Measure rows again for which the GPU was too hot; None instead of `set_to` if nothing is
        set.

        Raises:
            GpuError: If it is too hot again, unless such rows are allowed.
        """
        for setting in sorted({row.clock_mhz for _, row in _hot(self._rows)}, reverse=True):
            if set_to is not None:
                set_to(setting)
            self.meter.cool_down()
            # A kind that includes another one was hot if that one was, and comes after it.
            for kind in [kind for kind, row in _hot(self._rows) if row.clock_mhz == setting]:
                row = self._measure(kind, setting if set_to is not None else None)
                del self._rows[kind][setting]
                self._add(kind, row, len(self._rows[kind]) + 1)
        hot = list(_hot(self._rows))
        if hot and not self.settings.allow_hot:
            reasons = sorted(
                TRANSIENT_REASONS.intersection(
                    *(row.evidence.throttle for _, row in hot if row.evidence)
                )
            )
            raise GpuError(
                f"stage {self.number}: the GPU was too hot ({', '.join(reasons)}) when these rows "
                f"were measured twice: {_row_names(hot, self.settings.control)}; cool it and go "
                "on with --resume, or keep the rows with --allow-hot (in Python "
                "SweepSettings(allow_hot=True))"
            )

    def _next_setting(self, settings: Sequence[int], waiting_w: float) -> int | None:
        complete = set.intersection(*(set(table) for table in self._rows.values()))
        incomplete = {setting for table in self._rows.values() for setting in table} - complete
        if incomplete:
            return max(incomplete)
        if self.settings.full:
            return next((setting for setting in settings if setting not in complete), None)
        if self.settings.has_goal and len(complete) >= _LEAST_SETTINGS:
            setting = self._next_for_goal(settings, waiting_w)
        else:
            setting = next_setting(
                settings, self._rows, waiting_w, clocks=self.settings.control == "clock"
            )
        # GPUs that share the stage measure the same setting, whatever their clocks and the rounding
        # say.
        return self.group.gather(setting)[0]

    def _next_for_goal(self, settings: Sequence[int], waiting_w: float) -> int | None:
        """Return the setting to measure, perhaps again; None when the time is up or the saving
        is known.
        """
        from perseus_planner.profiler.doubt import find_doubt

        control, within = self.settings.control, self.settings.saving_within
        if self._is_late():
            return None
        if (
            coarse := next_of_descent(settings, self._rows, waiting_w, clocks=control == "clock")
        ) is not None:
            return coarse
        doubt = find_doubt(settings, self._rows, waiting_w, control=control, stages=self.stages)
        self._doubt = doubt.share
        if within is not None and doubt.share <= within:
            return None
        another = next_setting(settings, self._rows, waiting_w, clocks=control == "clock")
        return doubt.setting if another is None else another

    def _is_late(self) -> bool:
        """Return whether another setting would take longer than there is time, less that for the
        blocking power.
        """
        if self.settings.minutes is None:
            return False
        spent_s = self.gpu.now_s() - self._begin_s
        return spent_s + self._longest_s + self.meter.window_s > 60 * self.settings.minutes

    def _measure(self, kind: str, setting: int | None) -> Measurement:
        timed = self.stage.runs[kind]
        earlier = self._rows[kind].get(setting) if setting is not None else None
        again = (
            "" if earlier is None or earlier.evidence is None else f" {earlier.evidence.windows}"
        )
        random = Random(f"{self.settings.seed} {self.number} {kind} {setting}{again}")
        row = self.meter.measure_row(timed.run, setting, random)
        self._check_lock(kind, row, setting, self.meter.achieved_mhz)
        if timed.includes is None:
            return row
        parts = self._rows[timed.includes]
        part = next(iter(parts.values())) if setting is None else parts[setting]
        try:
            return subtract(row, part)
        except GpuError as error:
            raise GpuError(f"stage {self.number}, {kind} with {timed.includes}: {error}") from None

    def _check_lock(
        self, kind: str, row: Measurement, setting: int | None, own_mhz: float | None
    ) -> None:
        """Refuse a lock without effect; of a kept row, only the mean clock of the stage's GPUs
        is known.
        """
        if self.settings.control == "clock" and setting is not None and row.evidence is not None:
            achieved_mhz = row.evidence.achieved_mhz if own_mhz is None else own_mhz
            self._locks[kind].add(setting, achieved_mhz, row.evidence.throttle)

    def _add(self, kind: str, row: Measurement, expected: int) -> None:
        self._rows[kind][row.clock_mhz] = row
        if self.kept is not None:
            self.kept.add(kind, row)
        if self.progress is not None:
            done = sum(map(len, self._rows.values()))
            self.progress(done, max(done, expected * len(self._rows)))

    def _conditions(self, blocking_w: Mapping[int, float]) -> dict[str, str]:
        gpu, control = self.gpu, self.settings.control
        conditions = {
            "driver": gpu.driver,
            "measured on": gpu.text,
            "windows": f"{self.meter.window_s:g} s",
            "energy counter step": f"{self.meter.counter.interval_s:.3f} s",
        }
        if blocking_w:
            conditions["blocking power"] = ", ".join(
                f"{power_w:.1f} W at {setting} {unit_of(control)}"
                for setting, power_w in blocking_w.items()
            )
        if self._doubt is not None:
            conditions["saving known within"] = f"{self._doubt:.2%}"
        if hot := list(_hot(self._rows)):
            conditions["measured while too hot"] = (
                f"{_row_names(hot, control)}; cool the GPU and measure again"
            )
        if (replicas := self.group.replicas)[1:]:
            conditions["replicas"] = f"{len(replicas)}, in step"
            if slow := self.meter.slow:
                conditions["slow replicas"] = _slow_text(replicas, slow)
        if gpu.warnings():
            conditions["warnings"] = " ".join(gpu.warnings())
        return conditions

    def _expected(self, settings: Sequence[int]) -> int:
        """Return how many settings will be measured, approximately."""
        return len(settings) if self.settings.full else min(len(settings), MAX_SETTINGS)

    def _heat(self) -> None:
        # Also when resuming: the missing rows are measured on a GPU as warm as it was for the
        # others.
        self.meter.heat(next(iter(self.stage.runs.values())).run)


def _hot(rows: RowTable) -> Iterator[tuple[str, Measurement]]:
    """Yield the kinds and rows for which heat or the power supply slowed the GPU down."""
    for kind, table in rows.items():
        for row in table.values():
            if row.evidence is not None and TRANSIENT_REASONS.intersection(row.evidence.throttle):
                yield kind, row


def _slow_text(replicas: Sequence[str], slow: Mapping[int, float]) -> str:
    names = ", ".join(
        f"{replicas[replica]} by up to {share:.1%}" for replica, share in slow.items()
    )
    if len(replicas) == 2:
        return (
            f"{names}, and its times are those of the stage, as of two replicas neither is known "
            "to be right"
        )
    return f"{names} against the median of {len(replicas)}, and left out of these rows"


def _row_names(rows: Sequence[tuple[str, Measurement]], control: str) -> str:
    return ", ".join(f"{kind} at {row.clock_mhz} {unit_of(control)}" for kind, row in rows)


def _subject(
    gpu: Gpu, stage: Stage, number: int, settings: SweepSettings, group: GpuGroup
) -> dict[str, str]:
    """Return what two sweeps must agree in to share rows."""
    kinds = [
        kind if run.includes is None else f"{kind} less {run.includes}"
        for kind, run in stage.runs.items()
    ]
    return {
        "gpu": gpu.uuid,
        "driver": gpu.driver,
        "stage": str(number),
        "kinds": ", ".join(kinds),
        "gpus of the stage": str(group.size * len(group.replicas)),
        "control": settings.control,
        "settings": "all" if settings.full else "as few as a plan needs",
        "window": f"{settings.window_s!r} s",
        "cool-down": f"{settings.cool_down_s!r} s",
        "seed": str(settings.seed),
    }
