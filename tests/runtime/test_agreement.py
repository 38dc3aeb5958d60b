"""The agreement on plans with real stores, which may be lost."""
# ruff: noqa: TID253 - these tests are there for torch

from __future__ import annotations

import json
import os
import random
import threading
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest

pytest.importorskip("torch")

from launching import ranks
from stepped_ranks import Counted
from torch.distributed import HashStore, PrefixStore, TCPStore

from perseus_planner.base.wires import NodeMemory
from perseus_planner.runtime.job import TrainingJob
from perseus_planner.runtime.sending import LONGEST_PACKED_BYTES
from perseus_planner.runtime.switching import (
    LOOK_S,
    Acceptance,
    AgreedState,
    Agreement,
    NodeShare,
    Proposal,
    Rejection,
    read_plan,
    write_plan,
)

NEWER = Rejection("a newer plan was proposed before this one")


class Job:
    """Ranks on one thread, which look when the test says so; all but `readers` look at the store
    themselves.
    """

    def __init__(
        self,
        size: int = 4,
        store: Any = None,
        readers: int = 0,
        nodes: int = 1,
        *,
        is_prompt: bool = False,
    ):
        self.store = store or HashStore()
        self.stores = [Counted(self.store) for _ in range(size)]
        self.now_s = 0.0
        self.given: list[tuple[int, int, bytes]] = []
        self.memory = NodeMemory.create() if readers else None
        self.agreements = [
            Agreement(
                store,
                lambda version, blob, rank=rank: self.given.append((rank, version, blob)),
                NodeShare(nodes, rank < size - readers, self.memory),
                is_prompt=is_prompt,
                now_s=lambda: self.now_s,
            )
            for rank, store in enumerate(self.stores)
        ]

    def run(self, iteration: int, *numbers: int, lasts_s: float = 1.0) -> list[int]:
        """Let ranks begin an iteration, and look twice; return the versions."""
        numbers = numbers or tuple(range(len(self.agreements)))
        versions = [self.agreements[rank].version_at(iteration) for rank in numbers]
        self.now_s += lasts_s
        for _ in range(2):
            for rank in numbers:
                self.agreements[rank].look()
        return versions


def test_all_ranks_begin_by_the_plan_that_they_enter_with():
    job = Job()
    assert job.run(0) == job.run(10**6) == [1, 1, 1, 1]


def test_all_ranks_take_a_plan_at_one_iteration_three_after_it_is_proposed():
    job = Job()
    assert [job.run(iteration) for iteration in range(7)] == 7 * [[1, 1, 1, 1]]
    proposal = job.agreements[2].propose(b"a plan")
    assert proposal.wait(0.0) is None
    versions = [job.run(iteration) for iteration in range(7, 12)]
    assert proposal.wait(0.0) == proposal.outcome == Acceptance(2, 10)
    assert versions == 3 * [[1, 1, 1, 1]] + 2 * [[2, 2, 2, 2]]
    assert sorted(job.given) == [(rank, 2, b"a plan") for rank in range(4)]


@pytest.mark.parametrize(
    ("nodes", "lasts_s", "after"),
    [(1, 1.0, 3), (2048, 2.0, 3), (2048, 1.0, 4), (2048, 0.1, 17), (2, 0.02, 10)],
)
def test_a_plan_begins_when_all_nodes_have_had_time_to_look(nodes: int, lasts_s: float, after: int):
    job = Job(1, nodes=nodes)
    for iteration in range(9):
        job.run(iteration, lasts_s=lasts_s)
    proposal = job.agreements[0].propose(b"a plan")
    job.run(9, lasts_s=lasts_s)
    assert proposal.outcome == Acceptance(2, 9 + after)


def test_a_prompt_plan_that_is_there_before_training_begins_is_run_from_the_first_iteration_on():
    job = Job(is_prompt=True)
    proposal = job.agreements[0].propose(b"a plan")
    for agreement in job.agreements[:3]:
        agreement.look()
    assert proposal.outcome == Acceptance(2, 0)
    assert job.run(0) == [2, 2, 2, 1]  # one has not heard of it
    assert job.run(1) == [2, 2, 2, 2]


@pytest.mark.parametrize(("elapsed_s", "since"), [(0.0, 2), (0.1, 2), (0.5, 1), (20.0, 1)])
def test_a_prompt_plan_of_the_first_iteration_is_run_from_the_next_one_on_if_it_is_long(
    elapsed_s: float, since: int
):
    job = Job(is_prompt=True)
    job.agreements[0].version_at(0)
    job.now_s += elapsed_s
    proposal = job.agreements[0].propose(b"a plan")
    job.agreements[0].look()
    assert proposal.outcome == Acceptance(2, since)


