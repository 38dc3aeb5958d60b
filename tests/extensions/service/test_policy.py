"""The policy against its rules table, written once more the long way round; then what each line
of it means.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from service_jobs import JOB, PLACES, STAGES, Formula, Solved
from strategies import fixed, smooth_profile

from perseus_planner import schedules
from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.service.curve import Numbers
from perseus_planner.extensions.service.look import Look
from perseus_planner.extensions.service.models import (
    Cause,
    Decision,
    RegisteredJob,
    Report,
    Scope,
)
from perseus_planner.extensions.service.parts import ScopeKind
from perseus_planner.extensions.service.policy import (
    PolicySettings,
    decide,
    saving_w,
)
from perseus_planner.solver.frontier import solve

CALM_S = Formula().baseline_time_s
START_S = JOB.since_s
EAGER = PolicySettings(least_rise=0.0, holding_s=0.0)

SCOPES = [
    *(Scope("pipeline", str(pipeline)) for pipeline in range(3)),
    *(Scope("stage", str(stage), pipeline) for stage in (0, 2, 3) for pipeline in (0, 2)),
    *(Scope("rank", str(rank)) for rank in (1, 4, 5)),
    *(Scope("gpu", uuid) for uuid in ("GPU-a", "GPU-d")),
    *(Scope("node", node) for node in ("node0", "node1")),
    Scope("node", "node0", 1),
]

_numbers = count()


def report(
    kind: ScopeKind = "pipeline", value: str = "1", slowdown: float | None = 1.2, **of: object
) -> Report:
    """A report on something that is slow from the start of the job on."""
    said: dict[str, Any] = {
        "source": "test",
        "iteration_s": None,
        "observed_s": START_S,
        "begins_s": START_S,
        "key": f"k{next(_numbers)}",
    }
    said["scope"] = Scope(kind, value, of.pop("pipeline", None))
    return Report(slowdown=slowdown, **(said | of))


def times_s(decision: Decision) -> list[float]:
    return [target.time_s for target in decision.each]


def lasting(look: Look) -> tuple[Report, ...]:
    return tuple(each for own in look.lasting.values() for same in own.values() for each in same)


def look_at(
    job: RegisteredJob, reports: Iterable[Report], now_s: float, iteration: int | None = None
) -> Look:
    return Look.empty(now_s).with_reports(job, reports, now_s, iteration)


def active(look: Look) -> set[Report]:
    groups = look.active.values()
    return {each for group in groups for reports in group.values() for each in reports}


# The table once more, line by line.


def begun(each: Report, now_s: float, iteration: int | None) -> bool:
    if each.begins_iteration is None:
        return each.begins_s <= now_s and each.begins_s < each.expires_s
    return iteration is not None and each.begins_iteration <= iteration


def counting(reports: Sequence[Report], now_s: float, iteration: int | None) -> list[Report]:
    known = [each for each in reports if begun(each, now_s, iteration)]
    return [
        each
        for each in known
        if each.expires_s > now_s
        and each.slowdown != 1
        and not any(
            (other.source, other.scope) == (each.source, each.scope)
            and other.observed_s > each.observed_s
            for other in known
        )
    ]


def hit(scope: Scope, pipeline: int) -> set[int] | None:
    """Which stages of a pipeline are meant. None: the pipeline is not; an empty set: not known
    which.
    """
    if scope.pipeline not in (None, pipeline):
        return None
    if scope.kind == "pipeline":
        return set() if scope.value == str(pipeline) else None
    if scope.kind == "stage":
        return {int(scope.value)}
    names = {
        place: {"rank": str(place.rank), "gpu": place.gpu, "node": place.node}[scope.kind]
        for place in PLACES
    }
    places = [
        place for place in PLACES if place.pipeline == pipeline and names[place] == scope.value
    ]
    if not places:
        return None
    return (
        set()
        if any(not place.stages for place in places)
        else {s for place in places for s in place.stages}
    )


class Known(NamedTuple):
    """A pipeline: what it can do, what its plan takes if it waits for nobody, its iteration
    then, until when.
    """

    own: Numbers
    own_s: float
    takes_s: float
    is_slow: bool
    expires_s: float


def known_of(numbers: Numbers, target_s: float, active: Sequence[Report], pipeline: int) -> Known:
    calm_s = sorted((numbers.min_time_s, target_s, numbers.max_time_s))[1]
    slow: dict[int, float] = {}
    by_stage, by_time = [], []
    for each in active:
        stages = hit(each.scope, pipeline)
        if stages and each.slowdown and each.cause not in ("communication", "data"):
            slow |= {stage: max(slow.get(stage, 1.0), each.slowdown) for stage in stages}
            by_stage.append((each.slowdown, each.key, each.expires_s))
        elif stages is not None:
            by_time.append((each.iteration_s or each.slowdown * calm_s, each.key, each.expires_s))
    own = numbers.slowed(slow)
    own_s = sorted((own.min_time_s, target_s, own.max_time_s))[1]
    takes_s, *_, expires_s = max(by_time, default=(0.0, math.inf))
    if takes_s > own_s:
        return Known(own, own_s, takes_s, True, expires_s)
    return Known(own, own_s, own_s, bool(slow), max(by_stage, default=(math.inf,))[-1])


class Model:
    """What plans take, by the table; it decides as often as it is asked."""

    def __init__(self, numbers: Numbers, how: PolicySettings) -> None:
        self.numbers, self.how = numbers, how
        self.planned_s: list[float] | None = None
        self.changed_s = -math.inf  #: when stragglers last changed plans
        self.was_slow = False

    def known(self, job: RegisteredJob, active: Sequence[Report]) -> list[Known]:
        target_s = job.deadline_s or self.numbers.baseline_time_s
        return [
            known_of(self.numbers, target_s, active, pipeline) for pipeline in range(job.pipelines)
        ]

    def decide(self, job: RegisteredJob, active: Sequence[Report], now_s: float) -> list[float]:
        known = self.known(job, active)
        slowest_s = max(each.takes_s for each in known)
        wanted = [
            e.own_s if e.takes_s > e.own_s else min(slowest_s, e.own.max_time_s) for e in known
        ]
        before = self.planned_s or [each.own_s for each in known]
        kept = [
            min(wants_s, max(was_s, e.own_s))
            for was_s, wants_s, e in zip(before, wanted, known, strict=True)
        ]
        expires_s = max(each.expires_s for each in known if each.takes_s == slowest_s)
        left_s = self.how.assumed_s if expires_s == math.inf else expires_s - now_s
        rises = any(
            b >= a * (1 + self.how.least_rise) and b > a for a, b in zip(kept, wanted, strict=True)
        )
        pays = left_s > 2 * self.how.iterations_lost * slowest_s
        chosen = wanted if rises and pays and now_s >= self.changed_s + self.how.holding_s else kept
        is_slow = any(each.is_slow for each in known)
        if self.planned_s is not None and chosen != self.planned_s and (is_slow or self.was_slow):
            self.changed_s = now_s
        self.planned_s, self.was_slow = chosen, is_slow
        return chosen


SLOWDOWNS = st.sampled_from((1.0, 1.0, 1.004, 1.008, 1.02, 1.1, 1.25, 2.0))
ITERATIONS = st.sampled_from((0.5, 1.02, 1.1, 1.2, 2.0))
DELAYS = st.sampled_from((0.0, 0.0, 0.25, 3.0, 40.0))
TTLS = st.sampled_from((0.25, 2.0, 3.0, 29.0, 60.0, 1e5, math.inf))
SKEWS = st.sampled_from((0.0, 0.0, -1.0, 0.5, -50.0))
CAUSES = st.sampled_from(("compute", "unknown", "communication", "data"))


class Straggling(RuleBasedStateMachine):
    """A job to which things happen, decided on whenever they do and whenever the last decision
    asks for it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.job, self.numbers, self.now_s = JOB, Formula(), START_S + 1.0
        self.reports: list[Report] = []
        self.iteration: int | None = None

    @initialize(
        how=st.sampled_from((PolicySettings(), EAGER, PolicySettings(0.05, 10.0, 2.0, 3.0)))
    )
    def register(self, how: PolicySettings) -> None:
        self.how, self.model = how, Model(self.numbers, how)
        self.decision = None
        self.decide()

    @rule(
        scope=st.sampled_from(SCOPES),
        slowdown=SLOWDOWNS,
        source=st.sampled_from("ab"),
        delay_s=DELAYS,
        ttl_s=TTLS,
        skew_s=SKEWS,
        cause=CAUSES,
    )
    def say(
        self,
        scope: Scope,
        slowdown: float,
        source: str,
        delay_s: float,
        ttl_s: float,
        skew_s: float,
        cause: Cause,
    ):
        at_s, begins_s = self.now_s + skew_s, self.now_s + delay_s
        key = f"k{len(self.reports)}"
        said = Report(
            key, source, scope, slowdown, None, at_s, begins_s, None, begins_s + ttl_s, cause
        )
        self.reports.append(said)
        self.decide()

    @rule(
        scope=st.sampled_from(SCOPES),
        time_s=ITERATIONS,
        at=st.none() | st.integers(0, 6),
        ttl_s=TTLS,
    )
    def expect(self, scope: Scope, time_s: float, at: int | None, ttl_s: float):
        key, now_s = f"k{len(self.reports)}", self.now_s
        self.reports.append(Report(key, "c", scope, None, time_s, now_s, now_s, at, now_s + ttl_s))
        self.decide()

    @rule()
    def repeat(self):
        self.reports += self.reports[-1:]
        self.decide()

    @rule()
    def forget_what_is_over(self):
        self.reports = list(lasting(self.look()))
        self.decide()

    @rule(deadline_s=st.sampled_from((None, 0.9, 1.1, 1.2, 5.0)))
    def set_deadline(self, deadline_s: float | None):
        self.job = replace(self.job, deadline_s=deadline_s)
        self.decide()

    @rule()
    def iterate(self):
        self.iteration = 0 if self.iteration is None else self.iteration + 1
        self.decide()

    @rule(seconds=st.sampled_from((0.25, 1.0, 10.0, 30.0, 100.0)))
    def wait(self, seconds: float):
        until_s = self.now_s + seconds
        while self.decision.look_again_s <= until_s:
            self.look_again()
        self.now_s = until_s
        self.assert_unchanged()

    @precondition(lambda self: self.decision.look_again_s < math.inf)
    @rule()
    def wait_for_a_change(self):
        self.look_again()

    def look_again(self) -> None:
        look_again_s = self.decision.look_again_s
        for moment_s in ((self.now_s + look_again_s) / 2, math.nextafter(look_again_s, 0.0)):
            if moment_s > self.now_s:
                self.now_s = moment_s
                self.assert_unchanged()
        self.now_s = look_again_s
        self.decide()

    def assert_unchanged(self) -> None:
        decision = self.decision
        self.decide()
        assert self.decision == decision

    def decided(self, reports: Iterable[Report]) -> Decision:
        before, how = self.decision, self.how
        look = look_at(self.job, reports, self.now_s, self.iteration)
        return decide(self.job, look, self.numbers, before, self.now_s, how)

    def look(self) -> Look:
        return look_at(self.job, self.reports, self.now_s, self.iteration)

    def decide(self) -> None:
        decision = self.decided(self.reports)
        assert decision == self.decided(reversed(self.reports))
        assert decision == self.decided(lasting(self.look()))
        self.decision = decision
        self.active = counting(self.reports, self.now_s, self.iteration)
        assert times_s(decision) == self.model.decide(self.job, self.active, self.now_s)
        assert active(self.look()) == set(self.active)

    @invariant()
    def deciding_again_changes_nothing(self):
        assert self.decided(self.reports) == self.decision

    @invariant()
    def nobody_waits_for_a_pipeline_that_could_be_faster(self):
        known = self.model.known(self.job, self.active)
        assert self.decision.straggler_time_s == max(each.takes_s for each in known)
        for target, each in zip(self.decision.each, known, strict=True):
            assert each.own_s <= target.time_s <= max(each.own_s, self.decision.straggler_time_s)
            assert target.time_s <= each.own.max_time_s
            assert self.numbers.slowed(target.slow_stages) == each.own
            if each.takes_s > each.own_s:
                assert target.time_s == each.own_s

    @invariant()
    def those_that_recovered_are_back_at_once(self):
        if not self.active:
            calm_s = known_of(self.numbers, self.job.deadline_s or CALM_S, (), 0).own_s
            assert times_s(self.decision) == [calm_s] * self.job.pipelines
            assert not self.decision.stragglers

    @invariant()
    def it_looks_again_later_only(self):
        assert self.decision.look_again_s > self.now_s


