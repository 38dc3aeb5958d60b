"""Pipelines of real engines for the ranks of tests, plans for them, and a watch of how they run."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from schedule_engines import TORCH
from torch import nn
from torch.distributed import pipelining
from waiting import LONG_S as LONG_S
from waiting import eventually as eventually

from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules import Computation, Schedule, generate
from perseus_planner.schedules.pipeline import pipeline_iteration

WIDTH, ROWS = 8, 2
GPU = "emulated:a100-sxm?call=0"
NAME = "simulated a100-sxm"  #: of such a GPU
FAST = 1e6  #: changes per second, more than are requested
TOP_MHZ, STEP_MHZ = 1410, 15

Watcher = Callable[[int, str, int], None]


def schedule_of(name: str, ranks: int, microbatches: int) -> Schedule:
    virtual = 2 if name.startswith("interleaved") else None
    return generate(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual)


def plan_of(
    schedule: Schedule, top_mhz: int = TOP_MHZ, gpu: str | None = NAME, control: str = "clock"
) -> Plan:
    """Return a plan in which each computation of a rank has another clock, from `top_mhz` down."""
    places = {str(each): place for row in schedule.ranks for place, each in enumerate(row)}
    clocks = {str(each): top_mhz - STEP_MHZ * places[str(each)] for each in schedule.computations()}
    measured = {
        (stage, kind): {clock: Measurement(clock, 1.0, 1.0) for clock in clocks.values()}
        for stage in range(schedule.stages)
        for kind in schedule.kinds
    }
    iteration = pipeline_iteration(schedule)
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
    """Collects the warnings of the runtime on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: list[str] = []
        logging.getLogger("perseus_planner.runtime").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        assert record.levelno == logging.WARNING
        self._texts.append(record.getMessage())

    def taken(self) -> list[str]:
        """Return the warnings since the last call."""
        texts, self._texts = self._texts, []
        return texts


class Watch:
    """Waits at the begin of each computation until its clock is locked.

    Attributes:
        planned: Returns the plan that should be in force, or None if the GPU should be reset; None
            to wait for nothing.
        takes_s: Seconds that each computation takes in addition.

    Args:
        gpu: The GPU; by default the emulated GPU of this rank.
    """

    def __init__(self, gpu: str = GPU) -> None:
        found = open_gpu(gpu_text(gpu, torch.device("cpu")))
        assert isinstance(found, EmulatedGpu)
        self.gpu = found
        self.planned: Callable[[], Plan | None] | None = None
        self.takes_s = 0.0
        self._ran: list[str] = []

    def __call__(self, stage: int, kind: str, microbatch: int) -> None:
        computation = str(Computation(stage, kind, microbatch))
        self._ran.append(computation)
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


