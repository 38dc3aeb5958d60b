"""A GPU in virtual time that plays back the measured profile of one stage, with noise, outliers and counter steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from random import Random

from perseus_planner import Profile
from perseus_planner.errors import GpuNotSupported
from perseus_planner.profiler.stage import Stage, TimedRun
from perseus_planner.profiles.measurement import Measurement


class ReplayGpu:
    """Whatever runs takes the seconds and joules of the profile at the clock that is set.

    Args:
        profile: whose stage is played.
        stage: its number.
        noise: relative standard deviation of the time, and of the energy, of all that runs between two
            synchronisations: no repetition averages it away.
        outliers: how often one such window is an outlier, which takes 5 to 50 % more.
        step_s: how often the energy counter moves, seconds.
        seed: of the noise.

    Attributes:
        locked_mhz: the clock that is set; None where none is.
        windows: how many windows were run.
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
            kind: {row.clock_mhz: row for row in rows}
            for (of, kind), rows in profile.measurements.items()
            if of == stage
        }
        self._blocking_w = profile.blocking_w(stage)
        self._noise, self._outliers, self._step_s, self._random = noise, outliers, step_s, Random(seed)
        self._now_s = self._random.uniform(0.0, step_s)
        self._energy_j = self._shown_j = 0.0
        self._factors = (1.0, 1.0)
        self.locked_mhz: int | None = None
        self.windows = 0
        self.name = self.uuid = self.text = f"replay of {profile.gpu} stage {stage}"
        self.supported_clocks_mhz = tuple(next(iter(self._rows.values())))
        self.power_limits_w = (0.0, 0.0)

    def stage(self) -> Stage:
        """The stage that runs on it, which blocks at the profile's blocking power."""
        timed = {kind: TimedRun(partial(self._run, kind)) for kind in self._rows}
        return Stage(
            timed, self._synchronize, lambda duration_s: self._spend(duration_s, self._blocking_w * duration_s)
        )

    def _run(self, kind: str, repetitions: int) -> None:
        row = self._rows[kind][self.clock_mhz()]
        longer, dearer = self._factors
        self._spend(repetitions * row.time_s * longer, repetitions * row.energy_j * dearer)

    def _synchronize(self) -> None:
        """What runs until the next one shares one deviation."""
        self.windows += 1
        outlier = self._random.uniform(1.05, 1.5) if self._random.random() < self._outliers else 1.0
        self._factors = (
            outlier * (1 + self._noise * self._random.gauss(0, 1)),
            outlier * (1 + self._noise * self._random.gauss(0, 1)),
        )

    def _spend(self, time_s: float, energy_j: float) -> None:
        end_s = self._now_s + time_s
        last_move_s = self._step_s * math.floor(end_s / self._step_s)
        if last_move_s > self._now_s:
            self._shown_j = self._energy_j + energy_j * (last_move_s - self._now_s) / time_s
        self._now_s, self._energy_j = end_s, self._energy_j + energy_j

    def set_clock_mhz(self, clock_mhz: int) -> None:
        """Lock a clock of the profile."""
        self.locked_mhz = clock_mhz

    def reset_clocks(self) -> None:
        """Undo `set_clock_mhz`."""
        self.locked_mhz = None

    def energy_j(self) -> float:
        """The counter, which moves in steps."""
        return self._shown_j

    def power_w(self) -> float:
        """At rest it draws its blocking power."""
        return self._blocking_w

    def clock_mhz(self) -> int:
        """What is set; the profile does not say what was achieved."""
        return self.locked_mhz or self.supported_clocks_mhz[0]

    def temperature_c(self) -> float:
        """Always the same."""
        return 50.0

    def throttle_reasons(self) -> frozenset[str]:
        """None: the profile does not say."""
        return frozenset()

    def throttled_s(self) -> Mapping[str, float]:
        """None is counted."""
        return {}

    def now_s(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def wait(self, duration_s: float) -> None:
        """Rest for so long."""
        self._spend(duration_s, self._blocking_w * duration_s)

    def warnings(self) -> tuple[str, ...]:
        """None."""
        return ()

    def power_limit_w(self) -> float:
        """A profile over clocks has none."""
        raise GpuNotSupported(f"{self.name} has no power limit; sweep its clocks")

    def set_power_limit_w(self, limit_w: float) -> None:
        """A profile over clocks has none."""
        self.power_limit_w()

    def reset_power_limit(self) -> None:
        """There is none to reset."""

    def close(self) -> None:
        """Nothing is to be given back."""