Straggling.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTheTableHolds = Straggling.TestCase


# What each line means, with numbers.


def decided(
    *reports: Report, at_s: float = START_S, before: Decision | None = None, **of: Any
) -> Decision:
    how, job = of.pop("how", PolicySettings()), replace(JOB, **of)
    return decide(job, look_at(job, reports, at_s), Formula(), before, at_s, how)


def test_nobody_straggles_so_all_take_the_target():
    assert times_s(decided()) == [CALM_S] * 3
    assert times_s(decided(deadline_s=1.1)) == [1.1] * 3
    assert times_s(decided(deadline_s=7.0)) == [Formula().max_time_s] * 3
    assert decided().look_again_s == math.inf
    assert decided().reason == "nothing is reported slow: iterations take 1.02 s"


def test_the_others_are_as_slow_as_a_slow_pipeline_which_goes_on():
    decision = decided(report(slowdown=1.2, key="k"))
    assert times_s(decision) == [1.2 * CALM_S, CALM_S, 1.2 * CALM_S]
    assert decision.straggler_time_s == 1.2 * CALM_S
    assert decision.stragglers == {1: "k"}
    assert (
        decision.reason
        == "iterations take 1.224 s because of pipeline 1 (1.2x, reported by 'test'), and plans "
        "are for that"
    )


