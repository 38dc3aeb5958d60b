"""Times the computations of real engines with one rank, in turn with the hook and without it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from perseus_planner import Plan
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import Marks
from perseus_planner.runtime.program import Program

ENGINES = {"torch.distributed.pipelining": "torch", "DeepSpeed": "deepspeed"}
"""Name of an engine -> the package that it needs."""
_WARM_UP = 3  #: iterations; DeepSpeed's first one learns the shapes


@dataclass
class FixedProgram:
    """A `ProgramSource` with one program, which keeps the deviations."""

    program: Program
    deviations: list[str] = field(default_factory=list)

    def program_for(self, iteration: int) -> Program:
        """See `ProgramSource.program_for`."""
        return self.program

    def on_end(
        self, iteration: int, program: Program | None, deviation: str | None, *_: object
    ) -> None:
        """See `ProgramSource.on_end`."""
        if deviation is not None:
            self.deviations.append(deviation)


@dataclass
class Timings:
    """Nanoseconds from the begin of each computation to the begin of the next, for each iteration.

    Attributes:
        without_ns: Without the hook.
        with_ns: With the hook.
        deviations: What the engine ran that is not in the plan.
    """

    without_ns: list[list[int]] = field(default_factory=list)
    with_ns: list[list[int]] = field(default_factory=list)
    deviations: list[str] = field(default_factory=list)


def time_in_turn(name: str, plan: str, iterations: int) -> Timings:
    """Run iterations of an engine with and without the hook, in turn; this process is the only
    rank of the plan.
    """
    program, found, stamps_ns = Program.of_plan(1, Plan.loads(plan), 0), Timings(), list[int]()
    source = FixedProgram(program)
    hook = Hook(Marks(memoryview(bytearray(8)).cast("Q")), source, program)
    make = {"torch.distributed.pipelining": _torch_pipelining, "DeepSpeed": _deepspeed}[name]
    with _process_group():
        iterate, attached = make(_stage(stamps_ns), program.expected.plan.schedule.microbatches)
        for number in range(_WARM_UP + iterations):
            for is_hooked in (number % 2 == 0, number % 2 == 1):
                stamps_ns.clear()
                with attached(hook) if is_hooked else nullcontext():
                    iterate()
                lengths_ns = [b - a for a, b in pairwise(stamps_ns)]
                if number >= _WARM_UP:
                    (found.with_ns if is_hooked else found.without_ns).append(lengths_ns)
    found.deviations = source.deviations
    return found


@contextmanager
def _process_group() -> Iterator[None]:
    """Set up a process group with one rank."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _stage(stamps_ns: list[int]) -> Any:
    """Return a module that does almost no work and records when its forwards and backwards
    begin.
    """
    import torch

    class Stamped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
            return output.view_as(output)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            stamps_ns.append(time.perf_counter_ns())
            return gradient

    class Stage(torch.nn.Linear):
        def forward(self, microbatch: torch.Tensor) -> torch.Tensor:
            stamps_ns.append(time.perf_counter_ns())
            return Stamped.apply(super().forward(microbatch))

    return Stage(16, 16)


_Made = tuple[Callable[[], object], Callable[[Hook], AbstractContextManager[None]]]


def _torch_pipelining(stage: Any, microbatches: int) -> _Made:
    import torch
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from perseus_planner.engines.torch_pipelining import TorchPipeline

    schedule = Schedule1F1B(
        PipelineStage(stage, 0, 1, torch.device("cpu")), microbatches, loss_fn=_loss
    )
    batch = torch.randn(2 * microbatches, 16)
    return lambda: schedule.step(batch, target=batch), TorchPipeline(schedule).attached


def _deepspeed(stage: Any, microbatches: int) -> _Made:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    import torch
    from deepspeed.pipe import PipelineModule

    from perseus_planner.engines.deepspeed import DeepSpeedPipeline

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": microbatches,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "steps_per_print": 10**9,
    }
    engine, *_ = deepspeed.initialize(
        model=PipelineModule([stage], num_stages=1, loss_fn=_loss), config=config
    )
    microbatch = torch.randn(2, 16)

    def iterate() -> None:
        engine.train_batch(iter([(microbatch, microbatch)] * microbatches))

    return iterate, DeepSpeedPipeline(engine).attached


def _loss(output: Any, target: Any) -> Any:
    return (output - target).square().mean()
