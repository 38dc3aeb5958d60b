"""Measured iterations of training on A100s, and their estimated times: what number 24 compares and
`time_fit.py` fits.

The tables do not say what is recomputed. Rows of 2 to 8 GPUs cannot be fully recomputed, as their
products would run at 105 % of the peak; on clusters full recomputation fits best. Both are assumed.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from data import MissingError, folder
from fast_replay import iteration_s

from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.operations import (
    SYSTEMS,
    LayerTimes,
    System,
    kernel_key,
    layer_times,
)
from perseus_planner.extensions.explore.transformer import Transformer, split_layers

#: padded as Megatron does, but for heads of one GPU on 2 to 8 GPUs, which take as if it were not
_VOCABULARY = 50257
A100 = SYSTEMS["a100-sxm"]


class Measured(NamedTuple):
    """A configuration that was measured, and the seconds of an iteration."""

    job: Configuration
    time_s: float


@cache
def measured(name: str) -> tuple[Measured, ...]:
    """Return the rows of a table of measured iterations.

    Raises:
        MissingError: If the table does not exist.
    """
    path = folder().parent / "iteration_times" / name
    if not path.exists():
        raise MissingError(f"no measured iterations: {path} does not exist")
    with path.open(newline="") as file:
        return tuple(
            _measured({key: float(value) for key, value in row.items()})
            for row in csv.DictReader(file)
        )


def table_5() -> Mapping[str, Measured]:
    """Return the end-to-end iterations of Korthikanti et al., table 5."""
    found = {}
    for what, sequence_parallel, times_s in (
        ("full", False, (1.42, 49.05)),
        ("selective", True, (1.10, 37.83)),
    ):
        extras: dict[str, Any] = {
            "tensor_degree": 8,
            "recomputation": what,
            "sequence_parallel": sequence_parallel,
            "attention": "plain",
            "gradient_bytes": 2,
        }
        small = Transformer(48, 6144, 64, 64, 96, 4 * 6144, 51200, 2048, microbatch=4, **extras)
        large = Transformer(105, 20480, 128, 128, 160, 4 * 20480, 51200, 2048, **extras)
        found[f"22B, {what}"] = Measured(Configuration(small, (48,), 1, 1), times_s[0])
        interleaved = Configuration(large, (1,) * 105, 1, 280, "interleaved-1f1b", 3)
        found[f"530B, {what}"] = Measured(interleaved, times_s[1])
    return found


class TimeEstimates:
    """Estimated times on a system; kernels that configurations share are computed once."""

    def __init__(self, system: System) -> None:
        self._system, self._layers = system, dict[Transformer, LayerTimes]()

    def __call__(self, job: Configuration) -> float:
        """Return the estimated seconds of an iteration."""
        key = kernel_key(job.shape)
        if key not in self._layers:
            self._layers[key] = layer_times(job.shape, self._system)
        return iteration_s(job, self._system, self._layers[key])


def _measured(row: Mapping[str, float]) -> Measured:
    hidden, heads, layers, tensor, data, microbatch = (
        int(row[key])
        for key in ("hidden", "heads", "layers", "tensor_parallel", "data_parallel", "microbatch")
    )
    shape = Transformer(
        layers,
        hidden,
        heads,
        heads,
        hidden // heads,
        4 * hidden,
        vocabulary=_VOCABULARY
        if tensor == 1 and row["gpus"] <= 8
        else -(-_VOCABULARY // (128 * tensor)) * 128 * tensor,
        sequence=int(row["sequence"]),
        microbatch=microbatch,
        tensor_degree=tensor,
        recomputation="none" if row["gpus"] <= 8 else "full",
        attention="plain",
        gradient_bytes=2,  # assumed
    )
    split = split_layers(layers, int(row["pipeline_parallel"]))
    return Measured(
        Configuration(shape, split, data, int(row["global_batch"]) // (microbatch * data)),
        row["iteration_s"],
    )
