"""`planner inference`: what requests cost, and pools of servers that need the least energy within
latency objectives.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import click

from perseus_planner.base import units
from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import read_text
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    BlockingPower,
    Counts,
    Lag,
    Listed,
    Option,
    OutputFile,
    Positive,
    Text,
    Time,
    Tolerance,
    command,
    examples,
    output_file,
    refuse_same,
)

if TYPE_CHECKING:
    from perseus_planner.extensions.inference.metrics import MetricsReader
    from perseus_planner.extensions.inference.plan import ChangeCosts
    from perseus_planner.extensions.inference.serving import ServedRow, Shape
    from perseus_planner.extensions.inference.workload import InferenceProfile
    from perseus_planner.gpu import Gpu


_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# In which metrics come; between looks whether a server is there
_ANSWER_S = 0.5
_LOOK_S = 1.0


@click.group(
    epilog=examples(
        "planner inference plan inference.csv --rates rates.csv --gpus 64 -o pools.yaml",
        "planner inference plan inference.csv --trace trace.csv --gpus 64 -o pools.yaml",
        "planner inference simulate inference.csv trace.csv --gpus 64 --plot replay.png",
    )
)
def inference() -> None:
    """Plan pools of servers for inference, and replay traces: the least energy within latency
    objectives.
    """


def _read_class(text: str, option: str) -> Shape:
    """Return the class that a text writes: input and output tokens."""
    from perseus_planner.extensions.inference.serving import Shape

    tokens = [units.COUNT.parse(part) for part in text.partition("/")[::2]]
    if None in tokens:
        raise UsageError(
            f"{option}: {text!r} is not a class; write input/output tokens, as 256/100"
        )
    return Shape(*tokens)


def _read_bounds(text: str, option: str) -> tuple[int, ...]:
    bounds = tuple(units.COUNT.read(part, option) for part in text.split(","))
    if len(bounds) != 2 or bounds[0] >= bounds[1]:
        raise UsageError(
            f"{option}: {text!r} are not the most tokens of short and medium; write two, such as "
            "256,1024"
        )
    return bounds


_Class = Annotated[Any, Text("in/out", _read_class)]
_Bounds = Annotated[Any, Text("tokens,tokens,…", _read_bounds)]


_Gpus = Annotated[
    tuple[str, ...],
    "GPU on which the server runs; can be repeated.",
    Option("--gpu", metavar="GPU", required=True),
]
_Policy = Literal["highest", "clock", "degree", "hierarchical", "planner"]


@dataclass(frozen=True)
class _Service:
    """What is served, on what, and what changes cost."""

    gpus: Annotated[Positive, "Number of GPUs."]
    epoch_s: Annotated[Time, "How long pools stay as they are.", Option(default="30min")]
    ttft_s: Annotated[
        tuple[float, ...],
        Listed(units.DURATION, "time"),
        "Longest time to the first token, one for each input class, e.g. 250ms,400ms,2s.  "
        "[default: DynamoLLM's]",
        Option(default=()),
    ]
    tbt_s: Annotated[Time, "Longest time between tokens.", Option(default="100ms")]
    input_bounds: Annotated[
        _Bounds,
        "Most input tokens of the classes short and medium.",
        Option(default="256,1024"),
    ]
    output_bounds: Annotated[
        _Bounds,
        "Most output tokens of the classes short and medium.",
        Option(default="100,350"),
    ]
    load: Annotated[
        float,
        click.FloatRange(0, min_open=True),
        "Load of an instance in profiles without the column tokens_per_s.",
        Option(metavar="TOKENS/S", default=2000.0),
    ]
    new_instance_s: Annotated[Lag, "Time until a new instance serves.", Option(default="423s")]
    resharding_s: Annotated[
        Lag, "Time until an instance of another tensor degree serves.", Option(default="33s")
    ]
    clock_change_s: Annotated[Lag, "Time of a clock change.", Option(default="50ms")]
    change_power_w: Annotated[
        BlockingPower, "Power of each GPU while it changes.", Option(default="100W")
    ]

    def costs(self) -> ChangeCosts:
        """Return what changes cost."""
        from perseus_planner.extensions.inference.plan import ChangeCosts

        times_s = self.new_instance_s, self.resharding_s, self.clock_change_s
        return ChangeCosts(times_s, self.change_power_w)

    def read_profile(self, path: Path) -> InferenceProfile:
        """Return the inference profile in a file; say on stderr where a load is assumed."""
        from perseus_planner.extensions.inference.workload import Objectives, read_inference_profile

        profile = read_inference_profile(
            path,
            Objectives(self.ttft_s, self.tbt_s),
            input_bounds=self.input_bounds,
            output_bounds=self.output_bounds,
            load_tokens_per_s=self.load,
        )
        if profile.assumed_load:
            click.echo(
                f"planner: {path} has no column tokens_per_s; a load of {self.load:g} tokens/s is "
                "assumed",
                err=True,
            )
        return profile


@command(
    "planner inference profile http://127.0.0.1:8000/v1 --gpu nvml:0 --class 256/100 --class "
    "1024/350 --concurrency 1,8,32 --rate 1,2,4 -o inference.csv",
)
def profile(
    server: str,
    *,
    gpus: _Gpus,
    shapes: Annotated[
        tuple[_Class, ...],
        "Class of requests: input and output tokens; repeat it for several.",
        Option("--class", metavar="IN/OUT", required=True),
    ],
    concurrencies: Annotated[
        Counts, "Closed loops: requests in flight.", Option("--concurrency", default=())
    ],
    rates: Annotated[
        tuple[float, ...],
        Listed(units.RATE, "requests/s"),
        "Open loops: requests that arrive in a second, at random.",
        Option("--rate", default=()),
    ],
    control: Annotated[
        Literal["clock", "power-limit", "observed"],
        "What is set; observed sets nothing.",
        Option(default="clock"),
    ],
    settings: Annotated[
        Counts,
        "Clocks in MHz, or power limits in W.  [default: six, down to 40 % of the highest]",
        Option("--at", default=()),
    ],
    window_s: Annotated[Time, "Least time of a measurement.", Option(default="30s")],
    model: Annotated[
        str | None, "Model of the server.  [default: its first]", Option(metavar="NAME")
    ],
    chat: Annotated[bool, "Ask for chat completions."],
    text: Annotated[bool, "Send prompts as text, not as numbers of tokens."],
    key: Annotated[
        str | None,
        "Key of the server, or @FILE that has it.  [default: OPENAI_API_KEY]",
        Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY"),
    ],
    limit_s: Annotated[
        Time, "Longest time between two events of an answer.", Option("--timeout", default="10min")
    ],
    output: Annotated[Path, output_file("inference profile", ".csv")],
) -> None:
    """Measure what requests to a server cost under traffic, at several clocks: energy, throughput
    and latency, input and output tokens apart.

    SERVER is the address of a server on this machine that speaks OpenAI's API. Each row is written
    as it is measured.
    """
    from perseus_planner.extensions.inference.serving import (
        Server,
        ServingSettings,
        measure_serving,
        save_served,
    )
    from perseus_planner.gpu import open_gpu

    # A key in a file does not stand in the list of processes or in the shell's history.
    if key is not None and key.startswith("@"):
        key = read_text(Path(key[1:]), UsageError, "the key of the server").strip()
    chosen = ServingSettings(shapes, concurrencies, rates, control, settings, window_s)
    rows: list[ServedRow] = []
    with ExitStack() as stack:
        opened = [stack.enter_context(open_gpu(gpu)) for gpu in gpus]
        target = Server(server, model, chat=chat, text=text, key=key, limit_s=limit_s)
        stack.enter_context(closing(target))
        progress = stack.enter_context(console.progress("Measuring"))
        measured = measure_serving(target, opened, chosen, progress)
        origin = opened[0].origin
        told: set[tuple[str, str]] = set()  # classes and kinds of notes, each of which is said once
        for row in stack.enter_context(closing(measured)):
            rows.append(row)
            # Written again with each row, so that an interrupted measurement keeps what it has.
            save_served(rows, control, origin, output)
            name = f"class {row.input}/{row.output}"
            for kind, note in _notes(row):
                if (name, kind) not in told:
                    click.echo(f"planner: {name}: {note}", err=True)
                    told.add((name, kind))
    summary = {"origin": origin, "control": control, "rows": rows}
    console.report(summary, _text(rows, control, origin), [output])


@command(
    "planner inference read 1410=profile_export_aiperf.json --degree 1 -o inference.csv",
    "planner inference read 1410@312W=benchmarks.json --degree 1 -o inference.csv",
)
def read(
    results: Annotated[tuple[str, ...], Option(required=True, metavar="MHZ[@WATTS]=FILE...")],
    *,
    degree: Annotated[Positive, "GPUs of the server.", Option(default=1)],
    shape: Annotated[
        _Class | None,
        "Class of the requests.  [default: their mean tokens]",
        Option("--class", metavar="IN/OUT"),
    ],
    output: Annotated[Path, output_file("inference profile", ".csv")],
) -> None:
    """Make an inference profile of what another load generator measured: AIPerf, GenAI-Perf,
    guidellm, `vllm bench serve` or SGLang's bench_serving.

    Each file has the clock in MHz that was set, and the mean power of the server's GPUs meanwhile,
    for example as `planner measure` prints it. AIPerf's files have the power if it could read it.
    Rows without a power have no energy.
    """
    from perseus_planner.extensions.inference.results import read_results
    from perseus_planner.extensions.inference.serving import save_served

    rows: list[ServedRow] = []
    notes: list[str] = []
    # A setting stands before its file, as several clocks are read in one go.
    for text in results:
        setting, _, file = text.partition("=")
        clock, _, power = setting.partition("@")
        clock_mhz = units.CLOCK.parse(clock)
        power_w = units.POWER_BUDGET.read(power, text) if power else None
        # Both are checked before files are read, which may be large.
        if clock_mhz is None or not file:
            raise UsageError(f"{text!r} is no result; write MHZ=FILE or MHZ@WATTS=FILE")
        rows += read_results(Path(file), clock_mhz, degree, power_w, shape, tell=notes.append)
    save_served(rows, "clock", "read", output)
    # Without energy a row says nothing of cost, and planning takes such rows for too slow.
    if any(row.energy_j is None for row in rows):
        notes.append("rows without an energy count as too slow; give their power as MHZ@WATTS")
    for note in notes:
        click.echo(f"planner: {note}", err=True)
    summary = {"rows": rows, "notes": notes}
    console.report(summary, _text(rows, "clock", "read from files"), [output])


_CACHED = 0.01  # the share of input tokens that come from a cache, beyond which it is said


def _notes(row: ServedRow) -> Iterator[tuple[str, str]]:
    """Yield what to know of a row that was measured: its kind and a text."""
    if row.problem is not None:
        yield "events", row.problem
    share = row.cached_tokens / row.input
    if share > _CACHED:
        yield (
            "cache",
            f"{100 * share:.0f} % of the input tokens came from the server's cache, which cost "
            "nothing; the cost of an input token is that of the others",
        )


def _text(rows: list[ServedRow], control: str, origin: str) -> str:
    from perseus_planner.base.tables import Column, lay_out, table
    from perseus_planner.profiles.csv_file import unit_of

    columns = lay_out(
        rows,
        Column("class", lambda row: f"{row.input}/{row.output}"),
        Column(
            "load",
            lambda row: f"{row.rate_per_s:g}/s" if row.concurrency is None else row.concurrency,
        ),
        Column(unit_of(control), "setting"),
        Column("J/request", "energy_j", ".4g"),
        Column("+- J", "energy_error_j", ".2g"),
        Column("J/input token", "input_token_j", ".4g"),
        Column("J/output token", "output_token_j", ".4g"),
        Column(
            "tokens/J", lambda row: row.energy_j and (row.input + row.output) / row.energy_j, ".4g"
        ),
        Column("tokens/s", "tokens_per_s", ".4g"),
        Column("TTFT p50 (ms)", lambda row: 1e3 * row.ttft_p50_s, ".4g"),
        Column("p95", lambda row: 1e3 * row.ttft_s, ".4g"),
        Column("TBT p50 (ms)", lambda row: row.tbt_p50_s and 1e3 * row.tbt_p50_s, ".4g"),
        Column("p95", lambda row: row.tbt_s and 1e3 * row.tbt_s, ".4g"),
    )
    # All rows are of one server.
    gpus = rows[0].tensor_degree
    return (
        f"Requests on {gpus} GPU{'s' * (gpus > 1)}, {origin}; tokens/J is also tokens/s per "
        f"W\n\n{table(columns)}\n"
    )


@command()
def plan(
    profile: Path,
    *,
    trace: Annotated[Path | None, "CSV of requests, e.g. an Azure LLM inference trace."],
    rates: Annotated[Path | None, "CSV with the requests and tokens of each class."],
    service: _Service,
    output: Annotated[Path, output_file("the plan", ".yaml", ".yml")],
) -> None:
    """Choose instances, tensor degree and clock of the pools that serve each class of requests.

    PROFILE is a CSV with the columns input, output, tensor_degree, clock_mhz (or power_limit_w) and
    energy_j (or energy_wh) of one request, empty where the latency objective is violated. Give a
    --trace or --rates.
    """
    from perseus_planner.extensions.inference.plan import make_plan, save_plan
    from perseus_planner.extensions.inference.views import plan_text, plan_view
    from perseus_planner.extensions.inference.workload import periods_of, read_rates, read_trace

    # Two sources of demand would contradict each other, and without one there is nothing to plan.
    if (trace is None) == (rates is None):
        raise UsageError("give one of --trace and --rates")
    refuse_same((profile, trace, rates), output)
    costs = service.costs()
    measured = service.read_profile(profile)
    # A trace varies over time, so it is planned period by period; rates are one period.
    if trace is not None:
        periods = periods_of(read_trace(trace), measured, service.epoch_s)
    elif rates is not None:
        periods = [(0.0, service.epoch_s, read_rates(rates, measured))]
    with console.progress("Planning"):
        inference_plan = make_plan(measured, periods, service.gpus, costs)
    save_plan(inference_plan, output)
    view = plan_view(inference_plan)
    console.report(view, plan_text(view), [output])


@command()
def simulate(
    profile: Path,
    trace: Path,
    *,
    prediction: Annotated[
        Literal["last", "perfect"],
        "What a period is predicted from: the one before, or itself.",
        Option(default="last"),
    ],
    chunk: Annotated[Positive, "Most input tokens of an iteration.", Option(default=2048)],
    most: Annotated[Positive, "Most requests of a server at once.", Option("--batch", default=256)],
    policies: Annotated[
        tuple[_Policy, ...],
        "How configurations are chosen; can be repeated.  [default: all]",
        Option("--policy"),
    ],
    plot: Annotated[Annotated[Path, OutputFile()] | None, "Write a figure."],
    service: _Service,
) -> None:
    """Replay a trace through pools that are planned again and again.

    PROFILE is that of `planner inference plan`, TRACE a CSV of requests. The policy highest is
    always included as the baseline of the others. Instances are servers with continuous batching if
    the profile says what tokens cost; else only their power is replayed.
    """
    from perseus_planner.base.errors import InfeasibleGpus
    from perseus_planner.extensions.inference import views
    from perseus_planner.extensions.inference.plan import BASELINE, POLICIES
    from perseus_planner.extensions.inference.simulation import Settings, replay
    from perseus_planner.extensions.inference.workload import read_trace
    from perseus_planner.views.figures import check_figure_path, save_figure

    if plot is not None:
        check_figure_path(plot, "--plot")
        refuse_same((profile, trace), plot, "--plot")
    costs = service.costs()
    measured = service.read_profile(profile)
    settings = Settings(
        gpus=service.gpus,
        costs=costs,
        epoch_s=service.epoch_s,
        prediction=prediction,
        chunk_tokens=chunk,
        most_requests=most,
    )
    requests = read_trace(trace)
    replays = []
    left_out = list[str]()
    # The baseline is replayed once, also if it is asked for.
    for name in console.each("Replaying", dict.fromkeys((BASELINE, *(policies or POLICIES)))):
        try:
            replays.append(replay(measured, requests, settings, name))
        # A policy that was not asked for and cannot be run is left out with its reason.
        except (InfeasibleGpus, UsageError) as error:
            if name in policies or name == "planner":
                raise
            left_out.append(f"{POLICIES[name]}: {error}")
    result = views.simulation_view(requests, settings, replays, left_out)
    if plot is not None:
        save_figure(views.simulation_figure(result), plot)
    console.report(result, views.simulation_text(result), [plot] if plot else [])


@dataclass(frozen=True)
class _Kept:
    """What a server keeps, and where it runs."""

    gpus: _Gpus
    ttft_s: Annotated[Time, "Longest time to the first token.", Option(required=True)]
    tbt_s: Annotated[Time, "Longest time between tokens.", Option(required=True)]
    late: Annotated[
        Tolerance, "Share of requests and tokens that may be later.", Option(default="1%")
    ]
    dry_run: Annotated[bool, "Set nothing; say what would be set."]

    def keep(self, gpus: Sequence[Gpu], reader: MetricsReader, is_over: Callable[[], bool]) -> None:
        """Keep the clocks of its GPUs, and report what became of it."""
        from perseus_planner.extensions.inference.online import OnlineSettings, attend

        settings = OnlineSettings(self.ttft_s, self.tbt_s, self.late)
        result = attend(
            reader,
            gpus,
            settings,
            is_over,
            is_dry=self.dry_run,
            tell=lambda line: click.echo(f"planner: {line}", err=True),
        )
        late = 100 * result["late"] / max(1.0, result["requests"])
        text = (
            f"{result['requests']:.0f} requests in {result['time_s']:.0f} s, {late:.2f} % late; "
            f"{result['energy_j']:.4g} J; clocks were set {result['changes']} times"
        )
        console.report(result, text, [])

    @contextmanager
    def opened(self, server: str | None = None) -> Iterator[list[Gpu]]:
        """Yield the GPUs, whose clocks can be set for a server, which is there or not yet."""
        from perseus_planner.extensions.inference.online import check_alone, check_gpus
        from perseus_planner.gpu import open_gpu

        with ExitStack() as stack:
            gpus = [stack.enter_context(open_gpu(text)) for text in self.gpus]
            check_alone(gpus, server)
            if not self.dry_run:
                check_gpus(gpus)
            yield gpus


@command("planner inference attach http://127.0.0.1:8000 --gpu nvml:0 --ttft 400ms --tbt 100ms")
def attach(server: str, *, kept: _Kept) -> None:
    """Set the clocks of a running server for the least energy within latency objectives.

    SERVER is the address of a server of vLLM or SGLang, whose metrics are read. The command runs
    until it is interrupted or gets SIGTERM.
    """
    from perseus_planner.extensions.inference.metrics import MetricsReader

    with closing(MetricsReader(server, _ANSWER_S)) as reader, kept.opened(server) as gpus:
        try:
            reader.read()
        except (OSError, HTTPException) as error:
            raise UsageError(
                f"{reader.where}: does not answer ({error!r}); start the server, and give the "
                "address that it prints"
            ) from error
        asked = list[int]()
        with console.signals(_ENDING, asked.append):
            kept.keep(gpus, reader, lambda: bool(asked))


@command(
    "planner inference run --gpu nvml:0 --ttft 400ms --tbt 100ms -- vllm serve Qwen/Qwen3-8B",
    context_settings={"allow_interspersed_args": False},
)
def run(
    command: Annotated[tuple[str, ...], Option(required=True)],
    *,
    kept: _Kept,
    url: Annotated[
        str, "Address of the server.", Option(metavar="URL", default="http://127.0.0.1:8000")
    ],
    start_s: Annotated[Time, "Longest time until the server answers.", Option(default="30min")],
) -> None:
    """Run a server, and set its clocks for the least energy within latency objectives.

    COMMAND starts a server of vLLM or SGLang, whose metrics are read. The planner ends with the
    command, and with its exit status.
    """
    from perseus_planner.extensions.inference.metrics import MetricsReader

    asked = list[int]()
    with (
        kept.opened() as gpus,
        closing(MetricsReader(url, _ANSWER_S)) as reader,
        console.signals(_ENDING, asked.append),
    ):
        # The server writes to stderr, as stdout is for the report.
        process = console.start(command, sys.stderr.fileno())

        def is_over() -> bool:
            return bool(asked) or process.poll() is not None

        try:
            # Until the server answers, an error of the connection is no news.
            end_s = time.monotonic() + start_s
            while not is_over():
                with suppress(OSError, HTTPException):
                    reader.read()
                    kept.keep(gpus, reader, is_over)
                    break
                if time.monotonic() > end_s:
                    raise UsageError(
                        f"{reader.where}: has not answered for {start_s:g} s; give --url, or a "
                        "longer --start"
                    )
                time.sleep(_LOOK_S)
        # The server was started here, so it ends with the planner, also after an error.
        finally:
            if process.poll() is None:
                process.terminate()
            status = process.wait()
    # A status below 0 is a signal, which shells write as 128 and its number.
    sys.exit(128 - status if status < 0 else status)


for _command in (profile, read, plan, simulate, attach, run):
    inference.add_command(_command)
