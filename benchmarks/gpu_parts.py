"""Measures on one GPU what no simulation tells: how well the length of a microbatch predicts the
time of a stage, and what an energy window costs beside NVML's own call and beside Zeus.

    python benchmarks/gpu_parts.py FILE.json

Sets nothing.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253
from torch import nn  # noqa: TID253
from torch.nn import functional  # noqa: TID253

from perseus_planner import Monitor
from perseus_planner.gpu import open_gpu
from perseus_planner.runtime.batches.exchange import fit_law

_HIDDEN, _HEADS, _FFN, _LAYERS = 4096, 32, 14336, 4
_MICROBATCHES, _WARM_UP, _LEARNT = 260, 60, 40
_WINDOWS = 200


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
    found |= {"lengths": lengths(), "windows": windows()}
    Path(sys.argv[1]).write_text(json.dumps(found) + "\n")
    print(json.dumps({**found, "lengths": found["lengths"]["errors"]}, indent=1))


if __name__ == "__main__":
    main()
