"""Plan one GPU clock per computation of pipeline-parallel training: the same speed, the least
energy.

    from perseus_planner import Profile, solve

    frontier = solve(Profile.load("profile.yaml"), "1f1b", microbatches=96)
    frontier.plan_for(frontier.baseline_time_s).save("plan.yaml")

Names are loaded when they are first used, so that importing this package stays cheap.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from perseus_planner.base import __version__ as __version__

if TYPE_CHECKING:
    from perseus_planner import schedules
    from perseus_planner.base import errors
    from perseus_planner.extensions.service.client import Client
    from perseus_planner.gpu.monitor import Monitor
    from perseus_planner.plans.job import Job
    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runs.run import Run
    from perseus_planner.runtime.session import planner_runtime
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.frontier import Frontier, solve, solve_dag
    from perseus_planner.solver.replicas import Replicas

__all__ = [
    "Client",
    "Frontier",
    "Job",
    "Monitor",
    "PipelineDag",
    "Plan",
    "Profile",
    "Replicas",
    "Run",
    "errors",
    "planner_runtime",
    "schedules",
    "solve",
    "solve_dag",
]

_HOME = {
    "Frontier": "solver.frontier",
    "Job": "plans.job",
    "Monitor": "gpu.monitor",
    "PipelineDag": "schedules.dag",
    "Plan": "plans.plan",
    "Profile": "profiles.profiles",
    "Replicas": "solver.replicas",
    "Run": "runs.run",
    "planner_runtime": "runtime.session",
    "solve": "solver.frontier",
    "solve_dag": "solver.frontier",
}
_ROOMS = {"errors": "base.errors", "schedules": "schedules"}


_OFFERED = {"Client": "client"}
"""What an extension brings, by its name in `base.extensions.OFFERS`."""


def __getattr__(name: str) -> object:
    if name in _OFFERED:
        extensions = import_module("perseus_planner.base.extensions")
        return extensions.offer(_OFFERED[name])
    if name in _HOME:
        return getattr(import_module(f"perseus_planner.{_HOME[name]}"), name)
    if name in _ROOMS:
        return import_module(f"perseus_planner.{_ROOMS[name]}")
    raise AttributeError(f"module 'perseus_planner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
