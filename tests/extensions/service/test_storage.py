"""The service's database: what is written is read again, once each, by one service."""

from __future__ import annotations

import gzip
import math
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from services import (
    NOW_S,
    PIPELINES,
    Clock,
    frontier_file,
    job,
    report,
    service_at,
    small_frontier,
)

from perseus_planner.extensions.service.curve import Curve
from perseus_planner.extensions.service.draft import Draft
from perseus_planner.extensions.service.jobs import JobState, Share
from perseus_planner.extensions.service.look import Look
from perseus_planner.extensions.service.models import (
    REMEMBERED,
    Counters,
    Decision,
    PlanSet,
    PowerBudget,
    PowerStep,
    StorageError,
    Taken,
    Target,
)
from perseus_planner.extensions.service.statuses import totals_of
from perseus_planner.extensions.service.store import Storage
from perseus_planner.extensions.service.tally import add_counters

DIGEST = "f" * 64


def state(name: str = "gpt") -> JobState:
    curve = Curve.of(small_frontier())
    decision = Decision(
        (Target(1.5), Target(2.0, {1: 1.25})), (0, 1), 2.0, {1: "a"}, NOW_S, NOW_S + 5.0, "because"
    )
    taken = Taken(1, 17, NOW_S)
    registered = replace(job(name), frontier=DIGEST)
    first = report("a", expires_s=NOW_S + 60.0)
    return JobState(
        registered=registered,
        job=replace(registered, deadline_s=1.75),
        curve=curve,
        decision=decision,
        saving_w=12.5,
        published=PlanSet(1, ("plan one", "plan two"), (0, 1)),
        planned=replace(decision, reason="what was decided before"),
        promised=2,
        reports={"a": first},
        past={"b": report("b", slowdown=1.0)},
        taken=taken,
        share=Share(1.9, 400.0),
    )


def added(*states: JobState) -> Draft:
    frontiers = {each.job.frontier: (frontier_file(), each.curve) for each in states}
    return Draft({}, {each.job.name: each for each in states}, frontiers)


def published(before: JobState, version: int, *texts: str) -> JobState:
    return replace(before, published=PlanSet(version, texts, (0, len(texts) - 1)))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "service.sqlite"


@pytest.fixture
def storage(place: Path) -> Iterator[Storage]:
    with Storage(place) as opened:
        yield opened


def count(place: Path, table: str) -> int:
    connection = sqlite3.connect(place)
    try:
        return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
    finally:
        connection.close()


def test_what_is_written_is_read_again(storage: Storage, place: Path):
    storage.commit(replace(added(state("one"), state("two")), budget=PowerBudget(5000.0, ())))
    with Storage(place) as again:
        stored = again.load()
        assert stored.jobs == {"one": state("one"), "two": state("two")}
        assert stored.budget.power_w == 5000.0
        assert again.frontier(DIGEST) == frontier_file()


def test_a_change_is_written_as_a_whole_state_would_be(storage: Storage):
    before = state()
    after = published(
        replace(
            before,
            job=replace(before.job, deadline_s=None, power_w=900.0),
            decision=replace(before.decision, reason="another", look_again_s=float("inf")),
            saving_w=13.5,
            planned=before.decision,
            promised=3,
            reports={"c": report("c", slowdown=2.0)},
            past={"a": before.reports["a"]},
            taken=Taken(2, 30, NOW_S),
            share=None,
        ),
        2,
        "plan two",
        "plan three",
    )
    storage.commit(added(before))
    storage.commit(Draft({"gpt": before}, {"gpt": after}))
    assert storage.load().jobs == {"gpt": after}


def test_reports_are_read_in_the_order_in_which_they_came(storage: Storage):
    before = state()
    later = replace(before, reports={**before.reports, "z": report("z"), "m": report("m")})
    storage.commit(added(before))
    storage.commit(Draft({"gpt": before}, {"gpt": later}))
    assert list(storage.load().jobs["gpt"].reports) == ["a", "z", "m"]


def test_only_the_newest_plans_of_a_job_are_kept(place: Path):
    with Storage(place) as storage:
        now = state("one")
        storage.commit(added(now, state("two")))
        for version in range(2, 5):
            before, now = now, published(now, version, f"plan {version}")
            storage.commit(Draft({"one": before}, {"one": now}))
        assert storage.load().jobs == {"one": now, "two": state("two")}
        assert count(place, "plans") == 2


