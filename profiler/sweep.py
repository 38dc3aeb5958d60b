"""The sweep: time and energy of every stage's forward and backward, clock by clock from the top down.

A computation is repeated back to back in a window long enough for the energy counter, and its time and
energy are the window's divided by the repetitions. Below the clock of least energy a computation gets
slower and costs more, so the descent ends there (the rule of Merak's profiler, made safe against noise).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from perseus_planner.errors import UsageError
from perseus_planner.gpu import Gpu, locked_clock, open_gpu
from perseus_planner.gpu.simulated import SimulatedGpu, Work
from perseus_planner.measurement import Measurement
from perseus_planner.profiles import Profile

Run = Callable[[int], None]
"""Runs a computation so many times back to back, and returns when the GPU has finished."""
Block = Callable[[float], None]
"""Keeps the GPU waiting for a neighbour's message for so many seconds."""
Progress = Callable[[int, int], None]
"""Called with the measurements that are done and the total; the last call has them equal."""

# Energy counters of data-centre GPUs step about every 100 ms, so a window of 5 s is good to 2 %.
_WINDOW_S = 5.0
_WARM_UP = 5
# The descent ends when this many clocks in a row cost more than the least energy by more than the noise.
_PATIENCE = 5
_RISE = 1.01


@dataclass(frozen=True)
class Stage:
    """What is measured of one pipeline stage; the parts of the backward where a schedule runs them apart."""

    forward: Run
    backward: Run
    input_gradient: Run | None = None
    weight_gradient: Run | None = None

    @property
    def runs(self) -> dict[str, Run]:
        """Kind -> what runs it."""
        each = {"F": self.forward, "B": self.backward, "I": self.input_gradient, "W": self.weight_gradient}
        return {kind: run for kind, run in each.items() if run is not None}


def sweep(gpu: Gpu, stages: Sequence[Stage], block: Block, progress: Progress | None = None) -> Profile:
    """Measure `stages`, first to last, on `gpu`; its clocks are reset afterwards, whatever happens.

    Raises:
        GpuError: the clocks may not be set or reset.
        ProfileError: what was measured is no profile, for example because there are no stages.
    """
    runs: dict[tuple[int, str], Run] = {}
    for number, stage in enumerate(stages):
        runs |= {(number, kind): run for kind, run in stage.runs.items()}
    clocks = len(gpu.supported_clocks_mhz)
    measurements: dict[tuple[int, str], tuple[Measurement, ...]] = {}
    for before, (key, run) in enumerate(runs.items()):
        for row in _descent(gpu, run):
            measurements[key] = (*measurements.get(key, ()), row)
            if progress is not None:
                progress(before * clocks + len(measurements[key]), len(runs) * clocks)
    if progress is not None:
        progress(len(runs) * clocks, len(runs) * clocks)
    time_s, energy_j = _spent(gpu, lambda: block(_WINDOW_S))
    return Profile(measurements, energy_j / time_s, gpu.name, gpu.origin)


def sweep_simulated(
    gpu: str, stages: int, seed: int = 0, progress: Progress | None = None, *, split_backward: bool = False
) -> Profile:
    """Profile a small GPT-like pipeline of so many stages on the simulated GPU that `gpu` names.

    Every stage holds the same number of layers; the first also has the embedding and the last the
    language-model head, which make them slower than the others. Equal arguments give equal profiles.

    Args:
        gpu: such as "simulated:a100-sxm".
        stages: how many pipeline stages, at least 1.
        seed: chooses the measurement noise.
        progress: told after every measurement.
        split_backward: measure the gradients of inputs and of weights apart too, which zero-bubble schedules run so.

    Raises:
        GpuError: there is no such simulated GPU.
        UsageError: `stages` is not a positive whole number.
    """
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise UsageError(f"stages is {stages!r}; give a whole number of at least 1")
    with open_gpu(f"{gpu}?seed={seed}") as device:
        assert isinstance(device, SimulatedGpu)
        simulated = [_simulated_stage(device, work, split_backward) for work in _gpt_forwards(stages)]
        return sweep(device, simulated, device.block, progress)


def _descent(gpu: Gpu, run: Run) -> Iterator[Measurement]:
    """The measurements of one computation, highest clock first."""
    energies_j: list[float] = []
    for clock_mhz in gpu.supported_clocks_mhz:
        with locked_clock(gpu, clock_mhz):
            time_s, energy_j = _measure(gpu, run)
        yield Measurement(clock_mhz, time_s, energy_j)
        energies_j.append(energy_j)
        if len(energies_j) > _PATIENCE and min(energies_j[-_PATIENCE:]) > _RISE * min(energies_j):
            return


def _measure(gpu: Gpu, run: Run) -> tuple[float, float]:
    """Mean seconds and joules of one repetition."""
    warm_up_s, _ = _spent(gpu, lambda: run(_WARM_UP))
    repetitions = math.ceil(_WINDOW_S * _WARM_UP / warm_up_s)
    time_s, energy_j = _spent(gpu, lambda: run(repetitions))
    return time_s / repetitions, energy_j / repetitions


def _spent(gpu: Gpu, action: Callable[[], None]) -> tuple[float, float]:
    """Seconds and joules that pass on the GPU during `action`."""
    start_s, start_j = gpu.now_s(), gpu.energy_j()
    action()
    return gpu.now_s() - start_s, gpu.energy_j() - start_j


# One forward of a microbatch of 4 x 2048 tokens through GPT-3 2.7B (hidden size 2560, vocabulary 50257) in bf16.
# Layer: 24 * tokens * hidden^2 FLOPs in matrix products and 4 * tokens * 2048 * hidden in attention, its weights
# and 68 bytes per token and hidden element. Head: 2 * tokens * hidden * vocabulary FLOPs, 10 bytes per logit.
# Embedding: 24 bytes per token and hidden element.
_LAYER = Work(flops=1.46e12, bytes=1.6e9)
_HEAD = Work(flops=2.1e12, bytes=4.1e9)
_EMBEDDING = Work(flops=0.0, bytes=0.5e9)
_LAYERS_PER_STAGE = 8


def _gpt_forwards(stages: int) -> list[Work]:
    forwards = [_LAYER * _LAYERS_PER_STAGE] * stages
    forwards[0] += _EMBEDDING
    forwards[-1] += _HEAD
    return forwards


def _simulated_stage(gpu: SimulatedGpu, forward: Work, split_backward: bool) -> Stage:
    # A backward computes the gradients of inputs and of weights, each as much work as the forward.
    half = partial(gpu.run, forward) if split_backward else None
    return Stage(partial(gpu.run, forward), partial(gpu.run, forward * 2), half, half)
