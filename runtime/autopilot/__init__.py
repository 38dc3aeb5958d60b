"""Learns what clocks cost while training runs, and decides the clocks of each iteration, within a bound on slowdown.

`Autopilot` is told what each rank observed and decides the clocks of iterations ahead; it knows nothing of processes,
threads, sockets, torch or the time of day. Each rank carries a `Ledger`, which bounds what learning may cost.
"""

from perseus_planner.runtime.autopilot.autopilot import Autopilot, Decision, Phase
from perseus_planner.runtime.autopilot.job import AutopilotJob, AutopilotSettings
from perseus_planner.runtime.autopilot.ledger import Ledger
from perseus_planner.runtime.autopilot.observations import ComputationObservation, RankObservation

__all__ = [
    "Autopilot",
    "AutopilotJob",
    "AutopilotSettings",
    "ComputationObservation",
    "Decision",
    "Ledger",
    "Phase",
    "RankObservation",
]
