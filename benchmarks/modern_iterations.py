"""Published throughputs of training on H100, B200 and GB200, and the configurations that had them.

What is not published may have been anything: the fastest configuration by the estimate that fits
in memory is taken. All rows overlap the traffic of tensor groups, share the optimizer's state, and
have no recomputation; narrow ones sum gradients in bf16.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from data import MissingError, folder
from fast_replay import iteration_s

from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.memory import memory
from perseus_planner.extensions.explore.operations import SYSTEMS, System, layer_times
from perseus_planner.extensions.explore.transformer import Transformer, split_layers

_MICROBATCHES, _VIRTUAL = (1, 2, 4, 8), (1, 2, 3, 4, 6, 7)
# MLPerf Training v4.0, Sustainable Metal Cloud: 3,101 s of training, 10.765 s a step of
# 2,048 x 2,048 tokens.
MLPERF_S = 10.765
_GPT3 = {
    "source": "MLPerf Training v4.0",
    "model": "gpt3-175b",
    "layers": "96",
    "hidden": "12288",
    "heads": "96",
    "kv_heads": "96",
    "head_dim": "128",
    "ffn": "49152",
    "vocabulary": "51200",
    "gated": "no",
    "gpu": "h100",
    "gpus": "512",
    "precision": "fp8",
    "global_batch": "2048",
    "microbatch": "2",
    "sequence": "2048",
    "tensor_degree": "4",
    "pipeline_degree": "8",
    "context_degree": "1",
    "virtual_stages": "",
    "tokens_per_s_per_gpu": str(2048 * 2048 / 512 / MLPERF_S),
}


class Published(NamedTuple):
    """A run, and the configurations that it may have had."""

    row: Mapping[str, str]
    jobs: tuple[Configuration, ...]

    @property
    def name(self) -> str:
        """Model, GPU and number of GPUs."""
        return f"{self.row['model']}, {self.row['gpus']} {self.row['gpu'].upper()}"

    @property
    def family(self) -> str:
        """What is left out together: all sizes of a model."""
        kind = self.row["model"].partition("-")[0]
        return "Megatron gpt" if kind == "gpt" else kind

    @property
    def is_mixture(self) -> bool:
        """Whether the model has experts."""
        return self.jobs[0].shape.experts > 0

    @property
    def time_s(self) -> float:
        """Seconds of an iteration."""
        per_s = float(self.row["tokens_per_s_per_gpu"]) * int(self.row["gpus"])
        return self.jobs[0].tokens / per_s

    def system(self, systems: Mapping[str, System] = SYSTEMS) -> System:
        """Return the system it ran on."""
        return systems[{"h100": "h100-sxm"}.get(self.row["gpu"], self.row["gpu"])]

    def estimate_s(self, system: System) -> float | None:
        """Return the seconds by the estimate; None if no configuration fits in memory."""
        return min(
            (
                iteration_s(job, system, layer_times(job.shape, system))
                for job in self.jobs
                if memory(job, system).fits
            ),
            default=None,
        )


@cache
def published() -> tuple[Published, ...]:
    """Return the rows.

    Raises:
        MissingError: If the table does not exist.
    """
    path = folder().parent / "iteration_times" / "modern_gpus.csv"
    if not path.exists():
        raise MissingError(f"no published throughputs: {path} does not exist")
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file), _GPT3]
    return tuple(Published(row, tuple(_jobs(row))) for row in rows)


def _jobs(row: Mapping[str, str]) -> Iterator[Configuration]:
    def size(name: str, default: int = 0) -> int:
        return int(row.get(name) or default)

    model = Transformer(
        layers=size("layers"),
        hidden=size("hidden"),
        heads=size("heads"),
        kv_heads=size("kv_heads"),
        head_size=size("head_dim"),
        ffn=size("ffn", 4 * size("hidden")),
        vocabulary=size("vocabulary"),
        sequence=size("sequence"),
        gated=row["gated"] == "yes",
        biases=False,
        tied=False,
        positions="rotary",
        tensor_degree=size("tensor_degree"),
        sequence_parallel=size("tensor_degree") > 1,
        overlap_traffic=True,
        precision=row["precision"],
        experts=size("experts"),
        experts_used=size("experts_used"),
        expert_ffn=size("expert_ffn"),
        context_degree=size("context_degree", 1),
        expert_degree=size("expert_degree", 1),
        gradient_bytes=4 if row["precision"] == "bf16" else 2,
    )
    ranks = size("pipeline_degree")
    data = size("gpus") // (ranks * model.tensor_degree * model.context_degree)
    sizes = [size("microbatch")] if row["microbatch"] else _MICROBATCHES
    virtuals = [size("virtual_stages")] if row["virtual_stages"] else _VIRTUAL
    for microbatch in sizes:
        for virtual in virtuals:
            count, rest = divmod(size("global_batch"), data * microbatch)
            if rest or (ranks == 1 and virtual > 1):
                continue
            if ranks * virtual > model.layers or (virtual > 1 and count % ranks):
                continue
            name = "interleaved-1f1b" if virtual > 1 and ranks > 1 else "1f1b"
            split = split_layers(model.layers, ranks * virtual)
            shape = replace(model, microbatch=microbatch)
            yield Configuration(shape, split, data, count, name, virtual, 1, True)
