"""`planner estimate`, `planner explore` and `planner calibrate --kernels`: a profile, the best
configuration, or the speed of kernels of a model.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.estimate.candidates import Choices
    from perseus_planner.estimate.estimate import StageCalibration, TransformerPipeline
    from perseus_planner.estimate.explore import Objective
    from perseus_planner.estimate.system import System


def _model_names() -> list[str]:
    from perseus_planner.estimate.transformer import PRESETS

    return list(PRESETS)


@click.command(
    epilog=console.examples(
        "planner estimate --model gpt3-175b --gpu a100-sxm --stages 8 --tensor-parallel 8 -o "
        "estimated.yaml",
        "planner estimate --model bloom-176b --gpu a40 --layers 9,9,9,9,9,9,9,7 --tensor-parallel "
        "8 -o estimated.yaml",
        "planner estimate --model mine.yaml --gpu h100-sxm --stages 4 --calibrate measured.yaml -o "
        "estimated.yaml",
    )
)
@click.option(
    "--model",
    required=True,
    metavar="MODEL",
    shell_complete=console.complete(_model_names),
    help="gpt3-1.3b, -2.7b, -6.7b, -13b, -175b, llama3-8b, -70b, -405b, bloom-176b, a YAML file of "
    "dimensions, or a "
    "config.json.",
)
@click.option(
    "--gpu",
    required=True,
    metavar="GPU",
    shell_complete=console.complete(console.chip_names),
    help="Kind of GPU, e.g. a100-sxm or h100-sxm.",
)
@click.option(
    "--stages",
    type=int,
    metavar="S",
    help="Number of pipeline stages, which share the layers evenly.",
)
@click.option(
    "--layers",
    type=console.Listed("COUNT", "n"),
    help="Number of layers of each stage, instead of --stages.",
)
@click.option(
    "--tensor-parallel",
    type=int,
    metavar="GPUS",
    help="GPUs of a stage.  [default: 1, or the file's]",
)
@click.option(
    "--microbatch",
    type=int,
    metavar="B",
    help="Sequences of a microbatch.  [default: 1, or the file's]",
)
@click.option(
    "--sequence", type=int, metavar="TOKENS", help="Tokens of a sequence.  [default: the model's]"
)
@click.option(
    "--recompute", metavar="WHAT", help="none, selective or full.  [default: none, or the file's]"
)
@click.option(
    "--attention",
    metavar="KIND",
    help="plain, flash, or flash-causal, which skips masked pairs.  [default: flash-causal, or the "
    "file's]",
)
@click.option(
    "--link",
    type=float,
    metavar="GB/S",
    help="Bandwidth between the GPUs of a tensor group; inf for none.  [default: the GPU's]",
)
@click.option(
    "--power-limit",
    type=console.POWER,
    help="Power limit of each GPU, e.g. 500W.  [default: the GPU's]",
)
@click.option(
    "--calibrate",
    multiple=True,
    metavar="PROFILE",
    help="Measured profile of the same model; PROFILE@TOKENS if its sequences had another length. "
    "Can be given twice, "
    "for two lengths.",
)
@click.option(
    "--calibrate-stage",
    type=int,
    metavar="STAGE",
    help="Stage of that profile to use; if it has one stage, the number of that stage.  [default: "
    "in the middle]",
)
@click.option(
    "--split-backward",
    is_flag=True,
    help="Also estimate the gradients of inputs and of weights separately.",
)
@console.output("the profile, with its table beside it, .csv;", ".yaml", ".yml")
@console.as_json
def estimate(
    gpu: str,
    power_limit: float | None,
    calibrate: tuple[str, ...],
    calibrate_stage: int | None,
    output: Path,
    **rest: Any,
) -> None:
    """Estimate the profile of a model without a GPU.

    The operations of every stage follow from the dimensions of the model, time and energy from a
    model of the GPU and its links, which you can calibrate with one measured stage. The profile is
    marked as simulated; `planner solve` reads it like any other.
    """
    from perseus_planner.estimate import estimate as estimating
    from perseus_planner.estimate.system import system_of
    from perseus_planner.estimate.views import estimate_text, summarize_estimate

    as_json, split_backward = rest.pop("as_json"), rest.pop("split_backward")
    console.refuse_same([Path(rest["model"])], output)
    system, pipeline = system_of(gpu).limited(power_limit), _pipeline(**rest)
    if calibrate_stage is not None and not calibrate:
        raise UsageError("--calibrate-stage: works only with --calibrate; give both or neither")
    calibrations = [
        _calibration(text, calibrate_stage, pipeline, system, output) for text in calibrate
    ]
    profile = estimating.estimate(pipeline, system, calibrations, split_backward=split_backward)
    profile.save(output)
    summary = summarize_estimate(
        profile, pipeline, [calibration.source for calibration in calibrations]
    )
    console.report(
        summary, estimate_text(summary), [output, output.with_suffix(".csv")], as_json=as_json
    )


def _pipeline(
    model: str,
    stages: int | None,
    layers: tuple[int, ...] | None,
    link: float | None,
    recompute: str | None,
    **others: Any,
) -> TransformerPipeline:
    from perseus_planner.estimate.estimate import TransformerPipeline
    from perseus_planner.estimate.transformer import check_split, name_of, named_transformer

    others["tensor_degree"], others["recomputation"] = others.pop("tensor_parallel"), recompute
    transformer = replace(
        named_transformer(model),
        **{name: value for name, value in others.items() if value is not None},
    )
    if (stages is None) == (layers is None):
        raise UsageError(
            "give either --stages, the number of stages, or --layers, the layers of each"
        )
    split = check_split(transformer, layers or stages or 0)
    return TransformerPipeline(
        name_of(model), transformer, split, None if link is None else link * 1e9
    )


def _calibration(
    text: str, stage: int | None, pipeline: TransformerPipeline, system: System, output: Path
) -> StageCalibration:
    from perseus_planner.estimate.estimate import stage_calibration
    from perseus_planner.profiles.profiles import Profile

    path, tokens = _split_tokens(text)
    for target in (output, output.with_suffix(".csv")):
        console.refuse_same([path, path.with_suffix(".csv")], target)
    if tokens is not None:
        pipeline = replace(pipeline, transformer=replace(pipeline.transformer, sequence=tokens))
    # A CSV does not contain the blocking power, so that of the GPU model is used.
    power_w = system.gpu.blocking_power_w if path.suffix.lower() == ".csv" else None
    return stage_calibration(Profile.load(path, power_w), pipeline, system, stage, str(path))


def _split_tokens(text: str) -> tuple[Path, int | None]:
    """Split `PROFILE@TOKENS` into the file and the tokens, if any."""
    name, at, tokens = text.rpartition("@")
    if at and tokens.isascii() and tokens.isdecimal():
        return Path(name), int(tokens)
    return Path(text), None


@click.command(
    epilog=console.examples(
        "planner explore gpt3-1.3b --gpus 8 --gpu a100-sxm --batch 64 --plot explored.png",
        "planner explore mine.yaml --gpus 8 --system system.yaml --least-energy --tokens 1e12 -o "
        "found.yaml",
    )
)
@click.argument("model", metavar="MODEL", shell_complete=console.complete(_model_names))
@click.option("--gpus", type=click.IntRange(1), required=True, metavar="N", help="Number of GPUs.")
@click.option(
    "--gpu",
    metavar="GPU",
    shell_complete=console.complete(console.chip_names),
    help="Kind of GPU, e.g. a100-sxm or h100-sxm.  [default: the system's]",
)
@click.option(
    "--system", "system_file", type=console.PATH, help="System file of `planner calibrate`."
)
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Sequences of an iteration.",
)
@click.option(
    "--sequence", type=int, metavar="TOKENS", help="Tokens of a sequence.  [default: the model's]"
)
@click.option(
    "--precision", metavar="TYPE", help="bf16, fp16 or fp8.  [default: bf16, or the file's]"
)
@click.option(
    "--attention", metavar="KIND", help="plain, flash or flash-causal.  [default: the model's]"
)
@click.option(
    "--schedule",
    "schedules",
    multiple=True,
    help="Schedule to consider; can be given more than once.",
)
@click.option(
    "--recompute",
    "recomputations",
    multiple=True,
    help="none, selective or full; can be given more than once.",
)
@click.option("--deadline", type=console.TIME, help="Least energy with iterations of that time.")
@click.option(
    "--power-budget",
    type=console.POWER,
    help="The fastest within that mean power of all GPUs, e.g. 30kW.",
)
@click.option("--least-energy", is_flag=True, help="Least energy for a token, however slow.")
@click.option("--power-limit", type=console.POWER, help="Power limit of each GPU, e.g. 500W.")
@click.option(
    "--tokens",
    type=console.Quantity("TOKENS", "n"),
    help="Tokens of the whole run, e.g. 26B, for hours, kWh, cost and CO2e.",
)
@click.option(
    "--pue",
    type=click.FloatRange(1.0),
    default=1.2,
    show_default=True,
    help="Of the data center; assumed.",
)
@click.option(
    "--price",
    type=click.FloatRange(0.0),
    default=0.10,
    show_default=True,
    help="Of a kWh, in any currency.",
)
@click.option(
    "--carbon",
    type=click.FloatRange(0.0),
    default=400.0,
    show_default=True,
    help="g CO2e of a kWh.",
)
@click.option("--plot", type=console.OutputFile(), help="Write a figure.")
@click.option(
    "--job",
    type=click.IntRange(1, 3),
    default=1,
    show_default=True,
    help="Which of the first three to write.",
)
@click.option(
    "--output", "-o", type=console.OutputFile(".yaml", ".yml"), help="Write its job.yaml."
)
@console.as_json
def explore(
    model: str, gpus: int, gpu: str | None, system_file: Path | None, as_json: bool, **options: Any
) -> None:
    """Find the configurations in which MODEL trains fastest, or with the least energy.

    MODEL is the name of a published model, a YAML file of dimensions, or a config.json of Hugging
    Face or its folder. Tensor, pipeline and data degree, microbatch, schedule, virtual stages,
    recomputation and the split of the layers are chosen; the result is the frontier of tokens per
    second and joules per token of whole jobs, at the best clocks of each. It is an estimate:
    measure the first three.
    """
    from perseus_planner.estimate import views
    from perseus_planner.estimate.explore import Prices
    from perseus_planner.estimate.explore import explore as exploring
    from perseus_planner.estimate.transformer import name_of, named_transformer
    from perseus_planner.views.figures import check_figure_path, save_figure

    plot, output = options["plot"], options["output"]
    if plot is not None:
        check_figure_path(plot, "--plot")
    changes = {
        key: options[key]
        for key in ("sequence", "precision", "attention")
        if options[key] is not None
    }
    shape = replace(named_transformer(model), **changes)
    system, objective = (
        _system(gpu, system_file).limited(options["power_limit"]),
        _objective(options),
    )
    with console.progress("Exploring"):
        found = exploring(shape, system, _choices(gpus, options), objective)
    prices = Prices(options["pue"], options["price"], options["carbon"])
    result = views.exploration_view(name_of(model), found, options["tokens"], prices)
    written: list[Path] = []
    if plot is not None:
        save_figure(views.exploration_figure(result), plot)
        written.append(plot)
    if output is not None:
        written += views.write_job(
            found.first[min(options["job"], len(found.first)) - 1], found, output
        )
    console.report(result, views.exploration_text(result), written, as_json=as_json)


def _system(gpu: str | None, path: Path | None) -> System:
    from perseus_planner.estimate.system import load_system, system_of

    if path is not None:
        system = load_system(path)
        if gpu is not None and gpu.removeprefix("simulated:") != system.gpu.name:
            raise UsageError(f"--gpu: is {gpu}, but {path} is of {system.gpu.name}; leave it out")
        return system
    if gpu is None:
        raise UsageError(
            "--gpu: is missing; give the kind of GPU, such as h100-sxm, or a system with --system"
        )
    return system_of(gpu)


def _objective(options: dict[str, Any]) -> Objective:
    from perseus_planner.estimate.explore import Objective

    deadline_s, power_w, least = (
        options["deadline"],
        options["power_budget"],
        options["least_energy"],
    )
    if sum((deadline_s is not None, power_w is not None, least)) > 1:
        raise UsageError(
            "give one of --deadline, --power-budget and --least-energy, or none for the fastest"
        )
    return Objective(deadline_s, power_w, least)


def _choices(gpus: int, options: dict[str, Any]) -> Choices:
    from perseus_planner.estimate.candidates import RECOMPUTATIONS, SCHEDULES, Choices

    return Choices(
        gpus,
        options["batch"],
        _known("--recompute", options["recomputations"], RECOMPUTATIONS),
        _known("--schedule", options["schedules"], SCHEDULES),
    )


def _known(option: str, given: tuple[str, ...], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return what was given, all of which must be known; everything if nothing was given."""
    for word in given:
        if word not in known:
            raise UsageError(f"{option}: {word!r} is not explored; give {' or '.join(known)}")
    return given or known


