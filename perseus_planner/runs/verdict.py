"""Why iterations do not take the time that was planned, in one sentence, and what to do next.

Whether an iteration ran as planned is another question: it did if its computations came in the
order of the plan.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal

from perseus_planner.base.prefixes import si
from perseus_planner.runs.account import Account

if TYPE_CHECKING:
    from pathlib import Path

    from perseus_planner.runs import IterationRecord

ENOUGH = 5
"""Number of successive iterations that have to agree before anything is reported or learned."""
SLOW = 1.05
"""A GPU is reported as slow if its slowdown is above this."""
RECOVERED = 1.02
"""A GPU that was slow is reported as recovered if its slowdown is below this."""
_THROTTLED = 0.05  #: share of the time above which a throttle reason is named
_NORMAL = frozenset({"sw-power-cap", "board-limit", "reliability"})
"""Throttle reasons of a GPU without a fault: many are at a limit of power, current or voltage
whenever they work hard.
"""


@dataclass(frozen=True)
class StragglerDetection:
    """What to report of a GPU."""

    #: How many times as long as normal its computations take, at least 1; 1 if it has recovered.
    slowdown: float
    reason: str  #: What slows it down, in words


@dataclass(frozen=True)
class StragglerDetector:
    """What is known of one rank so far; immutable, `after` returns the next state.

    The slowdown is how many times as long as normal the computations take. Normal is learned from
    the rank's first iterations, because a profile never matches a job exactly. If the GPU is
    throttled from the start, the profile counts.
    """

    #: Actual over planned time while nothing is wrong; 1 if the profile counts, None if it is not
    #: known yet.
    normal_ratio: float | None = None
    #: The last iterations that ran as planned, at most `ENOUGH`.
    recent: tuple[IterationRecord, ...] = ()
    reported: float = 1.0  #: The slowdown that was reported last; 1 if none was

    def after(
        self, iteration: IterationRecord
    ) -> tuple[StragglerDetector, StragglerDetection | None]:
        """Return the state after one more iteration, and what to report, if anything.

        Reported once each: that the GPU is slow, that its slowdown has changed by more than `SLOW`,
        and that it has recovered. Iterations that did not run as planned are ignored, and so are
        those that follow an evaluation.
        """
        # Iterations that did not run as planned have no planned time to compare with.
        if iteration.deviation is not None or not iteration.planned_busy_s or iteration.busy_s <= 0:
            return self, None
        if iteration.follows_evaluation:
            return self, None
        recent = (*self.recent, iteration)[-ENOUGH:]
        detector = replace(self, recent=recent)
        # A few in a row must agree, as one may be slow by chance.
        if len(recent) < ENOUGH:
            return detector, None
        # A profile never matches a job exactly, so the rank is compared with itself.
        if self.normal_ratio is not None:
            return detector._judge(self.normal_ratio)
        if _is_throttled(recent):  # learning from these iterations would hide it
            return detector._judge(1.0)
        return replace(
            detector, normal_ratio=median(_ratio(row) for row in recent), recent=()
        ), None

    def _judge(self, normal_ratio: float) -> tuple[StragglerDetector, StragglerDetection | None]:
        slowdowns = [_ratio(row) / normal_ratio for row in self.recent]
        # The fastest of the last iterations is slow too, so it is no outlier.
        is_slow = min(slowdowns) > SLOW
        # Reported again only if it has moved by as much as is slow.
        has_moved = min(slowdowns) > self.reported * SLOW or max(slowdowns) < self.reported / SLOW
        if is_slow and has_moved:
            slowdown = median(slowdowns)
            return replace(self, reported=slowdown), StragglerDetection(
                slowdown, _reason(self.recent)
            )
        # Between slow and recovered nothing is said, so that it does not go back and forth.
        if self.reported > 1.0 and max(slowdowns) < RECOVERED:
            return replace(self, reported=1.0), StragglerDetection(1.0, "it has recovered")
        return self, None


def _ratio(row: IterationRecord) -> float:
    """Return actual over planned time of the computations."""
    return row.busy_s / (row.planned_busy_s or math.nan)


def _throttled_shares(rows: Iterable[IterationRecord]) -> dict[str, float]:
    """Return throttle reason -> share of the time, the largest first, for shares above
    `_THROTTLED`.
    """
    whole = sum((Account.of(row, is_first=False) for row in rows), Account())
    shares = {reason: held_s / whole.inside_s for reason, held_s in whole.throttled_s.items()}
    largest_first = sorted(shares.items(), key=lambda item: -item[1])
    return {reason: share for reason, share in largest_first if share > _THROTTLED}


def _is_throttled(rows: Iterable[IterationRecord]) -> bool:
    return any(reason not in _NORMAL for reason in _throttled_shares(rows))


def _reason(rows: Iterable[IterationRecord]) -> str:
    shares = _throttled_shares(rows)
    if not shares:
        return "its computations take longer; no throttling was counted"
    return "throttled: " + ", ".join(
        f"{reason} {100 * min(share, 1.0):.0f} % of the time" for reason, share in shares.items()
    )


OFF = 0.02
"""Iterations are as long as planned if their time is off by less than this share of it."""
MOST_APART = 2.0
"""If all ranks compute more than this times as long or as short as planned, by one factor, the plan
is of another machine.
"""
FAR_OFF = 2.0
"""No saving is stated if iterations take more than this times as long or as short as planned: the
account of a run says nothing of such iterations either.
"""
_ALIKE = 0.1  #: factors that differ by less, relative to each other, are one
_HELP = "as `planner profile --help` says, and plan again"
_FEWER_CHANGES = (
    "measure how long a change takes with `planner doctor --measure-latency`, and plan again with "
    "--max-changes"
)
_LOOK_AT_IT = "look at the GPU with `planner doctor` on that node"
_REPORT_IT = "; with a service, a report of the slow rank lets the others save while they wait"
_MOST_RANKS = 8  #: named

Cause = Literal["late clocks", "one rank", "all ranks", "waiting"]


@dataclass(frozen=True)
class Verdict:
    """By how much and why iterations are off their planned time."""

    ratio: float  #: seconds of an iteration over those by the plan
    #: "late clocks": of the ranks; "one rank": the ranks compute longer than others; "all ranks":
    #: all compute longer, or shorter; "waiting": no rank does.
    cause: Cause
    ranks: tuple[int, ...]  #: the ranks that it comes from; empty for "waiting"
    text: str  #: both in a sentence
    next_step: str  #: what to do, with the command to type

    def __str__(self) -> str:
        return f"{self.text}. Next: {self.next_step}."


def verdict_of(
    ranks: Mapping[int, Account], unlike: str | None = None, run: Path | None = None
) -> Verdict | None:
    """Return the verdict on iterations that all ran as planned; None if they took as long as
    planned, or this is not known of all ranks.

    Args:
        ranks: Rank in the job -> the account of these iterations.
        unlike: In a clause, why the profile of the plan does not carry over to this training; None
            if it does, as far as is known.
        run: The run folder; None where the service tells the verdict, which does not know it.
    """
    verdict = _verdict_of(ranks, run)
    if verdict is None or unlike is None:
        return verdict
    return replace(
        verdict,
        text=f"{verdict.text}; {unlike}",
        next_step=f"profile where you train, with the torch that trains, {_HELP}",
    )


def _verdict_of(ranks: Mapping[int, Account], run: Path | None) -> Verdict | None:
    # Iterations that did not run as planned cannot be compared with a plan.
    if not ranks or any(
        not 0 < account.windows == account.as_planned or not account.planned_busy_s
        for account in ranks.values()
    ):
        return None
    time_s, planned_s = _iteration_s(ranks)
    ratio = time_s / planned_s
    off_s = abs(time_s - planned_s)
    if off_s < (1 - 1e-9) * OFF * planned_s:
        return None
    # Shorter is told like longer, with the sign turned.
    sign = 1 if ratio > 1 else -1
    longer_s = {
        rank: sign * (account.busy_s - account.planned_busy_s) / account.windows
        for rank, account in ranks.items()
    }
    most_s = max(longer_s.values())
    way = "longer" if ratio > 1 else "shorter"
    begin = f"{percent(off_s / planned_s)} {'slower' if ratio > 1 else 'faster'} than planned: "
    # If no rank's computing explains half of it, the rest was waiting.
    if most_s < off_s / 2:
        # What a rank computes longer it does not wait, and each rank is as late as all others.
        waits_s = off_s - fmean(longer_s.values())
        text = (
            f"{begin}{_computing_text(ranks, way)} all wait {si(waits_s, 's', 3)} {way} an "
            "iteration on average, for transfers, data or the host"
        )
        return Verdict(ratio, "waiting", (), text, _see_where(run))
    # Ranks that are off by half of the worst are named with it.
    off_ranks = tuple(rank for rank, seconds in longer_s.items() if seconds >= most_s / 2)
    apart = [ranks[rank].busy_s / ranks[rank].planned_busy_s for rank in off_ranks]
    how = f"{_span([abs(factor - 1) for factor in apart])} {way}"
    # The worst rank tells why, as it decides how long the iteration is.
    worst = ranks[max(longer_s, key=lambda rank: longer_s[rank])]
    not_set = worst.changes_late + worst.changes_overtaken
    if not_set and worst.off_clock_s / worst.windows >= most_s / 2:
        text = begin + _late_text(worst, off_ranks, how)
        return Verdict(ratio, "late clocks", off_ranks, text, _FEWER_CHANGES)
    # All ranks alike means that the profile is of other conditions.
    if len(off_ranks) == len(ranks):
        text = begin + _all_text(ranks, how)
        return Verdict(ratio, "all ranks", off_ranks, text, f"profile where you train, {_HELP}")
    verb = "computes" if len(off_ranks) == 1 else "compute"
    others = "the others wait" if ratio > 1 else "the others do not"
    text = f"{begin}{rank_names(off_ranks)} {verb} {how}, {others}"
    # To the service, ranks that are slow are reported already.
    next_step = _LOOK_AT_IT if run is None else f"{_LOOK_AT_IT}{_REPORT_IT}"
    return Verdict(ratio, "one rank", off_ranks, text, next_step)


def _see_where(run: Path | None) -> str:
    """Return the command that shows where ranks wait."""
    folder = "run" if run is None else shlex.quote(str(run))
    of_it = ', run being the folder of record="run"' if run is None else ""
    return f"see where with `planner show {folder} --perfetto run.json`{of_it}"


def _late_text(worst: Account, ranks: Sequence[int], how: str) -> str:
    """Say on which ranks clocks come late, and how late on the worst."""
    not_set = worst.changes_late + worst.changes_overtaken
    they = "it computes" if len(ranks) == 1 else "they compute"
    return (
        f"clocks come late on {rank_names(ranks)}, where {not_set} of {worst.changes_asked} "
        f"changes were late or overtaken, so {they} {how}"
    )


def _all_text(ranks: Mapping[int, Account], how: str) -> str:
    """Say that all ranks compute longer or shorter, and whether their hosts may be why."""
    busy = sum(account.overloaded for account in ranks.values())
    is_busy = 2 * busy > sum(account.windows for account in ranks.values())
    host = ", while hosts have more to run than CPUs" if is_busy else ""
    name = "the only rank computes" if len(ranks) == 1 else "all ranks compute"
    return f"{name} {how}{host}"


def _computing_text(ranks: Mapping[int, Account], way: str) -> str:
    """Say how much of it is computing, where most of it is waiting; what waits comes after it."""
    factors = [account.busy_s / account.planned_busy_s for account in ranks.values()]
    # Times of computations are off by a little everywhere, which explains nothing.
    if max(factors) - 1 < OFF and 1 - min(factors) < OFF:
        return f"no rank computes much {way}, but"
    # Beside each other, ranks may be off in both directions.
    if min(factors) < 1 < max(factors):
        span = f"{percent_off(min(factors))} to {percent_off(max(factors))}"
    else:
        off = [abs(factor - 1) for factor in factors]
        span = f"{_span(off)} {'longer' if max(factors) > 1 else 'shorter'}"
    # Computing may also make up for a part of the waiting.
    is_part = max(factors) > 1 if way == "longer" else min(factors) < 1
    return f"ranks compute {span}, {'which is less than half of it, and' if is_part else 'but'}"


def percent_off(ratio: float) -> str:
    """Write by how much a time is longer or shorter than another, to two digits."""
    return f"{percent(abs(ratio - 1))} {'longer' if ratio >= 1 else 'shorter'}"


def percent(share: float) -> str:
    """Write a share in percent, to two digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def _span(shares: Sequence[float]) -> str:
    """Write the least and the greatest of some shares in percent, or one number if they agree."""
    least = percent(min(shares))
    most = percent(max(shares))
    return most if least == most else f"{least.removesuffix(' %')} to {most}"


