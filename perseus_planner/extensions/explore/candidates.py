"""The configurations in which a model can be trained on some GPUs: all degrees, microbatches,
schedules and recomputations that GPUs, batch and model allow, each with some splits of its layers;
and those of them that fit in memory.

A configuration that does not fit and has no pipeline shares gradients, then weights, among its
replicas, which saves memory and sends more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.base.errors import ScheduleError, UsageError, shown
from perseus_planner.base.prefixes import si
from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.memory import Candidate, Memory, memory
from perseus_planner.extensions.explore.operations import LayerTimes, kernel_key, layer_times
from perseus_planner.extensions.explore.splits import split_choices
from perseus_planner.extensions.explore.transformer import Transformer, shared_by, split_layers
from perseus_planner.schedules.layouts import Layout, read_layout

if TYPE_CHECKING:
    from perseus_planner.extensions.explore.operations import System

RECOMPUTATIONS = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
_MAX_MICROBATCH = 64  # sequences
_VIRTUAL_STAGES = (2, 3, 4, 6, 8)  # of a rank, under interleaved schedules
_RANKS = (*range(1, 17), 18, 20, 21, 24, 27, 28, 30, 32, 36, 40, 42, 48)  # of a pipeline
_MAX_STAGES = 64  # of a pipeline with virtual stages
_MAX_TENSOR = 16  # GPUs of a tensor group
_CONTEXT = 4096  # tokens on a GPU from which on sequences are divided
_DOUBLINGS = 12  # of the GPUs at most, to find how many have enough memory


@dataclass(frozen=True)
class Choices:
    """What may be chosen; everything else follows from the model, the GPUs and the batch.

    Tensor groups divide norms too, the optimizer's state is shared, and gradients are summed during
    the backward. Without a pipeline weights may be shared too.
    """

    gpus: int  #: GPUs of the job. Configurations that leave some of them unused count too.
    batch: int  #: Sequences of an iteration
    recomputations: tuple[str, ...] = RECOMPUTATIONS  #: Kinds of recomputation
    schedules: tuple[str, ...] = SCHEDULES  #: Names of schedules
    #: The layout to compare with, as `schedules.layouts.read_layout` reads it: only pipelines that
    #: can have it are considered. None for all pipelines, which are compared with even layers.
    layout: str | None = None


def candidates(model: Transformer, system: System, choices: Choices) -> list[Candidate]:
    """Return all configurations that fit in memory.

    Raises:
        UsageError: If there are none; the text names the memory that is missing, or the option that
            allows none.
    """
    _check(model, system, choices)
    fitting = list[Candidate]()
    # If nothing fits, the one that needs the least tells how much is missing.
    least: tuple[Configuration, Memory] | None = None
    is_measured = not system.kernels
    for job, times in _configurations(model, system, choices):
        is_measured = is_measured or kernel_key(job.shape) in system.kernels
        job, needed = _shared_to_fit(job, system)
        if needed.fits:
            fitting.append(Candidate(job, times, needed))
        elif least is None or needed.total < least[1].total:
            least = job, needed
    # Without any configuration, kernels have none to be of.
    if not fitting and least is None:
        raise UsageError(
            f"--layout: no pipeline on {choices.gpus} GPUs with such a schedule has stages for "
            f"{shown(choices.layout)}; give another layout, or more GPUs"
        )
    # Kernels that were measured for another model would be silently unused.
    if not is_measured:
        raise UsageError(
            f"--system: its kernels are of no configuration of this model in {model.precision}, "
            f"with {model.attention} attention and {model.sequence} tokens; measure "
            f"them by planner calibrate --kernels MODEL --gpu {system.gpu.name} -o FILE"
        )
    if not fitting and least is not None:
        job, needed = least
        raise UsageError(
            f"--gpus: {choices.gpus} GPUs of {si(system.memory_bytes, 'B', 3)} are too few: "
            f"{job.name} needs least, {si(needed.total, 'B', 3)} on a GPU "
            f"({_memory_text(needed)}); {_enough(model, system, choices)}"
        )
    return fitting


def _check(model: Transformer, system: System, choices: Choices) -> None:
    """Check what no number of GPUs would change.

    Raises:
        UsageError: If the GPU lacks the precision, there is nothing to recompute, or the layout is
            none of the model.
    """
    # Narrow products need hardware that is faster with them.
    speedup = {"fp8": system.fp8_speedup, "nvfp4": system.fp4_speedup}
    if model.precision == "mxfp8":  # what has FP4 has scales of blocks too
        speedup["mxfp8"] = system.fp4_speedup
    if speedup.get(model.precision, 2.0) <= 1:
        raise UsageError(
            f"--precision: {system.gpu.name} has no {model.precision}; give bf16 or fp16"
        )
    # Flash attention keeps no scores, so there is nothing to recompute selectively.
    if model.attention != "plain" and tuple(choices.recomputations) == ("selective",):
        raise UsageError(
            f"--recompute: {model.attention} attention keeps no scores that selective could "
            "recompute; give none or full, or --attention plain"
        )
    # A layout by hand is checked before pipelines are, as an error in it fits none.
    if choices.layout is not None and "=" not in choices.layout:
        read_layout(choices.layout, layers=model.layers)


def _shared_to_fit(job: Configuration, system: System) -> tuple[Configuration, Memory]:
    """Return the configuration with gradients, then weights shared among replicas, if it does not
    fit in memory otherwise and has no pipeline; and its memory.
    """
    needed = memory(job, system)
    # Each saves memory and sends more, so it is tried only if less does not fit.
    for sharding in (2, 3) if job.ranks == 1 and job.replicas > 1 else ():
        if not needed.fits:
            job = replace(job, sharding=sharding)
            needed = memory(job, system)
    return job, needed


def _configurations(
    model: Transformer, system: System, choices: Choices
) -> Iterator[tuple[Configuration, LayerTimes]]:
    """Yield the configurations of at most so many GPUs, and the times of their layers.

    Which ones does not depend on the number of GPUs otherwise, so that more never make it worse.
    """
    for tensor, context, expert in _groups(model, system, choices.gpus):
        shared = shared_by(model, tensor, context_degree=context, expert_degree=expert)
        for microbatch in _divisors(choices.batch):
            if microbatch > (_MAX_MICROBATCH if context == 1 else 1):
                continue  # more sequences need less traffic than parts of one
            for recomputation in choices.recomputations:
                if recomputation == "selective" and model.attention != "plain":
                    continue  # flash attention keeps no scores
                shape = replace(shared, microbatch=microbatch, recomputation=recomputation)
                # Times depend on the shape alone, so they are computed once for all pipelines.
                times = layer_times(shape, system)
                yield from ((job, times) for job in _pipelines(shape, system, times, choices))


def _groups(model: Transformer, system: System, gpus: int) -> Iterator[tuple[int, int, int]]:
    """Yield tensor, context and expert degrees, the latter powers of 2."""
    for tensor in range(1, min(gpus, system.gpus_per_node, _MAX_TENSOR) + 1):
        if not _shares(model, tensor):
            continue
        # Sequences are divided from some thousand tokens on, and evenly.
        for context in _powers(min(gpus // tensor, model.sequence // _CONTEXT)):
            if model.sequence % context == 0:
                for expert in _powers(min(gpus, model.experts)):
                    if max(1, model.experts) % expert == 0:
                        yield tensor, context, expert


def _pipelines(
    shape: Transformer, system: System, times: LayerTimes, choices: Choices
) -> Iterator[Configuration]:
    """Yield the configurations of a model with this shape: all pipelines, schedules and splits."""
    for ranks, data in _degrees(shape, choices):
        microbatches = choices.batch // (data * shape.microbatch)
        # State is shared and sums are overlapped wherever there are replicas.
        shared = data * shape.context_degree > 1
        for schedule, virtual in _schedules(shape, choices, ranks, microbatches):
            stages = ranks * virtual
            given = None
            # Only pipelines that can have the given layout are compared with it.
            if choices.layout is not None:
                given = given_layout(choices.layout, shape.layers, stages, virtual)
                if given is None:
                    continue
            even = split_layers(shape.layers, stages)
            job = Configuration(
                shape, even, data, microbatches, schedule, virtual, int(shared), shared
            )
            yield from split_choices(job, system, times, given)


def _degrees(shape: Transformer, choices: Choices) -> Iterator[tuple[int, int]]:
    """Yield the ranks of a pipeline, and the number of pipelines."""
    group = shape.tensor_degree * shape.context_degree
    for ranks in _RANKS:
        if ranks > min(shape.layers, choices.gpus // group):
            return
        # Data-parallel pipelines have equal numbers of microbatches, so they divide the batch.
        for data in _divisors(choices.batch // shape.microbatch):
            if group * ranks * data > choices.gpus:
                break
            # Experts are shared by whole groups.
            if group * data % shape.expert_degree == 0:
                yield ranks, data


def _schedules(
    shape: Transformer, choices: Choices, ranks: int, microbatches: int
) -> list[tuple[str, int]]:
    """Return the schedules of such a pipeline, each with the stages of a rank."""
    # Without a pipeline all schedules are one.
    if ranks == 1:
        return [("1f1b", 1)]
    schedules = [(name, 1) for name in choices.schedules if name != "interleaved-1f1b"]
    # Interleaved pipelines need microbatches in multiples of the ranks.
    if "interleaved-1f1b" in choices.schedules and microbatches % ranks == 0:
        most = min(shape.layers, _MAX_STAGES) // ranks
        schedules += [
            ("interleaved-1f1b", virtual) for virtual in _VIRTUAL_STAGES if virtual <= most
        ]
    return schedules


@lru_cache(maxsize=4096)
def given_layout(text: str, layers: int, stages: int, virtual_stages: int) -> Layout | None:
    """Return a given layout of such a pipeline; None if it is not of one."""
    try:
        return read_layout(text, layers=layers, stages=stages, virtual_stages=virtual_stages)
    except ScheduleError:
        return None


def _shares(model: Transformer, tensor: int) -> bool:
    """Return whether so many GPUs can share a layer."""
    groups = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return model.heads % tensor == 0 and model.ffn % tensor == 0 and groups


@lru_cache(maxsize=4096)
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _powers(most: int) -> list[int]:
    """Return the powers of 2 up to a number; 1 if there are none."""
    return [1 << step for step in range(max(1, most.bit_length()))]


def _enough(model: Transformer, system: System, choices: Choices) -> str:
    """Return as advice the first number of GPUs with enough memory, of those that are doubled."""
    for times in range(1, _DOUBLINGS + 1):
        gpus = choices.gpus << times
        if any(
            _shared_to_fit(job, system)[1].fits
            for job, _ in _configurations(model, system, replace(choices, gpus=gpus))
        ):
            return f"give --gpus {gpus}"
    return "give more GPUs and a larger batch"


def _memory_text(needed: Memory) -> str:
    parts = ("parameters", "gradients", "optimizer", "activations", "reserve")
    return ", ".join(f"{name} {si(getattr(needed, name), 'B', 3)}" for name in parts)
