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


class Watched:
    """A stand-in for a hook that looks inside iterations before they are a graph."""

    iteration = -1
    lane = None

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def capture(self, position: int) -> None:
        self.calls.append(position)

    def end_capture(self, found: Any) -> None:
        self.calls.append(("captured", tuple(found)))

    def end_eager(self, found: Any, microbatches: int | None) -> None:
        self.calls.append(("eager", tuple(found), microbatches))


class Iterations:
    """Iterations of Megatron's wrapper of graphs, whose schedule only starts and stops timers.

    Args:
        order: What an iteration runs; pairs by a combined step.
    """

    def __init__(self, order: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs = pytest.importorskip("megatron.core.full_cuda_graph")
        from perseus_planner.engines.edges import EdgeHook
        from perseus_planner.engines.engine import PipelineRank
        from perseus_planner.engines.guard import HookGuard
        from perseus_planner.engines.megatron_graphs import run_watched, showing_replays
        from perseus_planner.engines.megatron_pairs import CombinedStep

        self.order = order
        self.config = SimpleNamespace(timers=None)
        self.watched = Watched()
        hook = EdgeHook(self.watched)  # type: ignore[arg-type]
        guard = HookGuard(hook)
        rank = PipelineRank(0, 2, 0, (0, 1))
        self.module = SimpleNamespace(combined_forward_backward_step=self.step)
        names = ("f_model", "b_model", "config", "pre_forward", "pre_backward")
        combined = CombinedStep(self.module, names)

        def watch(is_captured: bool, step: Any, microbatches: int | None) -> Any:
            looking = hook.capturing, [self.config], rank, 1, 2, combined
            return run_watched(guard, *looking, is_captured, step, microbatches)

        self.watch = watch
        wrapper_class = self.graphs.FullCudaGraphWrapper
        monkeypatch.setattr(self.graphs, "StaticBufferLoader", lambda: None)
        monkeypatch.setattr(wrapper_class, "data_read", lambda *_: [])
        monkeypatch.setattr(wrapper_class, "cuda_graph", {"training": None, "validation": None})
        monkeypatch.setattr(wrapper_class, "result", {"training": None, "validation": None})
        monkeypatch.setattr(wrapper_class, "curr_iteration", {"training": 0, "validation": 0})
        monkeypatch.setattr(wrapper_class, "__call__", showing_replays(guard, watch))
        self.wrapper = wrapper_class(self.run, cuda_graph_warmup_steps=2)

    def run(self, **_: Any) -> str:
        for cell in self.order:
            if len(cell) == 2:
                models = {"f_model": "chunk", "b_model": "chunk"}
                self.module.combined_forward_backward_step(**models, config=self.config)
            elif self.config.timers is not None:
                name = {"F": "forward-compute", "B": "backward-compute"}[cell[0].kind]
                self.config.timers(name, log_level=2).start()
                self.config.timers(name).stop()
        return "losses"

    def step(self, **_: Any) -> None:
        # As Megatron's: it starts the timer of its forward alone.
        if self.config.timers is not None:
            self.config.timers("forward-compute", log_level=2).start()
            self.config.timers("forward-compute").stop()

    def __call__(self, microbatches: int) -> Any:
        call = dict.fromkeys(("model", "data_iterator", "seq_length"))
        return self.wrapper(**call, num_microbatches=microbatches, forward_only=False)


@pytest.mark.parametrize("name", ["1f1b", "combined-1f1b"])
def test_what_runs_before_there_is_a_graph_is_noted_and_what_is_captured_marked(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    generator = {
        "1f1b": lambda: schedules.one_f_one_b(2, 3),
        "combined-1f1b": lambda: schedules.combined_1f1b(2, 1, 3),
    }
    schedule = generator[name]()
    cells = schedule.cells[0]
    assert any(len(cell) == 2 for cell in cells) == (name == "combined-1f1b")
    shown = schedule.shown(0)
    iterations = Iterations(cells, monkeypatch)
    watched = iterations.watched
    assert iterations(3) == "losses"
    assert watched.calls == [("eager", shown, 3)]
    watched.calls.clear()
    iterations.wrapper.cuda_graph_warmup_steps = 1
    # There is no GPU to capture on: what is tested is what surrounds it.
    monkeypatch.setattr(iterations.graphs.torch.distributed, "barrier", lambda: None)
    with pytest.raises((RuntimeError, AssertionError, AttributeError, ImportError)):
        iterations(3)
    assert iterations.config.timers is None
    watched.calls.clear()
    assert iterations.watch(True, iterations.run, 3) == "losses"
    assert watched.calls == [*range(1, len(cells) + 1), ("captured", shown)]
    assert iterations.module.combined_forward_backward_step == iterations.step  # as it was


def test_an_iteration_that_ends_early_is_noted_as_far_as_it_ran(monkeypatch: pytest.MonkeyPatch):
    schedule = schedules.one_f_one_b(2, 3)
    iterations = Iterations(schedule.cells[0][:-1], monkeypatch)
    iterations(3)
    assert iterations.watched.calls == [("eager", schedule.ranks[0][:-1], 3)]
