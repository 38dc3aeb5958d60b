"""Marks on a stand-in for CUDA: requests and times follow the device's order, and nothing waits
for it.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from mmap import mmap
from types import SimpleNamespace
from typing import Any

import pytest
from fake_torch_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.runtime import cuda_marks
from perseus_planner.runtime.cuda_marks import CudaMarks
from perseus_planner.runtime.marks import KEPT, NO_REQUEST, clock_request

MS = 1_000_000


class Rig:
    """Marks on a stand-in device, and the expected results."""

    def __init__(self, cuda: FakeCuda | None = None) -> None:
        self.cuda = FakeCuda() if cuda is None else cuda
        self.page = mmap(-1, 4096)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_marks.time, "monotonic_ns", lambda: self.cuda.now_ns)
            self.marks = CudaMarks(self.page, "cuda:0", self.cuda, self.cuda)  # type: ignore[arg-type]
        self.marks._clock._now_ns = lambda: self.cuda.now_ns
        self.cuda.run()
        self.waits = self.cuda.waits

    @property
    def word(self) -> int:
        return struct.unpack_from("=Q", self.page)[0]

    def iteration(self, number: int, durations_ns: Sequence[int]) -> None:
        self.begin_iteration(number)
        for duration_ns in durations_ns:
            self.begin()
            self.cuda.work(duration_ns)
            self.end()
        self.marks.end_iteration()

    def begin_iteration(self, number: int) -> None:
        self._spans = self.marks.begin_iteration(number)

    def begin(self) -> None:
        self._begun = self.marks.now()

    def end(self) -> None:
        self._spans.append((self._begun, self.marks.now()))


def flat(timed: Any) -> list[int]:
    return [timed.begin_ns, *(time_ns for span in timed.spans_ns for time_ns in span), timed.end_ns]


def gaps(times_ns: Sequence[int]) -> list[int]:
    return [b - a for a, b in pairwise(times_ns)]


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.lists(st.integers(1, 2000), min_size=1, max_size=4)),
        st.tuples(st.just("want"), st.integers(-1, 3)),
        st.tuples(st.just("run"), st.integers(1, 4)),
    ),
    max_size=40,
)


@given(STEPS)
def test_a_request_appears_when_the_device_reaches_it_whatever_plan_was_loaded_since(steps):
    rig = Rig()
    rig.marks.load([])
    words, expected, seen = [NO_REQUEST], 0, []
    planned: deque[int | None] = deque()
    for what, value in steps:
        if what == "load":
            words = [clock_request(i, clock) for i, clock in enumerate(value)] + [NO_REQUEST]
            rig.marks.load(words[:-1])
        elif what == "want":
            index = value if value < len(words) - 1 else -1
            rig.cuda.work(MS)
            rig.marks.request(index)
            planned.extend((None, words[index]))
        else:
            for _ in range(value):
                rig.cuda.run(1)
                reached = planned.popleft() if planned else None
                expected = expected if reached is None else reached
                seen.append(rig.word == expected)
        assert rig.word == expected
    assert all(seen)
    assert rig.cuda.waits == rig.waits


@given(
    iterations=st.lists(st.lists(st.integers(1, 2_000 * MS), max_size=4), min_size=1, max_size=12),
    pauses_s=st.lists(st.sampled_from([0, 1, 600, 7200]), min_size=12, max_size=12),
    drift_ppm=st.sampled_from([-80.0, 0.0, 30.0]),
    steps=st.lists(st.integers(0, 9), min_size=12, max_size=12),
    is_prompt=st.booleans(),
)
def test_times_are_those_of_the_device_whenever_they_are_read(
    iterations, pauses_s, drift_ppm, steps, is_prompt
):
    rig, found = Rig(FakeCuda(drift_ppm, is_prompt)), []
    for number, (durations_ns, pause_s, count) in enumerate(
        zip(iterations, pauses_s, steps, strict=False)
    ):
        rig.cuda.passes(pause_s * 1_000 * MS)
        rig.iteration(number, durations_ns)
        rig.cuda.run(count)
        found += rig.marks.finished()
    rig.cuda.run()
    found += rig.marks.finished()
    if not is_prompt:
        rig.cuda.run()
        found += rig.marks.finished()
    assert rig.cuda.waits == rig.waits
    assert [timed.number for timed in found] == list(range(len(iterations)))
    truth = iter(rig.cuda.events_ns)
    for timed in found:
        found = flat(timed)
        true = [next(truth) for _ in found]
        lengths_ns = zip(gaps(found), gaps(true), strict=True)
        assert all(abs(a - b) <= 1 + b * (abs(drift_ppm) * 1e-6 + 2**-24) for a, b in lengths_ns)


@pytest.mark.parametrize("drift_ppm", [-80.0, 30.0])
@pytest.mark.parametrize("is_prompt", [True, False])
def test_times_do_not_go_astray_over_days(drift_ppm, is_prompt):
    rig, worst_ns = Rig(FakeCuda(drift_ppm, is_prompt)), 0
    for number in range(300):
        rig.cuda.passes(1_800_000 * MS)
        rig.cuda.events_ns.clear()
        rig.iteration(number, [500 * MS, 700 * MS])
        rig.cuda.run()
        found = rig.marks.finished()
        if not is_prompt:
            rig.cuda.run()
            found = rig.marks.finished()
        (timed,) = found
        worst_ns = max(
            worst_ns, *(abs(a - b) for a, b in zip(flat(timed), rig.cuda.events_ns, strict=True))
        )
    assert rig.cuda.now_ns > 6 * 86_400_000 * MS
    drift_ns, rounding_ns, looking_ns = (
        1_200 * MS * abs(drift_ppm) * 1e-6,
        1_800_000 * MS * 2**-24,
        200_000,
    )
    assert worst_ns <= drift_ns + rounding_ns + looking_ns


def test_an_iteration_has_no_times_before_the_device_has_ended_it():
    rig = Rig()
    rig.iteration(0, [MS, MS])
    while rig.cuda.queued:
        assert rig.marks.finished() == []
        rig.cuda.run(1)
    assert [timed.number for timed in rig.marks.finished()] == [0]
    assert rig.marks.finished() == []
    assert rig.cuda.waits == rig.waits


def test_a_capture_of_a_graph_is_left_alone_and_what_was_wanted_in_it_is_written_after_it():
    rig = Rig()
    rig.marks.load([clock_request(0, 900), clock_request(1, 800)])
    rig.iteration(0, [MS])
    rig.cuda.run()
    rig.begin_iteration(1)
    rig.begin()
    rig.cuda.is_capturing = True
    rig.marks.request(0)
    rig.end()
    rig.marks.request(1)
    assert [timed.number for timed in rig.marks.finished()] == [0]
    rig.cuda.is_capturing = False
    assert rig.cuda.broken_by == []
    rig.marks.end_iteration()
    rig.cuda.run()
    assert rig.word == clock_request(1, 800)
    rig.iteration(2, [MS])
    rig.cuda.run()
    assert [timed.number for timed in rig.marks.finished()] == [2]


def test_a_computation_that_is_broken_off_has_no_span():
    rig = Rig()
    rig.begin_iteration(0)
    rig.begin()
    rig.end()
    rig.begin()
    rig.marks.end_iteration()
    rig.cuda.run()
    (timed,) = rig.marks.finished()
    assert len(timed.spans_ns) == 1


def test_where_nobody_reads_the_times_no_more_are_kept():
    rig = Rig()
    for number in range(2 * KEPT):
        rig.iteration(number, [MS])
        rig.cuda.run()
    assert [timed.number for timed in rig.marks.finished()] == list(range(KEPT))
    rig.iteration(7, [MS])
    rig.cuda.run()
    assert [timed.number for timed in rig.marks.finished()] == [7]


@pytest.mark.parametrize(
    "function", ["cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamWriteValue64_v2"]
)
def test_a_refusal_gives_its_reason_and_leaves_nothing_behind(function):
    cuda, page = FakeCuda(refuses={function: 800}), mmap(-1, 4096)
    with CudaMarks(page, "cuda:0", cuda, cuda) as marks:  # type: ignore[arg-type]
        for call in (marks.finished, marks.renew):
            with pytest.raises(
                GpuError,
                match=r"the CUDA driver returns error 800 \(operation not permitted\) from cu",
            ):
                call()
    assert cuda.registered == set()


def test_training_goes_on_when_the_device_refuses_later_and_marks_can_be_made_anew():
    rig = Rig()
    rig.marks.load([clock_request(0, 900)])
    rig.marks.request(0)
    rig.cuda.run()
    assert rig.word == clock_request(0, 900)
    rig.cuda.refuses["cuStreamWriteValue64_v2"] = 700
    rig.marks.request(0)
    assert rig.word == NO_REQUEST
    rig.iteration(0, [MS])
    rig.cuda.run()
    for call in (rig.marks.finished, rig.marks.renew):
        with pytest.raises(GpuError, match="error 700"):
            call()
    rig.cuda.refuses.clear()
    rig.iteration(1, [MS])
    assert rig.cuda.queued == 1  # the work alone
    rig.marks.renew()
    rig.marks.request(0)
    rig.iteration(2, [MS])
    rig.cuda.run()
    assert rig.word == clock_request(0, 900)
    assert [timed.number for timed in rig.marks.finished()] == [2]


def test_an_iteration_of_which_a_side_stream_is_still_busy_is_left_unread():
    rig = Rig(FakeCuda(is_idle_stream_prompt=False))
    usual, side = rig.cuda.current, rig.cuda.Stream("cuda:0")
    rig.begin_iteration(0)
    rig.begin()
    rig.cuda.current = side
    rig.end()
    rig.cuda.current = usual
    rig.marks.end_iteration()
    rig.cuda.run(rig.cuda.queued)
    for _ in range(3):
        assert rig.marks.finished() == []
        while rig.marks._clock.stream.queue:
            rig.marks._clock.stream.run_next()
    side.run_next()
    rig.cuda.run()
    found = rig.marks.finished()
    if not found:
        rig.cuda.run()
        found = rig.marks.finished()
    assert [timed.number for timed in found] == [0]


def test_a_device_that_cannot_be_used_is_said_and_can_be_used_later(monkeypatch):
    def fail(device: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    cuda = FakeCuda()
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "Stream", fail)
        marks = CudaMarks(mmap(-1, 4096), "cuda:0", cuda, cuda)  # type: ignore[arg-type]
        with pytest.raises(GpuError, match="CUDA: CUDA error: out of memory"):
            marks.finished()
    marks.renew()
    assert marks.finished() == []


@pytest.mark.parametrize("name", ["current_stream", "Event", "is_current_stream_capturing"])
def test_an_error_of_cuda_is_not_raised_in_training(name, monkeypatch):
    def fail(*arguments: object, **named: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rig = Rig()
    monkeypatch.setattr(rig.cuda, name, fail)
    rig.marks.load([])
    rig.marks.request(-1)
    rig.iteration(0, [MS])
    with pytest.raises(GpuError, match="illegal memory access"):
        rig.marks.finished()


def test_the_page_is_let_go_when_the_device_has_written_all():
    rig = Rig()
    with rig.marks:
        rig.marks.load([clock_request(0, 900)])
        rig.cuda.work(MS)
        rig.marks.request(0)
        with pytest.raises(BufferError):
            rig.page.close()
    assert rig.word == clock_request(0, 900)
    assert rig.cuda.registered == set()
    assert rig.marks.close()
    rig.marks.request(0)
    assert rig.cuda.queued == 0
    rig.page.close()


def test_a_device_that_hangs_is_not_waited_for_and_keeps_the_page(monkeypatch):
    rig = Rig()
    hangs = threading.Event()
    monkeypatch.setattr(rig.cuda, "synchronize", lambda device: hangs.wait())
    assert not rig.marks.close(timeout_s=0.01)
    assert rig.cuda.registered
    with pytest.raises(BufferError):
        rig.page.close()
    hangs.set()
    assert rig.marks.close()


def test_a_driver_that_is_too_old_or_missing_is_said(monkeypatch):
    old = SimpleNamespace(
        cuMemHostRegister_v2=None, cuMemHostUnregister=None, cuMemHostGetDevicePointer_v2=None
    )
    marks = CudaMarks(mmap(-1, 4096), "cuda:0", FakeCuda(), old)  # type: ignore[arg-type]
    with pytest.raises(
        GpuNotSupported, match="has no cuStreamWriteValue64_v2; update the NVIDIA driver, to one"
    ):
        marks.finished()

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(GpuError, match=r"cannot load libcuda\.so\.1"):
        CudaMarks(mmap(-1, 4096), "cuda:0", FakeCuda()).finished()  # type: ignore[arg-type]
