"""Trains a small GPT on one GPU with torch.distributed.pipelining and one rank, for `on_gpu.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_planner import Plan, Profile, schedules, solve
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime import planner_runtime


@dataclass(frozen=True)
class Config:
    """Size of the model and number of iterations.

    Attributes:
        layers, hidden, heads, sequence: Dimensions of the GPT.
        rows: Sequences of a microbatch.
        microbatches: Microbatches of an iteration.
        warm_up: Iterations of each block that are not counted.
        iterations: Iterations of each block that are counted.
        blocks: Number of blocks with the runtime, and of blocks without.
        profiled: Iterations under the profiler.
    """

    layers: int = 8
    hidden: int = 1024
    heads: int = 16
    sequence: int = 512
    rows: int = 4
    microbatches: int = 8
    warm_up: int = 3
    iterations: int = 20
    blocks: int = 5
    profiled: int = 3


@dataclass(frozen=True)
class Training:
    """The training of the GPT.

    Attributes:
        schedule: The engine.
        iterate: Enqueues one iteration.
        plan: Alternates between two clocks, so that every computation requests a change.
        device: The GPU.
        config: Its configuration.
    """

    schedule: Any
    iterate: Callable[[], None]
    plan: Plan
    device: Any
    config: Config

    def runtime(self) -> AbstractContextManager[Any]:
        """Return a runtime for the engine, in a dry run."""
        return planner_runtime(
            self.schedule, plan=self.plan, gpu="cuda", dry_run=True, max_changes_per_s=1e4
        )

    @property
    def gpu(self) -> str:
        """Text that opens the GPU for reading."""
        return f"dry-run:{gpu_text('cuda', self.device)}"

    def turns(self) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
        """Yield blocks with and without the runtime in turn; each is first equally often."""
        for number in range(self.config.blocks):
            pair = [("with", self.runtime()), ("without", nullcontext())]
            yield from pair if number % 2 else reversed(pair)


@contextmanager
def training(config: Config, device: Any) -> Iterator[Training]:
    """Set up the training on `device`, in a process group of one process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import gpt

    torch.cuda.set_device(device)
    size = gpt.Size(config.layers, config.hidden, config.heads, config.sequence)
    model = gpt.stage(size, 0, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = (
        each.to(device) for each in gpt.batch(0, config.rows * config.microbatches, size)
    )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        schedule = Schedule1F1B(
            PipelineStage(model, 0, 1, device), config.microbatches, loss_fn=gpt.loss
        )

        def iterate() -> None:
            schedule.step(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()

        yield Training(schedule, iterate, _plan(device, config.microbatches), device, config)
    finally:
        dist.destroy_process_group()


def _plan(device: Any, microbatches: int) -> Plan:
    """Return a plan: forwards at the highest clock, backwards at the next; times and energies
    are made up.
    """
    with open_gpu(f"dry-run:{gpu_text('cuda', device)}") as gpu:
        high, low, *_ = gpu.supported_clocks_mhz
    made_up = Profile(
        {(0, "F"): (Measurement(high, 1.0, 1.0),), (0, "B"): (Measurement(low, 2.0, 2.0),)}, 0.0
    )
    frontier = solve(made_up, schedules.one_f_one_b(1, microbatches))
    return frontier.plan_until(frontier.baseline_time_s)
