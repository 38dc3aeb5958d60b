"""What a job's GPUs cost at each clock, learnt from what its ranks observe."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from perseus_planner.base.errors import ProfileError, UsageError
from perseus_planner.extensions.autopilot.job import time_at_last_clock
from perseus_planner.extensions.autopilot.planning import Costs
from perseus_planner.extensions.autopilot.power_rows import PowerRows
from perseus_planner.extensions.autopilot.time_rows import TimeRows, TimeTables
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.job import (
        AutopilotJob,
        ComputationObservation,
        RankObservation,
    )
    from perseus_planner.profiles.keys import Key

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

# All by hand: numbers 22 and 31 of `benchmarks/run.py` show what the autopilot saves with them.
_SETTLED = 0.006  #: relative standard error of a row below which it is not tried again
_OUTLIER = 0.01  #: relative difference of a GPU's times from its rows that is not noise
_FAR_OVER = 0.05  #: how far over the physical bound a time is doubted
#: share by which all rows follow what iterations have in common, unless it is an outlier: then all
_FOLLOWS = 0.02
_UNKNOWN = 0.05  #: share of a rank's time whose clocks need not be known
_TOP_SHARE = 0.2  #: share by which lower clocks follow what they miss beside full ones
_TOP_MISS = 0.005  #: what they usually miss beside these, relative
_TOPS = 6  #: computations at full clocks that tell what an iteration has in common
#: computations of a row or a GPU, or iterations of a GPU; fewer say nothing of others
_FEW = 3
_LAST = 12  #: as many as `_FEW` has, where a few times are much longer
_PRIOR_DOUBT = 0.03  #: relative standard error of the energies of a profile that is given
_PRIOR_COUNT = 3  #: how many observations one of its times counts for


class _Time(NamedTuple):
    """What one computation tells of its row."""

    gpu: int  #: number of the GPU that ran it
    pipeline: int
    microbatch: int
    row: int  #: its class, in its mode
    clock: int  #: number of its clock
    time_s: float  #: what all of it takes at that clock


class _Times(NamedTuple):
    """What the computations of an iteration tell: (times,) each."""

    gpu: Integers  #: number of the GPU that ran it
    work: Integers  #: equal for those of one microbatch of one pipeline
    row: Integers  #: its class, in its mode
    clock: Integers  #: number of its clock
    #: logarithm of its seconds, in which factors of a GPU, an iteration and a row add up; without
    #: the factor of the GPU.
    log_s: Floats


class _GpuMisses(NamedTuple):
    """By how much a GPU seems to be slower or faster than others, iteration after iteration."""

    misses: tuple[float, ...]  #: of each iteration, a logarithm
    computations: int  #: how many of them told the last one


class _Split(NamedTuple):
    """A computation, split where its clock changed; without a change all of it ran at the first
    clock. Clocks are numbers, and -1 where they are not known.
    """

    row: int  #: its class, in its mode
    first: int  #: the clock at its begin
    first_s: float  #: seconds at that
    last: int  #: the clock at its end
    last_s: float  #: seconds at that

    @property
    def duration_s(self) -> float:
        """Seconds of all of it."""
        return self.first_s + self.last_s

    @property
    def is_known(self) -> bool:
        """Whether it is known at which clocks it ran."""
        return min(self.first, self.last) >= 0


class Learner:
    """Learns rows: the time and power of each class, a `Key`, at each clock.

    GPUs of data-parallel pipelines share the rows of their stage. Where the job has modes, each
    class has one more row at each clock: rows are those of all classes in the first mode, then in
    the next one. What is told of them is told by option, mode and clock together, as the search has
    them: (classes, options).

    Args:
        job: the job.
        keys: of each class, by number, in the training's own way.
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
        self._classes = len(keys)
        self.job = job
        self._class_rank = class_rank
        self._prior = prior
        gpus = job.pipelines * job.ranks
        modes = len(job.modes)
        # Modes are classes of their own here, after all classes of the first mode.
        in_modes = [key.in_mode(mode) for mode in job.modes for key in keys]
        self._class_of = {key: i for i, key in enumerate(in_modes)}
        names = sorted({key.name for key in in_modes})
        kinds = [names.index(key.name) for key in in_modes]
        stages = [key.stage for key in in_modes]
        self._number = {clock: i for i, clock in enumerate(job.clocks_mhz)}
        self.times = TimeRows(job.clocks_mhz, kinds, gpus, modes)
        ranks = class_rank.tolist() * modes
        self.powers = PowerRows(job.clocks_mhz, kinds, stages, ranks, gpus)
        #: of each rank, the class and the microbatch of each computation
        self._programs = self._programs_of(job)
        self._tables: TimeTables | None = None
        # What rows do not explain, as differences of logarithms.
        #: by number, the GPUs that seemed slower or faster than others in the last iteration
        self._gpu_misses: dict[int, _GpuMisses] = {}
        #: (row, clock) -> by how much its last computations were longer than it
        self._row_misses: dict[tuple[int, int], Floats] = {}
        #: by how much all times of the last iteration were longer than at first
        self.common = 0.0
        #: by how much rows have followed what iterations had in common
        self._followed = 0.0
        self._take_prior()

    def _programs_of(self, job: AutopilotJob) -> list[list[tuple[int, int]]]:
        """Return of each rank the class, in the first mode, and the microbatch of each
        computation.
        """
        iteration = job.iteration
        # What lies beyond the computations in a program has no clock, so nothing is learnt of it.
        computations = len(iteration.keys)
        programs = []
        for program, ran in zip(iteration.programs, iteration.schedule.ranks, strict=True):
            nodes = [node for node in program if node < computations]
            programs.append(
                [
                    (self._class_of[iteration.keys[node]], computation.microbatch)
                    for node, computation in zip(nodes, ran, strict=True)
                ]
            )
        return programs

    def _take_prior(self) -> None:
        """Begin with the rows of the prior, if there is one."""
        top_j = 0.0
        top_s = 0.0
        # The prior's full clocks tell the scale of powers, as the first iterations do without one.
        for row, clock, measurement in self._prior_rows():
            self.times.add(row, clock, np.full(_PRIOR_COUNT, math.log(measurement.time_s)))
            top_j += measurement.energy_j * self._is_full(row, clock)
            top_s += measurement.time_s * self._is_full(row, clock)
        # Full clocks of all classes tell the scale of powers, so nothing begins before they are
        # known.
        if self.times.known[: self._classes, 0].all():
            self._begin_powers(top_j, top_s, 0.0)

    def set_job(self, job: AutopilotJob) -> None:
        """Go on with a job that differs in what setting a clock costs alone."""
        self.job = job

    @property
    def is_ready(self) -> bool:
        """Whether every class was measured at full clocks, and energy was observed."""
        return bool(self.times.count[: self._classes, 0].all()) and self.powers.top_w > 0.0

    def _is_full(self, row: Any, clock: Any) -> Any:
        """Whether rows are those of full clocks, in the first mode."""
        return (clock == 0) & (row < self._classes)

    def by_option(self, table: NDArray[Any]) -> NDArray[Any]:
        """Return a table of rows and clocks as one of classes and options."""
        modes = len(self.job.modes)
        clocks = len(self.job.clocks_mhz)
        of_modes = table.reshape(modes, self._classes, clocks)
        return of_modes.transpose(1, 2, 0).reshape(self._classes, clocks * modes)

    def by_row(self, table: NDArray[Any]) -> NDArray[Any]:
        """Return a table of classes and options as one of rows and clocks."""
        of_modes = table.reshape(self._classes, -1, len(self.job.modes))
        return of_modes.transpose(2, 0, 1).reshape(-1, len(self.job.clocks_mhz))

    @property
    def _enough(self) -> int:
        """How many computations tell that a row has changed, or a GPU: where a few times are much
        longer, several can be so together.
        """
        return _LAST if self.times.has_tails else _FEW

    def observe(self, observations: Sequence[RankObservation]) -> None:
        """Learn from one iteration.

        Raises:
            UsageError: If what a rank observed does not fit its program.
        """
        # All are checked before anything is learnt, so that an error leaves nothing half done.
        for seen in observations:
            if seen.computations and len(seen.computations) != len(self._programs[seen.rank]):
                raise UsageError(
                    f"observations, rank {seen.rank}: has {len(seen.computations)} computations "
                    f"and its program {len(self._programs[seen.rank])}; give one for each, or none"
                )
        # A throttled GPU did not run at the clock that was set.
        unthrottled = [seen for seen in observations if not seen.throttled_s]
        self._learn_times(unthrottled)
        # The scale of powers has to be known before a reading can tell a part of it.
        if not self.powers.top_w:
            self._start_powers(unthrottled)
        for seen in unthrottled:
            if self.powers.top_w and seen.energy_j is not None and seen.computations:
                # The counter tells energy alone, so the seconds of each row and of waiting split
                # it.
                seconds = self._seconds(seen)
                waiting_s = max(0.0, seen.time_s - float(seconds.sum()))
                self.powers.add(
                    self._gpu(seen), seconds, waiting_s, seen.energy_j, seen.energy_step_s
                )
        self._tables = None

    def _gpu(self, seen: RankObservation) -> int:
        return seen.pipeline * self.job.ranks + seen.rank

    def _told(self, observations: Sequence[RankObservation]) -> _Times | None:
        """Return what the computations of an iteration tell; None if they tell nothing."""
        told = [time for seen in observations for time in self._times_of(seen)]
        if not told:
            return None
        gpu = np.array([time.gpu for time in told])
        pipeline = np.array([time.pipeline for time in told])
        microbatch = np.array([time.microbatch for time in told])
        time_s = np.array([time.time_s for time in told])
        return _Times(
            gpu,
            # Each pipeline numbers its own microbatches.
            work=pipeline * (1 + microbatch.max()) + microbatch,
            row=np.array([time.row for time in told]),
            clock=np.array([time.clock for time in told]),
            log_s=np.log(time_s) - np.log(self.times.factor[gpu]),
        )

    def _times_of(self, seen: RankObservation) -> Iterator[_Time]:
        """Yield what a rank's computations tell."""
        gpu = self._gpu(seen)
        # Rows are of the usual GPU, so expected times are made those of this one.
        factor = self.times.factor[gpu]
        for row, microbatch, computation in self._ran(seen):
            first = self._number.get(computation.clock_mhz or 0)
            expected_s = {}
            # A change within a computation can only be told by the row of the clock before it.
            if first is not None and self.times.count[row, first]:
                mean_s = math.exp(float(self.times.mean[row, first]))
                expected_s[self.job.clocks_mhz[first]] = mean_s * factor
            last = time_at_last_clock(computation, expected_s)
            if last is None:
                continue
            clock_mhz, time_s = last
            if clock_mhz in self._number:
                clock = self._number[clock_mhz]
                yield _Time(gpu, seen.pipeline, microbatch, row, clock, time_s)

    def _ran(self, seen: RankObservation) -> Iterator[tuple[int, int, ComputationObservation]]:
        """Yield the class, in its mode, and the microbatch of each computation, and what was
        observed of it.
        """
        program = self._programs[seen.rank]
        for (own_class, microbatch), computation in zip(program, seen.computations, strict=False):
            mode = self.job.modes.index(computation.mode)
            yield own_class + self._classes * mode, microbatch, computation

    def _splits(self, seen: RankObservation) -> Iterator[_Split]:
        """Yield each computation of a rank, split where its clock changed."""
        for row, _, computation in self._ran(seen):
            duration_s = computation.end_s - computation.begin_s
            before_s = duration_s
            if computation.change_s is not None:
                before_s = min(max(computation.change_s - computation.begin_s, 0.0), duration_s)
            first = self._number.get(computation.clock_mhz or 0, -1)
            last = self._number.get(computation.changed_mhz or 0, first)
            yield _Split(row, first, before_s, last, duration_s - before_s)

    def _seconds(self, seen: RankObservation) -> Floats:
        """Return the seconds for which a rank ran each row: (classes, clocks)."""
        seconds = np.zeros_like(self.times.mean)
        for split in self._splits(seen):
            if split.is_known:
                seconds[split.row, split.first] += split.first_s
                seconds[split.row, split.last] += split.last_s
        return seconds

    def as_at_full_clocks(self, seen: RankObservation) -> tuple[Floats, Floats] | None:
        """Return the seconds of a rank's computations as they ran, and what they had taken at full
        clocks: the same work by what is known of clocks.

        None if it is not known at which clocks they ran.
        """
        splits = list(self._splits(seen))
        ran_s = np.array([split.duration_s for split in splits])
        # A few unknown clocks change little, but more of them would make the sum a guess.
        unknown_s = sum(split.duration_s for split in splits if not split.is_known)
        if not splits or unknown_s > _UNKNOWN * ran_s.sum():
            return None
        # The ratio of rows carries what is known of clocks; the measured seconds carry the work.
        rows_s = self.by_row(self.costs()[seen.pipeline].time_s)
        full_s = []
        for split in splits:
            # Full clocks of the first mode, as these are what the plan is compared with.
            top_s = rows_s[split.row % self._classes, 0]
            of_row_s = rows_s[split.row]
            # An unknown clock counts as the highest one.
            first_s = split.first_s * top_s / of_row_s[max(split.first, 0)]
            last_s = split.last_s * top_s / of_row_s[max(split.last, 0)]
            full_s.append(first_s + last_s)
        return ran_s, np.array(full_s)

    def _learn_times(self, observations: Sequence[RankObservation]) -> None:
        """Learn rows from an iteration's times, without what the iteration, a GPU or a microbatch
        had in common.
        """
        told = self._told(observations)
        if told is None:
            return
        rows = self.times
        row = told.row
        clock = told.clock
        # A row of few times is no measure of others.
        count = rows.count[row, clock]
        is_known = count >= _FEW
        miss = np.where(is_known, told.log_s - rows.mean[row, clock], np.nan)

        # What the GPU and the iteration explain is taken out first, as no row is due to it.
        usual = self._note_gpus(told.gpu, miss, count >= self._enough)
        value = told.log_s - self._follow_gpus(told.gpu)
        # Full clocks tell what the iteration has in common, unless a GPU seems to have changed.
        is_full = is_known & self._is_full(row, clock)
        has_tops = not self._gpu_misses and is_full.sum() >= _TOPS
        common = float(np.median(miss[is_full])) if has_tops else usual
        value -= common

        # Rows that were learnt anew cannot tell what a microbatch had in common.
        is_learnt_anew = self._relearn_changed(row, clock, value, is_known)
        is_known &= ~is_learnt_anew
        # Computations of a microbatch have its work in common, which is no cost of clocks.
        value -= self._shared_work(told.work, value - rows.mean[row, clock], is_known)

        # Before the rows take up the times, as afterwards nothing is missed.
        self._level_with_top(row[is_known], clock[is_known], value[is_known])
        for one_row, one_clock in _each(row[~is_learnt_anew], clock[~is_learnt_anew]):
            self._learn_row(one_row, one_clock, value[(row == one_row) & (clock == one_clock)])
        # Rows of few times miss less than the noise, as they have followed it.
        has_many = rows.count[row, clock] >= 2 * _FEW
        rows.add_noise((value - rows.mean[row, clock])[has_many])
        self._follow_common(common)

    def _follow_common(self, common: float) -> None:
        """Have all rows follow what the iteration's times had in common, beside the rows."""
        # Jumps are followed at once, and slow drift slowly, so that noise does not move all rows.
        share = 1.0 if abs(common) > _OUTLIER else _FOLLOWS
        follows = common * share
        self.times.mean[self.times.known] += follows
        # Told as by how much longer than at first, as rows have followed some of it.
        self.common = common + self._followed
        self._followed += follows

    def _note_gpus(self, gpu: Integers, miss: Floats, well_known: NDArray[np.bool_]) -> float:
        """Note which GPUs seem to have changed, and return what is usual of all of them.

        Args:
            gpu: (times,) number of the GPU of each.
            miss: (times,) by how much it misses the mean of its row.
            well_known: (times,) whether that row is known well.
        """
        # A GPU's own factor moves all of its rows alike, so the median of their misses tells it.
        told_by = dict[int, int]()
        medians = dict[int, float]()
        for number in np.unique(gpu).tolist():
            of_gpu = miss[well_known & (gpu == number)]
            if len(of_gpu) >= _FEW:
                told_by[number] = len(of_gpu)
                medians[number] = float(np.median(of_gpu))
        # What has become slower is told from others by all rows, the faster GPUs being as before;
        # what an iteration has in common is told by full clocks, as lower ones may be wrong alike.
        usual = sorted(medians.values())[(len(medians) - 1) // 2] if medians else 0.0
        gpu_misses = dict[int, _GpuMisses]()
        for number, median in medians.items():
            noise = self.times.noise / math.sqrt(told_by[number])
            if abs(median - usual) > max(_OUTLIER, 6 * noise):
                # One that was as usual in between begins anew.
                before = self._gpu_misses.get(number)
                earlier = () if before is None else before.misses
                gpu_misses[number] = _GpuMisses((*earlier, median - usual), told_by[number])
        self._gpu_misses = gpu_misses
        return usual

    def _follow_gpus(self, gpu: Integers) -> Floats:
        """Have the factors of GPUs that have changed for certain follow; return by how much each
        time is longer for it: (times,).
        """
        longer = np.zeros(len(gpu))
        # One iteration tells that a GPU has changed if it does so by far, or if times have no
        # tails; else several must.
        for number, (misses, computations) in self._gpu_misses.items():
            is_clear = abs(misses[-1]) > _FAR_OVER or not self.times.has_tails
            if (is_clear and computations >= self._enough) or len(misses) >= _FEW:
                # The factor takes the change over, so that the rows of all other GPUs stay as they
                # are.
                change = float(np.median(misses))
                self.times.factor[number] *= math.exp(change)
                longer[gpu == number] = change
                self._gpu_misses[number] = _GpuMisses((), computations)
        return longer

    def _shared_work(self, of_work: Integers, miss: Floats, known: NDArray[np.bool_]) -> Floats:
        """Return what each time has in common with the others of its microbatch, of which there is
        a number in `of_work`; 0 where too few rows are `known` to tell.
        """
        shared = np.zeros_like(miss)
        for number in np.unique(of_work):
            same = of_work == number
            few = miss[same & known]
            if len(few) >= _FEW:
                median = float(np.median(few))
                # 1.25 times the error of a mean is that of a median of normal errors.
                error = 1.25 * self.times.noise / math.sqrt(len(few))
                # A median within its error is no shared length, so it is shrunk towards none.
                shared[same] = median * max(0.0, 1 - (error / median) ** 2) if median else 0.0
        return shared

    def _level_with_top(self, row: Integers, clock: Integers, value: Floats) -> None:
        """Have the rows of lower clocks follow what they miss beside full ones, as they are planned
        on because they seem fast, by chance too.
        """
        low = ~self._is_full(row, clock)
        # With few computations on either side the difference is noise.
        if min(low.sum(), (~low).sum()) < _TOPS:
            return
        miss = value - self.times.mean[row, clock]
        # Medians, so that neither side is moved by its longest times.
        off = float(np.median(miss[low]) - np.median(miss[~low]))
        spread = 1.85 * float(np.median(np.abs(miss - np.median(miss))))
        # The difference is shrunk by its own variance, so that noise alone moves rows little.
        variance = spread**2 * (1 / low.sum() + 1 / (~low).sum())
        off *= _TOP_SHARE / (1 + variance / _TOP_MISS**2)
        for one_row, one_clock in _each(row[low], clock[low]):
            self.times.mean[one_row, one_clock] += off

    def _learn_row(self, row: int, clock: int, values: Floats) -> None:
        """Learn what an iteration tells of a row, unless it is doubted and seen for the first
        time.
        """
        times = self.times
        if clock and times.count[row, 0] > times.count[row, clock] == 0.0 and len(values) <= _FEW:
            # A few far over the physical bound are asked for again before they are believed.
            bound = times.mean[row, 0] + math.log(
                self.job.clocks_mhz[0] / self.job.clocks_mhz[clock]
            )
            before = times.doubted.pop((row, clock), None)
            if before is None and values.min() > bound + _FAR_OVER:
                times.doubted[row, clock] = values
                return
            # Seen twice now, so the shorter times of both are believed, as a pause makes times
            # longer only.
            if before is not None:
                values = np.sort(np.concatenate([before, values]))[: len(values)]
        times.add(row, clock, values)

    def _relearn_changed(
        self, row: Integers, clock: Integers, value: Floats, known: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Learn anew the rows that changed while others did not, as after a change of the power
        limit, and return which times are of one.

        Args:
            row: (times,) class of each, in its mode.
            clock: (times,) number of its clock.
            value: (times,) their logarithms, without what the GPU and the iteration explain.
            known: (times,) whether the row is known.
        """
        times = self.times
        is_of_changed = np.zeros(len(row), dtype=bool)
        if not known.any():
            return is_of_changed
        miss = value - times.mean[row, clock]
        # Beside the usual miss, as a change of the whole iteration is not one of a row.
        usual = np.median(miss[known])
        spread = 1.48 * float(np.median(np.abs(miss[known] - usual)))
        for one_row, one_clock in _each(row[known], clock[known]):
            is_same = (row == one_row) & (clock == one_clock)
            # Where a few times are much longer, one iteration says too little, so the last ones are
            # kept.
            before = np.empty(0)
            if times.has_tails:
                before = self._row_misses.get((one_row, one_clock), before)
            last = np.append(before, miss[is_same])[-_LAST:]
            self._row_misses[one_row, one_clock] = last
            if self._has_changed(last, float(times.count[one_row, one_clock]), spread):
                # Older times are of another regime, so the row begins again with what was seen
                # last.
                mean = times.mean[one_row, one_clock]
                times.forget(one_row, one_clock)
                times.add(one_row, one_clock, mean + self._row_misses.pop((one_row, one_clock)))
                is_of_changed |= is_same
        return is_of_changed

    def _has_changed(self, last: Floats, count: float, spread: float) -> bool:
        """Whether the last misses of a row of so many times tell that it has changed, where those
        of an iteration spread by so much.
        """
        if len(last) < self._enough:
            return False
        # Large enough not to be noise, of the times and of the row itself.
        error = math.sqrt(1 / len(last) + 1 / count)
        limit = max(_OUTLIER, 4 * max(self.times.noise, spread) * error)
        # A quarter of the times may be outliers on either side, and the rest must still agree.
        low, high = np.quantile(last, (0.25, 0.75))
        return bool(low > limit or high < -limit)

    def _start_powers(self, observations: Sequence[RankObservation]) -> None:
        """Begin with what GPUs drew in an iteration at full clocks, if any was counted."""
        counted = [seen for seen in observations if seen.energy_j and seen.computations]
        if not counted:
            return
        busy_s = float(sum(self._seconds(seen).sum() for seen in counted))
        waiting_s = sum(seen.time_s for seen in counted) - busy_s
        self._begin_powers(sum(seen.energy_j or 0.0 for seen in counted), busy_s, waiting_s)

    def _begin_powers(self, energy_j: float, busy_s: float, waiting_s: float) -> None:
        """Begin with what GPUs drew at full clocks, and with the rows of the prior."""
        self.powers.start(energy_j, busy_s, waiting_s)
        for row, clock, measurement in self._prior_rows():
            self.powers.add_row(row, clock, measurement.power_w, _PRIOR_DOUBT)

    def _prior_rows(self) -> Iterator[tuple[int, int, Measurement]]:
        """Yield class, clock and measurement of each row of the prior that the job has."""
        for key, measurements in () if self._prior is None else self._prior.measurements.items():
            for measurement in measurements:
                is_known = key in self._class_of and measurement.clock_mhz in self._number
                if is_known and measurement.has_work:
                    yield self._class_of[key], self._number[measurement.clock_mhz], measurement

    def settled(self) -> NDArray[np.bool_]:
        """(classes, options) whether trials would tell little more of a row, or another one of its
        mode is to come first.
        """
        settled = self.times.known & (self._time_tables().stderr < _SETTLED)
        settled[:, 1:] |= ~self.times.known[:, :1]
        return self.by_option(settled)

    def _time_tables(self) -> TimeTables:
        """Return what is known of times, computed once after each iteration."""
        if self._tables is None:
            self._tables = self.times.tables(between=self._learn)
        return self._tables

    def untried(self) -> NDArray[np.bool_]:
        """(modes, classes) whether nothing is known of a class in a mode."""
        return ~self.times.known[:, 0].reshape(-1, self._classes)

    def planned_share(self) -> float:
        """Return the share of all rows that may be planned on."""
        return float(np.isfinite(self.costs("plan")[0].time_s).mean())

    def costs(
        self,
        kind: Literal["mean", "plan", "safe", "doubt"] = "mean",
        optimism: float = 0.0,
        margin: float = 0.0,
    ) -> list[Costs]:
        """Return the costs for each pipeline, with lower clocks longer by a margin, relative; the
        learner must be ready.
        """
        tables = self._time_tables()
        time_s: Floats = self.by_option(getattr(tables, f"{kind}_s")).copy()
        # Full clocks are the reference, so no margin makes them longer.
        time_s[:, 1:] *= 1 + margin
        power_w, error_w, waiting_w = self.powers.tables()
        power_w = self.by_option(power_w)
        error_w = self.by_option(error_w)
        # Hope is bounded, as a power near 0 would win every search.
        power_w = np.maximum(power_w - optimism * error_w, 0.2 * power_w)
        ranks = self.job.ranks
        all_costs = []
        # Pipelines share rows, and differ by how much slower each of their GPUs is.
        for pipeline in range(self.job.pipelines):
            factor = self.times.factor[pipeline * ranks : (pipeline + 1) * ranks][self._class_rank]
            all_costs.append(Costs(time_s * factor[:, None], power_w, waiting_w))
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
        # A mode in which not every class was measured is not part of the profile. Rows of a mode
        # follow those of the modes before it, so the profile ends at the first gap.
        lacking = np.append(self.untried().any(axis=1), True)
        measured = self._classes * int(np.argmax(lacking))
        power_w, power_error_w, waiting_w = self.powers.tables()
        variance = self.times.variance()
        table = {}
        for key, row in list(self._class_of.items())[:measured]:
            # Rows are of the usual GPU, and the profile is of the first pipeline's.
            factor = float(self.times.factor[self._class_rank[row % self._classes]])
            rows = []
            for clock in np.flatnonzero(self.times.known[row]).tolist():
                mhz = self.job.clocks_mhz[clock]
                time_s = math.exp(float(self.times.mean[row, clock])) * factor
                evidence = Evidence(
                    achieved_mhz=mhz,
                    time_stderr_s=time_s * math.sqrt(variance[row, clock]),
                    energy_stderr_j=float(power_error_w[row, clock]) * time_s,
                    windows=max(1, round(float(self.times.count[row, clock]))),
                    temperature_c=0.0,  # not known
                )
                energy_j = float(power_w[row, clock]) * time_s
                rows.append(Measurement(mhz, time_s, energy_j, evidence))
            table[key] = tuple(rows)
        # Waiting is learnt by rank, and a profile has it by stage.
        ranks = self.job.iteration.schedule.stage_ranks
        stages = range(1 + max(key.stage for key in table))
        try:
            return Profile(
                table,
                tuple(float(waiting_w[ranks[stage]]) for stage in stages),
                gpu=self.job.gpu,
                gpus_per_stage=self.job.gpus_per_stage,
                clock_change=self.job.clock_change,
                conditions={"learnt": "while training"},
            )
        # What was learnt is always a valid profile, so a refusal is a fault of this program.
        except ProfileError as error:  # pragma: no cover
            raise AssertionError(
                f"a learnt profile is refused: {error}; please report this"
            ) from error


def _each(row: Integers, clock: Integers) -> list[tuple[int, int]]:
    """Return the rows that times are of, each once and in order, so that equal observations give
    equal decisions.
    """
    return sorted(set(zip(row.tolist(), clock.tolist(), strict=True)))
