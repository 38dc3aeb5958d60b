"""Programs of ranks for the tests of frameworks: they build and run schedules as torchtitan 0.3 and
Automodel 0.7 do.

Neither is installed for tests, as both bring gigabytes along. What matters here is written after
their sources: torchtitan/distributed/pipeline_parallel.py and trainer.py;
nemo_automodel/components/distributed/pipelining/ functional.py and autopipeline.py, and
recipes/llm/train_ft.py.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from runtime_training import FAST, GPU, Torch, equal, job, plan_of, schedule_of
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_automodel
import train_torchtitan

MICROBATCHES, STEPS = 4, 3


class Trainer(Torch):
    """Builds its schedule as torchtitan does, and has the parts of its `Trainer` that the
    example uses.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, MICROBATCHES)
        kind = get_schedule_class({"1f1b": "1F1B", "interleaved-1f1b": "Interleaved1F1B"}[name])

        def scalar_loss(*args: Any, **kwargs: Any) -> Any:
            return nn.functional.mse_loss(*args, **kwargs)

        parts = self.stages if issubclass(kind, PipelineScheduleMulti) else self.stages[0]
        self.pp_schedule = kind(
            parts, n_microbatches=MICROBATCHES, loss_fn=scalar_loss, scale_grads=False
        )
        self.engine, self.losses = self.pp_schedule, []

    def train(self) -> None:
        """Train, with a validation after the first step."""
        for number in range(STEPS):
            self.losses += self.step()
            if number == 0:
                self.losses += self.evaluate()


class Recipe(Torch):
    """The same for Automodel, which also changes a method of its stages, the loss and the
    chunks.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name, MICROBATCHES)
        kind = get_schedule_class({"1f1b": "1f1b", "interleaved-1f1b": "interleaved1f1b"}[name])
        parts = self.stages if issubclass(kind, PipelineScheduleMulti) else self.stages[0]
        self.engine = kind(
            parts, n_microbatches=MICROBATCHES, loss_fn=nn.functional.l1_loss, scale_grads=False
        )
        for stage in self.stages:
            original = stage.backward_maybe_with_nosync

            def patched(
                self: Any, *args: Any, original: Callable[..., Any] = original, **kwargs: Any
            ) -> Any:
                return original(*args, **kwargs)

            stage.backward_maybe_with_nosync = types.MethodType(patched, stage)
        info = types.SimpleNamespace(schedule=self.engine, stages=self.stages)
        self.pp, self.losses = types.SimpleNamespace(info=info), []

    def run_train_validation_loop(self) -> None:
        """Train, with a validation after the first step."""
        self.pp.info.schedule._loss_fn = nn.functional.mse_loss
        for number in range(STEPS):
            self.losses += self.step()
            if number == 0:
                self.losses += self.evaluate()

    def run(self, run: Callable[..., Any]) -> list[Any]:
        schedule = self.pp.info.schedule
        before, schedule._kwargs_chunk_spec = schedule._kwargs_chunk_spec, {}
        try:
            return super().run(run)
        finally:
            schedule._kwargs_chunk_spec = before


def examples(state: str) -> None:
    """Train with the schedules of both frameworks, as their examples do."""
    with job(state) as result:
        result["torchtitan"] = _trained(Trainer, train_torchtitan.train, "torchtitan")
        result["automodel"] = _trained(Recipe, train_automodel.train, "automodel")


def _trained(
    make: Callable[[str], Any], train: Callable[..., None], framework: str
) -> dict[str, bool]:
    """Return by schedule whether the results are those without a plan."""
    result = {}
    for name in ("1f1b", "interleaved-1f1b"):
        plain = make(name)
        (plain.train if isinstance(plain, Trainer) else plain.run_train_validation_loop)()
        plan = plan_of(schedule_of(name, torch.distributed.get_world_size(), MICROBATCHES))
        hooked = make(name)
        record = f"{framework}-{name}"
        train(hooked, plan=plan, gpu=GPU, max_changes_per_s=FAST, record=record)
        result[name] = equal([*plain.losses, *plain.state()], [*hooked.losses, *hooked.state()])
    return result
