"""Measure what requests to a server cost under traffic, over clocks or power limits; or read what
other load generators measured.

Traffic is a closed loop, where so many requests are in flight at any time, or an open loop, where
requests arrive at random at a rate (Poisson), as genai-perf, guidellm and `vllm bench serve` have
them. It goes on from before the first window to after the last one. A `Monitor` measures the energy
of a window; a request counts in it by the share of its events that came in it.

In a closed loop, requests of one output token give the cost of an input token, and what longer
requests need beyond that is the cost of their output tokens. An open loop also has times without
requests, so its costs of tokens are those of the closed loop with the nearest throughput, times one
factor.

`Server` is a client of a server that speaks OpenAI's API, as vLLM, SGLang, TGI and llama.cpp serve
it: `POST /v1/completions` or `/v1/chat/completions` with `stream`, answered by server-sent events
(https://platform.openai.com/docs/api-reference/completions). Tokens are those that the server
counts (`usage`): an event may have several, or no text.

Other generators' files are the JSON of GenAI-Perf (`profile_export_genai_perf.json`), guidellm
(`benchmarks.json`) and `vllm bench serve --save-result`. They have no energy: a sampler that ran
beside them says the power.
"""

from __future__ import annotations

import http.client
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from perseus_planner import Monitor
from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.files import write_file
from perseus_planner.base.tables import csv_text
from perseus_planner.base.units import Count, Seconds
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.profiler.control import LockCheck, common_settings, opened_control

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu

LIMIT_S = 600.0
"""The most seconds between two events of an answer, unless others are given."""
_TOKENS = range(10, 1010)  # numbers of tokens that every vocabulary has
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be")
_MOST_OFF = 0.1  # of the tokens of a request that a server may count otherwise


class Answer(NamedTuple):
    """What came of a request; times in seconds of the monotonic clock."""

    begin_s: float  #: when it was sent
    times_s: tuple[float, ...]  #: when each event with text came
    input_tokens: int  #: as the server counts them
    output_tokens: int  #: likewise

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.times_s[0] - self.begin_s

    @property
    def tbt_s(self) -> float | None:
        """Mean time between tokens, which GenAI-Perf calls inter token latency and others time per
        output token; None if there is one token.
        """
        if self.output_tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.output_tokens - 1)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        return any(
            each.text or (each.delta and (each.delta.content or each.delta.reasoning_content))
            for each in self.choices
        )


_decode = msgspec.json.Decoder(_Event).decode


