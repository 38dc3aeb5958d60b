"""A sweep that is killed at any moment leaves no locked clock and no half-written file, and can
resume.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_nvml import StandIn
from gpu_owners import await_end, files, guardians, kill
from kept_rows import kept

from perseus_planner import Profile
from perseus_planner.gpu.lease.lease import recover, stale_records
from perseus_planner.profiles.csv_file import read_table
from perseus_planner.profiles.keys import Key

Rows = dict[tuple[str, int], list[Any]]
"""(kind, clock) -> what was measured there."""
CLOCKS_MHZ = (1980, 1800, 1605, 1395, 1200, 1005, 810)
# What `planner profile` does on each rank. Clocks are set through NVML. Time is virtual, so that
# equal sweeps find equal rows, but each run also takes a millisecond of real time, so that a kill
# can come during a measurement. After each row the sweep prints a line and waits for one on stdin;
# it goes on without waiting when stdin is closed.
SWEEP = """
import sys, time
from pathlib import Path
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.wrappers import DryRunGpu
from perseus_planner.profiler.stage import assemble_profile
from perseus_planner.profiler.sweep import delete_rows, rows_path
from perseus_planner.profiler.stage import Stage, TimedRun
from perseus_planner.profiler.sweep import SweepSettings, measure_stage

class InVirtualTime(DryRunGpu):
    spent_s, spent_j = 0.0, 0.0
    def warnings(self): return self._gpu.warnings()
    def now_s(self): return self.spent_s
    def energy_j(self): return self.spent_j // 10 * 10
    def wait(self, duration_s): self.spend(duration_s, 60.0)
    def spend(self, duration_s, power_w):
        self.spent_s, self.spent_j = self.spent_s + duration_s, self.spent_j + power_w * duration_s
    def set_clock_mhz(self, clock_mhz): self._gpu.set_clock_mhz(clock_mhz)
    def reset_clocks(self): self._gpu.reset_clocks()
    def set_power_limit_w(self, limit_w): raise NotImplementedError
    def reset_power_limit(self): raise NotImplementedError

output = Path(sys.argv[1])
print("begun", flush=True)
with open_gpu("nvml:0") as nvml, lease_gpus([nvml], power_limit=False):
    gpu = InVirtualTime(nvml)
    def run(cycles):
        def launch(times):
            time.sleep(1e-3)
            gpu.spend(times * cycles / gpu.clock_mhz(), 60.0 + 0.2 * gpu.clock_mhz())
        return launch
    stage = Stage({"F": TimedRun(run(100.0)), "B": TimedRun(run(200.0))}, lambda: None)
    settings = SweepSettings(full=True, cool_down_s=0.0)
    def progress(done, total):
        print(done, flush=True)
        sys.stdin.readline()
    rows = measure_stage(gpu, stage, 0, settings, rows_file=rows_path(output, 0), resume=True, progress=progress)
