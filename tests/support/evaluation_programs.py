"""Functions that ranks run to train on emulated GPUs by a plan, with evaluations between some
iterations; launching.py starts them by name.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from tiny_training import DeepSpeed, Torch
from torch import nn

from perseus_planner import Profile, schedules, solve
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.emulation import emulate

EVERY = (0, 4, 10)  #: an evaluation before each so many iterations; 0 for none
MICROBATCHES = 4
_WIDTH = 96
_SHAPE = (16, _WIDTH)
#: The first stage's forward on the emulated GPU, at its highest clock, seconds: longer than the
#: real one on a busy processor, of which Megatron's model and engine take the most. An iteration
#: then takes a third of a second with each engine.
_FORWARD_S = {"torch": 0.012, "deepspeed": 0.012, "megatron": 0.05}
_GUESS, _MOST = 20_000, 1_000_000


def _layer() -> nn.Module:
    return nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH))


def _torch() -> tuple[Any, Any]:
    training = Torch("1f1b", MICROBATCHES, layer=_layer, shape=_SHAPE)
    return training.engine, training


def _deepspeed() -> tuple[Any, Any]:
    training = DeepSpeed(MICROBATCHES, layer=_layer, shape=_SHAPE)
    return training.engine, training


def _megatron() -> tuple[Any, Any]:
    from tiny_gpt import LoopTraining

    training = LoopTraining()
    return training._training.model, training


ENGINES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "torch": _torch,
    "deepspeed": _deepspeed,
    "megatron": _megatron,
}


def train(name: str, iterations: str) -> None:
    """Train by one plan without evaluations, and with some; each run is recorded in a folder."""
    engine, training = ENGINES[name]()
    training.step()
    profile, text = _profiled(engine, training, _GUESS)
    slower = _GUESS * _FORWARD_S[name] / profile.measurements[0, "F"][0].time_s
    profile, text = _profiled(engine, training, min(_MOST, round(slower)))
    ranks = dist.get_world_size()
    if dist.get_rank() == 0:
        frontier = solve(
            replace(profile, clock_change=None), schedules.one_f_one_b(ranks, MICROBATCHES)
        )
        frontier.plan_for(1.1 * frontier.baseline_time_s, on_time=None).save("plan.yaml")
    dist.barrier()
    with emulate(engine, text):
        training.step()
        for every in EVERY:
            with planner_runtime(engine, plan="plan.yaml", gpu=text, record=f"every-{every}"):
                for number in range(int(iterations)):
                    if every and number and number % every == 0:
                        training.evaluate()
                    training.step()
            dist.barrier()
    dist.destroy_process_group()


def _profiled(engine: Any, training: Any, slower: int) -> tuple[Profile, str]:
    """Return the profile of the emulated GPU of each rank, and the name of this rank's."""
    path = f"profile-{slower}.yaml"
    text = f"emulated:a100-sxm/{dist.get_rank()}?slower={slower}"
    with open_gpu(text) as device:
        assert isinstance(device, EmulatedGpu)
        simulated = device.simulated_text
    with (
        profile_pipeline(engine, gpu=simulated, output=path) as profiling,
        pytest.MonkeyPatch.context() as patch,
    ):
        if "tiny_gpt" in sys.modules:
            tiny_gpt = sys.modules["tiny_gpt"]
            patch.setattr(tiny_gpt, "_forward_step", profiling.watched(tiny_gpt._forward_step))
        training.step()
    dist.barrier()
    profile = Profile.load(Path(path))
    dist.barrier()
    return profile, text
