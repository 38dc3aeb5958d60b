"""What a job's GPUs cost at each clock, learnt from what its ranks observe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from perseus_planner.base.errors import ProfileError, UsageError
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runtime.autopilot.job import time_at_last_clock
from perseus_planner.runtime.autopilot.planning import Costs
from perseus_planner.runtime.autopilot.power import PowerRows
from perseus_planner.runtime.autopilot.times import TimeRows, TimeTables

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.runtime.autopilot.job import AutopilotJob, RankObservation

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

Key: TypeAlias = "tuple[int, str]"
_OUTLIER = 0.01  #: relative difference of a GPU's times from its rows that is not noise
_SURE = (
    0.0025  #: relative standard error of rows from which it is told that a GPU has become slower
)
_FEW = 3  #: computations of a row, or of a GPU, that say nothing of the others
_PRIOR_DOUBT = 0.03  #: relative standard error of the energies of a profile that is given
_PRIOR_COUNT = 2.0  #: how many observations one of its times counts for


class Learner:
    """Learns rows: the time and power of each class, (stage, kind), at each clock.

    GPUs of data-parallel pipelines share the rows of their stage.

    Args:
        job: the job.
        keys: (stage, kind) of each class, by number.
        class_rank: (classes,) the rank of each class.
        prior: a profile whose rows count as measured until iterations tell otherwise.
        learn: whether rows that were not measured may be planned on.
    """

    def __init__(
        self,
        job: AutopilotJob,
        keys: Sequence[Key],
        class_rank: Integers,
        prior: Profile | None,
        *,
        learn: bool,
    ) -> None:
        self._learn = learn
        self.job, self._keys, self._class_rank, self._prior = job, keys, class_rank, prior
        gpus = job.pipelines * job.ranks
        self._class_of = {key: i for i, key in enumerate(keys)}
        kind_names = sorted({kind for _, kind in keys})
        kinds, stages = [kind_names.index(kind) for _, kind in keys], [stage for stage, _ in keys]
        self._number = {clock: i for i, clock in enumerate(job.clocks_mhz)}
        self.times = TimeRows(job.clocks_mhz, kinds, gpus)
        self.powers = PowerRows(job.clocks_mhz, kinds, stages, class_rank.tolist(), gpus)
        computed = len(job.iteration.keys)
        self._programs = [
            [self._class_of[job.iteration.keys[place]] for place in program if place < computed]
            for program in job.iteration.programs
        ]
        self._tables: TimeTables | None = None
        for row, clock, measurement in self._prior_rows():
            self.times.add(row, clock, measurement.time_s, _PRIOR_COUNT)

    @property
    def is_ready(self) -> bool:
        """Whether every class was measured at full clocks, and energy was observed."""
        return bool(self.times.count[:, 0].all()) and self.powers.top_w > 0.0

    def observe(self, observations: Sequence[RankObservation]) -> None:
        """Learn from one iteration.

        Raises:
            UsageError: If what a rank observed does not fit its program.
        """
        for seen in observations:
            if seen.computations and len(seen.computations) != len(self._programs[seen.rank]):
                raise UsageError(
                    f"observations, rank {seen.rank}: has {len(seen.computations)} computations "
                    f"and its program {len(self._programs[seen.rank])}; give one for each, or none"
                )
        unthrottled = [
            (seen, *self._rows_of(seen)) for seen in observations if not seen.throttled_s
        ]
        for seen, rows, _ in unthrottled:
            self._learn_times(seen, rows)
        if not self.powers.top_w:
            self._start_powers([(seen, seconds) for seen, _, seconds in unthrottled])
        for seen, _, seconds in unthrottled:
            if self.powers.top_w and seen.energy_j is not None and seen.computations:
                gpu = seen.pipeline * self.job.ranks + seen.rank
                waiting_s = max(0.0, seen.time_s - float(seconds.sum()))
                self.powers.add(gpu, seconds, waiting_s, seen.energy_j, seen.energy_step_s)
        self._tables = None

    def _rows_of(self, seen: RankObservation) -> tuple[list[tuple[int, int, float]], Floats]:
        """Return the (class, clock, seconds) that a rank's computations tell, and the seconds at
        each row.
        """
        factor = self.times.factor[seen.pipeline * self.job.ranks + seen.rank]
        rows, seconds = [], np.zeros((len(self._class_of), len(self.job.clocks_mhz)))
        for row, computation in zip(self._programs[seen.rank], seen.computations, strict=False):
            if computation.clock_mhz not in self._number:
                continue
            duration_s, first = (
                computation.end_s - computation.begin_s,
                self._number[computation.clock_mhz],
            )
            last = self._number.get(computation.changed_mhz or computation.clock_mhz)
            before_s = (
                duration_s
                if computation.change_s is None
                else min(max(computation.change_s - computation.begin_s, 0.0), duration_s)
            )
            seconds[row, first] += before_s
            if last is None:
                continue
            seconds[row, last] += duration_s - before_s
            expected_s = {}
            if self.times.count[row, first]:
                expected_s[computation.clock_mhz] = float(
                    np.exp(self.times.mean[row, first]) * factor
                )
            told = time_at_last_clock(computation, expected_s)
            if told is not None:
                rows.append((row, self._number[told[0]], told[1]))
        return rows, seconds

    def _learn_times(self, seen: RankObservation, rows: list[tuple[int, int, float]]) -> None:
        """Count times, after it was found whether the GPU has become slower or faster as a
        whole.
        """
        gpu, times = seen.pipeline * self.job.ranks + seen.rank, self.times
        misses = [
            math.log(time_s / times.factor[gpu]) - float(times.mean[row, clock])
            for row, clock, time_s in rows
            if times.count[row, clock] >= max(2.0, (times.noise / _SURE) ** 2)
        ]
        if len(misses) >= _FEW:
            miss = float(np.median(misses))
            if abs(miss) > max(_OUTLIER, 4 * times.noise / math.sqrt(len(misses))):
                times.factor[gpu] *= math.exp(miss)
        by_row: dict[tuple[int, int], list[float]] = {}
        for row, clock, time_s in rows:
            by_row.setdefault((row, clock), []).append(time_s / float(times.factor[gpu]))
        for (row, clock), scaled_times_s in by_row.items():
            # A row that changed while others did not, as after a change of the power limit, is
            # learnt anew.
            miss = float(np.median(np.log(scaled_times_s))) - float(times.mean[row, clock])
            count = float(times.count[row, clock])
            limit = max(
                _OUTLIER, 4 * times.noise * math.sqrt(1 / len(scaled_times_s) + 1 / max(count, 1.0))
            )
            if count >= _FEW <= len(scaled_times_s) and abs(miss) > limit:
                times.forget(row, clock)
            for scaled_s in scaled_times_s:
                times.add(row, clock, scaled_s)

    def _start_powers(self, found: Sequence[tuple[RankObservation, Floats]]) -> None:
        counted = [
            (seen, seconds) for seen, seconds in found if seen.energy_j and seen.computations
        ]
        if not counted:
            return
        busy_s = float(sum(seconds.sum() for _, seconds in counted))
        waiting_s = sum(seen.time_s for seen, _ in counted) - busy_s
        self.powers.start(sum(seen.energy_j or 0.0 for seen, _ in counted), busy_s, waiting_s)
        for row, clock, measurement in self._prior_rows():
            self.powers.add_row(row, clock, measurement.energy_j / measurement.time_s, _PRIOR_DOUBT)

    def _prior_rows(self) -> Iterator[tuple[int, int, Measurement]]:
        """Yield class, clock and measurement of each row of the prior that the job has."""
        for key, measurements in () if self._prior is None else self._prior.measurements.items():
            for measurement in measurements:
                if key in self._class_of and measurement.clock_mhz in self._number:
                    yield self._class_of[key], self._number[measurement.clock_mhz], measurement

    def planned_share(self) -> float:
        """Return the share of all rows that may be planned on."""
        return float(np.isfinite(self.costs("plan")[0].time_s).mean())

    def costs(
        self, kind: Literal["mean", "plan", "safe", "doubt"] = "mean", optimism: float = 0.0
    ) -> list[Costs]:
        """Return the costs for each pipeline."""
        if self._tables is None:
            self._tables = self.times.tables(between=self._learn)
        tables = self._tables
        table: Floats = getattr(tables, f"{kind}_s")
        power_w, error_w, waiting_w = (
            self.powers.tables() if self.powers.top_w else _unknown_power(table)
        )
        power_w = np.maximum(power_w - optimism * error_w, 0.2 * power_w)
        ranks, all_costs = self.job.ranks, []
        for pipeline in range(self.job.pipelines):
            factor = self.times.factor[pipeline * ranks : (pipeline + 1) * ranks][self._class_rank]
            all_costs.append(Costs(table * factor[:, None], power_w, waiting_w))
        return all_costs

    def profile(self) -> Profile:
        """Return what was learnt as a profile: measured rows, with standard errors.

        Times are those of the first pipeline's GPUs.

        Raises:
            UsageError: If not every stage was observed at full clocks yet.
        """
        if not self.is_ready:
            raise UsageError(
                "the autopilot has not observed all stages at full clocks; there is no profile yet"
            )
        power_w, error_w, waiting_w = self.powers.tables()
        table = {}
        for key, row in self._class_of.items():
            factor = float(self.times.factor[self._class_rank[row]])
            rows = []
            for clock in np.flatnonzero(self.times.known[row]).tolist():
                count = float(self.times.count[row, clock])
                time_s = math.exp(float(self.times.mean[row, clock])) * factor
                time_error_s = time_s * self.times.noise / math.sqrt(count)
                watts, doubt_w = float(power_w[row, clock]), float(error_w[row, clock])
                mhz = self.job.clocks_mhz[clock]
                evidence = Evidence(mhz, time_error_s, doubt_w * time_s, max(1, round(count)), 0.0)
                rows.append(Measurement(mhz, time_s, watts * time_s, evidence))
            table[key] = tuple(rows)
        ranks = self.job.iteration.schedule.stage_ranks
        stages = range(1 + max(stage for stage, _ in table))
        try:
            return Profile(
                table,
                tuple(float(waiting_w[ranks[stage]]) for stage in stages),
                gpu=self.job.gpu,
                gpus_per_stage=self.job.gpus_per_stage,
                clock_change=self.job.clock_change,
                conditions={"learnt": "while training"},
            )
        except ProfileError as error:  # pragma: no cover
            raise AssertionError(
                f"a learnt profile is refused: {error}; please report this"
            ) from error


def _unknown_power(table: Floats) -> tuple[Floats, Floats, Floats]:
    return np.ones_like(table), np.zeros_like(table), np.zeros(len(table))
