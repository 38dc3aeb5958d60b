"""A pipeline whose stages run on a simulated GPU, profiled in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, UsageError
from perseus_planner.estimate.op_costs import stage_op_costs
from perseus_planner.estimate.presets import PRESETS
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.profiler.profiling import StageRows, assembled, measure_stage
from perseus_planner.profiler.stage import Progress, Stage, Timed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from perseus_planner.gpu.simulated.model import OpCost
    from perseus_planner.profiler.sweep import SweepSettings
    from perseus_planner.profiles.profiles import Profile


def sweep_simulated(
    gpu: str,
    stages: int,
    progress: Progress | None = None,
    *,
    split_backward: bool = False,
    settings: SweepSettings | None = None,
) -> Profile:
    """Profile a small GPT-like pipeline of so many stages on the simulated GPU that `gpu` names.

    Every stage holds eight layers; the first also has the embedding and the last the language-model head, which make
    them slower than the others. Equal arguments give equal profiles.

    Args:
        gpu: such as "simulated:a100-sxm", or "simulated:a100-sxm?seed=3" for other noise.
        stages: how many pipeline stages, at least 1.
        progress: told after every measurement.
        split_backward: measure the gradients of inputs and of weights apart too, which zero-bubble schedules run so.
        settings: how the stages are measured; the defaults where None.

    Raises:
        GpuError: there is no such simulated GPU.
        UsageError: `stages` is not a positive whole number.
    """
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise UsageError(f"stages is {stages!r}; give a whole number of at least 1")
    measured: list[StageRows] = []
    with open_gpu(gpu) as device:
        if not isinstance(device, SimulatedGpu):
            raise GpuError(f"{gpu} is not simulated; give one such as simulated:a100-sxm")
        for number, works in enumerate(_small_gpt(stages)):
            stage = _simulated_stage(device, works, split_backward)
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


def _small_gpt(stages: int) -> list[dict[str, OpCost]]:
    """Kind -> what it does, of each stage: eight layers as of GPT-3 2.7B, on a microbatch of four sequences."""
    model = replace(PRESETS["gpt3-2.7b"], layers=8 * stages, microbatch=4)
    return stage_op_costs(model, stages)


def _simulated_stage(gpu: SimulatedGpu, works: Mapping[str, OpCost], split_backward: bool) -> Stage:
    kinds = "FBIW" if split_backward else "FB"
    return Stage({kind: Timed(partial(gpu.run, works[kind])) for kind in kinds}, lambda: None, gpu.block)
