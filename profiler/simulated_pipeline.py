"""A pipeline whose stages run on a simulated GPU, profiled in virtual time."""

from __future__ import annotations

from functools import partial

from perseus_planner.errors import GpuError, UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated import SimulatedGpu, Work
from perseus_planner.profiler.profiling import StageRows, assembled, measure_stage
from perseus_planner.profiler.stage import Progress, Stage, Timed
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiles import Profile


def sweep_simulated(
    gpu: str,
    stages: int,
    seed: int = 0,
    progress: Progress | None = None,
    *,
    split_backward: bool = False,
    settings: SweepSettings | None = None,
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
        settings: how the stages are measured; the defaults where None.

    Raises:
        GpuError: there is no such simulated GPU.
        UsageError: `stages` is not a positive whole number.
    """
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise UsageError(f"stages is {stages!r}; give a whole number of at least 1")
    text = gpu if "seed=" in gpu else f"{gpu}{'&' if '?' in gpu else '?'}seed={seed}"
    measured: list[StageRows] = []
    with open_gpu(text) as device:
        if not isinstance(device, SimulatedGpu):
            raise GpuError(f"{gpu} is not simulated; give one such as simulated:a100-sxm")
        for number, forward in enumerate(_gpt_forwards(stages)):
            stage = _simulated_stage(device, forward, split_backward)
            told = _share(progress, number, stages)
            measured.append(measure_stage(device, stage, number, settings, progress=told))
    if progress is not None:
        rows = sum(len(table) for each in measured for table in each.measurements.values())
        progress(rows, rows)
    return assembled(measured)


def _share(progress: Progress | None, number: int, stages: int) -> Progress | None:
    """The progress of all stages from that of stage `number`, where those before it took what it takes."""
    if progress is None:
        return None
    return lambda done, total: progress(number * total + done, stages * total)


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
    works = {"F": forward, "B": forward * 2}
    if split_backward:
        works |= {"I": forward, "W": forward}
    return Stage({kind: Timed(partial(gpu.run, work)) for kind, work in works.items()}, lambda: None, gpu.block)
