"""Programs of ranks that train under a plan, or cannot begin to; each prints a JSON object."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from runtime_training import (
    GPU,
    LONG_S,
    STEP_MHZ,
    TOP_MHZ,
    DeepSpeed,
    Torch,
    WarningLog,
    Watch,
    any_rank,
    equal,
    every_rank,
    followed,
    job,
    outcome,
    plan_of,
    planned,
    schedule_of,
    trained,
)

from perseus_planner.base.errors import PlanError, PlannerError
from perseus_planner.plans.plan import Plan
from perseus_planner.runtime import Runtime, attachment, planner_runtime, rendezvous
from perseus_planner.runtime.switching import Acceptance


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
            with planned(pipeline, plan) as runtime:
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
    """Evaluate between two iterations, at full clocks."""
    for _ in range(2):
        watch.planned = lambda: runtime.plan
        pipeline.step()
        watch.planned = None
        watch.await_locked(None)
        pipeline.evaluate()
        assert watch.gpu.locked_mhz is None


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
        seen.append(plans.index(program and program.expected.plan))
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
        with planned(pipeline, {0: first, 1: second}) as runtime:
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
            clocks=list(runtime.planned_clocks.values()),
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
        with planned(pipeline, plan, dry_run=True) as runtime:
            while not every_rank(len(runtime.iterations) >= 4):
                pipeline.step()
            result["as planned"] = {row.is_as_planned for row in runtime.iterations} == {True}
            result["set"] = sum(row.changes_set for row in runtime.iterations)
        result.update(plan=runtime.plan == plan, **outcome(runtime, warning_log))


# How training begins, or does not


def refusals(state: str) -> None:
    """Something is wrong on one or all ranks: no rank begins, and no rank waits for another."""
    rendezvous.RENDEZVOUS_S = rendezvous.REFUSAL_S = attachment.ATTACH_S = 100 * LONG_S
    with job(state) as result:
        log, engine = WarningLog(), Torch("1f1b", 2).engine
        fits, is_first = plan_of(schedule_of("1f1b", 2, 2)), dist.get_rank() == 0
        damaged = Path("damaged.yaml")
        if is_first:
            fits.save(damaged)
            damaged.write_text(damaged.read_text().replace("1410", "1395", 1))
        others = {
            "schedule of rank 1": plan_of(schedule_of("gpipe", 2, 2)),
            "microbatches": plan_of(schedule_of("1f1b", 2, 4)),
            "ranks": plan_of(schedule_of("1f1b", 4, 2)),
            "gpu": plan_of(schedule_of("1f1b", 2, 2), gpu="NVIDIA A100-SXM4-80GB"),
            "damaged": damaged,
            "folder": Path(),
            "missing": "absent.yaml",
            "missing for a pipeline": {0: "absent.yaml"},
        }
        for name, plan in others.items():
            result[name] = _entered(engine, plan)
        with mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}):
            result["missing after a restart"] = _entered(engine, "absent.yaml")
        result["gpu of rank 1"] = _entered(engine, fits, GPU if is_first else "emulated:a100-pcie")
        result["no gpu on rank 1"] = _entered(engine, fits, GPU if is_first else "cuda:0")
        result["a gpu that cannot be on rank 1"] = _entered(
            engine, fits, GPU if is_first else "simulated:a10000"
        )
        result["no engine on rank 1"] = _entered(
            engine if is_first else torch.nn.Linear(2, 2), fits
        )
        result["entered at last"] = _entered(engine, fits)
        result["warnings"] = log.taken()


def beside_another_job(state: str, gpu: str) -> None:
    """Use GPUs that another job sets."""
    rendezvous.RENDEZVOUS_S = attachment.ATTACH_S = 100 * LONG_S
    with job(state) as result:
        result["held"] = _entered(Torch("1f1b", 2).engine, plan_of(schedule_of("1f1b", 2, 2)), gpu)


def _entered(engine: Any, plan: Any, gpu: str = GPU) -> dict[str, Any]:
    """Return the error with which a rank was refused."""
    error = None
    try:
        with planner_runtime(engine, plan=plan, gpu=gpu):
            pass
    except PlannerError as refusal:
        error = refusal
    locked_mhz = Watch(gpu).gpu.locked_mhz if gpu.startswith("emulated") else None
    return {
        "error": type(error).__name__,
        "text": str(error),
        "locked_mhz": locked_mhz,
    }


def without(state: str) -> None:
    """Begin training without clocks, for several reasons."""
    with job(state) as result:
        log = WarningLog()
        fits, is_first = plan_of(schedule_of("1f1b", 2, 4)), dist.get_rank() == 0
        result["not permitted"] = _begun(log, fits, f"{GPU}&fault=not-permitted")
        result["no such GPU"] = _begun(log, fits, "emulated:a100-sxm?fault=lost@0calls")
        with mock.patch.object(sys, "executable", "/bin/false"):
            result["no controller"] = _begun(log, fits)
        with mock.patch.dict(os.environ, {"PLANNER_STATE_DIR": "/proc/none"}):
            result["no records"] = _begun(log, fits, watched=False)
        with mock.patch.object(rendezvous, "RENDEZVOUS_S", 0.3):
            result["a rank that does not come"] = _begun(log, fits, joins=is_first, watched=False)


def _begun(
    log: WarningLog, plan: Any, gpu: str = GPU, *, joins: bool = True, watched: bool = True
) -> dict[str, Any]:
    """Train as a rank that joins or does not; return the warnings, and whether the results are
    unchanged.
    """
    expected = trained(Torch("1f1b", 4), 2)
    watch = Watch(gpu) if watched else None
    if watch is not None:
        watch.planned = lambda: None
    pipeline = Torch("1f1b", 4, watch)
    with planned(pipeline, plan, gpu=gpu) if joins else nullcontext() as runtime:
        results = trained(pipeline, 2)
    return {
        "equal": equal(expected, results),
        "plan": runtime is not None and runtime.plan is not None,
        "problem": runtime and runtime.problem,
        "warnings": log.taken(),
    }
