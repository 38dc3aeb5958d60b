"""Where the energy goes before and after, and why a plan saves what it saves, in sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import counted, si
from perseus_planner.plans.replay import ALL_MAXIMUM
from perseus_planner.views.bottleneck import (
    Bottleneck,
    bottleneck_sentences,
    find_bottleneck,
    move_text,
)
from perseus_planner.views.context import (
    share,
)
from perseus_planner.views.energy import (
    LOW,
    PHASES,
    IterationEnergy,
    energy_of_plan,
    energy_of_run,
)
from perseus_planner.views.run import time_text

if TYPE_CHECKING:
    from perseus_planner.views.savings import Saving
    from perseus_planner.views.sources import Sources


@dataclass(frozen=True)
class WhereEnergyGoes:
    """The first picture of a report."""

    #: all clocks at maximum, the first plan, and the first run, as far as they are known.
    iterations: tuple[IterationEnergy, ...]
    bottleneck: Bottleneck | None  #: the busiest rank, or None if it is not known
    #: what the picture shows, in words; the first one says what is saved, and why.
    sentences: tuple[str, ...]


def where_energy_goes(sources: Sources, savings: Sequence[Saving]) -> WhereEnergyGoes:
    """Return where the energy goes before, by the first plan, and in the first run.

    It is not known if the saving of a run cannot be stated.

    Args:
        sources: what the report is made of.
        savings: what each run and plan saves; the sentences are about the first.
    """
    # Without a comparison no picture of what was saved can be right.
    if sources.unlike_plan:
        return WhereEnergyGoes((), None, ())
    before = bottleneck = None
    # Only a frontier has the iteration at full clocks with its computations.
    if sources.frontier is not None and sources.before is not None:
        before = energy_of_plan(ALL_MAXIMUM, sources.before, "baseline")
        bottleneck = find_bottleneck(sources.frontier, sources.before, before)
    planned = next((energy_of_plan(name, plan) for name, plan in sources.plans.items()), None)
    runs = (
        energy_of_run(name, run, sources.summaries[name])
        for name, run in sources.planned_runs.items()
    )
    # The first run whose energy is known, as not every one has it.
    ran = next(filter(None, runs), None)
    parts = _parts_saved(sources, savings[0], before, planned) if savings and before else None
    sentences = _sentences(savings, parts, before, planned, bottleneck)
    iterations = tuple(filter(None, (before, planned, ran)))
    return WhereEnergyGoes(iterations, bottleneck, tuple(sentences))


@dataclass(frozen=True)
class _PartsSaved:
    """What one pipeline saves in an iteration, by what its GPUs do; the sum is the saving."""

    computing_j: float
    waiting_j: float
    #: mean clocks of its ranks, as in `IterationEnergy`; empty for a run, whose are not recorded.
    clocks: tuple[float, ...]


def _parts_saved(
    sources: Sources, saving: Saving, before: IterationEnergy, planned: IterationEnergy | None
) -> _PartsSaved | None:
    """Return the parts of a saving; None if there is nothing to take apart."""
    if not saving.is_run:
        if planned is None:
            return None
        computing_j = before.computing_j - planned.computing_j
        waiting_j = before.waiting_j - planned.waiting_j
        return _PartsSaved(computing_j, waiting_j, planned.clocks)
    # What was saved is of iterations as long as those of the run, and not of those in `before`.
    if not saving.saved_j:
        return None
    summary = sources.summaries[saving.name]
    plan = sources.runs[saving.name].plan(summary.version, summary.ranks[0].pipeline)
    by_plan = energy_of_plan(saving.name, plan)
    waiting_j = 0.0
    for number, waiting_w in enumerate(plan.rank_waiting_w):
        ranks = [rank for rank in summary.ranks if rank.pipeline_rank == number]
        busy_s = fmean(rank.busy_s or 0.0 for rank in ranks)
        # At full clocks its computations are shorter by as much as the profile says; it waits then.
        full_share = share(before.busy_s[number], by_plan.busy_s[number])
        waiting_j += waiting_w * busy_s * (1.0 - full_share)
    # The rest was saved by computing, as in the energy of a run.
    return _PartsSaved(saving.saved_j / saving.pipelines - waiting_j, waiting_j, ())


def _sentences(
    savings: Sequence[Saving],
    parts: _PartsSaved | None,
    before: IterationEnergy | None,
    planned: IterationEnergy | None,
    bottleneck: Bottleneck | None,
) -> Iterator[str]:
    # What was measured counts before what was planned.
    if savings:
        yield _run_sentence(savings[0]) if savings[0].is_run else _plan_sentence(savings[0])
    if before is not None and parts is not None:
        yield _parts_sentence(before, parts)
    if before is not None:
        waiting = 100 * share(before.waiting_j, before.waiting_j + before.computing_j)
        yield (
            f"With {ALL_MAXIMUM}, {waiting:.0f} % of the energy is drawn while GPUs wait for "
            f"their neighbours, and {100 - waiting:.0f} % while they compute."
        )
    if bottleneck is not None and before is not None:
        yield from bottleneck_sentences(bottleneck, before, planned)
        if bottleneck.layouts is not None:
            yield f"{move_text(bottleneck)}."
    # The phases of a run are not known, so they are told of plans.
    if before is not None and planned is not None and savings:
        yield from _phase_sentences(before, planned)


def _run_sentence(saving: Saving) -> str:
    """Say what a run used and saved, all pipelines together, and then how long it took."""
    time = time_text(saving.time_s, saving.planned_time_s)
    # How much longer it took than planned is not what the plan costs, so that is told apart.
    if saving.planned_ratio is not None:
        than = "as" if _is_as_long(saving.planned_ratio) else "than"
        time += f"; the plan takes {_longer(saving.planned_ratio)} {than} {ALL_MAXIMUM}"
    return (
        f"The run in the folder {saving.name}{_together(saving)} takes "
        f"{si(saving.energy_j, 'J', 3)} per iteration: {_less(saving)} {ALL_MAXIMUM} would have "
        f"taken in as much time. {time}."
    )


def _plan_sentence(saving: Saving) -> str:
    """Say what a plan takes and saves, all pipelines together."""
    return (
        f"{saving.name}{_together(saving)} takes {si(saving.energy_j, 'J', 3)} and "
        f"{si(saving.time_s, 's', 3)} per iteration: {_less(saving)} {saving.baseline}, and "
        f"{_longer(saving.time_ratio)}."
    )


def _together(saving: Saving) -> str:
    return f" ({saving.pipelines} pipelines together)" if saving.pipelines > 1 else ""


def _less(saving: Saving) -> str:
    more = "less" if saving.saved_j >= 0 else "more"
    return f"{100 * abs(saving.saved_share):.1f} % {more} energy than"


def _is_as_long(ratio: float) -> bool:
    """Whether a time differs from another by less than is written of it."""
    return abs(ratio - 1) < 0.0005


def _longer(ratio: float) -> str:
    """Say how long something takes beside something else."""
    if _is_as_long(ratio):
        return "as long"
    return f"{100 * abs(ratio - 1):.1f} % {'longer' if ratio > 1 else 'shorter'}"


def _parts_sentence(before: IterationEnergy, parts: _PartsSaved) -> str:
    """Say what one pipeline saves while it computes, and while it waits."""
    lower = sum(
        clock < LOW * most for clock, most in zip(parts.clocks, before.clocks, strict=False)
    )
    because = (
        f", as {lower} of {counted(len(parts.clocks), 'rank')} run at lower clocks" if lower else ""
    )
    return (
        f"Per pipeline, computing takes {_change(parts.computing_j)}{because}; waiting takes "
        f"{_change(parts.waiting_j)}."
    )


def _change(saved_j: float) -> str:
    return f"{si(abs(saved_j), 'J', 3)} {'less' if saved_j >= 0 else 'more'}"


def _phase_sentences(before: IterationEnergy, planned: IterationEnergy) -> Iterator[str]:
    saved_j = [
        was.energy_j - now.energy_j for was, now in zip(before.phases, planned.phases, strict=True)
    ]
    # The phases share what was saved, so parts would mean nothing if nothing was.
    whole_j = math.fsum(saved_j)
    if whole_j <= 0:
        return
    first, second, third = (
        f"{100 * phase_j / whole_j:.0f} % is in the {name}"
        for name, phase_j in zip(PHASES, saved_j, strict=True)
    )
    yield f"Of the plan's saving, {second}, {first} and {third}."
