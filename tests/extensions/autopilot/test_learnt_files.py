"""What was learnt is never replaced by less, however a job is resumed."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from strategies import drawn

from perseus_planner import Profile
from perseus_planner.extensions.autopilot import AutopilotJob
from perseus_planner.extensions.autopilot.ranks.learnt_files import (
    LearntFiles,
    open_files,
    row_count,
    with_rows_of,
)
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.modes import OWN, Mode, Modes
from perseus_planner.schedules import generate
from perseus_planner.schedules.pipeline import pipeline_iteration

CLOCKS = tuple(range(1410, 210, -100))


class Resumed(NamedTuple):
    """How a job is resumed, and how much it learns."""

    stages: int
    gpu: str
    modes: tuple[str, ...]
    gpus_per_stage: int
    clocks: int  #: how many it tries

    def job(self) -> AutopilotJob:
        schedule = generate("1f1b", ranks=self.stages, microbatches=4)
        return AutopilotJob(
            pipeline_iteration(schedule),
            CLOCKS,
            gpus_per_stage=self.gpus_per_stage,
            gpu=self.gpu,
            modes=self.modes,
        )

    def learnt(self) -> Profile:
        """Return what it learns of itself alone."""
        modes = None
        if len(self.modes) > 1:
            modes = Modes({mode: Mode() for mode in self.modes})
        rows = {
            (stage, kind, mode): tuple(
                Measurement(clock, CLOCKS[0] / clock, 200.0) for clock in CLOCKS[: self.clocks]
            )
            for stage in range(self.stages)
            for kind in "FB"
            for mode in self.modes
        }
        return Profile(rows, 70.0, gpu=self.gpu, gpus_per_stage=self.gpus_per_stage, modes=modes)


def train(path: Path, resumed: Resumed) -> LearntFiles:
    """Train for a while, as the autopilot does."""
    files = open_files(path, resumed.job())
    learnt = resumed.learnt()
    if files.prior is not None:
        learnt = with_rows_of(learnt, files.prior)
    assert files.path is not None
    learnt.save(files.path)
    return files


RESUMED = st.builds(
    Resumed,
    st.sampled_from([2, 4, 8]),
    st.sampled_from(["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "a GPU"]),
    st.sampled_from([(OWN,), (OWN, "keep"), (OWN, "fast")]),
    st.sampled_from([1, 2]),
    st.integers(1, len(CLOCKS)),
)


@drawn(8, 60, jobs=st.lists(RESUMED, min_size=2, max_size=8), anew=True)
def test_a_job_finds_all_that_it_ever_learnt(jobs: Sequence[Resumed]) -> None:
    """However often degrees, GPUs and modes change in between."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "autopilot.yaml")
        most: dict[Resumed, int] = {}
        for resumed in jobs:
            files = train(path, resumed)
            kind = resumed._replace(clocks=0)
            known = 0 if files.prior is None else row_count(files.prior)
            assert known >= most.get(kind, 0)
            if files.prior is not None:
                assert {key.stage for key in files.prior.measurements} == set(range(resumed.stages))
                assert files.prior.gpu == resumed.gpu
            saved = row_count(Profile.load(path))
            assert saved >= known
            most[kind] = saved
            # The log says so where another pipeline's file stood in the way.
            for note in files.notes:
                assert note.is_warning == ("kept in" in note.text)


def test_96_rows_of_four_stages_are_kept_while_two_train_and_found_again(tmp_path: Path) -> None:
    path = tmp_path / "autopilot.yaml"
    four = Resumed(4, "NVIDIA A100-SXM4-80GB", (OWN,), 1, 12)
    train(path, four)
    assert row_count(Profile.load(path)) == 96
    files = train(path, four._replace(stages=2, clocks=2))
    kept = tmp_path / "autopilot.4-stages.nvidia-a100-sxm4-80gb.yaml"
    assert files.prior is None
    assert [note.is_warning for note in files.notes] == [True]
    assert files.notes[0].text == (
        f"what was learnt before is not used: {path} is for 4 stages, and this job has 2; it is "
        f"kept in {kept}, for when the job is resumed as before"
    )
    assert row_count(Profile.load(path)) == 8
    assert row_count(Profile.load(kept)) == 96
    again = open_files(path, four.job())
    assert again.prior is not None
    assert row_count(again.prior) == 96
    assert again.path == path
    assert again.notes[-1] == (
        f"the autopilot begins with 96 rows that were learnt before, from {kept}",
        False,
    )


@pytest.mark.parametrize("damage", ["version: 9", "no: profile", "{", "\0"])
def test_a_file_that_cannot_be_read_is_left_as_it_is(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "autopilot.yaml"
    four = Resumed(4, "a GPU", (OWN,), 1, 12)
    train(path, four)
    text = path.read_text()
    path.write_text(text.replace("version: 1", damage) if "version" in damage else damage)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    for clocks in (3, 2):  # the second one goes on with what the first one has learnt
        files = train(path, four._replace(clocks=clocks))
        (warning,) = [note.text for note in files.notes if note.is_warning]
        own = tmp_path / "autopilot.4-stages.a-gpu.yaml"
        assert warning.endswith(
            f"it is left as it is, and what this job learns is written to {own}"
        )
        assert files.path == own
        assert row_count(Profile.load(own)) == 24
        assert {name: (tmp_path / name).read_bytes() for name in before} == before
    train(path, four._replace(stages=2))
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_rows_at_clocks_that_a_job_does_not_try_are_scaled_to_what_full_clocks_take() -> None:
    prior = Resumed(2, "a GPU", (OWN,), 1, 3).learnt()
    now = Profile(
        {key: (Measurement(1410, 2.0, 300.0),) for key in prior.measurements}, 70.0, gpu="a GPU"
    )
    rows = with_rows_of(now, prior).measurements[0, "F"]
    assert [(row.clock_mhz, row.time_s, row.energy_j) for row in rows] == [
        (1410, 2.0, 300.0),
        (1310, pytest.approx(2 * 1410 / 1310), 300.0),
        (1210, pytest.approx(2 * 1410 / 1210), 300.0),
    ]


def test_a_folder_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "autopilot.yaml"
    four = Resumed(4, "a GPU", (OWN,), 1, 12)
    train(path, four)
    before = path.read_bytes()
    for number in ("", *(f".{n}" for n in range(2, 4))):
        (tmp_path / f"autopilot.4-stages.a-gpu{number}.yaml").mkdir()
    files = train(path, four._replace(stages=2))
    kept = tmp_path / "autopilot.4-stages.a-gpu.4.yaml"
    assert kept.read_bytes() == before.replace(
        b"autopilot.csv", kept.with_suffix(".csv").name.encode()
    )
    assert files.path == path
