"""The records of a rank match what happened, whatever its engine, its controller and its disk
do.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count as counting
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import strategies as st
from made_runs import BEGIN_NS, any_plan, ns
from strategies import drawn, smooth_profile

from perseus_planner import schedules
from perseus_planner.engines.engine import PipelineRank
from perseus_planner.runs.recording import Attempt, RankFiles, attempt_path
from perseus_planner.runs.verdict import StragglerDetector
from perseus_planner.runtime.controller.protocol import AttachReply, ControlChange, GpuSample
from perseus_planner.runtime.controller.watcher import OUTSIDE_NS
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import NO_REQUEST, OUTSIDE, IterationTimes, parse_clock_request
from perseus_planner.runtime.program import Expected, Program
from perseus_planner.runtime.telemetry import WRITTEN_AFTER_S, Telemetry
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import pipeline_iteration

SEAT = PipelineRank(0, 2, None, (0, 1))
MS = 10**6
HIGHEST = 1410


def program(seed: int, version: int = 1) -> Program:
    """Return rank 0 of a pipeline of two; its clocks are drawn from a few, so that some are
    equal.
    """
    schedule, rng = schedules.one_f_one_b(2, rng_size(seed)), Random(seed)
    dag = PipelineDag(smooth_profile(2, step_mhz=200), pipeline_iteration(schedule))
    return Program.of_plan(version, any_plan(dag, rng), 0)


def rng_size(seed: int) -> int:
    return 1 + seed % 4


@dataclass
class Device:
    """Marks with a separate clock, which record all requests."""

    now_ns: int = BEGIN_NS
    written: list[tuple[int, int]] = field(default_factory=list)  #: when, request
    words: Sequence[int] = ()
    begun: tuple[int, int] = (0, 0)
    spans_ns: list[tuple[int, int]] = field(default_factory=list)
    timed: list[IterationTimes] = field(default_factory=list)

    def load(self, words: Sequence[int]) -> None:
        self.words = (*words, NO_REQUEST)

    def request(self, index: int, part: int = 0) -> None:
        self.written.append((self.now_ns, self.words[index] | part))

    def write(self, _: int, request: int) -> None:
        self.written.append((self.now_ns, request))

    def now(self) -> int:
        return self.now_ns

    def begin_iteration(
        self, number: int, *, follows_evaluation: bool = False
    ) -> list[tuple[int, int]]:
        self.begun, self.spans_ns = (number, self.now_ns), list[tuple[int, int]]()
        return self.spans_ns

    def end_iteration(self) -> None:
        self.timed.append(IterationTimes(*self.begun, tuple(self.spans_ns), self.now_ns))

    def finished(self) -> list[IterationTimes]:
        return self.timed


@dataclass
class Session:
    """A `ProgramSource` that records ends of iterations and changes programs as drawn."""

    programs: list[Program | None]
    ends: list[tuple[int, Program | None, str | None]] = field(default_factory=list)

    def program_for(self, iteration: int) -> Program | None:
        return self.programs[iteration]

    def on_end(
        self, iteration: int, program: Program | None, deviation: str | None, *_: object
    ) -> None:
        self.ends.append((iteration, program, deviation))


def trained(rng: Random, programs: list[Program | None]) -> tuple[Device, Session]:
    """Run an engine that mostly follows its programs, and sometimes deviates."""
    device, session = Device(), Session(programs)
    hook = Hook(device, session, programs[0])
    for each in programs:
        device.now_ns += rng.choice((1, 20, 60)) * MS
        hook.begin_iteration()
        order = list(each.computations if each is not None else program(0).computations)
        if rng.random() < 0.2:
            order = rng.choice((order[:-1], [*order, order[0]], order[::-1]))
        for computation in order:
            device.now_ns += rng.choice((0, 0, 1, 30)) * MS
            hook.begin(*computation)
            device.now_ns += rng.randint(10, 60) * MS
            hook.end()
        device.now_ns += rng.choice((0, 5)) * MS
        hook.end_iteration()
    return device, session


def controlled(rng: Random, written: list[tuple[int, int]]) -> list[ControlChange]:
    """Model a controller that looks at the request with a delay and sets the latest value."""
    changes, in_force = [], 0
    for (at_ns, word), (next_ns, _) in zip(written, [*written[1:], (10**18, 0)], strict=True):
        place, value = parse_clock_request(word)
        seen_ns = at_ns + rng.choice((0, 1, 2, 2, 15, 80)) * MS
        if word & OUTSIDE:
            place, value, seen_ns = None, 0, at_ns + OUTSIDE_NS
        ended_ns = seen_ns + rng.randint(1, 5) * MS
        if ended_ns <= next_ns and value != in_force:
            changes.append(
                ControlChange(place, value, seen_ns, seen_ns, ended_ns, in_force or HIGHEST)
            )
            in_force = value
    return changes


def off_ns(span: tuple[int, int], value: int, changes: list[ControlChange]) -> int:
    """Return how long another value than `value` was in force, counted by milliseconds."""

    def in_force(at_ns: int) -> int:
        return next((each.value for each in reversed(changes) if each.ended_ns <= at_ns), 0)

    return sum(MS for at_ns in range(*span, MS) if in_force(at_ns) != value)


@drawn(15, 150, st.integers(0, 2**32 - 1))
def test_records_match_a_plain_model_of_rank_and_controller(seed: int):
    rng = Random(seed)
    some = [program(rng.randrange(2**32), version) for version in (1, 2)]
    programs = sorted(
        rng.choices((*some, None), (6, 3, 1), k=6),
        key=lambda each: 0 if each is None else each.version,
    )
    device, session = trained(rng, programs)
    changes = controlled(rng, device.written)
    telemetry = Telemetry(0, SEAT, offset_ns=lambda: 0)
    rows = []
    messages: list[object] = [*changes]
    for ended, ran in zip(session.ends, device.timed, strict=True):
        telemetry.on_end(*ended)
        ready = [each for each in messages if each.ended_ns <= ran.end_ns]
        messages = messages[len(ready) :]
        rows += telemetry.update([ran], ready)
    telemetry.update([], messages)
    rows += telemetry.close()
    assert [row.iteration for row in rows] == list(range(len(programs)))
    left, before = False, None
    for row, (_, ran_by, deviation), ran in zip(rows, session.ends, device.timed, strict=True):
        is_open = left and ran_by is before
        assert row.version == (ran_by and ran_by.version)
        assert row.is_as_planned == (ran_by is not None and deviation is None and not is_open)
        assert deviation is None or row.deviation == deviation
        left, before = deviation is not None, ran_by
        assert (row.begin_s, row.end_s) == (ran.begin_ns / 1e9, ran.end_ns / 1e9)
        assert row.busy_s == pytest.approx(
            sum(end - begin for begin, end in ran.spans_ns) / 1e9, abs=1e-9
        )
        if row.is_as_planned:
            expected_ns = sum(
                map(off_ns, ran.spans_ns, ran_by.clocks, [changes] * len(ran.spans_ns))
            )
            assert row.off_clock_s == pytest.approx(expected_ns / 1e9, abs=1e-5)
            assert row.changes_asked == row.changes_set + row.changes_overtaken
            assert row.planned_busy_s == pytest.approx(
                sum(ran_by.expected.plan.measurement(c).time_s for c in ran_by.computations)
            )
        else:
            assert (row.changes_asked, row.off_clock_s, row.planned_busy_s) == (0, 0.0, None)
    for each in telemetry.computations:
        if each.clock is not None and each.achieved_mhz not in (None, each.clock):
            assert off_ns((ns(each.begin_s), ns(each.end_s)), each.clock, changes) > 0


def iteration(number: int, begin_ns: int, end_ns: int) -> IterationTimes:
    return IterationTimes(number, begin_ns, ((begin_ns, end_ns),), end_ns)


def reading(
    at_ns: int, energy_j: float | None = None, clock_mhz: int | None = None, **throttled_s: float
) -> GpuSample:
    return GpuSample(
        at_ns, at_ns, energy_j, clock_mhz, None, 50.0 + at_ns / 1e12, throttled_s, 0, 0, None
    )


def deviate(telemetry: Telemetry, number: int, ran_by: Program) -> None:
    """Let an iteration of 10 ns end that did not run as planned."""
    telemetry.on_end(number, ran_by, "something else")
    begin_ns = 10 * number
    telemetry.update([iteration(number, begin_ns, begin_ns + 10)], [reading(begin_ns + 10)])


@drawn(
    10,
    100,
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=12),
    st.lists(st.integers(1, 10**6), min_size=2, max_size=8),
    st.integers(0, 2 * 10**6),
)
def test_energy_and_throttling_are_the_rise_of_the_counters_in_the_time_of_the_iteration(
    steps: list[tuple[int, int]], lengths: list[int], first_ns: int
):
    at_ns, joules = np.cumsum(steps, axis=0).T
    ends_ns = first_ns + np.cumsum(lengths)
    telemetry = Telemetry(0, SEAT, offset_ns=lambda: 0)
    readings = [
        reading(int(at), float(j), thermal=float(2 * j))
        for at, j in zip(at_ns, joules, strict=True)
    ]
    ran = [
        iteration(number, int(begin), int(end))
        for number, (begin, end) in enumerate(pairwise(ends_ns))
    ]
    rows = (
        telemetry.update(ran[:2], readings[:3])
        + telemetry.update(ran[2:], readings[3:])
        + telemetry.close()
    )
    for row, each in zip(rows, ran, strict=True):
        if at_ns[0] <= each.begin_ns and each.end_ns <= at_ns[-1]:
            rise = np.interp(each.end_ns, at_ns, joules) - np.interp(each.begin_ns, at_ns, joules)
            is_waited_for = len(rows) <= 4  # else it may have been given up before the reading came
            if row.energy_j is None:
                assert not is_waited_for
            else:
                assert row.energy_j == pytest.approx(rise, rel=1e-9, abs=1e-6)
                assert row.throttled_s == {"thermal": pytest.approx(2 * rise, rel=1e-9, abs=1e-6)}
        else:
            assert (row.energy_j, row.throttled_s) == (None, {})


def test_a_counter_that_begins_anew_or_is_not_there_gives_no_energy():
    telemetry = Telemetry(0, SEAT, offset_ns=lambda: 0)
    telemetry.update(
        [], [reading(0, 5.0), reading(10, 9.0), reading(20, 1.0), reading(30), reading(40, 3.0)]
    )
    rows = (
        telemetry.update([iteration(i, 10 * i, 10 * i + 10) for i in range(4)], [])
        + telemetry.close()
    )
    assert [row.energy_j for row in rows] == [4.0, None, None, None]
    assert [row.temperature_c for row in rows] == [
        reading(at).temperature_c for at in (10, 20, 30, 40)
    ]


def test_an_iteration_is_given_when_its_window_is_known_or_when_that_takes_too_long():
    telemetry = Telemetry(0, SEAT, offset_ns=lambda: 0)
    ran = [iteration(i, 10 * i, 10 * i + 10) for i in range(8)]
    for i in range(8):
        telemetry.on_end(i, None, None)
    assert telemetry.update(ran[:1], [reading(10)]) == []
    assert [row.iteration for row in telemetry.update(ran[1:2], [])] == [0]
    assert telemetry.update(ran[2:5], []) == []
    assert [row.iteration for row in telemetry.update(ran[5:6], [])] == [1]
    assert [row.iteration for row in telemetry.update([], [reading(45)])] == [2, 3]
    assert telemetry.update(ran[6:], []) == []
    rows = telemetry.close()
    assert [row.iteration for row in rows] == [4, 5, 6, 7]
    assert [row.next_s for row in rows] == [*(row.begin_s for row in rows[1:]), None]


DRY = "dry-run:nvml:0"


def test_a_dry_run_has_saved_nothing():
    of = {gpu: begun(gpu, "measured", iteration_s=4.0, deviation=None) for gpu in ("", DRY)}
    for gpu, knows in (("", True), (DRY, False)):
        planned = of[gpu][4:6]
        assert [row.is_as_planned for row in planned] == [True, True]
        assert [row.lowered > 0 for row in planned] == [knows, knows]
        assert [row.saved_j for row in planned] == [0.0, 0.0]  # no clock was set


def begun(gpu: str, origin: str, iteration_s: float, deviation: str | None = "something else"):
    """Return the records of iterations with a plan only in the fifth and sixth, whose computations
    take no time; a fifth of their time is between them, and they took 100 J, then 60 J.
    """
    ran_by, telemetry = program(3), Telemetry(0, SEAT, offset_ns=lambda: 0)
    telemetry.update([], [AttachReply(gpu, "", "A100", origin), reading(0, 0.0)])
    unit_ns = int(iteration_s * 1e8)
    for i in range(8):
        telemetry.on_end(i, None if i < 4 or i > 5 else ran_by, deviation)
        joules = 100.0 * min(i + 1, 4) + 60.0 * max(0, i - 3)
        begin_ns, end_ns = 10 * i * unit_ns, (10 * i + 8) * unit_ns
        spans_ns = tuple((begin_ns + k, begin_ns + k + 1) for k in range(len(ran_by.computations)))
        ran = IterationTimes(i, begin_ns, spans_ns, end_ns)
        telemetry.update([ran], [reading(10 * (i + 1) * unit_ns, joules)])
    return telemetry.iterations


def test_the_ring_keeps_the_last_ones():
    ran_by, telemetry = program(3), Telemetry(0, SEAT, capacity=3, offset_ns=lambda: 0)
    spans = tuple((2 * i, 2 * i + 1) for i in range(len(ran_by.computations)))
    for i in range(5):
        telemetry.on_end(i, ran_by, None)
        telemetry.update(
            [
                IterationTimes(
                    i,
                    100 * i,
                    tuple((100 * i + b, 100 * i + e) for b, e in spans),
                    100 * i + 60 + i,
                )
            ],
            [],
        )
    telemetry.update([], [reading(at, at * 2.0) for at in range(0, 600, 100)])
    telemetry.close()
    assert [row.iteration for row in telemetry.iterations] == [2, 3, 4]
    assert [row.energy_j for row in telemetry.iterations] == [
        pytest.approx(2.0 * (60 + i)) for i in (2, 3, 4)
    ]


def test_nothing_grows_without_bound():
    ran_by, telemetry = program(3), Telemetry(0, SEAT, capacity=4, offset_ns=lambda: 0)
    for i in range(30_000):
        change = ControlChange(0, 1000 + i % 2, i, i, i, None)
        telemetry.update([], [change, reading(i, float(i))])
        telemetry.on_end(i, ran_by, None)
    held = [value for value in vars(telemetry).values() if hasattr(value, "__len__")] + [
        [*telemetry._samples]
    ]
    assert max(map(len, held)) <= 20_000
    telemetry.update([iteration(i, i, i + 1) for i in range(50)], [])
    assert len(telemetry.iterations) == 4


def test_where_nothing_is_set_nothing_is_missed():
    ran_by = program(3)
    ran_by = Program.of_plan(1, replace(ran_by.expected.plan, control="observed"), 0)
    telemetry = Telemetry(0, SEAT, offset_ns=lambda: 0)
    spans = tuple((10 * i, 10 * i + 5) for i in range(len(ran_by.computations)))
    telemetry.on_end(0, ran_by, None)
    telemetry.update(
        [IterationTimes(0, 0, spans, 1000)], [reading(3, None, 1200), reading(1000, None, 900)]
    )
    (row,) = telemetry.close()
    assert row.is_as_planned
    assert (row.changes_asked, row.off_clock_s, row.achieved_mhz) == (0, 0.0, None)
    assert [each.achieved_mhz for each in telemetry.computations] == [1200] + [900] * (
        len(spans) - 1
    )


def test_computations_that_were_not_timed_are_a_deviation():
    ran_by, telemetry = program(3), Telemetry(0, SEAT, offset_ns=lambda: 0)
    telemetry.on_end(0, ran_by, None)
    telemetry.update([iteration(0, 0, 10)], [])
    (row,) = telemetry.close()
    assert (
        row.deviation == f"1 computations were timed, and the plan has {len(ran_by.computations)}"
    )


@pytest.mark.parametrize("fault", ["gone", "full", "no plan"])
def test_a_folder_that_can_no_longer_be_written_is_one_warning_and_telemetry_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    said: list[str] = []
    ran_by, folder = program(3), tmp_path / "run"
    files = RankFiles(folder, 0, 1, Attempt(1))
    rounds_s = (6.0 * number for number in counting())
    telemetry = Telemetry(
        0, SEAT, files, warn=said.append, offset_ns=lambda: 0, now_s=lambda: next(rounds_s)
    )
    if fault == "no plan":
        folder.touch()
    if fault == "full":
        attempt_path(folder, 1).mkdir(parents=True)
        (attempt_path(folder, 1) / "iterations-0.csv").symlink_to("/dev/full")
    for i in range(6):
        if i == 3 and fault == "gone":
            shutil.rmtree(folder)
        deviate(telemetry, i, ran_by)
    telemetry.close()
    why = {
        "gone": "No such file or directory",
        "full": "No space left on device",
        "no plan": "Not a directory",
    }[fault]
    assert said == [f"{folder}: recording stops: {why}; training goes on without recording"]
    assert len(telemetry.iterations) == 6


def test_rows_are_written_every_few_seconds_and_at_the_end_even_if_no_iteration_ends(
    tmp_path: Path,
):
    ran_by, now_s = program(3), [0.0]
    files = RankFiles(tmp_path, 0, 1, Attempt(1))
    telemetry = Telemetry(0, SEAT, files, offset_ns=lambda: 0, now_s=lambda: now_s[0])
    path, written = attempt_path(tmp_path, 1) / "iterations-0.csv", []
    for i, at_s in enumerate((0.5, 2.0, 5.0, 5.4, 5.5, 7.0, 20.0)):
        now_s[0] = at_s
        deviate(telemetry, i, ran_by)
        written.append(len(path.read_text().splitlines()) - 1 if path.exists() else 0)
    assert written == [0, 1, 1, 1, 1, 5, 6]
    deviate(telemetry, 7, ran_by)
    now_s[0] = 20.0 + WRITTEN_AFTER_S
    telemetry.update([], [])
    assert len(path.read_text().splitlines()) - 1 == 7
    deviate(telemetry, 8, ran_by)
    telemetry.close()
    assert len(path.read_text().splitlines()) - 1 == 9


def test_computations_are_written_every_half_minute_and_at_the_end(tmp_path: Path):
    ran_by, at_s = program(3), 0.0
    telemetry = Telemetry(0, SEAT, RankFiles(tmp_path, 0, 1, Attempt(1)), offset_ns=lambda: 0)
    written, count, path = (
        [],
        len(ran_by.computations),
        attempt_path(tmp_path, 1) / "computations-0.csv",
    )
    for i, at_s in enumerate((1.0, 2.0, 29.0, 31.0, 32.0, 61.0)):
        begin_ns = ns(at_s) - 10**6
        spans = tuple((begin_ns + 2 * k, begin_ns + 2 * k + 1) for k in range(count))
        telemetry.on_end(i, ran_by, None)
        telemetry.update([IterationTimes(i, begin_ns, spans, ns(at_s))], [reading(ns(at_s))])
        written.append(len(path.read_text().splitlines()) - 1 if path.exists() else 0)
    assert written == [0, 0, 0, 0, 4 * count, 4 * count]
    telemetry.on_end(6, ran_by, None)
    telemetry.update([IterationTimes(6, ns(62.0) - 10**6, spans, ns(62.0))], [reading(ns(62.0))])
    telemetry.close()
    assert len(path.read_text().splitlines()) - 1 == 7 * count


def test_where_the_engine_does_not_number_pipelines_their_first_ranks_do():
    telemetry = Telemetry(5, PipelineRank(1, 2, None, (4, 5)), offset_ns=lambda: 0)
    telemetry.update([iteration(0, 0, 10)], [])
    (row,) = telemetry.close()
    assert (row.pipeline, row.pipeline_rank) == (4, 1)


def test_a_gpu_that_becomes_slow_is_found_without_a_plan_by_what_its_times_were():
    ran = program(2)
    clocks = (HIGHEST, *(1200,) * (len(ran.computations) - 1))
    planned = Program(2, ran.computations, clocks, expected=Expected(1.0, HIGHEST, busy_s=1.0))
    telemetry, detector, found = Telemetry(0, SEAT), StragglerDetector(), []
    each_ns, now_ns = 10**9 // len(clocks), BEGIN_NS
    records = []
    for number in range(18):
        begin_ns, spans = now_ns, []
        for _ in clocks:
            spans.append((now_ns, now_ns + each_ns * (12 if number > 8 else 10) // 10))
            now_ns = spans[-1][1]
        telemetry.on_end(number, planned, None)
        records += telemetry.update([IterationTimes(number, begin_ns, tuple(spans), now_ns)], [])
    for record in [*records, *telemetry.close()]:
        detector, detection = detector.after(record)
        found += [] if detection is None else [(record.iteration, detection.slowdown)]
    assert found == [(13, pytest.approx(1.2, rel=1e-3))]
