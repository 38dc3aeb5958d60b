"""Keeps the clock of a server while it serves: the one of least energy at which its queue and its
batch keep the objectives of latency.

1. An iteration at full clocks takes a time, more for each request that gets a token, and more for
   each token of a prompt. This is learnt at full clocks, in the first seconds and in audits, short
   times at full clocks that are drawn at random.
2. At another clock, decoding takes as many times as long as is learnt (`Curve`, as in the
   autopilot), and at most as many times as the clock is lower; prompts are computed in just that.
   What is not known counts as slow.
3. A clock will do if an iteration with the batch of now is within the objective between tokens, if
   what waits and one prompt more is computed within the objective of the first token, and if the
   server can keep up.
4. Of these, the clock of least energy is chosen, or one that may have less. A GPU that is slower is
   idle less, so an idle GPU's power counts.
5. A ledger counts requests that were late by either objective. If these are more than agreed, or if
   anything is in doubt, clocks are full.

`ServerClock` decides; it is pure: it sees no GPU, no server and no time of day. `attend` asks it,
from another process than the server's. It leases the GPUs, so that they are reset whatever happens
to this process. If the server does not answer, clocks are full until it does. What the server says
of itself is read by `metrics`.
"""

from __future__ import annotations

import http.client
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import psutil

from perseus_planner.base.errors import GpuNotSupported, UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import Rule, Seconds
from perseus_planner.extensions.autopilot.value_curves import Curve
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.profiler.control import common_settings
from perseus_planner.runtime.guarantee import AuditTimes, owed_after

if TYPE_CHECKING:
    from perseus_planner.extensions.inference.metrics import MetricsReader, ServerState
    from perseus_planner.gpu import Gpu


@dataclass(frozen=True)
class Tuning:
    """The constants by which a server keeps its objectives. All are by hand: the tests of
    `tests/extensions/inference/test_online.py` check them together.
    """

    #: Of the objectives, up to which a prediction will do at first: of the first token, and between
    #: tokens.
    first_margin: tuple[float, float] = (0.4, 0.2)
    #: The least and the most of these.
    margins: tuple[float, float] = (0.1, 4.0)
    #: How fast they change, for each late request of those in a second.
    step: float = 0.5
    #: Of the requests that may be late, how many are aimed at.
    aim: float = 0.8
    #: Requests that may be late beyond what is agreed; or the share of so many seconds, if that is
    #: more.
    burst: float = 2.0
    burst_s: float = 180.0
    #: Seconds of an audit; until the first one begins; and the share of time that audits take.
    audit_s: float = 0.5
    first_audit_s: float = 20.0
    audits: float = 0.015


_TUNING = Tuning()
_TOKENS = 100.0  #: of a request, if the server does not say how long each took
_BUSIEST = 0.85  #: of its time in which a server may compute prompts
_WINDOW_S = 0.25  #: what is learnt from at once, at least
_FIRST = 12  #: windows at full clocks before another clock is tried
_LOWEST = 0.3  #: of the highest clock: no lower one is tried
_FORGET = 0.99  #: of what is known of iterations, with each window at full clocks
_SCATTER = 0.1  #: of a window's times and powers, relative
_STALE_S = 0.04  #: how old an energy counter's value is, a standard deviation
_FADE_S = 10.0  #: in which what arrives is averaged

NO_ANSWER = "no answer"
"""Why clocks are full, if the server does not answer."""

LateShare = Annotated[
    float,
    Rule(float, False, "a share of late requests: give a number above 0 and up to 1", most=1.0),
]


@dataclass(frozen=True)
class OnlineSettings(Checked):
    """What a server must keep.

    Raises:
        UsageError: If a value is out of range.
    """

    ttft_s: Seconds  #: most time to the first token, seconds
    tbt_s: Seconds  #: most time between tokens, seconds
    late: LateShare = 0.01  #: the share of requests that may be later, by either


