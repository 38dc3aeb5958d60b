"""A replay against a simulation of ranks that send each other messages, and by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import rank_waiting_w, waiting_w
from strategies import any_schedule, extras, fixed, furnished

from perseus_planner import schedules
from perseus_planner.base.errors import ScheduleError
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import replay
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant


def with_clocks(dag: PipelineDag, rng: Random) -> Plan:
    """A plan of clocks drawn for each computation; what it says of time, energy and bound is
    nothing.
    """
    profile, iteration = dag.profile, dag.iteration
    chosen = zip(dag.computations, iteration.keys, strict=True)
    clocks = {str(c): rng.choice(profile.measurements[key]).clock_mhz for c, key in chosen}
    table = {
        key: {m.clock_mhz: m for m in measured} for key, measured in profile.measurements.items()
    }
    power_w, overhead_s = profile.blocking_power_w, profile.overhead_s
    return Plan(
        iteration,
        clocks,
        table,
        "",
        None,
        "measured",
        power_w,
        *[math.nan] * 6,
        overhead_s=overhead_s,
    )


Span = tuple[float, float]


def programs(
    schedule: Schedule, operations: Sequence[FixedOperation]
) -> list[list[tuple[str, Computation | None]]]:
    """What each rank runs, by name: its computations, and the operations that stand beside them."""
    listed = []
    for rank, program in enumerate(schedule.ranks):

        def named(
            when: str, number: int, microbatch: object = "", rank: int = rank
        ) -> list[tuple[str, None]]:
            here = [
                each
                for each in operations
                if each.when == when and (each.where is None or number in each.where)
            ]
            return [(f"{number}{each.name}{microbatch}", None) for each in here]

        line: list[tuple[str, Computation | None]] = [*named("start", rank)]
        for each in program:
            line += named(f"before {each.kind}", each.stage, each.microbatch)
            line += [(str(each), each), *named(f"after {each.kind}", each.stage, each.microbatch)]
        listed.append([*line, *named("end", rank)])
    return listed


def lag_s(transfer: Transfer, schedule: Schedule, kind: str, lower: int) -> float:
    """From stage `lower` to the next one, or back."""
    holder = {each.stage: rank for rank, program in enumerate(schedule.ranks) for each in program}
    if holder[lower] == holder[lower + 1]:
        return 0.0
    taken = transfer.forward_s if kind == "F" else transfer.backward_s
    return taken[lower] if isinstance(taken, tuple) else taken


def sent(
    transfer: Transfer, schedule: Schedule, done: Computation, end_s: float
) -> tuple[tuple[str, int, int], float]:
    """What a computation sends: an activation or a gradient, to which stage, and when it
    arrives.
    """
    stage, kind, microbatch = done
    if kind == "W":
        return ("nothing", stage, microbatch), end_s
    ahead, last = kind == "F", schedule.stages - 1
    if ahead and stage == last:
        return ("gradient", stage, microbatch), end_s  # of its own loss
    if not ahead and stage == 0:
        return ("nothing", stage, microbatch), end_s
    arrives_s = end_s + lag_s(transfer, schedule, kind, stage if ahead else stage - 1)
    return (
        "activation" if ahead else "gradient",
        stage + (1 if ahead else -1),
        microbatch,
    ), arrives_s


def simulated(
    plan: Plan, transfer: Transfer, operations: Sequence[FixedOperation]
) -> dict[str, Span]:
    """When each node runs: ranks take their work in order, and wait for what others send."""
    schedule, ran = plan.schedule, {}
    work, fixed_s = programs(schedule, operations), {each.name: each.time_s for each in operations}
    inbox: dict[tuple[str, int, int], float] = {
        ("activation", 0, microbatch): 0.0 for microbatch in range(schedule.microbatches)
    }
    ready_s = [0.0] * len(work)
    while any(work):
        before = len(ran)
        for rank, queue in enumerate(work):
            if not queue:
                continue
            name, computation = queue[0]
            start_s = ready_s[rank]
            if computation is None:
                duration_s = fixed_s[name.strip("0123456789")]
            else:
                wanted = {"F": "activation", "B": "gradient", "I": "gradient"}.get(computation.kind)
                message = (wanted, computation.stage, computation.microbatch)
                if wanted and message not in inbox:
                    continue
                start_s = max(start_s, inbox[message] if wanted else 0.0)
                duration_s = plan.measurement(computation).time_s
            queue.pop(0)
            ready_s[rank] = start_s + duration_s
            ran[name] = start_s, ready_s[rank]
            if computation is not None:
                message, arrives_s = sent(transfer, schedule, computation, ready_s[rank])
                inbox[message] = arrives_s
        assert len(ran) > before, "all ranks wait"
    return ran


@settings(fixed, max_examples=200)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 4), microbatches=st.integers(1, 6))
def test_a_replay_equals_ranks_that_wait_for_messages(seed: int, ranks: int, microbatches: int):
    schedule = any_schedule(seed, ranks, microbatches)
    beside = extras(seed, schedule)
    dag = furnished(seed, schedule, 4)
    plan = with_clocks(dag, Random(seed))
    timeline, ran = (
        replay(plan),
        simulated(plan, beside["transfer"] or Transfer(), beside["operations"]),
    )
    assert {name: (span.start_s, span.end_s) for name, span in timeline.spans.items()} == ran
    assert timeline.time_s == max(end_s for _, end_s in ran.values()) + dag.profile.overhead_s
    parts_j = []
    for rank, power_w in enumerate(rank_waiting_w(dag)):
        spent_j = [plan.measurement(computation).energy_j for computation in schedule.ranks[rank]]
        names = [str(computation) for computation in schedule.ranks[rank]]
        for operation in dag.iteration.operations:
            if operation.rank == rank:
                names.append(str(operation))
                drawn_j = (
                    power_w * operation.time_s if operation.energy_j is None else operation.energy_j
                )
                spent_j.append(drawn_j)
        busy_s = math.fsum(ran[name][1] - ran[name][0] for name in names)
        parts_j += [*spent_j, power_w * (timeline.time_s - busy_s)]
        for name, each_j in zip(names, spent_j, strict=True):
            duration_s = ran[name][1] - ran[name][0]
            assert math.isclose(timeline.spans[name].power_w * duration_s, each_j, rel_tol=1e-9)
    scale_j = math.fsum(map(abs, parts_j)) + waiting_w(dag) * timeline.time_s
    assert math.isclose(timeline.energy_j, math.fsum(parts_j), rel_tol=0, abs_tol=1e-12 * scale_j)


def test_lags_fixed_operations_and_weight_gradients_by_hand():
    one = {"F": 1.0, "I": 2.0, "W": 0.5, "W.sync": 0.75}
    points = {
        (stage, kind): (Measurement(1410, s, 100 * s),)
        for stage in range(2)
        for kind, s in one.items()
    }
    dag = PipelineDag.from_schedule(
        Profile(points, (50.0, 20.0), overhead_s=0.125),
        schedules.zb_h1(2, 2),
        transfer=Transfer((0.25,), 0.5),
        operations=[
            FixedOperation("load", "before F", 0.5, where=(0,)),
            FixedOperation("step", "end", 3.0, 90.0),
        ],
        variants=[Variant("W.sync", "last")],
    )
    timeline = replay(with_clocks(dag, Random(0)))
    assert {text: (span.start_s, span.end_s) for text, span in timeline.spans.items()} == {
        **{"0F0": (0.5, 1.5), "0F1": (2.0, 3.0), "0I0": (5.25, 7.25), "0W0": (7.25, 7.75)},
        **{"0I1": (8.25, 10.25), "0W1": (10.25, 11.0)},
        **{"1F0": (1.75, 2.75), "1I0": (2.75, 4.75), "1F1": (4.75, 5.75), "1I1": (5.75, 7.75)},
        **{"1W0": (7.75, 8.25), "1W1": (8.25, 9.0)},
        **{"0load0": (0.0, 0.5), "0load1": (1.5, 2.0), "0step": (11.0, 14.0), "1step": (9.0, 12.0)},
    }
    assert timeline.time_s == 14.125
    busy_j = (
        2 * (100 * (1 + 1 + 2 + 2 + 0.5 + 0.75) + 90) + 50 * 1.0
    )  # loading draws what waiting does
    waiting_j = 50 * (14.125 - 7.25 - 3 - 1) + 20 * (14.125 - 7.25 - 3)
    assert timeline.energy_j == busy_j + waiting_j
    assert timeline.spans["0load0"].power_w == 50.0
    assert timeline.spans["1step"].power_w == 30.0


def test_a_schedule_that_cannot_run_is_not_replayed():
    schedule = Schedule("stuck", ((Computation(0, "B", 0), Computation(0, "F", 0)),))
    points = {(0, kind): (Measurement(1410, 1.0, 100.0),) for kind in "FB"}
    with pytest.raises(ScheduleError, match="0B0 can never run"):
        replay(with_clocks(PipelineDag.from_schedule(Profile(points, 50.0), schedule), Random(0)))
