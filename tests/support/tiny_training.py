"""Tiny pipelines of real engines, equal each time that they are created; nothing here knows the
planner.

As a script it is one rank: ENGINE FOLDER [ITERATIONS]. Each rank writes to `results-<rank>` what
training gave, bit for bit. Every iteration but the first follows an evaluation. If there is a file
`fails` in the folder, the last rank removes it and fails in its third iteration."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedule_engines import TORCH
from torch import nn
from torch.distributed import pipelining

WIDTH, ROWS, MICROBATCHES, ITERATIONS = 8, 2, 4, 4

Watcher = Callable[[int, str, int], None]  #: of stage, kind and microbatch


class Layer(nn.Module):
    """A layer that uses random numbers."""

    left: int | None = None  #: forwards before one fails; None if none fails
    calls = 0  #: forwards so far

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise ArithmeticError("the layer fails")
        return self.drop(self.linear(x)).tanh()


class Torch:
    """This rank's part of a torch pipeline.

    Attributes:
        engine: The schedule.
        stages: Its stages on this rank.
        layers: Their modules.
        rank: Rank of the pipeline.
        microbatches: Microbatches of an iteration.

    Args:
        name: Name of the schedule.
        microbatches: Microbatches of an iteration.
        watch: Called when a computation begins.
        sides: Number of pipelines side by side, each with data of its own; ranks are laid out
            stage by stage.
        wrap: Wraps each module, given the process group of its replicas.
        layer: Makes the module of a stage.
        others: Number of a stage -> makes its module, instead of `layer`.
        loss: The loss.
        shape: Rows of a microbatch, and width.
        has_shapes: Whether stages are told what they get and send. Otherwise torch runs the modules
            on uninitialised memory to find that out, and changes their buffers.
        stage: The class of the stages.
        kind: The class of the schedule, if it is not torch's own.
        options: Further arguments of the schedule.
    """

    def __init__(
        self,
        name: str,
        microbatches: int,
        watch: Watcher | None = None,
        *,
        sides: int = 1,
        wrap: Callable[[nn.Module, Any], nn.Module] = lambda module, _: module,
        layer: Callable[[], nn.Module] = Layer,
        others: Mapping[int, Callable[[], nn.Module]] | None = None,
        loss: Callable[..., Any] = nn.functional.mse_loss,
        shape: tuple[int, int] = (ROWS, WIDTH),
        has_shapes: bool = False,
        stage: Callable[..., Any] = pipelining.PipelineStage,
        kind: Callable[..., Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        world = dist.get_world_size()
        rank, ranks = dist.get_rank() // sides, world // sides
        groups = [dist.new_group([*range(side, world, sides)]) for side in range(sides)]
        replicas = [dist.new_group([*range(at, at + sides)]) for at in range(0, world, sides)]
        second = 2 * ranks - 1 - rank if name in ("zbv", "dualpipe-v") else ranks + rank
        numbers = [rank] if name in ("gpipe", "1f1b") else [rank, second]
        received, sent = (torch.empty(shape, requires_grad=is_sent) for is_sent in (False, True))
        torch.manual_seed(rank)
        self.layers = nn.ModuleList(
            wrap((others or {}).get(number, layer)(), replicas[rank]) for number in numbers
        )
        self.stages = [
            stage(
                module,
                number,
                ranks * len(numbers),
                torch.device("cpu"),
                *(sent if number else received, sent) if has_shapes else (),
                group=groups[dist.get_rank() % sides],
            )
            for module, number in zip(self.layers, numbers, strict=True)
        ]
        made = kind or getattr(pipelining.schedules, f"Schedule{TORCH[name]}")
        parts = self.stages[0] if len(numbers) == 1 else self.stages
        self._schedule_of = lambda count: made(parts, count, loss_fn=loss, **(options or {}))
        self.engine = self._schedule_of(microbatches)
        self.rank, self.microbatches, self._shape = rank, microbatches, shape
        self._side = dist.get_rank() % sides
        # An optimizer wants a parameter, and a rank with empty stages has none.
        parameters = [*self.layers.parameters()] or [nn.Parameter(torch.zeros(1))]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        for stage in self.stages:
            if watch is not None:
                _watch_stage(stage, watch)

    def change(self, microbatches: int) -> None:
        """Go on with another schedule of the same stages, of this many microbatches.

        It is a new one each time, as torch has a stage know the microbatches of the newest only.
        """
        self.microbatches, self.engine = microbatches, self._schedule_of(microbatches)

    def step(self) -> list[Any]:
        """Run one iteration; return its losses on the last rank."""
        losses = self.compute()
        self.finish()
        return losses

    def compute(self) -> list[Any]:
        """Run the forwards and backwards of an iteration; return its losses on the last rank."""
        return self.run(self.engine.step)

    def finish(self) -> None:
        """Train by the gradients of an iteration."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self) -> list[Any]:
        """Evaluate; return the losses on the last rank."""
        with torch.no_grad():
            return self.run(self.engine.eval)

    def run(self, run: Callable[..., Any]) -> list[Any]:
        """Give the microbatches to a method of the schedule; return the losses on the last rank."""
        rows, width = self._shape
        generator = torch.Generator().manual_seed(self._side)
        data = torch.randn(2, self.microbatches * rows, width, generator=generator)
        losses: list[Any] = []
        is_first, is_last = (
            any(getattr(stage, name) for stage in self.stages) for name in ("is_first", "is_last")
        )
        target = {"target": data[1], "losses": losses} if is_last else {}
        run(*([data[0]] if is_first else []), **target)
        return [loss.detach().clone() for loss in losses]

    def state(self) -> list[Any]:
        """Return the results of the training other than losses."""
        return [
            *(value.clone() for value in self.layers.state_dict().values()),
            torch.get_rng_state(),
        ]

    def checkpoint(self) -> list[Any]:
        """Return all that the next iterations depend on."""
        return [self.layers.state_dict(), self.optimizer.state_dict(), torch.get_rng_state()]

    def restore(self, checkpoint: list[Any]) -> None:
        """Go on from a checkpoint."""
        layers, optimizer, random = checkpoint
        self.layers.load_state_dict(layers)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(random)


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
    """Like `Torch`, for DeepSpeed; all ranks have the loss of an iteration.

    Args:
        microbatches: Microbatches of an iteration.
        watch: Called when a computation begins.
        module: The class of the model; DeepSpeed's PipelineModule by default.
        layer: Makes a layer.
        shape: Rows of a microbatch, and width.
        settings: Further settings of DeepSpeed.
        options: Arguments of the model; as many layers and stages as there are ranks by default.
    """

    def __init__(
        self,
        microbatches: int,
        watch: Watcher | None = None,
        *,
        module: Callable[..., Any] | None = None,
        layer: Callable[[], nn.Module] = Layer,
        shape: tuple[int, int] = (ROWS, WIDTH),
        settings: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        # Pipelines do not need it, and it would be compiled.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("gloo", verbose=False)
        torch.manual_seed(0)
        layers = [layer() for _ in range(options.pop("layers", dist.get_world_size()))]
        if "topology" not in options:
            options.setdefault("num_stages", dist.get_world_size())
        model = (module or PipelineModule)(
            layers=layers,
            loss_fn=nn.functional.mse_loss,
            partition_method="uniform",
            **options,
        )
        config = {
            "train_micro_batch_size_per_gpu": shape[0],
            "gradient_accumulation_steps": microbatches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "steps_per_print": 2**31,
            **(settings or {}),
        }
        self.engine, *_ = deepspeed.initialize(
            # An optimizer wants a parameter, and a rank with empty stages has none.
            model=model,
            model_parameters=[*model.parameters()] or [nn.Parameter(torch.zeros(1))],
            config=config,
        )
        self.rank, self._shape = dist.get_rank(), shape
        if watch is not None:
            self.engine._INSTRUCTION_MAP = self._watched(watch)

    def change(self, microbatches: int) -> None:
        """Change the number of microbatches of the next iterations."""
        replicas = self.engine.grid.data_parallel_size
        self.engine.set_train_batch_size(self._shape[0] * microbatches * replicas)

    def step(self) -> list[Any]:
        """Run one iteration; return its loss."""
        return [self.engine.train_batch(self._microbatches()).detach().clone()]

    def evaluate(self) -> list[Any]:
        """Evaluate; return the loss."""
        return [self.engine.eval_batch(self._microbatches()).detach().clone()]

    def state(self) -> list[Any]:
        """Return the results of the training other than losses."""
        weights = [weight.detach().clone() for weight in self.engine.module.parameters()]
        return [*weights, torch.get_rng_state()]

    def _microbatches(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield tuple(torch.randn(self._shape, generator=generator) for _ in range(2))

    def _watched(self, watch: Watcher) -> dict[type, Callable[..., Any]]:
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

        executors, counts = self.engine._INSTRUCTION_MAP, Counter[str]()

        def watched(kind: str, execute: Callable[..., Any]) -> Callable[..., Any]:
            def run(engine: Any, **arguments: Any) -> None:
                watch(self.rank, kind, counts[kind] % self.engine.micro_batches)
                counts[kind] += 1
                execute(engine, **arguments)

            return run

        return {
            **executors,
            ForwardPass: watched("F", executors[ForwardPass]),
            BackwardPass: watched("B", executors[BackwardPass]),
        }


class Single:
    """Like `Torch`, for a model on one GPU."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self._layer = Layer()
        self._optimizer = torch.optim.AdamW(self._layer.parameters(), lr=0.01)

    def step(self) -> list[Any]:
        loss = self._layer(torch.ones(ROWS, WIDTH)).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [loss]

    def evaluate(self) -> list[Any]:
        return []

    def state(self) -> list[Any]:
        return list(self._layer.parameters())


def _megatron() -> Any:
    from tiny_gpt import LoopTraining

    return LoopTraining()


ENGINES: dict[str, Callable[[], Any]] = {
    "single": Single,
    "torch": lambda: Torch("1f1b", MICROBATCHES),
    "deepspeed": lambda: DeepSpeed(MICROBATCHES),
    "megatron": _megatron,
}


def main(engine: str, folder: str, iterations: str = str(ITERATIONS)) -> None:
    training, fails = ENGINES[engine](), Path(folder, "fails")
    results: list[Any] = []
    for iteration in range(int(iterations)):
        if iteration:
            results += training.evaluate()
        if iteration == 2 and fails.exists() and dist.get_rank() == dist.get_world_size() - 1:
            fails.unlink()
            raise ArithmeticError("this rank fails")
        results += training.step()
    values = [value.detach().tolist() for value in (*results, *training.state())]
    Path(folder, f"results-{dist.get_rank()}").write_text(
        json.dumps([*values, torch.rand(1).item()])
    )
    dist.barrier()  # no rank leaves while another one uses the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        *(word for word in sys.argv[1:] if not word.startswith("--local_rank="))
    )  # DeepSpeed's launcher adds it