def _iteration_s(ranks: Mapping[int, Account]) -> tuple[float, float]:
    """Return the seconds of an iteration, and those by the plan, of iterations as planned."""
    time_s = max(account.inside_s / account.windows for account in ranks.values())
    planned_s = max(account.planned_s / account.windows for account in ranks.values())
    return time_s, planned_s


def rank_names(ranks: Sequence[int]) -> str:
    """Write the numbers of ranks, of which there is at least one."""
    more = f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else ""
    listed = ", ".join(map(str, ranks[:_MOST_RANKS]))
    return f"rank{'s' * (len(ranks) > 1)} {listed}{more}"


def why_no_saving(
    ranks: Mapping[int, Account], planned_gpu: str | None, gpus: Iterable[str | None]
) -> str | None:
    """Return why no saving of a run against its plan can be stated, in a sentence; None if it can.

    Args:
        ranks: As in `of_another_machine`, which is asked first.
        planned_gpu: As there.
        gpus: As there.
    """
    return of_another_machine(ranks, planned_gpu, gpus) or far_off_plan(ranks)


def far_off_plan(ranks: Mapping[int, Account]) -> str | None:
    """Return a sentence if iterations take over `FAR_OFF` times as long or as short as planned, as
    with a plan of another model; None otherwise, and if that is not known.

    Args:
        ranks: Rank in the job -> the account of iterations that ran as planned.
    """
    # Only where all iterations ran as planned do planned times cover the same iterations.
    planned = {
        rank: account
        for rank, account in ranks.items()
        if account.planned_s and account.windows == account.as_planned
    }
    if not planned:
        return None
    time_s, planned_s = _iteration_s(planned)
    ratio = time_s / planned_s
    if 1 / FAR_OFF <= ratio <= FAR_OFF:
        return None
    factor = f"{float(f'{ratio:.2g}'):g}"  # two digits, and no exponent
    return (
        f"Times are {factor} times the plan's, so no saving is stated; if the plan is of another "
        "model or batch, profile what you train, as `planner profile --help` says, and plan again"
    )


