"""What a running job counts, and what that says of its energy since it was registered; pure, time is an argument.

A run of a job counts from its begin, and says again and again how far it has come. So nothing is lost with what was not
received, and what is received twice counts once. What is added up over the runs of a job:

| what is sent                                      | counts                                                        |
|---------------------------------------------------|---------------------------------------------------------------|
| more iterations than before, of the same run      | what has come since                                           |
| as many or fewer                                  | nothing: it was sent twice, or has been overtaken             |
| of another run                                    | all of it: the job was begun anew, and counts from 0          |
| of a run that another one has followed            | nothing: it has been overtaken                                |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from perseus_planner.service.model import Conflict

if TYPE_CHECKING:
    from collections.abc import Callable

Origin = Literal["measured", "simulated"]

_RUNS = 16  #: which are remembered, so that what they sent late does not count
_GROWING = ("time_s", "metered_iterations", "metered_s", "energy_j", "late_changes")


@dataclass(frozen=True)
class Counters:
    """What one run of a job has counted since it began, all ranks together. All but the latencies only grows.

    Attributes:
        run: which run of the job.
        iterations: how many have ended.
        time_s: how long they took, each from the end of the one before, seconds.
        metered_iterations: those of them in which the energy of all GPUs is known.
        metered_s: how long these took, seconds.
        energy_j: of all GPUs in these, joules.
        energy_is: how that comes to be; None: it is not known.
        late_changes: clock changes that were made when much of the computation was over that they were for.
        set_p50_s: from when a clock is asked for until it is set, median of late, seconds; None: none was set.
        set_p99_s: the same, 99th percentile.
    """

    run: str
    iterations: int = 0
    time_s: float = 0.0
    metered_iterations: int = 0
    metered_s: float = 0.0
    energy_j: float = 0.0
    energy_is: Origin | None = None
    late_changes: int = 0
    set_p50_s: float | None = None
    set_p99_s: float | None = None


@dataclass(frozen=True)
class JobTelemetry:
    """What is known of a job's iterations since it was registered.

    Attributes:
        iterations: how many have ended, over all its runs.
        iteration_s: what one took of late, seconds.
        power_w: what all GPUs drew of late, watts; None: not known.
        energy_j: what they have taken, joules, in the iterations of which it is known.
        baseline_j: what these would have taken with all clocks at maximum, each as long as it took, joules.
        energy_is: how `energy_j` comes to be, simulated if any of it is; None: it is known of no iteration.
        late_changes: as in `Counters`, over all runs.
        set_p50_s, set_p99_s: as in `Counters`.
        observed_s: when the job was last heard of, seconds since the epoch.
        latest: what was sent last of the run that counts now.
        earlier: the runs before, the latest last.
    """

    iterations: int
    iteration_s: float
    power_w: float | None
    energy_j: float
    baseline_j: float
    energy_is: Origin | None
    late_changes: int
    set_p50_s: float | None
    set_p99_s: float | None
    observed_s: float
    latest: Counters
    earlier: tuple[str, ...] = ()

    @property
    def saved_j(self) -> float:
        """Joules below `baseline_j`; below 0 where more was taken."""
        return self.baseline_j - self.energy_j


def counted(
    before: JobTelemetry | None, sent: Counters, baseline_j: Callable[[float], float], now_s: float
) -> JobTelemetry | None:
    """What is known of a job once `sent` is; as before, if that does not count.

    Args:
        before: what was known; None: nothing.
        sent: of one of its runs.
        baseline_j: what an iteration that takes so many seconds takes with all clocks at maximum, joules. It is convex,
            so what is asked for is no more than that of each iteration by itself.
        now_s: seconds since the epoch.

    Raises:
        Conflict: more iterations have ended than before, and something else has become less.
    """
    runs = () if before is None else (*before.earlier, before.latest.run)
    since = before.latest if before is not None and before.latest.run == sent.run else Counters(sent.run)
    if sent.run in runs[:-1] or sent.iterations <= since.iterations:
        return before
    _check(since, sent)
    metered = sent.metered_iterations - since.metered_iterations
    metered_s, energy_j = sent.metered_s - since.metered_s, sent.energy_j - since.energy_j
    iterations, late_changes = sent.iterations - since.iterations, sent.late_changes - since.late_changes
    base_j = metered * baseline_j(metered_s / metered) if metered else 0.0
    return JobTelemetry(
        iterations=iterations + (before.iterations if before else 0),
        iteration_s=(sent.time_s - since.time_s) / iterations,
        power_w=energy_j / metered_s if metered_s > 0.0 else None,
        energy_j=energy_j + (before.energy_j if before else 0.0),
        baseline_j=base_j + (before.baseline_j if before else 0.0),
        energy_is=_origin(before.energy_is if before else None, sent.energy_is),
        late_changes=late_changes + (before.late_changes if before else 0),
        set_p50_s=sent.set_p50_s,
        set_p99_s=sent.set_p99_s,
        observed_s=now_s,
        latest=sent,
        earlier=tuple(run for run in runs if run != sent.run)[-_RUNS:],
    )


def _check(since: Counters, sent: Counters) -> None:
    for name in _GROWING:
        if getattr(sent, name) < getattr(since, name):
            raise Conflict(
                f"{name}: was {getattr(since, name):g} and is {getattr(sent, name):g} after more iterations of the "
                "same run; count from the begin of the run, and name another run where that begins anew"
            )


def _origin(before: Origin | None, sent: Origin | None) -> Origin | None:
    return "simulated" if "simulated" in (before, sent) else before or sent
