"""The training of a small GPT on one GPU, by torch.distributed.pipelining with one rank, for `on_gpu.py`."""

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
    """What is trained, and how often.

    Attributes:
        layers, hidden, heads, sequence: of the GPT.
        rows: of a microbatch.
        microbatches: of an iteration.
        warm_up: iterations of each block that are not counted.
        iterations: of each block that are.
        blocks: with the runtime, and as many without.
        profiled: iterations under the profiler.
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
    """The GPT's training.

    Attributes:
        schedule: the engine.
        iterate: enqueues one iteration.
        plan: two clocks in turn, so that every computation asks for another one.
        device: where it runs.
        config: what it is.
    """

    schedule: Any
    iterate: Callable[[], None]
    plan: Plan
    device: Any
    config: Config

    def runtime(self) -> AbstractContextManager[Any]:
        """The runtime around it, in a dry run."""
        return planner_runtime(self.schedule, plan=self.plan, gpu="cuda", dry_run=True, max_changes_per_s=1e4)

    @property
    def gpu(self) -> str:
        """What opens its GPU, for reading alone."""
        return f"dry-run:{gpu_text('cuda', self.device)}"

    def turns(self) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
        """Blocks with and without the runtime, in turn, each first as often as the other."""
        for number in range(self.config.blocks):
            pair = [("with", self.runtime()), ("without", nullcontext())]
            yield from pair if number % 2 else reversed(pair)


@contextmanager
def training(config: Config, device: Any) -> Iterator[Training]:
    """It is set up on `device`, in a process group of this process."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
    import gpt

    torch.cuda.set_device(device)
    size = gpt.Size(config.layers, config.hidden, config.heads, config.sequence)
    model = gpt.stage(size, 0, 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, targets = (each.to(device) for each in gpt.batch(0, config.rows * config.microbatches, size))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        schedule = Schedule1F1B(PipelineStage(model, 0, 1, device), config.microbatches, loss_fn=gpt.loss)

        def iterate() -> None:
            schedule.step(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()

        yield Training(schedule, iterate, _plan(device, config.microbatches), device, config)
    finally:
        dist.destroy_process_group()


def _plan(device: Any, microbatches: int) -> Plan:
    """Forwards at the GPU's highest clock, backwards at the next; the seconds and joules in it mean nothing."""
    with open_gpu(f"dry-run:{gpu_text('cuda', device)}") as gpu:
        high, low, *_ = gpu.supported_clocks_mhz
    made_up = Profile({(0, "F"): (Measurement(high, 1.0, 1.0),), (0, "B"): (Measurement(low, 2.0, 2.0),)}, 0.0)
    frontier = solve(made_up, schedules.one_f_one_b(1, microbatches))
    return frontier.plan_for(frontier.baseline_time_s)
