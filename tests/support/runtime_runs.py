"""Programs of ranks that train under a plan; each prints its findings as JSON."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
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
    Torch,
    WarningLog,
    Watch,
    any_rank,
    every_rank,
    job,
    plan_of,
    schedule_of,
)

from perseus_planner.base.errors import PlanError
from perseus_planner.plans.plan import Plan
from perseus_planner.runtime import Runtime, planner_runtime
from perseus_planner.runtime.switching.agreement import Acceptance


def torch_schedules(state: str, *names: str) -> None:
    """Train each schedule without and with the runtime."""
    with job(state) as result:
        for name in names:
            ranks = dist.get_world_size()
            plan = plan_of(schedule_of(name, ranks, 2 * ranks))
            result[name] = followed(
                lambda watch, name=name, count=2 * ranks: Torch(name, count, watch), plan
            )


def deepspeed_engine(state: str) -> None:
    """Train DeepSpeed's engine without and with the runtime."""
    with job(state) as result:
        ranks = dist.get_world_size()
        plan = plan_of(schedule_of("1f1b", ranks, 2 * ranks))
        result["1f1b"] = followed(lambda watch: DeepSpeed(2 * ranks, watch), plan)


def followed(made: Callable[[Watch | None], Any], plan: Plan) -> dict[str, Any]:
    """Return what a pipeline runs with the runtime, and whether the results equal those without."""
    warning_log, watch = WarningLog(), Watch()
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
        "plan": [str(each) for each in plan.schedule.ranks[pipeline.rank]],
        "as planned": [row.is_as_planned for row in runtime.iterations],
        "after": watch.gpu.locked_mhz,
        "problem": runtime.problem,
        "warnings": warning_log.taken(),
    }


def _raises_at(number: int) -> Callable[[], None]:
    """Return a function that raises when it is called for this time."""
    calls = count(1)

    def called() -> None:
        if next(calls) == number:
            raise ArithmeticError

    return called


def changes(state: str) -> None:
    """Let one job meet all kinds of changes while it trains by a plan."""
    with job(state) as result:
        warning_log, watch = WarningLog(), Watch()
        pipeline = Torch("1f1b", 4, watch)
        plan = plan_of(schedule_of("1f1b", 2, 4))
        next_plan = plan_of(schedule_of("1f1b", 2, 4), TOP_MHZ - 20 * STEP_MHZ)
        try:
            with planner_runtime(
                pipeline.engine, plan=plan, gpu=GPU, max_changes_per_s=FAST
            ) as runtime:
                _evaluates(pipeline, watch, runtime)
                _changes_microbatches(pipeline, watch, runtime)
                result["switch"] = _switches(pipeline, runtime, [None, plan, next_plan])
                watch.planned = None  # the ranks will have different plans
                result["late"] = _switches_late(pipeline, runtime, [None, next_plan, plan])
                result["as planned"] = [row.is_as_planned for row in runtime.iterations]
                result["deviations"] = [
                    row.deviation for row in runtime.iterations if row.deviation is not None
                ]
                deviation = runtime._follower.deviation
                if dist.get_rank() == 0:
                    watch.await_locked = lambda _: None  # it may have no clocks
                    watch.planned = _raises_at(8)  # its last computation, for which no rank waits
                pipeline.step()
                raise ArithmeticError  # noqa: TRY301
        except ArithmeticError:
            result["deviates by raising"] = runtime._follower.deviation != deviation
            result["locked"] = watch.gpu.locked_mhz
        result["left"] = type(pipeline.engine).step is pipeline.engine.step.__func__
        result["warnings"] = warning_log.taken()


def _evaluates(pipeline: Torch, watch: Watch, runtime: Runtime) -> None:
    """Evaluate between two iterations, at any clock."""
    for _ in range(2):
        watch.planned = lambda: runtime.plan
        pipeline.step()
        watch.planned = None
        watch.await_locked(TOP_MHZ)
        pipeline.evaluate()
        assert watch.gpu.locked_mhz == TOP_MHZ


