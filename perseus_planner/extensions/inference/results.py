"""Read what other load generators measured: a row of an inference profile for each load.

These files are read:

- AIPerf's `profile_export_aiperf.json`, and `profile_export_genai_perf.json` of GenAI-Perf, which
  came before it (https://github.com/ai-dynamo/aiperf);
- guidellm's `benchmarks.json` (https://github.com/vllm-project/guidellm);
- the JSON of `vllm bench serve --save-result`, the JSON lines of its `--append-result`, and those
  of SGLang's `bench_serving`, which have the same names.

AIPerf has the power of the GPUs that it saw. With the other files, a sampler that ran beside them
says it. Nothing is taken for something else without a word: another percentile than the 95th,
failed requests, requests that were all sent at once.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.files import reading
from perseus_planner.base.units import RATE, Rule
from perseus_planner.extensions.inference.serving import ServedRow, Shape

_PROGRAMS = "AIPerf, GenAI-Perf, guidellm, `vllm bench serve` or SGLang's bench_serving"
_HIGH = 95.0  # the percentile of latencies in an inference profile
_OFF = 0.1  # by which two figures of one quantity may differ before it is said

_REQUESTS = Rule(float, True, "a number of requests of 0 or more")
_TOKENS = Rule(float, False, "a number of tokens above 0")
_CACHED = Rule(float, True, "a number of tokens of 0 or more")
_CONCURRENCY = Rule(float, False, "a number of requests in flight: one above 0")
_LATENCY = Rule(float, True, "a latency: a number of 0 or more")
_POWER = Rule(float, False, "a power: a number above 0")
_LENGTH = Rule(float, False, "a duration: a number of seconds above 0")

# Units of the values of AIPerf and GenAI-Perf, in SI units.
_SECONDS = {"s": 1.0, "sec": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_WATTS = {"W": 1.0, "mW": 1e-3, "kW": 1e3}
_TOKEN_UNITS = {"tokens": 1.0}
_RATES = {"requests/sec": 1.0}
_VENDORS = ("nvidia", "amd")


class _Latency(NamedTuple):
    """A latency of requests, seconds."""

    p50_s: float
    high_s: float
    percentile: float  #: which one `high_s` is: 95 or the next above it


@dataclass(frozen=True, kw_only=True)
class _Load:
    """A load in a file."""

    where: str  #: its place, for texts
    concurrency: int | None  #: requests in flight of a closed loop
    rate_per_s: float | None  #: requests that arrive in a second in an open loop
    requests_per_s: float  #: that completed
    completed: float
    failed: float
    input_tokens: float  #: of a request, on average
    output_tokens: float
    ttft: _Latency
    tbt: _Latency | None  #: None if there is one token
    cached_tokens: float = 0.0  #: input tokens of a request that came from a cache
    power_w: float | None = None  #: of all GPUs that it saw
    gpus: int | None = None  #: how many these are
    notes: tuple[str, ...] = ()  #: what to know of it


class _NothingCompletedError(UsageError):
    """No request of a load has completed."""


class _Part:
    """A JSON object in a file, whose values are checked.

    Args:
        where: Its place, for error texts.
        values: What it has.
    """

    def __init__(self, where: str, values: object, name: str = "") -> None:
        self._where = where
        self._name = name
        if not isinstance(values, dict):
            raise self.refusal(f"{shown(values)} is not an object of JSON")
        self._values: Mapping[str, Any] = values

    @property
    def place(self) -> str:
        """Where it stands, for texts."""
        return ", ".join(filter(None, (self._where, self._name)))

    def refusal(self, problem: str) -> UsageError:
        """Return the error to raise for a problem."""
        return UsageError(
            f"{self.place}: cannot be read as a result of {_PROGRAMS}: {problem}; give the file "
            "that one of them wrote"
        )

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def get(self, name: str) -> Any:
        """Return a value; None if there is none, or it is null."""
        return self._values.get(name)

    def part(self, name: str) -> _Part:
        """Return an object in it."""
        if name not in self:
            raise self.refusal(f"has no {name}")
        return _Part(self._where, self.get(name), self._inner(name))

    def parts(self, name: str) -> list[_Part]:
        """Return the objects of a list in it; an object alone counts as a list of one."""
        value = self.get(name)
        listed = value if isinstance(value, list) else [value]
        return [
            _Part(self._where, entry, self._inner(f"{name} {number}"))
            for number, entry in enumerate(listed, 1)
        ]

    def number(self, name: str, rule: Rule) -> float:
        """Return a number, which must be there."""
        if name not in self._values:
            raise self.refusal(f"has no {name}")
        value = rule.accept(self._values[name])
        if value is None:
            raise self.refusal(f"{name}: {shown(self._values[name])} is not {rule.wanted}")
        return float(value)

    def _inner(self, name: str) -> str:
        return ".".join(filter(None, (self._name, name)))

    def quantity(self, name: str, what: str, rule: Rule, units: Mapping[str, float]) -> float:
        """Return a value of a metric of AIPerf, in SI units."""
        metric = self.part(name)
        unit = metric.get("unit")
        if unit not in units:
            raise metric.refusal(f"the unit {shown(unit)} is not one of {', '.join(units)}")
        return metric.number(what, rule) * units[unit]


def read_results(
    path: Path,
    setting: int,
    tensor_degree: int,
    power_w: float | None = None,
    shape: Shape | None = None,
    *,
    tell: Callable[[str], None] = lambda _: None,
) -> list[ServedRow]:
    """Return a row of each load in a file.

    Args:
        path: The file.
        setting: The clock in MHz, or power limit in watts, that was set.
        tensor_degree: Number of GPUs of the server.
        power_w: Their mean power meanwhile, watts, all together; None for that in the file, if it
            has one.
        shape: The class of its requests; None for their mean lengths.
        tell: Called with a sentence for each thing to know of a load, such as that requests failed.

    Raises:
        UsageError: If the file cannot be read or is none of these, or no request completed.
    """
    loads: list[_Load] = []
    empty: list[_NothingCompletedError] = []
    for part in _objects(path):
        read, measured = _reader(part)
        for result in measured:
            try:
                loads.append(read(result))
            except _NothingCompletedError as error:
                empty.append(error)
    # One load without answers is a note; a file without any is an error.
    if not loads:
        raise empty[0] if empty else UsageError(f"{path}: has no results; measure some load")
    for nothing in empty:
        tell(f"{nothing}; it is left out")
    rows = []
    # The file's own power is that of GPUs that it saw, which must be those of the server.
    for load in loads:
        if power_w is None:
            _check_gpus(load, tensor_degree)
        for note in [*load.notes, *_notes(load, power_w)]:
            tell(f"{load.where}: {note}")
        rows.append(_row(load, setting, tensor_degree, power_w or load.power_w, shape))
    return rows


def _row(
    load: _Load, setting: int, tensor_degree: int, power_w: float | None, shape: Shape | None
) -> ServedRow:
    inputs, outputs = shape or (round(load.input_tokens), round(load.output_tokens))
    return ServedRow(
        input=inputs,
        output=outputs,
        tensor_degree=tensor_degree,
        setting=setting,
        concurrency=load.concurrency,
        rate_per_s=load.rate_per_s,
        tokens_per_s=load.requests_per_s * (inputs + outputs),
        energy_j=None if power_w is None else power_w / load.requests_per_s,
        ttft_p50_s=load.ttft.p50_s,
        ttft_s=load.ttft.high_s,
        tbt_p50_s=None if load.tbt is None else load.tbt.p50_s,
        tbt_s=None if load.tbt is None else load.tbt.high_s,
        cached_tokens=load.cached_tokens,
    )


def _check_gpus(load: _Load, tensor_degree: int) -> None:
    """Refuse the power of other GPUs than those of the server."""
    if load.power_w is not None and load.gpus not in (None, tensor_degree):
        raise UsageError(
            f"{load.where}: has the power of {load.gpus} GPUs, and the server has {tensor_degree}; "
            f"give --degree {load.gpus}, or the power of the server's as MHZ@WATTS"
        )


def _notes(load: _Load, power_w: float | None) -> Iterator[str]:
    """Yield what to know of a load, whatever program measured it."""
    # Latencies hold for those that completed, while the energy was spent on all.
    if load.failed and math.isnan(load.completed):
        yield (
            f"{load.failed:.0f} requests failed; latencies are those of the ones that completed, "
            "which bear the energy of all"
        )
    elif load.failed:
        yield (
            f"{load.failed:.0f} of {load.completed + load.failed:.0f} requests failed; latencies "
            f"are those of the {load.completed:.0f} that completed, which bear the energy of all"
        )
    latencies = {"time to the first token": load.ttft, "time between tokens": load.tbt}
    read = sorted({latency.percentile for latency in latencies.values() if latency} - {_HIGH})
    for percentile in read:
        names = [
            name
            for name, latency in latencies.items()
            if latency and latency.percentile == percentile
        ]
        yield (
            f"has no {_HIGH:g}th percentile of the {' and the '.join(names)}; the "
            f"{percentile:g}th is taken, which is no shorter (`vllm bench serve` has "
            f"--metric-percentiles {_HIGH:g})"
        )
    if load.cached_tokens > _OFF * load.input_tokens:
        yield (
            f"{load.cached_tokens:.4g} of {load.input_tokens:.4g} input tokens of a request came "
            "from a cache, which cost nothing; without it, requests cost more"
        )
    if power_w and load.power_w and abs(power_w - load.power_w) > _OFF * load.power_w:
        yield f"says {load.power_w:.4g} W where {power_w:.4g} W were given; these are taken"


def _objects(path: Path) -> list[_Part]:
    """Return the objects of JSON in a file: one, a list of them, or one a line."""
    with reading(path, UsageError):
        data = path.read_bytes()
    # A byte order mark at the begin is no part of JSON.
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: is not UTF-8 text; give the file that {_PROGRAMS} wrote"
        ) from error
    if not text.strip():
        raise UsageError(f"{path}: is empty; give the file that {_PROGRAMS} wrote")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _lines(path, text, error)
    if not isinstance(content, list):
        return [_Part(str(path), content)]
    return [_Part(f"{path}, result {number}", result) for number, result in enumerate(content, 1)]


def _lines(path: Path, text: str, error: Exception) -> list[_Part]:
    """Return the object of each line; `error` is what is wrong with the file as one object."""
    parts: list[_Part] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as reason:
            if not parts:  # the file is no JSON lines
                raise UsageError(
                    f"{path}: is not JSON ({error}); give the file as it was written"
                ) from reason
            raise UsageError(
                f"{path}, line {number}: is cut off, or not JSON ({reason}); remove the line, or "
                "measure again"
            ) from reason
        parts.append(_Part(f"{path}, line {number}", content))
    return parts


def _reader(part: _Part) -> tuple[Callable[[_Part], _Load], list[_Part]]:
    """Return what reads an object, and the loads in it."""
    if "benchmarks" in part:
        return _guidellm, part.parts("benchmarks")
    if "input_config" in part:
        return _aiperf, [part]
    if "request_throughput" in part or "completed" in part:
        return _vllm, [part]
    if "metadata" in part and "metrics" in part:
        raise part.refusal("has a line for each request; its summary is profile_export_aiperf.json")
    raise part.refusal("has no request_throughput, input_config or benchmarks")


def _nothing(part: _Part, failed: float) -> _NothingCompletedError:
    also = f" ({failed:.0f} failed)" if failed else ""
    return _NothingCompletedError(
        f"{part.place}: no request completed{also}; see why in the output of the load generator, "
        "and measure again"
    )


def _high(stated: Iterable[float]) -> float | None:
    """Return the percentile to read of those that are stated: the 95th or the next above it."""
    return min((percentile for percentile in stated if percentile >= _HIGH), default=None)


def _streamed(part: _Part, ttft: _Latency) -> _Latency:
    if ttft.high_s <= 0:
        raise part.refusal("its time to the first token is 0, so answers were not streamed")
    return ttft


# `vllm bench serve`, and SGLang's bench_serving


def _vllm(part: _Part) -> _Load:
    completed = part.number("completed", _REQUESTS)
    failed = _failed_of_vllm(part, completed)
    if not completed:
        raise _nothing(part, failed)
    # One figure for a rate that rises belongs to no load.
    if part.get("ramp_up_strategy") is not None:
        raise part.refusal("its rate rises (ramp_up_strategy), so that it is not one load")
    outputs = part.number("total_output_tokens", _TOKENS) / completed
    requests_per_s = part.number("request_throughput", RATE)
    notes = []
    # Neither a rate nor a limit of requests in flight: they are all there from the beginning.
    rate = _rate(part)
    concurrency = None
    if "max_concurrency" in part:
        concurrency = round(part.number("max_concurrency", _CONCURRENCY))
    elif math.isinf(rate):
        concurrency = round(completed + failed)
        notes.append(
            f"all {concurrency} requests were sent at once, which is a burst and no steady load; "
            "measure with --max-concurrency or --request-rate"
        )
    # Older files have no duration; in others it checks the rate.
    if "duration" in part:
        seconds = part.number("duration", _LENGTH)
        if abs(requests_per_s * seconds - completed) > _OFF * completed:
            notes.append(
                f"{requests_per_s:.4g} requests/s in {seconds:.4g} s are not the {completed:.0f} "
                "that completed; the first is taken"
            )
    ttfts_s, tpots_s = _of_requests(part)
    return _Load(
        where=part.place,
        concurrency=concurrency,
        rate_per_s=rate if concurrency is None else None,
        requests_per_s=requests_per_s,
        completed=completed,
        failed=failed,
        input_tokens=part.number("total_input_tokens", _TOKENS) / completed,
        output_tokens=outputs,
        ttft=_streamed(part, _latency_of_vllm(part, "ttft", ttfts_s)),
        tbt=_latency_of_vllm(part, "tpot", tpots_s) if outputs > 1 else None,
        notes=tuple(notes),
    )


def _failed_of_vllm(part: _Part, completed: float) -> float:
    """Return how many requests failed; older versions do not say it, but what was asked for."""
    if "failed" in part:
        return part.number("failed", _REQUESTS)
    if "num_prompts" in part:
        return max(0.0, part.number("num_prompts", _REQUESTS) - completed)
    return 0.0


def _rate(part: _Part) -> float:
    """Return the rate at which requests were sent; vLLM writes "inf", SGLang Infinity."""
    rate = part.get("request_rate")
    if rate is None or str(rate).lower() in ("inf", "infinity"):
        return math.inf
    return part.number("request_rate", RATE)


def _latency_of_vllm(part: _Part, name: str, of_requests_s: Sequence[float]) -> _Latency:
    p50_s = part.number(f"median_{name}_ms", _LATENCY) / 1e3
    matches = (re.fullmatch(rf"p(\d+(?:\.\d+)?)_{name}_ms", key) for key in part)
    stated = {float(match[1]): match[0] for match in matches if match}
    # What was asked for, what requests took one by one, or the next one above.
    # A percentile that was not asked for can be computed where each request is in the file.
    if _HIGH not in stated and len(of_requests_s):
        return _Latency(p50_s, float(np.percentile(of_requests_s, _HIGH)), _HIGH)
    percentile = _high(stated)
    if percentile is None:
        raise part.refusal(
            f"has no {_HIGH:g}th percentile of {name}, nor one above it; measure with "
            f"--metric-percentiles {_HIGH:g}"
        )
    return _Latency(p50_s, part.number(stated[percentile], _LATENCY) / 1e3, percentile)


def _of_requests(part: _Part) -> tuple[list[float], list[float]]:
    """Return the time to the first token and between tokens of each request that completed,
    seconds, as `--save-detailed` has them; else none.
    """
    columns = [part.get(name) for name in ("ttfts", "itls", "output_lens")]
    if not all(isinstance(column, list) for column in columns):
        return [], []
    try:
        # Requests that failed have no tokens, and their times are none.
        done = [row for row in zip(*columns, strict=True) if row[2] > 0]
        ttfts_s = [float(ttft) for ttft, _, _ in done]
        tpots_s = [float(sum(itls)) / (count - 1) for _, itls, count in done if count > 1]
    except (TypeError, ValueError) as error:
        raise part.refusal(f"ttfts, itls and output_lens are not of one form ({error})") from error
    return ttfts_s, tpots_s


# AIPerf and GenAI-Perf


def _aiperf(part: _Part) -> _Load:
    failed = 0.0
    if "error_request_count" in part:
        failed = part.part("error_request_count").number("avg", _REQUESTS)
    # Older versions do not say how many completed, so only a stated 0 is one.
    completed = math.nan
    if "request_count" in part:
        completed = part.part("request_count").number("avg", _REQUESTS)
    if not completed or "request_throughput" not in part:
        raise _nothing(part, failed)
    concurrency, rate_per_s = _loop_of_aiperf(part.part("input_config"))
    outputs = part.quantity("output_sequence_length", "avg", _TOKENS, _TOKEN_UNITS)
    # Without streaming there is no first token apart from the last.
    if "time_to_first_token" not in part:
        raise part.refusal("has no time_to_first_token; measure with --streaming")
    cached = 0.0
    if "usage_prompt_cache_read_tokens" in part:
        cached = part.quantity("usage_prompt_cache_read_tokens", "avg", _CACHED, _TOKEN_UNITS)
    power_w, notes = _power_of_aiperf(part)
    if part.get("was_cancelled") or part.get("is_complete") is False:
        notes.append("was ended before it was complete")
    return _Load(
        where=part.place,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        requests_per_s=part.quantity("request_throughput", "avg", RATE, _RATES),
        completed=completed,
        failed=failed,
        input_tokens=part.quantity("input_sequence_length", "avg", _TOKENS, _TOKEN_UNITS),
        output_tokens=outputs,
        ttft=_streamed(part, _latency_of_aiperf(part, "time_to_first_token")),
        tbt=_latency_of_aiperf(part, "inter_token_latency") if outputs > 1 else None,
        cached_tokens=cached,
        power_w=power_w,
        gpus=_gpus_of_aiperf(part),
        notes=tuple(notes),
    )


def _latency_of_aiperf(part: _Part, name: str) -> _Latency:
    metric = part.part(name)
    stated = {float(key[1:]): key for key in metric if re.fullmatch(r"p\d+", key) and key in metric}
    percentile = _high(stated)
    if percentile is None:
        raise metric.refusal(f"has no {_HIGH:g}th percentile, nor one above it")
    p50_s = part.quantity(name, "p50", _LATENCY, _SECONDS)
    return _Latency(p50_s, part.quantity(name, stated[percentile], _LATENCY, _SECONDS), percentile)


def _loop_of_aiperf(asked: _Part) -> tuple[int | None, float | None]:
    """Return the requests in flight of a closed loop, or the rate of an open one."""
    if "phases" in asked:
        return _loop_of_phases(asked)
    # Before AIPerf 0.10 under `loadgen`; GenAI-Perf has it at the top or under its own generator.
    loop = asked
    if "loadgen" in asked:
        loop = asked.part("loadgen")
    elif "perf_analyzer" in asked and "stimulus" in asked.part("perf_analyzer"):
        loop = asked.part("perf_analyzer").part("stimulus")
    if "request_rate" in loop:  # requests in flight are then a limit
        return None, loop.number("request_rate", RATE)
    if "concurrency" not in loop:
        raise asked.refusal("has no concurrency or request_rate")
    return round(loop.number("concurrency", _CONCURRENCY)), None


def _loop_of_phases(asked: _Part) -> tuple[int | None, float | None]:
    # Warm-up is no measurement, and one figure for several phases belongs to none of them.
    phases = [
        listed for listed in asked.parts("phases") if listed.get("kind") in (None, "profiling")
    ]
    measured = [listed for listed in phases if listed.get("name") != "warmup"]
    if len(measured) != 1:
        raise asked.refusal(f"has {len(measured)} measured phases, and one figure for all")
    (phase,) = measured
    if "rate" in phase:  # requests in flight are then a limit
        return None, phase.number("rate", RATE)
    if phase.get("type") != "concurrency":
        raise phase.refusal(f"requests of the type {shown(phase.get('type'))} are not one load")
    if "concurrency" not in phase:  # its default
        return 1, None
    return round(phase.number("concurrency", _CONCURRENCY)), None


def _power_of_aiperf(part: _Part) -> tuple[float | None, list[str]]:
    """Return the mean power of all GPUs that AIPerf saw, watts, and what to know of it.

    AIPerf 0.13 counts energy from its last reading before the first request, which may be seconds
    before it, and divides it by the time of the requests: the average that it states may be too
    high. The sum of the sensors' means is not.
    """
    sensors_w = [
        part.quantity(f"{vendor}_total_gpu_power", "avg", _POWER, _WATTS)
        for vendor in _VENDORS
        if f"{vendor}_total_gpu_power" in part
    ]
    counters_w = [
        part.quantity(f"{vendor}_average_gpu_power", "avg", _POWER, _WATTS)
        for vendor in _VENDORS
        if f"{vendor}_average_gpu_power" in part
    ]
    # Sensors are preferred, as counters may have been read long before the first request.
    if not sensors_w:
        return (sum(counters_w) or None), []
    power_w = sum(sensors_w)
    counted_w = sum(counters_w)
    if counted_w and abs(counted_w - power_w) > _OFF * power_w:
        return power_w, [
            f"its GPUs drew {power_w:.4g} W by their sensors and {counted_w:.4g} W by their energy "
            "counters, which AIPerf may read long before the first request; the first is taken"
        ]
    return power_w, []


def _gpus_of_aiperf(part: _Part) -> int | None:
    """Return how many GPUs AIPerf saw; None if it does not say."""
    if "telemetry_data" not in part or "endpoints" not in part.part("telemetry_data"):
        return None
    endpoints = part.part("telemetry_data").part("endpoints")
    return sum(len(list(endpoints.part(name).part("gpus"))) for name in endpoints)


# guidellm


def _guidellm(part: _Part) -> _Load:
    metrics = part.part("metrics")
    totals = metrics.part("request_totals") if "request_totals" in metrics else None
    completed = math.nan
    failed = 0.0
    if totals is not None:
        completed = totals.number("successful", _REQUESTS)
        # A file without any answer has no figures to read.
        failed = totals.number("errored", _REQUESTS) if "errored" in totals else 0.0
    if not completed:
        raise _nothing(part, failed)
    concurrency, rate_per_s, notes = _loop_of_guidellm(part, metrics)

    # Figures of requests that failed are no costs of serving.
    def mean(name: str, rule: Rule) -> float:
        return metrics.part(name).part("successful").number("mean", rule)

    def latency(name: str) -> _Latency:
        percentiles = metrics.part(name).part("successful").part("percentiles")
        return _Latency(
            percentiles.number("p50", _LATENCY) / 1e3,
            percentiles.number("p95", _LATENCY) / 1e3,
            _HIGH,
        )

    # One token has no time to the next.
    outputs = mean("output_token_count", _TOKENS)
    return _Load(
        where=part.place,
        concurrency=concurrency,
        rate_per_s=rate_per_s,
        requests_per_s=mean("requests_per_second", RATE),
        completed=completed,
        failed=failed,
        input_tokens=mean("prompt_token_count", _TOKENS),
        output_tokens=outputs,
        ttft=_streamed(part, latency("time_to_first_token_ms")),
        tbt=latency("inter_token_latency_ms") if outputs > 1 else None,
        notes=tuple(notes),
    )


def _loop_of_guidellm(
    part: _Part, metrics: _Part
) -> tuple[int | None, float | None, Sequence[str]]:
    """Return the requests in flight of a closed loop, or the rate of an open one, and what to know
    of it.
    """
    # Files have the strategy in one of several places.
    places = (part.part(name) for name in ("config", "args", "scheduler") if name in part)
    strategy = next((section.part("strategy") for section in places if "strategy" in section), None)
    if strategy is None:
        raise part.refusal("has no strategy")
    kind = strategy.get("type_")
    if kind == "synchronous":
        return 1, None, ()
    if kind == "concurrent":
        return round(strategy.number("streams", _CONCURRENCY)), None, ()
    if kind in ("constant", "poisson"):
        return None, strategy.number("rate", RATE), ()
    if kind != "throughput":
        raise strategy.refusal(f"requests of the type {shown(kind)} are not one load")
    # Without a limit all requests come at once, and what was in flight is only known as a mean.
    if "max_concurrency" in strategy:
        return round(strategy.number("max_concurrency", _CONCURRENCY)), None, ()
    seen = metrics.part("request_concurrency").part("successful").number("mean", _CONCURRENCY)
    concurrency = max(1, round(seen))
    note = f"all requests were sent at once; {concurrency} were in flight on average"
    return concurrency, None, (note,)
