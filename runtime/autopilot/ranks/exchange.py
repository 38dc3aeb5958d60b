"""What rank 0's part in the autopilot and its agent at the service give each other, on their own
threads.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from perseus_planner.runs.autopilot import AutopilotStatus


@dataclass(frozen=True)
class Learnt:
    """What the autopilot has learnt."""

    profile_csv: str = field(repr=False)  #: Text of the table of the profile
    profile_yaml: str = field(repr=False)  #: Text of the file that names it
    schedule: str = field(repr=False)  #: What a pipeline runs, as a text grid
    rows: int  #: Number of measured rows
    time_s: float  #: Seconds of an iteration at full clocks, replayed from the profile


class ServiceExchange:
    """Each attribute is set by one side as a whole, and read by the other.

    Attributes:
        learnt: By the autopilot: what it has learnt; None for nothing yet.
        status: By the autopilot: what it knew last.
        waits_s: By the agent: for each pipeline, how long it may take beside a slower one, as for
            `Autopilot.wait_for`; empty if all have to be as fast as agreed.
    """

    def __init__(self) -> None:
        self.learnt: Learnt | None = None
        self.status = AutopilotStatus()
        self.waits_s: tuple[float, ...] = ()
