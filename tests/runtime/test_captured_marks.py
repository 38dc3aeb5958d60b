"""Marks captured in a graph, on a stand-in that records what a capture records: positions come in
the order of the device at every replay, and the clocks are those of the plan of that replay.
"""

from __future__ import annotations

import os
import struct
from mmap import mmap
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from fake_torch_cuda import FakeCuda
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner import Plan, schedules
from perseus_planner.base.errors import PlanError
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime.captured_plan import CapturedPlan
from perseus_planner.runtime.controller.protocol import (
    LATEST_BYTES,
    AttachRequest,
    LatestStarts,
)
from perseus_planner.runtime.controller.rank import Rank
from perseus_planner.runtime.cuda_marks import CudaMarks
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import parse_clock_request
from perseus_planner.runtime.program import Program
from perseus_planner.schedules.pipeline import pipeline_iteration

MS = 1_000_000


def a_plan(clocks_mhz: list[int]) -> Plan:
    """Return a plan of one rank that runs as many computations, at these clocks."""
    schedule = schedules.one_f_one_b(1, len(clocks_mhz) // 2)
    (program,) = schedule.ranks
    clocks = {str(each): mhz for each, mhz in zip(program, clocks_mhz, strict=True)}
    rows = {mhz: Measurement(mhz, 0.1, mhz / 1000) for mhz in {1410, *clocks_mhz}}
    keys = [(0, "F"), (0, "B")]
    ordered = {str(each): clocks[str(each)] for each in schedule.computations()}
    time_s = 0.1 * len(clocks_mhz)
    numbers = (time_s, time_s, 30.0, 30.0, time_s, 40.0)
    full = dict.fromkeys(keys, rows[1410])
    measured = dict.fromkeys(keys, rows)
    iteration = pipeline_iteration(schedule)
    return Plan(
        iteration, ordered, measured, "0" * 64, None, "simulated", 1.0, *numbers, full_clocks=full
    )


class Replayed:
    """A rank whose iterations are replays of a graph with captured marks, and its controller."""

    def __init__(self, plan: Plan) -> None:
        self.cuda = FakeCuda()
        self.page = mmap(-1, 4096)
        self.marks = CudaMarks(self.page, "cuda:0", self.cuda, self.cuda)  # type: ignore[arg-type]
        self.cuda.run()
        latest = LatestStarts(memoryview(bytearray(LATEST_BYTES)))
        word = memoryview(self.page)[:8].cast("Q")
        shared = SimpleNamespace(request=word, latest=latest)
        request = AttachRequest(0, "nvml:0", "clock", None)
        self.controlled = Rank(Mock(), request, shared, os.getpid())  # type: ignore[arg-type]
        self.decider = CapturedPlan()
        self.program = self.decider.followed(Program.of_plan(1, plan, 0))
        self.decider.begin(SimpleNamespace(latest=latest))  # type: ignore[arg-type]
        self.hook = Hook(self.marks, self, self.program)
        self.problem: str | None = None
        self.order = plan.schedule.ranks[0]

    # What a `ProgramSource` does
    def program_for(self, _: int) -> Program:
        return self.program

    def on_end(self, *_: Any) -> None:
        """Nothing is checked at the end."""

    def on_unfollowed(self, problem: str) -> None:
        self.problem = problem

    def switch_to(self, plan: Plan, version: int) -> None:
        planned = Program.of_plan(version, plan, 0)
        self.program = self.decider.followed(planned)
        self.decider._write(planned)

    def capture(self) -> None:
        with self.cuda.captures() as self.graph:
            for place in range(len(self.order)):
                self.cuda.work(MS)
                self.hook.capture(place + 1)
        self.hook.end_capture(self.order)

    def iteration(self) -> None:
        """Enqueue an iteration."""
        self.hook.begin_iteration()
        self.hook.begin(0, "F", 0)
        self.cuda.replay(self.graph)
        self.hook.end()
        self.hook.end_iteration()

    def run(self) -> tuple[list[int], list[int]]:
        """Run what is enqueued; return positions, and the values that the controller sets."""
        positions: list[int] = []
        values: list[int] = []
        while self.cuda.queued:
            self.cuda.run(1)
            (word,) = struct.unpack_from("=Q", self.page)
            position, _ = parse_clock_request(word)
            if position is not None and (not positions or positions[-1] != position):
                positions.append(position)
            request = self.controlled.poll_request(self.cuda.now_ns)
            if request is not None and (not values or values[-1] != request.value):
                values.append(request.value)
        return positions, values


CLOCKS = st.lists(st.sampled_from([900, 1005, 1200, 1410]), min_size=1, max_size=6).map(
    lambda half: [*half, *half[::-1]]
)


def distinct(values: list[int]) -> list[int]:
    return [each for place, each in enumerate(values) if not place or each != values[place - 1]]


@given(CLOCKS, st.integers(1, 4))
def test_positions_are_in_order_at_every_replay(clocks: list[int], replays: int):
    replayed = Replayed(a_plan(clocks))
    replayed.capture()
    assert replayed.cuda.broken_by == []
    count = len(clocks)
    # After the last computation comes the position of the next iteration's first.
    wanted = [*range(count + 1), 0]
    for _ in range(replays):
        replayed.iteration()
        positions, values = replayed.run()
        assert positions == wanted
        assert distinct([value for value in values if value]) in (
            distinct([*clocks, clocks[0]]),
            distinct([*clocks, clocks[0]])[1:],  # that of the first one is set already
        )


@given(CLOCKS, st.data())
def test_another_plan_takes_effect_at_the_next_replay(clocks: list[int], data: st.DataObject):
    others = data.draw(
        st.lists(st.sampled_from([885, 990]), min_size=len(clocks), max_size=len(clocks))
    )
    replayed = Replayed(a_plan(clocks))
    replayed.capture()
    replayed.iteration()  # which the device has not begun when the plan changes
    replayed.switch_to(a_plan(others), 2)
    replayed.iteration()
    replayed.iteration()
    _, values = replayed.run()
    of_plans = [value for value in values if value]
    old = [value for value in of_plans if value in clocks]
    new = of_plans[len(old) :]
    assert of_plans[: len(old)] == old  # none of the old ones after one of the new ones
    assert distinct(old) == distinct([*clocks, clocks[0]])
    assert distinct(new) == distinct([*others, others[0], *others, others[0]])


def test_a_graph_that_runs_something_else_than_the_plan_is_not_followed():
    replayed = Replayed(a_plan([900, 1200, 1200, 900]))
    replayed.order = replayed.order[:-1]
    replayed.capture()
    assert replayed.problem == (
        "the captured graph runs nothing more where the plan has 0B1; solve for the schedule and "
        "the number of microbatches that you train with"
    )


def test_a_plan_with_more_computations_than_a_table_has_rows_is_refused():
    with pytest.raises(PlanError, match=r"has 2400 computations on this rank, and captured marks"):
        CapturedPlan().followed(Program.of_plan(1, a_plan([900] * 2400), 0))


def test_the_timers_of_a_captured_iteration_leave_a_mark_after_each_computation(
    monkeypatch: pytest.MonkeyPatch,
):
    graphs = pytest.importorskip("megatron.core.full_cuda_graph")
    from perseus_planner.engines.edges import EdgeHook
    from perseus_planner.engines.engine import PipelineRank
    from perseus_planner.engines.guard import HookGuard
    from perseus_planner.engines.megatron_graphs import run_captured, showing_replays
    from perseus_planner.schedules import one_f_one_b

    order = one_f_one_b(2, 3).ranks[0]
    config = SimpleNamespace(timers=None)
    captured: list[Any] = []

    class Capturing:
        iteration = -1
        lane = None

        def capture(self, position: int) -> None:
            captured.append(position)

        def end_capture(self, found: Any) -> None:
            captured.append(tuple(found))

    def run(**_: Any) -> str:
        if config.timers is not None:
            for computation in order:
                name = {"F": "forward-compute", "B": "backward-compute"}[computation.kind]
                config.timers(name, log_level=2).start()
                config.timers(name).stop()
        return "losses"

    hook = EdgeHook(Capturing())  # type: ignore[arg-type]
    guard = HookGuard(hook)
    rank = PipelineRank(0, 2, 0, (0, 1))

    def capture(step: Any, microbatches: int | None) -> Any:
        return run_captured(guard, hook.capturing, [config], rank, 1, 2, None, step, microbatches)

    wrapper_class = graphs.FullCudaGraphWrapper
    monkeypatch.setattr(graphs, "StaticBufferLoader", lambda: None)
    monkeypatch.setattr(wrapper_class, "data_read", lambda *_: [])
    monkeypatch.setattr(wrapper_class, "cuda_graph", {"training": None, "validation": None})
    monkeypatch.setattr(wrapper_class, "result", {"training": None, "validation": None})
    monkeypatch.setattr(wrapper_class, "curr_iteration", {"training": 0, "validation": 0})
    monkeypatch.setattr(wrapper_class, "__call__", showing_replays(guard, capture))
    call = dict.fromkeys(("model", "data_iterator", "seq_length"))
    wrapper = wrapper_class(run, cuda_graph_warmup_steps=2)
    assert wrapper(**call, num_microbatches=3, forward_only=False) == "losses"
    assert captured == []  # the first iterations run eagerly
    wrapper.cuda_graph_warmup_steps = 1
    # There is no GPU to capture on: what is tested is what surrounds it.
    monkeypatch.setattr(graphs.torch.distributed, "barrier", lambda: captured.append("barrier"))
    with pytest.raises((RuntimeError, AssertionError, AttributeError, ImportError)):
        wrapper(**call, num_microbatches=3, forward_only=False)
    assert config.timers is None
    captured.clear()
    assert capture(lambda: run(), 3) == "losses"
    assert captured == [*range(1, len(order) + 1), tuple(order)]