def _changes_microbatches(pipeline: Torch, watch: Watch, runtime: Runtime) -> None:
    """Change the number of microbatches twice; then, and in the next iteration, no clock is set."""
    for microbatches in (6, 2):
        pipeline.change(microbatches)
        watch.planned = lambda: None
        pipeline.step()
        pipeline.change(4)
        pipeline.step()
        watch.planned = lambda: runtime.plan
        pipeline.step()


def _switches(pipeline: Torch, runtime: Runtime, plans: list[Plan | None]) -> dict[str, Any]:
    """Return the plan of each iteration; rank 1 proposes the last one, and rank 0 hears of it
    before it begins.
    """
    proposal = runtime.switch_to(plans[2]) if dist.get_rank() == 1 else None
    outcome = None if proposal is None else proposal.wait(LONG_S)
    dist.barrier()
    ran = [_ran(pipeline, runtime, plans)]
    while not every_rank(runtime._follower.agreement._known[-1].version == 2):
        pass
    while not every_rank(ran[-2:] == [2, 2]):
        ran.append(_ran(pipeline, runtime, plans))
    return {"ran": ran, "since": outcome.iteration if isinstance(outcome, Acceptance) else None}


def _switches_late(pipeline: Torch, runtime: Runtime, plans: list[Plan | None]) -> dict[str, Any]:
    """Do the same, but stop rank 0's background thread until rank 1 runs by the last plan."""
    stands, go_on = _stopped(runtime, lambda: dist.get_rank() == 0)
    if dist.get_rank() == 0:
        assert stands.wait(LONG_S)
    dist.barrier()
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
    """Run an iteration; return which of `plans` it ran by."""
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
    """Stop this rank's background thread once `when` is true; return events for that and to
    continue it.
    """
    stands, go_on, look = threading.Event(), threading.Event(), runtime._follower.look

    def stopped() -> None:
        if when():
            stands.set()
            go_on.wait()
        look()

    runtime._follower.look = stopped
    return stands, go_on


def pipelines(state: str) -> None:
    """Train two pipelines of two stages, each by its own plans, which they change together."""
    with job(state) as result:
        warning_log, watch = WarningLog(), Watch()
        pipeline = Torch("1f1b", 4, watch, sides=2)
        schedule = schedule_of("1f1b", 2, 4)
        first, second, third, fourth = (
            plan_of(schedule, TOP_MHZ - 10 * STEP_MHZ * each) for each in range(4)
        )
        with planner_runtime(
            pipeline.engine, plan={0: first, 1: second}, gpu=GPU, max_changes_per_s=FAST
        ) as runtime:
            watch.planned = lambda: runtime.plan
            before, after = ((first, third), (second, fourth))[runtime.pipeline]
            if dist.get_rank() == 3:
                with suppress(PlanError):  # as there is none for pipeline 0
                    runtime.switch_to({1: fourth})
                    raise AssertionError
                runtime.switch_to({0: third, 1: fourth})
            ran: list[int] = []
            while not every_rank(ran[-2:] == [1, 1]):
                ran.append(_ran(pipeline, runtime, [before, after]))
        result.update(
            pipeline=runtime.pipeline,
            ran=ran,
            locked=watch.gpu.locked_mhz,
            warnings=warning_log.taken(),
        )


def dry_run(state: str) -> None:
    """Train with `dry_run`."""
    with job(state) as result:
        warning_log, watch = WarningLog(), Watch()
        pipeline = Torch("1f1b", 4, watch)
        watch.planned, watch.takes_s = (lambda: None), 0.01
        plan = plan_of(schedule_of("1f1b", 2, 4))
        with planner_runtime(
            pipeline.engine, plan=plan, gpu=GPU, dry_run=True, max_changes_per_s=FAST
        ) as runtime:
            while not every_rank(any(row.changes_set for row in runtime.iterations)):
                pipeline.step()
            result["as planned"] = {row.is_as_planned for row in runtime.iterations} == {True}
        result.update(
            plan=runtime.plan == plan, problem=runtime.problem, warnings=warning_log.taken()
        )
