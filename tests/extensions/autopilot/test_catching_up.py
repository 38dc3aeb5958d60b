"""Ranks that are late get faster clocks from their controller."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from batch_world import MICROBATCHES, profile_of
from controller_ranks import attached, awaited
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner import schedules
from perseus_planner.extensions.autopilot.batches.catching_up import CatchingUp
from perseus_planner.extensions.autopilot.batches.exchange import RankPlan
from perseus_planner.runtime.controller.protocol import (
    LATEST_BYTES,
    AttachRequest,
    ControlChange,
    LatestStarts,
)
from perseus_planner.runtime.controller.rank import Rank
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import (
    BEGUN,
    OUTSIDE,
    IterationTimes,
    Marks,
    clock_request,
    parse_clock_request,
    table_of,
)
from perseus_planner.runtime.program import Program, Table

MS = 1_000_000


def tables() -> LatestStarts:
    return LatestStarts(memoryview(bytearray(LATEST_BYTES)))


ROWS = st.lists(
    st.lists(
        st.tuples(st.integers(1, 3000), st.integers(-(2**40), 2**40)), min_size=1, max_size=9
    ).map(lambda row: sorted(row, key=lambda entry: entry[1])),
    min_size=1,
    max_size=40,
)


@given(st.integers(0, 2**40), ROWS, st.integers(-(2**41), 2**41))
def test_a_rank_gets_the_slowest_clock_whose_latest_start_is_not_over(iteration, rows, passed_ns):
    written = tables()
    table = written.write(iteration, rows)
    assert 0 < table < 2**16
    for position, row in enumerate(rows):
        wanted = next((clock for clock, latest_ns in row if latest_ns >= passed_ns), row[-1][0])
        assert written.clock(table, position, passed_ns) == wanted
    assert written.clock(table, len(rows), passed_ns) is None
    assert written.clock(table % 2**16 + 1, 0, passed_ns) is None


def test_large_programs_keep_the_planned_and_the_fastest_clocks_or_have_no_table():
    written = tables()
    row = [(900 + 100 * i, 10 * i) for i in range(6)]
    table = written.write(7, [row] * 600)
    assert [written.clock(table, 599, passed_ns) for passed_ns in (0, 1, 41, 60)] == [
        900,
        1300,
        1400,
        1400,
    ]
    assert written.write(8, [row] * 3000) == 0


def test_an_older_table_is_gone_once_its_place_is_taken():
    written = tables()
    numbers = [written.write(iteration, [[(900 + iteration, 0)]]) for iteration in range(6)]
    found = [written.clock(number, 0, 0) for number in numbers]
    assert found == [None, None, 902, 903, 904, 905]


@given(st.integers(0, 2**28 - 2), st.integers(1, 2**16 - 1), st.integers(0, 2**16 - 1))
def test_a_request_names_a_table(place: int, value: int, table: int):
    for part in (0, BEGUN, OUTSIDE):
        request = clock_request(place, value, table=table) | part
        assert parse_clock_request(request) == (place, value)
        assert table_of(request) == table


def test_a_controller_speeds_up_what_is_late_until_it_is_not():
    latest = tables()
    table = latest.write(0, [[(900, 0)], [(900, 100 * MS), (1200, 150 * MS), (1410, 180 * MS)]] * 2)
    shared = SimpleNamespace(request=[0], latest=latest)
    rank = Rank(Mock(), AttachRequest(0, "nvml:0", "clock", None), shared, os.getpid())

    def asked(at_ms: float, place: int, part: int = 0, table: int = table) -> int | None:
        shared.request[0] = clock_request(place, 900, table=table) | part
        found = rank.poll_request(10**9 + round(at_ms * MS))
        return None if found is None else found.value

    assert asked(0, 0, table=0) == 900  # not begun: it may wait as long as it likes
    assert asked(500, 0, BEGUN, table=0) == 900
    assert asked(590, 1) == 900
    assert asked(605, 1, BEGUN) == 1200  # its input came late
    assert asked(670, 2) == 900  # which has no faster clock
    assert asked(690, 3) == 1410
    assert asked(691, 0, OUTSIDE) == 900  # of the next iteration
    assert asked(900, 1) == 900  # whose begin was not seen
    rank.close()


def test_ranks_and_controllers_share_the_tables():
    with attached(["simulated:a100-sxm"]) as (connection,):
        table = connection.latest.write(
            3, [[(900, -1), (1005, 10**15)], [(900, 0), (1200, 10**15)]]
        )
        connection.request[0] = clock_request(0, 900, table=table)
        awaited(connection, ControlChange, lambda changed: changed.value == 900)
        connection.request[0] = clock_request(0, 900, table=table) | BEGUN
        changed = awaited(connection, ControlChange)
        assert (changed.position, changed.value) == (0, 1005)
        connection.request[0] = clock_request(1, 900, table=table)
        changed = awaited(connection, ControlChange)
        assert (changed.position, changed.value) == (1, 1200)


class Source:
    """Has one program."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def program_for(self, _: int) -> Program:
        return self.program

    def on_end(self, *_: Any) -> None: ...