def measure_kernels_of(
    model: str,
    *,
    gpu: str | None,
    microbatch: tuple[int, ...],
    tensor_parallel: tuple[int, ...] | None,
    recompute: str,
    node_bandwidth: float | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure a layer, head and links of a model, and write a system file; the arguments are the
    options.
    """
    from perseus_planner.base.units import TIME
    from perseus_planner.estimate.kernels import KernelPlan, measure_kernels, measured_names
    from perseus_planner.estimate.system import save_system, system_of, system_view
    from perseus_planner.estimate.transformer import named_transformer
    from perseus_planner.estimate.views import system_text
    from perseus_planner.profiler.ranks.group import process_group

    if gpu is None or output is None:
        raise UsageError(
            "--kernels: needs --gpu, the kind of GPU, and --output, the system file to write"
        )
    if recompute not in ("none", "full"):
        raise UsageError(f"--recompute: {recompute!r} is not measured; give none or full")
    system, shape = system_of(gpu), named_transformer(model)
    if node_bandwidth is not None:
        system = replace(
            system,
            node_bytes_per_s=1e9 * TIME.check(node_bandwidth, "--node-bandwidth", UsageError),
        )
    with process_group() as group:
        import torch

        rank, ranks = group or (0, 1)
        degrees = {1, ranks} if tensor_parallel is None else set(tensor_parallel)
        for degree in degrees:
            if ranks % degree:
                raise UsageError(
                    f"--tensor-parallel: {degree} GPUs do not divide the {ranks} ranks; start "
                    f"{degree} with torchrun --nproc-per-node {degree}"
                )
        if rank == 0 and not torch.cuda.is_available():
            click.echo(
                "planner: torch finds no GPU: processors are measured, which may take hours",
                err=True,
            )
        shapes = [
            replace(shape, tensor_degree=degree, microbatch=size, recomputation=recompute)
            for degree in sorted(degrees)
            for size in sorted(set(microbatch))
        ]
        system = measure_kernels(KernelPlan(shapes), system)
        if rank:
            return
    names = (*measured_names(ranks), *(() if node_bandwidth is None else ("node_bytes_per_s",)))
    save_system(system, output, names)
    view = system_view(system, names)
    console.report(view, system_text(view), [output], as_json=as_json)
