"""Each example runs on the CPU with real ranks, and its losses are those of a training without a profile."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import EXAMPLES, ended, torchrun

from perseus_planner.profiles import Profile

ENGINES = {"torch": "torch", "deepspeed": "deepspeed", "megatron": "megatron.core"}


def losses(said: str) -> list[str]:
    return re.findall(r"step \d+: loss \d+\.\d+", said)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.timeout(300)
def test_an_example_writes_a_profile_and_trains_as_it_would_without(engine: str, tmp_path: Path) -> None:
    _need(engine)
    example = [str(EXAMPLES / f"profile_{engine}.py"), "--gpu", "simulated:a100-sxm"]
    # With and without a profile at once; test_profile_pipeline.py compares more of torch's schedules.
    ways = [[], ["--no-profile"]] if engine != "torch" else [[]]
    everyone = [ended(each) for each in [torchrun(2, tmp_path, *example, *way) for way in ways]]
    assert [each.code for each in everyone] == [0] * len(ways), [each.complained for each in everyone]
    assert {len(losses(each.said)) for each in everyone} == {3}
    assert len({tuple(losses(each.said)) for each in everyone}) == 1
    profile = Profile.load(tmp_path / "profile.yaml")
    assert (profile.stages, profile.origin, profile.gpu) == (2, "simulated", "simulated a100-sxm")
    assert set(profile.measurements) == {(stage, kind) for stage in (0, 1) for kind in "FB"}
    assert profile.measurements[1, "F"][0].time_s > profile.measurements[0, "F"][0].time_s  # the head and the loss


def _need(engine: str) -> None:
    """Skip where it is not installed; found, not imported, for an import takes seconds and warns."""
    from importlib.util import find_spec

    top, *_ = ENGINES[engine].split(".")
    for name in ("torch", top):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