class Written(Marks):
    """Keeps what is requested."""

    def __init__(self) -> None:
        super().__init__(memoryview(bytearray(8)).cast("Q"))
        self.requests: list[int] = []
        self.write = lambda _, request: self.requests.append(request)


@pytest.mark.parametrize("table", [0, 5])
def test_begins_are_written_only_where_there_is_a_table(table: int):
    order = schedules.one_f_one_b(1, 2).ranks[0]
    program = Program(1, order, (900, 1005, 900, 1005), table=Table(table) if table else None)
    marks = Written()
    hook = Hook(marks, Source(program), program)
    hook.begin_iteration(2)
    del marks.requests[:]
    for computation in order:
        hook.begin(*computation)
        hook.end()
    asked = [clock_request(i, clock, table=table) for i, clock in enumerate(program.clocks)]
    begun = [request | BEGUN for request in asked]
    ends = [*asked[1:], asked[0]]
    alternating = [each for pair in zip(begun, ends, strict=True) for each in pair]
    assert marks.requests == (alternating if table else ends)


def test_latest_starts_are_in_the_time_that_iterations_take():
    profile = profile_of(2)
    order = schedules.one_f_one_b(2, MICROBATCHES).ranks[0]
    rows = {kind: profile.measurements[0, kind] for kind in ("F", "B")}
    full_s = [rows[c.kind][0].time_s for c in order]
    catching_up = CatchingUp(profile)
    total_us = round(2e6 * sum(full_s))
    latest_us = tuple(total_us * (i + 1) // len(order) for i in range(len(order)))
    plan = RankPlan(((900, len(order)),), (1000, 1000 + total_us // 2), 1500, latest_us)
    clocks = tuple(rows[c.kind][4].clock_mhz for c in order)
    program = Program(1, order, clocks)
    assert catching_up.rows(program, full_s, plan, has_begun=True) == []
    for number in range(3):  # at full clocks, 10 % of what the plan lasts longer
        end_ns = round(1e3 * (total_us // 2 + 0.1 * (total_us - 1000)))
        times = IterationTimes(number, 0, ((0, 1), *[(2, end_ns)] * (len(order) - 1)), end_ns)
        catching_up.see_full_clocks(times, plan)
    found = catching_up.rows(program, full_s, plan, has_begun=True)
    for c, row, each_us, each_s in zip(order, found, latest_us, full_s, strict=True):
        measured = {m.clock_mhz: m.time_s / rows[c.kind][0].time_s for m in rows[c.kind][:5]}
        assert row[0][0] == rows[c.kind][4].clock_mhz
        assert measured[row[-1][0]] == min(measured.values())
        assert [start for _, start in row] == sorted(start for _, start in row)
        for clock, start_ns in row:
            latest_ns = 1.1e3 * (each_us - 1000) - 1e9 * each_s * measured[clock] + 1e6
            assert start_ns == pytest.approx(latest_ns, abs=10)
    # A planned clock above all that were measured of its computation still has a latest start.
    above = Program(1, order, (rows["F"][0].clock_mhz + 15,) * len(order))
    assert all(catching_up.rows(above, full_s, plan, has_begun=True))
