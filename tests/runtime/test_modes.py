"""Plans with modes, followed by real engines on real ranks with emulated GPUs; and the switch."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from launching import Results, results_of
from strategies import smooth_profile

from perseus_planner import solve
from perseus_planner.runtime.hook import Hook, Program
from perseus_planner.runtime.marks import Marks
from perseus_planner.runtime.modes import ModeSwitch
from perseus_planner.schedules import Computation

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


def test_a_backward_runs_in_the_mode_of_its_forward_also_after_a_deviation() -> None:
    entered: list[str] = []
    switch = ModeSwitch(
        {name: lambda name=name: entered.append(name) for name in ("own", "keep")}, print
    )
    switch.begin(0, "F", 0, "keep")
    switch.begin(0, "F", 1, None)  # the plan is not followed from here
    switch.begin(0, "B", 0, None)
    switch.begin(0, "B", 1, None)
    assert entered == ["keep", "own", "keep", "own"]


def test_one_mode_for_all_computations_is_entered_once_and_several_end_with_the_iteration() -> None:
    plan = solve(smooth_profile(2), "1f1b", microbatches=2).baseline_plan
    several = replace(Program.of_plan(1, plan, 0), modes=("own", "low", "own", "low"))
    one = replace(several, modes=("low",) * 4)
    entered: list[str] = []

    class Source:
        program: Program | None = one

        def program_for(self, _: int) -> Program | None:
            return self.program

        def on_end(self, *_: object) -> None:
            pass

    def iterate(*ran: Computation) -> list[str]:
        entered.clear()
        hook.begin_iteration()
        for computation in ran or one.computations:
            hook.begin(*computation)
            hook.end()
        hook.end_iteration()
        return list(entered)

    source = Source()
    switch = ModeSwitch(
        {name: lambda name=name: entered.append(name) for name in ("own", "low")}, print
    )
    marks = Marks(memoryview(bytearray(8)).cast("Q"))
    hook = Hook(marks, source, one, None, switch)
    assert [iterate(), iterate()] == [["low"], []]
    deviates = one.computations[0], *reversed(one.computations[1:])
    assert iterate(*deviates) == ["own"]  # where the plan is not followed
    assert iterate() == ["low"]
    source.program = several
    assert [iterate(), iterate()] == [["own", "low", "own", "low", "own"], ["low", "own"] * 2]
    source.program = one
    assert iterate() == ["low"]
    source.program = None
    assert iterate() == ["own"]
