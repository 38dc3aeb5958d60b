"""`planner explore`: which configuration to train a model in, by time and energy, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.estimate.candidates import Choices
    from perseus_planner.estimate.explore import Objective
    from perseus_planner.estimate.system import System


@click.command(
    epilog=console.examples(
        "planner explore gpt3-1.3b --gpus 8 --gpu a100-sxm --batch 64 --plot explored.png",
        "planner explore mine.yaml --gpus 8 --system system.yaml --least-energy --tokens 1e12 -o "
        "found.yaml",
    )
)
@click.argument("model", metavar="MODEL", shell_complete=console.complete(console.model_names))
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
    from perseus_planner.estimate.explore import explore as exploring
    from perseus_planner.estimate.forecast import Prices
    from perseus_planner.estimate.presets import name_of, named_transformer
    from perseus_planner.views import exploration as view
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
    result = view.exploration_view(name_of(model), found, options["tokens"], prices)
    written: list[Path] = []
    if plot is not None:
        save_figure(view.exploration_figure(result), plot)
        written.append(plot)
    if output is not None:
        written += view.write_job(
            found.first[min(options["job"], len(found.first)) - 1], found, output
        )
    console.report(result, view.exploration_text(result), written, as_json=as_json)


def _system(gpu: str | None, path: Path | None) -> System:
    from perseus_planner.estimate.system import system_of
    from perseus_planner.estimate.system_file import load_system

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
