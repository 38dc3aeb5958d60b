"""Training by Megatron-core on emulated GPUs, with work that is drawn."""
# ruff: noqa: TID253 - the process in which this runs is there for torch and Megatron

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from batch_world import MICROBATCHES
from megatron.core import num_microbatches_calculator, parallel_state
from tiny_gpt import ROWS, Training, parallel

from perseus_planner.runtime import Runtime


class MegatronPipelines:
    """Two pipelines of Megatron-core; every rank says the work of each batch."""

    sides = 2

    def __init__(self, worked: Any) -> None:
        stages = dist.get_world_size() // self.sides
        self._stack, self._worked = ExitStack(), worked
        self._stack.enter_context(parallel(pipeline=stages))
        module = num_microbatches_calculator
        self._stack.callback(module.destroy_num_microbatches_calculator)
        batch = MICROBATCHES * ROWS * self.sides
        module.init_num_microbatches_calculator(dist.get_rank(), None, batch, ROWS, self.sides)
        self._training = Training()
        self._training.finishes = self._training.reports = False
        self.engine = self._training.model[0]
        self.engine.register_forward_pre_hook(self._forward)
        self.engine.register_forward_hook(self._forwarded)
        self._ran: Counter[str] = Counter()

    def step(self, runtime: Runtime | None) -> list[Any]:
        if runtime is not None:
            runtime.batch(list(self._worked.work[self._worked.iteration]))
        self._ran.clear()
        results = self._training.step(MICROBATCHES)
        for chunk in self._training.chunks:
            for parameter in chunk.parameters():  # pipelines end together
                dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        self._training.finish()
        return [each.detach().clone() for each in _tensors(results)]

    def _forward(self, *_: Any) -> None:
        self._run("F")

    def _forwarded(self, _: Any, __: Any, output: Any) -> None:
        output.grad_fn.register_prehook(lambda _: self._run("B"))

    def _run(self, kind: str) -> None:
        self._worked(0, kind, self._ran[kind])
        self._ran[kind] += 1

    def state(self) -> list[Any]:
        self._stack.close()
        return [*self._training.weights(), torch.get_rng_state()]


def _tensors(results: Any) -> list[Any]:
    """Return the losses of microbatches, however they are told."""
    if isinstance(results, torch.Tensor):
        return [results]
    values = results.values() if isinstance(results, dict) else results
    return [tensor for each in values for tensor in _tensors(each)]