class _Iterations:
    """What an iteration takes at full clocks: a base, and more for each output and input token; by
    least squares.
    """

    def __init__(self) -> None:
        # Weak knowledge: nothing per token, so that what was never seen decides nothing.
        self._squares = np.diag([1e-6, 1e-3, 1e-1])
        self._sums = np.zeros(3)
        self.costs_s = np.zeros(3)
        self.windows = 0

    def add(self, outputs: float, inputs: float, time_s: float) -> None:
        """Learn from iterations of so many output and input tokens each."""
        row = np.array((1.0, outputs, inputs))
        self._squares = _FORGET * self._squares + np.outer(row, row)
        self._sums = _FORGET * self._sums + row * time_s
        self.costs_s = np.maximum(0.0, np.linalg.solve(self._squares, self._sums))
        self.windows += 1


class _Counts(NamedTuple):
    """What requests came to between two states of a server."""

    requests: float  #: that got their first token
    late: float  #: of these, later than the objective
    ended: float  #: that ended
    slow: float  #: of these, with longer times between tokens than the objective

    @classmethod
    def between(cls, before: ServerState, state: ServerState, settings: OnlineSettings) -> _Counts:
        """Return the counts between two states of one server."""
        ttft = state.ttft.since(before.ttft)
        # The time between tokens is the mean of a request: one long iteration makes none late.
        if state.tpot is not None and before.tpot is not None:
            tpot = state.tpot.since(before.tpot)
            ended = tpot.seen
            slow = tpot.above(settings.tbt_s)
        # Without times of each request, tokens stand for requests: so many of them count as one.
        else:
            tbt = state.tbt.since(before.tbt)
            ended = tbt.seen / _TOKENS
            slow = ended * (tbt.total > tbt.seen * settings.tbt_s)
        return cls(ttft.seen, ttft.above(settings.ttft_s), ended, slow)


class _Ledger:
    """Counts requests that were late by either objective, the first token and the time between
    tokens, against what is agreed.

    Attributes:
        requests: How many requests got their first token, in all.
        late: Of these, how many were later than the objective.
        ended: How many ended.
        slow: Of these, how many had longer times between tokens than the objective.
        margins: Of the two objectives, up to which a prediction will do.

    Args:
        late_share: The share of requests that may be late.
    """

    def __init__(self, late_share: float) -> None:
        self._late_share = late_share
        self.requests = 0.0
        self.late = 0.0
        self.ended = 0.0
        self.slow = 0.0
        self.margins = np.array(_TUNING.first_margin)
        self._owed = np.zeros(2)  #: requests late beyond what is agreed, by either objective

    def add(self, counts: _Counts, requests_per_s: float) -> None:
        """Add what requests came to, where so many arrived in a second before."""
        self.requests += counts.requests
        self.late += counts.late
        self.ended += counts.ended
        self.slow += counts.slow
        # What may be late is agreed as a share of requests, so it grows with them.
        late = np.array((counts.late, counts.slow))
        agreed = self._late_share * np.array((counts.requests, counts.ended))
        burst = self._burst(requests_per_s)
        self._owed = np.array(
            [
                owed_after(owed, more, burst)
                for owed, more in zip(self._owed, (late - agreed).tolist(), strict=True)
            ]
        )
        # Late requests make the margins narrower, others wider. Many requests in a second move them
        # by less each.
        step = _TUNING.step / max(1.0, requests_per_s)
        self.margins *= np.exp(step * (_TUNING.aim * agreed - late))
        self.margins = np.clip(self.margins, *_TUNING.margins)

    def is_overdrawn(self, requests_per_s: float) -> bool:
        """Whether more requests were late than agreed, where so many arrive in a second."""
        return bool((self._owed > self._burst(requests_per_s)).any())

    def _burst(self, requests_per_s: float) -> float:
        """Return how many requests may be late beyond what is agreed."""
        return max(_TUNING.burst, _TUNING.burst_s * self._late_share * requests_per_s)