profile = assemble_profile([rows], blocking_power_w=85.0)
profile.save(output)
delete_rows(output, 1)
"""  # noqa: E501


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    nvml.add(f"* clocks {' '.join(map(str, CLOCKS_MHZ))}")
    return tmp_path / "state"


def rows_of(path: Path) -> Rows:
    """Return the rows of a table, which must be complete; none if there is no file."""
    return (
        {(row.key.name, row.clock_mhz): [row] for row in read_table(path)[0]}
        if path.exists()
        else {}
    )


@dataclass(frozen=True)
class Kill:
    """When to kill a sweep: `delay_s` seconds after its begin, or after it has written a number
    of new rows.
    """

    delay_s: float
    rows: int | None = None

    def wait(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        if self.rows is None:
            process.stdin.close()
        for _ in range(self.rows or 0):
            process.stdout.readline()
            process.stdin.write(b"\n")
            process.stdin.flush()
        time.sleep(self.delay_s)


def swept(folder: Path, killed: Kill | None = None) -> float:
    """Sweep, resuming from the rows in `folder`; return the seconds that it took."""
    command = [sys.executable, "-c", SWEEP, "p.yaml"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdout.readline()
        begin_s = time.monotonic()
        watching: list[psutil.Process] = []
        if killed is None:
            process.stdin.close()
        else:
            killed.wait(process)
            with suppress(psutil.NoSuchProcess):  # it has just ended
                watching = guardians(process)
                kill(process.pid)
        errors = process.stderr.read().decode()
        assert process.wait() == 0 or killed is not None, errors
        took_s = time.monotonic() - begin_s
        await_end(watching)
    return took_s


def sweep_and_kill(
    nvml: StandIn, state: Path, folder: Path, times: int, next_kill: Callable[[int, float], Kill]
) -> int:
    """Kill sweeps, each resuming from the one before, and then let one end.

    Args:
        nvml: The GPU.
        state: The folder of the records of set GPUs.
        folder: The folder to work in.
        times: How often to kill.
        next_kill: Chooses when, given the number of rows that are missing and the seconds of a
            whole sweep.

    Returns:
        How many kills left some new rows, but not all.
    """
    folder.mkdir()
    whole_s = swept(folder)
    whole = rows_of(folder / "p.csv")
    assert len(whole) == 2 * len(CLOCKS_MHZ)
    shutil.rmtree(folder)
    folder.mkdir()
    before: Rows = {}
    amid = 0
    for number in range(times + 1):
        swept(folder, next_kill(len(whole) - len(before), whole_s) if number < times else None)
        assert nvml.locked_mhz(0) is None
        recover()  # a record may be left of a GPU that was not set yet
        assert (stale_records(), files(state)) == ((), [])
        # There may also be a half-written file with a temporary name; the next sweep removes it.
        assert {path.name for path in folder.glob("[!.]*")} <= {"p.yaml", "p.csv", "p.rows-0.json"}
        rows = kept(folder / "p.rows-0.json")
        assert all(rows[key][: len(before[key])] == before[key] for key in before if rows)
        rows = rows_of(folder / "p.csv") or rows
        amid += len(before) < len(rows) < len(whole)
        before = rows
        if (folder / "p.yaml").exists() and not (folder / "p.rows-0.json").exists():
            assert Profile.load(folder / "p.yaml").measurements.keys() == {Key(0, "F"), Key(0, "B")}
            assert list(rows) == list(whole)
            for key, (row,) in rows.items():
                # The counter is updated at other times after an interruption.
                (expected,) = whole[key]
                assert (row.time_s, row.energy_j) == pytest.approx(
                    (expected.time_s, expected.energy_j), rel=1e-3
                )
            assert [*folder.glob(".*rows*")] == []
            shutil.rmtree(folder)
            folder.mkdir()
            before = {}
    return amid


def drawn_kills(seed: int, amid: float) -> Callable[[int, float], Kill]:
    """Return draws of when to kill: right after a few rows in this share of the sweeps, at any
    moment in the others.
    """
    draw = random.Random(seed)

    def next_kill(missing: int, whole_s: float) -> Kill:
        if missing < 3 or draw.random() >= amid:
            return Kill(draw.uniform(0.0, whole_s))
        return Kill(draw.uniform(0.0, 0.05), rows=min(draw.randint(1, 3), missing - 2))

    return next_kill


def test_a_sweep_killed_between_rows_resumes_and_leaves_nothing_locked(
    nvml: StandIn, state: Path, tmp_path: Path
):
    # At most four rows are new after each kill, so three kills leave some of the 14 rows missing.
    assert sweep_and_kill(nvml, state, tmp_path / "work", 12, drawn_kills(1, amid=1.0)) >= 3


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_sweep_killed_200_times_resumes_and_leaves_nothing_locked(
    nvml: StandIn, state: Path, tmp_path: Path
):
    assert sweep_and_kill(nvml, state, tmp_path / "work", 200, drawn_kills(2, amid=0.5)) >= 50
