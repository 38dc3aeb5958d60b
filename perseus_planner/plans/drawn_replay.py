"""Replay an iteration under many draws of its times and energies at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.profiles.estimation import Draws
    from perseus_planner.profiles.smoothing import Floats
    from perseus_planner.schedules.dag import PipelineDag


def replay_draws(
    dag: PipelineDag, clocks_mhz: Sequence[int], draws: Draws
) -> tuple[Floats, Floats]:
    """Return the (draws,) seconds of an iteration, and its joules over all GPUs, waiting included.

    Clock changes take no time.

    Args:
        dag: the iteration.
        clocks_mhz: the clock of each computation, by its place in `dag.computations`.
        draws: of the profile's computations.
    """
    iteration, index = dag.iteration, {clock: i for i, clock in enumerate(draws.clocks_mhz)}
    at = [(key, index[clock]) for key, clock in zip(iteration.keys, clocks_mhz, strict=True)]
    counts: dict[tuple[tuple[int, str], int], int] = {}
    for point in at:
        counts[point] = counts.get(point, 0) + 1
    effective_j = np.zeros(next(iter(draws.time_s.values())).shape[1])
    for (key, i), count in counts.items():
        effective_j += count * (
            draws.energy_j[key][i] - dag.profile.blocking_w(key[0]) * draws.time_s[key][i]
        )
    for operation in iteration.operations:
        if operation.energy_j is not None:
            effective_j += (
                operation.energy_j - dag.rank_waiting_w[operation.rank] * operation.time_s
            )
    duration_s = [
        *(draws.time_s[key][i] for key, i in at),
        *(each.time_s for each in iteration.operations),
    ]
    end_s: list[Floats] = [np.zeros(0)] * len(duration_s)
    time_s = np.zeros_like(effective_j)
    for place in iteration.order:
        start_s = np.zeros_like(effective_j)
        for other, lag_s in iteration.waits[place]:
            np.maximum(start_s, end_s[other] + lag_s if lag_s else end_s[other], out=start_s)
        start_s += duration_s[place]
        end_s[place] = start_s
        np.maximum(time_s, start_s, out=time_s)
    time_s += dag.profile.overhead_s
    return time_s, effective_j + dag.waiting_w * time_s
