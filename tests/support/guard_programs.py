"""Ranks that train while faults are raised in what the planner runs on the training thread.

Which functions that are is not listed here: the first iterations show which functions of the
package are entered, and then each of them raises in an iteration of its own, when it is called or
when it returns.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from runtime_training import (
    FAST,
    GPU,
    NAME,
    DeepSpeed,
    Torch,
    WarningLog,
    Watch,
    equal,
    every_rank,
    job,
    outcome,
    plan_of,
    schedule_of,
    trained,
)
from strategies import smooth_profile
from tiny_training import Layer
from torch.distributed import pipelining

import perseus_planner
from perseus_planner import Profile
from perseus_planner.base.errors import PlannerError
from perseus_planner.base.loops import LONGEST_PAUSE_S, Backoff
from perseus_planner.engines import torch_pipelining
from perseus_planner.profiler import pipeline as pipeline_module
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import Runtime, planner_runtime
from perseus_planner.runtime.follower import Follower

MICROBATCHES, LEARNT = 4, 4
PACKAGE = Path(perseus_planner.__file__).parent

SHELLS = {
    # The guard is what takes faults; these call the training and the guard, and nothing else.
    "TorchPipeline.attached.<locals>.step_hooked",
    "_step_of.<locals>.step",
    "_hooked_loss.<locals>.compute_hooked",
    "DeepSpeedPipeline.attached.<locals>.execute_hooked",
    "TimerEvents.around.<locals>.start",
    "TimerEvents.around.<locals>.stop",
    "TimerEvents._begin_iteration",
    "TimerEvents._end_iteration",
    "WrappedTimers.__call__",
    "WrappedTimer.__getattr__",
    # Timers of the training, if it has none.
    "_NoTimer.start",
    "WrappedTimers.__init__.<locals>.<lambda>",
    "Runtime.iteration",
    "Runtime._whole_training",
    "WholeTraining.begin",
    "WholeTraining.end",
    "LossOfSteps.watched.<locals>.wrapper",
    "followed_module.<locals>.enter",
    "followed_module.<locals>.leave",
    "_wrapped.<locals>.wrapper",
    "_ignore",
}


class Injected(LookupError):
    """A fault of the planner."""


Point = tuple[str, str, int]
"""Function; "call" or "return"; and which of its calls in an iteration."""


@dataclass
class Injector:
    """Counts the calls of the planner's functions in an iteration, and raises in one of them.

    Attributes:
        calls: Function -> how often it was called.
        point: Where to raise; None to raise nowhere.
        has_raised: Whether it has.
    """

    calls: Counter[str] = field(default_factory=Counter)
    point: Point | None = None
    has_raised: bool = False
    _names: dict[CodeType, str | None] = field(default_factory=dict)

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _name_of(code)
        name = self._names[code]
        if name is None:
            return
        self.calls[name] += event == "call"
        if self.point == (name, event, self.calls[name]) and not self.has_raised:
            self.has_raised = True
            raise Injected(name)

    @contextmanager
    def watching(self, point: Point | None = None) -> Iterator[None]:
        self.calls.clear()
        self.point, self.has_raised = point, False
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)

    def points(self, calls: Counter[str]) -> list[Point]:
        """Return where to raise: in the first call of each function, and in its last."""
        return [
            (name, event, number)
            for name, count in sorted(calls.items())
            for event in ("call", "return")
            for number in sorted({1, count})
        ]


def _name_of(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    if PACKAGE not in path.parents or path.name == "guard.py":
        return None
    name = getattr(code, "co_qualname", code.co_name)
    return None if name in SHELLS else f"{path.relative_to(PACKAGE)}:{name}"


class Whole:
    """Training without a pipeline, with the interface of `Torch`."""

    engine = None

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = Layer()
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=0.01)

    def step(self, runtime: Runtime | None = None) -> list[Any]:
        with nullcontext() if runtime is None else runtime.iteration():
            loss = self.layer(torch.rand(2, 8)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [loss.detach()]

    def state(self) -> list[Any]:
        return [*(each.detach().clone() for each in self.layer.parameters()), torch.rand(1)]


class Megatron:
    """Training by Megatron-core, with the interface of `Torch`."""

    def __init__(self) -> None:
        from tiny_gpt import Training

        self._training = Training()
        self.engine = self._training.model

    def step(self) -> list[Any]:
        return list(self._training.step(MICROBATCHES))

    def state(self) -> list[Any]:
        return [*self._training.weights(), torch.rand(1)]


def _work(microbatch: Any) -> float:
    return float(microbatch[0].square().mean() if isinstance(microbatch, tuple) else 1.0)


@contextmanager
def _way(name: str, folder: Path) -> Iterator[tuple[Callable[[], Any], dict[str, Any]]]:
    """Return what makes a training, and the options of `planner_runtime`."""
    engine, _, by = name.partition(" ")
    plan = plan_of(schedule_of("1f1b", 2, MICROBATCHES))
    options: dict[str, Any] = {"plan": plan, "max_changes_per_s": FAST}
    if by == "work":
        if dist.get_rank() == 0:
            smooth = smooth_profile(2, 90)
            of_gpu = Profile(smooth.measurements, smooth.blocking_power_w, gpu=NAME)
            of_gpu.save(folder / "profile.yaml")
        dist.barrier()
        options = {"work": _work, "learn": False, "state": folder / "profile.yaml"}
    elif by == "autopilot" or engine == "whole":
        options = {"state": None}
    if engine == "megatron":
        from tiny_gpt import parallel

        with parallel():
            yield Megatron, options
        return
    make = {
        "torch": lambda: Torch("1f1b", MICROBATCHES),
        "deepspeed": lambda: DeepSpeed(MICROBATCHES),
        "whole": Whole,
    }
    yield make[engine], options


def runtime(state: str, name: str, share: str, seed: str) -> None:
    """Train with faults, one in each iteration, with no pause after them; then two iterations
    without, after which clocks are set again.

    Args:
        state: Folder of the leases.
        name: Engine, and by what its clocks are decided.
        share: Share of the points that are drawn.
        seed: Of the draws.
    """
    no_pause = mock.patch.object(Backoff.__init__, "__defaults__", (0.0, LONGEST_PAUSE_S, None))
    with job(state) as result, _way(name, Path.cwd()) as (make, options), no_pause:
        warning_log, injector = WarningLog(), Injector()
        pipeline, losses, silent, steps = make(), list[Any](), list[Point](), 0
        calls = Counter[str]()

        def step(point: Point | None = None, *, is_watched: bool = True) -> None:
            nonlocal steps
            steps += 1
            with injector.watching(point) if is_watched else nullcontext():
                losses.extend(_step(pipeline, planner))

        with planner_runtime(pipeline.engine, gpu=GPU, **options) as planner:
            for _ in range(LEARNT):
                step()
                calls |= injector.calls
            points = injector.points(calls)
            random = Random(int(seed))
            drawn = [point for point in points if random.random() < float(share)]
            raised = 0
            while not every_rank(not drawn):
                point = drawn.pop() if drawn else None
                step(point)
                raised += injector.has_raised
                if point is not None and not injector.has_raised:
                    silent.append(point)
            for _ in range(2):
                step(is_watched=False)
            while not every_rank(planner.problem is None):
                step(is_watched=False)
            result["counted"] = planner._follower.agreement.begun + 1
        results = [*losses, *pipeline.state()]
        again, expected = make(), list[Any]()
        for _ in range(steps):
            expected += _step(again, None)
        expected += again.state()
        result |= {
            "equal": equal(expected, results),
            "steps": steps,
            "raised": raised,
            "silent": silent,
            "points": len(points),
            "functions": sorted(calls),
            "warnings": warning_log.taken(),
        }


def _step(pipeline: Any, planner: Runtime | None) -> list[Any]:
    if isinstance(pipeline, Whole):
        return pipeline.step(planner)
    return list(pipeline.step())


def said_once(state: str, name: str, where: str) -> None:
    """Train with a fault that stays, on all ranks, and with the pauses of a real training.

    Args:
        state: Folder of the leases.
        name: Engine, and by what its clocks are decided.
        where: Which method raises: "on_end" on the training thread, or "look" of the decider, which
            the background thread calls.
    """

    def broken(*_: object) -> None:
        raise KeyError("broken")

    with job(state) as result, _way(name, Path.cwd()) as (make, options):
        warning_log, watch = WarningLog(), Watch()
        pipeline, losses, steps = make(), list[Any](), 0
        with planner_runtime(pipeline.engine, gpu=GPU, **options) as planner:
            for _ in range(2):
                losses += _step(pipeline, planner)
                steps += 1
            owner = Follower if where == "on_end" else type(planner._decider)
            with mock.patch.object(owner, where, broken):
                while not every_rank(planner.problem is not None):
                    losses += _step(pipeline, planner)
                    steps += 1
                losses += _step(pipeline, planner)
                steps += 1
        results = [*losses, *pipeline.state()]
        again, expected = make(), list[Any]()
        for _ in range(steps):
            expected += _step(again, None)
        result["equal"] = equal([*expected, *again.state()], results)
        result |= outcome(planner, warning_log, watch)


def upgraded(state: str, lost: str) -> None:
    """Train by an engine that lacks a name, refused and not."""
    names = {
        "name of a schedule": (torch_pipelining, "_NEEDED", ("_lost",)),
        "class": (pipelining.schedules, "PipelineScheduleMulti", None),
    }
    with job(state) as result:
        pipeline, warning_log = Torch("1f1b", MICROBATCHES), WarningLog()
        owner, name, value = names[lost]
        before = getattr(owner, name)
        if value is None:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
        plan = plan_of(schedule_of("1f1b", 2, MICROBATCHES))
        try:
            with planner_runtime(pipeline.engine, plan=plan, gpu=GPU):
                result["strict"] = None
        except PlannerError as error:
            result["strict"] = type(error).__name__
        losses = list[Any]()
        with planner_runtime(pipeline.engine, plan=plan, gpu=GPU, strict=False) as planner:
            for _ in range(3):
                losses += pipeline.step()
        setattr(owner, name, before)
        again = [*losses, *pipeline.state()]
        result["equal"] = equal(trained(Torch("1f1b", MICROBATCHES), 3), again)
        result |= outcome(planner, warning_log)


def twice(state: str) -> None:
    """Plan a second engine of this process while the first one is planned."""
    with job(state) as result:
        plan = plan_of(schedule_of("1f1b", 2, MICROBATCHES))
        first, second = Torch("1f1b", MICROBATCHES), Torch("1f1b", MICROBATCHES)
        with planner_runtime(first.engine, plan=plan, gpu=GPU) as planner:
            first.step()
            try:
                with planner_runtime(second.engine, plan=plan, gpu=GPU):
                    result["refused"] = None
            except PlannerError as error:
                result["refused"] = str(error)
            first.step()
            result["problem"] = planner.problem


def raises(state: str, iterations: str, place: str) -> None:
    """Train, alone, by iterations of which one raises, which the script takes."""
    with job(state) as result:
        plan = plan_of(schedule_of("1f1b", 1, MICROBATCHES))
        pipeline = Torch("1f1b", MICROBATCHES)

        def fail(*_: object) -> None:
            raise RuntimeError("of the training")

        result["raised"] = 0
        with planner_runtime(pipeline.engine, plan=plan, gpu=GPU, record="run"):
            for number in range(int(iterations)):
                failing = [
                    module.register_forward_pre_hook(fail)
                    for module in pipeline.engine._stage.submod.children()
                    if number == int(place)
                ]
                try:
                    pipeline.step()
                except RuntimeError:  # torch wraps it
                    result["raised"] += 1
                for each in failing:
                    each.remove()


def quiet(state: str, name: str, is_planned: str) -> None:
    """Train a few iterations, in which later ranks wait for the first, and print nothing."""
    with job(state) as result, _way(name, Path.cwd()) as (make, options):
        pipeline = make()
        context: AbstractContextManager[Any] = nullcontext()
        if is_planned == "planned":
            context = planner_runtime(pipeline.engine, gpu=GPU, **options)
        with context as planner:
            for _ in range(4):
                time.sleep(0.3 if dist.get_rank() == 0 else 0.0)
                _step(pipeline, planner)
        result["done"] = True


def profiling(state: str, name: str, share: str, seed: str) -> None:
    """Record iterations for a profile, with a fault in each; none is profiled, and all train."""
    with job(state) as result, _way(name, Path.cwd()) as (make, _):
        warning_log, injector = WarningLog("perseus_planner.profiler"), Injector()
        pipeline, losses, problems = make(), list[Any](), list[str]()

        def step(point: Point | None = None) -> None:
            # Instead of measuring, all ranks only hear whether one of them has a problem.
            stopped = mock.patch.object(
                pipeline_module, "measure_with_ranks", lambda group, *_: group.gather(None)[0]
            )
            profiled = profile_pipeline(pipeline.engine, gpu=GPU)
            with stopped, profiled as found, injector.watching(point):
                losses.extend(_step(pipeline, None))
            problems.append(found.problem or "")

        step()
        points = injector.points(injector.calls.copy())
        random = Random(int(seed))
        drawn = [point for point in points if random.random() < float(share)]
        raised, unsaid = 0, list[Point]()
        while not every_rank(not drawn):
            point = drawn.pop() if drawn else None
            step(point)
            raised += injector.has_raised
            if injector.has_raised and point is not None and "fault" not in problems[-1]:
                unsaid.append(point)
        results = [*losses, *pipeline.state()]
        again, expected = make(), list[Any]()
        for _ in problems:
            expected += _step(again, None)
        result["equal"] = equal([*expected, *again.state()], results)
        result |= {"raised": raised, "unsaid": unsaid, "first": problems[0]}
        result |= {"functions": sorted(injector.calls), "warnings": warning_log.taken()}