class Server:
    """A server at an address such as "http://127.0.0.1:8000/v1"; connections are kept alive.

    Args:
        address: Where it is; with or without /v1.
        model: Name of the model; None for the first that the server lists.
        chat: Whether to ask for chat completions.
        text: Whether prompts are text; otherwise numbers of tokens. Chats are text.
        key: What the server wants as a bearer token.
        limit_s: The most seconds between two events of an answer.

    Raises:
        UsageError: If no server answers there, or it does not list the model.
    """

    def __init__(
        self,
        address: str,
        model: str | None = None,
        *,
        chat: bool = False,
        text: bool = False,
        key: str | None = None,
        limit_s: float = LIMIT_S,
    ) -> None:
        self.address = address.rstrip("/").removesuffix("/v1") + "/v1"
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"{address!r} is no address of a server; write one such as http://127.0.0.1:8000/v1"
            )
        self._parts, self._limit_s = parts, limit_s
        self._chat, self._text = chat, text or chat
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._free: list[http.client.HTTPConnection] = []
        with self._answered("GET", "/models") as response:
            try:
                names = [str(entry["id"]) for entry in msgspec.json.decode(response.read())["data"]]
                self._model = names[0] if model is None else model
            except (LookupError, TypeError, msgspec.DecodeError) as error:
                raise self._problem(f"lists no models ({error!r})") from error
        if self._model not in names:
            self.close()
            raise UsageError(
                f"{self.address}: has no model {model!r}; choose one of: {', '.join(names)}"
            )

    def close(self) -> None:
        """Close all connections."""
        while self._free:
            self._free.pop().close()

    def complete(self, input_tokens: int, output_tokens: int) -> Answer:
        """Send a request, and return what came; its prompt is random, so that no server has it in
        its cache. May be called by many threads.

        Raises:
            UsageError: If the server refuses it, ends it early or takes too long.
        """
        prompt: Any = random.choices(_TOKENS, k=input_tokens)
        if self._text:
            prompt = " ".join(_WORDS[token % len(_WORDS)] for token in prompt)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._chat else None
        body = {
            "model": self._model,
            **(asked or {"prompt": prompt}),
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        path = "/chat/completions" if self._chat else "/completions"
        times_s, usage, finish = list[float](), None, "no reason given"
        encoded, begin_s = msgspec.json.encode(body), time.monotonic()
        with self._answered("POST", path, encoded) as response:
            for now_s, event in self._events(response):
                if event.error is not None:
                    raise self._problem(f"ended a request with {str(event.error)[:200]}")
                if event.has_text:
                    times_s.append(now_s)
                for choice in event.choices:
                    finish = choice.finish_reason or finish
                usage = event.usage or usage
        if usage is None and len(times_s) == output_tokens:
            usage = _Usage(input_tokens, output_tokens)
        if usage is None:
            raise self._problem(
                f"sent {len(times_s)} events for {output_tokens} tokens, and does not say how many "
                "tokens they have (stream_options.include_usage)"
            )
        if not times_s or usage.completion_tokens < (1 - _MOST_OFF) * output_tokens:
            raise UsageError(
                f"{self.address}: the server ended a request after {usage.completion_tokens} of "
                f"{output_tokens} tokens, {len(times_s)} events of which had text ({finish}); let "
                "it ignore the end of a text (ignore_eos), or ask for fewer"
            )
        if abs(usage.prompt_tokens - input_tokens) > max(_MOST_OFF * input_tokens, 64):
            raise UsageError(
                f"{self.address}: counts {usage.prompt_tokens} tokens in a prompt of "
                f"{input_tokens}; send numbers of tokens, or another class"
            )
        return Answer(begin_s, tuple(times_s), usage.prompt_tokens, usage.completion_tokens)

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[float, _Event]]:
        """Yield when each server-sent event came, and what it says."""
        rest = b""
        while data := response.read1(1 << 16):
            now_s = time.monotonic()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    if line[5:].strip() == b"[DONE]":
                        response.read()  # to its end, so that the connection can be used again
                        return
                    yield now_s, _decode(line[5:])
        raise self._problem("ended a request without its last event ([DONE])")

    @contextmanager
    def _answered(
        self, method: str, path: str, body: bytes | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a request; what goes wrong with the connection is a `UsageError`."""
        try:
            connection, response = self._sent(method, self._parts.path + path, body)
            try:
                self._check(response, path)
                yield response
            except BaseException:
                connection.close()
                raise
            self._free.append(connection)
        except TimeoutError as error:
            raise self._problem(f"sent nothing for {self._limit_s:g} s") from error
        except (OSError, http.client.HTTPException, msgspec.DecodeError) as error:
            raise self._problem(f"does not answer as OpenAI's API does ({error!r})") from error

    def _sent(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Send a request on a connection that is open, or on a new one if the server has closed
        that.
        """
        while True:
            try:
                connection, is_new = self._free.pop(), False
            except IndexError:
                secure = self._parts.scheme == "https"
                kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
                host, port = self._parts.hostname or "", self._parts.port
                connection, is_new = kind(host, port, timeout=self._limit_s), True
            try:
                connection.request(method, path, body, self._headers)
                return connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if is_new:
                    raise

    def _check(self, response: http.client.HTTPResponse, path: str) -> None:
        if response.status != 200:
            said = response.read(200).decode(errors="replace")
            raise UsageError(
                f"{self.address}{path}: answers {response.status}: {said}; check the address, the "
                "key and the model"
            )

    def _problem(self, what: str) -> UsageError:
        return UsageError(
            f"{self.address}: {what}; start the server, and give the address that it prints"
        )


_CLOCK_EVERY_S = 0.05
_SETTINGS = 6  # that are measured unless they are given
_LOWEST = 0.4  # of the highest setting: below, requests are slow and no cheaper


class Shape(NamedTuple):
    """A class of requests: how many tokens go in, and how many come out."""

    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class ServingSettings(Checked):
    """How requests are measured.

    Raises:
        UsageError: If a value is out of range.
    """

    shapes: tuple[Shape, ...]  #: Classes of requests
    concurrencies: tuple[int, ...] = (1,)  #: Closed loops: how many requests are in flight
    rates: tuple[float, ...] = ()  #: Open loops: how many requests arrive in a second
    control: str = "clock"  #: What is set: "clock", "power-limit", or "observed" to set nothing
    #: Clocks in MHz or power limits in watts, highest first; empty for six, down to 40 % of the
    #: highest.
    settings: tuple[int, ...] = ()
    window_s: Seconds = 10.0  #: The length of a window, seconds; longer until there is an answer
    windows: Count = 3  #: Number of windows of each measurement

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or not (self.concurrencies or self.rates):
            raise UsageError(
                "there is nothing to measure; give a class of requests, and a concurrency or rate"
            )
        if self.control == "observed" and self.settings:
            raise UsageError("control='observed' sets nothing; leave out the settings")


@dataclass(frozen=True)
class ServedRow:
    """What requests of one class cost at one setting; seconds and joules, all GPUs together."""

    shape: Shape  #: The class of requests
    concurrency: int | None  #: How many were in flight; None for an open loop
    rate_per_s: float | None  #: How many arrived in a second; None for a closed loop
    tensor_degree: int  #: Number of GPUs
    setting: int  #: Clock in MHz or power limit in watts; the achieved clock if nothing is set
    requests_per_s: float  #: How many were served in a second
    energy_j: float | None  #: Energy of one request; None if it was not measured
    #: Its error at most: what the energy counters did not show at the edges of windows.
    error_j: float | None
    #: Time to the first token.
    ttft_p50_s: float
    ttft_p95_s: float
    #: Mean time between the tokens of a request; None if there is one token.
    tbt_p50_s: float | None
    tbt_p95_s: float | None
    idle_w: float | None  #: Power of the GPUs without requests
    #: Energy, and time of the server, of an input token, and of an output token after the first;
    #: None if unknown.
    input_token_j: float | None = None
    output_token_j: float | None = None
    input_token_s: float | None = None
    output_token_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        """Input and output tokens of all requests in a second."""
        return self.requests_per_s * sum(self.shape)

    @property
    def tokens_per_j(self) -> float | None:
        """Input and output tokens per joule, which is also tokens/s per watt."""
        return sum(self.shape) / self.energy_j if self.energy_j else None

    def with_tokens(self, first: ServedRow) -> ServedRow:
        """Return the row with the costs of tokens, given that of requests of one output token."""
        inputs, after = self.shape.input_tokens, self.shape.output_tokens - 1
        if not after or self.energy_j is None or first.energy_j is None:
            return self
        first_s, all_s = 1 / first.requests_per_s, 1 / self.requests_per_s
        return replace(
            self,
            input_token_j=first.energy_j / inputs,
            output_token_j=max(0.0, self.energy_j - first.energy_j) / after,
            input_token_s=first_s / inputs,
            output_token_s=max(0.0, all_s - first_s) / after,
        )

    def with_tokens_as(self, closed: Sequence[ServedRow]) -> ServedRow:
        """Return the row of an open loop with costs of tokens like those of the closed loop of the
        nearest throughput.
        """
        known = [row for row in closed if row.shape == self.shape and row.input_token_j is not None]
        if not known:
            return self
        nearest = min(known, key=lambda row: abs(math.log(row.tokens_per_s / self.tokens_per_s)))
        slower = nearest.requests_per_s / self.requests_per_s
        dearer = (self.energy_j or 0.0) / (nearest.energy_j or 1.0)
        return replace(
            self,
            input_token_j=(nearest.input_token_j or 0.0) * dearer,
            output_token_j=(nearest.output_token_j or 0.0) * dearer,
            input_token_s=(nearest.input_token_s or 0.0) * slower,
            output_token_s=(nearest.output_token_s or 0.0) * slower,
        )


class Traffic:
    """Requests of a class that are sent until `stop`: so many in flight, or so many in a second.

    Args:
        target: What serves them.
        shape: Their class.
        concurrency: How many are in flight; None for an open loop.
        rate_per_s: How many arrive in a second; None for a closed loop.
    """

    def __init__(
        self, target: Server, shape: Shape, concurrency: int | None, rate_per_s: float | None
    ) -> None:
        self._target, self._shape = target, shape
        self.answers: list[Answer] = []
        self._ending, self._problem = threading.Event(), list[BaseException]()
        self._has_answer = threading.Condition()
        loops: list[Callable[[], None]] = [self._repeat] * (concurrency or 0)
        if rate_per_s is not None:
            loops = [lambda: self._arrive(rate_per_s)]
        self._is_open, self._warm = rate_per_s is not None, concurrency or 1
        self._threads: list[threading.Thread] = []
        for loop in loops:
            self._threads.append(self._started(loop))

    def warm_up(self) -> None:
        """Wait until traffic is as it stays: each of a closed loop has had an answer; an open one
        has gone on for twice the time of its first answer.
        """
        with self._has_answer:
            self._has_answer.wait_for(lambda: len(self.answers) >= self._warm or self._problem)
        self.check()
        if self._is_open:
            first = self.answers[0]
            self.wait(2 * (first.times_s[-1] - first.begin_s))

    def wait(self, time_s: float) -> None:
        """Let it go on for a time, seconds; raises what went wrong meanwhile."""
        self._ending.wait(time_s)
        self.check()

    def stop(self) -> list[Answer]:
        """Send no more, wait for all answers, and return them."""
        self._ending.set()
        while self._threads:  # those of an open loop may still begin one
            self._threads.pop(0).join()
        self.check()
        return self.answers

    def check(self) -> None:
        """Raise what went wrong, if anything."""
        if self._problem:
            self._ending.set()
            raise self._problem[0]

    def _started(self, function: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                function()
            except BaseException as error:
                self._problem.append(error)
                self._ending.set()
                with self._has_answer:
                    self._has_answer.notify_all()

        thread = threading.Thread(target=run, name="requests", daemon=True)
        thread.start()
        return thread

    def _one(self) -> None:
        answer = self._target.complete(*self._shape)
        with self._has_answer:
            self.answers.append(answer)
            self._has_answer.notify_all()

    def _repeat(self) -> None:
        while not self._ending.is_set():
            self._one()

    def _arrive(self, rate_per_s: float) -> None:
        at_s = time.monotonic()
        while not self._ending.wait(at_s - time.monotonic()):
            self._threads.append(self._started(self._one))
            at_s += random.expovariate(rate_per_s)


def measure_serving(
    target: Server,
    gpus: Sequence[Gpu],
    settings: ServingSettings,
    progress: Callable[[int, int], None] | None = None,
) -> Generator[ServedRow]:
    """Yield a row of each traffic and class at each setting, from the highest setting down, as it
    is measured; restore the GPUs afterwards.

    Args:
        target: What serves the requests.
        gpus: The GPUs that it runs on; all get the same setting.
        settings: What to measure.
        progress: Called with the number of settings that are done, and of all.

    Raises:
        UsageError: If a setting cannot be set, or the target does not serve what was asked of it.
        GpuError: If a GPU cannot be read or set, or if clock locks have no effect.
    """
    with ExitStack() as stack:
        chosen: Sequence[int | None] = (None,)
        set_to: list[Callable[[int], None]] = []
        if settings.control != "observed":
            stack.enter_context(lease_gpus(gpus, power_limit=settings.control == "power-limit"))
            controls = [stack.enter_context(opened_control(gpu, settings.control)) for gpu in gpus]
            set_to = [control for _, control in controls]
            chosen = _chosen(common_settings([offered for offered, _ in controls]), settings)
        meter = _Meter(target, gpus, stack.enter_context(Monitor(list(gpus))), settings)
        locks = LockCheck(gpus[0].text)
        for number, setting in enumerate(chosen):
            for set_one in set_to:
                set_one(setting)  # type: ignore[arg-type]
            yield from meter.rows(setting)
            if settings.control == "clock" and setting is not None:
                locks.add(setting, meter.achieved_mhz, ())
            if progress is not None:
                progress(number + 1, len(chosen))
        locks.finish()


class _Meter:
    """Measures traffic on some GPUs, at the setting that they have."""

    def __init__(
        self, target: Server, gpus: Sequence[Gpu], monitor: Monitor, settings: ServingSettings
    ) -> None:
        self._target, self._gpus, self._monitor, self._settings = target, gpus, monitor, settings
        self.achieved_mhz = self._idle_w = 0.0

    def rows(self, setting: int | None) -> Iterator[ServedRow]:
        """Yield a row of each traffic and class."""
        shapes = sorted(set(self._settings.shapes))
        self._target.complete(*shapes[0])  # the first request of a server is slow
        with self._monitor.window() as window:
            self._gpus[0].wait(min(1.0, self._settings.window_s))
        self._idle_w = window.average_w
        closed = list[ServedRow]()
        for concurrency in self._settings.concurrencies:
            firsts: dict[int, ServedRow] = {}
            for shape in shapes:
                if shape.input_tokens not in firsts:
                    first = Shape(shape.input_tokens, 1)
                    firsts[shape.input_tokens] = self._measure(setting, first, concurrency, None)
                row = first_row = firsts[shape.input_tokens]
                if shape.output_tokens > 1:
                    measured = self._measure(setting, shape, concurrency, None)
                    row = measured.with_tokens(first_row)
                closed.append(row)
                yield row
        for rate_per_s in self._settings.rates:
            for shape in shapes:
                yield self._measure(setting, shape, None, rate_per_s).with_tokens_as(closed)

    def _measure(
        self, setting: int | None, shape: Shape, concurrency: int | None, rate_per_s: float | None
    ) -> ServedRow:
        """Measure some windows of traffic."""
        traffic = Traffic(self._target, shape, concurrency, rate_per_s)
        edges_s = list[tuple[float, float]]()
        energy_j = error_j = 0.0
        clocks_mhz = list[int]()
        try:
            traffic.warm_up()
            for _ in range(self._settings.windows):
                begin_s = time.monotonic()
                left_s = self._settings.window_s
                with self._monitor.window() as window:
                    while left_s > 0 or traffic.answers[-1].times_s[-1] < begin_s:
                        traffic.wait(min(_CLOCK_EVERY_S, left_s if left_s > 0 else _CLOCK_EVERY_S))
                        clocks_mhz += [gpu.clock_mhz() for gpu in self._gpus]
                        left_s = begin_s + self._settings.window_s - time.monotonic()
                edges_s.append((begin_s, time.monotonic()))
                energy_j += window.energy_j
                # windows begin at different phases of the counters
                error_j = math.hypot(error_j, window.error_j)
        finally:
            answers = traffic.stop()
        served, within = _within(answers, edges_s)
        self.achieved_mhz = fmean(clocks_mhz)
        time_s = sum(end_s - begin_s for begin_s, end_s in edges_s)
        ttfts_s = [answer.ttft_s for answer in within]
        tbts_s = [answer.tbt_s for answer in within if answer.tbt_s is not None]
        return ServedRow(
            shape=shape,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
            tensor_degree=len(self._gpus),
            setting=round(self.achieved_mhz) if setting is None else setting,
            requests_per_s=served / time_s,
            energy_j=energy_j / served,
            error_j=error_j / served,
            ttft_p50_s=_quantile(ttfts_s, 0.5),
            ttft_p95_s=_quantile(ttfts_s, 0.95),
            tbt_p50_s=_quantile(tbts_s, 0.5) if tbts_s else None,
            tbt_p95_s=_quantile(tbts_s, 0.95) if tbts_s else None,
            idle_w=self._idle_w,
        )


def _within(
    answers: Sequence[Answer], edges_s: Sequence[tuple[float, float]]
) -> tuple[float, list[Answer]]:
    """Return how many requests were served within windows, by the shares of their events; and
    those with an event there.
    """
    served, some = 0.0, []
    for answer in answers:
        count = sum(begin <= at < end for at in answer.times_s for begin, end in edges_s)
        if count:
            served += count / len(answer.times_s)
            some.append(answer)
    return served, some


def _chosen(possible: Sequence[int], settings: ServingSettings) -> list[int]:
    """Return the settings to measure, highest first."""
    if not settings.settings:
        fitting = [candidate for candidate in possible if candidate >= _LOWEST * possible[0]]
        steps = min(_SETTINGS, len(fitting))
        return [
            fitting[round(step * (len(fitting) - 1) / max(1, steps - 1))] for step in range(steps)
        ]
    for wanted in settings.settings:
        if wanted not in possible and settings.control == "clock":
            nearest = min(possible, key=lambda setting: abs(setting - wanted))
            raise UsageError(
                f"clock {wanted} MHz: the GPU does not have it; the nearest is {nearest} MHz"
            )
    return sorted(set(settings.settings), reverse=True)


def _quantile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def save_served(rows: Sequence[ServedRow], control: str, origin: str, path: Path) -> None:
    """Write an inference profile as `planner inference plan` reads it; latencies are the 95th
    percentiles.

    Raises:
        UsageError: If the file cannot be written.
    """
    columns = {
        "input": "shape.input_tokens",
        "output": "shape.output_tokens",
        "tensor_degree": "tensor_degree",
        "power_limit_w" if control == "power-limit" else "clock_mhz": "setting",
        "tokens_per_s": "tokens_per_s",
        "energy_j": "energy_j",
        "ttft_s": "ttft_p95_s",
        "tbt_s": "tbt_p95_s",
        "idle_w": "idle_w",
        "concurrency": "concurrency",
        "rate_per_s": "rate_per_s",
        "input_token_j": "input_token_j",
        "output_token_j": "output_token_j",
        "input_token_s": "input_token_s",
        "output_token_s": "output_token_s",
        "energy_error_j": "error_j",
        "ttft_p50_s": "ttft_p50_s",
        "tbt_p50_s": "tbt_p50_s",
    }
    values = map(attrgetter(*columns.values()), rows)
    cells = (
        [
            "" if value is None else f"{value:.6g}" if isinstance(value, float) else value
            for value in row
        ]
        for row in values
    )
    text = f"# {origin} by planner inference profile\n{csv_text([columns, *cells])}"
    write_file(path, text, UsageError)


def read_results(
    path: Path,
    setting: int,
    tensor_degree: int,
    power_w: float | None = None,
    shape: Shape | None = None,
) -> list[ServedRow]:
    """Return a row of each load in a file.

    Args:
        path: The file.
        setting: The clock in MHz, or power limit in watts, that was set.
        tensor_degree: Number of GPUs of the server.
        power_w: Their mean power meanwhile, watts, all together; None if it is not known.
        shape: The class of its requests; None for their mean lengths.

    Raises:
        UsageError: If the file cannot be read, or is none of these.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
        loads = list(_loads(content))
    except (OSError, msgspec.DecodeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path}: cannot be read as a result of genai-perf, guidellm or vllm bench serve "
            f"({error!r}); give the JSON file that one of them writes"
        ) from error
    rows = []
    for load in loads:
        lengths = Shape(round(load.pop("inputs")), round(load.pop("outputs")))
        energy_j = power_w / load["requests_per_s"] if power_w is not None else None
        rows.append(
            ServedRow(
                shape or lengths,
                tensor_degree=tensor_degree,
                setting=setting,
                energy_j=energy_j,
                error_j=None,
                idle_w=None,
                **load,
            )
        )
    return rows


def _loads(content: Any) -> Iterator[dict[str, Any]]:
    """Yield the fields of a row for each load."""
    if "benchmarks" in content:
        for benchmark in content["benchmarks"]:
            yield _guidellm(benchmark)
    elif "request_throughput" in content and isinstance(content["request_throughput"], dict):
        yield _genai_perf(content)
    else:
        yield _vllm(content)


def _vllm(content: Mapping[str, Any]) -> dict[str, Any]:
    count, concurrency = content["completed"], content.get("max_concurrency")
    rate = content["request_rate"]
    is_open = concurrency is None and rate != "inf"

    def high_s(name: str) -> float:
        key = f"p95_{name}_ms"
        return float(content[key if key in content else f"p99_{name}_ms"]) / 1e3

    return {
        "concurrency": None if is_open else int(concurrency or count),
        "rate_per_s": float(rate) if is_open else None,
        "requests_per_s": float(content["request_throughput"]),
        "inputs": content["total_input_tokens"] / count,
        "outputs": content["total_output_tokens"] / count,
        "ttft_p50_s": content["median_ttft_ms"] / 1e3,
        "ttft_p95_s": high_s("ttft"),
        "tbt_p50_s": content["median_tpot_ms"] / 1e3,
        "tbt_p95_s": high_s("tpot"),
    }


def _genai_perf(content: Mapping[str, Any]) -> dict[str, Any]:
    asked = content["input_config"]
    loop = (asked.get("perf_analyzer") or {}).get("stimulus") or asked
    concurrency, rate = loop.get("concurrency"), loop.get("request_rate")
    if (concurrency is None) == (rate is None):
        raise ValueError("its input_config has no concurrency or request_rate")

    def of(name: str, what: str) -> float:
        scale = {"ms": 1e3, "us": 1e6, "ns": 1e9}.get(content[name]["unit"], 1.0)
        return float(content[name][what]) / scale

    return {
        "concurrency": concurrency,
        "rate_per_s": rate,
        "requests_per_s": of("request_throughput", "avg"),
        "inputs": of("input_sequence_length", "avg"),
        "outputs": of("output_sequence_length", "avg"),
        "ttft_p50_s": of("time_to_first_token", "p50"),
        "ttft_p95_s": of("time_to_first_token", "p95"),
        "tbt_p50_s": of("inter_token_latency", "p50"),
        "tbt_p95_s": of("inter_token_latency", "p95"),
    }


def _guidellm(benchmark: Mapping[str, Any]) -> dict[str, Any]:
    places = (benchmark.get(name) or {} for name in ("config", "args", "scheduler"))
    strategy = next(place["strategy"] for place in places if place.get("strategy"))
    kind = strategy["type_"]
    concurrency = 1 if kind == "synchronous" else strategy.get("streams")
    if kind == "throughput":
        concurrency = strategy.get("max_concurrency")
    metrics = benchmark["metrics"]

    def of(name: str, percentile: str = "") -> float:
        found = metrics[name]["successful"]
        return float(found["percentiles"][percentile] if percentile else found["mean"])

    return {
        "concurrency": concurrency,
        "rate_per_s": None if concurrency else float(strategy["rate"]),
        "requests_per_s": of("requests_per_second"),
        "inputs": of("prompt_token_count"),
        "outputs": of("output_token_count"),
        "ttft_p50_s": of("time_to_first_token_ms", "p50") / 1e3,
        "ttft_p95_s": of("time_to_first_token_ms", "p95") / 1e3,
        "tbt_p50_s": of("inter_token_latency_ms", "p50") / 1e3,
        "tbt_p95_s": of("inter_token_latency_ms", "p95") / 1e3,
    }
