"""`planner profile --modes`: each stage in each of its modes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
from commands import done

from perseus_planner.base.errors import UsageError
from perseus_planner.gpu import open_gpu
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.profiles import Profile

pytest.importorskip("torch")

STAGES = """
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


def build(stage, stages):
    layer = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(3)))
    loss = (lambda output: output.square().mean()) if stage == stages - 1 else None
    return checkpoint_wrapper(layer), torch.randn(64, 256), loss
"""


FUNCTIONS = """
import torch

from perseus_planner.profiles.modes import ModeFunction


def build(stage, stages):
    loss = (lambda output: output.square().mean()) if stage == stages - 1 else None
    return torch.nn.Linear(64, 64), torch.randn(64, 64), loss


def nothing():
    pass


def plain(module):
    return {"own": nothing, "fast": nothing}


def told(module):
    return {"own": nothing, "fast": ModeFunction(nothing, "stage", reorders=True)}
"""


def test_a_stage_is_measured_in_every_mode_and_its_profile_is_planned_on(folder: Path) -> None:
    """On a simulated GPU: recompute is a backward with one forward."""
    (folder / "stages_of_modes.py").write_text(STAGES)
    modes = "perseus_planner.engines.modes:recompute_modes"
    done(
        "profile --gpu simulated:a100-sxm --stages 2 --stage stages_of_modes:build --modes "
        f"{modes} -o p.yaml"
    )
    profile = Profile.load(folder / "p.yaml")
    rows, given = profile.measurements, profile.modes
    assert given is not None
    assert (list(given.ways), given.shared_by) == (["own", "keep"], "microbatch")
    assert given.ways["keep"].kept_bytes is None  # nothing of a simulated GPU is allocated
    for stage in range(2):
        assert {key for key in rows if key.stage == stage} == {
            Key(stage, kind, mode) for kind in "FB" for mode in given.ways
        }
        own, kept, again = (
            rows[key][0] for key in ((stage, "B"), (stage, "B", "keep"), (stage, "F", "keep"))
        )
        assert own.time_s == pytest.approx(kept.time_s + again.time_s, rel=0.3)
        assert own.time_s > 1.1 * kept.time_s
        assert [row.clock_mhz for row in rows[stage, "B"]] == [
            row.clock_mhz for row in rows[stage, "B", "keep"]
        ]
    assert "stage,instruction,mode,frequency" in (folder / "p.csv").read_text()
    done("solve p.yaml --schedule 1f1b --microbatches 3 -o f.npz")
    plan = done("plan f.npz --slowdown 1.0 -o plan.yaml")
    assert "In the mode keep: 12 computations." in plan


def test_the_profile_says_of_modes_what_they_say_of_themselves(folder: Path) -> None:
    (folder / "stages_of_functions.py").write_text(FUNCTIONS)
    for name, shared_by, reorders in (("plain", "computation", False), ("told", "stage", True)):
        done(
            "profile --gpu simulated:a100-sxm --stages 2 --stage stages_of_functions:build --modes "
            f"stages_of_functions:{name} -o {name}.yaml"
        )
        given = Profile.load(folder / f"{name}.yaml").modes
        assert given is not None
        assert (given.shared_by, given.ways["fast"].reorders) == (shared_by, reorders)
        assert not given.ways["own"].reorders


def test_modes_without_an_own_way_are_refused_and_the_own_way_is_left_at_the_end() -> None:
    import torch

    from perseus_planner.profiler.torch_stage import torch_stage

    entered: list[str] = []
    modes = {name: lambda name=name: entered.append(name) for name in ("own", "fast")}
    with open_gpu("simulated:a100-sxm") as gpu:
        wrong: list[Mapping[str, object]] = [{"fast": print}, {"own": print, "Fast one": print}]
        for given in wrong:
            with (
                pytest.raises(UsageError, match="with own for how training runs without a plan"),
                torch_stage(gpu, torch.nn.Linear(4, 4), torch.ones(2, 4), modes=given),
            ):
                pass
        with torch_stage(gpu, torch.nn.Linear(4, 4), torch.ones(2, 4), modes=modes) as stage:
            assert list(stage.runs) == ["F", "B", "F@fast", "B@fast"]
        assert entered[0] == "fast"
        assert entered[-1] == "own"


def test_memory_is_what_is_allocated_with_inputs_and_at_the_peak_of_the_backward() -> None:
    """With a stand-in for torch's counters, as there is no GPU here."""
    import torch

    from perseus_planner.engines.microbatch import Microbatch
    from perseus_planner.profiler import torch_stage

    inputs = torch.ones(2, 4)
    microbatch = Microbatch(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), inputs, None, first=True)
    with (
        mock.patch("torch.cuda.memory_allocated", side_effect=[1000, 1700]),
        mock.patch("torch.cuda.max_memory_allocated", return_value=1900),
        mock.patch("torch.cuda.reset_peak_memory_stats") as reset,
    ):
        assert torch_stage._memory(microbatch, inputs) == (700 + 32, 200)
    reset.assert_called_once_with()
