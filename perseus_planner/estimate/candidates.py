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
from perseus_planner.estimate.transformer import Transformer, split_layers

if TYPE_CHECKING:
    from perseus_planner.estimate.system import System

RECOMPUTATIONS = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
_MAX_MICROBATCH = 64
_VIRTUAL_STAGES = (2, 3, 4, 6)
_MAX_RANKS = 48
_MAX_STAGES = 64
_ALL_PARTS = 24  # GPUs, of which any part is explored
_DOUBLINGS = 12  # of the GPUs at most, to find how many have enough memory


@dataclass(frozen=True)
class Choices:
    """What may be chosen; everything else follows from the model, the GPUs and the batch.

    Tensor groups divide norms too, the optimizer is distributed, and gradients are summed during
    the backward.
    """

    #: GPUs of the job. Configurations that leave some of them unused count too: see `_parts`.
    gpus: int
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
        UsageError: If there are none; the text names the nearest number of GPUs or batch that
            works, the memory that is missing, or the option that allows none.
    """
    if model.precision == "fp8" and system.fp8_speedup <= 1:
        raise UsageError(f"--precision: {system.gpu.name} has no fp8; give bf16 or fp16")
    if model.attention != "plain" and tuple(choices.recomputations) == ("selective",):
        raise UsageError(
            f"--recompute: {model.attention} attention keeps no scores that selective could "
            "recompute; give none or full, or --attention plain"
        )
    fitting, least, any_full = [], None, False
    for gpus in _parts(choices.gpus):
        for job, times in _configurations(model, system, replace(choices, gpus=gpus)):
            any_full = any_full or gpus == choices.gpus
            needed = memory(job, system)
            if needed.fits:
                fitting.append(Candidate(job, times, needed))
            elif least is None or needed.total < least[1].total:
                least = job, needed
    if not any_full:
        raise UsageError(_nearest(model, choices))
    if not fitting and least is not None:
        job, needed = least
        raise UsageError(
            f"--gpus: {choices.gpus} GPUs of {si(system.memory_bytes, 'B', 3)} are too few: "
            f"{job.name} needs least, {si(needed.total, 'B', 3)} on a GPU "
            f"({_memory_text(needed)}); {_enough(model, system, choices)}"
        )
    return fitting


def split_choices(
    model: Transformer, stages: int, times: LayerTimes, top_mhz: float
) -> list[tuple[int, ...]]:
    """Return the splits to try: as even as possible, and with fewer layers beside embedding and
    head.

    The second one makes the slowest stage as fast as whole layers allow.
    """
    even = split_layers(model.layers, stages)
    if stages == 1:
        return [even]
    layer_s, first_s, last_s = (
        part["F"].time_s(top_mhz) + part["B"].time_s(top_mhz)
        for part in (times.layer, times.embedding, times.head)
    )
    balanced = _balanced(model.layers, stages, layer_s, first_s, last_s)
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
    """Yield the configurations that use all of the GPUs, and the times of their layers."""
    for tensor in _divisors(min(choices.gpus, system.gpus_per_node)):
        if choices.gpus % tensor or not _shares(model, tensor):
            continue
        # Frameworks pad the vocabulary, so that all GPUs of a group have a share that aligns.
        vocabulary = -(-model.vocabulary // (128 * tensor)) * 128 * tensor
        shared = replace(
            model,
            tensor_degree=tensor,
            vocabulary=vocabulary,
            sequence_parallel=tensor > 1 and model.sequence % tensor == 0,
        )
        for microbatch in _divisors(choices.batch):
            if microbatch > _MAX_MICROBATCH:
                continue
            for recomputation in choices.recomputations:
                if recomputation == "selective" and model.attention != "plain":
                    continue  # flash attention keeps no scores
                shape = replace(shared, microbatch=microbatch, recomputation=recomputation)
                times = layer_times(shape, system)
                yield from ((job, times) for job in _pipelines(shape, system, times, choices))


def _pipelines(
    shape: Transformer, system: System, times: LayerTimes, choices: Choices
) -> Iterator[Configuration]:
    for ranks in _divisors(choices.gpus // shape.tensor_degree):
        data = choices.gpus // shape.tensor_degree // ranks
        if ranks > min(shape.layers, _MAX_RANKS) or choices.batch % (data * shape.microbatch):
            continue
        count = choices.batch // (data * shape.microbatch)
        if ranks == 1:
            kinds = [("1f1b", 1)]
        else:
            kinds = [(name, 1) for name in choices.schedules if name != "interleaved-1f1b"]
            if "interleaved-1f1b" in choices.schedules and count % ranks == 0:
                kinds += [
                    ("interleaved-1f1b", virtual_stages)
                    for virtual_stages in _VIRTUAL_STAGES
                    if virtual_stages * ranks <= min(shape.layers, _MAX_STAGES)
                ]
        for schedule, virtual in kinds:
            for split in split_choices(shape, ranks * virtual, times, system.top_mhz):
                yield Configuration(
                    shape,
                    split,
                    data,
                    count,
                    schedule,
                    virtual,
                    distributed_optimizer=data > 1,
                    overlap_reduction=data > 1,
                )


def _shares(model: Transformer, tensor: int) -> bool:
    """Return whether so many GPUs can share a layer."""
    groups = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return model.heads % tensor == 0 and model.ffn % tensor == 0 and groups


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _parts(gpus: int) -> list[int]:
    """Return the numbers of GPUs to use, so that few more GPUs make nothing worse.

    All up to 24; beyond, the number itself, its half and so on while whole, powers of 2, and 3
    times those.
    """
    halves = [gpus >> step for step in range(gpus.bit_length()) if gpus % (1 << step) == 0]
    rounds = [
        times << step
        for times in (1, 3)
        for step in range(gpus.bit_length())
        if times << step < gpus
    ]
    return sorted({*range(1, min(gpus, _ALL_PARTS) + 1), *halves, *rounds}, reverse=True)


def _possible(model: Transformer, gpus: int, batch: int) -> bool:
    return any(
        gpus % (tensor * ranks) == 0 and batch % (gpus // (tensor * ranks)) == 0
        for tensor in _divisors(min(gpus, 8))
        if _shares(model, tensor)
        for ranks in range(1, min(model.layers, _MAX_RANKS) + 1)
    )


def _nearest(model: Transformer, choices: Choices) -> str:
    """Return why no configuration uses all GPUs, with the nearest number of GPUs or batch that
    works.
    """
    gpus, batch = choices.gpus, choices.batch
    fewer = (
        next(count for count in range(gpus - 1, 0, -1) if _possible(model, count, batch))
        if gpus > 1
        else 1
    )
    near = (
        batch_size
        for step in range(1, gpus + 1)
        for batch_size in (batch + step, batch - step)
        if batch_size > 0
    )
    other = next((batch_size for batch_size in near if _possible(model, gpus, batch_size)), None)
    more = "" if other is None else f", or --batch {other}"
    return (
        f"--gpus: {gpus} GPUs cannot share {model.heads} heads, {model.layers} layers and a batch "
        f"of {batch} sequences; give --gpus {fewer}{more}"
    )


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