def test_a_slow_pipeline_that_nobody_waits_for_is_no_reason_for_other_plans():
    decision = decided(report(value="0"), pipelines=1)
    assert [target.time_s for target in decision.targets] == [Formula().baseline_time_s]
    assert decision.reason.endswith(", and no other pipeline waits for that")
    assert "plans are for that" not in decision.reason


def test_a_slow_part_of_a_pipeline_is_named_with_its_slowdown():
    reason = decided(report("stage", "1", 1.15, pipeline=1)).reason
    assert "pipeline 1 (stage 1: 1.15x, reported by 'test')" in reason


def test_nobody_is_slower_than_what_still_saves():
    assert times_s(decided(report(slowdown=4.0))) == [1.3, CALM_S, 1.3]


def test_an_iteration_time_is_taken_as_given():
    assert times_s(decided(report(slowdown=None, iteration_s=1.25))) == [1.25, CALM_S, 1.25]
    assert decided(report(slowdown=None, iteration_s=1.01)).stragglers == {}


def test_a_slow_stage_is_planned_anew_and_meets_the_target_if_it_can():
    decision = decided(report("stage", "0", 1.25, pipeline=1, key="k"))
    assert times_s(decision) == [CALM_S] * 3
    assert [target.slow_stages for target in decision.each] == [{}, {0: 1.25}, {}]
    assert (
        decision.reason
        == "pipeline 1 (stage 0: 1.25x, reported by 'test') is slow, but iterations still take "
        "1.02 s"
    )
    decision = decided(report("stage", "2", 1.2, pipeline=1))
    assert times_s(decision) == [1.2] * 3
    assert decision.each[1].slow_stages == {2: 1.2}


