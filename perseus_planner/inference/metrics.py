"""What a server says of itself at `/metrics`, as vLLM and SGLang do in Prometheus' text format
(https://prometheus.io/docs/instrumenting/exposition_formats/).
"""

from __future__ import annotations

import http.client
import math
import re
import time
from bisect import bisect_right
from typing import NamedTuple
from urllib.parse import urlsplit

from perseus_planner.base.errors import UsageError

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
}
"""What is read -> its names, in versions of either server."""
_HISTOGRAMS = ("ttft", "tbt")
_LINE = re.compile(
    r"^({})(_bucket|_sum|_count)?(?:\{{(.*)\}})? (\S+)".format(
        "|".join(name for names in _NAMES.values() for name in names)
    ),
    re.MULTILINE,
)
_BOUND = re.compile(r'(?:^|,)le="([^"]+)"')


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
        place = bisect_right(self.bounds, most)
        counts = [b - a for a, b in zip((0.0, *self.counts), self.counts, strict=False)]
        lows = (0.0, *self.bounds[:-1])
        low, high, unsure = lows[place], self.bounds[place], counts[place]
        sure = sum(counts[place + 1 :])
        if not unsure:
            return sure
        others = sum(
            count * (low if math.isinf(high) else (low + high) / 2)
            for each, (count, low, high) in enumerate(zip(counts, lows, self.bounds, strict=True))
            if each != place and count
        )
        mean = min(max((self.total - others) / unsure, low), high)
        spread = min(mean - low, high - mean) if self.seen > 1 else 0.0
        if not spread:
            return sure + unsure * (mean > most)
        return sure + unsure * min(1.0, max(0.0, (mean + spread - most) / (2 * spread)))


class ServerState(NamedTuple):
    """A server at one moment. Tokens and histograms count from its start."""

    time_s: float  #: monotonic clock
    running: float  #: requests in the batch
    waiting: float  #: requests that wait
    input_tokens: float
    output_tokens: float
    ttft: Histogram  #: times to the first token, seconds
    tbt: Histogram  #: times between tokens, seconds


def parse_state(text: str, time_s: float, where: str) -> ServerState:
    """Return what a text in Prometheus' format says; engines of one server are added up.

    Raises:
        UsageError: If it has not all that is needed.
    """
    values: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    for name, part, labels, value in _LINE.findall(text):
        if part == "_bucket" and (bound := _BOUND.search(labels)):
            counts = buckets.setdefault(name, {})
            counts[float(bound[1])] = counts.get(float(bound[1]), 0.0) + float(value)
        else:
            values[name + part] = values.get(name + part, 0.0) + float(value)
    found: dict[str, float | Histogram] = {}
    for what, names in _NAMES.items():
        if what in _HISTOGRAMS:
            name = next((name for name in names if name in buckets), None)
            if name is not None:
                bounds, below = zip(*sorted(buckets[name].items()), strict=True)
                found[what] = Histogram(bounds, below, values[f"{name}_sum"])
        elif (name := next((name for name in names if name in values), None)) is not None:
            found[what] = values[name]
        if what not in found:
            raise UsageError(
                f"{where}: has no {' or '.join(names)}; give the address of a server of vLLM or "
                "SGLang (with --enable-metrics) of a version that has it"
            )
    return ServerState(time_s, **found)  # type: ignore[arg-type]


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
        self.where, parts = f"{base}/metrics", urlsplit(base)
        if parts.scheme != "http" or not parts.hostname:
            raise UsageError(
                f"{address!r} is no address of a server; write one such as http://127.0.0.1:8000"
            )
        self._path = f"{parts.path}/metrics"
        self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=limit_s)

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
