"""What a server of vLLM or SGLang says of itself at `/metrics`, in Prometheus' text format
(https://prometheus.io/docs/instrumenting/exposition_formats/).

Input tokens are those that the server computed. vLLM's `prompt_tokens_total` and SGLang's of that
name also count tokens that came from a cache, which cost nothing. Newer vLLMs say where they came
from (`prompt_tokens_by_source_total`), SGLang says how many were cached (`cached_tokens_total`).
"""

from __future__ import annotations

import http.client
import math
import re
import time
from bisect import bisect_right
from collections import defaultdict
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit

from perseus_planner.base.errors import UsageError, shown

_NAMES = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "input_tokens": ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    "output_tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "ttft": ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    "tbt": (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
    ),
    "tpot": (
        "vllm:request_time_per_output_token_seconds",
        "sglang:request_time_per_output_token_seconds",
    ),
}
"""What is read -> its names, in versions of either server."""
_OPTIONAL = frozenset({"tpot"})
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_COMPUTED = "local_compute"  # the source of prompt tokens that this server computed
_CACHED = "sglang:cached_tokens_total"
_LINE = re.compile(
    r"^({})(_bucket|_sum|_count)?(?:\{{(.*)\}})? (\S+)".format(
        "|".join([*(name for names in _NAMES.values() for name in names), _BY_SOURCE, _CACHED])
    ),
    re.MULTILINE,
)
_BOUND = re.compile(r'(?:^|,)le="([^"]+)"')
_SOURCE = re.compile(r'(?:^|,)source="([^"]+)"')


def split_address(address: str, *schemes: str) -> SplitResult:
    """Return the parts of the address of a server.

    Raises:
        UsageError: If this is no address.
    """
    with suppress(ValueError):  # its port is no number
        parts = urlsplit(address)
        if parts.scheme in schemes and parts.hostname and parts.port != 0 and not parts.username:
            return parts
    raise UsageError(
        f"{address!r} is no address of a server; write one such as http://127.0.0.1:8000, "
        "without a user"
    )


class Histogram(NamedTuple):
    """How many values were seen, by bounds."""

    bounds: tuple[float, ...]  #: highest last: infinity
    counts: tuple[float, ...]  #: values of at most each bound
    total: float  #: sum of all values

    @property
    def seen(self) -> float:
        """How many values there were."""
        return self.counts[-1] if self.counts else 0.0

    def since(self, before: Histogram) -> Histogram:
        """Return what was seen after `before`."""
        counts = tuple(a - b for a, b in zip(self.counts, before.counts, strict=True))
        return Histogram(self.bounds, counts, self.total - before.total)

    def above(self, most: float) -> float:
        """Return how many values were above: for sure, and of those between the two bounds around
        it as many as their mean tells, if they are spread evenly around that.
        """
        # The bucket in which the limit lies: those behind it are above for sure.
        bucket = bisect_right(self.bounds, most)
        counts = [b - a for a, b in zip((0.0, *self.counts), self.counts, strict=False)]
        lows = (0.0, *self.bounds[:-1])
        low = lows[bucket]
        high = self.bounds[bucket]
        unsure = counts[bucket]
        sure = sum(counts[bucket + 1 :])
        if not unsure:
            return sure
        # The sum of all values, less what other buckets hold at their middles, is that of the
        # unsure ones.
        others = sum(
            count * (low if math.isinf(high) else (low + high) / 2)
            for number, (count, low, high) in enumerate(zip(counts, lows, self.bounds, strict=True))
            if number != bucket and count
        )
        # A mean outside its bucket is an error of the middles.
        mean = min(max((self.total - others) / unsure, low), high)
        # A single value is its own mean, so it is above the limit or not.
        spread = min(mean - low, high - mean) if self.seen > 1 else 0.0
        if not spread:
            return sure + unsure * (mean > most)
        # The share above the limit of values that are spread evenly around their mean.
        return sure + unsure * min(1.0, max(0.0, (mean + spread - most) / (2 * spread)))