def test_a_pipeline_with_a_slow_stage_goes_as_slow_as_the_slowest_too():
    reports = report("stage", "2", 1.2, pipeline=1), report("pipeline", "0", 1.4)
    assert times_s(decided(*reports)) == [CALM_S, 1.4 * CALM_S, 1.3]


def test_a_slow_stage_that_does_not_explain_how_slow_the_pipeline_is_leaves_it_at_its_target():
    reports = report("stage", "2", 1.1, pipeline=1), report("pipeline", "1", 1.4, key="k")
    decision = decided(*reports)
    assert times_s(decision) == [1.3, 1.1, 1.3]
    assert decision.each[1].slow_stages == {2: 1.1}
    assert decision.stragglers == {1: "k"}


@pytest.mark.parametrize("cause", ["communication", "data"])
def test_a_stage_that_computes_as_ever_is_not_planned_anew(cause: Cause):
    decision = decided(report("stage", "0", 1.2, pipeline=1, cause=cause))
    assert times_s(decision) == [1.2 * CALM_S, CALM_S, 1.2 * CALM_S]
    assert not decision.each[1].slow_stages


def test_the_worst_of_contradicting_reports_counts():
    reports = [
        report(slowdown=slowdown, source=f"s{slowdown}", key=f"k{slowdown}")
        for slowdown in (1.1, 1.25, 1.05)
    ]
    assert decided(*reports).stragglers == {1: "k1.25"}
    assert decided(*reports).straggler_time_s == 1.25 * CALM_S


