"""What a user says of how to train: the options of `planner_runtime`, which describes them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Changes, Index, Wait
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime.guarantee import Slowdown

if TYPE_CHECKING:
    import torch

    from perseus_planner.profiles.modes import ModeFunctions
    from perseus_planner.runs.verdict import StragglerDetection
    from perseus_planner.runtime.switching import GivenPlan
    from perseus_planner.runtime.trackers import LogFunction

Work: TypeAlias = "float | Sequence[float]"
"""The work of a microbatch."""

WorkFunction: TypeAlias = "Callable[[Any], Work]"
"""Returns the work of a microbatch."""


@dataclass(frozen=True)
class AutopilotSettings(Checked):
    """What a decider that makes its own plans may do.

    Raises:
        UsageError: If a value is out of range.
    """

    #: the agreed iteration time, as a multiple of one at full clocks; at least 1.
    slowdown: Slowdown = 1.0
    #: how much longer iterations may be on average, as a share of one at full clocks: the ledger.
    max_slowdown: Wait = 0.005
    #: how often a GPU may change its clock in an iteration, trials included; None for any number.
    max_changes: Changes | None = 8
    #: whether to run trials of clocks that were not measured. Without, it plans on the profile that
    #: it is given and on what it sees by itself.
    learn: bool = True
    seed: Index = 0  #: of all random choices: equal observations, equal decisions


HOOKS = "hooks"
TIME = "time"
GRAPH = "graph"
FOLLOW = (HOOKS, TIME, GRAPH)
"""How a plan may be followed: at each computation that the engine shows, by time, or at marks that
are captured in a CUDA graph.
"""


@dataclass(frozen=True)
class RuntimeOptions:
    """The options of `planner_runtime`, which describes them."""

    plan: GivenPlan | None
    gpu: str
    dry_run: bool
    record: Path | None
    max_changes_per_s: float
    on_straggling: Callable[[StragglerDetection], None] | None
    service: str | None
    job: str | None
    frontier: str | os.PathLike[str] | None
    max_changes: int | None
    autopilot: AutopilotSettings  #: slowdown, max_slowdown and learn, with a limit of changes
    state: str | os.PathLike[str] | None
    work: WorkFunction | str | None = None
    modes: ModeFunctions = field(default_factory=dict)
    log: Sequence[LogFunction] = ()
    strict: bool = True
    trust_traced: bool = False
    decider: object = None  #: A `Decider`, the name of one, or None
    follow: str = HOOKS
    peers: Sequence[int] | None = None

    @property
    def state_file(self) -> Path | None:
        """The file of what is learnt; None to keep nothing."""
        return None if self.state is None else Path.cwd() / (self.record or "") / self.state

    def gpu_of(self, device: torch.device) -> str:
        """Return the text that opens the GPU of a torch device.

        Raises:
            UsageError: As in `gpu_text`.
        """
        text = gpu_text(self.gpu, device)
        return f"dry-run:{text}" if self.dry_run and not text.startswith("dry-run:") else text


def check_work(*, plan: object, learn: bool, state: object) -> None:
    """Refuse options that exclude clocks that follow the batch.

    Args:
        plan: A plan; None for none.
        learn: Whether clocks are to be tried.
        state: The profile; None for none.

    Raises:
        UsageError: If there are some; names the first.
    """
    if plan is not None:
        raise UsageError(
            f"work: clocks follow each batch, and not plan {str(plan)!r}; leave out one of them"
        )
    if learn or state is None:
        raise UsageError(
            "work: what clocks cost is not learnt while they follow the batch; turn learn off, "
            "and give a profile as state"
        )
