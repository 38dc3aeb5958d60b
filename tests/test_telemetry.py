"""What a rank says of its iterations is what was done on it, whatever its engine, its controller and its disk do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_runs import BEGIN_NS, any_plan, ns, timed
from strategies import fixed, smooth_profile

from perseus_planner import Plan, schedules
from perseus_planner.dag import PipelineDag
from perseus_planner.pipeline import pipeline_iteration
from perseus_planner.runs import RanIteration, Run
from perseus_planner.runtime.controller.messages import Attached, Changed, Reading
from perseus_planner.runtime.engines.engine import Seat
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import NOTHING, Timed, place_and_value
from perseus_planner.runtime.program import Program
from perseus_planner.runtime.telemetry import Telemetry

SEAT = Seat(0, 2, None, (0, 1))
MS = 10**6
HIGHEST = 1410


def program(seed: int, version: int = 1) -> Program:
    """Rank 0 of a pipeline of two, its clocks drawn from few, so that some are alike."""
    schedule, rng = schedules.one_f_one_b(2, rng_size(seed)), Random(seed)
    dag = PipelineDag(smooth_profile(2, step_mhz=200), pipeline_iteration(schedule))
    return Program(version, any_plan(dag, rng), 0)


def rng_size(seed: int) -> int:
    return 1 + seed % 4


@dataclass
class Device:
    """Marks on a clock of their own, and all that was written to the word."""

    now_ns: int = BEGIN_NS
    written: list[tuple[int, int]] = field(default_factory=list)  #: when, word
    words: Sequence[int] = ()
    begun: tuple[int, int] = (0, 0)
    times_ns: list[int] = field(default_factory=list)
    timed: list[Timed] = field(default_factory=list)

    def load(self, words: Sequence[int]) -> None:
        self.words = (*words, NOTHING)

    def want(self, index: int) -> None:
        self.written.append((self.now_ns, self.words[index]))

    def begin_iteration(self, number: int) -> None:
        self.begun, self.times_ns = (number, self.now_ns), []

    def begin(self) -> None:
        self.times_ns.append(self.now_ns)

    end = begin

    def end_iteration(self) -> None:
        spans = tuple(zip(self.times_ns[0::2], self.times_ns[1::2], strict=True))
        self.timed.append(Timed(*self.begun, spans, self.now_ns))

    def finished(self) -> list[Timed]:
        return self.timed


@dataclass
class Session:
    """A pilot that passes on what ends, and changes programs as drawn."""

    programs: list[Program | None]
    ends: list[tuple[int, Program | None, str | None]] = field(default_factory=list)

    def program_for(self, iteration: int) -> Program | None:
        return self.programs[iteration]

    def three_quarters(self, iteration: int) -> None:
        pass

    def ended(self, iteration: int, program: Program | None, deviation: str | None) -> None:
        self.ends.append((iteration, program, deviation))


def trained(rng: Random, programs: list[Program | None]) -> tuple[Device, Session]:
    """An engine that runs what the programs say, and now and then something else."""
    device, session = Device(), Session(programs)
    hook = Hook(device, session, programs[0])
    for each in programs:
        device.now_ns += rng.randint(1, 20) * MS
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


def controlled(rng: Random, written: list[tuple[int, int]]) -> list[Changed]:
    """A controller that looks at the word after a while, of which the latest value wins."""
    changes, in_force, free_ns = [], 0, 0
    for (at_ns, word), (next_ns, _) in zip(written, [*written[1:], (10**18, 0)], strict=True):
        place, value = place_and_value(word)
        seen_ns = max(at_ns + rng.choice((0, 1, 2, 2, 15, 80)) * MS, free_ns)
        if seen_ns < next_ns and value != in_force:
            free_ns = seen_ns + rng.randint(1, 5) * MS
            changes.append(Changed(place, value, seen_ns, seen_ns, free_ns, in_force or HIGHEST))
            in_force = value
    return changes


def off_ns(span: tuple[int, int], value: int, changes: list[Changed]) -> int:
    """For how long another value than `value` was in force, counted millisecond by millisecond."""

    def in_force(at_ns: int) -> int:
        return next((each.value for each in reversed(changes) if each.ended_ns <= at_ns), 0)

    return sum(MS for at_ns in range(*span, MS) if in_force(at_ns) != value)


@settings(fixed, max_examples=150)
@given(st.integers(0, 2**32 - 1))
def test_rows_say_what_a_plain_model_of_rank_and_controller_says(seed: int):
    rng = Random(seed)
    some = [program(rng.randrange(2**32), version) for version in (1, 2)]
    programs = sorted(rng.choices((*some, None), (6, 3, 1), k=6), key=lambda each: 0 if each is None else each.version)
    device, session = trained(rng, programs)
    changes = controlled(rng, device.written)
    telemetry = Telemetry(0, SEAT, offset_ns=lambda: 0)
    rows = []
    messages: list[object] = [*changes]
    for ended, ran in zip(session.ends, device.timed, strict=True):
        telemetry.ended(*ended)
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
        assert row.busy_s == pytest.approx(sum(end - begin for begin, end in ran.spans_ns) / 1e9, abs=1e-9)
        if row.is_as_planned:
            expected_ns = sum(map(off_ns, ran.spans_ns, ran_by.clocks, [changes] * len(ran.spans_ns)))
            assert row.off_clock_s == pytest.approx(expected_ns / 1e9, abs=1e-5)
            assert row.changes_asked == row.changes_set + row.changes_overtaken
            assert row.planned_busy_s == pytest.approx(
                sum(ran_by.plan.measurement(c).time_s for c in ran_by.computations)
            )
        else:
            assert (row.changes_asked, row.off_clock_s, row.planned_busy_s) == (0, 0.0, None)
    for each in telemetry.computations:
        if each.clock is not None and each.achieved_mhz not in (None, each.clock):
            assert off_ns((ns(each.begin_s), ns(each.end_s)), each.clock, changes) > 0
