"""What the runtime costs a training that waits for Python, the noise of its times, and DeepSpeed
and Megatron-core on the same card: one script, in under 8 minutes.

    python benchmarks/gpu_cost.py FILE.json
    python benchmarks/gpu_cost.py FILE.json --device cpu --limit-s 60    # a stand-in, without a GPU

Equal trainings differ by more than the runtime costs, as clocks and temperature drift. So short
trainings with the runtime and without it take turns, in pairs whose order alternates, until the
95 % interval of the ratio is narrower than 1 %, or time is up. Whoever reads the result sees the
interval that was reached.

Sets nothing: the runtime runs as the autopilot in a dry run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch  # noqa: TID253
import torch.distributed as dist  # noqa: TID253
from gpu_parts import described
from torch import nn  # noqa: TID253
from torch.distributed import pipelining  # noqa: TID253

from perseus_planner.gpu import open_gpu
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.cuda_marks import CudaMarks
from perseus_planner.runtime.marks import IterationTimes, Marks

HERE = Path(__file__).parent
LIMIT_S = 470.0  #: of the script: the device is lent for 8 minutes at most
ENGINE_S = 100.0  #: of that, for each of the two engines
WIDTH = 0.01  #: of the 95 % interval of the ratio at which pairs end, a share
LEAST_PAIRS = 6  #: fewer do not tell how much pairs differ. By hand.
TURN_S = 1.0  #: of each training of a pair: what a clock does meanwhile is alike. By hand.
SETTLE = 10  #: iterations at the begin of a turn that are not timed: the runtime's first ones
_LAYERS, _WIDTH, _ROWS, _MICROBATCHES = (
    24,
    256,
    8,
    8,
)  #: small kernels, so that Python is waited for


@dataclass(frozen=True)
class Ratio:
    """The time of an iteration with the runtime, over that without it."""

    pairs: int
    mean: float  #: Geometric mean of the pairs' ratios
    low: float  #: Of the 95 % interval
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Ratio:
        """Return that of pairs of which each has a ratio; the interval is Student's, of logs."""
        logs = [math.log(ratio) for ratio in ratios]
        mean = statistics.fmean(logs)
        half = math.inf
        if len(logs) > 1:
            from scipy import stats  # slow to import

            quantile = float(stats.t.ppf(0.975, len(logs) - 1))
            half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
        return cls(len(logs), math.exp(mean), math.exp(mean - half), math.exp(mean + half))

    @property
    def width(self) -> float:
        """How wide the interval is."""
        return self.high - self.low


def pairs_until(
    turn_s: Callable[[bool], float], is_over: Callable[[], bool]
) -> tuple[Ratio, list[tuple[float, float]]]:
    """Compare two ways in pairs until the interval is narrower than `WIDTH`, or time is up.

    Args:
        turn_s: Trains one turn with the runtime or without it; returns seconds of an iteration.
        is_over: Whether time is up.

    Returns:
        The ratio, and the seconds without and with the runtime of each pair.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        # Each way is first in every other pair, so a steady drift parts them equally.
        is_with_first = len(pairs) % 2 == 1
        first_s = turn_s(is_with_first)
        second_s = turn_s(not is_with_first)
        pairs.append((second_s, first_s) if is_with_first else (first_s, second_s))
        ratio = Ratio.of([with_s / without_s for without_s, with_s in pairs])
        is_narrow = len(pairs) >= LEAST_PAIRS and ratio.width < WIDTH
        if is_narrow or (len(pairs) > 1 and is_over()):
            return ratio, pairs


class Training:
    """One rank of torch pipelining whose kernels are smaller than what Python takes to start them.

    Args:
        device: Where it trains.
        folder: For what the autopilot learns.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device = device
        self._folder = folder
        self.seen: list[IterationTimes] = []  #: with the runtime
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.GELU()) for _ in range(_LAYERS)]
        self._module = nn.Sequential(*layers).to(device)
        stage = pipelining.PipelineStage(self._module, 0, 1, device)
        self._schedule = pipelining.Schedule1F1B(
            stage, _MICROBATCHES, loss_fn=nn.functional.mse_loss
        )
        self._optimizer = torch.optim.AdamW(self._module.parameters(), lr=1e-5, foreach=False)
        self._batch = torch.randn(_MICROBATCHES * _ROWS, _WIDTH, device=device)

    def turn_s(self, with_runtime: bool) -> float:
        """Train for a turn; return the seconds of an iteration."""
        block = self._runtime() if with_runtime else nullcontext()
        with block, _spied(self.seen):
            for _ in range(SETTLE):
                self._iterate()
            self._wait()
            begin_s = time.perf_counter()
            count = 0
            while time.perf_counter() < begin_s + TURN_S:
                self._iterate()
                count += 1
            self._wait()
            return (time.perf_counter() - begin_s) / count

    def _runtime(self) -> AbstractContextManager[Any]:
        gpu = "cuda" if self._device.type == "cuda" else "simulated:a100-sxm"
        state = str(self._folder / "state.yaml")
        return planner_runtime(self._schedule, gpu=gpu, dry_run=True, state=state)

    def _iterate(self) -> None:
        self._schedule.step(self._batch, target=self._batch)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


