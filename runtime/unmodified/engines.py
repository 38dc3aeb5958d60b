"""Wraps the calls by which engines train, so that `training.begin` is called before each.

Optimizers have a hook of their own after each step, which calls `training.stepped`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any


def wrap(module: ModuleType) -> None:
    """Wrap what trains in the module of an engine that has just been loaded.

    Raises:
        AttributeError: If the module is not as in the supported versions.
    """
    _WRAP[module.__name__](module)


def _begin(engine: Any) -> bool:
    from perseus_planner.runtime.unmodified.training import begin  # the first training loads it

    return begin(engine)


def _wrap_deepspeed(module: Any) -> None:
    train = module.PipelineEngine.train_batch

    @wraps(train)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        _begin(self)
        return train(self, *args, **kwargs)

    module.PipelineEngine.train_batch = train_batch


def _wrap_torch(module: Any) -> None:
    for schedule in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        schedule.step = _step(schedule.step)


def _step(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_training = self._has_backward and torch.is_grad_enabled()
        if is_training and _begin(self):
            return self.step(*args, **kwargs)  # now has a hook
        return original(self, *args, **kwargs)

    return step


def _wrap_megatron(module: Any) -> None:
    for name in ("with", "without"):
        name = f"forward_backward_pipelining_{name}_interleaving"
        setattr(module, name, _forward_backward(getattr(module, name)))


def _forward_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    @wraps(original)
    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        if "model" in kwargs and not kwargs.get("forward_only") and torch.is_grad_enabled():
            _begin(kwargs["model"])
        return original(*args, **kwargs)

    return forward_backward


def _wrap_optimizers(module: Any) -> None:
    def stepped(optimizer: Any, *_: Any) -> None:
        from perseus_planner.runtime.unmodified.training import stepped

        stepped(optimizer)

    module.register_optimizer_step_post_hook(stepped)


_WRAP = {
    "deepspeed.runtime.pipe.engine": _wrap_deepspeed,
    "torch.distributed.pipelining.schedules": _wrap_torch,
    "megatron.core.pipeline_parallel.schedules": _wrap_megatron,
    "torch.optim.optimizer": _wrap_optimizers,
}
