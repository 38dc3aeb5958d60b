"""EnvPipe's rule for clocks (Choi et al., USENIX ATC 2023), applied to the computations of a 1F1B
iteration.

The rule, as EnvPipe's source and the Perseus artifact implement it:

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

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perseus_planner.plans.replay import end_times

if TYPE_CHECKING:
    from perseus_planner.profiles.measurement import Measurement
    from perseus_planner.schedules import Computation
    from perseus_planner.schedules.dag import PipelineDag


def reconfigure(dag: PipelineDag, measured: Sequence[Sequence[Measurement]]) -> list[Measurement]:
    """Return the operating point that EnvPipe chooses for each of `dag.computations`.

    Takes up to computations x clocks steps, each of which replays the iteration.

    Args:
        dag: an iteration of 1F1B.
        measured: the measurements of each computation, highest clock first.
    """
    last = (dag.schedule.stages - 1, dag.schedule.microbatches - 1)
    envelope = [on_envelope(computation, *last) for computation in dag.computations]
    at = [0 if outer else _valley(points) for outer, points in zip(envelope, measured, strict=True)]
    while True:
        chosen = [points[i] for points, i in zip(measured, at, strict=True)]
        path = [
            place
            for place in critical_path(dag, [point.time_s for point in chosen])
            if place < len(at)
        ]
        raisable = [place for place in path if at[place]]
        if not raisable or all(envelope[place] for place in path):
            return chosen
        lowest_mhz = min(chosen[place].clock_mhz for place in raisable)
        for place in raisable:
            if chosen[place].clock_mhz == lowest_mhz:
                at[place] -= 1


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
