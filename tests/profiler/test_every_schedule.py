"""Every schedule of every engine can be profiled, solved without further options, planned and
trained by its plan.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from launching import Results, results_of
from schedule_engines import TORCH

from perseus_planner import solve
from perseus_planner.plans.job import Job, Settings
from perseus_planner.profiler.simulated_pipeline import profile_simulated
from perseus_planner.profiles.profiles import Profile

pytest.importorskip("torch")

SPLIT = ("interleaved-zb", "zbv", "dualpipe-v")
"""The schedules that split backwards."""
PAIRED = "combined-1f1b"
"""The schedule with overlapped pairs, whose computations do not show how long they take alone."""
OFTEN = ["1f1b", "interleaved-1f1b", "dualpipe-v"]
"""Schedules that are profiled and trained each time: of a stage for each rank, of two, and with
split backwards; the others are soaks."""


def check(results: Results, names: list[str], folder: Path) -> None:
    for rank in results:
        assert list(rank) == names
        for name, found in rank.items():
            timed = found.pop("timed")
            expected = "F" if name.partition("+")[0] in SPLIT else "FB"
            expected = "" if name == PAIRED else expected
            assert timed == [expected], "the times in training that repetitions are compared with"
            assert found == {
                "planned": True,
                "equal": True,
                "deviations": [None, None],
                "problem": None,
                "warnings": [],
            }, name
    for name in names:
        path = folder / f"{name.replace(' ', '-')}.yaml"
        profile = Profile.load(path)
        kinds = "FBIW" if name.partition("+")[0] in SPLIT else "FB"
        pairs = {key for key in profile.measurements if ".pair" in key[1]}
        alone = set(profile.measurements) - pairs
        assert alone == set(product(range(profile.stages), kinds))
        assert bool(pairs) == (name == PAIRED)
        for stage, kind in pairs:  # on a simulated GPU the two of a pair take as long as alone
            own = int(kind.rpartition("-")[2]) if "-" in kind else stage
            both = (profile.measurements[own, "F"][0], profile.measurements[stage, "B"][0])
            sum_s = sum(row.time_s for row in both)
            assert profile.measurements[stage, kind][0].time_s == pytest.approx(sum_s, rel=0.1)
        assert (
            len({profile.blocking_w(stage) for stage in range(0, profile.stages, 2)}) == 1
            or "v" in name
        )
        (dag,) = Job.of(Settings(profile=path)).dags()
        assert (len(dag.schedule.ranks), dag.schedule.microbatches) == (2, 4)


def test_stages_that_one_simulated_gpu_measured_can_share_a_rank() -> None:
    profile = profile_simulated("simulated:a100-sxm", 4)
    assert isinstance(profile.blocking_power_w, float)
    solve(profile, "interleaved-1f1b", microbatches=2, virtual_stages=2)


@pytest.mark.parametrize(
    ("degree", "names"),
    [
        (1, OFTEN),
        (2, ["1f1b+ddp"]),
        pytest.param(
            2,
            ["1f1b+fsdp", "1f1b+fsdp-again", "interleaved-1f1b+fsdp", "dualpipe-v+synced"],
            marks=[pytest.mark.soak, pytest.mark.newest],
        ),
        pytest.param(
            1,
            [name for name in TORCH if name not in OFTEN],
            marks=[pytest.mark.soak, pytest.mark.newest],
        ),
    ],
)
def test_torch(degree: int, names: list[str], tmp_path: Path) -> None:
    """Replicas reduce gradients, hold each other's weights, and wait for each other in forwards and
    backwards.
    """
    results = results_of("profile_programs:torch_schedules", 2 * degree, tmp_path, *names)
    check(results, names, tmp_path)


@pytest.mark.newest
@pytest.mark.soak  # project/test_examples.py profiles, plans and trains once
@pytest.mark.parametrize("degree", [1, 2])
def test_deepspeed(degree: int, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    results = results_of(
        "profile_programs:deepspeed_engine",
        2 * degree,
        tmp_path,
        str(degree),
        imports=["deepspeed.pipe"],
    )
    check(results, ["1f1b"], tmp_path)


@pytest.mark.newest
@pytest.mark.soak  # project/test_examples.py profiles, plans and trains once
@pytest.mark.parametrize(
    ("degree", "names"),
    [
        (1, ["1f1b", "interleaved-1f1b", "groups of 4", "combined-1f1b"]),
        (2, ["1f1b", "interleaved-1f1b", "experts"]),
    ],
)
def test_megatron(degree: int, names: list[str], tmp_path: Path) -> None:
    """Replicas share the optimizer, which gathers weights in forwards and reduces gradients in
    backwards; the loss reduces its report.
    """
    pytest.importorskip("megatron.core")
    results = results_of(
        "profile_programs:megatron_models", 2 * degree, tmp_path, str(degree), imports=["tiny_gpt"]
    )
    check(results, names, tmp_path)
