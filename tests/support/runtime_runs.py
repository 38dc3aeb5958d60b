"""What ranks run to train under a plan, whole; each prints as JSON what it found."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from runtime_training import (
    FAST,
    GPU,
    LONG_S,
    STEP_MHZ,
    TOP_MHZ,
    DeepSpeed,
    Heard,
    Torch,
    Watch,
    any_rank,
    every_rank,
    job,
    plan_of,
    schedule_of,
)

from perseus_planner.plans.plan import Plan
from perseus_planner.runtime import Runtime, planner_runtime
from perseus_planner.runtime.switching.agreement import Acceptance


def torch_schedules(state: str, *names: str) -> None:
    """Each schedule, trained without and with the runtime."""
    with job(state) as said:
        for name in names:
            ranks = dist.get_world_size()
            plan = plan_of(schedule_of(name, ranks, 2 * ranks))
            said[name] = followed(lambda watch, name=name, count=2 * ranks: Torch(name, count, watch), plan)


def deepspeed_engine(state: str) -> None:
    """DeepSpeed's, trained without and with the runtime."""
    with job(state) as said:
        ranks = dist.get_world_size()
        plan = plan_of(schedule_of("1f1b", ranks, 2 * ranks))
        said["1f1b"] = followed(lambda watch: DeepSpeed(2 * ranks, watch), plan)


def followed(made: Callable[[Watch | None], Any], plan: Plan) -> dict[str, Any]:
    """What a pipeline runs with the runtime, at which clocks, and whether that leads where it leads without."""
    heard, watch = Heard(), Watch()
    plain = made(None)
    expected = [*(loss for _ in range(3) for loss in plain.step()), *plain.state()]
    pipeline, found, orders = made(watch), [], []
    with planner_runtime(pipeline.engine, plan=plan, gpu=GPU, max_changes_per_s=FAST) as runtime:
        watch.planned = lambda: runtime.plan
        for _ in range(3):
            found += pipeline.step()
            orders.append(watch.taken())
        found += pipeline.state()
        assert runtime.plan == plan
    return {
        "equal": len(expected) == len(found) and all(map(torch.equal, expected, found)),
        "orders": orders,
        "plan": [str(each) for each in plan.schedule.ranks[pipeline.seat]],
        "as planned": [row.is_as_planned for row in runtime.iterations],
        "after": watch.gpu.locked_mhz,
        "problem": runtime.problem,
        "heard": heard.taken(),
    }


def changes(state: str) -> None:
    """What may happen while a job trains by a plan: one iteration after another, in one session."""
    with job(state) as said:
        heard, watch = Heard(), Watch()
        pipeline = Torch("1f1b", 4, watch)
        plan = plan_of(schedule_of("1f1b", 2, 4))
        next_plan = plan_of(schedule_of("1f1b", 2, 4), TOP_MHZ - 20 * STEP_MHZ)
        try:
            with planner_runtime(pipeline.engine, plan=plan, gpu=GPU, max_changes_per_s=FAST) as runtime:
                _evaluates(pipeline, watch, runtime)
                _changes_microbatches(pipeline, watch, runtime)
                said["switch"] = _switches(pipeline, runtime, [None, plan, next_plan])
                watch.planned = None  # rank 0 will be without
                said["late"] = _switches_late(pipeline, runtime, [None, next_plan, plan])
                said["as planned"] = [row.is_as_planned for row in runtime.iterations]
                said["deviations"] = [row.deviation for row in runtime.iterations if row.deviation is not None]
                raise ArithmeticError  # noqa: TRY301
        except ArithmeticError:
            said["locked"] = watch.gpu.locked_mhz
        said["left"] = type(pipeline.engine).step is pipeline.engine.step.__func__
        said["heard"] = heard.taken()


def _evaluates(pipeline: Torch, watch: Watch, runtime: Runtime) -> None:
    """Between two iterations, at whatever clock is set."""
    for _ in range(2):
        watch.planned = lambda: runtime.plan
        pipeline.step()
        watch.planned = None
        watch.await_locked(TOP_MHZ)
        pipeline.evaluate()
        assert watch.gpu.locked_mhz == TOP_MHZ


def _changes_microbatches(pipeline: Torch, watch: Watch, runtime: Runtime) -> None:
    """Twice there are others: then, and in the next iteration, the GPU is as it was."""
    for microbatches in (6, 2):
        pipeline.change(microbatches)
        watch.planned = lambda: None
        pipeline.step()
        pipeline.change(4)
        pipeline.step()
        watch.planned = lambda: runtime.plan
        pipeline.step()


