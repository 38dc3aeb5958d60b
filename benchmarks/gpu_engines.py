"""Trains the examples' DeepSpeed and Megatron-core pipelines on one GPU, as a single stage, and
checks what no stand-in of CUDA tells: their losses, and whether marks fit what the GPU ran.

    torchrun --nproc-per-node 1 benchmarks/gpu_engines.py deepspeed|megatron FILE.json

Sets nothing: profiles at the clock at which the GPU runs, and trains by a plan in a dry run.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import shared
import torch  # noqa: TID253
import torch.distributed as dist  # noqa: TID253

from perseus_planner import Profile, schedules
from perseus_planner.extensions.lab.acceptance.steps import _recorded, _traced, mark_error_s
from perseus_planner.gpu import open_gpu
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.runtime import planner_runtime

_OPTIONS = "--layers 4 --hidden 2048 --heads 16 --sequence 512 --rows 2 --microbatches 8"
_WARM_UP, _ITERATIONS = 10, 20


class Trained:
    """An engine of the examples, which trains on equal data each time that it is made."""

    def __init__(self, args: Any) -> None:
        self.device, self.args, self.step = torch.device("cuda", 0), args, 0
        torch.manual_seed(0)
        self._make()

    def iterate(self) -> list[float]:
        """Run one iteration; return its losses."""
        losses = self._losses(self.step)
        self.step += 1
        return losses

    def train(self, iterations: int) -> tuple[float, list[list[float]]]:
        """Return the seconds of an iteration, and the losses."""
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        losses = [self.iterate() for _ in range(iterations)]
        torch.cuda.synchronize()
        return (time.perf_counter() - begin_s) / iterations, losses


class DeepSpeed(Trained):
    """DeepSpeed's PipelineEngine."""

    def _make(self) -> None:
        import train_deepspeed

        self.engine = train_deepspeed.pipeline(self.args)
        self._batches: Callable[..., Any] = train_deepspeed.microbatches

    def _losses(self, step: int) -> list[Any]:
        return [self.engine.train_batch(self._batches(step, self.args))]


class Megatron(Trained):
    """The chunk of a Megatron-core model."""

    def _make(self) -> None:
        import train_megatron

        self._training = train_megatron.Training(self.args, self.device)
        self.engine = self._training.model
        self.watched: Callable[[Any], Any] = lambda forward_step: forward_step

    def _losses(self, step: int) -> list[Any]:
        losses = self._training.forward_and_backward(step, self.watched)
        self._training.optimizer.step()
        self._training.optimizer.zero_grad()
        return [each["loss"] if isinstance(each, dict) else each for each in losses]


def measure(kind: type[Trained], folder: Path) -> dict[str, Any]:
    """Train plainly and by a plan."""
    sys.argv = [sys.argv[0], *_OPTIONS.split(), "--observe", "--dry-run", "--folder", str(folder)]
    args = shared.parse_options(kind.__doc__ or "")
    plain = kind(args)
    _, before = plain.train(_WARM_UP)
    plain_s, losses = plain.train(_ITERATIONS)
    waits_plain, _ = _traced(plain)  # type: ignore[arg-type]
    del plain
    planned = kind(args)  # from the same random numbers
    with open_gpu("nvml:0") as gpu:
        waiting_w = gpu.power_w()  # a single stage has no neighbour to wait for
    with profile_pipeline(
        planned.engine,
        gpu="cuda",
        output=args.profile,
        settings=replace(args.sweep, window_s=1.0, cool_down_s=1.0),
        blocking_power_w=waiting_w,
    ) as profiling:
        planned.watched = profiling.watched
        first = planned.train(1)[1]
    planned.watched = lambda forward_step: forward_step
    assert profiling.profile is not None, profiling.problem
    shared.write_plan(profiling.profile, schedules.one_f_one_b(1, args.microbatches), args)
    runtime = planner_runtime(
        planned.engine, plan=args.plan, gpu="cuda", dry_run=True, record=args.record
    )
    with runtime:
        _, later = planned.train(_WARM_UP - 1)
        planned_s, planned_losses = planned.train(_ITERATIONS)
        waits, kernels = _traced(planned)  # type: ignore[arg-type]
    marks, recorded = _recorded(args.record)
    profile = Profile.load(args.profile)
    return {
        "plain_s": plain_s,
        "planned_s": planned_s,
        "equal losses": _values(before + losses) == _values(first + later + planned_losses),
        "waits": [waits_plain, waits],
        "mark_error_s": mark_error_s(marks[0], kernels) if kernels else None,
        "profiled_s": {
            f"{key.stage} {key.name}": row[0].time_s for key, row in profile.measurements.items()
        },
        "recorded_s": {f"{key.stage} {key.name}": time_s for key, time_s in recorded.items()},
    }


def _values(losses: list[list[Any]]) -> list[float]:
    return [float(each) for iteration in losses for each in iteration]


def main() -> None:
    """Measure one engine, print and write it."""
    name, path = sys.argv[1], Path(sys.argv[2])
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.cuda.set_device(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    if name == "deepspeed":
        import deepspeed

        deepspeed.init_distributed()
    else:
        from megatron.core import parallel_state

        dist.init_process_group("nccl")
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(DeepSpeed if name == "deepspeed" else Megatron, Path(folder))
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