def test_the_worst_that_is_said_of_a_stage_counts_and_of_other_stages_what_is_said_of_them():
    said = [("a", 1.2), ("b", 1.3), ("c", 1.1)]
    reports = [
        report("stage", "2", slowdown, pipeline=1, source=source) for source, slowdown in said
    ]
    decision = decided(*reports, report("stage", "3", 1.4, pipeline=1))
    assert decision.each[1].slow_stages == {2: 1.3, 3: 1.4}
    assert decision.straggler_time_s == 1.3


def test_a_recovery_that_was_observed_earlier_but_comes_later_ends_nothing():
    reports = (
        report(slowdown=1.2, observed_s=START_S + 5),
        report(slowdown=1.0, observed_s=START_S + 4),
    )
    assert decided(*reports, at_s=START_S + 6).straggler_time_s == 1.2 * CALM_S


def test_an_expired_report_leaves_nothing_of_the_one_whose_place_it_took():
    first, second = (
        report(slowdown=1.1),
        report(slowdown=1.2, observed_s=START_S + 1, expires_s=START_S + 20),
    )
    decision = decided(first, second, at_s=START_S + 2)
    assert (decision.straggler_time_s, decision.look_again_s) == (1.2 * CALM_S, START_S + 20)
    assert decided(first, second, at_s=START_S + 20, before=decision).straggler_time_s == CALM_S


def test_what_is_to_come_leaves_what_is_until_it_begins():
    now, later = (
        report(slowdown=1.1),
        report(slowdown=1.2, observed_s=START_S + 1, begins_s=START_S + 60),
    )
    decision = decided(now, later, at_s=START_S + 2)
    assert (decision.straggler_time_s, decision.look_again_s) == (1.1 * CALM_S, START_S + 60)
    assert decided(now, later, at_s=START_S + 60, before=decision).straggler_time_s == 1.2 * CALM_S


def test_what_expires_before_it_begins_ends_nothing():
    now, never = (
        report(slowdown=1.1),
        report(observed_s=START_S + 1, begins_s=START_S + 9, expires_s=START_S + 8),
    )
    assert decided(now, never, at_s=START_S + 20).straggler_time_s == 1.1 * CALM_S


def test_what_begins_at_an_iteration_waits_for_it():
    said = report(begins_iteration=7, expires_s=START_S + 100)
    for iteration, time_s in ((None, CALM_S), (6, CALM_S), (7, 1.2 * CALM_S), (8, 1.2 * CALM_S)):
        decision = decide(JOB, look_at(JOB, [said], START_S, iteration), Formula(), None, START_S)
        assert decision.straggler_time_s == time_s
    assert look_at(JOB, [said], START_S, 6).next_s == math.inf
    assert look_at(JOB, [said], START_S, 7).next_s == START_S + 100


def test_plans_that_would_hardly_be_longer_are_left():
    decision = decided(report(slowdown=1.009))
    assert times_s(decision) == [CALM_S] * 3
    assert decision.reason.endswith(
        "but nothing is slowed down: their plans would hardly be longer"
    )
    assert times_s(decided(report(slowdown=1.009), how=EAGER))[0] == 1.009 * CALM_S


def test_after_a_change_nobody_is_slowed_down_again_for_a_while():
    first = report(slowdown=1.1)
    before = decided(first, before=decided(), at_s=START_S + 5)
    assert times_s(before)[0] == 1.1 * CALM_S, "the first straggler of a job is not held back"
    worse = report(slowdown=1.2, observed_s=START_S + 6)
    held = decided(first, worse, before=before, at_s=START_S + 6)
    assert times_s(held) == times_s(before)
    assert held.look_again_s == START_S + 35
    assert held.reason.endswith("but nothing is slowed down: plans were changed a moment ago")
    assert times_s(decided(first, worse, before=held, at_s=START_S + 35))[0] == 1.2 * CALM_S


