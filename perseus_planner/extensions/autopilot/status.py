"""What the autopilot of a training without a plan knows, and how it hands that over."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from perseus_planner.base.prefixes import si
from perseus_planner.runs.status import DeciderStatus


@dataclass(frozen=True)
class BatchStatus:
    """How unequal the batches of the last iterations were, where clocks follow them; all are
    shares.
    """

    waiting: float  #: Of GPU time that waits for the slowest pipeline at full clocks
    #: Standard deviation of the times of the first pipeline's microbatches, of their mean; None
    #: without a pipeline.
    spread: float | None = None
    #: By how much the times of microbatches differ from what their work says (standard deviation);
    #: None before that is known.
    error: float | None = None
    #: Of the time at full clocks by which iterations would be shorter if each pipeline ran its
    #: microbatches in the best order that was tried; None without a pipeline.
    order: float | None = None
    #: Of the iterations by plans, those whose microbatches were so much alike that the static plan
    #: was as good, and ran; None before the first one.
    static: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.spread is not None:
            parts.append(f"microbatches differ by {100 * self.spread:.0f} %")
        parts.append(f"pipelines wait {100 * self.waiting:.0f} % of the time for the slowest")
        if self.error is not None:
            parts.append(f"work tells times to {100 * self.error:.1f} %")
        if self.order is not None:
            shorter = f"{100 * self.order:.0f} % less"
            parts.append(f"in another order of microbatches iterations take {shorter} time")
        if self.static:
            share = f"{100 * self.static:.0f} %"
            parts.append(
                f"microbatches are alike in {share} of iterations, which run a static plan"
            )
        return ", ".join(parts)


@dataclass(frozen=True)
class AutopilotStatus:
    """What the autopilot knew when it made a program."""

    #: "watching" until the first program; then "reference", "learning", "following", "audit" or
    #: "paying"; "stopped" if the autopilot cannot go on.
    phase: str = "watching"
    iteration: int = -1  #: The iteration that the program was made for; -1 before the first
    #: Seconds of an iteration at full clocks; None while that is not known.
    reference_s: float | None = None
    #: Energy that the newest plan is expected to save, as a share of that of an iteration at full
    #: clocks; None before it. What was saved is in the `Account`.
    saving: float | None = None
    saving_stderr: float | None = None  #: Its standard error
    owed_s: float = 0.0  #: Seconds that the ledger owes; negative for credit
    burst_s: float = 0.0  #: Seconds that it may owe
    trials: int = 0  #: Number of operating points that the iteration tries
    #: Number of operating points that a plan might use and that were not measured yet.
    unknown: int = 0
    #: CPU time of its process since it began, as a share of that of one core; None before.
    core_share: float | None = None
    batches: BatchStatus | None = None  #: Where clocks follow the batch
    #: How much longer lower clocks have to make whole iterations, beyond what their computations
    #: show, to be told from noise by now, as a share; None before that is known.
    untold: float | None = None
    #: By how much iterations by now were longer than at full clocks, at most, as far as noise
    #: tells, as a share; holds in 19 of 20 jobs. None before that is known.
    longest: float | None = None

    @property
    def shown(self) -> DeciderStatus:
        """What the core and a service show of it."""
        columns = asdict(self)
        own = {name: columns.pop(name) for name in ("phase", "iteration", "reference_s")}
        batches = columns.pop("batches") or {}
        columns |= {f"batches.{name}": value for name, value in batches.items()}
        return DeciderStatus(text=str(self), columns=columns, **own)

    def __str__(self) -> str:
        if self.batches is not None:
            return f"{self.phase}, clocks follow the batch: {self.batches}"
        if self.reference_s is None or self.saving is None:
            return self.phase
        error = "" if self.saving_stderr is None else f" ± {100 * self.saving_stderr:.1f}"
        uses = (
            "" if self.core_share is None else f", it uses {100 * self.core_share:.0f} % of a core"
        )
        most = si(self.burst_s, "s", 3)
        owes = f"owes {si(self.owed_s, 's', 3)} of at most {most}"
        if self.owed_s < 0.0:
            owes = f"has a credit of {si(-self.owed_s, 's', 3)} and may owe {most}"
        # Programs are made some iterations ahead, so a run may end before that one.
        return (
            f"{self.phase}, planned to save {100 * self.saving:.1f}{error} % of the energy at full "
            "clocks, "
            f"{self.trials} operating points to try in iteration {self.iteration} and "
            f"{self.unknown} not known yet, the ledger {owes}{uses}{self._told}"
        )

    @property
    def _told(self) -> str:
        """What noise leaves of the bound on time."""
        if self.untold is None or self.longest is None:
            return ""
        return (
            f"; on this job, effects below {100 * self.untold:.2f} % cannot be told by now, and "
            f"iterations were at most {100 * max(0.0, self.longest):.2f} % longer than at full "
            "clocks"
        )
