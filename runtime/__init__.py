"""Runs training under a plan: one line around the training loop.

    from perseus_planner.runtime import planner_runtime

    with planner_runtime(engine, plan="plan.yaml"):
        train()

The folder is `runtime/` in the repository and is installed as `perseus_planner.runtime`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

# The bare name belongs to other packages and to folders of training scripts.
if __name__ != "perseus_planner.runtime":
    raise ImportError(
        f"{__name__!r} is not a package of its own; install perseus-planner, import "
        "perseus_planner.runtime"
    )

if TYPE_CHECKING:
    from perseus_planner.engines.modes import Recompute
    from perseus_planner.extensions.autopilot.batches.work import sequence_work
    from perseus_planner.profiles.modes import ModeFunction
    from perseus_planner.runtime.options import Options
    from perseus_planner.runtime.runtime import Runtime
    from perseus_planner.runtime.session import planner_runtime

__all__ = ["ModeFunction", "Options", "Recompute", "Runtime", "planner_runtime", "sequence_work"]


def __getattr__(name: str) -> Any:
    # Loaded on first use, because the clock controller is in this package too and must start fast.
    if name == "sequence_work":
        from perseus_planner.base import extensions

        return extensions.offer("sequence work")
    if name == "ModeFunction":
        from perseus_planner.profiles import modes

        return modes.ModeFunction
    if name == "Options":
        from perseus_planner.runtime import options

        return options.Options
    if name == "Recompute":
        from perseus_planner.engines import modes as engine_modes

        return engine_modes.Recompute
    if name in __all__:
        from perseus_planner.runtime import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
