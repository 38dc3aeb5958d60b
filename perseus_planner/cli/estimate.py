"""`planner estimate`: a profile from the dimensions of a model, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.estimate.calibration import StageCalibration
    from perseus_planner.estimate.op_costs import TransformerPipeline
    from perseus_planner.estimate.system import System


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
    shell_complete=console.complete(console.model_names),
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
    from perseus_planner.views.estimate import estimate_text, summarize_estimate

    as_json, split_backward = rest.pop("as_json"), rest.pop("split_backward")
    console.refuse_same([Path(rest["model"])], output)
    system, pipeline = _system(gpu, power_limit), _pipeline(**rest)
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


def _system(gpu: str, power_limit_w: float | None) -> System:
    from perseus_planner.estimate.system import system_of

    return system_of(gpu).limited(power_limit_w)


def _pipeline(
    model: str,
    stages: int | None,
    layers: tuple[int, ...] | None,
    link: float | None,
    recompute: str | None,
    **others: Any,
) -> TransformerPipeline:
    from perseus_planner.estimate.op_costs import TransformerPipeline
    from perseus_planner.estimate.presets import name_of, named_transformer
    from perseus_planner.estimate.transformer import check_split

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
    from perseus_planner.estimate.calibration import stage_calibration
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
