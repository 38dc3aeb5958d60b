"""Inference profiles and demands for tests, and the least energy of their pools by trying every
number of instances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog

from perseus_planner.inference.cells import (
    Cell,
    Configuration,
    InferenceProfile,
    Objectives,
    RequestClass,
)
from perseus_planner.inference.programme import PUBLISHED, ChangeCosts, Pool
from perseus_planner.inference.workload import Load

SHORT, LONG = RequestClass(256.0, 100.0, "256/100"), RequestClass(4096.0, 100.0, "4096/100")

PROFILE = """\
input,output,tensor_degree,clock_mhz,tokens_per_s,energy_j,idle_w
256,100,1,1200,2000,60,100
256,100,1,1980,2000,90,100
256,100,2,1200,3000,80,200
256,100,2,1980,3000,110,200
4096,100,1,1200,2000,,100
4096,100,1,1980,2000,900,100
4096,100,2,1200,3000,700,200
4096,100,2,1980,3000,1000,200
"""
RATES = "input,output,requests_per_s,tokens_per_s\n256,100,20,4000\n4096,100,2,5000\n"


def write_trace(path: Path, requests: Sequence[tuple[float, int, int]]) -> Path:
    lines = [f"{time_s!r},{inputs},{outputs}\n" for time_s, inputs, outputs in requests]
    path.write_text("".join(["time,input_tokens,output_tokens\n", *lines]))
    return path


def steady(
    seconds: int, *, every_s: float = 0.1, long_every: int = 10
) -> list[tuple[float, int, int]]:
    """Requests at equal distances; every `long_every`th is long."""
    count = int(seconds / every_s)
    return [(each * every_s, 2000 if each % long_every == 9 else 100, 50) for each in range(count)]


@st.composite
def profiles(draw: st.DrawFn) -> InferenceProfile:
    """Two classes at one or two loads, on one or two GPUs at two clocks; each class meets its
    objective somewhere.
    """
    cells: dict[tuple[RequestClass, Configuration], tuple[Cell, ...]] = {}
    loads = draw(st.sampled_from([(1000.0,), (500.0, 1000.0)]))
    for at in itertools.starmap(Configuration, itertools.product((1, 2), (1000, 2000))):
        idle_w = draw(st.sampled_from([0.0, 50.0])) * at.tensor_degree
        for of in (SHORT, LONG):
            energies = [draw(st.integers(20, 200)) for _ in loads]
            ttft_s = draw(st.sampled_from([0.1, 0.3, 3.0])) if at != (2, 2000) else 0.1
            cells[of, at] = tuple(
                Cell(load * at.tensor_degree, float(energy), ttft_s, None, idle_w)
                for load, energy in zip(loads, energies, strict=True)
            )
    return InferenceProfile(cells, "clock", Objectives(), "")


@st.composite
def demands(draw: st.DrawFn) -> dict[RequestClass, Load]:
    return {
        of: Load(
            draw(st.floats(0.5, 5.0)),
            draw(st.floats(100.0, 1500.0)),
            draw(st.sampled_from([1.0, 1.5])),
        )
        for of in (SHORT, LONG)
    }


def least_energy_j(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    gpus: int,
    period_s: float,
    before: Sequence[Pool] | None = None,
    costs: ChangeCosts = PUBLISHED,
) -> float:
    """Return the least energy of a period over all numbers of instances; infinite if no pools
    carry the load.
    """
    kinds = [
        (of, at)
        for of in (SHORT, LONG)
        for at in profile.configurations
        if profile.feasible(of, at)
    ]
    best_j = math.inf
    for counts in itertools.product(*(range(gpus // at.tensor_degree + 1) for _, at in kinds)):
        pools = [Pool(of, at, count) for (of, at), count in zip(kinds, counts, strict=True)]
        if 0 < sum(pool.gpus for pool in pools) <= gpus:
            change_j = 0.0 if before is None else costs.between(before, pools)
            best_j = min(best_j, change_j + period_s * _least_power_w(profile, demand, pools))
    return best_j


def _least_power_w(
    profile: InferenceProfile, demand: Mapping[RequestClass, Load], pools: Sequence[Pool]
) -> float:
    """Return the least power of given pools, by a linear programme over the shares of their
    instances.
    """
    shares = [
        (number, of, cell)
        for number, pool in enumerate(pools)
        for of in demand
        if pool.longest.covers(of) and pool.instances
        for cell in profile.feasible(of, pool.at)
        if cell.tokens_per_s <= profile.feasible(pool.longest, pool.at)[-1].tokens_per_s
    ]
    if not shares:
        return math.inf
    idle_w = [profile.idle_w(pool.at) for pool in pools]
    costs = [
        cell.energy_j * cell.tokens_per_s * demand[of].requests_per_s / demand[of].tokens_per_s
        - idle_w[number]
        for number, of, cell in shares
    ]
    filled = [
        [demand[of].peak * (number == each) for number, of, _ in shares]
        for each in range(len(pools))
    ]
    carried = [[cell.tokens_per_s * (of == each) for _, of, cell in shares] for each in demand]
    found = linprog(
        costs,
        A_ub=np.array(filled),
        b_ub=[pool.instances for pool in pools],
        A_eq=np.array(carried),
        b_eq=[load.tokens_per_s for load in demand.values()],
    )
    idle = sum(pool.instances * idle_w[number] for number, pool in enumerate(pools))
    return idle + float(found.fun) if found.success else math.inf
