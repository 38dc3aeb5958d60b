"""Programs of ranks that train in the modes of a plan, with activation recompute as the own way."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from program_source import Source
from recomputed import recomputed
from runtime_training import (
    GPU,
    NAME,
    DeepSpeed,
    Torch,
    WarningLog,
    Watch,
    equal,
    job,
    outcome,
    planned,
    trained,
)
from strategies import smooth_profile
from tiny_training import Layer
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from perseus_planner import solve
from perseus_planner.base.errors import PlanError, RankError, UsageError
from perseus_planner.engines.modes import ctas_modes
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.modes import Mode, Modes
from perseus_planner.runtime import Recompute
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import Marks
from perseus_planner.runtime.modes import ModeSwitch, memory_modes
from perseus_planner.runtime.program import Program
from perseus_planner.schedules import Computation

MICROBATCHES, ITERATIONS = 4, 3


def plan_in_modes(memory_bytes: float = 1.5) -> Plan:
    """A plan in which some microbatches of each stage keep their activations."""
    profile = recomputed(smooth_profile(2, 90), memory_bytes, gpu=NAME, origin="simulated")
    frontier = solve(profile, "1f1b", microbatches=MICROBATCHES)
    return frontier.plan_for(frontier.baseline_time_s, on_time=None)


def torch_engine(state: str) -> None:
    """Layers in torch's checkpoint wrapper."""
    with job(state) as result:
        _refusals(Torch("1f1b", MICROBATCHES).engine)
        create = partial(Torch, layer=lambda: checkpoint_wrapper(Layer()), has_shapes=True)
        result.update(_trained_in_modes(create))
        result.update(_failed())
        result["memory_mhz"] = _at_a_memory_clock()
        result["communicators"] = _on_other_ctas()


def deepspeed_engine(state: str) -> None:
    """DeepSpeed's own checkpoints."""
    options = {
        "activation_checkpoint_interval": 1,
        "activation_checkpoint_func": partial(checkpoint, use_reentrant=False),
    }

    def create(_: str, count: int, watch: Watch | None) -> DeepSpeed:
        return DeepSpeed(count, watch, **options)

    with job(state) as result:
        result.update(_trained_in_modes(create))


def megatron_engine(state: str) -> None:
    """Megatron-core's full recompute."""
    from megatron_programs import Planned
    from tiny_gpt import FULL_RECOMPUTE, recomputing

    from perseus_planner.schedules import one_f_one_b

    with job(state) as result, recomputing():
        schedule = one_f_one_b(2, MICROBATCHES)
        result.update(
            _trained_in_modes(lambda *given: Planned(schedule, given[2], None, **FULL_RECOMPUTE))
        )


def _trained_in_modes(create: Callable[..., Any]) -> dict[str, Any]:
    """Return the modes in which each computation ran, and whether results equal those of plain
    training.
    """
    plan, log = plan_in_modes(), WarningLog()
    expected = trained(create("1f1b", MICROBATCHES, None), ITERATIONS)
    modes: list[dict[str, bool]] = []

    class Watched(Watch):
        def __call__(self, stage: int, kind: str, microbatch: int) -> None:
            modes[-1][str(Computation(stage, kind, microbatch))] = recompute.is_on
            super().__call__(stage, kind, microbatch)

    watch = Watched()
    pipeline = create("1f1b", MICROBATCHES, watch)
    recompute = Recompute(pipeline.engine)
    switch = {"own": recompute.on, "keep": recompute.off}
    results, forwards = [], Counter[str]()

    def count(_: Any, __: Any) -> None:
        forwards["all"] += 1

    for module in _modules(pipeline):
        if type(module).__name__ in ("Layer", "TransformerLayer"):
            module.register_forward_pre_hook(count)
    rank = plan.schedule.ranks[dist.get_rank()]
    kept = [str(each) for each in rank if plan.modes.get(str(each)) == "keep"]
    with planned(pipeline, plan, modes=switch) as runtime:
        watch.planned = lambda: runtime.plan
        for _ in range(ITERATIONS):
            modes.append({})
            results += pipeline.step()
            assert recompute.is_on == (len(kept) < len(rank))  # one mode for all of them stays
        results += pipeline.state()
    return {
        "equal": equal(expected, results),
        "ran": [[name for name, is_on in each.items() if not is_on] for each in modes],
        "planned": kept,
        "of": len(rank),
        "forwards": forwards["all"],
        "as planned": [row.is_as_planned for row in runtime.iterations],
        **outcome(runtime, log, watch),
    }


