"""Measure what requests to a server cost under traffic, over clocks or power limits.

Traffic is a closed loop, where so many requests are in flight at any time, or an open loop, where
requests arrive at random at a rate (Poisson), as AIPerf, guidellm and `vllm bench serve` have
them. It goes on from before the window that is measured to after it. A `Monitor` measures its
energy; a request counts in it by the share of its events that came in it.

In a closed loop, requests of one output token give the cost of an input token, and what longer
requests need beyond that is the cost of their output tokens. Input tokens that came from the
server's cache cost nothing, so they are told apart. An open loop also has times without
requests, so its costs of tokens are those of the closed loop with the nearest throughput, times one
factor.

`Server` is a client of a server that speaks OpenAI's API, as vLLM, SGLang, TGI and llama.cpp serve
it: `POST /v1/completions` or `/v1/chat/completions` with `stream`, answered by server-sent events
(https://platform.openai.com/docs/api-reference/completions). Tokens are those that the server
counts (`usage`): an event may have several, or no text. An event has text if anything in its delta
is text, whatever the field is called: vLLM has renamed `reasoning_content` to `reasoning`, and
calls of tools stream their arguments.
"""

from __future__ import annotations

import http.client
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from perseus_planner import Monitor
from perseus_planner.base.errors import QUOTED, UsageError, printable
from perseus_planner.base.fields import Checked
from perseus_planner.base.files import write_file
from perseus_planner.base.tables import csv_text
from perseus_planner.base.units import Seconds
from perseus_planner.extensions.inference.metrics import MetricsReader, ServerState, split_address
from perseus_planner.extensions.inference.workload import Cell
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.profiler.choosing import descent
from perseus_planner.profiler.control import LockCheck, common_settings, opened_control

if TYPE_CHECKING:
    from perseus_planner.gpu import Gpu

_TOKENS = range(10, 1010)  # numbers of tokens that every vocabulary has
_WORDS = ("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be")
_MOST_OFF = 0.1  # of the tokens of a request that a server may count otherwise
_FEW_OFF = 2  # tokens without text of their own that every answer may have, such as its end
# Fields of a delta that name what is sent; all other texts in it are what the model wrote.
_NAMING = frozenset({"role", "id", "type", "index", "object", "format", "signature", "status"})
_ANSWER_S = 1.0  # in which a server's metrics come


class Answer(NamedTuple):
    """What came of a request; times in seconds of the monotonic clock."""

    begin_s: float  #: when it was sent
    times_s: tuple[float, ...]  #: when each event with text came, and the end
    input_tokens: int  #: as the server counts them
    output_tokens: int  #: as the server counts them
    cached_tokens: int | None  #: input tokens that came from a cache; None if it does not say
    events: int  #: how many events had text

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


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None

    @property
    def has_text(self) -> bool:
        return any(choice.text or _is_written(choice.delta) for choice in self.choices)


