"""Programs of ranks that profile, plan and train every schedule; each prints its findings as
JSON.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from runtime_training import FAST, GPU, WarningLog, job
from tiny_training import DeepSpeed, Torch

from perseus_planner.cli import main
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.ranks import measure
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.runtime import planner_runtime

MICROBATCHES = 4
SWEEP = SweepSettings(window_s=0.5, cool_down_s=0.0)


def torch_schedules(state: str, *names: str) -> None:
    """Profile, plan and train each schedule of torch."""
    with job(state) as result:
        for name in names:
            pipeline = Torch(name, MICROBATCHES)
            step = lambda _, pipeline=pipeline: pipeline.run(pipeline.engine.step)  # noqa: E731
            result[name] = _planned(pipeline.engine, name, step)


def deepspeed_engine(state: str) -> None:
    """Profile, plan and train the engine of DeepSpeed."""
    with job(state) as result:
        pipeline = DeepSpeed(MICROBATCHES)
        result["1f1b"] = _planned(pipeline.engine, "1f1b", lambda _: pipeline.step())


def megatron_models(state: str) -> None:
    """Profile, plan and train Megatron-core with one chunk, with two, and with two in groups of
    four microbatches.
    """
    import tiny_gpt
    from tiny_gpt import Training, parallel

    plain = tiny_gpt._forward_step
    with job(state) as result:
        for name, virtual, group in (
            ("1f1b", None, None),
            ("interleaved-1f1b", 2, None),
            ("groups of 4", 2, 4),
        ):
            with parallel(virtual):
                training = Training(virtual, group)

                def step(profiling: Any, training: Any = training) -> None:
                    tiny_gpt._forward_step = profiling.watched(plain) if profiling else plain
                    training.step(MICROBATCHES)

                result[name] = _planned(training.model, name.replace(" ", "-"), step)


def _planned(engine: Any, name: str, step: Callable[[Any], object]) -> dict[str, Any]:
    """Profile `engine`, solve and plan on rank 0 without an option that names the schedule, and
    train by the plan.
    """
    warning_log, timed = WarningLog(), pytest.MonkeyPatch()
    trained: list[str] = []
    compare = measure._difference_from_training

    def watch(gpu: Any, opened: Any, stage: Any, request: Any) -> str | None:
        assert all(time_s > 0 for time_s in stage.trained_s.values())
        trained.append("".join(stage.trained_s))
        return compare(gpu, opened, stage, request)

    timed.setattr(measure, "_difference_from_training", watch)
    simulated = f"simulated:{GPU.removeprefix('emulated:').partition('?')[0]}"
    with profile_pipeline(
        engine, gpu=simulated, output=f"{name}.yaml", settings=SWEEP
    ) as profiling:
        step(profiling)
    timed.undo()
    if dist.get_rank() == 0:
        _command("solve", f"{name}.yaml", "-o", f"{name}.npz")
        _command("plan", f"{name}.npz", "--slowdown", "1.1", "-o", f"{name}-plan.yaml")
    dist.barrier()
    with planner_runtime(
        engine, plan=f"{name}-plan.yaml", gpu=GPU, max_changes_per_s=FAST
    ) as runtime:
        for _ in range(2):
            step(None)
        planned = runtime.plan is not None
    return {
        "planned": planned,
        "timed": sorted(set(trained)),
        "deviations": [row.deviation for row in runtime.iterations],
        "problem": runtime.problem,
        "warnings": warning_log.taken(),
    }


def _command(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code, arguments