@contextmanager
def _spied(seen: list[IterationTimes]) -> Any:
    """Keep the times of iterations that the runtime takes."""
    before = {kind: kind.finished for kind in (Marks, CudaMarks)}

    def spying(finished: Any) -> Any:
        def spy(marks: Any) -> list[IterationTimes]:
            times: list[IterationTimes] = finished(marks)
            seen.extend(times)
            return times

        return spy

    for kind, finished in before.items():
        kind.finished = spying(finished)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, finished in before.items():
            kind.finished = finished  # type: ignore[method-assign]


def noise(seen: Sequence[IterationTimes]) -> dict[str, float] | None:
    """Return the noise of the computations of iterations, in the terms of `gpu_parts.described`;
    None if too few were seen.
    """
    spans = [times.spans_ns for times in seen if len(times.spans_ns) == 2 * _MICROBATCHES]
    if len(spans) < 2 * SETTLE:
        return None
    return described(np.diff(np.array(spans), axis=2)[:, :, 0] / 1e9)


def engine(name: str, limit_s: float) -> dict[str, Any]:
    """Return what `gpu_engines.py` finds of an engine, or why it has found nothing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        script = str(HERE / "gpu_engines.py")
        command = ["torch.distributed.run", "--nproc-per-node", "1", script, name, str(path)]
        try:
            ended = subprocess.run(
                [sys.executable, "-m", *command],
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {"problem": f"did not end within {limit_s:.0f} s"}
        if ended.returncode or not path.exists():
            return {"problem": ended.stderr[-2000:]}
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a summary, and write all numbers after each part."""
    begin_s = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("file", type=Path, help="where to write all numbers, as JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds of all parts")
    given = parser.parse_args(arguments)
    is_gpu = given.device == "cuda"
    pairs_s = given.limit_s - (2 * ENGINE_S if is_gpu else 0.0) - 20.0  # the last one may run over

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29532"}
    device = torch.device("cuda", 0) if is_gpu else torch.device("cpu")
    torch.set_num_threads(1)  # threads that wait for a busy processor are no part of this
    dist.init_process_group("nccl" if is_gpu else "gloo", rank=0, world_size=1)
    found: dict[str, Any] = {"device": given.device, "torch": torch.__version__}
    if is_gpu:
        with open_gpu("nvml:0") as gpu:
            found["gpu"] = gpu.name
    with tempfile.TemporaryDirectory() as folder:
        training = Training(device, Path(folder))
        training.turn_s(False)  # until the device is warm
        ratio, pairs = pairs_until(
            training.turn_s, lambda: time.monotonic() - begin_s > pairs_s - 4 * TURN_S
        )
    dist.destroy_process_group()
    found |= {
        "ratio": vars(ratio),
        "is narrow": ratio.width < WIDTH,
        "pairs_s": pairs,
        "noise": noise(training.seen),
    }
    given.file.write_text(json.dumps(found, indent=1) + "\n")  # engines may hang
    for name in ("deepspeed", "megatron"):
        left_s = given.limit_s - (time.monotonic() - begin_s)
        found[name] = {"problem": "needs a GPU"}
        if is_gpu:
            found[name] = engine(name, min(ENGINE_S, left_s))
        given.file.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"with the runtime, an iteration takes {ratio.mean:.4f} times as long "
        f"(95 %: {ratio.low:.4f} to {ratio.high:.4f}, {ratio.pairs} pairs)"
    )
    print(json.dumps({name: each for name, each in found.items() if name != "pairs_s"}, indent=1))


if __name__ == "__main__":
    main()
