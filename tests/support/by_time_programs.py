"""Ranks of a pipeline whose engine the planner does not know, on emulated GPUs."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import threading
import time

import torch
import torch.distributed as dist
from runtime_training import LONG_S, NAME, WarningLog, every_rank, job

from perseus_planner import Plan, schedules
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.by_time import segments_of
from perseus_planner.schedules.pipeline import pipeline_iteration

GPU = "emulated:a100-sxm?call=1ms&step=0&noise=0&drift=0"
COMPUTATION_S = 0.06
MICROBATCHES = 5
ARMED = 3  #: iterations by time that each rank is to see
WITHIN_S = 0.08  #: how well each change of clocks is in time in these


def unknown_engine(state: str) -> None:
    """Train until each rank has run enough iterations by time, with changes in time; an iteration
    takes as long as the rank's part of the plan. On a busy machine, changes of some come late.
    """
    plan = _plan()
    with job(state) as result, open_gpu(gpu_text(GPU, torch.device("cpu"))) as gpu:
        warning_log = WarningLog()
        segments = segments_of(plan, dist.get_rank())
        until_s = time.monotonic() + LONG_S
        seen: list[tuple[float, int | None]] = []  # when which clock was locked first
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.002):
                locked_mhz = gpu.locked_mhz
                if not seen or seen[-1][1] != locked_mhz:
                    seen.append((time.monotonic(), locked_mhz))

        watcher = threading.Thread(target=watch)
        watcher.start()
        timed = []
        errors_s = []
        first: set[int] = set()
        number = 0
        with planner_runtime(gpu=GPU, plan=plan) as runtime:
            while True:
                begin_s = time.monotonic()
                with runtime.iteration(MICROBATCHES):
                    time.sleep(segments[-1].end_s)  # the iteration
                end_s = time.monotonic()
                clocks = [each for each in seen if begin_s <= each[0] < end_s and each[1]]
                if number < 8:
                    first |= {mhz for _, mhz in seen if mhz}
                elif len(clocks) == len(segments) and clocks[0][0] < begin_s + 0.05:
                    changes_s = [
                        at_s - begin_s - segment.begin_s
                        for (at_s, _), segment in zip(clocks[1:], segments[1:], strict=True)
                    ]
                    if max(map(abs, changes_s), default=0.0) < WITHIN_S:
                        timed.append([mhz for _, mhz in clocks])
                    errors_s.append(changes_s)
                number += 1
                assert time.monotonic() < until_s, (errors_s, seen, runtime.problem)
                if every_rank(len(timed) >= ARMED):
                    break
            result["pipeline"] = runtime.pipeline
        is_over.set()
        watcher.join()
        result["first"] = sorted(first)
        result["timed"] = timed
        result["planned"] = [segment.clock for segment in segments]
        result["after"] = gpu.locked_mhz
        result["warnings"] = warning_log.taken()


def _plan() -> Plan:
    """Return a plan whose rank 0 is slow in the middle, and rank 1 at its end."""
    schedule = schedules.one_f_one_b(2, MICROBATCHES)
    of_rank_0 = {str(each): 900 for each in schedule.ranks[0][2:-2]}
    of_rank_1 = {str(each): 1005 for each in schedule.ranks[1][5:]}
    highest = {0: 1410, 1: 1200}
    clocks = {
        str(each): (of_rank_0 | of_rank_1).get(str(each), highest[each.stage])
        for each in schedule.computations()
    }
    used = (1410, 1200, 1005, 900)
    rows = {clock: Measurement(clock, COMPUTATION_S, clock / 1000) for clock in used}
    keys = [(stage, kind) for stage in range(2) for kind in "FB"]
    iteration = pipeline_iteration(schedule)
    time_s = COMPUTATION_S * (2 * MICROBATCHES + 2)
    numbers = (time_s, time_s, 30.0, 30.0, time_s, 40.0)
    full = dict.fromkeys(keys, rows[1410])
    measured = dict.fromkeys(keys, rows)
    return Plan(
        iteration, clocks, measured, "0" * 64, NAME, "simulated", 1.0, *numbers, full_clocks=full
    )
