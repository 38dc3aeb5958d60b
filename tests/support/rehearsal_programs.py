"""Ranks that rehearse a profile, one of which has something wrong."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import os
from threading import Event

import pytest
import torch.distributed as dist

from perseus_planner.cli import main
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.profiler import rehearsal


def rehearse(broken: str, *arguments: str) -> None:
    """Run `planner doctor --rehearse`; on rank 1, what `broken` names does not work."""
    patch = pytest.MonkeyPatch()
    if os.environ["RANK"] == "1":
        if broken == "locks":
            patch.setattr(SimulatedGpu, "set_clock_mhz", lambda *_: None)
        elif broken == "messages":
            patch.setattr(dist, "send", lambda *_: Event().wait())
        elif broken:
            patch.setattr(rehearsal, "open_gpu", lambda text: open_gpu(f"{text}?fault={broken}"))
    patch.setattr(rehearsal, "MESSAGE_LIMIT_S", 5.0)
    main(["doctor", "--rehearse", "simulated:a100-sxm", *arguments])
