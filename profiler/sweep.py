"""Measure all kinds of a stage at one setting after another, at as few as a plan needs.

A GPU drifts while it is measured, mostly as it warms up. So the highest setting is measured at the
begin, in the middle and at the end, and the others in random order: how far apart the three are is
an error that all rows share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import GpuError, ProfileError, UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.files import reading, write_file
from perseus_planner.base.units import Index, Minutes, Seconds, Share, Wait
from perseus_planner.base.wires import Record, decode, encode
from perseus_planner.plans.again import VISITS, clocks_in_use
from perseus_planner.profiler.choosing import (
    MAX_SETTINGS,
    RowTable,
    find_doubt,
    next_of_descent,
    next_setting,
)
from perseus_planner.profiler.control import LockCheck, common_settings, opened_control
from perseus_planner.profiler.row_meter import RowMeter
from perseus_planner.profiler.stage import GpuGroup, Progress, SingleGpu, Stage, StageRows, together
from perseus_planner.profiler.windows import TRANSIENT_REASONS, merge, subtract
from perseus_planner.profiles.csv_file import CONTROLS, unit_of
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.plausible import Doubt, find_doubts, row_name

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.again import Again

Visits = dict[str, dict[int, list[Measurement]]]
"""Kind -> setting -> its rows, one for each time that it was measured."""


class _Kept(Record, frozen=True):
    subject: dict[str, str]
    rows: Visits


class RowFile:
    """The finished rows of one stage, in a file.

    Attributes:
        finished: The rows of the interrupted sweep.

    Args:
        path: The file.
        subject: What is measured, as names and texts. Only sweeps that agree in all of them share
            rows.
        resume: Whether to read the rows of an interrupted sweep. If not, they are deleted.

    Raises:
        ProfileError: If the file cannot be read, or `subject` differs; names the first difference.
    """

    def __init__(self, path: Path, subject: Mapping[str, str], *, resume: bool) -> None:
        self._path = path
        self._subject = dict(subject)
        self.finished: Visits = {}
        for part in _unfinished_writes(path):
            part.unlink(missing_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        elif path.exists():
            self.finished = self._read()

    def write(self, rows: Visits) -> None:
        """Replace the rows by `rows`; they are on disk on return.

        Raises:
            ProfileError: If the file cannot be written.
        """
        write_file(self._path, encode(_Kept(self._subject, rows)), ProfileError)

    def _read(self) -> Visits:
        with reading(self._path, ProfileError):
            data = self._path.read_bytes()
        try:
            kept = decode(data, _Kept)
        except ValueError as error:
            raise ProfileError(
                f"{self._path}: cannot be read ({error}); measure from the start without --resume"
            ) from None
        # Rows of another GPU or of other settings would be mixed in silently; the first difference
        # is named.
        for name in dict.fromkeys([*self._subject, *kept.subject]):
            there = kept.subject.get(name, "nothing")
            wanted = self._subject.get(name, "nothing")
            if there != wanted:
                raise ProfileError(
                    f"{self._path}: its rows were measured with {name}: {there}, and now it is "
                    f"{wanted}; resume with {name} as before, or measure from the start without "
                    "--resume"
                )
        return kept.rows


def rows_path(output: Path, stage: int) -> Path:
    """Return the file beside the profile `output` that keeps the stage's finished rows until
    `output` is written.
    """
    return output.with_suffix(f".rows-{stage}.json")


def delete_rows(output: Path, stages: int) -> None:
    """Delete the kept rows of all stages, and what interrupted writes left beside them; `output`
    is written.
    """
    for path in (rows_path(output, stage) for stage in range(stages)):
        for file in (path, *_unfinished_writes(path)):
            file.unlink(missing_ok=True)


def _unfinished_writes(path: Path) -> list[Path]:
    return [part for part in path.parent.glob(".*.part") if part.name.startswith(f".{path.name}.")]


_LEAST_SETTINGS = 2  # with one, no plan could save anything
_LAUNCHES_S = 100e-6
"""A computation below this, seconds, is a few launches of about 10 microseconds, which may find
nothing to run.
"""
_TOP_TIMES = 3  # the highest setting is measured at the begin, in the middle and at the end


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
    #: Draws the order of settings, and when, after an update of the energy counter, each window
    #: begins.
    seed: Index = 0
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
                "minutes and saving_within choose what is measured; leave out --full and --observe "
                "(in Python full and control='observed')"
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
    again: Again | None = None,
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
        again: The plan whose rows alone are measured; None for all that plans need.

    Raises:
        GpuError: If the GPU cannot be read or set, its energy counter does not move, it stays too
            hot, or locking its clock has no effect.
        ProfileError: If the kept rows cannot be read, or were measured on another GPU, stage or
            with other settings.
    """
    settings = settings or SweepSettings()
    group = group or SingleGpu()
    kept = None
    if rows_file is not None:
        subject = _subject(gpu, stage, number, settings, group, again)
        kept = RowFile(rows_file, subject, resume=resume)
    return _Sweep(gpu, stage, number, settings, group, kept, progress, stages, again).measure()


