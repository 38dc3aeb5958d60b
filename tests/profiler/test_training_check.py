"""Repeated computations are compared with those of the training iteration that they repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import Ended, ranks

from perseus_planner.engines.recording import ComputationTimes

torch = pytest.importorskip("torch")

TRAINED_MS = {"0F": 10, "0B": 20, "1F": 15, "1B": 20}


class Event:
    """A CUDA event, of which each is recorded 7 ms after the one before."""

    now_ms = 0.0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.is_awaited = False

    def record(self) -> None:
        """Take the time."""
        Event.now_ms += 7.0
        self.at_ms = Event.now_ms

    def synchronize(self) -> None:
        """Wait for the GPU to get here."""
        self.is_awaited = True

    def elapsed_time(self, end: Event) -> float:
        """Return the time until `end`, ms."""
        assert end.is_awaited
        return end.at_ms - self.at_ms


def test_computations_on_a_gpu_are_timed_by_its_events(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    times, weight = ComputationTimes(), torch.ones(3, requires_grad=True)
    (first, second), third = times.timed(lambda: ((2 * weight, 3 * weight), None))()
    assert (times.least_forward_s(), times.least_backward_s(), third) == (0.007, None, None)
    torch.autograd.backward([first, second], [torch.ones(3), torch.ones(3)])
    assert times.least_backward_s() == 0.007
    assert len(times._backwards) == 1, "one backward of two results"


def compared(folder: Path, autocast: str, force: str = "") -> list[Ended]:
    return ranks("training_check_programs:compared", 2, folder, autocast, force)


def test_a_profile_of_computations_that_take_as_long_as_in_training_is_made(tmp_path: Path):
    first, second = compared(tmp_path, "kept")
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert json.loads(first.stdout) == [TRAINED_MS, None]


def test_computations_that_lost_the_autocast_of_the_training_are_refused(tmp_path: Path):
    everyone = compared(tmp_path, "lost")
    assert [each.code for each in everyone] == [2, 2]
    (message,) = {each.stderr for each in everyone} - {""}
    forward = {
        "stage 0": "10 ms in the iteration and takes 30",
        "stage 1": "15 ms in the iteration and takes 45",
    }
    assert message == (
        f"{message[:7]}: F took {forward[message[:7]]} ms when it is repeated; B took 20 ms in "
        "the iteration and takes 60 ms when it is repeated, over 10% apart, so the profile would "
        "not be that of the training; profile an iteration after the first ones, of several "
        "microbatches, while nothing else runs on the GPU; or measure all the same, with "
        "profile_pipeline(..., force=True)\n"
    )
    assert not (tmp_path / "profile.yaml").exists()


def test_forced_they_are_measured_with_a_warning_and_the_profile_says_so(tmp_path: Path):
    first, second = compared(tmp_path, "lost", "force")
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    times_ms, condition = json.loads(first.stdout)
    assert times_ms == {kind: 3 * time_ms for kind, time_ms in TRAINED_MS.items()}
    for number, each in enumerate((first, second)):
        assert f"stage {number}: F took" in condition
        assert f"stage {number}: F took" in each.stderr
        assert "measured all the same, as force is given" in each.stderr
