"""How other planners choose clocks for one iteration, for comparison with ours.

Each function returns a mapping such as "3F17" -> MHz over `dag.computations`, of clocks that were
measured for that computation. They use the iteration's graph and its replay, and nothing of the
solver. A deadline applies to the replayed iteration. Among the choices that meet it, each function
takes the one with the least effective energy: the energy minus what the GPUs would draw if they
waited instead, since the other pipelines wait until the deadline anyway.

EnvPipe's rule (Choi et al., USENIX ATC 2023), as its source and the Perseus artifact implement it:

1. The *outer envelope* is each stage's first forward and last backward, and all of the last stage,
   which EnvPipe assumes to be the heaviest. These always run at their highest clock.
2. Every other computation starts at its *energy valley*, the clock at which the computation alone
   takes the least energy.
3. While a critical path leaves the envelope, the computations with the lowest clock on it go one
   clock up ("balanced" reconfiguration, the better of the two variants that its authors tried).

If the last stage is not the heaviest, no critical path ever follows the envelope. The walk then
ends when the whole path is at its highest clock; EnvPipe gives up there, and the artifact's script
loops forever. By then much has been sped up in vain. In either case, a replay with these clocks is
no slower than with all clocks at their highest.

Choices made here:

- The order is 1F1B, as in the artifact. EnvPipe can also run forwards earlier, but that is another
  schedule with other memory needs, not a choice of clocks.
- Each kind of computation has its own valley, as in the artifact; EnvPipe measures one for a whole
  stage.
- A step goes to the next measured clock, instead of EnvPipe's 30 MHz or the artifact's 15 MHz.
- The critical path is followed from the last computation to the first, along what each one waited
  for, and stays on the same rank in case of a tie, as in EnvPipe. The artifact counts time in
  ticks, so that several paths are critical, and takes any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.plans.replay import all_maximum, end_times, time_and_energy
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules import one_f_one_b

if TYPE_CHECKING:
    from perseus_planner import PipelineDag
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.schedules import Computation

_BRIEF = 2000
"""EnvPipe replays the iteration up to computations x clocks times; more take minutes."""


def one_clock(dag: PipelineDag, deadline_s: float) -> dict[str, int]:
    """Run the whole job at one clock, as an operator would set it by hand.

    Takes the clock with the least effective energy among those that were measured for every
    computation and that meet the deadline. If none meets it, returns `all_maximum`.

    Args:
        dag: the iteration.
        deadline_s: the iteration time to meet, seconds.

    Raises:
        UsageError: If no clock was measured for all computations.
    """
    shared = _shared_clocks(_measured(dag))
    if not shared:
        raise UsageError(
            "no clock was measured for every computation; measure one clock for all of them"
        )
    return _cheapest(dag, [[clock] * dag.profile.stages for clock in shared], deadline_s)


def one_per_stage(dag: PipelineDag, deadline_s: float) -> dict[str, int]:
    """Run each stage at one clock, forwards and backwards alike: Zeus (NSDI 2023) applied to a
    pipeline.

    This is ZeusPerStage of the Perseus artifact, with clocks instead of power limits. The heaviest
    stage is the one with the longest forward at the highest clocks. The rule steps through its
    clocks from the highest down. At each step, every other stage lowers its own clock, starting no
    higher than the heaviest stage's, for as long as that does not move its forward time away from
    the heaviest one's (and past clocks at which lower is faster). The steps end when any stage
    reaches its lowest clock. The result is the step with the least effective energy that meets the
    deadline, or `all_maximum` if none does, which is common for tight deadlines.

    The artifact has no deadline; it weighs energy against time by a factor. Only forwards are
    balanced, so a stage whose forward alone is light becomes slow in its backward.

    Args:
        dag: the iteration.
        deadline_s: the iteration time to meet, seconds.

    Raises:
        UsageError: If the computations of a stage share no clock.
    """
    measured = _measured(dag)
    stages = [computation.stage for computation in dag.computations]
    return _cheapest(dag, _balanced_clocks(dag, measured, stages), deadline_s)


def envpipe(dag: PipelineDag) -> dict[str, int]:
    """Choose clocks by EnvPipe's rule (USENIX ATC 2023) for the 1F1B order; see
    `perseus_planner.extensions.lab.baselines`.

    EnvPipe has one operating point: it takes no deadline, and does not use the time that a
    straggler leaves. Its replay is never slower than that of `all_maximum`.

    Args:
        dag: the iteration.

    Raises:
        UsageError: If the schedule is not 1F1B, the only one that the rule is defined for.
    """
    schedule = dag.schedule
    if schedule.ranks != one_f_one_b(schedule.stages, schedule.microbatches).ranks:
        raise UsageError(
            f"EnvPipe's rule is for 1F1B only, and this schedule is {schedule}; use a 1F1B schedule"
        )
    return _clocks(dag, reconfigure(dag, _measured(dag)))


def _measured(dag: PipelineDag) -> list[tuple[Measurement, ...]]:
    """Return the measurements of each of `dag.computations`, highest clock first."""
    return [dag.profile.measurements[key] for key in dag.iteration.keys]


def _clocks(dag: PipelineDag, points: Iterable[Measurement]) -> dict[str, int]:
    return {str(c): point.clock_mhz for c, point in zip(dag.computations, points, strict=True)}


def _cheapest(
    dag: PipelineDag, family: Iterable[Sequence[int]], deadline_s: float
) -> dict[str, int]:
    """Return the choice of a clock for each stage with the least effective energy that meets the
    deadline, the first one of equals; `all_maximum` if none does.
    """
    tables = [{point.clock_mhz: point for point in points} for points in _measured(dag)]
    best = all_maximum(dag)
    best_j = math.inf
    for clocks in family:
        points = [
            table[clocks[computation.stage]]
            for table, computation in zip(tables, dag.computations, strict=True)
        ]
        time_s, energy_j = time_and_energy(dag, points)
        # Others wait until the deadline anyway, so what waiting would draw is no cost of the
        # choice.
        effective_j = energy_j - dag.waiting_w * time_s
        if time_s <= deadline_s and effective_j < best_j:
            best = _clocks(dag, points)
            best_j = effective_j
    return best


def _shared_clocks(measured: Iterable[Sequence[Measurement]]) -> list[int]:
    """Return the clocks that all of `measured` have, MHz, highest first."""
    clocks = [frozenset(point.clock_mhz for point in points) for points in set(measured)]
    return sorted(frozenset.intersection(*clocks), reverse=True)


def _balanced_clocks(
    dag: PipelineDag, measured: Sequence[tuple[Measurement, ...]], stages: Sequence[int]
) -> list[list[int]]:
    """Return the steps of ZeusPerStage: the clock of each stage, MHz, for each clock of the
    heaviest stage.
    """
    ladders = []
    times_s = []
    for stage in range(dag.profile.stages):
        # A stage runs at one clock, so only those count that all its computations were measured at.
        ladder = _shared_clocks(
            points
            for points, stage_of_points in zip(measured, stages, strict=True)
            if stage_of_points == stage
        )
        if not ladder:
            raise UsageError(
                f"stage {stage}: no clock was measured for all its computations; measure one clock "
                "for all of them"
            )
        # A stage's forwards tell how heavy it is.
        forward_s = {
            point.clock_mhz: point.time_s for point in dag.profile.measurements[Key(stage, "F")]
        }
        ladder = [clock for clock in ladder if clock in forward_s]
        ladders.append(ladder)
        times_s.append([forward_s[clock] for clock in ladder])
    # The heaviest stage leads, and others follow as slowly as they may.
    heaviest = max(range(len(ladders)), key=lambda stage: times_s[stage][0])
    steps = [0] * len(ladders)
    family = []
    # Each step lowers the heaviest stage by one clock, and the others from where they stood.
    for step, clock in enumerate(ladders[heaviest]):
        for stage, ladder in enumerate(ladders):
            lowest = len(ladder) - 1
            start = next((i for i in range(steps[stage], lowest) if ladder[i] <= clock), lowest)
            steps[stage] = _nearest_below(times_s[stage], start, times_s[heaviest][step])
        steps[heaviest] = step
        family.append([ladder[i] for ladder, i in zip(ladders, steps, strict=True)])
        # A stage at its lowest clock cannot be balanced any further.
        if any(i == len(ladder) - 1 for i, ladder in zip(steps, ladders, strict=True)):
            break
    return family


def _nearest_below(times_s: Sequence[float], start: int, target_s: float) -> int:
    """Return the last index from `start` on before times rise and move away from `target_s`."""
    for i in range(start + 1, len(times_s)):
        farther = abs(times_s[i] - target_s) > abs(times_s[i - 1] - target_s)
        if farther and times_s[i] >= times_s[i - 1]:
            return i - 1
    return len(times_s) - 1


def _brief_envpipe(dag: PipelineDag, _: float) -> dict[str, int]:
    count = len(dag.computations)
    if count > _BRIEF:
        raise UsageError(
            f"its walk over {count:,} computations takes minutes; `planner simulate --policy "
            "envpipe` replays it"
        )
    return envpipe(dag)


OTHER_PLANNERS: Mapping[str, Callable[[PipelineDag, float], Mapping[str, int]]] = {
    "one clock for the job": one_clock,
    "one clock per stage (ZeusPerStage)": one_per_stage,
    "EnvPipe": _brief_envpipe,
}
"""How other planners choose clocks for a deadline, by what reports call them."""


def reconfigure(dag: PipelineDag, measured: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Return the operating point that EnvPipe chooses for each of `dag.computations`.

    Takes up to computations x clocks steps, each of which replays the iteration.

    Args:
        dag: an iteration of 1F1B.
        measured: the measurements of each computation, highest clock first.
    """
    last = (dag.schedule.stages - 1, dag.schedule.microbatches - 1)
    envelope = [on_envelope(computation, *last) for computation in dag.computations]
    # Inside the envelope everything runs at its highest clock, and the rest begins at its valley.
    indices = [
        0 if outer else _valley(points) for outer, points in zip(envelope, measured, strict=True)
    ]
    while True:
        chosen = [points[i] for points, i in zip(measured, indices, strict=True)]
        path = [
            node
            for node in critical_path(dag, [point.time_s for point in chosen])
            if node < len(indices)
        ]
        # Without a clock to raise, or along the envelope, the walk ends.
        raisable = [node for node in path if indices[node]]
        if not raisable or all(envelope[node] for node in path):
            return chosen
        # Only the lowest clocks go up, which is the balanced variant.
        lowest_mhz = min(chosen[node].clock_mhz for node in raisable)
        for node in raisable:
            if chosen[node].clock_mhz == lowest_mhz:
                indices[node] -= 1


def on_envelope(computation: Computation, last_stage: int, last_microbatch: int) -> bool:
    """Tell whether EnvPipe always runs this computation at its highest clock."""
    stage, kind, microbatch = computation
    return stage == last_stage or microbatch == (0 if kind == "F" else last_microbatch)


def critical_path(dag: PipelineDag, durations_s: Sequence[float]) -> list[int]:
    """Return the nodes of a critical path, last one first.

    Each node starts as soon as the next one in the list has ended and its lag is over.

    Args:
        dag: the iteration.
        durations_s: how long each of `dag.computations` takes, seconds.
    """
    end_s = end_times(dag, durations_s)
    path = [max(range(len(end_s)), key=end_s.__getitem__)]
    while waits := dag.iteration.waits[
        path[-1]
    ]:  # the rank's own predecessor comes first, and max takes the first
        path.append(max(waits, key=lambda wait: end_s[wait[0]] + wait[1])[0])
    return path


def _valley(points: Sequence[Measurement]) -> int:
    """Return the index of the least energy; of the highest clock in case of a tie."""
    return min(range(len(points)), key=lambda i: points[i].energy_j)