def test_what_is_sped_up_while_others_are_held_holds_them_for_longer():
    first = report(slowdown=1.1)
    before = decided(first, before=decided(), at_s=START_S + 5)
    worse = report("pipeline", "0", 1.2)
    held = decided(first, worse, before=before, at_s=START_S + 6)
    assert times_s(held) == [CALM_S, CALM_S, 1.1 * CALM_S]
    assert (held.since_s, held.look_again_s) == (START_S + 6, START_S + 36)
    assert times_s(decided(first, worse, before=held, at_s=START_S + 36)) == [
        CALM_S,
        CALM_S,
        1.2 * CALM_S,
    ]


def test_another_deadline_holds_no_straggler_back():
    before = decided(before=decided(), at_s=START_S + 50, deadline_s=1.1)
    decision = decided(report(slowdown=1.1), before=before, at_s=START_S + 51, deadline_s=1.1)
    assert times_s(decision)[0] == 1.1 * 1.1


def test_recovery_is_never_held_back():
    slow = decided(report(), before=decided(), at_s=START_S + 5)
    recovered = decided(before=slow, at_s=START_S + 5.25)
    assert times_s(recovered) == [CALM_S] * 3
    better = decided(report(slowdown=1.199), before=slow, at_s=START_S + 5.25)
    assert times_s(better)[0] == 1.199 * CALM_S


def test_what_expires_before_two_changes_are_paid_changes_nothing():
    two_iterations_s = 2 * 1.2 * CALM_S
    soon = decided(report(expires_s=START_S + two_iterations_s))
    assert times_s(soon) == [CALM_S] * 3
    assert soon.straggler_time_s == 1.2 * CALM_S
    assert soon.reason.endswith(
        "but nothing is slowed down: the report expires too soon for that to pay"
    )
    assert times_s(decided(report(expires_s=START_S + two_iterations_s + 0.01)))[0] == 1.2 * CALM_S
    assert times_s(decided(report(), how=PolicySettings(assumed_s=2.0))) == [CALM_S] * 3


def test_what_saves_nothing_changes_nothing():
    class Flat(Formula):
        def bound_j(self, deadline_s: float) -> float:
            return 100.0 * deadline_s

    decision = decide(JOB, look_at(JOB, [report()], START_S), Flat(), None, START_S)
    assert times_s(decision) == [CALM_S] * 3
    assert decision.reason.endswith("but nothing is slowed down: that saves nothing")


def test_a_node_means_the_ranks_on_it_in_each_pipeline():
    assert JOB.parts.of(Scope("node", "node0")) == {0: {0, 1, 2, 3}, 1: {0, 2}}
    assert JOB.parts.of(Scope("node", "node0", 1)) == {1: {0, 2}}
    assert JOB.parts.of(Scope("node", "node1")) == {1: {1, 3}, 2: frozenset()}
    assert JOB.parts.of(Scope("rank", "1")) == JOB.parts.of(Scope("gpu", "GPU-b")) == {0: {1, 3}}
    assert replace(JOB, pipelines=1).parts.of(Scope("stage", "2")) == {0: {2}}
    decision = decided(report("node", "node0", 1.2))
    assert [target.slow_stages for target in decision.each] == [
        dict.fromkeys(range(4), 1.2),
        {0: 1.2, 2: 1.2},
        {},
    ]


