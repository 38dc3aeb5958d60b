"""Overlapped pairs of Megatron-core, each followed as one computation.

With `overlap_moe_expert_parallel_comm` a forward and the backward of another microbatch run layer
by layer in turn, so that the experts' all-to-all of one hides behind the computing of the other.
`combined_forward_backward_step` runs such a pair, and what is left of them alone at the begin and
the end. It starts `forward-compute` alone, if at all, so it is followed itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

from perseus_planner.base.errors import EngineChanged
from perseus_planner.engines.engine import replaced
from perseus_planner.engines.megatron_timers import WAITS, TimerEvents, WrappedTimers


@dataclass(frozen=True)
class CombinedStep:
    """The function of this core that runs combined steps."""

    module: Any  #: That has it
    names: Sequence[str]  #: Of its arguments

    NAME = "combined_forward_backward_step"

    @classmethod
    def found(cls) -> CombinedStep:
        """Return that of this core.

        Raises:
            EngineChanged: If there is none, or one with other arguments.
        """
        problem = None
        names: Sequence[str] = ()
        try:
            from megatron.core.pipeline_parallel import combined_1f1b as module

            names = tuple(inspect.signature(getattr(module, cls.NAME)).parameters)
        except (ImportError, AttributeError) as error:
            problem = str(error)
        # Read from the signature, as no release number says it.
        needed = ("f_model", "b_model", "config", *WAITS)
        problem = problem or next((f"no {name}" for name in needed if name not in names), None)
        if problem is not None:
            raise EngineChanged(
                "overlap_moe_expert_parallel_comm: this Megatron-core has no combined_1f1b."
                f"{cls.NAME} as it is followed ({problem}); use core 0.16 to 0.19, or train "
                "without the overlap"
            )
        return cls(module, names)

    @contextmanager
    def shown(self, events: TimerEvents) -> Iterator[None]:
        """Show the steps of the configs whose timers these events are, inside the block."""
        # That of another model's steps may be around Megatron's own.
        inner = getattr(self.module, self.NAME)

        @wraps(inner)
        def step(*args: Any, **kwargs: Any) -> Any:
            values = dict(zip(self.names, args, strict=False)) | kwargs
            timers = getattr(values.get("config"), "timers", None)
            # A step of another model, or one with timers of its own.
            if not isinstance(timers, WrappedTimers) or timers.events is not events:
                return inner(*args, **kwargs)
            runs = {"F": values.get("f_model"), "B": values.get("b_model")}
            kinds = "".join(kind for kind, model in runs.items() if model is not None)
            return events.run_step(kinds, partial(inner, **values), values)

        with replaced(self.module, **{self.NAME: step}):
            yield