class _Arrivals:
    """What arrives at a server.

    Attributes:
        rates: (3,) requests, their input and their output tokens in a second, lately.
        length: (2,) mean input tokens of a request, and mean of their square.
        lost: How many requests got a first token, and did not finish.
    """

    def __init__(self) -> None:
        self.rates = np.zeros(3)
        self.length = np.zeros(2)
        self.lost = 0.0

    @property
    def requests_per_s(self) -> float:
        """How many requests arrive in a second, lately."""
        return float(self.rates[0])

    def add(self, before: ServerState, state: ServerState, requests: float) -> None:
        """Add what arrived between two states, `requests` of which got their first token."""
        # Requests that got a first token and never finished would count as decoding for ever.
        if state.tpot is not None and before.tpot is not None:
            self.lost = max(self.lost, state.ttft.seen - state.tpot.seen - state.running)
        # What arrives fades with time and not with the number of looks.
        length_s = max(1e-3, state.time_s - before.time_s)
        fade = math.exp(-length_s / _FADE_S)
        inputs = state.input_tokens - before.input_tokens
        counts = np.array((requests, inputs, state.output_tokens - before.output_tokens))
        self.rates = fade * self.rates + (1 - fade) * counts / length_s
        # Input tokens of a request are averaged over requests, as prompts differ widely.
        if requests and inputs:
            mean = inputs / requests
            is_first = not self.length.any()
            part = 1.0 if is_first else 1 - 0.98**requests
            self.length = (1 - part) * self.length + part * np.array((mean, mean**2))