def _is_written(part: Any) -> bool:
    """Return whether a part of a delta has text that the model wrote."""
    if isinstance(part, dict):
        return any(_is_written(value) for name, value in part.items() if name not in _NAMING)
    if isinstance(part, list):
        return any(map(_is_written, part))
    return isinstance(part, str) and part != ""


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
        limit_s: float = 600.0,
    ) -> None:
        # With or without /v1, as users copy the address from either place.
        self.address = address.rstrip("/").removesuffix("/v1") + "/v1"
        self._parts = split_address(self.address, "http", "https")
        self._limit_s = limit_s
        self._chat = chat
        self._text = text or chat
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._free: list[http.client.HTTPConnection] = []
        # One request at the start, so that a wrong address or model is told before anything is
        # measured.
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

    @property
    def is_plain(self) -> bool:
        """Whether it speaks HTTP without TLS."""
        return self._parts.scheme == "http"

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
        # A random prompt is in nobody's cache, so that its tokens are computed.
        prompt: Any = random.choices(_TOKENS, k=input_tokens)
        # Where prompts are text, each word stands for about one token.
        if self._text:
            prompt = " ".join(_WORDS[token % len(_WORDS)] for token in prompt)
        asked = {"messages": [{"role": "user", "content": prompt}]} if self._chat else None
        # The answer must have all tokens asked for, so the end of a text is ignored.
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
        times_s = list[float]()
        end_s = 0.0
        usage = None
        finish = "no reason given"
        # Encoded before the clock runs, as that is no time of the server.
        encoded = msgspec.json.encode(body)
        begin_s = time.monotonic()
        with self._answered("POST", path, encoded) as response:
            # An error may come within the stream, after the server has answered with success.
            for now_s, event in self._events(response):
                if event.error is not None:
                    said = printable(str(event.error))
                    raise self._problem(f"ended a request with {said}")
                # Only events with text are tokens that a user sees.
                if event.has_text:
                    times_s.append(now_s)
                for choice in event.choices:
                    finish = choice.finish_reason or finish
                    end_s = now_s
                usage = event.usage or usage
        events = len(times_s)
        # Without the server's count, events can stand for tokens only if there are as many.
        if usage is None:
            if events != output_tokens:
                raise self._problem(
                    f"sent {events} events for {output_tokens} tokens, and does not say how "
                    "many tokens they have (stream_options.include_usage)"
                )
            usage = _Usage(input_tokens, output_tokens)
        # A shorter answer costs less than the class that it would be counted in.
        if not end_s or usage.completion_tokens < (1 - _MOST_OFF) * output_tokens:
            raise UsageError(
                f"{self.address}: the server ended a request after {usage.completion_tokens} of "
                f"{output_tokens} tokens, {events} events of which had text ({finish}); let "
                "it ignore the end of a text (ignore_eos), or ask for fewer"
            )
        # A few tokens more or less are no other class, but many are.
        if abs(usage.prompt_tokens - input_tokens) > max(_MOST_OFF * input_tokens, 64):
            raise UsageError(
                f"{self.address}: counts {usage.prompt_tokens} tokens in a prompt of "
                f"{input_tokens}; send numbers of tokens, or another class"
            )
        if end_s not in times_s:  # the last tokens had no text, as half a character
            times_s.append(end_s)
        return Answer(
            begin_s,
            tuple(times_s),
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            events,
        )

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[float, _Event]]:
        """Yield when each server-sent event came, and what it says."""
        unfinished = b""
        # Several events may come in one piece, and one event in several.
        while data := response.read1(1 << 16):
            now_s = time.monotonic()
            *lines, unfinished = (unfinished + data).split(b"\n")
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
            # A connection is kept for the next request only if this one was read to its end.
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
        # A server closes idle connections, so a kept one may be gone; a new one that fails is an
        # error.
        while True:
            try:
                connection = self._free.pop()
                is_new = False
            except IndexError:
                secure = self._parts.scheme == "https"
                kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
                connection = kind(self._parts.netloc, timeout=self._limit_s)
                is_new = True
            try:
                connection.request(method, path, body, self._headers)
                return connection, connection.getresponse()
            except (ConnectionError, http.client.BadStatusLine):
                connection.close()
                if is_new:
                    raise

    def _check(self, response: http.client.HTTPResponse, path: str) -> None:
        if response.status != 200:
            said = printable(response.read(QUOTED).decode(errors="replace"))
            raise UsageError(
                f"{self.address}{path}: answers {response.status}: {said}; check the address, the "
                "key and the model"
            )

    def _problem(self, what: str) -> UsageError:
        return UsageError(
            f"{self.address}: {what}; start the server, and give the address that it prints"
        )


_CLOCK_EVERY_S = 0.05
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
    window_s: Seconds = 30.0  #: The length of a measurement; longer until there is an answer

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or not (self.concurrencies or self.rates):
            raise UsageError(
                "there is nothing to measure; give a class of requests, and a concurrency or rate"
            )
        if self.control == "observed" and self.settings:
            raise UsageError("control='observed' sets nothing; leave out the settings")