def of_another_machine(
    ranks: Mapping[int, Account], planned_gpu: str | None, gpus: Iterable[str | None]
) -> str | None:
    """Return a sentence if a plan is of another machine than that of a run; None otherwise.

    It is if the GPUs have another name, or if all ranks compute longer or shorter by one factor
    above `MOST_APART` on hosts that have nothing else to run. Nothing that the plan promises holds
    then, so no saving against it is shown.

    Args:
        ranks: Rank in the job -> the account of iterations that ran as planned.
        planned_gpu: Name of the GPU by the plan; None if it has none.
        gpus: Names of the GPUs of the ranks, where they are known.
    """
    remedy = "so no saving is shown; profile where you train, and plan again"
    # Another GPU alone makes a plan one of another machine.
    for gpu in gpus:
        if planned_gpu and gpu and not _is_same(planned_gpu, gpu):
            return (
                f"This plan is for another machine: it was made for the GPU {planned_gpu}, and a "
                f"rank trains on {gpu}, {remedy}"
            )
    # Of ranks whose iterations all ran as planned, as only these have planned times.
    factors = [
        account.busy_s / account.planned_busy_s
        for account in ranks.values()
        if account.planned_busy_s and account.windows == account.as_planned
    ]
    # A busy host makes computations longer without another GPU.
    busy = sum(account.overloaded for account in ranks.values())
    is_idle = 2 * busy <= sum(account.windows for account in ranks.values())
    if len(factors) < max(1, len(ranks)) or not is_idle or min(factors) <= 0:
        return None
    # Different factors have causes of their own on each rank.
    if max(factors) > (1 + _ALIKE) * min(factors):
        return None
    if min(factors) >= 1 / MOST_APART and max(factors) <= MOST_APART:
        return None
    factor = f"{round(min(factors), 2):g}"
    return (
        f"This plan is for another machine: all ranks compute {factor} times as long as "
        f"planned, {remedy}"
    )


def _is_same(one: str, other: str) -> bool:
    """Whether two names may be of one GPU: one of them may say more, such as the maker."""
    words = [set(re.findall(r"[a-z]+|[0-9]+", name.lower())) for name in (one, other)]
    return words[0] <= words[1] or words[1] <= words[0]
