"""Loops do their work when it is due or when they are woken, and end in time; pauses double."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator

import pytest
from waiting import LONG_S, eventually

from perseus_planner.base.loops import FIRST_PAUSE_S, LONGEST_PAUSE_S, Backoff, Loop


def test_a_loop_is_woken_and_stopped():
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = Loop(lambda: calls.put(1), "test").start()
    for _ in range(3):
        calls.get(timeout=LONG_S)  # the first call needs no wake
        loop.wake()
    assert loop.stop(LONG_S)
    loop.wake()
    assert loop.stop()


def test_a_descriptor_wakes_a_loop():
    reader, writer = os.pipe()
    calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def step() -> None:
        calls.put(os.read(reader, 1))

    os.write(writer, b"1")
    loop = Loop(step, "test", descriptors=lambda: [reader]).start()
    os.write(writer, b"2")
    assert [calls.get(timeout=LONG_S) for _ in range(2)] == [b"1", b"2"]
    os.write(writer, b"3")  # for the call that waits
    assert loop.stop(LONG_S)
    os.close(reader)
    os.close(writer)


def test_a_descriptor_does_not_wake_a_loop_that_rests():
    reader, writer = os.pipe()
    os.write(writer, b"1")  # which nobody reads
    calls: queue.SimpleQueue[int] = queue.SimpleQueue()
    loop = Loop(lambda: calls.put(1), "test", descriptors=lambda: [reader], rest_s=LONG_S).start()
    calls.get(timeout=LONG_S)
    loop.wake()
    calls.get(timeout=LONG_S)
    assert loop.stop(LONG_S)
    assert calls.empty()
    os.close(reader)
    os.close(writer)


def test_a_loop_ends_with_its_generator_which_is_closed():
    ended = threading.Event()

    def steps(times: int) -> Generator[float]:
        try:
            for _ in range(times):
                yield 0.0
        finally:
            ended.set()

    assert Loop(steps(3), "test").start() is not None
    assert ended.wait(LONG_S)
    ended.clear()
    loop = Loop(steps(10**9), "test").start()
    assert loop.stop(LONG_S)
    assert ended.is_set()


def test_a_loop_that_does_not_end_in_time_says_so():
    go_on = threading.Event()
    loop = Loop(lambda: go_on.wait() and None, "test").start()
    assert not loop.stop(0.0)
    go_on.set()
    assert loop.stop(LONG_S)


def test_an_error_ends_a_loop_and_goes_where_it_is_to(caplog: pytest.LogCaptureFixture):
    def fail() -> None:
        raise ValueError("a fault")

    errors: list[BaseException] = []
    Loop(fail, "test", on_error=errors.append).start()
    eventually(lambda: [str(error) for error in errors] == ["a fault"])
    assert caplog.records == []
    Loop(fail, "a loop").start()
    eventually(lambda: [record.getMessage() for record in caplog.records] == ["a loop ended"])


def test_pauses_double_up_to_ten_minutes_and_begin_anew_after_as_long_without_a_failure():
    pauses = Backoff()
    assert pauses.is_due(0.0)
    now_s, expected_s = 100.0, [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]
    for pause_s in expected_s:
        pauses.fail(now_s)
        assert not pauses.is_due(now_s + pause_s - 1e-6)
        assert pauses.is_due(now_s + pause_s)
        now_s += pause_s + 1.0
    pauses.fail(now_s + LONGEST_PAUSE_S)
    assert pauses.is_due(now_s + LONGEST_PAUSE_S + FIRST_PAUSE_S)
