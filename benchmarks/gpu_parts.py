"""Measures on one GPU what no simulation tells: how well the length of a microbatch predicts the
time of a stage, what an energy window costs beside NVML's own call and beside Zeus, and the noise
of the times that the autopilot learns from.

    python benchmarks/gpu_parts.py FILE.json

Sets nothing.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253
import torch.distributed as dist  # noqa: TID253
from torch import nn  # noqa: TID253
from torch.distributed import pipelining  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from perseus_planner import Monitor
from perseus_planner.extensions.autopilot.batches.exchange import fit_law
from perseus_planner.gpu import open_gpu
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.cuda_marks import CudaMarks
from perseus_planner.runtime.marks import IterationTimes

_HIDDEN, _HEADS, _FFN, _LAYERS = 4096, 32, 14336, 4
_MICROBATCHES, _WARM_UP, _LEARNT = 260, 60, 40
_WINDOWS = 200
_TOKENS, _IN_ITERATION, _PLAIN, _ITERATIONS = 2048, 8, 20, 200


class Layer(nn.Module):  # type: ignore[misc,unused-ignore]
    """A layer of a model like Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(_HIDDEN), nn.RMSNorm(_HIDDEN)
        self.attention = nn.Linear(_HIDDEN, 3 * _HIDDEN, bias=False)
        self.joined = nn.Linear(_HIDDEN, _HIDDEN, bias=False)
        self.wide = nn.Linear(_HIDDEN, 2 * _FFN, bias=False)
        self.narrow = nn.Linear(_FFN, _HIDDEN, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Run the layer on (rows, tokens, hidden)."""
        rows, count, _ = tokens.shape
        heads = self.attention(self.before(tokens)).view(rows, count, 3, _HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        tokens = tokens + self.joined(attended.transpose(1, 2).reshape(tokens.shape))
        value, gate = self.wide(self.between(tokens)).chunk(2, -1)
        return tokens + self.narrow(functional.silu(gate) * value)


def lengths() -> dict[str, Any]:
    """Time microbatches of drawn lengths, fit the law of the first ones, and compare the others."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each new length
    torch.set_default_dtype(torch.bfloat16)
    stage = nn.Sequential(*(Layer() for _ in range(_LAYERS))).cuda()
    drawn = np.random.default_rng(1).lognormal(7.6, 0.7, _MICROBATCHES).clip(128, 8192).astype(int)
    seen = np.array([_timed(stage, int(count)) for count in drawn])[_WARM_UP:]
    tokens = drawn[_WARM_UP:].astype(float)
    work = {"tokens": tokens[:, None], "tokens and squares": np.stack([tokens, tokens**2], 1)}
    found: dict[str, Any] = {}
    for (kind, column), (name, numbers) in (
        (a, b) for a in (("F", 0), ("B", 1)) for b in work.items()
    ):
        time_s = seen[:, column]
        law = fit_law(numbers[:_LEARNT], time_s[:_LEARNT])
        told_s = law.fixed_s + numbers[_LEARNT:] @ np.array(law.per_work_s)
        error = np.abs(told_s / time_s[_LEARNT:] - 1)
        found[f"{kind} by {name}"] = {
            "median": float(np.median(error)),
            "p90": float(np.quantile(error, 0.9)),
        }
    return {"errors": found, "tokens_and_s": np.column_stack([tokens, seen]).tolist()}


def _timed(stage: nn.Module, count: int) -> tuple[float, float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    tokens = torch.randn(1, count, _HIDDEN, device="cuda", requires_grad=True)
    marks[0].record()
    output = stage(tokens)
    marks[1].record()
    gradient = torch.ones_like(output)
    marks[2].record()
    output.backward(gradient)
    marks[3].record()
    torch.cuda.synchronize()
    stage.zero_grad()
    return marks[0].elapsed_time(marks[1]) / 1e3, marks[2].elapsed_time(marks[3]) / 1e3


def windows() -> dict[str, float]:
    """Return the CPU seconds of a window, of NVML's call, and of a window of Zeus if it is here."""
    found: dict[str, float] = {}
    with Monitor("nvml:0") as monitor, open_gpu("nvml:0") as gpu:

        def window() -> None:
            with monitor.window():
                pass

        found["window_s"] = _cost_s(window)
        found["counter_s"] = _cost_s(gpu.energy_j)
    try:
        from zeus.monitor import ZeusMonitor  # type: ignore[import-untyped]
    except ImportError:
        return found
    zeus = ZeusMonitor(gpu_indices=[0])

    def zeus_window() -> None:
        zeus.begin_window("x")
        zeus.end_window("x")

    found["zeus_window_s"] = _cost_s(zeus_window)
    return found


def _cost_s(call: Callable[[], object]) -> float:
    call()
    begin_s = time.process_time()
    for _ in range(_WINDOWS):
        call()
    return (time.process_time() - begin_s) / _WINDOWS


def noise() -> dict[str, Any]:
    """Train two virtual stages, plainly and with an autopilot that sets nothing; return the times
    of both, and the noise of the times that the autopilot learns from.
    """
    torch.set_default_dtype(torch.bfloat16)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    dist.init_process_group("nccl", rank=0, world_size=1)
    device = torch.device("cuda", 0)
    modules = [nn.Sequential(*(Layer() for _ in range(_LAYERS // 2))).to(device) for _ in range(2)]
    like = torch.empty(1, _TOKENS, _HIDDEN, device=device, requires_grad=True)
    stages = [
        pipelining.PipelineStage(module, number, 2, device, like, like)
        for number, module in enumerate(modules)
    ]
    schedule = pipelining.ScheduleInterleaved1F1B(
        stages, _IN_ITERATION, loss_fn=lambda output, target: (output - target).square().mean()
    )
    optimizer = torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-5)
    inputs, target = (torch.randn(_IN_ITERATION, _TOKENS, _HIDDEN, device=device) for _ in range(2))

    def train(iterations: int) -> float:
        torch.cuda.synchronize()
        begin_s = time.perf_counter()
        for _ in range(iterations):
            schedule.step(inputs, target=target)
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin_s) / iterations

    train(2 * _PLAIN)  # until a GPU at its power limit has slowed down
    plain_s, seen = [train(_PLAIN)], list[IterationTimes]()
    finished = CudaMarks.finished

    def spy(marks: CudaMarks) -> list[IterationTimes]:
        times = finished(marks)
        seen.extend(times)
        return times

    CudaMarks.finished = spy  # type: ignore[method-assign]
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            planner_runtime(
                schedule, gpu="cuda", dry_run=True, state=f"{folder}/state.yaml"
            ) as runtime,
        ):
            learning_s = train(_ITERATIONS)
            said = str(runtime.problem)
    finally:
        CudaMarks.finished = finished  # type: ignore[method-assign]
    plain_s.append(train(_PLAIN))
    dist.destroy_process_group()
    spans_s = np.array([np.diff(times.spans_ns, axis=1)[:, 0] for times in seen]) / 1e9
    return {
        "plain_s": plain_s,
        "learning_s": learning_s,
        "problem": said,
        "noise": described(spans_s),
        "iterations_s": (np.diff([times.begin_ns for times in seen]) / 1e9).tolist(),
        "spans_s": spans_s.round(7).tolist(),
    }


def described(spans_s: np.ndarray) -> dict[str, float]:
    """Return the noise of computations, (iterations, computations) in seconds, in the terms of
    `autopilot_world.Physics`.
    """
    relative = spans_s / np.median(spans_s, axis=0) - 1
    shared = np.median(relative, axis=1)
    own = relative - shared[:, None]
    own -= np.median(own, axis=0)
    jitter = 1.48 * float(np.median(np.abs(own)))
    count = len(shared)
    growth = float(np.polyfit(np.arange(count), shared, 1)[0]) * 100
    steady = shared - growth / 100 * np.arange(count)
    return {
        "jitter": jitter,
        "over 3 jitters": float(np.mean(own > 3 * jitter)),
        "under -3 jitters": float(np.mean(own < -3 * jitter)),
        "mean of those over": float(own[own > 3 * jitter].mean()),
        "over 10 %": float(np.mean(own > 0.1)),
        "largest": float(own.max()),
        "shared": float(steady.std()),
        "shared, from one to the next": float(np.corrcoef(steady[1:], steady[:-1])[0, 1]),
        "growth in 100 iterations": growth,
    }


def main() -> None:
    """Measure, print a summary, and write all numbers."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "nvidia-ml-py", "zeus"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    found: dict[str, Any] = {}
    with open_gpu("nvml:0") as gpu:
        found = {"gpu": gpu.name, "versions": versions}
    found |= {"noise": noise(), "lengths": lengths(), "windows": windows()}
    Path(sys.argv[1]).write_text(json.dumps(found) + "\n")
    long = {"iterations_s", "spans_s"}
    short = {name: value for name, value in found["noise"].items() if name not in long}
    print(json.dumps({**found, "noise": short, "lengths": found["lengths"]["errors"]}, indent=1))


if __name__ == "__main__":
    main()
