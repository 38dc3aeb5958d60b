"""Programs of ranks that profile, plan and train every schedule, alone and beside a replica of each
stage; each prints its findings as JSON.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_training import FAST, GPU, WarningLog, equal, job, trained
from tiny_training import WIDTH, DeepSpeed, Layer, Torch
from torch import nn

from perseus_planner.cli import main
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.ranks import measure
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.emulation import emulate

MICROBATCHES = 4
SWEEP = SweepSettings(window_s=0.5, cool_down_s=0.0)


class MeanOfReplicas(torch.autograd.Function):
    """Normalizes by the mean over all replicas, forward and backward, as SyncBatchNorm does."""

    @staticmethod
    def forward(ctx: Any, x: Any, group: Any) -> Any:
        ctx.group = group
        return x - _mean(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient - _mean(gradient, ctx.group), None


class Normalized(nn.Module):
    """A layer behind `MeanOfReplicas`."""

    def __init__(self, layer: nn.Module, group: Any) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, x: Any) -> Any:
        return self.layer(MeanOfReplicas.apply(x, self.group))


class Noisy(Layer):
    """A module that uses random numbers and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Any) -> Any:
        return super().forward(self.norm(x))


def _mean(x: Any, group: Any) -> Any:
    mean = x.detach().mean(dim=0)
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)


def _ddp(module: nn.Module, group: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(Normalized(module, group), process_group=group)


def _fsdp(module: nn.Module, group: Any, *, reshard: bool) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh: Any = DeviceMesh.from_group(group, "cpu")
    sharded: Any = fully_shard(Normalized(module, group), mesh=mesh, reshard_after_forward=reshard)
    return sharded  # type: ignore[no-any-return]


WRAPS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "ddp": _ddp,
    "fsdp": partial(_fsdp, reshard=False),
    "fsdp-again": partial(_fsdp, reshard=True),
    "synced": Normalized,
}


def torch_schedules(state: str, *names: str) -> None:
    """Profile, plan and train each schedule of torch, on four ranks with two replicas."""
    with job(state) as result:
        for text in names:
            name, _, wrap = text.partition("+")
            options: dict[str, Any] = {"layer": Noisy, "has_shapes": True}
            if wrap:
                options = {"wrap": WRAPS[wrap], "sides": 2}
            result[text] = planned(partial(Torch, name, MICROBATCHES, **options), text)


def deepspeed_engine(state: str, degree: str) -> None:
    """Profile, plan and train the engine of DeepSpeed."""
    with job(state) as result:
        options: dict[str, Any] = {}
        if degree == "2":
            options = {
                "settings": {"zero_optimization": {"stage": 1}},
                "layers": 4,
                "num_stages": 2,
            }
        result["1f1b"] = planned(partial(DeepSpeed, MICROBATCHES, **options), "1f1b")


class Megatron:
    """A training of Megatron-core, with the interface of the others."""

    def __init__(self, virtual: int | None, group: int | None, **options: Any) -> None:
        from tiny_gpt import Training

        self._training = Training(virtual, group, **options)
        self.engine = self._training.model

    def step(self) -> list[Any]:
        return self._training.step(MICROBATCHES)

    def compute(self) -> list[Any]:
        self._training.finishes = False
        return self.step()

    def finish(self) -> None:
        self._training.finishes = True
        self._training.finish()

    def state(self) -> list[Any]:
        return [*self._training.weights(), torch.get_rng_state()]


def megatron_models(state: str, degree: str) -> None:
    """Profile, plan and train Megatron-core with one chunk, with two, and with two in groups of
    four microbatches; or beside replicas, with what communicates meanwhile.
    """
    from tiny_gpt import overlapping, parallel

    cases: list[tuple[str, int | None, int | None, dict[str, Any]]] = [
        ("1f1b", None, None, {}),
        ("interleaved-1f1b", 2, None, {}),
        ("groups of 4", 2, 4, {}),
        ("combined-1f1b", 2, None, {"combined": True}),
    ]
    if degree == "2":
        cases = [
            ("1f1b", None, None, {"overlap": True}),
            ("interleaved-1f1b", 2, None, {"overlap": True}),
            ("experts", None, None, {"overlap": True, "experts": 2}),
        ]
    with job(state) as result:
        for name, virtual, group, options in cases:
            pipeline = dist.get_world_size() // int(degree)
            with (
                parallel(virtual, pipeline=pipeline, experts=options.get("experts", 1)),
                overlapping() if options.get("combined") else nullcontext(),
            ):
                result[name] = planned(
                    partial(Megatron, virtual, group, **options), name.replace(" ", "-")
                )


def planned(make: Callable[[], Any], name: str, *, emulated: bool = False) -> dict[str, Any]:
    """Profile a training, solve and plan on rank 0 without an option that names the schedule, and
    train by the plan, on `emulated` GPUs if asked for; compare it with a training that knows
    nothing of this.
    """
    expected = trained(make(), 4)
    training = make()
    warning_log, timed = WarningLog(), pytest.MonkeyPatch()
    kinds: set[str] = set()
    measure_stages = measure._measure

    def watch(gpu: Any, stages: Any, *arguments: Any) -> Any:
        for stage in stages:
            assert all(time_s > 0 for time_s in stage.trained_s.values())
            kinds.add("".join(stage.trained_s))
        return measure_stages(gpu, stages, *arguments)

    timed.setattr(measure, "_measure", watch)
    simulated = f"simulated:{GPU.removeprefix('emulated:').partition('?')[0]}"
    values = training.step()
    with (
        profile_pipeline(
            training.engine, gpu=simulated, output=f"{name}.yaml", settings=SWEEP
        ) as profiling,
        pytest.MonkeyPatch.context() as patch,
    ):
        if isinstance(training, Megatron):
            import tiny_gpt

            patch.setattr(tiny_gpt, "_forward_step", profiling.watched(tiny_gpt._forward_step))
        values += getattr(training, "compute", training.step)()
    if hasattr(training, "finish"):
        training.finish()
    timed.undo()
    assert profiling.problem is None, profiling.problem
    if dist.get_rank() == 0:
        _command("solve", f"{name}.yaml", "-o", f"{name}.npz")
        _command("plan", f"{name}.npz", "--slowdown", "1.1", "-o", f"{name}-plan.yaml")
    dist.barrier()
    with (
        emulate(training.engine, GPU) if emulated else nullcontext(),
        planner_runtime(
            training.engine, plan=f"{name}-plan.yaml", gpu=GPU, max_changes_per_s=FAST
        ) as runtime,
    ):
        for _ in range(2):
            values += training.step()
        has_plan = runtime.plan is not None
    return {
        "planned": has_plan,
        "equal": equal(expected, values + training.state()),
        "timed": sorted(kinds),
        "deviations": [row.deviation for row in runtime.iterations],
        "problem": runtime.problem,
        "warnings": warning_log.taken(),
    }


def _command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code, arguments