class ServerClock:
    """Decides the clock of one server's GPUs; call `observe` with each state.

    Args:
        clocks_mhz: Those that can be set, highest first.
        settings: What is to be kept.
    """

    def __init__(self, clocks_mhz: Sequence[int], settings: OnlineSettings) -> None:
        # Below this share of the clock, iterations could take more than three times as long.
        self.clocks_mhz = [mhz for mhz in clocks_mhz if mhz >= _LOWEST * clocks_mhz[0]]
        self.settings = settings
        # Seeded, so that equal states give equal decisions.
        self._random = random.Random(0)  # of audits
        self._x = np.log(self.clocks_mhz[0] / np.array(self.clocks_mhz))
        self._slower = Curve(self._x, 0.3, 0.3)
        self._power = Curve(self._x, -1.2, 0.5)
        self._iterations = _Iterations()
        self._top_w: float | None = None  #: watts at full clocks while it computes
        self._idle_w = 0.0
        self._before: ServerState | None = None
        self._begun: tuple[ServerState, float] | None = None  #: of the window; joules
        self._audits = AuditTimes(_TUNING.first_audit_s, _TUNING.audit_s, self._random)
        self._chosen_s = -math.inf  #: when a clock was chosen last
        self._ledger = _Ledger(settings.late)
        self._arrivals = _Arrivals()
        self.index = 0  #: of the clock that is set
        self.reason = "learning"  #: why this clock

    @property
    def clock_mhz(self) -> int:
        """The clock that is to be set, MHz."""
        return self.clocks_mhz[self.index]

    @property
    def requests(self) -> float:
        """How many requests got their first token."""
        return self._ledger.requests

    @property
    def late(self) -> float:
        """Of these, how many were later than the objective."""
        return self._ledger.late

    @property
    def ended(self) -> float:
        """How many requests ended."""
        return self._ledger.ended

    @property
    def slow(self) -> float:
        """Of these, how many had longer times between tokens than the objective."""
        return self._ledger.slow

    @property
    def is_overdrawn(self) -> bool:
        """Whether more requests were late lately than agreed."""
        return self._ledger.is_overdrawn(self._arrivals.requests_per_s)

    @property
    def saving(self) -> float | None:
        """The expected saving of power at this clock, a share; None if it is unknown."""
        return None if self._top_w is None else 1.0 - math.exp(self._power.mean[self.index])

    def fail(self) -> None:
        """Go to full clocks: the server did not answer."""
        self._before = self._begun = None
        self._set(0, NO_ANSWER)

    def observe(self, state: ServerState, energy_j: float) -> int:
        """Learn from a state of the server and the energy counter of its GPUs; return the clock
        from now on, MHz.
        """
        before = self._before
        self._before = state
        if before is None or state.output_tokens < before.output_tokens:  # it has started again
            self._begun = None
            self._arrivals.lost = 0.0
            return self.clock_mhz
        counts = _Counts.between(before, state, self.settings)
        # What is late is judged by what arrived before.
        self._ledger.add(counts, self._arrivals.requests_per_s)
        self._arrivals.add(before, state, counts.requests)
        self._learn(state, energy_j)
        self._choose(state)
        return self.clock_mhz

    def _set(self, index: int, reason: str) -> None:
        if index != self.index:
            self._begun = None
        self.index = index
        self.reason = reason

    def _learn(self, state: ServerState, energy_j: float) -> None:
        """Learn from a window, if there is one: a time at one clock in which it always computed,
        or never.
        """
        # A window that mixes computing and idling would tell a power that is neither.
        is_busy = state.running > 0
        if self._begun is None or is_busy != (self._begun[0].running > 0):
            self._begun = state, energy_j
            return
        begin, begin_j = self._begun
        # Short windows tell little, because counters of energy are stale.
        length_s = state.time_s - begin.time_s
        if length_s < _WINDOW_S:
            return
        self._begun = state, energy_j
        power_w = (energy_j - begin_j) / length_s
        # Idle power is an average over windows, as each is short.
        if not is_busy:
            self._idle_w = power_w if not self._idle_w else 0.9 * self._idle_w + 0.1 * power_w
            return
        tbt = state.tbt.since(begin.tbt)
        # A window in which no token came teaches nothing of iterations.
        if tbt.seen <= 0 or tbt.total <= 0 or power_w <= 0:
            return
        time_s = tbt.total / tbt.seen  # each request that decodes sees each iteration
        # Tokens of one iteration, as each time between tokens is one iteration.
        outputs = (state.output_tokens - begin.output_tokens) * time_s / length_s
        inputs = (state.input_tokens - begin.input_tokens) * time_s / length_s
        # Full clocks tell what an iteration takes; other clocks are learnt relative to them.
        if self.index == 0:
            self._iterations.add(outputs, inputs, time_s)
            self._top_w = power_w if self._top_w is None else 0.8 * self._top_w + 0.2 * power_w
            return
        # Prompts are computation, so they take as many times as long as the clock is lower.
        base_s, output_s, input_s = self._iterations.costs_s
        prompts_s = inputs * input_s * math.exp(self._x[self.index])
        decode_s = base_s + outputs * output_s
        if decode_s > 0 and time_s > 2 * prompts_s:  # else it says little about decoding
            slower = math.log((time_s - prompts_s) / decode_s)
            self._slower.add(self.index, slower, _SCATTER**2)
        if self._top_w is not None:
            # The counter's staleness is an error of both ends, which is larger in short windows.
            variance = _SCATTER**2 + (_STALE_S / length_s) ** 2
            self._power.add(self.index, math.log(power_w / self._top_w), variance)

    def _choose(self, state: ServerState) -> None:
        """Choose the clock from now on."""
        passed_s = state.time_s - self._chosen_s
        self._chosen_s = state.time_s
        # An audit goes on once it has begun, and at full clocks none needs to begin.
        may_audit = self.index > 0 or self._audits.is_running
        if self._iterations.windows < _FIRST or self._top_w is None:
            self._set(0, "learning")
        elif self.is_overdrawn:
            self._set(0, "paying")
        elif may_audit and self._audits.step(passed_s, _TUNING.audits / _TUNING.audit_s):
            self._set(0, "audit")
        else:
            fits = self._fits(state)
            cost = np.where(fits, self._costs(state), np.inf)  # if none fits, the highest
            self._set(int(np.argmin(cost)), "following" if fits.any() else "full load")

    def _iteration_s(self, outputs: float, inputs: float) -> np.ndarray:
        """Return what an iteration takes at most at each clock, as far as is sure."""
        base_s, output_s, input_s = self._iterations.costs_s
        mean = self._slower.mean
        error = self._slower.error
        slower = np.exp(np.maximum(mean, np.minimum(mean + error, self._x)))
        times_s: np.ndarray = slower * (base_s + outputs * output_s)
        return times_s + np.exp(self._x) * inputs * input_s

    def _fits(self, state: ServerState) -> np.ndarray:
        """Return whether each clock keeps the objectives."""
        requests, inputs, outputs = self._arrivals.rates
        mean, square = self._arrivals.length
        # Prompts may be a standard deviation longer than their mean.
        long = mean + math.sqrt(max(0.0, square - mean**2))
        input_s = self._iterations.costs_s[2] * np.exp(self._x)
        # All that is there may be in the batch of the next iteration.
        present = state.running + state.waiting
        iteration_s = self._iteration_s(present, 0.0)
        # Between two tokens prompts are computed as well, in the share of time that they need.
        between_s = iteration_s / np.maximum(1e-3, 1.0 - inputs * input_s)
        # Long prompts come between the tokens of a short answer.
        prompts_s = (state.waiting + 1) * long * input_s
        between_s = between_s + prompts_s * requests / max(outputs, requests, 1e-9)
        # What has no token yet and one prompt more, in an iteration of the batch each time.
        # Without times of each request, the queue is all that is known to have no token.
        pending = state.waiting
        if state.tpot is not None:
            pending = present - (state.ttft.seen - state.tpot.seen - self._arrivals.lost)
        first_s = (pending + 1) * long * input_s + 2 * iteration_s
        # The share of time that the server computes, which may not reach the whole.
        busy = requests * (mean * input_s + iteration_s)
        fits: np.ndarray = between_s <= self._ledger.margins[1] * self.settings.tbt_s
        fits &= first_s <= min(1.0, self._ledger.margins[0]) * self.settings.ttft_s
        fits &= busy <= _BUSIEST
        return fits

    def _costs(self, state: ServerState) -> np.ndarray:
        """Return the least power that each clock may take, relative to that at full clocks."""
        # At a lower clock the GPU is idle less, so both powers count by their shares of time.
        inputs, outputs = self._arrivals.rates[1:]
        batch = max(1.0, state.running)
        iteration_s = self._iteration_s(batch, 0.0)
        busy_s = outputs / batch * iteration_s
        busy_s += inputs * self._iterations.costs_s[2] * np.exp(self._x)
        busy = np.minimum(1.0, busy_s)
        # Doubt counts in a clock's favour, so that what might be the best is tried.
        power_w = (self._top_w or 0.0) * np.exp(self._power.mean - 2 * self._power.error)
        # Idling draws no more than computing does, whatever was measured.
        costs: np.ndarray = busy * power_w + (1 - busy) * np.minimum(power_w, self._idle_w)
        return costs


