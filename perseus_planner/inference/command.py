"""`planner inference`: what requests cost, and pools of servers that need the least energy within
latency objectives.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base.errors import UsageError
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.inference.cells import InferenceProfile
    from perseus_planner.inference.programme import ChangeCosts
    from perseus_planner.inference.serving import ServedRow, Shape


@click.group(
    epilog=console.examples(
        "planner inference plan inference.csv --rates rates.csv --gpus 64 -o pools.yaml",
        "planner inference plan inference.csv --trace trace.csv --gpus 64 -o pools.yaml",
        "planner inference simulate inference.csv trace.csv --gpus 64 --plot replay.png",
    )
)
def inference() -> None:
    """Plan pools of servers for inference, and replay traces: the least energy within latency
    objectives.
    """


def _shapes(
    _: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> tuple[Shape, ...]:
    from perseus_planner.base.units import COUNT
    from perseus_planner.inference.serving import Shape

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


@inference.command(
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
    from perseus_planner.inference.serving import ServingSettings, measure_serving, save_served
    from perseus_planner.inference.targets import open_target

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
    from perseus_planner.base.tables import Column, lay_out, table

    columns = lay_out(
        rows,
        Column("class", lambda row: "{}/{}".format(*row.shape)),
        Column("batch", "batch"),
        Column("W" if control == "power-limit" else "MHz", "setting"),
        Column("J/request", "energy_j", ".4g"),
        Column("+- J", "error_j", ".2g"),
        Column("J/input token", "input_token_j", ".4g"),
        Column("J/output token", "output_token_j", ".4g"),
        Column("tokens/J", "tokens_per_j", ".4g"),
        Column("tokens/s", "tokens_per_s", ".4g"),
        Column("TTFT p50 (ms)", lambda row: 1e3 * row.ttft_p50_s, ".4g"),
        Column("p95", lambda row: 1e3 * row.ttft_p95_s, ".4g"),
        Column("TBT p50 (ms)", lambda row: row.tbt_p50_s and 1e3 * row.tbt_p50_s, ".4g"),
        Column("p95", lambda row: row.tbt_p95_s and 1e3 * row.tbt_p95_s, ".4g"),
    )
    gpus = rows[0].tensor_degree
    return (
        f"Requests on {gpus} GPU{'s' * (gpus > 1)}, {origin}; tokens/J is also tokens/s per "
        f"W\n\n{table(columns)}\n"
    )


def _bounds(
    _: click.Context, parameter: click.Parameter, bounds: tuple[int, ...]
) -> tuple[int, ...]:
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        text = ",".join(map(str, bounds))
        name = parameter.opts[0]
        raise UsageError(
            f"{name}: {text!r} are not the most tokens of short and medium; write two, such as "
            "256,1024"
        )
    return bounds


def _quantity(
    name: str, default: str, text: str, rule: console.Quantity = console.TIME
) -> Callable[[Any], Any]:
    return click.option(name, default=default, show_default=True, type=rule, help=text)


def _tokens(name: str, default: str, text: str) -> Callable[[Any], Any]:
    counts = console.Listed("COUNT", "tokens")
    return click.option(
        name, default=default, show_default=True, type=counts, callback=_bounds, help=text
    )


_OPTIONS = (
    click.option(
        "--gpus", type=click.IntRange(1), required=True, metavar="N", help="Number of GPUs."
    ),
    click.option(
        "--ttft",
        type=console.Listed("DURATION", "time"),
        default=(),
        help="Most time to the first token, one for each input class, e.g. 250ms,400ms,2s.  "
        "[default: DynamoLLM's]",
    ),
    _quantity("--tbt", "100ms", "Most time between tokens."),
    _tokens("--input-bounds", "256,1024", "Most input tokens of the classes short and medium."),
    _tokens("--output-bounds", "100,350", "Most output tokens of the classes short and medium."),
    click.option(
        "--load",
        type=click.FloatRange(0, min_open=True),
        default=2000.0,
        show_default=True,
        metavar="TOKENS/S",
        help="Load of an instance in profiles without the column tokens_per_s.",
    ),
    _quantity("--new-instance", "423s", "Time until a new instance serves.", console.LAG),
    _quantity(
        "--resharding",
        "33s",
        "Time until an instance of another tensor degree serves.",
        console.LAG,
    ),
    _quantity("--clock-change", "50ms", "Time of a clock change.", console.LAG),
    _quantity(
        "--change-power", "100W", "Power of each GPU while it changes.", console.BLOCKING_POWER
    ),
)


def _with_options(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def _profile_and_costs(path: Path, options: dict[str, Any]) -> tuple[InferenceProfile, ChangeCosts]:
    from perseus_planner.inference.cells import Objectives, read_inference_profile
    from perseus_planner.inference.programme import Change, ChangeCosts

    times_s = [options[name] for name in ("new_instance", "resharding", "clock_change")]
    costs = ChangeCosts(*(Change(time_s, time_s * options["change_power"]) for time_s in times_s))
    profile = read_inference_profile(
        path,
        Objectives(options["ttft"], options["tbt"]),
        input_bounds=options["input_bounds"],
        output_bounds=options["output_bounds"],
        load_tokens_per_s=options["load"],
    )
    return profile, costs


def _warn(profile: InferenceProfile, path: Path, load: float) -> None:
    if profile.assumed_load:
        click.echo(
            f"planner: {path} has no column tokens_per_s: its load is taken for {load:g}", err=True
        )


@inference.command()
@click.argument("profile", type=console.PATH)
@click.option(
    "--trace", type=console.PATH, help="CSV of requests, e.g. an Azure LLM inference trace."
)
@click.option("--rates", type=console.PATH, help="CSV with the requests and tokens of each class.")
@_quantity("--epoch", "30min", "How long pools stay as they are.")
@_with_options
@console.output("the plan", ".yaml", ".yml")
@console.as_json
def plan(
    profile: Path,
    trace: Path | None,
    rates: Path | None,
    epoch: float,
    output: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Choose instances, tensor degree and clock of the pools that serve each class of requests.

    PROFILE is a CSV with the columns input, output, tensor_degree, clock_mhz (or power_limit_w) and
    energy_j (or energy_wh) of one request, empty where the latency objective is violated. Give a
    --trace or --rates.
    """
    from perseus_planner.inference.plan import make_plan
    from perseus_planner.inference.views import plan_text, plan_view
    from perseus_planner.inference.workload import periods_of, read_rates, read_trace

    if (trace is None) == (rates is None):
        raise UsageError("give one of --trace and --rates")
    console.refuse_same(filter(None, (profile, trace, rates)), output)
    measured, costs = _profile_and_costs(profile, options)
    if trace is not None:
        periods = periods_of(read_trace(trace), measured, epoch)
    elif rates is not None:
        periods = [(0.0, epoch, read_rates(rates, measured))]
    with console.progress("Planning"):
        made = make_plan(measured, periods, options["gpus"], costs)
    made.save(output)
    view = plan_view(made)
    _warn(measured, profile, options["load"])
    console.report(view, plan_text(view), [output], as_json=as_json)


