"""Programs of ranks that cannot begin to train under a plan, or only without clocks."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from runtime_training import FAST, GPU, LONG_S, Torch, WarningLog, Watch, job, plan_of, schedule_of

from perseus_planner.base.errors import PlannerError
from perseus_planner.runtime import attachment, planner_runtime, rendezvous


def refusals(state: str) -> None:
    """Something is wrong on one or all ranks: no rank begins, and no rank waits for another."""
    rendezvous.RENDEZVOUS_S = rendezvous.REFUSAL_S = attachment.ATTACH_S = 100 * LONG_S
    with job(state) as result:
        log, engine = WarningLog(), Torch("1f1b", 2).engine
        fits, is_first = plan_of(schedule_of("1f1b", 2, 2)), dist.get_rank() == 0
        damaged = Path("damaged.yaml")
        if is_first:
            fits.save(damaged)
            damaged.write_text(damaged.read_text().replace("1410", "1395", 1))
        others = {
            "schedule of rank 1": plan_of(schedule_of("gpipe", 2, 2)),
            "microbatches": plan_of(schedule_of("1f1b", 2, 4)),
            "ranks": plan_of(schedule_of("1f1b", 4, 2)),
            "gpu": plan_of(schedule_of("1f1b", 2, 2), gpu="NVIDIA A100-SXM4-80GB"),
            "damaged": damaged,
            "folder": Path(),
            "missing": "absent.yaml",
            "missing for a pipeline": {0: "absent.yaml"},
        }
        for name, plan in others.items():
            result[name] = _entered(engine, plan)
        with mock.patch.dict(os.environ, {"TORCHELASTIC_RESTART_COUNT": "1"}):
            result["missing after a restart"] = _entered(engine, "absent.yaml")
        result["gpu of rank 1"] = _entered(engine, fits, GPU if is_first else "emulated:a100-pcie")
        result["no gpu on rank 1"] = _entered(engine, fits, GPU if is_first else "cuda:0")
        result["no engine on rank 1"] = _entered(
            engine if is_first else torch.nn.Linear(2, 2), fits
        )
        result["entered at last"] = _entered(engine, fits)
        result["warnings"] = log.taken()


def beside_another_job(state: str, gpu: str) -> None:
    """Use GPUs that another job sets."""
    rendezvous.RENDEZVOUS_S = attachment.ATTACH_S = 100 * LONG_S
    with job(state) as result:
        result["held"] = _entered(Torch("1f1b", 2).engine, plan_of(schedule_of("1f1b", 2, 2)), gpu)


def _entered(engine: Any, plan: Any, gpu: str = GPU) -> dict[str, Any]:
    """Return the error with which a rank was refused."""
    error = None
    try:
        with planner_runtime(engine, plan=plan, gpu=gpu):
            pass
    except PlannerError as refusal:
        error = refusal
    locked_mhz = Watch(gpu).gpu.locked_mhz if gpu.startswith("emulated") else None
    return {
        "error": type(error).__name__,
        "text": str(error),
        "locked_mhz": locked_mhz,
    }


def without(state: str) -> None:
    """Begin training without clocks, for several reasons."""
    with job(state) as result:
        log = WarningLog()
        fits, is_first = plan_of(schedule_of("1f1b", 2, 4)), dist.get_rank() == 0
        result["not permitted"] = _trained(log, fits, f"{GPU}&fault=not-permitted")
        result["no such GPU"] = _trained(log, fits, "emulated:a100-sxm?fault=lost@0calls")
        with mock.patch.object(sys, "executable", "/bin/false"):
            result["no controller"] = _trained(log, fits)
        with mock.patch.dict(os.environ, {"PLANNER_STATE_DIR": "/proc/none"}):
            result["no records"] = _trained(log, fits, watched=False)
        with mock.patch.object(rendezvous, "RENDEZVOUS_S", 0.3):
            result["a rank that does not come"] = _trained(log, fits, joins=is_first, watched=False)


def _trained(
    log: WarningLog, plan: Any, gpu: str = GPU, *, joins: bool = True, watched: bool = True
) -> dict[str, Any]:
    """Train as a rank that joins or does not; return the warnings, and whether the results are
    unchanged.
    """
    plain = Torch("1f1b", 4)
    expected = [*plain.step(), *plain.step(), *plain.state()]
    watch = Watch(gpu) if watched else None
    if watch is not None:
        watch.planned = lambda: None
    pipeline = Torch("1f1b", 4, watch)
    entered = (
        planner_runtime(pipeline.engine, plan=plan, gpu=gpu, max_changes_per_s=FAST)
        if joins
        else nullcontext()
    )
    with entered as runtime:
        found = [*pipeline.step(), *pipeline.step(), *pipeline.state()]
    return {
        "equal": len(expected) == len(found) and all(map(torch.equal, expected, found)),
        "plan": runtime is not None and runtime.plan is not None,
        "problem": runtime and runtime.problem,
        "warnings": log.taken(),
    }
