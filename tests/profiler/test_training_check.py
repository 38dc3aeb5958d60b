"""Repeated computations are compared with those of the training iteration that they repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ranks

from perseus_planner.engines.guard import Guard
from perseus_planner.engines.recording import RecordedCall
from perseus_planner.profiler.ranks.measure import UNLIKE_TRAINING

torch = pytest.importorskip("torch")

TRAINED_MS = {"0F": 10, "0B": 20, "1F": 15, "1B": 20}
UNLIKE = [
    f"F took {before} ms in the iteration and takes {after} ms when it is repeated; B took "
    "20 ms in the iteration and takes 60 ms when it is repeated"
    for before, after in ((10, 30), (15, 45))
]


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
    times = RecordedCall("F", Guard(pytest.fail))
    weight = torch.ones(3, requires_grad=True)
    times.before((), {})
    first, second = 2 * weight, 3 * weight
    times.after((), {}, ((first, second), None))
    assert (times.least_forward_s(), times.least_backward_s()) == (0.007, None)
    torch.autograd.backward([first, second], [torch.ones(3), torch.ones(3)])
    assert times.least_backward_s() == 0.007
    assert len(times._backwards) == 1, "one backward of two results"


@pytest.mark.parametrize(("autocast", "factor"), [("kept", 1), ("lost", 3)])
def test_computations_that_take_another_time_than_in_training_are_warned_of_and_marked(
    autocast: str, factor: int, tmp_path: Path
):
    both = ranks("training_check_programs:compared", 2, tmp_path, autocast)
    assert [each.code for each in both] == [0, 0], both
    times_ms, condition = json.loads(both[0].stdout)
    assert times_ms == {kind: factor * time_ms for kind, time_ms in TRAINED_MS.items()}
    stages = [f"stage {number}: {text}" for number, text in enumerate(UNLIKE)]
    is_unlike = autocast == "lost"
    assert condition == ("; ".join(stages) if is_unlike else None)
    for stage, each in zip(stages, both, strict=True):
        assert (f"{stage}, {UNLIKE_TRAINING}" in each.stderr) == is_unlike
