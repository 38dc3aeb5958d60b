"""The ranks that hold all others up, and how much shorter an iteration would be with equal work."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted, si
from perseus_planner.plans.replay import end_times
from perseus_planner.schedules.layouts import CONDITION, Layout, read_layout, rebalance

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.solver.frontier import Frontier
    from perseus_planner.views.energy import IterationEnergy

_ALIKE = 0.005  #: ranks whose times differ by less, relative to each other, are not told apart


@dataclass(frozen=True)
class Bottleneck:
    """The ranks whose computations take longest with all clocks at maximum."""

    ranks: tuple[int, ...]  #: their numbers; empty if most ranks are about as busy
    busy_s: float  #: seconds of computations and operations of the busiest rank
    #: by how much that is more than the mean of the other ranks; 0 if there are none.
    excess_share: float
    balanced_time_s: float  #: iteration time if every rank were as busy as the mean of all, seconds
    time_s: float  #: iteration time as it is, seconds
    #: the layout of the profile, and the balanced one; None if it is not known.
    layouts: tuple[Layout, Layout] | None = None
    moved_time_s: float = 0.0  #: iteration time with the balanced layout, seconds


def find_bottleneck(frontier: Frontier, plan: Plan, before: IterationEnergy) -> Bottleneck:
    """Return the busiest ranks with all clocks at maximum, and the iteration time if all ranks
    were equally busy.
    """
    # Ranks that are about as busy as the busiest share the bottleneck.
    most_s = max(before.busy_s)
    mean_s = fmean(before.busy_s)
    ranks = tuple(
        rank for rank, busy_s in enumerate(before.busy_s) if busy_s >= (1 - _ALIKE) * most_s
    )
    # A mean with the busiest rank would hide half of it from a pipeline of two.
    others_s = [busy_s for rank, busy_s in enumerate(before.busy_s) if rank not in ranks]
    # Fixed operations keep their time; the computations of a rank are scaled alike.
    balanced_s = [
        plan.measurement(computation).time_s * mean_s / before.busy_s[rank]
        for computation, rank in zip(
            plan.iteration.computations, plan.iteration.rank_of, strict=False
        )
    ]
    # If most ranks are that busy, none of them is to blame.
    bottleneck = Bottleneck(
        ranks if 2 * len(ranks) <= len(before.busy_s) else (),
        most_s,
        most_s / fmean(others_s) - 1 if others_s else 0.0,
        max(end_times(frontier.dag, balanced_s)) + plan.overhead_s,
        before.time_s,
    )
    # The profile says which layout was measured, if its job did.
    text = frontier.dag.profile.conditions.get(CONDITION)
    return bottleneck if text is None else _with_layouts(bottleneck, text, frontier.dag, plan)


def _with_layouts(found: Bottleneck, text: str, dag: PipelineDag, plan: Plan) -> Bottleneck:
    """Return the bottleneck with the layout of the profile, and the balanced one."""
    schedule = dag.schedule
    computations = plan.iteration.computations
    times_s = [plan.measurement(computation).time_s for computation in computations]
    # Per microbatch, as layers are moved for all of them.
    stage_s = [0.0] * schedule.stages
    kind_s = dict.fromkeys(schedule.kinds, 0.0)
    for computation, time_s in zip(computations, times_s, strict=True):
        # A layer's share of each kind is that of all computations.
        stage_s[computation.stage] += time_s / schedule.microbatches
        kind_s[computation.kind] += time_s / math.fsum(times_s)
    layout = read_layout(text, stages=schedule.stages)
    better = rebalance(layout, stage_s, schedule.stage_ranks)
    # No layout with these layers is faster, or times do not tell what a layer takes.
    if better is None:
        return found
    # What a stage gains or loses is layers, whose kinds share time as those of all stages do.
    gained_s = [after - now for after, now in zip(better.stage_s, stage_s, strict=True)]
    moved_s = [
        max(0.0, time_s + gained_s[work.stage] * kind_s[work.kind])
        for work, time_s in zip(computations, times_s, strict=True)
    ]
    return replace(
        found,
        layouts=(layout, better.layout),
        moved_time_s=max(end_times(dag, moved_s)) + plan.overhead_s,
    )


def bottleneck_sentences(
    found: Bottleneck, before: IterationEnergy, planned: IterationEnergy | None
) -> Iterator[str]:
    """Say which ranks hold the others up, by how much, and what a plan makes of it."""
    busy = f"{si(found.busy_s, 's', 3)} of {si(found.time_s, 's', 3)}"
    if len(before.ranks) == 1:
        return
    # Waiting comes from the schedule then, and not from a rank.
    if not found.ranks:
        yield (
            f"No rank is the bottleneck: most compute for about as long ({busy}). They wait "
            "because the schedule fills and empties the pipeline; more microbatches make that a "
            "smaller part."
        )
        return
    first, *more = found.ranks
    name, verb = (
        (f"Ranks {first} and {len(more)} more are", "they compute")
        if more
        else (f"Rank {first} is", "it computes")
    )
    text = (
        f"{name} the bottleneck: {verb} for {busy}, {100 * found.excess_share:.1f} % longer "
        "than the others on average"
    )
    shorter = 1 - found.balanced_time_s / found.time_s
    if shorter > _ALIKE:
        text += (
            f"; with equal work on all ranks, an iteration would be {100 * shorter:.1f} % shorter"
        )
    # A plan leaves the bottleneck fast and slows the others, which is why it saves.
    if planned is not None:
        parts = [clock / most for clock, most in zip(planned.clocks, before.clocks, strict=True)]
        others = [part for rank, part in enumerate(parts) if rank not in found.ranks]
        kept = fmean(parts[rank] for rank in found.ranks)
        pronoun = "them" if more else "it"
        text += (
            f". The plan runs {pronoun} at {100 * kept:.0f} % of the highest clock on average, "
            "the others at "
        )
        text += f"{100 * fmean(others):.0f} %"
    yield f"{text}."


def move_text(found: Bottleneck) -> str:
    """Return which layers to move from where to where, and the layout to type."""
    assert found.layouts is not None
    now, better = found.layouts
    if now == better:
        return f"No move of a layer of its layout, {now}, makes the slowest rank faster"
    changes = [after - before for before, after in zip(now.layers, better.layers, strict=True)]
    fewer = _stages_text(stage for stage, change in enumerate(changes) if change < 0)
    more = _stages_text(stage for stage, change in enumerate(changes) if change > 0)
    count = sum(change for change in changes if change > 0)
    shorter = 1 - found.moved_time_s / found.time_s
    return (
        f"Move {counted(count, 'layer')} from {fewer} to {more}: an iteration would be "
        f"{100 * shorter:.1f} % shorter at full clocks, if memory allows; the layout is then "
        f"{better}, now {now}"
    )


def _stages_text(stages: Iterable[int]) -> str:
    numbers = list(stages)
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {', '.join(map(str, numbers))}"
