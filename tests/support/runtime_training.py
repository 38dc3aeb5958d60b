"""What the ranks of tests train with: jobs, plans, hooks, and a watch of how pipelines run."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from tiny_training import DeepSpeed as DeepSpeed
from tiny_training import Torch as Torch
from waiting import LONG_S as LONG_S
from waiting import eventually as eventually

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime import Runtime, planner_runtime
from perseus_planner.schedules import Computation, Schedule, generate
from perseus_planner.schedules.pipeline import pipeline_iteration

GPU = "emulated:a100-sxm?call=0"
NAME = "simulated a100-sxm"  #: of such a GPU
FAST = 1e6  #: changes per second, more than are requested
TOP_MHZ, STEP_MHZ = 1410, 15


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    virtual = 2 if name.startswith(("interleaved", "looped")) else None
    return generate(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)


def plan_of(
    schedule: Schedule, top_mhz: int = TOP_MHZ, gpu: str | None = NAME, control: str = "clock"
) -> Plan:
    """Return a plan in which each computation of a rank has another clock, from `top_mhz` down."""
    places = {str(each): place for row in schedule.ranks for place, each in enumerate(row)}
    clocks = {str(each): top_mhz - STEP_MHZ * places[str(each)] for each in schedule.computations()}
    iteration = pipeline_iteration(schedule)
    measured = {
        key: {clock: Measurement(clock, 1.0, 1.0) for clock in clocks.values()}
        for key in iteration.keys
    }
    # Long enough that no rank counts as quiet while it waits for a clock.
    return Plan(
        iteration, clocks, measured, "0" * 64, gpu, "simulated", 1.0, *[30.0] * 6, control=control
    )


@contextmanager
def job(state: str) -> Iterator[dict[str, Any]]:
    """Run a rank of a job; it prints the dictionary at the end."""
    os.environ["PLANNER_STATE_DIR"] = state
    dist.init_process_group("gloo")
    result: dict[str, Any] = {}
    yield result
    dist.barrier()  # no rank leaves while another one uses the store
    print("\n" + json.dumps(result), flush=True)
    dist.destroy_process_group()


class WarningLog(logging.Handler):
    """Collects the warnings of a logger on this rank, by default of the runtime's."""

    def __init__(self, name: str = "perseus_planner.runtime") -> None:
        super().__init__()
        self._texts: list[str] = []
        logging.getLogger(name).addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self._texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """Return the warnings since the last call."""
        texts, self._texts = self._texts, []
        return texts


class Recorder:
    """A stand-in for a hook that records its calls by iteration.

    Attributes:
        problems: Why it was shown nothing more.
    """

    lane = None  # so that each begin and end is a call
    wants_batch = True

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.iterations: list[dict[str, Any]] = []
        self.inside = self.computing = False
        self.evaluations = 0

    @property
    def iteration(self) -> int:
        return len(self.iterations) - 1

    def begin_iteration(
        self, microbatches: int | None = None, _batch: Any = None, _number: int | None = None
    ) -> None:
        assert not self.inside
        self.inside, self.computing = True, False
        self.iterations.append({"microbatches": microbatches, "computations": []})

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        assert self.inside
        assert not self.computing
        self.computing = True
        self.iterations[-1]["computations"].append(str(Computation(stage, kind, microbatch)))

    def end(self) -> None:
        assert self.computing
        self.computing = False

    def note_evaluation(self) -> None:
        assert not self.inside
        self.evaluations += 1

    def begin_update(self) -> None:
        assert not self.computing

    def end_iteration(self) -> None:
        assert self.inside
        self.inside = False

    def abandon_iteration(self) -> None:
        self.inside = self.computing = False

    def stop_following(self, problem: str) -> None:
        self.abandon_iteration()
        self.problems.append(problem)

    def pass_iteration(self, number: int) -> None:
        raise AssertionError(number)

    def take_fault(self, error: Exception) -> None:
        """Note a fault of the adapter, or an assertion above that does not hold."""
        traceback.print_exception(error)
        self.problems.append(repr(error))

    def end_fault(self) -> None:
        raise AssertionError