class ServerState(NamedTuple):
    """A server at one moment. Tokens and histograms count from its start."""

    time_s: float  #: monotonic clock
    running: float  #: requests in the batch
    waiting: float  #: requests that wait
    input_tokens: float  #: that it computed, as far as it says; from a cache they cost nothing
    output_tokens: float
    ttft: Histogram  #: times to the first token, seconds
    tbt: Histogram  #: times between tokens, seconds
    #: times between tokens, of each request that has ended a mean; None if it does not say
    tpot: Histogram | None = None
    cached_tokens: float = 0.0  #: input tokens that came from a cache; 0 if it does not say


def parse_state(text: str, time_s: float, where: str) -> ServerState:
    """Return what a text in Prometheus' format says; engines of one server are added up.

    Raises:
        UsageError: If it has not all that is needed.
    """
    totals: dict[str, Any] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    by_source: dict[str, float] = defaultdict(float)
    # Engines of one server have labels of their own, and are added up.
    for name, part, labels, written in _LINE.findall(text):
        try:
            value = float(written)
        except ValueError as error:
            raise UsageError(
                f"{where}: {name} is {shown(written)}, which is no number; give the address of a "
                "server of vLLM or SGLang"
            ) from error
        if part == "_bucket" and (bound := _BOUND.search(labels)):
            buckets[name][float(bound[1])] += value
        elif name == _BY_SOURCE and (source := _SOURCE.search(labels)):
            by_source[source[1]] += value
        else:
            totals[name + part] += value
    for name, counts in buckets.items():
        bounds, below = zip(*sorted(counts.items()), strict=True)
        totals[name] = Histogram(bounds, below, totals[f"{name}_sum"])
    state: dict[str, Any] = {}
    # Names differ between servers and versions, and the first that is there counts.
    for quantity, names in _NAMES.items():
        state[quantity] = next((totals[name] for name in names if name in totals), None)
        if state[quantity] is None and quantity not in _OPTIONAL:
            raise UsageError(
                f"{where}: has no {' or '.join(names)}; give the address of a server of vLLM or "
                "SGLang (with --enable-metrics) of a version that has it"
            )
    # vLLM counts by source; SGLang counts all, and of these the cached ones.
    if by_source:
        state["input_tokens"] = by_source.pop(_COMPUTED, 0.0)
        state["cached_tokens"] = sum(by_source.values())
    elif _CACHED in totals:
        state["cached_tokens"] = min(totals[_CACHED], state["input_tokens"])
        state["input_tokens"] -= state["cached_tokens"]
    return ServerState(time_s, **state)


class MetricsReader:
    """Reads the metrics of a server, over one connection.

    Args:
        address: Where the server is, such as "http://127.0.0.1:8000".
        limit_s: How long it may take to answer, seconds.

    Raises:
        UsageError: If this is no address.
    """

    def __init__(self, address: str, limit_s: float) -> None:
        base = address.rstrip("/").removesuffix("/metrics").removesuffix("/v1")
        self.where = f"{base}/metrics"
        parts = split_address(base, "http")
        self._path = f"{parts.path}/metrics"
        self._http = http.client.HTTPConnection(parts.netloc, timeout=limit_s)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def read(self) -> ServerState:
        """Return the state of the server.

        Raises:
            UsageError: If it answers something else.
            OSError, http.client.HTTPException: If it does not answer.
        """
        try:
            self._http.request("GET", self._path)
            response = self._http.getresponse()
            text = response.read().decode(errors="replace")
        except BaseException:
            self._http.close()
            raise
        if response.status != 200:
            raise UsageError(
                f"{self.where}: answers {response.status}; start the server with its metrics (vLLM "
                "has them, SGLang with --enable-metrics)"
            )
        return parse_state(text, time.monotonic(), self.where)
