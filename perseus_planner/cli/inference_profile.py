"""`planner inference profile`: what requests to a server or a function cost, over clocks or
power limits.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.profiler.serving import ServedRow, Shape


def _shapes(
    _: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[Shape, ...]:
    from perseus_planner.base.units import COUNT
    from perseus_planner.profiler.serving import Shape

    shapes = []
    for text in texts:
        given, _slash, wanted = text.partition("/")
        tokens = COUNT.parse(given), COUNT.parse(wanted)
        if None in tokens:
            raise UsageError(
                f"{parameter.opts[0]}: {text!r} is not a class; write input/output tokens, as "
                "256/100"
            )
        shapes.append(Shape(*tokens))
    return tuple(shapes)


@click.command(
    epilog=console.examples(
        "planner inference profile http://127.0.0.1:8000/v1 --gpu nvml:0 --class 256/100 --class "
        "1024/350 --batch 1,8 -o inference.csv",
        "planner inference profile serving:generate --gpu nvml:0 --class 256/100 --at "
        "1980,1590,1200 -o inference.csv",
    )
)
@click.argument("target")
@click.option(
    "--gpu",
    "gpus",
    multiple=True,
    required=True,
    metavar="GPU",
    help="GPU that it runs on; repeat it for several.",
)
@click.option(
    "--class",
    "shapes",
    multiple=True,
    required=True,
    metavar="IN/OUT",
    callback=_shapes,
    help="Class of requests: input and output tokens; repeat it for several.",
)
@click.option(
    "--batch",
    "batches",
    default="1",
    show_default=True,
    type=console.Listed("COUNT", "n"),
    help="Requests at once.",
)
@click.option(
    "--control",
    type=click.Choice(["clock", "power-limit", "observed"]),
    default="clock",
    show_default=True,
    help="What is set; observed sets nothing.",
)
@click.option(
    "--at",
    "settings",
    default=(),
    type=console.Listed("COUNT", "n"),
    help="Clocks in MHz, or power limits in W.  [default: six, down to 40 % of the highest]",
)
@click.option(
    "--window", default="10s", show_default=True, type=console.TIME, help="Least time of a window."
)
@click.option(
    "--windows",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    metavar="N",
    help="Windows a row.",
)
@click.option("--model", metavar="NAME", help="Model of the server.  [default: its first]")
@console.output("inference profile", ".csv")
@console.as_json
def profile(
    target: str,
    gpus: tuple[str, ...],
    shapes: tuple[Shape, ...],
    batches: tuple[int, ...],
    control: str,
    settings: tuple[int, ...],
    window: float,
    windows: int,
    model: str | None,
    output: Path,
    as_json: bool,
) -> None:
    """Measure what requests cost at several clocks: energy, throughput and latency, prefill and
    decode apart.

    TARGET is the address of a server on this machine that speaks OpenAI's completions API, or
    module:function for a function f(batch, input_tokens, output_tokens) that yields after each
    token.
    """
    from perseus_planner.gpu import open_gpu
    from perseus_planner.profiler.serving import ServingSettings, measure_serving, save_served
    from perseus_planner.profiler.serving_targets import open_target

    sys.path.insert(0, "")
    chosen = ServingSettings(shapes, batches, control, settings, window, windows)
    with ExitStack() as stack:
        opened = [stack.enter_context(open_gpu(text)) for text in gpus]
        served = stack.enter_context(closing(open_target(target, model)))
        rows = measure_serving(
            served, opened, chosen, stack.enter_context(console.progress("Measuring"))
        )
        origin = opened[0].origin
    save_served(rows, control, origin, output)
    summary = {"origin": origin, "control": control, "rows": [asdict(row) for row in rows]}
    console.report(summary, _text(rows, control, origin), [output], as_json=as_json)


def _text(rows: list[ServedRow], control: str, origin: str) -> str:
    from perseus_planner.base import tables as columns

    unit = "W" if control == "power-limit" else "MHz"
    cells = [
        [
            "{}/{}".format(*row.shape),
            str(row.batch),
            str(row.setting),
            f"{row.energy_j:.4g}",
            f"{row.error_j:.2g}",
            f"{row.input_token_j:.4g}",
            "-" if row.output_token_j is None else f"{row.output_token_j:.4g}",
            f"{row.tokens_per_j:.4g}",
            f"{row.tokens_per_s:.4g}",
            f"{1e3 * row.ttft_p50_s:.4g}",
            f"{1e3 * row.ttft_p95_s:.4g}",
            "-" if row.tbt_p50_s is None else f"{1e3 * row.tbt_p50_s:.4g}",
            "-" if row.tbt_p95_s is None else f"{1e3 * row.tbt_p95_s:.4g}",
        ]
        for row in rows
    ]
    heads = (
        *(
            "class",
            "batch",
            unit,
            "J/request",
            "+- J",
            "J/input token",
            "J/output token",
            "tokens/J",
            "tokens/s",
        ),
        *("TTFT p50 (ms)", "p95", "TBT p50 (ms)", "p95"),
    )
    table = columns.table(
        [columns.column(head, cells) for head, *cells in zip(heads, *cells, strict=True)]
    )
    gpus = rows[0].tensor_degree
    return (
        f"Requests on {gpus} GPU{'s' * (gpus > 1)}, {origin}; tokens/J is also tokens/s per "
        f"W\n\n{table}\n"
    )