class Watch:
    """Waits at the begin of each computation until its clock is locked.

    Attributes:
        planned: Returns the plan that should be in force, or None if the GPU should be reset; None
            to wait for nothing.
        takes_s: Seconds that each computation takes in addition.
        locked_mhz: All clocks that were locked when a computation began.

    Args:
        gpu: The GPU; by default the emulated GPU of this rank.
    """

    def __init__(self, gpu: str = GPU) -> None:
        opened = open_gpu(gpu_text(gpu, torch.device("cpu")))
        assert isinstance(opened, EmulatedGpu)
        self.gpu = opened
        self.planned: Callable[[], Plan | None] | None = None
        self.takes_s = 0.0
        self.locked_mhz: set[int | None] = set()
        self._ran: list[str] = []

    def __call__(self, stage: int, kind: str, microbatch: int) -> None:
        computation = str(Computation(stage, kind, microbatch))
        self._ran.append(computation)
        self.locked_mhz.add(self.gpu.locked_mhz)
        if self.planned is not None:
            plan = self.planned()
            self.await_locked(None if plan is None else plan.clocks[computation])
        time.sleep(self.takes_s)

    def await_locked(self, clock_mhz: int | None) -> None:
        eventually(
            lambda: self.gpu.locked_mhz == clock_mhz,
            lambda: f"{self.gpu.locked_mhz} MHz, and not {clock_mhz}",
        )

    def taken(self) -> list[str]:
        """Return what ran since the last call."""
        ran, self._ran = self._ran, []
        return ran


def any_rank(holds: bool) -> bool:
    """Return whether it holds on any rank; all ranks get the same answer."""
    answer = torch.tensor(int(holds))
    dist.all_reduce(answer, dist.ReduceOp.MAX)
    return bool(answer)


def every_rank(holds: bool) -> bool:
    """Return whether it holds on all ranks; all ranks get the same answer."""
    return not any_rank(not holds)


def equal(some: list[Any], others: list[Any]) -> bool:
    """Return whether the results of two trainings are the same bit for bit."""
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


def trained(pipeline: Any, iterations: int) -> list[Any]:
    """Return the results of so many iterations."""
    return [*(loss for _ in range(iterations) for loss in pipeline.step()), *pipeline.state()]


def planned(
    pipeline: Any, plan: Any, *, gpu: str | None = GPU, **options: Any
) -> AbstractContextManager[Runtime]:
    """Let a pipeline train by a plan inside the block."""
    return planner_runtime(
        pipeline.engine, plan=plan, gpu=gpu, **({"max_changes_per_s": FAST} | options)
    )


def followed(create: Callable[[Watch | None], Any], plan: Plan) -> dict[str, Any]:
    """Return what a pipeline runs with the runtime, and whether the results equal those without."""
    warning_log, watch = WarningLog(), Watch()
    expected = trained(create(None), 3)
    pipeline, results, orders = create(watch), [], []
    with planned(pipeline, plan) as runtime:
        watch.planned = lambda: runtime.plan
        for _ in range(3):
            results += pipeline.step()
            orders.append(watch.taken())
        results += pipeline.state()
        assert runtime.plan == plan
    return {
        "equal": equal(expected, results),
        "orders": orders,
        "plan": [str(each) for each in plan.schedule.ranks[pipeline.rank]],
        "as planned": [row.is_as_planned for row in runtime.iterations],
        "after": watch.gpu.locked_mhz,
        **outcome(runtime, warning_log),
    }


def outcome(
    runtime: Runtime, warning_log: WarningLog, watch: Watch | None = None
) -> dict[str, Any]:
    """Return what a test asks of a training that has ended."""
    locked = {} if watch is None else {"locked_mhz": watch.gpu.locked_mhz}
    return {"problem": runtime.problem, "warnings": warning_log.taken(), **locked}
