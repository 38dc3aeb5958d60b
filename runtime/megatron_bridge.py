"""A callback that has Megatron-Bridge train with the planner."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from typing import Any

from perseus_planner.runtime.session import planner_runtime


class PlannerCallback:
    """Runs `planner_runtime` while Megatron-Bridge trains:
    `pretrain(..., callbacks=[PlannerCallback()])`.

    Evaluations run at the GPU's default clocks. Where training ends the process without an event,
    as at an exit interval or a signal, the clocks are reset with it.

    Args:
        options: Those of `planner_runtime`, such as `plan="plan.yaml"`; without a plan, the
            autopilot learns one.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._runtime = ExitStack()
        self._timers: list[
            tuple[Any, Any]
        ] = []  #: config of a chunk, and the timers through which it is followed

    def on_train_start(self, context: Any) -> None:
        """Follow the model of `context`, as a training loop is about to begin."""
        from megatron.core.utils import get_model_config

        self._runtime.enter_context(planner_runtime(context.model, **self._options))
        atexit.register(self._runtime.close)
        configs = [get_model_config(chunk) for chunk in context.model]
        self._timers = [(config, config.timers) for config in configs]

    def on_eval_end(self, context: Any) -> None:
        """Follow it again: an evaluation gives the configs the timers of Megatron-Bridge back."""
        for config, timers in self._timers:
            config.timers = timers
            timers.note_evaluation()

    def on_train_end(self, context: Any) -> None:
        """Leave the model as it was."""
        self._timers = []
        self._runtime.close()
        atexit.unregister(self._runtime.close)