def test_nothing_is_left_of_a_job_that_has_ended_but_what_others_have_too(place: Path):
    with Storage(place) as storage:
        one, two = state("one"), state("two")
        storage.commit(added(one, two))
        storage.commit(Draft({"one": one}, {"one": None}))
        assert storage.load().jobs == {"two": two}
        assert storage.frontier(DIGEST) == frontier_file()
        storage.commit(Draft({"two": two}, {"two": None}))
        with pytest.raises(StorageError, match="has no frontier"):
            storage.frontier(DIGEST)
    with Storage(place):
        tables = ("jobs", "reports", "totals", "plans", "frontiers")
        assert [count(place, table) for table in tables] == [0] * len(tables)


def test_nothing_is_left_of_a_job_whose_name_another_takes_in_the_same_change(storage: Storage):
    tally = add_counters(None, Counters(run="a", iterations=7, time_s=7.0), NOW_S)
    old = replace(state(), tally=tally)
    storage.commit(replace(added(old), telemetry={"gpt"}))
    assert storage.load().jobs["gpt"].tally == tally
    first = replace(published(state(), 1, "plan three"), reports={"c": report("c")}, past={})
    change = replace(added(first), stored={"gpt": old}, ended=[totals_of(old, NOW_S)])
    storage.commit(change)
    assert storage.load().jobs == {"gpt": first}
    (ended,) = storage.ended_jobs()
    assert ended.telemetry is not None
    assert ended.telemetry.iterations == 7


def test_jobs_that_are_registered_together_keep_their_own_frontiers(place: Path):
    """The first one's rows are written before the second one has any."""
    other = "0" * len(DIGEST)
    one, two = state("one"), state("two")
    registered = replace(two.registered, frontier=other)
    two = replace(two, registered=registered, job=replace(two.job, frontier=other))
    with Storage(place) as storage:
        gone = state("gone")
        storage.commit(added(gone))
        change = added(one, two)
        # A job ends in the same change, before one that is new.
        changed = {"gone": None, **change.changed}
        storage.commit(replace(change, stored={"gone": gone}, changed=changed))
        assert storage.load().jobs == {"one": one, "two": two}
    assert count(place, "frontiers") == 2


def test_a_change_that_cannot_be_written_whole_is_not_written_at_all(storage: Storage):
    storage.commit(added(state("one")))
    twice = Draft({}, {"two": state("two"), "one": state("one")})  # "one" is there
    with pytest.raises(StorageError, match="UNIQUE"):
        storage.commit(twice)
    assert list(storage.load().jobs) == ["one"]


def test_power_budgets_are_set_and_lifted(storage: Storage):
    storage.commit(Draft(budget=PowerBudget(1.5, ())))
    storage.commit(Draft(budget=PowerBudget(2.5, ())))
    assert storage.load().budget.power_w == 2.5
    storage.commit(Draft(budget=PowerBudget(None, ())))
    assert storage.load().budget.power_w is None


def test_who_opened_it_before_another_service_writes_no_more(place: Path):
    with Storage(place) as first:
        first.commit(added(state("one")))
        with Storage(place) as second:
            with pytest.raises(
                StorageError, match=r"another service has opened it, so this one writes no more"
            ):
                first.commit(Draft(budget=PowerBudget(1.0, ())))
            second.commit(Draft(budget=PowerBudget(2.0, ())))
            assert second.load().budget.power_w == 2.0


def test_a_database_of_another_version_is_refused(place: Path):
    with Storage(place):
        pass
    with sqlite3.connect(place) as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE name = 'layout'")
    connection.close()
    with pytest.raises(StorageError) as refused:
        Storage(place)
    assert str(refused.value) == (
        f"{place}: is of version 99 and this planner reads version 6; use the planner that wrote "
        "it, or start with another database"
    )


def test_a_database_of_0_2_is_refused_with_the_step_between(place: Path):
    with Storage(place):
        pass
    with closing(sqlite3.connect(place)) as connection, connection:
        connection.execute("UPDATE meta SET value = '2' WHERE name = 'layout'")
    with pytest.raises(StorageError) as refused:
        Storage(place)
    assert str(refused.value) == (
        f"{place}: is of version 2 and this planner reads version 6; open it once with version "
        "0.3, which brings it to this one"
    )