def _modules(pipeline: Any) -> list[Any]:
    engine = pipeline.engine
    parts = engine if isinstance(engine, list) else getattr(pipeline, "layers", None)
    parts = [engine.module] if parts is None else parts
    return [module for part in parts for module in part.modules()]


def _refusals(engine: Any) -> None:
    plan = plan_in_modes()
    with pytest.raises(UsageError, match="nothing of this rank recomputes activations"):
        Recompute(engine)
    known: list[dict[str, Any]] = [{}, {"keep": lambda: None}]
    for modes, missing in zip(known, ("keep", "own"), strict=True):
        # where another rank was first, its refusal
        several = PlanError, RankError
        refused = pytest.raises(several, match=f"has no mode {missing}; give it in modes= of")
        with refused, planned(Torch("1f1b", MICROBATCHES), plan, modes=modes):
            pass


def _at_a_memory_clock() -> list[int]:
    """Return the memory clock after each of two iterations of a plan that sets it, and after the
    training.
    """
    plain, mode = smooth_profile(2, 90), "mem-1593"
    rows = dict(plain.measurements)
    for (stage, kind), points in plain.measurements.items():
        cheaper = [replace(point, energy_j=0.9 * point.energy_j) for point in points]
        rows[stage, kind, mode] = tuple(cheaper)
    modes = Modes({mode: Mode({"memory clock": "1593 MHz"})}, shared_by="pipeline")
    profile = replace(plain, measurements=rows, modes=modes, gpu=NAME, origin="simulated")
    frontier = solve(profile, "1f1b", microbatches=MICROBATCHES)
    plan = frontier.plan_for(frontier.baseline_time_s, on_time=None)
    assert list(plan.modes.values()) == [mode] * len(plan.clocks)
    pipeline, seen_mhz = Torch("1f1b", MICROBATCHES), list[int]()
    gpu = gpu_text(GPU, torch.device("cpu"))
    with open_gpu(gpu) as seen:
        with memory_modes(gpu, 1593) as known, planned(pipeline, plan, modes=known):
            for _ in range(2):
                pipeline.step()
                seen_mhz.append(seen.memory_mhz())  # type: ignore[attr-defined]
        return [*seen_mhz, seen.memory_mhz()]  # type: ignore[attr-defined]


def _on_other_ctas() -> list[str]:
    """Return the communicator of each computation of three iterations, in each of which a group
    reduces. In the second one rank 1 cannot set clocks, and so has no program.
    """
    cpu, ranks = torch.device("cpu"), [0, 1]
    group, made = dist.new_group(ranks), {}

    def new_group(members: Any, ctas: int) -> Any:
        assert members == ranks
        return made.setdefault(f"ctas-{ctas}", dist.new_group(members))

    made["own"] = group
    modes = ctas_modes(group, 4, 8, new_group=new_group)
    backends = {name: each._get_backend(cpu) for name, each in made.items()}
    with pytest.raises(UsageError, match="more than three numbers"):
        ctas_modes(group, 1, 2, 3, 4)
    plan = solve(smooth_profile(2), "1f1b", microbatches=2).baseline_plan
    program = replace(Program.of_plan(1, plan, 0), modes=("own", "ctas-4", "own", "ctas-8"))
    source, used = Source(program), list[str]()
    marks = Marks(memoryview(bytearray(8)).cast("Q"))
    hook = Hook(marks, source, program, None, ModeSwitch(modes, print))
    for iteration in range(3):
        source.program = None if iteration == dist.get_rank() == 1 else program
        hook.begin_iteration()
        for computation in program.computations:
            hook.begin(*computation)
            value = torch.ones(3)
            dist.all_reduce(value, group=group)
            assert value.tolist() == [2.0] * 3
            now = group._get_backend(cpu)
            used += [name for name, backend in backends.items() if backend is now]
            hook.end()
        hook.end_iteration()
    return used


def _failed() -> dict[str, Any]:
    """A mode that raises."""
    log, entered = WarningLog(), []

    def fail() -> None:
        raise ArithmeticError("no")

    pipeline = Torch("1f1b", MICROBATCHES)
    modes = {"own": lambda: entered.append("own"), "keep": fail}
    with planned(pipeline, plan_in_modes(), modes=modes) as runtime:
        for _ in range(2):
            pipeline.step()
    return {"entered": entered, "failed": outcome(runtime, log)}