@inference.command()
@click.argument("profile", type=console.PATH)
@click.argument("trace", type=console.PATH)
@click.option(
    "--prediction",
    type=click.Choice(["last", "perfect"]),
    default="last",
    show_default=True,
    help="What a period is predicted from: the one before, or itself.",
)
@_quantity(
    "--mispredicted",
    "0%",
    "Share of requests whose output is predicted one class too long or too short.",
    console.Quantity("TOLERANCE", "percent"),
)
@_quantity("--burst", "60s", "Over how long the load of an instance may be averaged.", console.LAG)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="highest, clock, degree, hierarchical or planner; can be repeated.  [default: all]",
)
@click.option("--plot", type=console.OutputFile(), help="Write a figure.")
@_with_options
@console.as_json
def simulate(
    profile: Path,
    trace: Path,
    policies: tuple[str, ...],
    plot: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Replay a trace through pools that are planned again and again.

    PROFILE is that of `planner inference plan`, TRACE a CSV of requests. The policy highest is
    always included as the baseline of the others.
    """
    from perseus_planner.base.errors import InfeasibleGpus
    from perseus_planner.inference import views
    from perseus_planner.inference.plan import BASELINE, POLICIES
    from perseus_planner.inference.simulation import Settings, replay
    from perseus_planner.inference.workload import read_trace
    from perseus_planner.views.figures import check_figure_path, save_figure

    if plot is not None:
        check_figure_path(plot, "--plot")
        console.refuse_same((profile, trace), plot, "--plot")
    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"--policy: {name!r} is none; give {', '.join(POLICIES)}")
    measured, costs = _profile_and_costs(profile, options)
    settings = Settings(
        gpus=options["gpus"],
        costs=costs,
        prediction=options["prediction"],
        mispredicted=options["mispredicted"],
        burst_s=options["burst"],
    )
    requests, replays, left_out = read_trace(trace), [], list[str]()
    with console.progress("Replaying") as progress:
        names = tuple(dict.fromkeys((BASELINE, *(policies or POLICIES))))
        for done, name in enumerate(names):
            try:
                replays.append(replay(measured, requests, settings, name))
            except (InfeasibleGpus, UsageError) as error:
                if name in policies or name == "planner":
                    raise
                left_out.append(f"{POLICIES[name]}: {error}")
            if progress is not None:
                progress(done + 1, len(names))
    _warn(measured, profile, options["load"])
    result = views.simulation_view(requests, settings, replays, left_out)
    if plot is not None:
        save_figure(views.simulation_figure(result), plot)
    console.report(result, views.simulation_text(result), [plot] if plot else [], as_json=as_json)