_POLL_S = 0.05
_TELL_S = 10.0
_CLOCKS = 16  #: that are tried


def attend(
    reader: MetricsReader,
    gpus: Sequence[Gpu],
    settings: OnlineSettings,
    is_over: Callable[[], bool],
    *,
    is_dry: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Keep the clocks of the GPUs of a server until it is over; return what became of it.

    Args:
        reader: Reads its metrics; it has answered once.
        gpus: All GPUs that it runs on.
        settings: What is to be kept.
        is_over: Whether to end; asked every 50 ms.
        is_dry: Whether to set nothing, and only tell.
        tell: Called with a line every 10 s, and when the server does not answer.

    Raises:
        GpuError: If the GPUs cannot be read, leased or set.
    """
    # All GPUs of the server run one clock, so only what all support is tried.
    clocks_mhz = common_settings([gpu.supported_clocks_mhz for gpu in gpus])
    chooser = ServerClock(clocks_mhz[:: max(1, len(clocks_mhz) // _CLOCKS)], settings)
    current_mhz = clocks_mhz[0]
    changes = 0
    failures = 0
    told_s = 0.0
    begin_s = time.monotonic()
    begin_j = sum(gpu.energy_j() for gpu in gpus)
    with ExitStack() as stack:
        # A lease resets the clocks even if this process is killed.
        if not is_dry:
            stack.enter_context(lease_gpus(gpus, power_limit=False))
        while not is_over():
            poll_s = time.monotonic()
            try:
                state = reader.read()
            # A server that does not answer may be overloaded, so clocks are full until it does.
            except (OSError, http.client.HTTPException, UsageError) as error:
                if chooser.reason != NO_ANSWER:
                    tell(f"{reader.where}: does not answer ({error!r}); clocks are full")
                chooser.fail()
                failures += 1
            else:
                chooser.observe(state, sum(gpu.energy_j() for gpu in gpus))
            if chooser.clock_mhz != current_mhz:
                current_mhz = chooser.clock_mhz
                changes = changes + 1
                for gpu in () if is_dry else gpus:
                    gpu.set_clock_mhz(current_mhz)
            if poll_s - told_s > _TELL_S:
                told_s = poll_s
                tell(_line(chooser, is_dry))
            # Polls keep their period, whatever a round took.
            time.sleep(max(0.0, poll_s + _POLL_S - time.monotonic()))
        energy_j = sum(gpu.energy_j() for gpu in gpus) - begin_j
    return {
        "time_s": time.monotonic() - begin_s,
        "energy_j": energy_j,  # of its GPUs
        "requests": chooser.requests,  # that got their first token
        "late": chooser.late,  # of these, later than the objective
        "ended": chooser.ended,  # that ended
        "slow": chooser.slow,  # of these, with longer times between tokens than the objective
        "changes": changes,  # how often clocks were set
        "failures": failures,  # how often the server did not answer
        "saving": chooser.saving,  # expected saving of power at the last clock, a share
    }


def check_gpus(gpus: Sequence[Gpu]) -> None:
    """Check that the clocks of GPUs can be kept, before a server is started.

    Raises:
        GpuError: If a GPU has no clocks to set or no energy counter, or another process has leased
            it, or this one may not set it.
    """
    common_settings([gpu.supported_clocks_mhz for gpu in gpus])
    for gpu in gpus:
        try:
            gpu.energy_j()
        except GpuNotSupported as error:
            raise UsageError(
                f"{gpu.text}: has no energy counter, from which clocks are chosen; name another GPU"
            ) from error
    with lease_gpus(gpus, power_limit=False):
        pass


def check_alone(gpus: Sequence[Gpu], address: str | None = None) -> None:
    """Check that no other program computes on the GPUs of a server, as far as can be told: a server
    in a container is not known by its port.

    Args:
        gpus: All GPUs that it runs on.
        address: Where it answers; None before it is started.

    Raises:
        UsageError: If one does; names it.
    """
    server_pids = set() if address is None else _pids_of_server(address)
    for gpu in gpus:
        pids = set(gpu.computing_pids())
        if address is not None and not server_pids & pids:
            continue
        for pid in pids - server_pids:
            try:
                name = psutil.Process(pid).name()
            except psutil.Error:  # it has ended, or is in another container
                continue
            if name.startswith("nvidia-cuda-mps"):  # its clients are listed too
                continue
            raise UsageError(
                f"{gpu.text}: process {pid} ({name}) computes on it too, and one clock cannot keep "
                "two servers; stop it, or name a GPU on which one server runs alone"
            )


def _pids_of_server(address: str) -> set[int]:
    """Return the processes of a server: those that listen at its port, their groups and their
    children; none if they are not known.
    """
    try:
        # Servers fork workers, which compute and do not listen, so groups and children count as
        # well.
        connections = psutil.net_connections("tcp")
        port = urlsplit(address).port
        # Only who listens is the server: clients have the same port at their other end.
        listening = {
            entry.pid
            for entry in connections
            if entry.pid and entry.laddr and entry.laddr.port == port
            if entry.status == psutil.CONN_LISTEN
        }
        groups = {os.getpgid(pid) for pid in listening}
        family = {entry.pid for entry in psutil.process_iter() if _group_of(entry.pid) in groups}
        children = [psutil.Process(pid).children(recursive=True) for pid in listening]
    except (psutil.Error, OSError):
        return set()
    return family | {child.pid for offspring in children for child in offspring}


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except OSError:
        return None


def _line(chooser: ServerClock, is_dry: bool) -> str:
    late = 100 * chooser.late / max(1.0, chooser.requests)
    saving = "" if chooser.saving is None else f", {100 * chooser.saving:.0f} % less power"
    return (
        f"{'would set' if is_dry else 'at'} {chooser.clock_mhz} MHz ({chooser.reason}){saving}; "
        f"{chooser.requests:.0f} requests, {late:.2f} % late"
    )