_NO_NUMBER = "is not a number; write 0 for the first one, 1 for the next"
_NO_PIPELINE = "there is no pipeline 3; pipelines are 0 to 2"
_NOT_PLACED = "register it with the places of its ranks, or report the pipeline"
_ELSEWHERE = "is not in pipeline 2 of job 'train'; correct one of them, or leave the pipeline out"


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        (Scope("pipeline", "3"), _NO_PIPELINE),
        (Scope("pipeline", "-1"), f"pipeline '-1' {_NO_NUMBER}"),
        (Scope("pipeline", "01"), f"pipeline '01' {_NO_NUMBER}"),
        (
            Scope("pipeline", "\N{ARABIC-INDIC DIGIT ONE}"),
            f"pipeline '\N{ARABIC-INDIC DIGIT ONE}' {_NO_NUMBER}",
        ),
        (Scope("pipeline", "1", 2), f"pipeline '1' {_ELSEWHERE}"),
        (Scope("stage", "4", 0), "there is no stage 4; stages are 0 to 3"),
        (Scope("stage", "1", 3), _NO_PIPELINE),
        (
            Scope("stage", "1"),
            "stage '1' is in each of 3 pipelines; name the pipeline in which it is slow",
        ),
        (Scope("stage", "last", 0), f"stage 'last' {_NO_NUMBER}"),
        (Scope("rank", "6"), f"job 'train' has no known rank '6'; {_NOT_PLACED}"),
        (Scope("gpu", ""), f"job 'train' has no known gpu ''; {_NOT_PLACED}"),
        (Scope("node", "node0", 2), f"node 'node0' {_ELSEWHERE}"),
    ],
)
def test_a_scope_that_means_nothing_is_refused(scope: Scope, message: str):
    with pytest.raises(UsageError) as refused:
        JOB.parts.check(scope, STAGES)
    assert str(refused.value) == f"scope: {message}"


@pytest.mark.parametrize("scope", SCOPES)
def test_a_scope_that_means_something_is_not(scope: Scope):
    JOB.parts.check(scope, STAGES)
    assert JOB.parts.of(scope) == {p: hit(scope, p) for p in range(3) if hit(scope, p) is not None}


# On real frontiers.


@cache
def solved() -> Solved:
    return Solved(solve(smooth_profile(4, 60), schedules.one_f_one_b(4, 4)))


@fixed
@given(
    slowdown=st.sampled_from((1.01, 1.1, 1.4)),
    scope=st.sampled_from(SCOPES),
    slack=st.sampled_from((0.9, 1.0, 1.05, 3.0)),
)
def test_plans_for_what_was_decided_keep_to_it_and_save_what_was_said(
    slowdown: float, scope: Scope, slack: float
):
    numbers = solved()
    job = replace(JOB, deadline_s=slack * numbers.baseline_time_s)
    said = report(scope.kind, scope.value, slowdown, pipeline=scope.pipeline)
    decision = decide(job, look_at(job, [said], START_S), numbers, None, START_S, EAGER)
    saved_j = 0.0
    for target in decision.each:
        own = numbers.slowed(target.slow_stages).frontier
        plan, unslowed = own.plan_until(target.time_s), own.plan_beside_straggler(job.deadline_s)
        assert plan.time_s <= target.time_s <= max(job.deadline_s, decision.straggler_time_s)
        saved_j += (
            unslowed.energy_j - plan.energy_j + own.dag.waiting_w * (plan.time_s - unslowed.time_s)
        )
    whole_w = JOB.pipelines * numbers.frontier.baseline_energy_j / numbers.baseline_time_s
    assert saving_w(job, decision, numbers) * decision.straggler_time_s == pytest.approx(
        saved_j, abs=0.01 * whole_w
    )


@given(
    st.lists(
        st.builds(
            lambda source, value, observed_s, in_s, for_s, slowdown: report(
                value=value,
                source=source,
                observed_s=START_S + observed_s,
                begins_s=START_S + in_s,
                expires_s=START_S + in_s + for_s,
                slowdown=slowdown,
            ),
            st.sampled_from("ab"),
            st.sampled_from("12"),
            st.integers(-9000, 3),
            st.integers(-9000, 5),
            st.sampled_from([1, 5000, math.inf]),
            st.sampled_from([1.0, 1.2, 1.3]),
        ),
        max_size=12,
    )
)
def test_a_look_with_one_more_report_is_a_look_at_all(reports: list[Report]):
    look = Look.empty(START_S)
    for each in reports:
        anew = look_at(JOB, [*lasting(look), each], START_S)
        before, look = look, look.with_reports(JOB, [each], START_S)
        assert look.active == anew.active
        assert set(lasting(look)) == set(lasting(anew))
        assert set(look.gone) == {*before.gone, *anew.gone}
        assert look.until_s <= look.next_s <= anew.next_s
