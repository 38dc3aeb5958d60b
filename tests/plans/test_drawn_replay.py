"""A replay of many draws gives what replays of single draws give."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from strategies import drawn, problems

from perseus_planner.plans.replay import time_and_energy
from perseus_planner.profiles.estimation import Draws
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.drawn_replay import DrawnReplay

COUNT = 3


@drawn(6, 60, dag=problems(12))
def test_each_draw_is_replayed_as_alone(dag: PipelineDag):
    random = np.random.default_rng(1)
    clocks = sorted(
        {row.clock_mhz for rows in dag.profile.measurements.values() for row in rows}, reverse=True
    )
    shape = (len(clocks), COUNT)
    draws = Draws(
        tuple(clocks),
        {key: random.uniform(1e-3, 2e-2, shape) for key in dag.profile.measurements},
        {key: random.uniform(0.0, 2.0, shape) for key in dag.profile.measurements},
    )
    chosen = [int(random.integers(len(clocks))) for _ in dag.computations]
    time_s, energy_j = DrawnReplay(dag, draws).replay([clocks[i] for i in chosen])
    assert time_s.shape == energy_j.shape == (COUNT,)
    row = dag.baseline_measurements()[0]
    for draw in range(COUNT):
        points = [
            replace(
                row,
                time_s=float(draws.time_s[key][i, draw]),
                energy_j=float(draws.energy_j[key][i, draw]),
            )
            for key, i in zip(dag.iteration.keys, chosen, strict=True)
        ]
        alone_s, alone_j = time_and_energy(dag, points)
        scale_j = sum(point.energy_j for point in points) + dag.waiting_w * abs(alone_s)
        assert time_s[draw] == pytest.approx(alone_s, rel=1e-12)
        assert energy_j[draw] == pytest.approx(alone_j, rel=1e-9, abs=1e-9 * scale_j)
