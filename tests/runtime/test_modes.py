"""Plans with modes, followed by real engines on real ranks with emulated GPUs; and the switch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launching import Results, results_of
from program_source import Source
from strategies import smooth_profile

from perseus_planner import solve
from perseus_planner.base.errors import PlanError, UsageError
from perseus_planner.engines.modes import new_nccl_group
from perseus_planner.profiles.modes import ModeFunction
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.hook import Hook
from perseus_planner.runtime.marks import Marks
from perseus_planner.runtime.modes import ModeSwitch, learnt_modes
from perseus_planner.runtime.program import Program
from perseus_planner.schedules import Computation, combined_1f1b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve_dag

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")


def check_modes(everyone: Results, *, sees_modes: bool = True) -> None:
    assert any(0 < len(rank["planned"]) < rank["of"] for rank in everyone)
    for rank in everyone:
        assert rank["equal"]
        if sees_modes:
            assert rank["ran"] == [rank["planned"]] * 3
        assert set(rank["as planned"]) == {True}
        assert (rank["locked_mhz"], rank["problem"], rank["warnings"]) == (None, None, [])
        # Half of the computations are forwards, and those that are not kept run again.
        again = (rank["of"] - len(rank["planned"])) // 2
        assert rank["forwards"] == 3 * (rank["of"] // 2 + again)


def test_torch_recomputes_what_the_plan_says_and_losses_stay_the_same(tmp_path: Path) -> None:
    everyone = results_of("mode_programs:torch_engine", 2, tmp_path)
    check_modes(everyone)
    # A mode that fails ends modes, with one warning in the whole job.
    assert [rank["entered"] for rank in everyone] == [["own"], ["own"]]
    (text,) = [text for rank in everyone for text in rank["failed"]["warnings"]]
    assert "mode keep failed (ArithmeticError('no')); training goes on in its own way" in text
    # The memory clock stays between iterations, and is reset after the training.
    assert [rank["memory_mhz"] for rank in everyone] == [[1593, 1593, 2619]] * 2
    # Both ranks reduce with the same communicators, of which one has no program in an iteration.
    used = ["own", "ctas-4", "own", "ctas-8"] * 3
    assert [rank["communicators"] for rank in everyone] == [used, used]


@pytest.mark.soak  # each engine is a launch of its own
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed_recomputes_what_the_plan_says_and_losses_stay_the_same(tmp_path: Path) -> None:
    everyone = results_of("mode_programs:deepspeed_engine", 2, tmp_path, imports=["deepspeed.pipe"])
    check_modes(everyone)


@pytest.mark.soak
@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_recomputes_what_the_plan_says_and_losses_stay_the_same(tmp_path: Path) -> None:
    everyone = results_of("mode_programs:megatron_engine", 2, tmp_path)
    # The test's timers start before the mode is entered, and so before the forward begins.
    check_modes(everyone, sees_modes=False)


def program_of(modes: tuple[str, ...]) -> Program:
    plan = solve(smooth_profile(2), "1f1b", microbatches=2).baseline_plan
    return replace(Program.of_plan(1, plan, 0), modes=modes)


class Entering:
    """A hook whose modes are written down as they are entered."""

    def __init__(
        self, first: Program, *, keeps_modes: bool = True, **modes: Callable[[], None]
    ) -> None:
        self.entered: list[str] = []
        names = ("own", "low")
        written = {name: partial(self.entered.append, name) for name in names}
        self.source, self.warnings = Source(first), list[str]()
        self.switch = ModeSwitch({**written, **modes}, self.warnings.append)
        marks = Marks(memoryview(bytearray(8)).cast("Q"))
        self.hook = Hook(marks, self.source, first, None, self.switch, keeps_modes=keeps_modes)

    def iterate(self, *ran: Computation) -> list[str]:
        self.entered.clear()
        self.hook.begin_iteration()
        for computation in ran:
            self.hook.begin(*computation)
            self.hook.end()
        self.hook.end_iteration()
        return list(self.entered)


def test_one_mode_for_all_computations_is_entered_once_and_several_end_with_the_iteration() -> None:
    one, several = program_of(("low",) * 4), program_of(("own", "low", "own", "low"))
    order = one.computations
    world = Entering(one)
    assert [world.iterate(*order), world.iterate(*order)] == [["low"], []]
    world.source.program = several
    assert world.iterate(*order) == ["own", "low", "own", "low", "own"]
    assert world.iterate(*order) == ["low", "own"] * 2
    world.source.program = program_of(())
    assert world.iterate(*order) == []


def test_the_mode_is_that_of_the_computation_whatever_else_a_rank_meets() -> None:
    program = program_of(("own", "low", "own", "low"))
    first, second, third, last = program.computations
    world = Entering(program)
    modes = ["low", "own", "low", "own"]
    assert world.iterate(second, first, last) == modes  # it deviates
    world.source.program = None  # it cannot set clocks
    assert world.iterate(first, second, third, last) == modes
    assert world.iterate(last, Computation(7, "F", 7)) == modes[:2]


def test_a_pair_is_run_in_its_mode() -> None:
    schedule = combined_1f1b(2, 1, 4)
    profile = smooth_profile(2)
    rows = {(stage, "B.pair"): profile.measurements[stage, "B"] for stage in range(2)}
    profile = replace(profile, measurements={**profile.measurements, **rows})
    plan = solve_dag(PipelineDag.from_schedule(profile, schedule)).baseline_plan
    program = Program.of_plan(1, plan, 0)
    shown = schedule.shown(0)
    modes = tuple("low" if "(" in each.kind else "own" for each in shown)
    assert {"low", "own"} == {*modes}
    world = Entering(replace(program, modes=modes))
    assert world.iterate(*shown) == [mode for mode, _ in groupby(modes)][modes[0] == "own" :]


def test_the_autopilots_modes_end_where_clocks_cannot_be_set() -> None:
    program = program_of(("own", "low", "own", "low"))
    world = Entering(program, keeps_modes=False)
    assert world.iterate(*program.computations) == ["low", "own"] * 2
    world.source.program = None
    assert world.iterate(*program.computations) == []


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("modes", "said"),
    [
        ({"low": nothing}, "modes: low cannot be learnt: give own, for how training runs now"),
        (dict.fromkeys(("own", "low", "high"), nothing), "own, low, high cannot be learnt"),
        ({"own": nothing, "Low": nothing}, "one other, of lower-case letters"),
        ({"own": nothing, "low": ModeFunction(nothing, is_of_group=True)},
         "modes, low: all ranks of a stage enter it together, so it cannot be learnt while"),
        ({"own": nothing, "low": ModeFunction(nothing, takes_memory=True)},
         "low: it takes memory, which the autopilot does not know, so it cannot be learnt"),
        ({"own": nothing, "low": ModeFunction(nothing, "stage")}, "low: a stage has it as a whole"),
    ],
)  # fmt: skip
def test_modes_that_the_autopilot_cannot_learn_are_refused(modes: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        learnt_modes(modes, may_reorder=False)


def test_a_mode_that_may_change_sums_is_learnt_only_where_the_job_allows_it() -> None:
    modes = {"own": nothing, "low": ModeFunction(nothing, reorders=True)}
    assert list(learnt_modes(modes, may_reorder=False)) == ["own"]
    assert list(learnt_modes(modes, may_reorder=True)) == ["own", "low"]


@pytest.mark.parametrize("other", [{}, {"service": "unix:x"}, {"work": sum}])
def test_other_ways_of_training_without_a_plan_have_no_modes(other: Any) -> None:
    engine = object() if other else None
    refused = pytest.raises(UsageError, match="are for one way of running; leave modes out")
    with refused, planner_runtime(engine, **other, modes={"own": nothing}):
        pass


def test_after_a_failure_the_own_way_is_entered_but_modes_of_groups_go_on() -> None:
    def fail() -> None:
        raise ArithmeticError("no")

    program = program_of(("own", "low", "high", "low"))
    world = Entering(program, low=fail)
    high = ModeFunction(partial(world.entered.append, "high"), is_of_group=True)
    world.switch._modes["high"] = high  # type: ignore[index]
    assert world.iterate(*program.computations) == ["own", "high", "own"]
    assert world.iterate(*program.computations) == ["high", "own"]
    assert len(world.warnings) == 1


def test_a_plan_that_changes_a_mode_of_groups_is_refused() -> None:
    low, own, other = (program_of(modes) for modes in (("low",) * 4, (), ("own", "low") * 2))
    of_group = ModeFunction(lambda: None, is_of_group=True)
    world = Entering(low, low=of_group)
    world.switch.check(low.computations, low.modes)
    for changed in (own, other):
        with pytest.raises(PlanError, match="enter low together; plan with the same modes, or"):
            world.switch.check(changed.computations, changed.modes)
    world = Entering(own, low=of_group)
    with pytest.raises(PlanError, match="other modes than that of the training so far"):
        world.switch.check(low.computations, low.modes)
    Entering(own).switch.check(low.computations, low.modes)


def test_communicators_of_ctas_have_the_options_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    made: dict[str, Any] = {}

    def new_group(ranks: list[int], **given: Any) -> None:
        made.update(given, ranks=ranks)

    options = SimpleNamespace(config=SimpleNamespace())
    nccl = SimpleNamespace(Options=lambda: options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "new_group", new_group)
    new_nccl_group((4, 5), 8)
    assert (made["ranks"], made["backend"], made["use_local_synchronization"]) == (
        [4, 5], "nccl", True,
    )  # fmt: skip
    assert vars(made["pg_options"].config) == {"min_ctas": 8, "max_ctas": 8}
