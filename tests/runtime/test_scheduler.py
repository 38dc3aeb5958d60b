"""When the controller sets which GPU to what, and how it reads requests."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_planner.base.errors import UsageError
from perseus_planner.runtime.controller.protocol import LATEST_BYTES, AttachRequest, LatestStarts
from perseus_planner.runtime.controller.rank import Rank
from perseus_planner.runtime.controller.scheduler import JUDGED, RESET, ChangeScheduler
from perseus_planner.runtime.controller.watcher import MAX_SKIPPED, ClockRequest
from perseus_planner.runtime.marks import NO_REQUEST, OUTSIDE, clock_request

GPUS = ("a", "b", "c")
MS = 1_000_000


@dataclass
class Model:
    """A model of the rules, computed from the whole history."""

    period_ns: int
    asked: dict[str, list[tuple[int, int, int]]] = field(
        default_factory=lambda: {gpu: [] for gpu in GPUS}
    )
    sets: list[tuple[int, str, int]] = field(default_factory=list)
    turns: int = 0

    def value(self, gpu: str) -> int:
        return next((value for _, which, value in reversed(self.sets) if which == gpu), RESET)

    def ask(self, gpu: str, value: int, now_ns: int) -> None:
        """Note a requested change since the GPU was last set."""
        before = self.asked[gpu][-1][1] if self.asked[gpu] else self.value(gpu)
        if value != before:
            self.turns += 1
            self.asked[gpu].append((self.turns, value, now_ns))

    def waits_since(self, gpu: str) -> int | None:
        """Return the turn of the first of the latest requests in a row that differ from what is
        set.
        """
        since = None
        for turn, value, _ in self.asked[gpu]:
            since = None if value == self.value(gpu) else turn if since is None else since
        return since

    def is_within_rate(self, now_ns: int) -> bool:
        """Whether one more change keeps every span of time within the rate plus one for each
        GPU.
        """
        return self.period_ns == 0 or all(
            len(self.sets) - i + 1 <= len(GPUS) + (now_ns - when_ns) / self.period_ns
            for i, (when_ns, _, _) in enumerate(self.sets)
        )

    def grant(self, now_ns: int) -> tuple[str, int] | None:
        waiting = [gpu for gpu in GPUS if self.waits_since(gpu) is not None]
        if not waiting or not self.is_within_rate(now_ns):
            return None
        gpu = min(waiting, key=self.waits_since)
        value = self.asked[gpu][-1][1]
        self.sets.append((now_ns, gpu, value))
        self.asked[gpu] = []
        return gpu, value


EVENTS = st.lists(
    st.tuples(
        st.sampled_from([0, 1, MS, 7 * MS, 60 * MS]) | st.integers(0, 300 * MS),
        st.sampled_from(GPUS),
        st.sampled_from([RESET, 1200, 1410, 900]),
    ),
    max_size=60,
)
"""(nanoseconds since the event before, GPU, value that it asks for)."""


@given(EVENTS, st.sampled_from([1.0, 9.7, 100.0, 5000.0, math.inf]))
def test_whatever_is_asked_for_the_rules_hold(events, rate_per_s: float):
    scheduler: ChangeScheduler[str] = ChangeScheduler(rate_per_s)
    model = Model(math.ceil(1e9 / rate_per_s))
    for gpu in GPUS:
        scheduler.add(gpu)
    now_ns = 0
    wanted: dict[str, int] = {}
    needed: Counter[str] = Counter()
    overtakers: dict[str, Counter[str]] = {}
    for passed_ns, gpu, value in events:
        now_ns += passed_ns
        needed[gpu] += value not in (model.value(gpu), wanted.get(gpu))
        wanted[gpu] = value
        scheduler.request(gpu, value, None, now_ns)
        model.ask(gpu, value, now_ns)
        for _ in range(2):
            _check_fairness(model, overtakers)
            before = {each: model.value(each) for each in GPUS}
            granted, expected = scheduler.take(now_ns), model.grant(now_ns)
            assert (None if granted is None else (granted[0], granted[1].value)) == expected
            if expected is not None:
                assert expected[1] != before[expected[0]]
                for counter in overtakers.values():
                    counter[expected[0]] += 1
    for gpu in GPUS:
        is_pending = model.waits_since(gpu) is not None
        assert needed[gpu] == scheduler.overtaken(gpu) + is_pending + sum(
            which == gpu for _, which, _ in model.sets
        )
    _check_final(scheduler, model, wanted, now_ns)


def _check_fairness(model: Model, overtakers: dict[str, Counter[str]]) -> None:
    """Check that no GPU is set twice while another one waits."""
    for gpu in GPUS:
        if model.waits_since(gpu) is not None:
            counter = overtakers.setdefault(gpu, Counter())
            assert all(times <= 1 for other, times in counter.items() if other != gpu)
        else:
            overtakers.pop(gpu, None)


def _check_final(
    scheduler: ChangeScheduler[str], model: Model, wanted: dict[str, int], now_ns: int
) -> None:
    """Check that every GPU gets the last request when there is time."""
    for _ in range(2 * len(GPUS)):
        now_ns += 4_000_000_000
        while (granted := scheduler.take(now_ns)) is not None:
            gpu, change = granted
            assert change.value != model.value(gpu)
            model.sets.append((now_ns, gpu, change.value))
    assert {gpu: model.value(gpu) for gpu in wanted} == wanted


def granted(scheduler: ChangeScheduler[str], now_ns: int) -> list[tuple[str, int]]:
    found = []
    while (one := scheduler.take(now_ns)) is not None:
        found.append((one[0], one[1].value))
    return found


def scheduler_of(gpus: Sequence[str], rate_per_s: float = math.inf) -> ChangeScheduler[str]:
    scheduler: ChangeScheduler[str] = ChangeScheduler(rate_per_s)
    for gpu in gpus:
        scheduler.add(gpu)
    return scheduler


def test_the_latest_value_wins_with_its_position_and_time():
    scheduler = scheduler_of("a", rate_per_s=1.0)
    scheduler.request("a", 1200, 0, 0)
    assert granted(scheduler, 0) == [("a", 1200)]
    scheduler.request("a", 900, 1, 10)
    scheduler.request("a", 1410, 2, 20)
    scheduler.request("a", 1410, 3, 30)
    assert scheduler.take(999_999_999) is None
    gpu, wanted = scheduler.take(1_000_000_000) or pytest.fail("a second has passed")
    assert (gpu, wanted.value, wanted.position, wanted.seen_ns) == ("a", 1410, 2, 20)
    assert scheduler.overtaken("a") == 1


def test_resets_wait_in_line_and_count_for_the_rate():
    scheduler = scheduler_of("ab", rate_per_s=1.0)
    for now_ns, (gpu, value) in enumerate([("a", 900), ("b", 900), ("a", 1200), ("b", RESET)]):
        scheduler.request(gpu, value, 0, now_ns)
        if now_ns == 1:
            assert granted(scheduler, 1) == [("a", 900), ("b", 900)]
    assert granted(scheduler, 999_999_999) == []
    assert granted(scheduler, 1_000_000_001) == [("a", 1200)]
    assert granted(scheduler, 2_000_000_001) == [("b", RESET)]


def test_a_gpu_that_changes_its_mind_keeps_its_turn():
    scheduler = scheduler_of("ab", rate_per_s=1.0)
    scheduler.request("a", 900, 0, 0)
    scheduler.request("b", 900, 0, 0)
    assert len(granted(scheduler, 0)) == 2
    scheduler.request("b", 1200, 1, 1)
    scheduler.request("a", 1200, 1, 2)
    scheduler.request("b", 1410, 2, 3)
    assert granted(scheduler, 1_000_000_000) == [("b", 1410)]


def test_what_is_withdrawn_is_not_set():
    scheduler = scheduler_of("ab")
    scheduler.request("a", 900, 0, 0)
    scheduler.request("b", 900, 0, 0)
    scheduler.cancel("a")
    assert granted(scheduler, 0) == [("b", 900)]
    scheduler.remove("b")
    assert granted(scheduler, 1) == []


def test_a_plan_is_overloaded_when_more_than_half_of_its_last_changes_were_overtaken():
    scheduler = scheduler_of("a")
    for turn in range(2 * JUDGED):  # each set
        scheduler.request("a", 1000 + turn, 0, turn)
        assert len(granted(scheduler, turn)) == 1
    scheduler.request("a", 1, 0, 0)
    for turn in range(JUDGED // 2):  # each overtaken by the next
        scheduler.request("a", 2 + turn, 0, 0)
        assert not scheduler.is_overloaded("a")
    scheduler.request("a", 900, 0, 0)
    assert scheduler.is_overloaded("a")
    assert scheduler.overtaken("a") == JUDGED // 2 + 1
    assert scheduler.made_share("a") == (JUDGED // 2 - 1) / JUDGED


def test_a_gpu_that_goes_to_and_fro_unset_is_overloaded():
    """Going back to the value that is set needs no call, and does not make up for changes that
    were not made.
    """
    scheduler = scheduler_of("a")
    for _ in range(JUDGED):
        assert not scheduler.is_overloaded("a")
        scheduler.request("a", 1200, 0, 1)
        scheduler.request("a", RESET, 0, 1)
    assert granted(scheduler, 2) == []
    assert scheduler.is_overloaded("a")


@pytest.mark.parametrize("rate_per_s", [0.0, -1.0, math.nan, 1e-9])
def test_an_invalid_rate_is_refused(rate_per_s: float):
    with pytest.raises(UsageError, match=r"changes per second: give 0\.001 or more"):
        ChangeScheduler(rate_per_s)


def requests_seen(*written: float) -> list[ClockRequest | None]:
    """Return what `poll_request` returns for each value written, or after so many seconds (if it
    is a float).
    """
    latest = LatestStarts(memoryview(bytearray(LATEST_BYTES)))
    shared = SimpleNamespace(request=[NO_REQUEST], latest=latest)
    rank = Rank(Mock(), AttachRequest(0, "nvml:0", "clock", None), shared, os.getpid())
    seen, now_ns = [], 1
    for each in written:
        if isinstance(each, float):
            now_ns += round(1e9 * each)
        else:
            shared.request[0] = each
        seen.append(rank.poll_request(now_ns))
    rank.close()
    return seen


def test_a_changed_request_has_the_position_and_the_value():
    first, second = clock_request(0, 900), clock_request(1, 1200)
    assert requests_seen(NO_REQUEST, first, first, second, first, NO_REQUEST, first) == [
        None,
        ClockRequest(0, 900, (), is_new_iteration=False),
        None,
        ClockRequest(1, 1200, (), is_new_iteration=False),
        ClockRequest(0, 900, (), is_new_iteration=True),
        ClockRequest(None, 0, (), is_new_iteration=False),
        ClockRequest(0, 900, (), is_new_iteration=False),
    ]


def test_outside_of_computations_a_gpu_is_reset_until_the_next_iteration_begins_if_that_lasts():
    first, last = clock_request(0, 900), clock_request(1, 1200)
    outside = first | OUTSIDE
    begun, changed = ClockRequest(0, 900, (), False), ClockRequest(1, 1200, (), False)
    again, reset = begun._replace(is_new_iteration=True), ClockRequest(None, 0, (), False)
    # It is reset already; short pauses do not count, and in short iterations short ones are longer.
    seen = requests_seen(outside, first, 1.5, last, outside, 0.1, first, outside, 0.2, first)
    assert seen == [None, begun, None, changed, again, None, None, None, reset, begun]
    seen = requests_seen(first, last, outside, first, 2.5, last, outside, 0.01, 0.02, outside)
    assert seen == [begun, changed, again, None, None, changed, again, None, reset, None]


@pytest.mark.parametrize(("length_s", "pause_s"), [(0.1, 0.1), (2.0, 0.01)], ids=["short", "long"])
def test_the_length_of_the_first_iteration_is_not_that_of_the_machine(
    length_s: float, pause_s: float
):
    """The machine has run for an hour when a job begins; after two such pauses it is reset."""
    first, last = clock_request(0, 900), clock_request(1, 1200)
    seen = requests_seen(3600.0, first, length_s, last, first | OUTSIDE, pause_s, pause_s)
    assert seen[-2:] == [None, ClockRequest(None, 0, (), is_new_iteration=False)]


def test_resets_that_are_overtaken_are_no_sign_of_overload():
    scheduler = scheduler_of("a")
    scheduler.request("a", 900, 0, 0)
    assert granted(scheduler, 0) == [("a", 900)]
    for _ in range(2 * JUDGED):
        scheduler.request("a", RESET, None, 1)
        scheduler.request("a", 900, 0, 2)
    assert not scheduler.is_overloaded("a")


def test_positions_passed_unseen_request_what_they_requested_when_they_were_seen():
    first = [clock_request(position, 1000 + position) for position in range(5)]
    assert requests_seen(
        *first, clock_request(3, 1003), clock_request(0, 1000), clock_request(4, 1004)
    )[-3:] == [
        ClockRequest(3, 1003, (1000, 1001, 1002), is_new_iteration=True),
        ClockRequest(0, 1000, (), is_new_iteration=True),
        ClockRequest(4, 1004, (1001, 1002, 1003), is_new_iteration=False),
    ]


def test_nothing_is_assumed_of_positions_that_were_never_seen():
    assert requests_seen(clock_request(0, 900), clock_request(5, 1200), clock_request(7, 900))[
        -2:
    ] == [
        ClockRequest(5, 1200, (), is_new_iteration=False),
        ClockRequest(7, 900, (), is_new_iteration=False),
    ]


def test_no_rank_passes_more_positions_between_two_looks_than_the_limit():
    seen = [clock_request(position, 900 + position) for position in range(MAX_SKIPPED + 3)]
    begin = clock_request(0, 900)
    near = requests_seen(*seen, begin, clock_request(MAX_SKIPPED + 1, 7))[-1]
    far = requests_seen(*seen, begin, clock_request(MAX_SKIPPED + 2, 7))[-1]
    assert near is not None
    assert far is not None
    assert near.skipped == tuple(900 + position for position in range(1, MAX_SKIPPED + 1))
    assert far.skipped == ()


@pytest.mark.parametrize(
    ("clocks", "changes"),
    [((900,), 0), ((900, 900, 900), 0), ((900, 1200, 900), 2), ((900, 1200, 1300, 1300), 3)],
)
def test_changes_of_an_iteration_include_the_change_back(clocks: tuple[int, ...], changes: int):
    shared = SimpleNamespace(request=[NO_REQUEST])
    rank = Rank(Mock(), AttachRequest(0, "nvml:0", "clock", None), shared, os.getpid())
    assert rank.changes_per_iteration == 0
    for position, clock in [*enumerate(clocks)][::-1]:
        shared.request[0] = clock_request(position, clock)
        rank.poll_request(0)
    assert rank.changes_per_iteration == changes
    shared.request[0] = clock_request(0, 915)  # of another program
    rank.poll_request(0)
    assert rank.changes_per_iteration == 0
    rank.close()


def test_another_value_at_a_position_is_another_program_of_which_nothing_is_known():
    written = [(0, 900), (1, 1200), (0, 900), (1, 915), (0, 900), (2, 7)]
    *before, changed, again, last = requests_seen(*(clock_request(*each) for each in written))
    assert not any(request.is_new_program for request in before if request is not None)
    assert changed == ClockRequest(1, 915, (), is_new_iteration=False, is_new_program=True)
    assert again == ClockRequest(0, 900, (), is_new_iteration=True)
    assert last == ClockRequest(2, 7, (915,), is_new_iteration=False)


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_any_number_can_be_a_request(written: list[int]):
    for request in requests_seen(*written):
        assert request is None or (
            0 <= request.value < 2**32 and len(request.skipped) <= MAX_SKIPPED
        )
