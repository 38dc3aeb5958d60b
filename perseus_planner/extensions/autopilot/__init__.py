"""Learns what clocks cost while training runs, and decides the clocks of each iteration, within a
bound on slowdown.

`Autopilot` is told what each rank observed and decides the clocks of iterations ahead; it knows
nothing of processes, threads, sockets, torch or the time of day. Each rank carries a
ledger, which bounds what learning may cost (`runtime.guarantee`).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from perseus_planner.base.extensions import Extension

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.autopilot import Autopilot
    from perseus_planner.extensions.autopilot.job import (
        AutopilotJob,
        ComputationObservation,
        Decision,
        Phase,
        RankObservation,
    )

__all__ = [
    "Autopilot",
    "AutopilotJob",
    "ComputationObservation",
    "Decision",
    "Phase",
    "RankObservation",
]

EXTENSION = Extension(
    deciders={
        "autopilot": "perseus_planner.extensions.autopilot.decider:AutopilotDecider",
        "batches": "perseus_planner.extensions.autopilot.batches.decider:BatchesDecider",
    },
    offers={
        "sequence work": "perseus_planner.extensions.autopilot.batches.work:sequence_work",
    },
)


def __getattr__(name: str) -> Any:
    # Loaded on first use: ranks need what they are told, and not the solver.
    if name in __all__:
        module = "autopilot" if name == "Autopilot" else "job"
        return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
