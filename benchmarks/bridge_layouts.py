"""Compares the layouts of a wheel of Megatron-Bridge with those that the planner proposes: the time
of an iteration, by the planner's estimate, at full clocks.

    pip download --no-deps --python-version 3.12 --only-binary=:all: megatron-bridge
    python benchmarks/bridge_layouts.py megatron_bridge-0.6.2-py3-none-any.whl

`bridge_recipes.py` reads the recipes; nothing of the wheel is imported or run. Of the same model,
parallel degrees and batch, the fastest of the layouts that `planner explore` tries is the proposal:
the recipe's own, and those whose slowest rank is fastest. No rank may need more memory than the GPU
has or, where the recipe itself needs more by the estimate, than the recipe's largest.

Modules of multi-token prediction stay in their stage. What a recipe recomputes or overlaps
changes all layers alike, so it is left out: recomputation, and pairs of forward and backward, which
are estimated one after the other.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bridge_recipes import Config, Wheel, configured, layout_of
from fast_replay import iteration_s

from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.memory import memory
from perseus_planner.extensions.explore.operations import SYSTEMS, System, layer_times
from perseus_planner.extensions.explore.splits import split_choices
from perseus_planner.extensions.explore.transformer import Transformer
from perseus_planner.schedules.layouts import Layout, read_layout

_NAME = re.compile(
    r"(?P<model>.+)_(?:pretrain|sft)_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_(?P<kind>.+)"
)
_PRECISIONS = {"bf16": "bf16", "fp8cs": "fp8", "fp8sc": "fp8", "fp8mx": "mxfp8", "nvfp4": "nvfp4"}
_ROOM = 1.001  #: of what a recipe needs by the estimate, where that is more than the GPU has
_ALIKE = 1e-9  #: share by which times differ in floats
_DEEPSEEK_V3 = Transformer(
    layers=61,
    hidden=7168,
    heads=128,
    kv_heads=128,
    head_size=128,
    ffn=18432,
    vocabulary=129280,
    sequence=4096,
    gated=True,
    biases=False,
    tied=False,
    positions="rotary",
    kv_latent=512,
    query_latent=1536,
    rotary_size=64,
    experts=256,
    experts_used=8,
    expert_ffn=2048,
    shared_ffn=2048,
    dense_layers=3,
    routed_nodes=4,
)
_MODELS = {
    # DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 4.2.
    "deepseek_v3": _DEEPSEEK_V3,
    # Kimi team, "Kimi K2: open agentic intelligence" (2025), table 2; the vocabulary is that of the
    # released checkpoint.
    "kimi_k2": replace(
        _DEEPSEEK_V3,
        heads=64,
        kv_heads=64,
        vocabulary=163840,
        experts=384,
        dense_layers=1,
        routed_nodes=0,
    ),
}
"""Models by the first part of a recipe's name; the others have layers that are not estimated."""


@dataclass(frozen=True)
class Compared:
    """A recipe's layout beside the proposal."""

    name: str
    ranks: int
    virtual_stages: int
    own: Layout
    proposed: Layout
    own_s: float  #: seconds of an iteration
    proposed_s: float

    @property
    def gain(self) -> float:
        """By how much of its time the proposal is shorter."""
        return 1.0 - self.proposed_s / self.own_s


class NotEstimatedError(Exception):
    """Why a recipe is not compared."""


def compare(name: str, config: Config) -> Compared:
    """Compare the layout of a recipe.

    Raises:
        NotEstimatedError: If its model, GPU or degrees cannot be estimated.
    """
    job, system = _job(name, config)
    text = layout_of(config.get("model"))
    if text is None:
        raise NotEstimatedError("a layout that depends on what is not in the wheel")
    own = read_layout(text, layers=job.shape.layers)
    if len(own.stages) != len(job.split):
        raise NotEstimatedError("a layout of other stages than its degrees have")
    times = layer_times(job.shape, system)
    given = replace(job, split=own.layers, predictions=own.predictions)
    # What the recipe needs counts as available, as it was run, with recomputation. A share of it is
    # a reserve, so what is needed grows with it a little.
    while not (needed := memory(given, system)).fits:
        system = replace(system, memory_bytes=_ROOM * needed.total)
    choices = [
        (iteration_s(choice, system, times), number, choice)
        for number, choice in enumerate(split_choices(job, system, times, own))
        if memory(choice, system).fits
    ]
    proposed_s, _, proposed = min(choices)
    own_s = iteration_s(given, system, times)
    return Compared(name, job.ranks, job.virtual_stages, own, proposed.layout, own_s, proposed_s)