@dataclass
class _Sweep:
    """A sweep of one stage on one GPU, or on one of the GPUs that share it; the fields are those
    of `measure_stage`.
    """

    gpu: Gpu
    stage: Stage
    number: int
    settings: SweepSettings
    group: GpuGroup
    kept: RowFile | None
    progress: Progress | None
    stages: int
    again: Again | None

    def __post_init__(self) -> None:
        settings = self.settings
        self._is_observed = settings.control == "observed"
        self.meter = RowMeter(
            self.gpu, self.stage.synchronize, self.group, settings.window_s, settings.cool_down_s
        )
        # Of a sweep to resume, the rows are the same on all GPUs of the group. Where nothing is
        # set, all rows are those of setting 0.
        finished = self.group.gather(self.kept.finished if self.kept else {})
        rows: Visits = next(filter(None, finished), {})
        self._visits = {kind: dict(rows.get(kind, {})) for kind in self.stage.runs}
        self._begin_s = self.gpu.now_s()
        self._longest_s = 0.0  # of measuring all kinds at a setting
        self._doubt: float | None = None
        self._locks = {kind: LockCheck(self.gpu.text) for kind in self.stage.runs}
        #: Kind -> the settings that are measured for a plan; None where the sweep chooses.
        self._only: dict[str, set[int]] | None = None
        # Kept rows count for the check of the lock as well, the highest setting first, as it asks
        # for.
        for kind, table in self._visits.items():
            for setting in sorted(table, reverse=True):
                for row in table[setting]:
                    self._check_lock(kind, row, setting, None)

    def measure(self) -> StageRows:
        """Measure the missing rows, and return all."""
        blocking_w = self._measure_settings()
        if self.progress is not None:
            self.progress(self._done, self._done)
        measurements = {
            kind: tuple(table[setting] for setting in sorted(table, reverse=True))
            for kind, table in self._rows().items()
        }
        # A kind that runs nothing takes nothing, at every clock.
        settings = sorted({row.clock_mhz for rows in measurements.values() for row in rows})[::-1]
        for kind in self.stage.without_work:
            measurements[kind] = tuple(Measurement(setting, 0.0, 0.0) for setting in settings)
        return StageRows(
            stage=self.number,
            measurements=measurements,
            blocking_power_w=fmean(blocking_w.values()) if blocking_w else None,
            gpus=self.group.size,
            gpu=" + ".join(dict.fromkeys(self.group.gather(self.gpu.name))),
            origin=self.gpu.origin,
            control=self.settings.control,
            shared_errors=(
                self._drift("time_s", "time_stderr_s"),
                self._drift("energy_j", "energy_stderr_j"),
            ),
            gpu_spread=together(self.meter.spreads),
            memory=_most(self.group.gather(dict(self.stage.memory))),
            shared_by=self.stage.shared_by,
            reordering=self.stage.reordering,
            conditions=self._conditions(blocking_w),
        )

    def _rows(self) -> dict[str, dict[int, Measurement]]:
        """Return the row of each kind and setting, the mean of all times it was measured."""
        return {
            kind: {setting: merge(rows) for setting, rows in table.items()}
            for kind, table in self._visits.items()
        }

    def _drift(self, quantity: str, error: str) -> float:
        """Return how far apart the rows of the highest setting were, beyond the noise of their
        windows: a relative standard deviation, of all kinds together, as one GPU drifts.
        """
        beyond = []
        for table in self._visits.values():
            rows = table[max(table)]
            # Only a setting that was measured several times tells how far the GPU has drifted.
            if len(rows) < 2:
                continue
            mean = fmean(getattr(row, quantity) for row in rows) or 1.0
            spread = stdev(getattr(row, quantity) for row in rows) / mean
            errors = [getattr(row.evidence, error) / mean for row in rows if row.evidence]
            # Windows are noisy where nothing drifts: that is in the standard errors of the rows,
            # and would be counted twice.
            beyond.append(spread**2 - math.fsum(each**2 for each in errors) / len(rows))
        return math.sqrt(max(0.0, fmean(beyond))) if beyond else 0.0

    def _measure_settings(self) -> Mapping[int, float]:
        """Measure at one setting after another; return clock or limit -> power of the blocked GPUs,
        watts, empty if the stage has no neighbour.
        """
        with opened_control(self.gpu, self.settings.control) as (available, set_to):
            # GPUs that share a stage measure in step, so they can only be set to what all of them
            # have.
            settings = common_settings(self.group.gather(available))
            expected = len(settings) if self.settings.full else min(len(settings), MAX_SETTINGS)
            if self.again is not None:
                self._only = self._settings_again(settings)
                expected = len(self._order_again())
            set_to(settings[0])
            # Also when resuming: the missing rows are measured on a GPU as warm as it was for the
            # others.
            self.meter.heat(next(iter(self.stage.runs.values())).run)
            power_w = self.meter.measure_blocking_w(self.stage.block)
            # Without a neighbour, a GPU at rest stands in for one that waits.
            waiting_w = self.meter.measure_rest_w() if power_w is None else power_w
            while (setting := self._next_setting(settings, waiting_w)) is not None:
                self._measure_all(setting, set_to, expected)
            self._measure_hot_again(set_to)
            self._measure_doubtful_again(set_to, waiting_w)
            for lock in self._locks.values():
                lock.finish()
            if power_w is None:
                return {}
            # A GPU that waits draws more at higher clocks: the power at the lowest clock is told as
            # well.
            rows = next(iter(self._rows().values()))
            blocking_w = {rows[settings[0]].clock_mhz: power_w}
            if min(rows) < settings[0]:
                set_to(min(rows))
                lowest_w = self.meter.measure_blocking_w(self.stage.block)
                assert lowest_w is not None
                blocking_w[min(rows)] = lowest_w
            return blocking_w

    def _measure_all(self, setting: int, set_to: Callable[[int], None], expected: int) -> None:
        """Measure the kinds that are missing at `setting`, or all of them again."""
        begin_s = self.gpu.now_s()
        set_to(setting)
        self.meter.cool_down()
        # An interrupted sweep may lack some kinds: only those that are behind are measured.
        times = {kind: self._times(kind, setting) for kind in self._kinds_at(setting)}
        for kind, count in times.items():
            if count == min(times.values()):
                self._add(kind, setting, self._measure(kind, setting), expected)
        self._longest_s = max(self._longest_s, self.gpu.now_s() - begin_s)

    def _measure_hot_again(self, set_to: Callable[[int], None]) -> None:
        """Measure rows again for which the GPU was too hot.

        Raises:
            GpuError: If it is too hot again, unless such rows are allowed.
        """
        hot_settings = {
            setting: [
                kind
                for kind in self._kinds_at(setting)
                if _is_hot(merge(self._visits[kind][setting]))
            ]
            for setting in sorted(set().union(*self._visits.values()), reverse=True)
        }
        for setting, kinds in hot_settings.items():
            if kinds:
                set_to(setting)
                self.meter.cool_down()
            # A kind that includes another one was hot if that one was, and comes after it.
            for kind in kinds:
                row = self._measure(kind, setting)
                visits = self._visits[kind][setting]
                visits[:] = [visit for visit in visits if not _is_hot(visit)]
                self._add(kind, setting, row, 0)
        hot = list(self._hot())
        if hot and not self.settings.allow_hot:
            # The reasons that all of these rows have in common.
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

    def _measure_doubtful_again(self, set_to: Callable[[int], None], waiting_w: float) -> None:
        """Measure rows again that cannot be true, as after a disturbed window.

        Raises:
            GpuError: If they cannot be true again, or most rows cannot.
        """
        doubts = self._doubts(waiting_w)
        # Where most rows cannot be true, it is the counter that is wrong, and no window.
        if 2 * len(doubts) < sum(map(len, self._visits.values())):
            for doubt in doubts:
                kind = doubt.key.name
                setting = doubt.clock
                set_to(setting)
                self.meter.cool_down()
                row = self._measure(kind, setting)
                self._visits[kind][setting].clear()
                self._add(kind, setting, row, 0)
            doubts = self._doubts(waiting_w) if doubts else doubts
        if doubts:
            raise GpuError(
                f"{row_name(doubts[0], self.settings.control)}: {doubts[0].problem}; the energy "
                "counter of this GPU cannot be trusted, or something else runs on it"
            )

    def _doubts(self, waiting_w: float) -> list[Doubt]:
        """Return the rows that cannot be true, the same on all GPUs of the group."""
        if self._is_observed:
            return []  # a row of each kind, with no other one to compare it with
        rows = {
            Key.named(self.number, kind): [
                table[setting] for setting in sorted(table, reverse=True)
            ]
            for kind, table in self._rows().items()
        }
        doubts = find_doubts(
            rows, self.settings.control, self.group.size, lambda _: waiting_w, self.gpu.name
        )
        refused = [doubt for doubt in doubts if doubt.is_refused]
        # Reversed, so that the first doubt of a row is the one that stays.
        by_row = {(doubt.key, doubt.clock): doubt for doubt in reversed(refused)}
        # Those of the first GPU, so that all measure the same rows again.
        return self.group.gather(list(by_row.values()))[0]

    def _hot(self) -> Iterator[tuple[str, Measurement]]:
        """Yield the kinds and rows for which heat or the power supply slowed the GPU down."""
        for kind, table in self._rows().items():
            yield from ((kind, row) for row in table.values() if _is_hot(row))

    def _times(self, kind: str, setting: int) -> int:
        """Return how often a kind was measured at `setting`."""
        return len(self._visits[kind].get(setting, ()))

    def _next_setting(self, settings: Sequence[int], waiting_w: float) -> int | None:
        """Return the setting to measure next: the highest one also in the middle and at the end,
        as the GPU may drift meanwhile.
        """
        visited = {setting for table in self._visits.values() for setting in table}
        for setting in sorted(visited, reverse=True):
            if len({self._times(kind, setting) for kind in self._kinds_at(setting)}) > 1:
                return setting  # an interrupted sweep has not measured all kinds there
        if self._only is not None:
            return self._next_again()
        # What was measured first decides, which later rows do not change.
        # A resumed sweep must choose as one that was not interrupted.
        rows = {
            kind: {setting: rows[0] for setting, rows in table.items()}
            for kind, table in self._visits.items()
        }
        clocks = self.settings.control == "clock"
        seed = f"{self.settings.seed} {self.number}"
        options: dict[str, Any] = {"clocks": clocks, "seed": seed}
        chosen: int | None
        if self.settings.full:
            order = [settings[0], *Random(seed).sample(settings[1:], len(settings) - 1)]
            chosen = next((setting for setting in order if setting not in visited), None)
            # The highest setting is due again when half of the others were measured.
            is_half = 2 * len(visited) >= len(settings)
        else:
            chosen = next_of_descent(settings, rows, waiting_w, **options)
            # The coarse descent counts as the first half.
            is_half = chosen is None
            if self.settings.has_goal and len(visited) >= _LEAST_SETTINGS:
                chosen = self._next_for_goal(settings, rows, waiting_w, chosen, options)
            elif chosen is None:
                chosen = next_setting(settings, rows, waiting_w, **options)
        top_times = self._times(next(iter(self.stage.runs)), settings[0])
        # Once at the begin, twice from the middle on, and three times at the end.
        if len(visited) <= 1:
            most = 1
        elif chosen is None and is_half:
            most = _TOP_TIMES
        else:
            most = 2
        if 0 < top_times < most and (is_half or chosen is None):
            chosen = settings[0]
        # GPUs that share the stage measure the same setting, whatever their clocks and the rounding
        # say.
        return self.group.gather(chosen)[0]

    def _settings_again(self, settings: Sequence[int]) -> dict[str, set[int]]:
        """Return kind -> the settings that are measured for a plan, with those of the kinds that
        are subtracted from others.
        """
        assert self.again is not None
        kinds = list(self.stage.runs)
        only = {
            kind: set(clocks)
            for kind, clocks in self.again.settings_of(self.number, kinds, settings).items()
        }
        for kind in reversed(kinds):  # a kind comes after the one that it includes
            included = self.stage.runs[kind].includes
            if included is not None:
                only[included] |= only[kind]
        return only

    def _order_again(self) -> list[int]:
        """Return the settings in the order in which they are measured for a plan: some times each,
        the highest one at the begin, between, and at the end.
        """
        assert self._only is not None
        top, *others = sorted(set().union(*self._only.values()), reverse=True)
        # Seeded by stage, so that all GPUs of a group, and a resumed sweep, draw the same order.
        random = Random(f"{self.settings.seed} {self.number}")
        order = [top]
        for _ in range(VISITS):
            order += [*random.sample(others, len(others)), top]
        return order

    def _next_again(self) -> int | None:
        """Return the setting to measure next for a plan."""
        visits: Counter[int] = Counter()
        for setting in self._order_again():
            # A setting stands in the order as often as it is to be measured: what has fewer rows is
            # next.
            visits[setting] += 1
            kinds = self._kinds_at(setting)
            if any(self._times(kind, setting) < visits[setting] for kind in kinds):
                return setting
        return None

    def _kinds_at(self, setting: int) -> list[str]:
        """Return the kinds that are measured at a setting."""
        only = self._only
        return [kind for kind in self.stage.runs if only is None or setting in only[kind]]

    def _next_for_goal(
        self,
        settings: Sequence[int],
        rows: RowTable,
        waiting_w: float,
        coarse: int | None,
        options: Mapping[str, Any],
    ) -> int | None:
        """Return the setting to measure, perhaps again; None when the time is up or the saving
        is known.
        """
        if self._is_late(settings[0]):
            return None
        # Doubt needs a coarse sweep to be drawn from.
        if coarse is not None:
            return coarse
        control = self.settings.control
        within = self.settings.saving_within
        doubt = find_doubt(
            settings,
            self._rows(),
            waiting_w,
            control=control,
            stages=self.stages,
            without_work=self.stage.without_work,
        )
        self._doubt = doubt.share
        if within is not None and doubt.share <= within:
            return None
        # New settings come before those that are measured again.
        another = next_setting(settings, rows, waiting_w, **options)
        return doubt.setting if another is None else another

    def _is_late(self, top: int) -> bool:
        """Return whether another setting would take longer than there is time, less that for the
        highest one again and for the blocking power.
        """
        if self.settings.minutes is None:
            return False
        # Time is kept for the highest setting once more, and a window for the blocking power.
        settings = 1 + (self._times(next(iter(self.stage.runs)), top) < _TOP_TIMES)
        spent_s = self.gpu.now_s() - self._begin_s
        needed_s = settings * self._longest_s + self.meter.window_s
        return spent_s + needed_s > 60 * self.settings.minutes

    def _measure(self, kind: str, setting: int) -> Measurement:
        """Measure one row, less the kind that each of its repetitions includes."""
        timed = self.stage.runs[kind]
        times = self._times(kind, setting)
        # Seeded by what is measured and how often it was, so that windows begin at the same phases
        # on all GPUs of the group.
        random = Random(f"{self.settings.seed} {self.number} {kind} {setting} {times}")
        row = self.meter.measure_row(timed.run, None if self._is_observed else setting, random)
        self._check_lock(kind, row, setting, self.meter.achieved_mhz)
        if timed.includes is None:
            return row
        try:
            # The last visit of the kind it includes: the one that is nearest in time, and so in
            # warmth.
            return subtract(row, self._visits[timed.includes][setting][-1])
        except GpuError as error:
            raise GpuError(f"stage {self.number}, {kind} with {timed.includes}: {error}") from None

    def _check_lock(self, kind: str, row: Measurement, setting: int, own_mhz: float | None) -> None:
        """Refuse a lock without effect; of a kept row, only the mean clock of the stage's GPUs
        is known. What only takes launches may leave the GPU at rest, and so at any clock.
        """
        if row.time_s < _LAUNCHES_S:
            return
        if self.settings.control == "clock" and row.evidence is not None:
            achieved_mhz = row.evidence.achieved_mhz if own_mhz is None else own_mhz
            self._locks[kind].add(setting, achieved_mhz, row.evidence.throttle)

    def _add(self, kind: str, setting: int, row: Measurement, expected: int) -> None:
        """Keep a row, on disk as well, and tell how far the sweep is."""
        # Its place in the sweep tells later how the GPU drifted.
        if row.evidence is not None:
            row = replace(row, evidence=replace(row.evidence, order=self._done))
        self._visits[kind].setdefault(setting, []).append(row)
        if self.kept is not None:
            self.kept.write(self._visits)
        if self.progress is not None:
            self.progress(self._done, max(self._done, expected * len(self._visits)))

    @property
    def _done(self) -> int:
        """The number of rows."""
        return sum(map(len, self._visits.values()))

    def _conditions(self, blocking_w: Mapping[int, float]) -> dict[str, str]:
        """Return how the rows were measured, and what was wrong with them, by name."""
        gpu = self.gpu
        control = self.settings.control
        # What a reader needs to judge the rows, and to measure them in the same way.
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
        if self.stage.without_work:
            conditions["without work"] = ", ".join(self.stage.without_work)
        if self._doubt is not None:
            conditions["saving known within"] = f"{self._doubt:.2%}"
        if hot := list(self._hot()):
            conditions["measured while too hot"] = (
                f"{_row_names(hot, control)}; cool the GPU and measure again"
            )
        # One replica alone has nothing to be compared with.
        replicas = self.group.replicas
        if len(replicas) > 1:
            conditions["replicas"] = f"{len(replicas)}, in step"
            if slow := self.meter.slow:
                conditions["slow replicas"] = _slow_text(replicas, slow)
        if self.meter.disagreements:
            conditions["power sensor"] = " ".join(self.meter.disagreements.values())
        if gpu.warnings():
            conditions["warnings"] = " ".join(gpu.warnings())
        return conditions