def test_a_rank_that_hears_late_of_a_plan_takes_it_at_its_next_iteration():
    job = Job()
    job.agreements[0].propose(b"a plan")
    for iteration in range(5):
        job.run(iteration, 0, 1, 2)
    assert job.run(5) == [2, 2, 2, 1]
    assert job.run(6) == [2, 2, 2, 2]


def test_an_even_newer_plan_takes_the_place_of_one_that_no_rank_has_begun():
    job = Job()
    first = job.agreements[0].propose(b"a plan")
    job.run(5)
    second = job.agreements[1].propose(b"a plan")
    job.run(5)
    assert (first.outcome, second.outcome) == (Acceptance(2, 8), Acceptance(3, 8))
    assert [job.run(iteration) for iteration in (7, 8)] == [[1, 1, 1, 1], [3, 3, 3, 3]]


def test_the_newest_of_several_proposals_is_taken():
    job = Job()
    mine, newer = job.agreements[0].propose(b"mine"), job.agreements[0].propose(b"newer")
    other = job.agreements[2].propose(b"other")
    job.run(5)
    assert (mine.outcome, newer.outcome, other.outcome) == (
        NEWER,
        Acceptance(2, 8),
        Acceptance(3, 8),
    )
    job.run(6)
    assert job.run(8) == [3, 3, 3, 3]


def test_a_proposer_that_another_one_has_overtaken_is_told_so():
    job = Job()
    add = job.stores[1]._store.add

    def overtaken(key: str, amount: int) -> int:
        number: int = add(key, amount)
        if key == "versions" and number == 1:
            later.append(job.agreements[0].propose(b"later"))
            job.agreements[0].look()
        return number

    later: list[Proposal] = []
    job.stores[1]._store = mock.Mock(wraps=job.store, add=overtaken)
    earlier = job.agreements[1].propose(b"earlier")
    job.run(5, 1)
    assert (earlier.outcome, later[0].outcome) == (NEWER, Acceptance(3, 2))
    job.run(6)
    assert job.run(7) == [3, 3, 3, 3]
    assert sorted(job.store.list_keys()) == ["plans/3", "state", "versions"]


def test_the_ranks_of_a_node_hear_of_a_plan_from_the_one_that_looks():
    job = Job(readers=2)
    proposal = job.agreements[0].propose(b"a plan")
    for iteration in range(4):
        assert job.run(iteration) == [2 if iteration == 3 else 1] * 4
    assert proposal.outcome == Acceptance(2, 3)
    assert [store.counts.total() for store in job.stores[2:]] == [0, 0]
    another = job.agreements[3].propose(b"another")  # one that does not look may propose
    job.run(4)
    assert another.outcome == Acceptance(3, 7)
    assert [job.run(iteration) for iteration in (5, 6, 7)] == [[2] * 4, [2] * 4, [3] * 4]


def test_half_a_plan_in_the_memory_of_a_node_is_not_read():
    memory = NodeMemory.create()
    write_plan(memory, AgreedState(2, 8), b"a plan")
    reader = NodeMemory.open(memory.address)
    os.pwrite(memory._descriptor, b"another", 22)
    assert read_plan(reader, 1) is None
    write_plan(memory, AgreedState(3, 9), b"a third")
    assert (read_plan(reader, 1), read_plan(reader, 3)) == (
        (AgreedState(3, 9), b"a third"),
        None,
    )
    reader.close()
    memory.close()


def test_a_plan_that_cannot_be_prepared_is_not_read_again():
    prepare = mock.Mock(side_effect=KeyError)
    agreement = Agreement(HashStore(), prepare)
    agreement.propose(b"a plan")
    with pytest.raises(KeyError):
        agreement.look()
    agreement.version_at(0)
    agreement.look()
    assert (prepare.call_count, agreement.lost, agreement.version_at(9)) == (1, None, 2)


def test_without_the_store_a_rank_goes_on_by_its_plan():
    job = Job()
    job.run(5)
    job.stores[1].is_gone = True
    job.run(6)
    text = "the job's store can no longer be used (Broken pipe): no new plan will be taken"
    assert [agreement.lost for agreement in job.agreements] == [None, text, None, None]
    counted = job.stores[1].counts.total()
    proposals = [job.agreements[rank].propose(b"a plan") for rank in (0, 1)]
    job.run(7)
    assert [proposal.outcome for proposal in proposals] == [Acceptance(2, 10), Rejection(text)]
    assert job.run(10) == [2, 1, 2, 2]
    assert job.stores[1].counts.total() == counted


