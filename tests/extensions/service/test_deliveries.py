"""Reports that are delivered late, twice and in any order, from sources whose clocks are hours
wrong; over HTTP.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import strategies as st
from service_stand_in import asking
from services import NOW_S, Clock, at_once, frontier_file, job
from strategies import drawn

from perseus_planner.extensions.service.service import Service
from perseus_planner.extensions.service.store import Storage

httpx = pytest.importorskip("httpx")

HOUR_S = 3600.0
SCOPES = (
    {"kind": "pipeline", "value": 0},
    {"kind": "pipeline", "value": 2},
    {"kind": "node", "value": "node1"},
)
_names = count()


@dataclass(frozen=True)
class Said:
    """What a source says at a time, by a clock that tells the time right.

    Attributes:
        source: its number.
        scope: which of `SCOPES`.
        at_s: when.
        slowdown: as in a report.
    """

    source: int
    scope: int
    at_s: float
    slowdown: float

    def body(self, ahead_s: float) -> dict[str, Any]:
        """As it is sent, by a clock that is so much ahead."""
        return {
            "key": f"{self.source}-{self.scope}-{self.at_s}",
            "source": f"source {self.source}",
            "scope": SCOPES[self.scope],
            "slowdown": self.slowdown,
            "cause": "data",
            "observed_s": self.at_s + ahead_s,
        }


@dataclass(frozen=True)
class Running:
    """A service, its clock, and what asks it."""

    service: Service
    clock: Clock
    ask: Callable[..., httpx.Response]

    def told(
        self, deliveries: list[tuple[float, dict[str, Any]]]
    ) -> list[tuple[str, object, float | None]]:
        """What a new job's reports are once each of these came at its time, and how long its
        pipelines then take.
        """
        name = f"job-{next(_names)}"
        self.clock.now_s = NOW_S
        self.service.register(job(name), frontier_file())
        for at_s, body in deliveries:
            self.clock.now_s = max(at_s, self.clock.now_s)
            self.service.tick()
            answer = self.ask("POST", f"/v1/jobs/{name}/reports", json=body)
            assert answer.status_code == 202, answer.text
        while (
            self.clock.now_s < self.service.tick() < NOW_S + 9 * HOUR_S
        ):  # plans are held for a while
            self.clock.now_s = self.service.tick()
        status = self.service.status(name)
        self.service.end(name).result()
        kept = sorted((each.source, str(each.scope), each.slowdown) for each in status.reports)
        return [*kept, ("iterations take", status.decision.straggler_time_s, None)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    place, clock = tmp_path_factory.mktemp("service") / "service.sqlite", Clock()
    with (
        Storage(place) as storage,
        Service(storage, now_s=clock, run=at_once) as service,
        asking(service) as ask,
    ):
        yield Running(service, clock, ask)


SAID = st.lists(
    st.builds(
        Said,
        st.integers(0, 2),
        st.integers(0, 2),
        st.integers(1, 50).map(lambda minute: NOW_S + 60.0 * minute),
        st.sampled_from([1.0, 1.2, 1.4, 1.7]),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda said: (said.source, said.scope, said.at_s),
).map(lambda said: sorted(said, key=lambda each: each.at_s))


@drawn(
    3,
    25,
    said=SAID,
    behind_h=st.tuples(*[st.sampled_from([0.0, 0.5, 3.0, 30.0])] * 3),
    seed=st.integers(0, 2**32),
    late_s=st.sampled_from([0.0, 300.0, 3000.0]),
)
def test_duplicates_delays_and_any_order_come_to_what_the_order_of_observing_comes_to(
    said: list[Said], behind_h: tuple[float, ...], seed: int, late_s: float, running: Running
):
    """Of sources whose clocks are right or behind, each by its own hours."""
    rng = random.Random(seed)
    bodies = [each.body(-HOUR_S * behind_h[each.source]) for each in said]
    in_order = running.told([(each.at_s, body) for each, body in zip(said, bodies, strict=True)])
    last_s = said[-1].at_s
    shuffled = [
        (last_s + rng.uniform(0.0, late_s), body) for body in [*bodies, *rng.choices(bodies, k=4)]
    ]
    rng.shuffle(shuffled)
    times_s = sorted(at_s for at_s, _ in shuffled)
    assert (
        running.told([(at_s, body) for at_s, (_, body) in zip(times_s, shuffled, strict=True)])
        == in_order
    )


@drawn(
    2,
    15,
    said=SAID,
    ahead_h=st.tuples(*[st.sampled_from([0.0, 0.5, 7.0, 1e5])] * 3),
    right_from=st.integers(0, 8),
)
def test_a_clock_that_is_ahead_keeps_nothing_from_counting_also_when_it_is_set_right(
    said: list[Said], ahead_h: tuple[float, ...], right_from: int, running: Running
):
    """Delivered as they are observed; from one of them on, all clocks are right."""
    ahead = [
        HOUR_S * ahead_h[each.source] * (number < right_from) for number, each in enumerate(said)
    ]
    wrong = [(each.at_s, each.body(ahead_s)) for each, ahead_s in zip(said, ahead, strict=True)]
    assert running.told(wrong) == running.told([(each.at_s, each.body(0.0)) for each in said])


def test_a_recovery_by_a_clock_that_is_hours_behind_is_remembered_as_long_as_any(running: Running):
    slow, recovered = (
        Said(0, 0, NOW_S + at_s, slowdown).body(-20 * HOUR_S)
        for at_s, slowdown in ((60.0, 1.5), (90.0, 1))
    )
    found = running.told(
        [(NOW_S + 100.0, recovered), (NOW_S + 200.0, recovered), (NOW_S + 3000.0, slow)]
    )
    assert [name for name, *_ in found] == ["iterations take"]


def test_a_report_of_the_future_counts_as_observed_now(running: Running):
    running.clock.now_s = NOW_S
    running.service.register(job("now"), frontier_file())
    sent = Said(0, 0, NOW_S + HOUR_S, 1.3).body(0.0)
    answer = running.ask("POST", "/v1/jobs/now/reports", json=sent).json()
    assert answer["report"]["observed_s"] == NOW_S
    assert (
        running.ask("POST", "/v1/jobs/now/reports", json=sent).json()["report"] == answer["report"]
    )
    running.service.end("now").result()
