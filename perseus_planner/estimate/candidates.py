"""The configurations in which a model can be trained on some GPUs."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.base.prefixes import si
from perseus_planner.estimate.configuration import Configuration, Memory, memory
from perseus_planner.estimate.kernel_times import LayerTimes, layer_times
from perseus_planner.estimate.system import kernel_key
from perseus_planner.estimate.transformer import Transformer, shared_by, split_layers

if TYPE_CHECKING:
    from perseus_planner.estimate.system import System

RECOMPUTATIONS = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
_MAX_MICROBATCH = 64
_VIRTUAL_STAGES = (2, 3, 4, 6)
_RANKS = (*range(1, 17), 18, 20, 21, 24, 27, 28, 30, 32, 36, 40, 42, 48)
_MAX_STAGES = 64
_MAX_TENSOR = 16
_CONTEXT = 8192  # tokens of a sequence on a GPU from which on it is divided
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


@dataclass(frozen=True)
class Candidate:
    """A configuration that fits in memory."""

    job: Configuration
    times: LayerTimes
    memory: Memory


def candidates(model: Transformer, system: System, choices: Choices) -> list[Candidate]:
    """Return all configurations that fit in memory.

    Raises:
        UsageError: If there are none; the text names the memory that is missing, or the option that
            allows none.
    """
    speedup = {"fp8": system.fp8_speedup, "nvfp4": system.fp4_speedup}
    if model.precision == "mxfp8":  # what has FP4 has scales of blocks too
        speedup["mxfp8"] = system.fp4_speedup
    if speedup.get(model.precision, 2.0) <= 1:
        raise UsageError(
            f"--precision: {system.gpu.name} has no {model.precision}; give bf16 or fp16"
        )
    if model.attention != "plain" and tuple(choices.recomputations) == ("selective",):
        raise UsageError(
            f"--recompute: {model.attention} attention keeps no scores that selective could "
            "recompute; give none or full, or --attention plain"
        )
    fitting, least, unmeasured = list[Candidate](), None, bool(system.kernels)
    for job, times in _configurations(model, system, choices):
        unmeasured = unmeasured and kernel_key(job.shape) not in system.kernels
        needed = memory(job, system)
        if job.ranks == 1 and job.replicas > 1 and not needed.fits:
            job = replace(job, sharding=3)  # sends more than what shares the optimizer's state
            needed = memory(job, system)
        if needed.fits:
            fitting.append(Candidate(job, times, needed))
        elif least is None or needed.total < least[1].total:
            least = job, needed
    if unmeasured:
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


def split_choices(
    layers: int, stages: int, times: LayerTimes, top_mhz: float
) -> list[tuple[int, ...]]:
    """Return the splits to try: as even as possible, and with fewer layers beside embedding and
    head.

    The second one makes the slowest stage as fast as whole layers allow.
    """
    even = split_layers(layers, stages)
    if stages == 1:
        return [even]
    layer_s, first_s, last_s = (
        part["F"].time_s(top_mhz) + part["B"].time_s(top_mhz)
        for part in (times.layer, times.embedding, times.head)
    )
    balanced = _balanced(layers, stages, layer_s, first_s, last_s)
    return [even] if balanced == even else [even, balanced]


@lru_cache(maxsize=4096)
def _balanced(
    layers: int, stages: int, layer_s: float, first_s: float, last_s: float
) -> tuple[int, ...]:
    """Return the split whose slowest stage is fastest, with so many seconds of a layer and
    beside the layers.
    """
    # Of equally fast stages the last one gets the next layer: it keeps fewer microbatches.
    free = [
        (layer_s + beside_s, -stage)
        for stage, beside_s in enumerate([first_s, *[0.0] * (stages - 2), last_s])
    ]
    heapq.heapify(free)
    split = [1] * stages
    for _ in range(layers - stages):
        least_s, stage = free[0]
        split[-stage] += 1
        heapq.heapreplace(free, (least_s + layer_s, stage))
    return tuple(split)


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
                times = layer_times(shape, system)
                yield from ((job, times) for job in _pipelines(shape, system, times, choices))


def _groups(model: Transformer, system: System, gpus: int) -> Iterator[tuple[int, int, int]]:
    """Yield tensor, context and expert degrees, the latter powers of 2."""
    for tensor in range(1, min(gpus, system.gpus_per_node, _MAX_TENSOR) + 1):
        if not _shares(model, tensor):
            continue
        for context in _powers(min(gpus // tensor, model.sequence // _CONTEXT)):
            if model.sequence % context == 0:
                for expert in _powers(min(gpus, model.experts)):
                    if max(1, model.experts) % expert == 0:
                        yield tensor, context, expert


def _pipelines(
    shape: Transformer, system: System, times: LayerTimes, choices: Choices
) -> Iterator[Configuration]:
    group = shape.tensor_degree * shape.context_degree
    for ranks in _RANKS:
        if ranks > min(shape.layers, choices.gpus // group):
            break
        for data in _divisors(choices.batch // shape.microbatch):
            if group * ranks * data > choices.gpus:
                break
            if group * data % shape.expert_degree == 0:
                yield from _scheduled(shape, system, times, choices, ranks, data)


def _scheduled(
    shape: Transformer,
    system: System,
    times: LayerTimes,
    choices: Choices,
    ranks: int,
    data: int,
) -> Iterator[Configuration]:
    count = choices.batch // (data * shape.microbatch)
    kinds = [("1f1b", 1)]
    if ranks > 1:
        kinds = [(name, 1) for name in choices.schedules if name != "interleaved-1f1b"]
        if "interleaved-1f1b" in choices.schedules and count % ranks == 0:
            kinds += [
                ("interleaved-1f1b", virtual_stages)
                for virtual_stages in _VIRTUAL_STAGES
                if virtual_stages * ranks <= min(shape.layers, _MAX_STAGES)
            ]
    shared = data * shape.context_degree > 1
    for schedule, virtual in kinds:
        for split in split_choices(shape.layers, ranks * virtual, times, system.top_mhz):
            yield Configuration(shape, split, data, count, schedule, virtual, int(shared), shared)


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
    """Return the first doubling of the GPUs that has enough memory, as advice."""
    for times in range(1, _DOUBLINGS + 1):
        gpus = choices.gpus << times
        if any(
            memory(job, system).fits
            for job, _ in _configurations(model, system, replace(choices, gpus=gpus))
        ):
            return f"give --gpus {gpus}"
    return "give more GPUs and a larger batch"


def _memory_text(needed: Memory) -> str:
    parts = ("parameters", "gradients", "optimizer", "activations", "reserve")
    return ", ".join(f"{name} {si(getattr(needed, name), 'B', 3)}" for name in parts)
