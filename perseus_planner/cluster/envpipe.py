"""EnvPipe's rule for clocks (Choi et al., USENIX ATC 2023), on the computations of a 1F1B iteration.

What it does, as its source and the Perseus artifact, which compares with it, run it:

1. The *outer envelope* is each stage's first forward and last backward, and all of the last stage: it takes for granted
   that the last stage is the heaviest. These run at their highest clock, always.
2. All else starts at its *energy valley*, the clock at which the computation itself takes the least energy.
3. As long as a critical path leaves the envelope, the computations of the lowest clock on it go one step up ("balanced"
   reconfiguration, the better of the two that its authors tried).

Where the last stage is not the heaviest, no critical path ever follows the envelope. The walk then ends when all of the
path is at its highest clock, where EnvPipe gives up and the artifact's script turns without end; much has been sped up
in vain by then. Either way a replay with these clocks is no slower than with all clocks at their highest.

Choices made here. The order is 1F1B, as in the artifact: EnvPipe may also run forwards earlier than that, which is
another schedule, with other memory, and no choice of clocks. The valley is of each kind of computation, as in the
artifact; EnvPipe measures one for a whole stage. A step is to the next measured clock, in place of EnvPipe's 30 MHz and
the artifact's 15. The critical path is followed from the last computation back to the first, along what each one waited
for, on its own rank where both were ready at once, as EnvPipe does. The artifact counts in ticks, in which several
paths are critical, and takes any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.plans.simulate import end_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.schedules import Computation
    from perseus_planner.schedules.dag import PipelineDag


def reconfigured(dag: PipelineDag, measured: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """What EnvPipe runs each computation at, by its place in `dag.computations`.

    It takes up to computations x clocks steps, each a replay of the iteration.

    Args:
        dag: an iteration of 1F1B.
        measured: what was measured of each computation, highest clock first, by place.
    """
    last = (dag.schedule.stages - 1, dag.schedule.microbatches - 1)
    envelope = [on_envelope(computation, *last) for computation in dag.computations]
    at = [0 if outer else _valley(points) for outer, points in zip(envelope, measured, strict=True)]
    while True:
        chosen = [points[i] for points, i in zip(measured, at, strict=True)]
        path = [place for place in critical_path(dag, [point.time_s for point in chosen]) if place < len(at)]
        raisable = [place for place in path if at[place]]
        if not raisable or all(envelope[place] for place in path):
            return chosen
        lowest_mhz = min(chosen[place].clock_mhz for place in raisable)
        for place in raisable:
            if chosen[place].clock_mhz == lowest_mhz:
                at[place] -= 1


def on_envelope(computation: Computation, last_stage: int, last_microbatch: int) -> bool:
    """Whether EnvPipe never slows this computation down."""
    stage, kind, microbatch = computation
    return stage == last_stage or microbatch == (0 if kind == "F" else last_microbatch)


def critical_path(dag: PipelineDag, durations_s: Sequence[float]) -> list[int]:
    """Places of nodes, last first, each of which starts when the next one ends and its lag is over.

    Args:
        dag: the iteration.
        durations_s: seconds of each computation, by its place in `dag.computations`.
    """
    end_s = end_times(dag, durations_s)
    path = [max(range(len(end_s)), key=end_s.__getitem__)]
    while waits := dag.iteration.waits[path[-1]]:  # program order on the rank comes first, and max takes the first
        path.append(max(waits, key=lambda wait: end_s[wait[0]] + wait[1])[0])
    return path


def _valley(points: Sequence[Measurement]) -> int:
    """Where the energy is least; of equals, the highest clock."""
    return min(range(len(points)), key=lambda i: points[i].energy_j)
