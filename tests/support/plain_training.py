"""Trains a small pipeline; it knows nothing of the planner. As a script it is one rank: ENGINE
FOLDER [ITERATIONS].

Each rank writes to `results-<rank>` what training gave, bit for bit. Every iteration but the first
follows an evaluation. If there is a file `fails` in the folder, the last rank removes it and fails
in its third iteration."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WIDTH, ROWS, MICROBATCHES, ITERATIONS = 8, 2, 4, 4


class Layer(nn.Module):
    """A layer that uses random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return self.drop(self.linear(x)).tanh()


class TorchTraining:
    """1F1B of torch.distributed.pipelining."""

    def __init__(self) -> None:
        from torch.distributed import pipelining

        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        self._layer = Layer()
        self._is_last = rank == ranks - 1
        stage = pipelining.PipelineStage(self._layer, rank, ranks, torch.device("cpu"))
        self.schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self._optimizer = torch.optim.AdamW(self._layer.parameters(), lr=0.01)

    def step(self) -> list[Any]:
        losses = self._run(self.schedule.step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses

    def evaluate(self) -> list[Any]:
        with torch.no_grad():
            return self._run(self.schedule.eval)

    def weights(self) -> list[Any]:
        return list(self._layer.parameters())

    def _run(self, run: Any) -> list[Any]:
        data = torch.randn(
            2, MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(0)
        )
        losses: list[Any] = []
        target = {"target": data[1], "losses": losses} if self._is_last else {}
        run(*([data[0]] if dist.get_rank() == 0 else []), **target)
        return losses


class DeepSpeedTraining:
    """DeepSpeed's PipelineEngine."""

    def __init__(self) -> None:
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
        deepspeed.init_distributed("gloo", verbose=False)
        torch.manual_seed(0)
        ranks = dist.get_world_size()
        model = PipelineModule(
            [Layer() for _ in range(ranks)], num_stages=ranks, loss_fn=nn.functional.mse_loss
        )
        config = {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": MICROBATCHES,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "steps_per_print": 2**31,
        }
        self._engine, *_ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )

    def step(self) -> list[Any]:
        return [self._engine.train_batch(self._data())]

    def evaluate(self) -> list[Any]:
        return [self._engine.eval_batch(self._data())]

    def weights(self) -> list[Any]:
        return list(self._engine.module.parameters())

    def _data(self) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield (
                torch.randn(ROWS, WIDTH, generator=generator),
                torch.randn(ROWS, WIDTH, generator=generator),
            )


class SingleTraining:
    """A model on one GPU."""

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

    def weights(self) -> list[Any]:
        return list(self._layer.parameters())


def _megatron() -> Any:
    from plain_megatron import MegatronTraining

    return MegatronTraining()


ENGINES = {
    "single": SingleTraining,
    "torch": TorchTraining,
    "deepspeed": DeepSpeedTraining,
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
    values = [each.detach().tolist() for each in (*results, *training.weights())]
    Path(folder, f"results-{dist.get_rank()}").write_text(
        json.dumps([*values, torch.rand(1).item()])
    )
    dist.barrier()  # no rank leaves while another one uses the store
    dist.destroy_process_group()


if __name__ == "__main__":
    main(
        *(word for word in sys.argv[1:] if not word.startswith("--local_rank="))
    )  # DeepSpeed's launcher adds it