def _job(name: str, config: Config) -> tuple[Configuration, System]:
    found = _NAME.match(name)
    if found is None:
        raise NotEstimatedError("a name without GPUs and precision")
    model = _MODELS.get(found["model"])
    if model is None:
        raise NotEstimatedError("a model with layers that are not estimated")
    system = SYSTEMS.get({"h100": "h100-sxm"}.get(found["gpu"], found["gpu"]))
    if system is None:
        raise NotEstimatedError("a GPU that is not known")
    values = config.get("model").values
    training = config.get("train").values
    tensor = _number(values, "tensor_model_parallel_size")
    context = _number(values, "context_parallel_size")
    ranks = _number(values, "pipeline_model_parallel_size")
    virtual = _number(values, "virtual_pipeline_model_parallel_size")
    expert = _number(values, "expert_model_parallel_size")
    data, rest = divmod(int(found["gpus"]), tensor * context * ranks)
    if rest or tensor * context * data % expert:
        raise NotEstimatedError("degrees that do not divide its GPUs")
    microbatch = _number(training, "micro_batch_size")
    microbatches, rest = divmod(_number(training, "global_batch_size"), data * microbatch)
    if rest or (virtual > 1 and microbatches % ranks):
        raise NotEstimatedError("a batch that its pipelines do not share")
    shape = replace(
        model,
        sequence=_number(values, "seq_length"),
        microbatch=microbatch,
        tensor_degree=tensor,
        sequence_parallel=tensor > 1,
        overlap_traffic=True,
        context_degree=context,
        expert_degree=expert,
        precision=_PRECISIONS[found["kind"].partition("_")[0]],
        gradient_bytes=2,
    )
    schedule = "interleaved-1f1b" if virtual > 1 else "1f1b"
    stages = ranks * virtual
    # The layers of each stage follow from the layout; here they only have to add up.
    split = (shape.layers, *[0] * (stages - 1))
    return Configuration(shape, split, data, microbatches, schedule, virtual, 1, True), system


def _number(values: dict[str, Any], name: str) -> int:
    value = values.get(name, 1)
    if value is None:
        return 1
    if not isinstance(value, int):
        raise NotEstimatedError(f"{name}, which is not in the wheel")
    return value


def table(rows: Sequence[Compared]) -> str:
    """Return a table of the recipes that have layout, degrees and proposal in common."""
    lines = [
        "| recipes | ranks x stages | layout | proposed | shorter, % |",
        "|---|---|---|---|---:|",
    ]
    groups: dict[tuple[Any, ...], list[Compared]] = {}
    for row in rows:
        model = next(model for model in _MODELS if row.name.startswith(model))
        key = model, row.ranks, row.virtual_stages, row.own, row.proposed
        groups.setdefault(key, []).append(row)
    for (model, ranks, virtual, own, proposed), same in groups.items():
        gains = sorted(100.0 * row.gain for row in same)
        ends = [f"{gains[0]:.1f}", f"{gains[-1]:.1f}"]
        cells = [
            f"{len(same)} of `{model}`",
            f"{ranks} x {virtual}",
            _code(own),
            "the same" if proposed == own else _code(proposed),
            ends[0] if ends[0] == ends[1] else " to ".join(ends),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _code(layout: Layout) -> str:
    escaped = str(layout).replace("|", "\\|")
    return f"`{escaped}`"


def main(arguments: Sequence[str]) -> int:
    """Print the table, and what was not compared; return 1 if a proposal is slower."""
    wheel = Wheel(Path(arguments[0]))
    rows = []
    left_out: Counter[str] = Counter()
    for module, name in wheel.recipes():
        config = configured(wheel, module, name)
        values = config.get("model").values if isinstance(config, Config) else {}
        if not values.get("pipeline_model_parallel_layout"):
            continue
        if _number(values, "pipeline_model_parallel_size") < 2:
            continue
        try:
            rows.append(compare(name, config))
        except NotEstimatedError as problem:
            left_out[str(problem)] += 1
    print(table(rows))
    gains = [100.0 * row.gain for row in rows]
    faster = [gain for gain in gains if gain > 100.0 * _ALIKE]
    print(
        f"\n{len(rows) + left_out.total()} recipes of pipelines with a layout, {len(rows)} "
        f"estimated. The proposal is slower in {sum(gain < -100.0 * _ALIKE for gain in gains)}, "
        f"faster in {len(faster)}: by {min(faster, default=0.0):.1f} to "
        f"{max(faster, default=0.0):.1f} %, {median(faster or [0.0]):.1f} % in the median."
    )
    for problem, count in left_out.items():
        print(f"{count} not estimated: {problem}")
    return int(min(gains) < -100.0 * _ALIKE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
