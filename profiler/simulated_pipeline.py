"""Profile a small GPT on a simulated GPU, in virtual time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.gpu.simulated.model import OpCost
from perseus_planner.profiler.stage import (
    Progress,
    Stage,
    StageRows,
    TimedRun,
    assemble_profile,
    with_one_power,
)
from perseus_planner.profiler.sweep import SweepSettings, measure_stage

if TYPE_CHECKING:
    from perseus_planner.profiler.again import Again
    from perseus_planner.profiles.profiles import Profile

# What the parts of GPT-3 2.7B, its vocabulary padded, take on a microbatch of four sequences of
# 2048 tokens, as the extension `explore` counts it (tests compare them): forward, gradients of
# inputs and of weights. The noise of a simulated GPU follows from how they are written.
_LAYERS = 8
_LAYER = {
    "F": OpCost(flops=1_374_431_477_760, bytes=1_419_352_474),
    "I": OpCost(flops=1_503_343_411_200, bytes=1_892_469_965),
    "W": OpCost(flops=1_288_490_188_800, bytes=786_432_000),
}
_EMBEDDING = {"F": OpCost(0, 209_715_200), "I": OpCost(0, 0), "W": OpCost(0, 251_658_240)}
_HEAD = {
    "F": OpCost(flops=2_109_902_684_160, bytes=11_003_924_316),
    "I": OpCost(flops=2_109_902_684_160, bytes=17_280_616_366),
    "W": OpCost(flops=2_109_902_684_160, bytes=1_287_782_400),
}


def profile_simulated(
    gpu: str,
    stages: int,
    progress: Progress | None = None,
    *,
    split_backward: bool = False,
    settings: SweepSettings | None = None,
    again: Again | None = None,
) -> Profile:
    """Profile a small GPT-like pipeline on a simulated GPU.

    Every stage has eight layers. The first stage also has the embedding, and the last the
    language-model head, so these are slower than the others. Equal arguments give equal profiles.

    Args:
        gpu: The simulated GPU, such as "simulated:a100-sxm", or "simulated:a100-sxm?seed=3" for
            other noise.
        stages: The number of pipeline stages, at least 1.
        progress: Called after every measurement, stage by stage.
        split_backward: Whether to measure the gradients of inputs and of weights apart too, for
            zero-bubble schedules.
        settings: How to measure; the defaults if None.
        again: What to measure again, and join to a profile. Give another seed than before, or the
            noise is the same.

    Raises:
        GpuError: If there is no such simulated GPU.
        UsageError: If `stages` is not a positive whole number.
    """
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1:
        raise UsageError(f"stages is {stages!r}; give a whole number of at least 1")
    measured: list[StageRows] = []
    with open_gpu(gpu) as device:
        if type(device) is not SimulatedGpu:
            raise GpuError(f"{gpu} is not simulated; give one such as simulated:a100-sxm")
        for number, costs in enumerate(_small_gpt(stages)):
            kinds = "FBIW" if split_backward else "FB"
            runs = {kind: TimedRun(partial(device.run, costs[kind])) for kind in kinds}
            stage = Stage(runs, lambda: None, device.block)
            # One GPU measures all stages, so each gets its part of the minutes.
            of_one = (settings or SweepSettings()).for_one_of(stages)
            measured.append(
                measure_stage(
                    device, stage, number, of_one, progress=progress, stages=stages, again=again
                )
            )
    profile = assemble_profile(with_one_power(measured))
    return profile if again is None else again.joined(profile)


def _small_gpt(stages: int) -> list[dict[str, OpCost]]:
    """Return kind -> cost of each stage: eight layers like those of GPT-3 2.7B, on a microbatch
    of four sequences.
    """
    costs = [{kind: layer * _LAYERS for kind, layer in _LAYER.items()} for _ in range(stages)]
    for stage, part in ((costs[0], _EMBEDDING), (costs[-1], _HEAD)):
        stage.update({kind: cost + part[kind] for kind, cost in stage.items()})
    return [{**stage, "B": stage["I"] + stage["W"]} for stage in costs]