def _most(each: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Return the most memory that any GPU of a stage takes in each mode."""
    return {
        mode: (max(memory[mode][0] for memory in each), max(memory[mode][1] for memory in each))
        for mode in each[0]
        if all(mode in memory for memory in each)
    }


def _is_hot(row: Measurement) -> bool:
    return row.evidence is not None and bool(TRANSIENT_REASONS.intersection(row.evidence.throttle))


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
    gpu: Gpu,
    stage: Stage,
    number: int,
    settings: SweepSettings,
    group: GpuGroup,
    again: Again | None,
) -> dict[str, str]:
    """Return what two sweeps must agree in to share rows."""
    # A kind that is measured with another one has other rows than one measured alone.
    kinds = [
        kind if run.includes is None else f"{kind} less {run.includes}"
        for kind, run in stage.runs.items()
    ]
    wanted = "as few as a plan needs"
    if again is not None:
        used = clocks_in_use(again.plan)
        wanted = "; ".join(
            f"{kind} at {', '.join(map(str, used.get(Key.named(number, kind), ())))}"
            for kind in stage.runs
        )
    return {
        "gpu": gpu.uuid,
        "driver": gpu.driver,
        "stage": str(number),
        "kinds": ", ".join(kinds),
        "gpus of the stage": str(group.size * len(group.replicas)),
        "control": settings.control,
        "settings": "all" if settings.full else wanted,
        "window": f"{settings.window_s!r} s",
        "cool-down": f"{settings.cool_down_s!r} s",
        "seed": str(settings.seed),
    }