def test_a_proposal_that_the_store_was_lost_with_is_rejected():
    job = Job()
    proposal = job.agreements[0].propose(b"a plan")
    job.stores[0].is_gone = True
    job.run(0)
    assert proposal.outcome == Rejection(str(job.agreements[0].lost))


def test_a_store_that_has_forgotten_is_lost():
    job = Job(2)
    job.agreements[0].propose(b"a plan")
    job.run(5)
    job.store.delete_key("state")
    job.run(6)
    expected = (
        "the job's store can no longer be used (the store has lost what the ranks had agreed on): "
    )
    assert all(str(agreement.lost).startswith(expected) for agreement in job.agreements)
    assert job.run(8) == [2, 2]


def test_a_plan_that_no_store_takes_is_refused_at_once():
    job = Job(1)
    noise = random.Random(0).randbytes(LONGEST_PACKED_BYTES + 1)
    outcome = job.agreements[0].propose(noise).outcome
    assert isinstance(outcome, Rejection)
    assert (
        f"the job's store takes {LONGEST_PACKED_BYTES}; plan for fewer microbatches" in outcome.text
    )


def test_many_switches_leave_nothing_behind():
    job = Job(3)
    for turn in range(200):
        job.agreements[turn % 3].propose(b"a plan")
        job.run(turn)
    assert sorted(job.store.list_keys()) == ["plans/201", "state", "versions"]
    assert len(job.agreements[0]._known) <= 5


def test_a_look_takes_one_operation_for_each_iteration_and_a_proposal_few_more():
    job = Job(2, TCPStore("127.0.0.1", 0, None, True))
    proposer, other = job.stores
    for iteration in range(10):
        job.run(iteration)
    assert (proposer.counts, other.counts) == ({"compare_set": 10}, {"compare_set": 10})
    job.run(9)  # no iteration has begun
    job.run(10, lasts_s=0.4 * LOOK_S)
    job.run(11, lasts_s=0.4 * LOOK_S)  # one has, too soon
    assert (proposer.counts.total(), other.counts.total()) == (11, 11)
    job.run(12)
    proposer.counts.clear()
    other.counts.clear()
    largest = random.Random(0).randbytes(LONGEST_PACKED_BYTES - 10_000)
    proposal = job.agreements[0].propose(largest)
    for iteration in range(13, 17):
        job.run(iteration)
    assert proposal.outcome == Acceptance(2, 16)
    assert all(blob == largest for _, _, blob in job.given)
    assert (proposer.counts.total(), other.counts.total()) == (4 + 1 + 4, 4 + 1)


def test_looks_go_on_while_training_waits_for_a_key():
    store = TCPStore("127.0.0.1", 0, None, True)
    training = PrefixStore("job", store.clone())
    job = TrainingJob(training, 0, 1)
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        training.wait(["a key"], timedelta(seconds=60))

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    agreement = Agreement(job.own_store, lambda version, blob: None, now_s=count().__next__)
    for iteration in range(100):
        agreement.version_at(iteration)
        agreement.look()
    assert thread.is_alive()
    PrefixStore("job", store).set("a key", "")
    thread.join()


def test_a_store_that_cannot_be_cloned_is_used_as_it_is():
    class Old:
        def check(self, keys: list[str]) -> str:
            return f"checked {keys}"

    assert TrainingJob(cast(Any, Old()), 0, 1).own_store.check(["a"]) == "checked ['a']"


@pytest.mark.parametrize("program", ["over_tcp", "over_file", "over_hash"])
def test_real_ranks_come_to_the_plan_though_one_stands_still(program: str, tmp_path: Path):
    arguments = [str(tmp_path / "store")] if program == "over_file" else []
    everyone = ranks(
        f"agreement_programs:{program}", 1 if program == "over_hash" else 4, tmp_path, *arguments
    )
    assert [each.code for each in everyone] == [0] * len(everyone), everyone
    said = [json.loads(each.stdout) for each in everyone]
    versions: list[list[int]] = said[0] if program == "over_hash" else said
    for each in versions:
        assert each == sorted(each)
        assert (each[0], each[-1]) == (1, 2)


def test_when_the_host_of_the_store_dies_the_others_train_on_by_their_plan(tmp_path: Path):
    dead, *others = ranks("agreement_programs:host_dies", 4, tmp_path)
    assert (dead.code, [each.code for each in others]) == (-9, [0, 0, 0])
    for each in others:
        said = json.loads(each.stdout)
        assert said["lost"].startswith("the job's store can no longer be used (")
        assert set(said["versions"]) == {1}
