"""Power limits that others set on the GPUs of a job: seen by the controller, warned of, and
passed on.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_planner.base.errors import GpuNotSupported
from perseus_planner.base.wires import decode, encode
from perseus_planner.engines.engine import PipelineRank
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.protocol import Gpu
from perseus_planner.runtime.background import BackgroundWork
from perseus_planner.runtime.controller.protocol import (
    AttachRequest,
    Control,
    GpuSample,
    SharedRequest,
)
from perseus_planner.runtime.controller.protocol import create_shared_memory as memory
from perseus_planner.runtime.controller.rank import Rank
from perseus_planner.runtime.telemetry import Telemetry


def sampled(gpu: Gpu, control: Control = "clock") -> GpuSample:
    """What the controller sends to the rank of that GPU."""
    sent: list[Any] = []
    channel: Any = SimpleNamespace(send=lambda message: sent.append(message) or True)
    rank = Rank(
        channel,
        AttachRequest(0, gpu.text, control, None),
        SharedRequest(memory()),
        os.getpid(),
    )
    rank.gpu = gpu
    rank.sample(0, 0)
    (sample,) = sent
    return decode(encode(sample), GpuSample)


def test_a_limit_below_the_default_is_a_sites_unless_the_rank_sets_limits_itself():
    with open_gpu("simulated:a100-sxm") as gpu:
        assert sampled(gpu).site_limit_w is None
        gpu.set_power_limit_w(300.0)
        assert (sampled(gpu).site_limit_w, sampled(gpu, "observed").site_limit_w) == (300.0, 300.0)
        assert sampled(gpu, "power-limit").site_limit_w is None
        gpu.reset_power_limit()
        assert sampled(gpu).site_limit_w is None


def test_a_gpu_that_cannot_tell_its_limit_has_none():
    with open_gpu("simulated:a100-sxm?fault=not-supported:power-limit") as gpu:
        with pytest.raises(GpuNotSupported):
            gpu.default_power_limit_w()
        assert sampled(gpu).site_limit_w is None


def test_each_new_limit_is_warned_of_and_counted():
    telemetry = Telemetry(0, PipelineRank(0, 1, 0, (0,)), offset_ns=lambda: 0)
    warned: dict[str, str] = {}
    nothing = SimpleNamespace(
        problem=None,
        fault=None,
        unfollowed=None,
        deviation=None,
        misfit=None,
        agreement=SimpleNamespace(lost=None),
        progress=0,
        finished=list,
    )
    warnings: Any = SimpleNamespace(warn=lambda key, text, **_: warned.setdefault(key, text))
    stub: Any = nothing
    work = BackgroundWork(stub, stub, stub, telemetry, warnings, None, None, None)
    for limit_w in (None, 300.0, 300.0, 250.0):
        telemetry.update([], [GpuSample(0, 0, None, None, None, None, {}, 0, 0, limit_w)])
        work.close()
    assert list(warned.values()) == [
        f"the power limit of this GPU is {limit} W, below its default, so it may not reach the "
        "clocks of its plan; a service plans within this limit; without a service, solve again "
        f"with --gpu-power-limit {limit}W"
        for limit in (300, 250)
    ]
