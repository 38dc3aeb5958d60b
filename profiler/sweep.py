"""The sweep: every kind of a stage at one setting after the other, from the top down, at as few as a plan needs."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, UsageError
from perseus_planner.profiler.blocking import blocking_power_w
from perseus_planner.profiler.choosing import MOST_SETTINGS, next_setting
from perseus_planner.profiler.estimates import less
from perseus_planner.profiles.csv_file import CONTROLS
from perseus_planner.quantities import INDEX, TIME, WAIT, check_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.rows import Rows
    from perseus_planner.profiler.stage import Group, Progress, Stage
    from perseus_planner.profiler.windows import Windows
    from perseus_planner.profiles.measurement import Measurement

_LIMIT_STEP_W = 5


@dataclass(frozen=True)
class SweepSettings:
    """How a stage is measured.

    Attributes:
        control: what is set for each row: "clock", "power-limit", or "observed": nothing, one row of each kind.
        full: measure at every setting; otherwise at as few as a plan needs.
        window_s: the least length of one measuring window, seconds.
        cool_down_s: the longest wait for the GPU to cool down before each setting, seconds.
        seed: chooses when, after a step of the energy counter, each window begins.

    Raises:
        UsageError: a value is not of that kind.
    """

    control: str = "clock"
    full: bool = False
    window_s: float = 5.0
    cool_down_s: float = 5.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.control not in CONTROLS:
            raise UsageError(f"control: {self.control!r} is unknown; choose one of: {', '.join(CONTROLS)}")
        check_fields(self, {"window_s": TIME, "cool_down_s": WAIT, "seed": INDEX})


@dataclass(frozen=True)
class Swept:
    """What a sweep found.

    Attributes:
        rows: kind -> setting -> its row.
        blocking_w: setting -> what the GPUs drew while they were blocked, watts; empty where they never are.
    """

    rows: Mapping[str, Mapping[int, Measurement]]
    blocking_w: Mapping[int, float]


class Sweep:
    """One stage on one GPU, or on one of the GPUs that share it.

    Args:
        gpu: the GPU.
        stage: what is measured.
        number: of the stage.
        settings: how.
        group: the GPUs that share the stage.
        windows: what measures a row.
        kept: where finished rows are kept; None: nowhere.
        finished: kind -> setting -> the row that an earlier sweep left; the same for all of a group.
        progress: told after every row.
    """

    def __init__(
        self,
        gpu: Gpu,
        stage: Stage,
        number: int,
        settings: SweepSettings,
        group: Group,
        windows: Windows,
        kept: Rows | None,
        finished: Mapping[str, Mapping[int, Measurement]],
        progress: Progress | None,
    ) -> None:
        self._gpu, self._stage, self._number, self._settings, self._group = gpu, stage, number, settings, group
        self._windows, self._kept, self._progress = windows, kept, progress
        self._rows = {kind: dict(finished.get(kind, {})) for kind in stage.timed}

    def run(self) -> Swept:
        """Measure what is missing; on return, by whatever way, nothing is set on the GPU.

        Raises:
            GpuError: the GPU cannot be read or set.
            ProfileError: a row cannot be kept.
        """
        if self._settings.control == "observed":
            return self._observed()
        with _control(self._gpu, self._settings.control) as (own, set_to):
            settings = _common(self._group.gathered(own))
            set_to(settings[0])
            self._warm_through()
            power_w = blocking_power_w(self._windows, self._stage)
            waiting_w = self._resting_w() if power_w is None else power_w
            while (setting := self._next(settings, waiting_w)) is not None:
                set_to(setting)
                self._windows.cool_down()
                for kind in self._stage.timed:
                    if setting not in self._rows[kind]:
                        self._add(kind, self._measured(kind, setting), self._expected(settings))
            if power_w is None:
                return self._swept({})
            lowest = min(next(iter(self._rows.values())))
            set_to(lowest)
            lowest_w = blocking_power_w(self._windows, self._stage)
            assert lowest_w is not None
            return self._swept({settings[0]: power_w, lowest: lowest_w})

    def _observed(self) -> Swept:
        self._warm_through()
        power_w = blocking_power_w(self._windows, self._stage)
        for kind in self._stage.timed:
            if not self._rows[kind]:
                self._windows.cool_down()
                self._add(kind, self._measured(kind, None), 1)
        clock_mhz = max(next(iter(self._rows.values())))
        return self._swept({} if power_w is None else {clock_mhz: power_w})

    def _next(self, settings: Sequence[int], waiting_w: float) -> int | None:
        """The setting at which something is to be measured next."""
        whole = set.intersection(*(set(table) for table in self._rows.values()))
        begun = {setting for table in self._rows.values() for setting in table} - whole
        if begun:
            return max(begun)
        if self._settings.full:
            return next((setting for setting in settings if setting not in whole), None)
        return next_setting(settings, self._rows, waiting_w, clocks=self._settings.control == "clock")

    def _measured(self, kind: str, setting: int | None) -> Measurement:
        timed = self._stage.timed[kind]
        random = Random(f"{self._settings.seed} {self._number} {kind} {setting}")
        row = self._windows.row(timed.run, setting, random)
        if timed.less is None:
            return row
        parts = self._rows[timed.less]
        part = next(iter(parts.values())) if setting is None else parts[setting]
        try:
            return less(row, part)
        except GpuError as error:
            raise GpuError(f"stage {self._number}, {kind} with {timed.less}: {error}") from None

    def _add(self, kind: str, row: Measurement, expected: int) -> None:
        self._rows[kind][row.clock_mhz] = row
        if self._kept is not None:
            self._kept.keep(kind, row)
        if self._progress is not None:
            done = sum(map(len, self._rows.values()))
            self._progress(done, max(done, expected * len(self._rows)))

    def _swept(self, blocking_w: Mapping[int, float]) -> Swept:
        done = sum(map(len, self._rows.values()))
        if self._progress is not None:
            self._progress(done, done)
        return Swept(self._rows, blocking_w)

    def _expected(self, settings: Sequence[int]) -> int:
        """How many settings will be measured, about."""
        if self._settings.full:
            return len(settings)
        return min(len(settings), MOST_SETTINGS)

    def _warm_through(self) -> None:
        # Also where rows were kept: what is measured then is measured as it would have been.
        self._windows.warm_through(next(iter(self._stage.timed.values())).run)

    def _resting_w(self) -> float:
        return math.fsum(self._group.gathered(self._windows.counter.at_rest().rest_w))


@contextmanager
def _control(gpu: Gpu, control: str) -> Iterator[tuple[tuple[int, ...], Callable[[int], None]]]:
    """What `control` can be set to, highest first, and what sets it; it is reset on leaving, by whatever way."""
    set_to: Callable[[int], None]
    if control == "clock":
        settings, set_to, reset = gpu.supported_clocks_mhz, gpu.set_clock_mhz, gpu.reset_clocks
    else:
        least_w, top_w = gpu.power_limits_w[0], math.floor(gpu.power_limit_w())
        settings = tuple(range(top_w, math.ceil(least_w) - 1, -_LIMIT_STEP_W))
        set_to, reset = gpu.set_power_limit_w, gpu.reset_power_limit
    try:
        yield settings, set_to
    finally:
        reset()


def _common(settings: Sequence[Sequence[int]]) -> list[int]:
    """What all GPUs of a group can be set to, highest first."""
    common = sorted(set.intersection(*map(set, settings)), reverse=True)
    if not common:
        raise GpuError("the GPUs of a group have no setting in common; give a stage GPUs of one kind")
    return common
