"""The agreement on plans with real stores: proposals are decided or refused, and stores may be lost."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from launching import ranks
from stepped_ranks import Counted
from torch.distributed import HashStore, TCPStore

from perseus_planner.errors import PlanError
from perseus_planner.runtime.switching.agreement import LONGEST_PLAN_BYTES, Acceptance, Agreement, Rejection

NEWER = Rejection("a newer plan was proposed before this one was decided")


class Job:
    """Ranks on one thread, which look when the test says so."""

    def __init__(self, size: int = 4, store: Any = None):
        self.store = store or HashStore()
        self.stores = [Counted(self.store) for _ in range(size)]
        self.now_s = 0.0
        self.refusals: dict[int, Any] = {}
        self.given: list[tuple[int, int, bytes]] = []
        self.agreements = [self._agreement(rank, store) for rank, store in enumerate(self.stores)]

    def _agreement(self, rank: int, store: Any) -> Agreement:
        def accept(version: int, blob: bytes) -> str | None:
            self.given.append((rank, version, blob))
            answer = self.refusals.get(rank)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return Agreement(store, rank, len(self.stores), accept, now_s=lambda: self.now_s)

    def look(self, through: int, *numbers: int, rounds: int = 3) -> None:
        for _ in range(rounds):
            for rank in numbers or range(len(self.agreements)):
                self.agreements[rank].look(through)

    def versions(self, iteration: int) -> list[int]:
        return [agreement.version_at(iteration) for agreement in self.agreements]


def test_all_ranks_begin_by_the_plan_that_they_enter_with():
    job = Job()
    assert job.versions(0) == [1, 1, 1, 1]
    assert all(agreement.may_begin(10**6) for agreement in job.agreements)


def test_a_plan_that_all_accept_begins_at_one_iteration_after_all_that_are_begun():
    job = Job()
    assert job.versions(6) == [1, 1, 1, 1]
    proposal = job.agreements[2].propose(b"a plan")
    assert proposal.wait(0.0) is None
    job.look(8)
    assert proposal.wait(0.0) == proposal.outcome == Acceptance(2, 9)
    assert sorted(job.given) == [(rank, 2, b"a plan") for rank in range(4)]
    assert [job.versions(iteration)[0] for iteration in (7, 8, 9, 10)] == [1, 1, 2, 2]
    assert job.versions(100) == [2, 2, 2, 2]


def test_what_is_long_past_is_forgotten():
    job = Job(2)
    for through in (5, 10):
        job.agreements[0].propose(b"a plan")
        job.look(through)
        assert job.versions(through + 1) == 2 * [job.agreements[0].version_at(through + 2)]
    assert [job.versions(iteration) for iteration in (5, 10, 11)] == [[0, 0], [2, 2], [3, 3]]


def test_a_rank_that_is_far_ahead_is_waited_for_by_the_plan_alone():
    job = Job()
    assert job.agreements[3].version_at(50) == 1
    proposal = job.agreements[0].propose(b"a plan")
    job.look(2)
    assert proposal.outcome == Acceptance(2, 51)
    assert job.versions(50) == [1, 1, 1, 1]
    assert job.versions(51) == [2, 2, 2, 2]


def test_a_rank_that_has_said_yes_stops_at_its_limit_until_it_knows():
    job = Job()
    proposal = job.agreements[0].propose(b"a plan")
    job.look(5, 0, 1, 2)
    assert job.versions(5) == [1, 1, 1, 1]
    assert [agreement.may_begin(6) for agreement in job.agreements] == [False, False, False, True]
    job.look(7, 0, 1, 2)  # it may move its limit on
    assert job.versions(7) == [1, 1, 1, 1]
    job.look(7)
    assert proposal.outcome == Acceptance(2, 8)
    assert job.versions(8) == [2, 2, 2, 2]


def test_an_even_newer_plan_takes_the_place_of_one_that_no_rank_has_begun():
    job = Job()
    first = job.agreements[0].propose(b"a plan")
    job.look(5)
    second = job.agreements[1].propose(b"a plan")
    job.look(5)
    assert (first.outcome, second.outcome) == (Acceptance(2, 6), Acceptance(3, 6))
    assert job.versions(6) == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("answer", "text"),
    [("no such clock", "rank 1: no such clock"), (PlanError("no plan"), "rank 1: PlanError: no plan")],
)
def test_a_plan_that_one_rank_refuses_is_taken_by_none(answer: Any, text: str):
    job = Job()
    job.refusals[1] = answer
    proposal = job.agreements[0].propose(b"a plan")
    job.look(5)
    assert proposal.outcome == Rejection(text)
    assert job.versions(100) == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("size", "text"),
    [(3, "no answer within 60 s from rank 2"), (8, "no answer within 60 s from ranks 2, 3, 4, 5 and others")],
)
def test_a_plan_that_not_all_answer_is_given_up(size: int, text: str):
    job = Job(size)
    proposal = job.agreements[0].propose(b"a plan")
    job.look(5, 0, 1)
    job.now_s = 60.0
    job.look(5, 0, 1)
    assert proposal.outcome is None
    job.now_s = 60.1
    job.look(5, 0, 1)
    assert proposal.outcome == Rejection(text)
    job.look(5)
    assert job.versions(100) == size * [1]
    again = job.agreements[0].propose(b"a plan")
    job.look(6)
    assert again.outcome == Acceptance(3, 101)


def test_the_newest_of_several_proposals_is_taken():
    job = Job()
    first = job.agreements[0].propose(b"first")
    job.look(5, 0, 1)
    second, third = job.agreements[2].propose(b"second"), job.agreements[2].propose(b"third")
    job.look(5)
    assert (first.outcome, second.outcome, third.outcome) == (NEWER, NEWER, Acceptance(3, 6))
    mine, newer = job.agreements[0].propose(b"fourth"), job.agreements[0].propose(b"fifth")
    job.look(5)
    assert (mine.outcome, newer.outcome) == (NEWER, Acceptance(4, 6))
    assert job.versions(6) == [4, 4, 4, 4]


def test_a_proposer_that_dies_is_in_nobodys_way():
    job = Job()
    job.agreements[0].propose(b"a plan")
    job.look(5, 0, rounds=1)
    job.look(5, 1, 2, 3)
    assert job.versions(5) == [1, 1, 1, 1]
    later = job.agreements[1].propose(b"a plan")
    job.look(7, 1, 2, 3)
    job.agreements[0] = job._agreement(0, job.stores[0])  # it is back, as it entered
    job.look(7)
    assert later.outcome == Acceptance(3, 8)


def test_without_the_store_a_rank_goes_on_by_its_plan():
    job = Job()
    job.look(5)
    job.stores[1].is_gone = True
    job.look(5)
    text = "the job's store can no longer be used (Broken pipe): no new plan will be taken"
    assert [agreement.lost for agreement in job.agreements] == [None, text, None, None]
    counted = job.stores[1].counts.total()
    proposals = [job.agreements[rank].propose(b"a plan") for rank in (0, 1)]
    job.look(5)
    assert [proposal.outcome for proposal in proposals] == [None, Rejection(text)]
    assert job.versions(100) == [0, 1, 0, 0]  # the others have promised
    assert job.stores[1].counts.total() == counted


def test_without_the_store_a_rank_that_has_promised_goes_on_to_its_limit():
    job = Job()
    proposal = job.agreements[0].propose(b"a plan")
    job.look(5, 0, rounds=1)
    job.look(5, 1, 2, 3, rounds=1)
    for rank in (0, 1):
        job.stores[rank].is_gone = True
    job.look(5)
    assert job.agreements[1].lost == (
        "the job's store can no longer be used (Broken pipe): no new plan will be taken; it is not known whether "
        "plan 2 was taken, so this rank runs without clocks after iteration 5"
    )
    assert proposal.outcome == Rejection(str(job.agreements[0].lost))
    assert (job.versions(5), job.versions(6)) == ([1, 1, 1, 1], [0, 0, 0, 0])


def test_a_store_that_has_forgotten_is_lost():
    job = Job(2)
    job.agreements[0].propose(b"a plan")
    job.look(5)
    job.store.delete_key("state")
    job.agreements[1].propose(b"a plan")
    job.look(5)
    expected = "the job's store can no longer be used (the store has lost what the ranks had agreed on): "
    assert all(str(agreement.lost).startswith(expected) for agreement in job.agreements)
    assert job.versions(6) == [2, 2]


def test_a_plan_that_no_store_takes_is_refused_at_once():
    job = Job(1)
    noise = random.Random(0).randbytes(LONGEST_PLAN_BYTES + 1)
    outcome = job.agreements[0].propose(noise).outcome
    assert isinstance(outcome, Rejection)
    assert f"the job's store takes {LONGEST_PLAN_BYTES}; plan for fewer microbatches" in outcome.text


def test_many_switches_leave_nothing_behind():
    job = Job(3)
    for turn in range(200):
        assert 0 not in job.versions(turn)
        job.refusals = {2: "no"} if turn % 3 == 0 else {}
        job.agreements[turn % 3].propose(b"a plan")
        job.look(turn)
    job.look(200)
    assert (job.store.check(["state"]), job.store.check(["versions"]), job.store.num_keys()) == (True, True, 2)
    assert len(job.agreements[0]._decisions) <= 3


def test_a_look_takes_one_operation_and_a_proposal_few_more():
    job = Job(2, TCPStore("127.0.0.1", 0, None, True))
    proposer, other = job.stores
    job.look(0, rounds=10)
    assert (proposer.counts, other.counts) == ({"compare_set": 10}, {"compare_set": 10})
    proposer.counts.clear()
    other.counts.clear()
    largest = random.Random(0).randbytes(LONGEST_PLAN_BYTES - 10_000)
    proposal = job.agreements[0].propose(largest)
    job.look(3, rounds=5)
    assert proposal.outcome == Acceptance(2, 4)
    assert all(blob == largest for _, _, blob in job.given)
    assert other.counts.total() == 5 + 3  # who comes second finds `cleared` moved
    assert proposer.counts.total() == 5 + 4 + 5 + 2


@pytest.mark.parametrize("program", ["over_tcp", "over_file", "over_hash"])
def test_real_ranks_switch_at_one_iteration_though_one_stands_still(program: str, tmp_path: Path):
    arguments = [str(tmp_path / "store")] if program == "over_file" else []
    everyone = ranks(f"agreement_programs:{program}", 1 if program == "over_hash" else 4, tmp_path, *arguments)
    assert [each.code for each in everyone] == [0] * len(everyone), everyone
    said = [json.loads(each.stdout) for each in everyone]
    versions: list[list[int]] = said[0] if program == "over_hash" else said
    first = min(each.index(2) for each in versions)
    for each in versions:
        assert (set(each[:first]) - {0}, set(each[first:]) - {0}) == ({1}, {2})
        assert each[-1] == 2


def test_when_the_host_of_the_store_dies_the_others_train_on_by_their_plan(tmp_path: Path):
    dead, *others = ranks("agreement_programs:host_dies", 4, tmp_path)
    assert (dead.code, [each.code for each in others]) == (-9, [0, 0, 0])
    for each in others:
        said = json.loads(each.stdout)
        assert said["lost"].startswith("the job's store can no longer be used (")
        assert set(said["versions"]) == {1}


def test_when_the_host_dies_before_it_decides_no_rank_takes_the_plan(tmp_path: Path):
    dead, *others = ranks("agreement_programs:host_dies_before_it_decides", 4, tmp_path)
    assert (dead.code, [each.code for each in others]) == (-9, [0, 0, 0]), others
    for each in others:
        said = json.loads(each.stdout)
        assert "it is not known whether plan 2 was taken" in said["lost"]
        assert (said["versions"][0], said["versions"][-1]) == (1, 0)
        assert set(said["versions"]) == {0, 1}