@dataclass(frozen=True, kw_only=True)
class ServedRow(Cell):
    """A row of an inference profile: what requests of one class cost at one setting. Latencies are
    the 95th percentiles of requests.
    """

    input: int  #: Tokens of a request
    output: int
    tensor_degree: int  #: Number of GPUs
    setting: int  #: Clock in MHz or power limit in watts; the achieved clock if nothing is set
    rate_per_s: float | None  #: How many requests arrived in a second; None for a closed loop
    #: What the energy counters did not show at the edges of windows, at most; None if unknown.
    energy_error_j: float | None = None
    ttft_p50_s: float
    tbt_p50_s: float | None  #: None if there is one token
    #: Input tokens of a request that came from a cache, on average; 0 if the server does not say.
    cached_tokens: float = 0.0
    events: float | None = None  #: Events with text of a request, on average; None if unknown

    @property
    def requests_per_s(self) -> float:
        """How many were served in a second."""
        return self.tokens_per_s / (self.input + self.output)

    @property
    def problem(self) -> str | None:
        """Why its latencies may be wrong; None if they fit what the server counted."""
        if self.events is None:
            return None
        if abs(self.output - self.events) <= max(_FEW_OFF, _MOST_OFF * self.output):
            return None
        return (
            f"answers of {self.output} tokens had {self.events:.4g} events with text: if the "
            "server joins tokens (speculative decoding, a stream interval), latencies are right; "
            "if it hides thoughts, the time to the first token is that of the first one shown, and "
            "the time between tokens is too short"
        )

    def with_tokens(self, first: ServedRow) -> ServedRow:
        """Return the row with the costs of tokens, given that of requests of one output token."""
        # Requests of one token tell the cost of input, as nearly all of their time is the prompt.
        after = self.output - 1
        computed = first.input - first.cached_tokens
        if not after or self.energy_j is None or first.energy_j is None or computed <= 0:
            return self
        # In a closed loop the throughput tells the seconds of the whole server for a request.
        first_s = 1 / first.requests_per_s
        all_s = 1 / self.requests_per_s
        input_j = first.energy_j / computed
        input_s = first_s / computed
        # What its own input costs, of which more or less may have come from a cache.
        computed_input = self.input - self.cached_tokens
        return replace(
            self,
            input_token_j=input_j,
            # Noise may make the input seem dearer than all, and no token costs less than nothing.
            output_token_j=max(0.0, self.energy_j - computed_input * input_j) / after,
            input_token_s=input_s,
            output_token_s=max(0.0, all_s - computed_input * input_s) / after,
        )

    def with_tokens_as(self, closed: Sequence[ServedRow]) -> ServedRow:
        """Return the row of an open loop with costs of tokens like those of the closed loop of the
        nearest throughput.
        """
        # An open loop also has times without requests, so it cannot tell its own costs of tokens.
        shape = self.input, self.output
        same_shape = [
            row
            for row in closed
            if (row.input, row.output) == shape and row.input_token_j is not None
        ]
        if not same_shape:
            return self
        # The nearest throughput has the most similar batches, which is what the cost of tokens
        # depends on.
        nearest = min(
            same_shape, key=lambda row: abs(math.log(row.tokens_per_s / self.tokens_per_s))
        )
        # One factor for all tokens makes the costs add up to those of the open loop.
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
        self._target = target
        self._shape = shape
        self.answers: list[Answer] = []
        self._ending = threading.Event()
        self._problem = list[BaseException]()
        self._is_open = rate_per_s is not None
        # Traffic is warm once each request in flight has had an answer; an open loop once it has
        # one.
        self._warm = concurrency or 1
        self._threads: list[threading.Thread] = []
        for _ in range(self._warm):
            self._start(self._repeat if rate_per_s is None else partial(self._arrive, rate_per_s))

    def warm_up(self) -> None:
        """Wait until traffic is as it stays: each of a closed loop has had an answer; an open one
        has gone on for twice the time of its first answer.
        """
        while len(self.answers) < self._warm:
            self.wait(_CLOCK_EVERY_S)
        if self._is_open:
            first = self.answers[0]
            self.wait(2 * (first.times_s[-1] - first.begin_s))

    def wait(self, time_s: float) -> None:
        """Let it go on for a time, seconds; raises what went wrong meanwhile."""
        self._ending.wait(time_s)
        if self._problem:
            raise self._problem[0]

    def stop(self) -> list[Answer]:
        """Send no more, wait for all answers, and return them."""
        self._ending.set()
        while self._threads:  # those of an open loop may still begin one
            self._threads.pop(0).join()
        self.wait(0.0)
        return self.answers

    def _start(self, function: Callable[[], None]) -> None:
        def run() -> None:
            try:
                function()
            except BaseException as error:
                self._problem.append(error)
                self._ending.set()

        thread = threading.Thread(target=run, name="requests", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _one(self) -> None:
        self.answers.append(self._target.complete(*self._shape))

    def _repeat(self) -> None:
        while not self._ending.is_set():
            self._one()

    def _arrive(self, rate_per_s: float) -> None:
        at_s = time.monotonic()
        while not self._ending.wait(at_s - time.monotonic()):
            self._start(self._one)
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
    # Everything is restored in reverse, also if a request fails.
    with ExitStack() as stack:
        # What is only observed is not changed, so it needs no lease.
        if settings.control != "observed":
            stack.enter_context(lease_gpus(gpus, power_limit=settings.control == "power-limit"))
        controls = [stack.enter_context(opened_control(gpu, settings.control)) for gpu in gpus]
        chosen = _chosen(common_settings([offered for offered, _ in controls]), settings)
        meter = _Meter(target, gpus, stack.enter_context(Monitor(list(gpus))), settings)
        # Metrics of the server are closed before the GPUs are.
        stack.callback(meter.close)
        # A lock without effect would give rows of one clock under the names of many.
        locks = LockCheck(gpus[0].text)
        for number, setting in enumerate(chosen, 1):
            for _, set_one in controls:
                set_one(setting)
            yield from meter.rows(setting)
            if settings.control == "clock":
                locks.add(setting, meter.achieved_mhz, ())
            if progress is not None:
                progress(number, len(chosen))
        locks.finish()


class _Meter:
    """Measures traffic on some GPUs, at the setting that they have."""

    def __init__(
        self, target: Server, gpus: Sequence[Gpu], monitor: Monitor, settings: ServingSettings
    ) -> None:
        self._target = target
        self._gpus = gpus
        self._monitor = monitor
        self._settings = settings
        self.achieved_mhz = self._idle_w = 0.0
        self._metrics = MetricsReader(target.address, _ANSWER_S) if target.is_plain else None

    def rows(self, setting: int) -> Iterator[ServedRow]:
        """Yield a row of each traffic and class."""
        # Sorted, so that rows come in one order, whatever was asked for first.
        shapes = sorted(set(self._settings.shapes))
        self._target.complete(*shapes[0])  # the first request of a server is slow
        # The power without requests is measured once for a setting, before traffic begins.
        with self._monitor.window() as window:
            self._gpus[0].wait(min(1.0, self._settings.window_s))
        self._idle_w = window.average_w
        closed = list[ServedRow]()
        for concurrency in self._settings.concurrencies:
            # Classes with the same input share the requests of one output token, so these are
            # cached.
            measured = cache(partial(self._measure, setting, concurrency, None))
            for shape in shapes:
                first = measured(Shape(shape.input_tokens, 1))
                closed.append(measured(shape).with_tokens(first))
                yield closed[-1]
        # After the closed loops, whose costs of tokens these rows take over.
        for rate_per_s in self._settings.rates:
            for shape in shapes:
                yield self._measure(setting, None, rate_per_s, shape).with_tokens_as(closed)

    def _measure(
        self, setting: int, concurrency: int | None, rate_per_s: float | None, shape: Shape
    ) -> ServedRow:
        """Measure a window of traffic."""
        traffic = Traffic(self._target, shape, concurrency, rate_per_s)
        clocks_mhz = list[int]()
        try:
            # Traffic goes on before and after the window, so that no edge of it is in what is
            # measured.
            traffic.warm_up()
            before = self._state()
            begin_s = time.monotonic()
            with self._monitor.window() as window:
                while (
                    time.monotonic() < begin_s + self._settings.window_s
                    # A window without any answer in it would have no request to divide by.
                    or traffic.answers[-1].times_s[-1] < begin_s
                ):
                    traffic.wait(_CLOCK_EVERY_S)
                    clocks_mhz += [gpu.clock_mhz() for gpu in self._gpus]
            end_s = time.monotonic()
            cached = _cached_share(before, self._state())
        # Also after an error, as threads would go on sending.
        finally:
            answers = traffic.stop()
        self.achieved_mhz = fmean(clocks_mhz)
        # A request counts by its share of events in the window, as its energy does.
        counts = [sum(begin_s <= at_s < end_s for at_s in answered.times_s) for answered in answers]
        within = [answer for answer, count in zip(answers, counts, strict=True) if count]
        # Requests that say what was cached are surer than the server's totals.
        said = [answered for answered in within if answered.cached_tokens is not None]
        if said:  # each request says it, so this needs no metrics
            cached = sum(answered.cached_tokens or 0 for answered in said)
            cached /= max(1, sum(answered.input_tokens for answered in said))
        served = sum(
            count / len(answer.times_s) for answer, count in zip(answers, counts, strict=True)
        )
        ttfts_s = _quantiles([answer.ttft_s for answer in within])
        tbts_s = _quantiles([answer.tbt_s for answer in within if answer.tbt_s is not None])
        return ServedRow(
            input=shape.input_tokens,
            output=shape.output_tokens,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
            tensor_degree=len(self._gpus),
            # Where nothing is set, the row's setting is the clock that was seen.
            setting=setting or round(self.achieved_mhz),
            tokens_per_s=served * sum(shape) / (end_s - begin_s),
            energy_j=window.energy_j / served,
            energy_error_j=window.error_j / served,
            ttft_p50_s=ttfts_s[0],
            ttft_s=ttfts_s[1],
            tbt_p50_s=tbts_s[0],
            tbt_s=tbts_s[1],
            idle_w=self._idle_w,
            cached_tokens=cached * shape.input_tokens,
            events=fmean(answer.events for answer in within),
        )

    def close(self) -> None:
        """Close the connection to the server's metrics."""
        if self._metrics is not None:
            self._metrics.close()

    def _state(self) -> ServerState | None:
        """Return what the server says of itself; None if it says nothing, or speaks otherwise."""
        if self._metrics is None:
            return None
        try:
            return self._metrics.read()
        except (OSError, http.client.HTTPException, UsageError):
            self.close()
            self._metrics = None
            return None


def _cached_share(before: ServerState | None, after: ServerState | None) -> float:
    """Return the share of the input tokens that came from a cache meanwhile; 0 if it is unknown."""
    if before is None or after is None:
        return 0.0
    cached = after.cached_tokens - before.cached_tokens
    computed = after.input_tokens - before.input_tokens
    return cached / (cached + computed) if cached > 0 and computed >= 0 else 0.0


def _chosen(possible: Sequence[int], settings: ServingSettings) -> list[int]:
    """Return the settings to measure, highest first."""
    if not settings.settings:
        fitting = [candidate for candidate in possible if candidate >= _LOWEST * possible[0]]
        return descent(fitting, fitting[0])
    for wanted in settings.settings:
        if wanted not in possible and settings.control == "clock":
            nearest = min(possible, key=lambda setting: abs(setting - wanted))
            raise UsageError(
                f"clock {wanted} MHz: the GPU does not have it; the nearest is {nearest} MHz"
            )
    return sorted(set(settings.settings), reverse=True)


def _quantiles(values: Sequence[float]) -> Any:
    """Return the median and the 95th percentile, of those that there are."""
    if not values:
        return None, None
    return np.quantile(values, (0.5, 0.95), method="inverted_cdf").tolist()


_FIRST = ("input", "output", "tensor_degree", "setting")  # columns


def save_served(rows: Sequence[ServedRow], control: str, origin: str, path: Path) -> None:
    """Write an inference profile as `planner inference plan` reads it.

    Raises:
        UsageError: If the file cannot be written.
    """
    names = [*dict.fromkeys((*_FIRST, *(field.name for field in fields(ServedRow))))]
    setting = "power_limit_w" if control == "power-limit" else "clock_mhz"
    cells = (
        [f"{value:.6g}" if isinstance(value, float) else value for value in row]
        for row in map(attrgetter(*names), rows)
    )
    table = csv_text([[setting if name == "setting" else name for name in names], *cells])
    write_file(path, f"# {origin} by planner inference profile\n{table}", UsageError)
