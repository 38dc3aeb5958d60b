"""Programs of ranks in autopilot, on emulated GPUs; launching.py runs them as
"autopilot_programs:NAME".
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

import service_programs
import torch
import torch.distributed as dist
from emulation_programs import MICROBATCHES, deepspeed_pipeline, pairs_pipeline, torch_pipeline
from emulation_programs import _layer as tiny_layer
from runtime_training import GPU as RUNTIME_GPU
from runtime_training import LONG_S, Torch, WarningLog, Watch, any_rank, every_rank, job
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from perseus_planner.base.errors import PlannerError
from perseus_planner.extensions.autopilot.ranks import coordinator
from perseus_planner.extensions.autopilot.ranks.messages import noted
from perseus_planner.extensions.service.agent import agent
from perseus_planner.profiles.modes import ModeFunction
from perseus_planner.runtime import Recompute, planner_runtime, telemetry
from perseus_planner.runtime.emulation import emulate

GPU = "emulated:a100-sxm?slower=1000000&call=1ms"
SERVED_GPU = "emulated:a100-sxm?slower=200000&call=1ms"
TRIED = 4  #: iterations by programs with other clocks than the highest
MADE = {
    "torch": torch_pipeline,
    "pairs": pairs_pipeline,
    "deepspeed": deepspeed_pipeline,
    "torch with modes": lambda: torch_pipeline(layer=lambda: checkpoint_wrapper(tiny_layer())),
    "deepspeed with modes": lambda: deepspeed_pipeline(
        activation_checkpoint_interval=1,
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
    ),
}


def _megatron_pipeline() -> tuple[Any, Any, list[Any]]:
    from tiny_gpt import FULL_RECOMPUTE, Training

    training = Training(**FULL_RECOMPUTE)
    return training.model, partial(training.step, MICROBATCHES), training.chunks


MADE["megatron with modes"] = _megatron_pipeline


def learns(state: str, name: str) -> None:
    """Train with the autopilot until it has tried clocks and knows what they cost, and as long
    without it.
    """
    coordinator.END_S = LONG_S  # a busy machine writes late what was learnt
    with job(state) as result:
        warning_log = WarningLog()
        losses, phases, iterations = _trained(name, with_autopilot=True)
        expected, _, _ = _trained(name, with_autopilot=False, iterations=iterations)
        result["equal"] = len(losses) == len(expected) and all(map(torch.equal, losses, expected))
        result["phases"] = phases
        result["warnings"] = warning_log.taken()
        result["state"] = os.path.exists("run/autopilot.yaml")


def follows_pairs(state: str) -> None:
    """Train by the plan in the folder, `plan.yaml`, on a schedule with overlapped pairs."""
    with job(state) as result:
        log = WarningLog()
        engine, step, _ = MADE["pairs"]()
        with (
            emulate(engine, GPU),
            planner_runtime(engine, gpu=GPU, plan="plan.yaml", record="planned"),
        ):
            for _ in range(6):
                step()
        result["warnings"] = log.taken()


def learns_modes(state: str, engine: str) -> None:
    """Train with the autopilot until it has tried to keep activations, and as long without it,
    which computes them again.
    """
    coordinator.END_S = LONG_S
    parallel = nullcontext
    if engine == "megatron":
        from tiny_gpt import recomputing as parallel
    with job(state) as result, parallel():
        log, ran, name = WarningLog(), list[tuple[list[bool], list[bool]]](), f"{engine} with modes"
        losses, phases, iterations = _trained(name, with_autopilot=True, ran=ran)
        expected, _, _ = _trained(name, with_autopilot=False, iterations=iterations)
        result["equal"] = len(losses) == len(expected) and all(map(torch.equal, losses, expected))
        result["decided"] = [decided for decided, _ in ran]
        result["ran"] = [kept for _, kept in ran]
        result["phases"], result["warnings"] = phases, log.taken()
        other = {"own": lambda: None, f"of-{dist.get_rank()}": lambda: None}
        try:
            with planner_runtime(MADE[name]()[0], gpu=GPU, modes=other, state=None):
                pass
        except PlannerError as error:
            result["refused"] = str(error)


class _Watched:
    """What a rank runs by, and whether its forwards keep their activations, of each iteration."""

    def __init__(self, engine: Any, modules: list[Any]) -> None:
        self.recompute = Recompute(engine)
        self.kept: list[bool] = []
        self.iterations: list[tuple[list[bool], list[bool]]] = []
        for module in modules:
            module.register_forward_pre_hook(lambda *_: self.kept.append(not self.recompute.is_on))

    def modes(self) -> dict[str, Callable[[], None]]:
        # All activations fit into memory here.
        keep = ModeFunction(self.recompute.off.enter, "microbatch")
        return {"own": self.recompute.on, "keep": keep}

    def follow(self, runtime: Any) -> None:
        follower = runtime._follower
        ended = follower.on_end

        def on_end(iteration: int, program: Any, deviation: Any, order: Any = None) -> None:
            computations = () if program is None else program.computations
            modes = {} if program is None else dict(zip(computations, program.modes, strict=False))
            decided = [modes.get(each) == "keep" for each in computations if each.kind == "F"]
            # A mode that is new to the emulation is counted, by forwards of its own.
            if len(decided) == len(self.kept) and deviation is None:
                self.iterations.append((decided, self.kept.copy()))
            self.kept.clear()
            ended(iteration, program, deviation, order)

        follower.on_end = on_end


def _trained(
    name: str,
    *,
    with_autopilot: bool,
    iterations: int = 0,
    ran: list[tuple[list[bool], list[bool]]] | None = None,
) -> tuple[list[Any], list[str], int]:
    torch.manual_seed(dist.get_rank())
    engine, step, modules = MADE[name]()
    losses, phases = list[Any](), list[str]()
    watched = _Watched(engine, modules) if name.endswith("modes") else None
    mode = (lambda: None) if watched is None else (lambda: watched.recompute.is_on)
    modes = None if watched is None else watched.modes()
    text = GPU if watched is None else SERVED_GPU
    with emulate(engine, text, mode) as gpu:
        with (
            planner_runtime(engine, gpu=text, record="run", modes=modes)
            if with_autopilot
            else nullcontext() as runtime
        ):
            if watched is not None and runtime is not None:
                watched.follow(runtime)
            deadline_s, tried, unknown = time.monotonic() + LONG_S, 0, 0
            for number in count():
                losses += [each.detach().clone() for each in step() or ()]
                if runtime is not None:
                    phases += [runtime.autopilot.phase][runtime.autopilot.phase in phases :]
                    program = runtime._follower.program
                    tried += program is not None and noted(program).decision > 0
                    tried *= watched is None or any(any(each[0]) for each in watched.iterations)
                    unknown = unknown or runtime.autopilot.columns["unknown"] * (
                        runtime.autopilot.reference_s is not None
                    )
                has_learnt = (
                    runtime is not None
                    and tried >= TRIED
                    and runtime.autopilot.columns["unknown"] < unknown
                )
                if every_rank(has_learnt if with_autopilot else number + 1 == iterations):
                    break
                assert time.monotonic() < deadline_s, (number, phases)
        assert gpu.locked_mhz is None
    if watched is not None and ran is not None:
        ran += watched.iterations
    return (
        [*losses, *(each.detach().clone() for part in modules for each in part.parameters())],
        phases,
        number + 1,
    )


def references(state: str, *names: str) -> None:
    """Train until the time at full clocks is known, 1F1B with two numbers of microbatches; "dry"
    is a dry run of it.
    """
    with job(state) as result:
        for name in names:
            result[name] = referenced(
                lambda watch, name=name: Torch("1f1b" if name == "dry" else name, 4, watch), name
            )


def referenced(made: Callable[[Watch], Any], name: str) -> dict[str, Any]:
    """Return whether clocks were locked while the reference was measured, and the microbatches
    that were planned, one schedule of the stages after the other.
    """
    warning_log, watch = WarningLog(), Watch()
    watch.takes_s = 0.002
    pipeline, planned = made(watch), list[int]()
    with planner_runtime(
        pipeline.engine, gpu=RUNTIME_GPU, state=None, dry_run=name == "dry"
    ) as runtime:
        for microbatches in (4, 8, 4) if name == "1f1b" else (4,):
            if name == "1f1b":
                pipeline.change(microbatches)
            deadline_s = time.monotonic() + LONG_S
            while not every_rank(planned[-1:] == [microbatches]):
                pipeline.step()
                program = runtime._follower.program
                if runtime.autopilot.reference_s is not None and program is not None:
                    planned += [program.microbatches][program.microbatches in planned[-1:] :]
                assert time.monotonic() < deadline_s, (planned, runtime.autopilot)
    after, texts = watch.gpu.locked_mhz, warning_log.taken()
    return {
        "planned": planned,
        "was locked": watch.locked_mhz != {None},
        "after": after,
        "warnings": texts,
    }


def served(state: str, address: str, name: str) -> None:
    """Train two pipelines with a service until there is a file `stop`; ranks write the mean
    clock of their program.
    """
    logging.basicConfig(level=logging.INFO)  # on standard error
    agent._COUNTS_S, telemetry.CHECKPOINT_S = 0.2, 0.2
    agent._END_S = (
        LONG_S  # a busy machine answers late, and makes ranks slow, of which nothing is to be said
    )
    agent.ServiceLink.on_straggling = lambda _, then: lambda straggling: None
    with job(state) as result:
        engine, step = service_programs._torch(init=False)
        with (
            emulate(engine, SERVED_GPU),
            planner_runtime(
                engine, gpu=SERVED_GPU, state=None, max_slowdown=1.0, service=address, job=name
            ) as runtime,
        ):
            while not any_rank(Path("stop").exists()):
                step()
                program = runtime._follower.program
                if program is not None:
                    Path(f"clock-{dist.get_rank()}.new").write_text(str(mean(program.clocks)))
                    Path(f"clock-{dist.get_rank()}.new").rename(f"clock-{dist.get_rank()}")
        result["pipeline"] = runtime.pipeline