def _switches(pipeline: Torch, runtime: Runtime, plans: list[Plan | None]) -> dict[str, Any]:
    """By which of `plans` iterations ran; rank 1 proposes the last one while rank 0's background stands still."""
    stands, go_on = _stopped(runtime, lambda: dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert stands.wait(LONG_S)
    dist.barrier()
    proposal = runtime.switch_to(plans[2]) if dist.get_rank() == 1 else None
    ran = [_ran(pipeline, runtime, plans) for _ in range(5)]
    go_on.set()
    while not every_rank(ran[-2:] == [2, 2]):
        ran.append(_ran(pipeline, runtime, plans))
    outcome = None if proposal is None else proposal.wait(LONG_S)
    return {"ran": ran, "since": outcome.iteration if isinstance(outcome, Acceptance) else None}


def _switches_late(pipeline: Torch, runtime: Runtime, plans: list[Plan | None]) -> dict[str, Any]:
    """The same, but that thread stands still once rank 0 has said yes, so that it does not hear what is decided."""
    agreement = runtime._follower.agreement
    _, go_on = _stopped(runtime, lambda: dist.get_rank() == 0 and agreement._promised > 0)
    if dist.get_rank() == 1:
        runtime.switch_to(plans[2])
    ran = []
    while not any_rank(ran[-2:] == [2, 2]):
        ran.append(_ran(pipeline, runtime, plans))
    go_on.set()
    while not every_rank(ran[-2:] == [2, 2]):
        ran.append(_ran(pipeline, runtime, plans))
    return {"ran": ran}


def _ran(pipeline: Torch, runtime: Runtime, plans: list[Plan | None]) -> int:
    """Run an iteration; by which of `plans`."""
    seen: list[int] = []
    find = runtime._follower.program_for

    def program_for(iteration: int) -> Any:
        program = find(iteration)
        seen.append(plans.index(program and program.plan))
        return program

    runtime._follower.program_for = program_for
    pipeline.step()
    runtime._follower.program_for = find
    return seen[0]


def _stopped(runtime: Runtime, when: Callable[[], bool]) -> tuple[threading.Event, threading.Event]:
    """Stop this rank's background thread when `when` is true: set when it stands still; and what lets it go on."""
    stands, go_on, look = threading.Event(), threading.Event(), runtime._follower.look

    def stopped() -> None:
        if when():
            stands.set()
            go_on.wait()
        look()

    runtime._follower.look = stopped
    return stands, go_on


def pipelines(state: str) -> None:
    """Two pipelines of two stages, each by plans of its own, which they change together."""
    with job(state) as said:
        heard, watch = Heard(), Watch()
        pipeline = Torch("1f1b", 4, watch, sides=2)
        schedule = schedule_of("1f1b", 2, 4)
        first, second, third, fourth = (plan_of(schedule, TOP_MHZ - 10 * STEP_MHZ * each) for each in range(4))
        with planner_runtime(pipeline.engine, plan={0: first, 1: second}, gpu=GPU, max_changes_per_s=FAST) as runtime:
            watch.planned = lambda: runtime.plan
            before, after = ((first, third), (second, fourth))[runtime.pipeline]
            if dist.get_rank() == 3:
                runtime.switch_to({0: third, 1: fourth})
            ran: list[int] = []
            while not every_rank(ran[-2:] == [1, 1]):
                ran.append(_ran(pipeline, runtime, [before, after]))
        said.update(pipeline=runtime.pipeline, ran=ran, locked=watch.gpu.locked_mhz, heard=heard.taken())


def dry_run(state: str) -> None:
    """All but setting clocks."""
    with job(state) as said:
        heard, watch = Heard(), Watch()
        pipeline = Torch("1f1b", 4, watch)
        watch.planned, watch.takes_s = (lambda: None), 0.01
        plan = plan_of(schedule_of("1f1b", 2, 4))
        with planner_runtime(pipeline.engine, plan=plan, gpu=GPU, dry_run=True, max_changes_per_s=FAST) as runtime:
            while not every_rank(any(row.changes_set for row in runtime.iterations)):
                pipeline.step()
            said["as planned"] = {row.is_as_planned for row in runtime.iterations} == {True}
        said.update(plan=runtime.plan == plan, problem=runtime.problem, heard=heard.taken())