def test_a_database_of_0_3_is_taken_over_whole(place: Path):
    """Version 0.3.0 wrote it: a job with two reports, which had sent what it counted, under 500 kW,
    and one that had ended; 1 MW for all jobs.
    """
    packed = Path(__file__).with_name("service-0.3.sqlite.gz")
    place.write_bytes(gzip.decompress(packed.read_bytes()))
    with Storage(place) as storage:
        storage.now_s = Clock()
        stored = storage.load()
        (ended,) = storage.ended_jobs()
        (now,) = stored.jobs.values()
        assert now.job.ranks == len(now.job.places) > 0
        assert [each.key for each in now.reports.values()] == ["a", "b"]
        assert now.taken is not None
        assert (now.taken.version, now.taken.iteration) == (2, 17)
        assert now.promised == now.published.version
        assert now.decision.stragglers == {1: "a", 2: "b"}
        assert len(now.published.plans) == PIPELINES
        assert storage.frontier(now.job.frontier).startswith(b"PK")
        assert stored.budget == PowerBudget(1e6, ())
        assert now.job.power_w == 5e5
        assert now.budgets == (PowerStep(NOW_S, 5e5),)  # nobody had noted when it was set
        for told in (now.tally, ended.telemetry):
            assert told is not None
            assert (told.iterations, told.time_s, told.energy_j) == (3, 6.0, 15.0)
            assert (told.saved_j, told.is_judged) == (0.0, False)  # it was of another baseline
        assert [(each.version, each.iterations) for each in now.tally.plans] == [(2, 3)]
    with service_at(place, Clock()) as service:  # which goes on with it
        energy = {"metered_s": 6.0, "energy_j": 15.0, "energy_is": "simulated"}
        counted = {"windows": 3, "gpu_s": 6.0, **energy}
        service.telemetry("gpt", Counters(run="r", iterations=5, time_s=10.0, **counted)).result()
        telemetry = service.status("gpt").telemetry
        assert telemetry is not None
        assert (telemetry.iterations, telemetry.time_s) == (5, 10.0)
        assert service.plans("gpt", 0) == now.published


def test_what_is_no_database_is_refused(place: Path):
    place.write_bytes(b"a text of some length, which is no database at all" * 100)
    with pytest.raises(StorageError, match="file is not a database"):
        Storage(place)


@pytest.mark.parametrize(
    ("table", "change", "row"),
    [
        ("states", "content = '{\"secret\":1}'", "'gpt' of jobs, states or plans"),
        ("plans", "content = 'secret'", "'gpt' of jobs, states or plans"),
        ("reports", "content = '\"secret\"'", "'1 of job gpt' of reports"),
        ("frontiers", "curve = '[\"secret\"]'", f"'{DIGEST}' of frontiers"),
        ("jobs", "registration = 'secret'", "'gpt' of jobs, states or plans"),
        ("meta", "value = 'secret' WHERE name = 'written_s'", "'written_s' of meta"),
    ],
)
def test_a_row_that_was_changed_is_named_and_not_quoted(
    storage: Storage, place: Path, table: str, change: str, row: str
):
    storage.commit(added(state()))
    with sqlite3.connect(place) as connection:
        connection.execute(f"UPDATE {table} SET {change}")
    connection.close()
    with pytest.raises(StorageError) as refused:
        storage.load()
    assert str(refused.value) == (
        f"{place}: the row {row} is not as the service wrote it; restore a copy of the database, "
        "or start with another one"
    )


@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("mysql://host/name", "^mysql://host/name: is not a database of the service; give the"),
        ("mysql://planner:sec@ret@host/name", r"^mysql://planner:\*\*\*@host/name: "),
        (
            "postgresql://planner:secret@127.0.0.1:1/name",
            r"^postgresql://planner:\*\*\*@127\.0\.0\.1:1/name: connection .* failed: ",
        ),
        ("sqlite:///service.sqlite", "is not a database of the service"),
        ("/nosuchfolder/service.sqlite", "unable to open database file"),
    ],
)
def test_a_place_of_no_use_is_refused(place: str, reason: str):
    if place.startswith("postgresql"):
        pytest.importorskip("psycopg")
    with pytest.raises(StorageError, match=reason) as refused:
        Storage(place)
    assert "sec" not in str(refused.value)


def test_a_database_file_is_its_owners_alone_also_if_it_was_not(place: Path):
    for _ in range(2):
        with Storage(place) as storage:
            storage.commit(added(state()) if not storage.load().jobs else Draft())
            files = list(place.parent.glob(f"{place.name}*"))
            assert len(files) == 3
            assert {stat.S_IMODE(each.stat().st_mode) for each in files} == {0o600}
        place.chmod(0o644)


def test_a_file_has_a_log_ahead_and_waits_for_the_disk(place: Path):
    with Storage(place) as storage:
        assert storage.execute("PRAGMA journal_mode") == [("wal",)]
        assert storage.execute("PRAGMA synchronous") == [(2,)]


def test_a_job_remembers_so_many_reports_that_no_longer_count():
    reports = {str(number): report(str(number)) for number in range(REMEMBERED + 10)}
    before = replace(state(), reports=reports, past={"old": report("old")})
    gone = tuple(each for key, each in reports.items() if key != "3")
    after = before.looked(Look({}, {}, gone, math.inf, math.inf))
    assert list(after.reports) == ["3"]
    assert len(after.past) == REMEMBERED
    assert list(after.past)[-1] == str(REMEMBERED + 9)
    assert "old" not in after.past
