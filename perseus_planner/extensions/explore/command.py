"""`planner estimate`, `planner explore` and `planner calibrate --kernels`: a profile, the best
configuration, or the speed of kernels of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from perseus_planner.base import units
from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    Carbon,
    Counts,
    Option,
    OutputFile,
    Positive,
    Power,
    Quantity,
    SourceFile,
    Time,
    chip_names,
    command,
    complete,
    output_file,
    refuse_same,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.cli.profiling import KernelOptions
    from perseus_planner.extensions.explore.candidates import Choices
    from perseus_planner.extensions.explore.configuration import Configuration
    from perseus_planner.extensions.explore.objective import Objective
    from perseus_planner.extensions.explore.operations import System
    from perseus_planner.extensions.explore.transformer import Transformer


def _model_names() -> list[str]:
    from perseus_planner.extensions.explore.transformer import PRESETS

    return list(PRESETS)


_Model = Annotated[str, complete(_model_names), Option(metavar="MODEL")]
_Gpu = Annotated[str, complete(chip_names), Option(metavar="GPU")]
_Sequence = Annotated[
    int | None, "Tokens of a sequence.  [default: the model's]", Option(metavar="TOKENS")
]


@dataclass(frozen=True)
class _System:
    """The kind of GPU."""

    gpu: Annotated[_Gpu | None, "Kind of GPU, e.g. a100-sxm or h100-sxm.  [default: the system's]"]
    system_file: Annotated[
        Annotated[Path, SourceFile("system")] | None,
        "System file of `planner calibrate`.",
        Option("--system"),
    ]

    def system(self) -> System:
        """Return the GPUs and their links."""
        from perseus_planner.extensions.explore.operations import load_system, system_of

        if self.system_file is not None:
            system = load_system(self.system_file)
            if self.gpu is not None and self.gpu.removeprefix("simulated:") != system.gpu.name:
                raise UsageError(
                    f"--gpu: is {self.gpu}, but {self.system_file} is of {system.gpu.name}; leave "
                    "it out"
                )
            return system
        if self.gpu is None:
            raise UsageError(
                "--gpu: is missing; give the kind of GPU, such as h100-sxm, or a system with "
                "--system"
            )
        return system_of(self.gpu)


@dataclass(frozen=True)
class _Pipeline:
    """The pipeline to estimate."""

    stages: Annotated[
        int | None,
        "Number of pipeline stages, which share the layers evenly.",
        Option(metavar="S"),
    ]
    layers: Annotated[Counts | None, "Number of layers of each stage, instead of --stages."]
    layout: Annotated[
        str | None,
        "What each stage holds, as engines write it: 'Et*3|(t*4|)*2t*3L'; or, with --stages, "
        "first=7,last=5, account=loss or less=1+1.",
        Option(metavar="LAYOUT"),
    ]
    tensor_parallel: Annotated[
        int | None, "GPUs of a stage.  [default: 1, or the file's]", Option(metavar="GPUS")
    ]
    microbatch: Annotated[
        int | None, "Sequences of a microbatch.  [default: 1, or the file's]", Option(metavar="B")
    ]
    sequence: _Sequence
    recompute: Annotated[
        str | None,
        "none, selective or full.  [default: none, or the file's]",
        Option(metavar="WHAT"),
    ]
    attention: Annotated[
        str | None,
        "plain, flash, or flash-causal, which skips masked pairs.  [default: flash-causal, or the "
        "file's]",
        Option(metavar="KIND"),
    ]
    link: Annotated[
        float | None,
        "Bandwidth between the GPUs of a tensor group; inf for none.  [default: the GPU's]",
        Option(metavar="GB/S"),
    ]

    def of(self, model: str) -> Configuration:
        """Return the pipeline of a model."""
        from perseus_planner.extensions.explore.configuration import Configuration
        from perseus_planner.extensions.explore.transformer import check_split
        from perseus_planner.schedules.layouts import read_layout

        transformer = _changed(
            model,
            tensor_degree=self.tensor_parallel,
            microbatch=self.microbatch,
            sequence=self.sequence,
            recomputation=self.recompute,
            attention=self.attention,
        )
        # A layout names the modules of each stage, so it says the layers too.
        if self.layout is not None:
            if self.layers is not None:
                raise UsageError("--layers: says what --layout says; give one of them")
            layout = read_layout(self.layout, layers=transformer.layers, stages=self.stages)
            predictions = layout.predictions if any(layout.predictions) else ()
            return Configuration(transformer, layout.layers, 1, 1, predictions=predictions)
        # Stages are shared evenly, or their layers are given; both could contradict each other.
        if (self.stages is None) == (self.layers is None):
            raise UsageError(
                "give either --stages, the number of stages, --layers, the layers of each, or "
                "--layout"
            )
        return Configuration(
            transformer, check_split(transformer, self.layers or self.stages or 0), 1, 1
        )


@command(
    "planner estimate --model gpt3-175b --gpu a100-sxm --stages 8 --tensor-parallel 8 -o "
    "estimated.yaml",
    "planner estimate --model bloom-176b --gpu a40 --layers 9,9,9,9,9,9,9,7 --tensor-parallel "
    "8 -o estimated.yaml",
    "planner estimate --model llama3-8b --gpu h100-sxm --layout 'Et*8|(t*9|)*2t*6L' -o "
    "estimated.yaml",
    "planner estimate --model mine.yaml --gpu h100-sxm --stages 4 --calibrate measured.yaml -o "
    "estimated.yaml",
)
def estimate(
    *,
    model: Annotated[
        _Model,
        "gpt3-1.3b, -2.7b, -6.7b, -13b, -175b, llama3-8b, -70b, -405b, bloom-176b, a YAML file of "
        "dimensions, or a "
        "config.json.",
    ],
    of: _System,
    pipeline: _Pipeline,
    power_limit_w: Annotated[
        Power | None, "Power limit of each GPU, e.g. 500W.  [default: the GPU's]"
    ],
    calibrate: Annotated[
        Annotated[Path, SourceFile("profile")] | None,
        "Measured profile of the same model.",
        Option(metavar="PROFILE"),
    ],
    split_backward: Annotated[
        bool, "Also estimate the gradients of inputs and of weights separately."
    ],
    output: Annotated[
        Path, output_file("the profile, with its table beside it as .csv,", ".yaml", ".yml")
    ],
) -> None:
    """Estimate the profile of a model without a GPU.

    The operations of every stage follow from the dimensions of the model, time and energy from a
    model of the GPU and its links, which you can calibrate with a measured profile, whose middle
    stage corrects all others. The profile is marked as simulated; `planner solve` reads it like any
    other.
    """
    from perseus_planner import Profile
    from perseus_planner.extensions.explore.calibration import calibration_of
    from perseus_planner.extensions.explore.calibration import estimate as estimating
    from perseus_planner.extensions.explore.operations import with_link
    from perseus_planner.extensions.explore.transformer import name_of
    from perseus_planner.extensions.explore.views import estimate_text, summarize_estimate

    refuse_same([Path(model)], output)
    system = of.system().limited(power_limit_w)
    job = pipeline.of(model)
    # A link that is given counts for the tensor group alone.
    if pipeline.link is not None:
        system = with_link(system, pipeline.link * 1e9)
    calibration = None
    if calibrate is not None:
        # Saving would overwrite what is to be read, or the table beside it.
        for target in (output, output.with_suffix(".csv")):
            refuse_same([calibrate, calibrate.with_suffix(".csv")], target)
        # A CSV does not contain the blocking power, so that of the GPU model is used.
        is_csv = calibrate.suffix.lower() == ".csv"
        measured = Profile.load(calibrate, system.gpu.blocking_power_w if is_csv else None)
        calibration = calibration_of(measured, job, system, str(calibrate))
    # B is the sum of I and W, so a split backward has rows of all three.
    kinds = "FBIW" if split_backward else "FB"
    profile = estimating(job, system, calibration, kinds=kinds)
    profile.save(output)
    summary = summarize_estimate(name_of(model), profile, job)
    files = [output, output.with_suffix(".csv")]
    console.report(summary, estimate_text(summary), files)


def _changed(model: str, **changes: object) -> Transformer:
    """Return the model of that name with the changes that are not None."""
    from perseus_planner.extensions.explore.transformer import named_transformer

    given = {name: value for name, value in changes.items() if value is not None}
    return replace(named_transformer(model), **given)  # type: ignore[arg-type]  # it checks them


@dataclass(frozen=True)
class _Gpus:
    """The GPUs to explore, and what may be chosen on them."""

    gpus: Annotated[Positive, "Number of GPUs."]
    batch: Annotated[Positive, "Sequences of an iteration.", Option(default=512)]
    sequence: _Sequence
    precision: Annotated[
        str | None,
        "bf16, fp16, fp8, mxfp8 or nvfp4.  [default: bf16, or the file's]",
        Option(metavar="TYPE"),
    ]
    attention: Annotated[
        str | None, "plain, flash or flash-causal.  [default: the model's]", Option(metavar="KIND")
    ]
    schedules: Annotated[
        tuple[str, ...],
        "Schedule to consider; can be given more than once.",
        Option("--schedule"),
    ]
    recomputations: Annotated[
        tuple[str, ...],
        "none, selective or full; can be given more than once.",
        Option("--recompute"),
    ]
    layout: Annotated[
        str | None,
        "Layout of your job, as engines write it, e.g. 'Et*3|(t*4|)*2t*3L': only pipelines that "
        "can have it are explored, and compared with it.  [default: even layers]",
        Option(metavar="LAYOUT"),
    ]

    def choices(self) -> Choices:
        """Return what may be chosen."""
        from perseus_planner.extensions.explore.candidates import RECOMPUTATIONS, SCHEDULES, Choices

        for option, words, explored in (
            ("--recompute", self.recomputations, RECOMPUTATIONS),
            ("--schedule", self.schedules, SCHEDULES),
        ):
            for word in words:
                if word not in explored:
                    choices = " or ".join(explored)
                    raise UsageError(f"{option}: {word!r} is not explored; give {choices}")
        return Choices(
            self.gpus,
            self.batch,
            self.recomputations or RECOMPUTATIONS,
            self.schedules or SCHEDULES,
            self.layout,
        )


@dataclass(frozen=True)
class _Goal:
    """What is best."""

    deadline_s: Annotated[Time | None, "The least energy with iterations of at most this time."]
    power_budget_w: Annotated[
        Power | None, "The fastest within this mean power of all GPUs, e.g. 30kW."
    ]
    least_energy: Annotated[bool, "The least energy for a token, however slow."]

    def objective(self) -> Objective:
        """Return it as an objective."""
        from perseus_planner.extensions.explore.objective import Objective

        bounds = (self.deadline_s, self.power_budget_w)
        if sum((*(bound is not None for bound in bounds), self.least_energy)) > 1:
            raise UsageError(
                "give one of --deadline, --power-budget and --least-energy, or none for the fastest"
            )
        return Objective(*bounds, self.least_energy)


@dataclass(frozen=True)
class _Run:
    """The whole run, and what it costs."""

    tokens: Annotated[
        Annotated[float, Quantity(units.TOKENS, "n")] | None,
        "Tokens of the whole run, e.g. 26B, for hours, kWh, cost and CO2e.",
    ]
    pue: Annotated[
        float,
        click.FloatRange(1.0),
        "Power usage effectiveness of the data center; assumed.",
        Option(default=1.2),
    ]
    price: Annotated[
        float, click.FloatRange(0.0), "Price of a kWh, in any currency.", Option(default=0.12)
    ]
    carbon: Annotated[
        Carbon, "Emissions of the grid per kWh, CO2e, e.g. 400g.", Option(default="400g")
    ]


@command(
    "planner explore gpt3-1.3b --gpus 8 --gpu a100-sxm --batch 64 -o explored.yaml",
    "planner explore mine.yaml --gpus 8 --system system.yaml --least-energy --tokens 1e12 -o "
    "found.yaml",
)
def explore(
    model: _Model,
    *,
    of: _System,
    job_gpus: _Gpus,
    goal: _Goal,
    power_limit_w: Annotated[Power | None, "Power limit of each GPU, e.g. 500W."],
    run: _Run,
    job: Annotated[
        int,
        click.IntRange(1, 3),
        "Which of the first three configurations to write.",
        Option(default=1),
    ],
    output: Annotated[
        Annotated[Path, OutputFile(".yaml", ".yml")] | None,
        "File to write: the job file of one of the first three configurations.",
        Option("--output", "-o"),
    ],
) -> None:
    """Find the configurations in which MODEL trains fastest, or with the least energy.

    MODEL is the name of a published model, a YAML file of dimensions, or a config.json of Hugging
    Face or its folder. Tensor, pipeline and data degree, microbatch, schedule, virtual stages,
    recomputation and the split of the layers are chosen; the result is the frontier of tokens per
    second and joules per token of whole jobs, at the best clocks of each. It is an estimate:
    measure the first three.
    """
    # These import what only this command needs.
    from perseus_planner.extensions.explore import views
    from perseus_planner.extensions.explore.explore import explore as exploring
    from perseus_planner.extensions.explore.transformer import name_of

    # Options change the model that is named before anything is computed.
    shape = _changed(
        model,
        sequence=job_gpus.sequence,
        precision=job_gpus.precision,
        attention=job_gpus.attention,
    )
    system = of.system().limited(power_limit_w)
    objective = goal.objective()
    with console.progress("Exploring") as update:
        explored = exploring(
            shape,
            system,
            job_gpus.choices(),
            objective,
            # Without a terminal there is no progress to show, but it is called all the same.
            update or (lambda solved, total: None),
        )
    result = views.exploration_view(name_of(model), job_gpus.gpus, explored, vars(run))
    written: list[Path] = []
    if output is not None:
        # Fewer than three may fit.
        count = len(explored.first)
        if job > count:
            found = "1 configuration is" if count == 1 else f"{count} configurations are"
            raise UsageError(
                f"--job: is {job}, but only {found} worth measuring; give "
                f"{' or '.join(map(str, range(1, count + 1)))}"
            )
        row = explored.first[job - 1]
        written += views.write_job(row, explored, output)
    console.report(result, views.exploration_text(result), written)


def measure_kernels_of(options: KernelOptions, output: Path | None) -> None:
    """Measure a layer, head and links of a model, and write a system file."""
    from perseus_planner.base.units import BANDWIDTH
    from perseus_planner.profiler.build import StageBuilder, require_torch

    require_torch()
    from perseus_planner.extensions.explore.kernels import measure_kernels
    from perseus_planner.extensions.explore.operations import (
        NUMBERS,
        save_system,
        system_of,
        system_view,
    )
    from perseus_planner.extensions.explore.transformer import named_transformer, shared_by
    from perseus_planner.extensions.explore.views import system_text
    from perseus_planner.profiler.ranks.group import process_group

    if options.gpu is None or output is None:
        raise UsageError(
            "--kernels: needs --gpu, the kind of GPU, and --output, the system file to write"
        )
    if options.recompute not in ("none", "full"):
        raise UsageError(f"--recompute: {options.recompute!r} is not measured; give none or full")
    system = system_of(options.gpu)
    shape = named_transformer(str(options.kernels))
    layer = None if options.layer is None else StageBuilder.load(options.layer).function
    if layer is None:
        _refuse_unlike_default(shape)
    if options.node_bandwidth is not None:
        system = replace(
            system,
            node_bytes_per_s=1e9
            * BANDWIDTH.check(options.node_bandwidth, "--node-bandwidth", UsageError),
        )
    with process_group() as group:
        import torch

        rank, ranks = group or (0, 1)
        degrees = _degrees(options.tensor_parallel, ranks)
        if rank == 0 and not torch.cuda.is_available():
            click.echo(
                "planner: torch finds no GPU, so processors are measured, which may take hours",
                err=True,
            )
        # Sorted, so that all ranks measure the same shapes in one order, as they meet in each.
        shapes = [
            shared_by(shape, degree, microbatch=size, recomputation=options.recompute)
            for degree in degrees
            for size in sorted(set(options.microbatch))
        ]
        system = measure_kernels(shapes, system, layer)
        # All ranks measure, and one of them writes.
        if rank:
            return
    usual = system_of(options.gpu)
    # Only what differs from the catalogue was measured, and the file holds nothing else.
    names = tuple(name for name in NUMBERS if getattr(system, name) != getattr(usual, name))
    save_system(system, output, names)
    view = system_view(system, names)
    console.report(view, system_text(view), [output])


def _refuse_unlike_default(shape: Transformer) -> None:
    """Refuse a model of which the layer that is measured by default is none."""
    # The layer that is measured by default has none of these, so its times would be of another
    # model.
    for name, measured in (("precision", "bf16"), ("experts", 0), ("kv_latent", 0), ("window", 0)):
        if getattr(shape, name) != measured:
            raise UsageError(
                f"--kernels: {name} of {getattr(shape, name)} is not measured; give a model with "
                f"{name} of {measured}, or your own layer with --layer"
            )


def _degrees(given: Sequence[int] | None, ranks: int) -> list[int]:
    """Return the degrees of tensor parallelism to measure on so many ranks, in order."""
    # By default the node as one group is measured, and a single GPU.
    degrees = {1, ranks} if given is None else set(given)
    for degree in degrees:
        if ranks % degree:
            raise UsageError(
                f"--tensor-parallel: {degree} GPUs do not divide the {ranks} ranks; start "
                f"{degree} with torchrun --nproc-per-node {degree}"
            )
    return sorted(degrees)
