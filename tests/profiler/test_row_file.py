"""Finished rows survive the end of a sweep, and a resumed sweep gives the same rows as an
uninterrupted one.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from kept_rows import kept
from replay_gpu import ReplayGpu

from perseus_planner.base.errors import ProfileError
from perseus_planner.profiler.stage import StageRows
from perseus_planner.profiler.sweep import (
    RowFile,
    SweepSettings,
    delete_rows,
    measure_stage,
    rows_path,
)
from perseus_planner.profiles.measurement import Evidence, Measurement
from perseus_planner.profiles.profiles import Profile

SUBJECT = {"gpu": "GPU-8f6b", "window": "5.0 s"}
ROW = Measurement(
    1410, 0.1, 30.0, Evidence(1395.5, 1e-4, 0.02, 3, 61.5, ("sw-power-cap", "hw-thermal"))
)


def gpu_of_a_stage() -> ReplayGpu:
    rows = tuple(
        Measurement(clock, 0.02 + 40 / clock, 6.0 + 25 * (clock / 1410) ** 2 + 7000 / clock)
        for clock in range(1410, 600, -15)
    )
    twice = tuple(Measurement(row.clock_mhz, 2 * row.time_s, 2 * row.energy_j) for row in rows)
    return ReplayGpu(Profile({(0, "F"): rows, (0, "B"): twice}, 80.0), 0)


def swept(path: Path | None, *, resume: bool = True, **options: object) -> StageRows:
    gpu = gpu_of_a_stage()
    return measure_stage(
        gpu, gpu.stage(), 0, SweepSettings(**options), rows_file=path, resume=resume
    )  # type: ignore[arg-type]


def assert_same(one: StageRows, other: StageRows) -> None:
    assert set(one.measurements) == set(other.measurements)
    for kind, rows in one.measurements.items():
        assert [row.clock_mhz for row in rows] == [
            row.clock_mhz for row in other.measurements[kind]
        ]
        for row, same in zip(rows, other.measurements[kind], strict=True):
            assert row.time_s == pytest.approx(same.time_s, rel=1e-9)
            # The counter is updated at other times after an interruption.
            assert row.energy_j == pytest.approx(same.energy_j, rel=1e-4)


def test_rows_are_read_back_as_they_were_written(tmp_path: Path):
    rows = {
        "F": {1410: [ROW, ROW], 1395: [Measurement(1395, 1 / 3, 29.9)]},
        "B.sync": {1410: [ROW]},
    }
    RowFile(tmp_path / "r.json", SUBJECT, resume=False).write(rows)
    again = RowFile(tmp_path / "r.json", SUBJECT, resume=True).finished
    assert again == rows
    assert again["F"][1410][1].evidence == ROW.evidence


def test_rows_of_another_subject_are_refused_with_the_first_difference(folder: Path):
    RowFile(Path("r.json"), SUBJECT, resume=False).write({"F": {1410: [ROW]}})
    with pytest.raises(ProfileError) as refusal:
        RowFile(Path("r.json"), {**SUBJECT, "gpu": "GPU-77"}, resume=True)
    assert str(refusal.value) == (
        "r.json: its rows were measured with gpu: GPU-8f6b, and now it is GPU-77; "
        "resume with gpu as before, or measure from the start without --resume"
    )
    with pytest.raises(ProfileError, match="with seed: nothing, and now it is 1;"):
        RowFile(Path("r.json"), {**SUBJECT, "seed": "1"}, resume=True)
    with pytest.raises(ProfileError, match=r"with window: 5\.0 s, and now it is nothing;"):
        RowFile(Path("r.json"), {"gpu": "GPU-8f6b"}, resume=True)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"window_s": 6.0}, "window: 5.0 s, and now it is 6.0 s"),
        ({"full": True}, "settings: as few as a plan needs, and now it is all"),
        ({"seed": 4}, "seed: 0, and now it is 4"),
        ({"control": "observed"}, "control: clock, and now it is observed"),
    ],
)
def test_a_sweep_with_other_settings_cannot_resume(
    tmp_path: Path, change: dict[str, object], difference: str
):
    swept(tmp_path / "r.json", resume=False)
    with pytest.raises(ProfileError, match=difference):
        swept(tmp_path / "r.json", **change)


def test_a_damaged_file_is_refused_with_the_reason(folder: Path):
    RowFile(Path("r.json"), SUBJECT, resume=False).write({"F": {1410: [ROW]}})
    text = Path("r.json").read_text()
    Path("r.json").write_text(text.replace("30.0", '"much"'))
    with pytest.raises(
        ProfileError,
        match=r"r.json: cannot be read .*Expected `float`, got `str`.*; measure from the start",
    ):
        RowFile(Path("r.json"), SUBJECT, resume=True)


def test_without_resume_old_rows_are_deleted(tmp_path: Path):
    RowFile(tmp_path / "r.json", SUBJECT, resume=False).write({"F": {1410: [ROW]}})
    assert not RowFile(tmp_path / "r.json", {}, resume=False).finished
    assert not (tmp_path / "r.json").exists()


def test_rows_are_deleted_with_what_a_killed_write_left(tmp_path: Path):
    output = tmp_path / "profile.yaml"
    for stage in (0, 1):
        path = rows_path(output, stage)
        path.write_text("x")
        (tmp_path / f".{path.name}.abc.part").write_text("half")
    (tmp_path / "other.json").write_text("")
    delete_rows(output, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


def test_every_row_is_on_disk_before_the_next_begins(tmp_path: Path):
    gpu = gpu_of_a_stage()
    found: list[int] = []

    def look(done: int, total: int) -> None:
        found.append(sum(map(len, kept(tmp_path / "r.json").values())))

    measure_stage(gpu, gpu.stage(), 0, rows_file=tmp_path / "r.json", progress=look)
    assert found[:-1] == list(range(1, len(found)))


@pytest.mark.parametrize("after", [1, 2, 9, 23])
def test_finished_rows_are_not_measured_again(tmp_path: Path, after: int):
    path, gpu = tmp_path / "r.json", gpu_of_a_stage()

    def stop(done: int, total: int) -> None:
        if done == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_stage(gpu, gpu.stage(), 0, rows_file=path, progress=stop)
    assert gpu.locked_mhz is None
    before = kept(path)
    done: list[int] = []
    gpu = gpu_of_a_stage()
    rows = measure_stage(
        gpu, gpu.stage(), 0, rows_file=path, resume=True, progress=lambda now, _: done.append(now)
    )
    assert done[0] in (after, after + 1)  # a clock may be measured again
    assert_same(rows, swept(None))
    again = kept(path)
    assert all(again[key][: len(visits)] == visits for key, visits in before.items())


def killed(path: Path, kills: int) -> None:
    """Kill sweeps at random moments; each leaves a complete file, from which the next may
    resume.
    """
    draw = random.Random(kills)
    begin_s = time.perf_counter()
    whole = swept(path, resume=False)
    lasts_s = time.perf_counter() - begin_s
    forks = multiprocessing.get_context("fork")
    done = found = 0
    while done < kills:
        goes_on = found < sum(map(len, whole.measurements.values())) + 4 and draw.random() < 0.8
        process = forks.Process(target=partial(swept, path, resume=goes_on))
        process.start()
        process.join(draw.uniform(0.0, lasts_s))
        process.kill()
        process.join()
        done += process.exitcode == -signal.SIGKILL
        rows = kept(path)
        found = sum(map(len, rows.values()))
        for kind, table in whole.measurements.items():
            for row in table:
                energies_j = [visit.energy_j for visit in rows.pop((kind, row.clock_mhz), ())]
                assert energies_j == pytest.approx([row.energy_j] * len(energies_j), rel=1e-4)
        assert not rows
    assert_same(swept(path), whole)
    delete_rows(path.with_name("r.yaml"), 1)
    assert not list(path.parent.iterdir())


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of fork beside threads: the child runs this file's code only
def test_twenty_sweeps_killed_at_random_moments_leave_complete_files_and_resume(tmp_path: Path):
    killed(tmp_path / "r.rows-0.json", 20)


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_two_hundred_sweeps_killed_at_random_moments_leave_complete_files_and_resume(
    tmp_path: Path,
):
    killed(tmp_path / "r.rows-0.json", 200)
