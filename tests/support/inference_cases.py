"""Inference profiles and demands for tests, and the least energy of their pools by trying every
number of instances.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from scipy.optimize import linprog

from perseus_planner.extensions.inference.plan import PUBLISHED, ChangeCosts, Pool
from perseus_planner.extensions.inference.workload import (
    Cell,
    Configuration,
    InferenceProfile,
    Load,
    Objectives,
    RequestClass,
)

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

VLLM = {
    "request_rate": "inf", "max_concurrency": 8, "completed": 10, "request_throughput": 2.0,
    "total_input_tokens": 2560, "total_output_tokens": 1000, "median_ttft_ms": 90.0,
    "p95_ttft_ms": 120.0, "median_tpot_ms": 20.0, "p95_tpot_ms": 25.0,
}  # fmt: skip
"""What `vllm bench serve --save-result` writes, as far as it is read."""


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
        (of, at, segment)
        for of in (SHORT, LONG)
        for at in profile.configurations
        for segment in range(len(profile.feasible(of, at)))
    ]
    best_j = math.inf
    for count in range(1, gpus + 1):
        for chosen in itertools.combinations_with_replacement(kinds, count):
            if sum(at.tensor_degree for _, at, _ in chosen) <= gpus:
                pools = [Pool(of, at, 1) for of, at, _ in chosen]
                change_j = 0.0 if before is None else costs.between(before, pools)
                power_w = _least_power_w(profile, demand, Counter(chosen))
                best_j = min(best_j, change_j + period_s * power_w)
    return best_j


def _least_power_w(
    profile: InferenceProfile,
    demand: Mapping[RequestClass, Load],
    counts: Mapping[tuple[RequestClass, Configuration, int], int],
) -> float:
    """Return the least power of so many instances on segments of the curve, by a linear programme:
    each class has so much of them at the lower end of the segment, and so much at the upper end.
    """
    columns, powers_w, carried, filled = [], [], [], []
    for number, (longest, at, segment) in enumerate(counts):
        columns.append((number, None))  # idle, or nothing
        powers_w.append(0.0 if segment else profile.idle_w(at))
        carried.append([0.0] * len(demand))
        filled.append(0.0)
        most = len(profile.feasible(longest, at))
        for place, (of, load) in enumerate(demand.items()):
            cells = profile.feasible(of, at)[:most]
            if longest.covers(of) and segment < len(cells):
                for cell in cells[max(0, segment - 1) : segment + 1]:
                    columns.append((number, of))
                    rate = cell.tokens_per_s * load.requests_per_s / load.tokens_per_s
                    powers_w.append(cell.energy_j * rate)
                    carried.append(
                        [cell.tokens_per_s * (place == each) for each in range(len(demand))]
                    )
                    filled.append(load.peak * cell.tokens_per_s / cells[-1].tokens_per_s)
    segments = [segment for _, _, segment in counts]
    upper = [math.inf if of or not segments[number] else 0.0 for number, of in columns]
    belongs = [[float(number == each) for number, _ in columns] for each in range(len(counts))]
    found = linprog(
        powers_w,
        A_ub=np.array(belongs) * filled,
        b_ub=[*counts.values()],
        A_eq=np.array([*np.transpose(carried), *belongs]),
        b_eq=[*(load.tokens_per_s for load in demand.values()), *counts.values()],
        bounds=[(0.0, most) for most in upper],
    )
    return float(found.fun) if found.success else math.inf
