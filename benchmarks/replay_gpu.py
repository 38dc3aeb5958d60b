"""A GPU in virtual time that replays the measured profile of one stage, with noise, outliers and
a counter interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from random import Random

from perseus_planner import Profile
from perseus_planner.base.errors import GpuNotSupported
from perseus_planner.profiler.stage import Stage, TimedRun
from perseus_planner.profiles.measurement import Measurement


class ReplayGpu:
    """A GPU on which each computation takes the time and energy of the profile at the current
    clock.

    Args:
        profile: The profile to replay.
        stage: The stage of it that this GPU runs.
        noise: Relative standard deviation of the time, and of the energy, of everything that runs
            between two synchronisations. Repetitions do not average it away.
        outliers: The fraction of such windows that are outliers, which take 5 to 50 % more.
        step_s: The update interval of the energy counter, seconds.
        seed: Seed of the noise.

    Attributes:
        locked_mhz: The locked clock; None if no clock is locked.
        windows: The number of synchronisations.
    """

    origin = "simulated"
    driver = "replay"
    keeps_settings = False

    def __init__(
        self,
        profile: Profile,
        stage: int,
        noise: float = 0.0,
        outliers: float = 0.0,
        step_s: float = 0.1,
        seed: int = 0,
    ) -> None:
        self._rows: Mapping[str, Mapping[int, Measurement]] = {
            key.name: {row.clock_mhz: row for row in rows}
            for key, rows in profile.measurements.items()
            if key.stage == stage
        }
        self._blocking_w = profile.blocking_w(stage)
        self._noise, self._outliers, self._step_s, self._random = (
            noise,
            outliers,
            step_s,
            Random(seed),
        )
        self._now_s = self._random.uniform(0.0, step_s)
        self._energy_j = self._shown_j = 0.0
        self._factors = (1.0, 1.0)
        self.locked_mhz: int | None = None
        self.windows = 0
        self.name = self.uuid = self.text = f"replay of {profile.gpu} stage {stage}"
        self.supported_clocks_mhz = tuple(next(iter(self._rows.values())))
        self.power_limits_w = (0.0, 0.0)

    def stage(self) -> Stage:
        """Return the stage that runs on this GPU; it blocks at the profile's blocking power."""
        runs = {kind: TimedRun(partial(self._run, kind)) for kind in self._rows}
        return Stage(
            runs,
            self._synchronize,
            lambda duration_s: self._spend(duration_s, self._blocking_w * duration_s),
        )

    def _run(self, kind: str, repetitions: int) -> None:
        row = self._rows[kind][self.clock_mhz()]
        longer, dearer = self._factors
        self._spend(repetitions * row.time_s * longer, repetitions * row.energy_j * dearer)

    def _synchronize(self) -> None:
        """Draw one deviation for everything that runs until the next synchronisation."""
        self.windows += 1
        outlier = self._random.uniform(1.05, 1.5) if self._random.random() < self._outliers else 1.0
        self._factors = (
            outlier * (1 + self._noise * self._random.gauss(0, 1)),
            outlier * (1 + self._noise * self._random.gauss(0, 1)),
        )

    def _spend(self, time_s: float, energy_j: float) -> None:
        end_s = self._now_s + time_s
        last_update_s = self._step_s * math.floor(end_s / self._step_s)
        if last_update_s > self._now_s:
            self._shown_j = self._energy_j + energy_j * (last_update_s - self._now_s) / time_s
        self._now_s, self._energy_j = end_s, self._energy_j + energy_j

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock a clock of the profile."""
        self.locked_mhz = clock_mhz

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`."""
        self.locked_mhz = None

    def energy_j(self) -> float:
        """Return the energy counter, which is updated at intervals."""
        return self._shown_j

    def power_w(self) -> float:
        """Return the blocking power, which this GPU draws at rest too."""
        return self._blocking_w

    def clock_mhz(self) -> int:
        """Return the locked clock, or the highest one; the profile does not have the achieved
        clock.
        """
        return self.locked_mhz or self.supported_clocks_mhz[0]

    def temperature_c(self) -> float:
        """Return a constant."""
        return 50.0

    def throttle_reasons(self) -> frozenset[str]:
        """Return no reasons; the profile has none."""
        return frozenset()

    def throttled_s(self) -> Mapping[str, float]:
        """Return no times; the profile has none."""
        return {}

    def now_s(self) -> float:
        """Return the virtual time, seconds."""
        return self._now_s

    def wait(self, duration_s: float) -> None:
        """Rest for `duration_s` seconds."""
        self._spend(duration_s, self._blocking_w * duration_s)

    def warnings(self) -> tuple[str, ...]:
        """Return no warnings."""
        return ()

    def power_limit_w(self) -> float:
        """Raise an error: a profile over clocks has no power limit."""
        raise GpuNotSupported(f"{self.name} has no power limit; sweep its clocks")

    def set_power_limit_w(self, limit_w: float) -> None:
        """Raise an error: a profile over clocks has no power limit."""
        self.power_limit_w()

    def reset_power_limit(self) -> None:
        """Do nothing: there is no power limit."""

    def close(self) -> None:
        """Do nothing."""