class Layer(nn.Module):
    """A layer that uses random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x)).tanh()


class Torch:
    """This rank's part of a torch pipeline; it is the same each time it is created.

    Attributes:
        engine: The schedule.
        rank: Rank of the pipeline.
        microbatches: Microbatches of an iteration.

    Args:
        name: Name of the schedule.
        microbatches: Microbatches of an iteration.
        watch: Called when a computation begins.
        sides: Number of pipelines side by side.
    """

    def __init__(
        self, name: str, microbatches: int, watch: Watcher | None = None, *, sides: int = 1
    ) -> None:
        rank, count = dist.get_rank() // sides, dist.get_world_size() // sides
        groups = [
            dist.new_group(list(range(side, dist.get_world_size(), sides))) for side in range(sides)
        ]
        numbers = (
            [rank, 2 * count - 1 - rank] if name in ("zbv", "dualpipe-v") else [rank, count + rank]
        )
        numbers = numbers[:1] if name in ("gpipe", "1f1b") else numbers
        torch.manual_seed(rank)
        self._layers = nn.ModuleList(Layer() for _ in numbers)
        group, cpu = groups[dist.get_rank() % sides], torch.device("cpu")
        self._stages = [
            pipelining.PipelineStage(layer, number, count * len(numbers), cpu, group=group)
            for layer, number in zip(self._layers, numbers, strict=True)
        ]
        kind = getattr(pipelining.schedules, f"Schedule{TORCH[name]}")
        parts = self._stages[0] if len(numbers) == 1 else self._stages
        self.engine = kind(parts, microbatches, loss_fn=nn.functional.mse_loss)
        self.rank, self.microbatches = rank, microbatches
        self._optimizer = torch.optim.AdamW(self._layers.parameters(), lr=0.01)
        for stage in self._stages:
            if watch is not None:
                _watch_stage(stage, watch)

    def change(self, microbatches: int) -> None:
        """Change the number of microbatches of the next iterations."""
        self.microbatches = self.engine._n_microbatches = microbatches

    def step(self) -> list[Any]:
        """Run one iteration; return its losses on the last rank."""
        losses = self._run(self.engine.step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def evaluate(self) -> list[Any]:
        """Evaluate; return the losses on the last rank."""
        with torch.no_grad():
            return self._run(self.engine.eval)

    def state(self) -> list[Any]:
        """Return the results of the training other than losses."""
        return [
            *(each.clone() for each in self._layers.state_dict().values()),
            torch.get_rng_state(),
        ]

    def checkpoint(self) -> list[Any]:
        """Return all that the next iterations depend on."""
        return [self._layers.state_dict(), self._optimizer.state_dict(), torch.get_rng_state()]

    def restore(self, checkpoint: list[Any]) -> None:
        """Go on from a checkpoint."""
        layers, optimizer, random = checkpoint
        self._layers.load_state_dict(layers)
        self._optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random)

    def _run(self, run: Callable[..., Any]) -> list[Any]:
        data = torch.randn(
            2, self.microbatches * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)
        )
        losses: list[Any] = []
        target = (
            {"target": data[1], "losses": losses}
            if any(each.is_last for each in self._stages)
            else {}
        )
        run(*([data[0]] if any(each.is_first for each in self._stages) else []), **target)
        return [each.detach().clone() for each in losses]


def _watch_stage(stage: Any, watch: Watcher) -> None:
    number = stage.stage_index
    forward, backward, weigh = (
        stage.forward_one_chunk,
        stage.backward_one_chunk,
        stage.backward_weight_one_chunk,
    )

    def watched_forward(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        watch(number, "F", fwd_chunk_id)
        return forward(fwd_chunk_id, *args, **kwargs)

    def watched_backward(
        bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *args: Any, **kwargs: Any
    ) -> Any:
        watch(number, "B" if full_backward else "I", bwd_chunk_id)
        return backward(bwd_chunk_id, loss, full_backward, *args, **kwargs)

    def watched_weigh(bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        watch(number, "W", bwd_chunk_id)
        return weigh(bwd_chunk_id, *args, **kwargs)

    stage.forward_one_chunk = watched_forward
    stage.backward_one_chunk = watched_backward
    stage.backward_weight_one_chunk = watched_weigh


class DeepSpeed:
    """Like `Torch`, for DeepSpeed; all ranks have the loss of an iteration."""

    def __init__(self, microbatches: int, watch: Watcher | None = None) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # pipelines do not need it, and it would be compiled
        )
        deepspeed.init_distributed("gloo", dist_init_required=True, verbose=False)
        torch.manual_seed(0)
        ranks = dist.get_world_size()
        model = PipelineModule(
            layers=[Layer() for _ in range(ranks)],
            loss_fn=nn.functional.mse_loss,
            partition_method="uniform",
            num_stages=ranks,
        )
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": microbatches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "steps_per_print": 2**31,
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        self.rank = dist.get_rank()
        if watch is not None:
            self.engine._INSTRUCTION_MAP = self._watched(watch)

    def change(self, microbatches: int) -> None:
        self.engine.set_train_batch_size(ROWS * microbatches)

    def step(self) -> list[Any]:
        return [self.engine.train_batch(_microbatches()).detach().clone()]

    def evaluate(self) -> list[Any]:
        return [self.engine.eval_batch(_microbatches()).detach().clone()]

    def state(self) -> list[Any]:
        return [
            *(each.detach().clone() for each in self.engine.module.parameters()),
            torch.get_rng_state(),
        ]

    def _watched(self, watch: Watcher) -> dict[type, Callable[..., Any]]:
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

        found, counts = self.engine._INSTRUCTION_MAP, Counter[str]()

        def watched(kind: str, execute: Callable[..., Any]) -> Callable[..., Any]:
            def run(engine: Any, **arguments: Any) -> None:
                watch(self.rank, kind, counts[kind] % self.engine.micro_batches)
                counts[kind] += 1
                execute(engine, **arguments)

            return run

        return {
            **found,
            ForwardPass: watched("F", found[ForwardPass]),
            BackwardPass: watched("B", found[BackwardPass]),
        }


def _microbatches() -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    while True:
        yield (
            torch.randn(ROWS, WIDTH, generator=generator),
            torch.randn(ROWS, WIDTH, generator=generator),
        )
