"""After an error of the device, or a fault of the planner, clocks are requested again after a
pause that grows.
"""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from perseus_planner.base.errors import GpuError, GpuNotSupported, fault_text
from perseus_planner.base.loops import FIRST_PAUSE_S, LONGEST_PAUSE_S
from perseus_planner.runtime import background
from perseus_planner.runtime.background import BackgroundWork

AT_DEFAULT = "; training goes on at the GPU's default clocks"
FAULT = fault_text(KeyError("x"))


class Rank:
    """The background work of a rank, of which a test lets parts fail, at a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.warned = 1000.0, dict[str, str]()
        monkeypatch.setattr(background.time, "monotonic", lambda: self.now_s)
        self.marks, self.follower = (
            Mock(),
            Mock(problem=None, deviation=None, misfit=None, unfollowed=None),
        )
        self.marks.finished.return_value = []
        self.follower.program = self.follower.agreement.lost = None
        self.kept: list[object] = []  #: times and messages that telemetry has
        self.decider = Mock(descriptors=list)
        telemetry = Mock(counts=(), site_limit_w=None, update=self._update)
        warnings = Mock(warn=lambda key, text: self.warned.setdefault(key, text))
        others = (telemetry, warnings, None, None, None)
        self.work = BackgroundWork(
            self.follower,
            Mock(progress=0, fault=None),
            self.marks,
            *others,
            decider=self.decider,
        )

    def _update(self, times: list[object], messages: list[object]) -> list[object]:
        self.kept += [*times, *messages]
        return []

    def has_clocks_after(self, pause_s: float) -> bool:
        """Whether clocks are requested after a pause; right before its end they are not."""
        for part_s in (pause_s - 1.0, 1.0):
            assert self.follower.problem is not None
            self.now_s += part_s
            self.work.run_round()
        return self.follower.problem is None


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        ("marks.renew", GpuError("CUDA: out of memory"), "CUDA: out of memory"),
        ("follower.look", KeyError("x"), FAULT),
        ("decider.look", KeyError("x"), FAULT),
    ],
)
def test_clocks_are_requested_again_after_a_pause_that_doubles(
    call: str, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
):
    rank = Rank(monkeypatch)
    part, _, name = call.partition(".")
    failing = getattr(getattr(rank, part), name)
    failing.side_effect = error
    rank.marks.finished.side_effect = error if part == "marks" else None
    rank.work.run_round()
    pause_s = FIRST_PAUSE_S
    while pause_s < LONGEST_PAUSE_S:
        assert not rank.has_clocks_after(pause_s)
        pause_s *= 2.0
    failing.side_effect = rank.marks.finished.side_effect = None
    assert rank.has_clocks_after(LONGEST_PAUSE_S)
    warning, resumed = rank.warned.values()
    assert warning.startswith(text)  # a fault also says where it was raised
    assert warning.endswith(f"{AT_DEFAULT} until clocks can be set again")
    assert resumed == "clocks are set again"


@pytest.mark.parametrize("part", ["decider", "follower"])
def test_a_fault_while_deciding_loses_no_time_of_an_iteration(
    part: str, monkeypatch: pytest.MonkeyPatch
):
    rank = Rank(monkeypatch)
    getattr(rank, part).look.side_effect = KeyError("x")
    for number in range(3):
        rank.marks.finished.return_value = [number]
        rank.work.run_round()
    assert rank.kept == [0, 1, 2]
    assert rank.warned["fault"].startswith(FAULT)


def test_a_driver_that_is_too_old_is_final(monkeypatch: pytest.MonkeyPatch):
    rank = Rank(monkeypatch)
    rank.marks.finished.side_effect = GpuNotSupported("the CUDA driver has no cuX; update it")
    rank.work.run_round()
    rank.marks.finished.side_effect = None
    assert not rank.has_clocks_after(10.0 * LONGEST_PAUSE_S)
    assert [*rank.warned.values()] == [f"the CUDA driver has no cuX; update it{AT_DEFAULT}"]
