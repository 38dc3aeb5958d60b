"""What the numbers of a summary describe, what they are compared with, and both in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.base.prefixes import counted, si
from perseus_planner.plans.replay import ALL_MAXIMUM, origin_text, profile_of_origin

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.runs.account import Account
    from perseus_planner.schedules.iteration import Iteration


@dataclass(frozen=True)
class Context:
    """The profile that the numbers of a summary come from, and the iteration that they describe."""

    origin: str  #: how the profile was made: "measured", "simulated", "traced" or "unknown"
    gpu: str | None  #: name of the GPU, or None if it is not known
    control: str  #: what is set: "clock", "power-limit" or "observed"
    gpus_per_stage: int  #: number of GPUs of a stage
    #: power of a waiting stage, watts; one number for each stage if they differ; None if not known.
    blocking_power_w: float | tuple[float, ...] | None
    overhead_s: float  #: calibrated overhead of an iteration, seconds
    profile_digest: str  #: digest of the profile
    stages: int  #: number of pipeline stages
    schedule: str | None = None  #: name of the schedule, or None if there is only a profile
    ranks: int | None = None  #: number of pipeline ranks, or None
    microbatches: int | None = None  #: number of microbatches, or None
    operations: int = 0  #: number of operations of fixed time
    longest_lag_s: float = 0.0  #: time of the longest transfer, seconds

    @property
    def profile(self) -> str:
        """The profile by its origin, such as "measured profile"."""
        return profile_of_origin(self.origin)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The time and energy of an iteration, compared with those of a baseline."""

    time_s: float  #: iteration time, seconds
    energy_j: float  #: energy of an iteration, waiting included, joules
    baseline: str  #: name of the baseline
    baseline_time_s: float  #: iteration time of the baseline, seconds
    baseline_energy_j: float  #: energy of the baseline, joules
    time_ratio: float  #: `time_s` over `baseline_time_s`
    saved_j: float  #: energy saved against the baseline, joules
    saved_share: float  #: `saved_j` over `baseline_energy_j`


def compare(
    time_s: float,
    energy_j: float,
    baseline_time_s: float,
    baseline_energy_j: float,
    baseline: str = ALL_MAXIMUM,
) -> Comparison:
    """Compare an iteration with a baseline."""
    saved_j = baseline_energy_j - energy_j
    return Comparison(
        time_s=time_s,
        energy_j=energy_j,
        baseline=baseline,
        baseline_time_s=baseline_time_s,
        baseline_energy_j=baseline_energy_j,
        time_ratio=time_s / baseline_time_s,
        saved_j=saved_j,
        saved_share=share(saved_j, baseline_energy_j),
    )


def context_of_profile(profile: Profile, iteration: Iteration | None = None) -> Context:
    """Return the context of numbers that come from `profile`, and describe `iteration` if it is
    given.
    """
    return _context(profile, iteration, profile_digest=profile.digest, stages=profile.stages)


def context_of_plan(plan: Plan) -> Context:
    """Return the context of a plan's numbers."""
    digest = plan.profile_digest
    stages = plan.schedule.stages
    return _context(plan, plan.iteration, profile_digest=digest, stages=stages)


def _context(source: Profile | Plan, iteration: Iteration | None, **known: Any) -> Context:
    # What profile and plan have under one name; the digest is called otherwise in each.
    for name in ("origin", "gpu", "control", "gpus_per_stage", "blocking_power_w", "overhead_s"):
        known[name] = getattr(source, name)
    if iteration is None:
        return Context(**known)
    return Context(
        **known,
        schedule=iteration.schedule.name,
        ranks=len(iteration.schedule.ranks),
        microbatches=iteration.schedule.microbatches,
        operations=len(iteration.operations),
        # The longest stands for all: a table has no room for each boundary.
        longest_lag_s=max((lag_s for lags_s in iteration.lags_s for lag_s in lags_s), default=0.0),
    )


def schedule_remarks(context: Context) -> list[str]:
    """Return sentences on engines that do not run a schedule that others run."""
    if context.schedule != "1f1b" or not context.microbatches:
        return []
    # Only torch refuses such a schedule, so a plan of it is made, with this remark.
    if context.microbatches >= context.stages:
        return []
    return [
        f"torch.distributed.pipelining refuses 1F1B with fewer microbatches "
        f"({context.microbatches}) than stages ({context.stages}); other engines run it."
    ]


def share(part: float, whole: float) -> float:
    """Return `part` over `whole`, or 0 if `whole` is 0."""
    return part / whole if whole else 0.0


def origin_label(origin: str) -> str:
    """Say where a replayed number comes from, as a label beside it."""
    return f"replayed, {profile_of_origin(origin)}"


def pipeline_text(context: Context) -> str:
    """Describe the pipeline of an iteration: its schedule, stages, microbatches and GPU."""
    stages = context.stages
    ranks = context.ranks or context.stages
    if stages == ranks:
        size = counted(stages, "stage")
    elif stages % ranks == 0:
        size = f"{counted(ranks, 'rank')} x {stages // ranks} virtual stages"
    else:
        size = f"{stages} stages on {counted(ranks, 'rank')}"
    gpu = f" on {context.gpu}" if context.gpu else ""
    return f"{context.schedule}, {size} x {counted(context.microbatches or 0, 'microbatch')}{gpu}"


def source_text(context: Context) -> str:
    """Say where an iteration's numbers come from and what they include beside its computations,
    in one or two lines.
    """
    parts = []
    if context.gpus_per_stage > 1:
        parts.append(f"{context.gpus_per_stage} GPUs per stage")
    if context.operations:
        parts.append(f"{counted(context.operations, 'operation')} of fixed time")
    if context.longest_lag_s:
        parts.append(f"transfers of up to {si(context.longest_lag_s, 's', 6)}")
    if context.overhead_s:
        how = "traced" if context.origin == "traced" else "calibrated"
        parts.append(f"{si(context.overhead_s, 's', 6)} of {how} overhead")
    # What is more than computations and waiting is named, as figures without it are lower.
    included = f"\nIncluded: {', '.join(parts)}." if parts else ""
    return (
        f"{origin_text(context.origin)}; blocking power "
        f"{power_text(context.blocking_power_w)}.{included}"
    )


def power_text(power_w: float | tuple[float, ...] | None) -> str:
    """Write the blocking power of a stage, or the range over stages that differ."""
    if power_w is None:
        return "not known"
    if not isinstance(power_w, tuple):
        return si(power_w, "W")
    least = si(min(power_w), "W")
    most = si(max(power_w), "W")
    return most if least == most else f"{least} to {most}"


def saving_text(comparison: Comparison) -> str:
    """Write a saving in joules and percent."""
    return f"{si(comparison.saved_j, 'J', 6)} ({100 * comparison.saved_share:.2f} %)"


def saved_text(account: Account) -> str:
    """Say what an account has saved, and how sure that is."""
    saving = account.saving
    if saving is None:
        return (
            "what was saved is not known: most iterations ran otherwise than rows say, or were "
            "recorded by 0.3"
        )
    # A saving of 0 J with an interval would look like a plan that does not work.
    if account.lowered == 0:
        return "no clock was lowered, nothing was saved"
    share = 100 * saving.share
    within = 100 * saving.within_share
    return (
        f"saved {si(saving.saved_j, 'J')} ({share:.2f} % \u00b1 {within:.2f}, a 95 % interval) "
        f"against {ALL_MAXIMUM}"
    )
