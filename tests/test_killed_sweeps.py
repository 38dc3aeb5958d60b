"""A sweep that is killed at any moment leaves no clock locked and no half-written file, and goes on where it was."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fake_nvml import StandIn
from gpu_owners import await_end, files, guardians, kill

from perseus_planner import Profile
from perseus_planner.gpu.journal import left_behind, recover
from perseus_planner.profile_csv import read_table

CLOCKS_MHZ = (1980, 1800, 1605, 1395, 1200, 1005, 810)
# What `planner profile` does on each rank, for a stage that computes as long as a GPU would at its clock.
SWEEP = """
import sys, time
from pathlib import Path
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.journal import held
from perseus_planner.profiler.profiling import SweepSettings, assembled, forget_rows, measure_stage, rows_path
from perseus_planner.profiler.stage import Stage, Timed

output = Path(sys.argv[1])
print("begun", flush=True)
with open_gpu("nvml:0") as gpu, held([gpu], power_limit=False):
    def run(seconds_at_1980):
        return lambda times: time.sleep(times * seconds_at_1980 * 1980 / gpu.clock_mhz())
    stage = Stage({"F": Timed(run(1e-3)), "B": Timed(run(2e-3))}, lambda: None)
    settings = SweepSettings(full=True, window_s=0.01, cool_down_s=0.0)
    rows = measure_stage(gpu, stage, 0, settings, keep=rows_path(output, 0), resume=True)
profile = assembled([rows], blocking_power_w=85.0)
profile.save(output)
forget_rows(output, 1)
"""


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    nvml.add(f"* clocks {' '.join(map(str, CLOCKS_MHZ))}", "* energy_step_ms 1")
    return tmp_path / "state"


def rows_of(path: Path) -> dict[tuple[str, int], object]:
    """The rows of a table, whole as they stand; none where it is not there."""
    return {(row.kind, row.clock_mhz): row for row in read_table(path)[0]} if path.exists() else {}


def swept(folder: Path, moment_s: float | None = None) -> int:
    """Sweep, going on from what is there; kill it `moment_s` after its begin, if that is given. Its exit status."""
    command = [sys.executable, "-c", SWEEP, "p.yaml"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        watching: list[psutil.Process] = []
        if moment_s is not None:
            time.sleep(moment_s)  # any moment will do: nothing is waited for
            if process.poll() is None:
                watching = guardians(process)
                kill(process.pid)
        said = process.stderr.read().decode()
        assert process.wait() == 0 or moment_s is not None, said
        await_end(watching)
    return process.returncode


def sweep_and_kill(nvml: StandIn, state: Path, folder: Path, times: int, seed: int) -> int:
    """Kill a sweep so often, each going on from the one before, and then let it end; how often it was amid its rows."""
    moments = random.Random(seed)
    folder.mkdir()
    before: dict[tuple[str, int], object] = {}
    amid = 0
    for number in range(times + 1):
        ended = swept(folder, moments.uniform(0.0, 0.8) if number < times else None) == 0
        assert nvml.locked_mhz(0) is None
        recover()  # a record may be left where nothing was set yet
        assert (left_behind(), files(state)) == ((), [])
        assert {path.name for path in folder.iterdir()} <= {"p.yaml", "p.csv", "p.rows-0.csv"}
        rows = rows_of(folder / "p.csv") or rows_of(folder / "p.rows-0.csv")
        assert {key: rows[key] for key in before} == before  # what was finished stays as it was
        amid += len(before) < len(rows) < 2 * len(CLOCKS_MHZ)
        before = rows
        if ended:
            table = Profile.load(folder / "p.yaml").measurements
            assert {(kind, row.clock_mhz) for (_, kind), each in table.items() for row in each} == set(rows)
            assert len(rows) == 2 * len(CLOCKS_MHZ)
            assert not (folder / "p.rows-0.csv").exists()
            shutil.rmtree(folder)
            folder.mkdir()
            before = {}
    return amid


def test_a_sweep_killed_at_random_moments_goes_on_and_leaves_nothing_locked(nvml: StandIn, state: Path, tmp_path: Path):
    assert sweep_and_kill(nvml, state, tmp_path / "work", times=12, seed=1) >= 2


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_sweep_killed_200_times_goes_on_and_leaves_nothing_locked(nvml: StandIn, state: Path, tmp_path: Path):
    assert sweep_and_kill(nvml, state, tmp_path / "work", times=200, seed=2) >= 50
