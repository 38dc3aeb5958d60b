"""A job whose microbatches differ: what is drawn, what its GPUs cost, and what can be saved."""

from __future__ import annotations

from typing import Any

import numpy as np

from perseus_planner import PipelineDag, Profile
from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, Law
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.schedules import Schedule

NAME = "simulated a100-sxm"
MICROBATCHES = 4
LEARNT, MEASURED = 30, 24
SPREAD = 0.4
KINDS = {"F": (0.1, 0.9), "B": (-0.3, 1.3)}  #: of a mean computation: without work, and by work
COST = {"F": OpCost(2.0e12, 1e9), "B": OpCost(4.0e12, 2e9)}
WHOLE_COST = COST["F"] * 24  #: of a mean iteration without a pipeline


def drawn(pipelines: int, microbatches: int = MICROBATCHES, seed: int = 5) -> Any:
    """Return the work of each (iteration, pipeline, microbatch)."""
    shape = LEARNT + MEASURED, pipelines, microbatches
    work = np.random.default_rng(seed).lognormal(-(SPREAD**2) / 2, SPREAD, shape)
    return np.clip(work, 0.4, 3.0)


def profile_of(stages: int, scale: float = 1.0) -> Profile:
    """Return what a mean computation costs on such a GPU, at every third clock, if it is `scale`
    times as large; with 0 stages, an iteration without a pipeline.
    """
    kinds = ("F", "B") if stages else ("F",)
    rows: dict[str, list[Measurement]] = {kind: [] for kind in kinds}
    with open_gpu("simulated:a100-sxm?noise=0&drift=0&step=0&call=0") as gpu:
        assert isinstance(gpu, SimulatedGpu)
        gpu.block(60.0)
        for clock in [each for each in gpu.supported_clocks_mhz if each >= 600][::3]:
            gpu.set_clock_mhz(clock)
            gpu.run(COST["B"] * scale, 3)  # until the clock is in force
            for kind in kinds:
                before_s, before_j = gpu.now_s(), gpu.energy_j()
                gpu.run((COST[kind] if stages else WHOLE_COST) * scale, 20)
                time_s, energy_j = gpu.now_s() - before_s, gpu.energy_j() - before_j
                rows[kind].append(Measurement(clock, time_s / 20, energy_j / 20))
        gpu.reset_clocks()
        before_s, before_j = gpu.now_s(), gpu.energy_j()
        gpu.block(1.0)
        blocking_w = (gpu.energy_j() - before_j) / (gpu.now_s() - before_s)
    iteration = {} if len(kinds) > 1 else {"schedule": "whole", "microbatches": 1}
    table = {(s, kind): tuple(rows[kind]) for s in range(max(stages, 1)) for kind in kinds}
    return Profile(table, blocking_w, gpu=NAME, origin="simulated", iteration=iteration)


def predicted(profile: Profile, schedule: Schedule, work: Any) -> tuple[float, float]:
    """Return in virtual time what a given work saves on average, and how much later it is: shares
    of full clocks; work is (iterations, pipelines, microbatches).
    """
    laws = {}
    for key, rows in profile.measurements.items():
        fixed, slope = KINDS[key[1]]
        laws[key] = Law(fixed * rows[0].time_s, (slope * rows[0].time_s,))
    planner = BatchPlanner(PipelineDag.from_schedule(profile, schedule), laws, max_changes=8)
    used_j = full_j = time_s = full_s = 0.0
    for iteration in work:
        rows = [pipeline[:, None] for pipeline in iteration]
        target_s = max(map(planner.full_clocks_s, rows))
        plans = [planner.plan(each, target_s) for each in rows]
        used_j += sum(plan.energy_j for plan in plans)
        time_s += max(target_s, *(plan.time_s for plan in plans))
        full_s += target_s
        full_j += sum(full_clocks_j(profile, schedule, each, target_s) for each in iteration)
    return 1 - used_j / full_j, time_s / full_s - 1


def full_clocks_j(profile: Profile, schedule: Schedule, work: Any, until_s: float) -> float:
    """Return what a pipeline draws at full clocks until the slowest one has ended."""
    total_j = 0.0
    for computation in schedule.computations():
        key = computation.stage, computation.kind
        row, (fixed, slope) = profile.measurements[key][0], KINDS[computation.kind]
        scale = fixed + slope * float(work[computation.microbatch])
        waiting_w = profile.blocking_w(computation.stage)
        total_j += scale * (row.energy_j - waiting_w * row.time_s)
    waiting_w = sum(profile.blocking_w(stage) for stage in range(profile.stages))
    return total_j + waiting_w * until_s


def calm_saving(results: list[Any], calm: int = 8) -> tuple[list[int], float, float]:
    """Return the least disturbed iterations, those that took as long with clocks that follow the
    batch as at full clocks, what they saved, and how much longer they took: shares.
    """
    readings = np.array([result["readings"] for result in results])  # rank, mode, iteration, value
    time_s, energy_j = np.diff(readings, axis=2).mean(axis=0).transpose(2, 0, 1)
    chosen = np.argsort(np.abs(time_s[0] / time_s[1] - 1))[:calm]
    used_j, used_s = energy_j[:, chosen].sum(axis=1), time_s[:, chosen].sum(axis=1)
    return sorted(chosen.tolist()), 1 - used_j[0] / used_j[1], used_s[0] / used_s[1] - 1
