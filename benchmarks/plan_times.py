"""Number 5: how long planning takes, with a frontier that was loaded from its file."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from data import Case, Size, frontier_of
from results import Check, Section, Table
from timing import seconds

from perseus_planner import Frontier

_COLUMNS = {
    "profile": ("profile", ""),
    "microbatches": ("microbatches", "d"),
    "median_ms": ("new deadline: median, ms", ".0f"),
    "most_ms": ("most, ms", ".0f"),
    "gap": ("worst above the bound, %", ".3f"),
    "again_us": ("asked again: median, us", ".1f"),
    "again_most_us": ("most, us", ".1f"),
}
_FRESH_COLUMNS = {
    "profile": ("profile, in a fresh process", ""),
    "import_s": ("import, s", ".2f"),
    "load_s": ("load the file, s", ".2f"),
    "plan_s": ("first plan, s", ".2f"),
    "second_s": ("second plan, s", ".2f"),
    "process_s": ("whole process, both plans, s", ".2f"),
}
_FRESH = """
import json, sys, time
t = [time.perf_counter()]
from perseus_planner import Frontier
t.append(time.perf_counter())
frontier = Frontier.load(sys.argv[1])
t.append(time.perf_counter())
for deadline_s in map(float, sys.argv[2:]):
    frontier.plan_until(deadline_s)
    t.append(time.perf_counter())
print(json.dumps([b - a for a, b in zip(t, t[1:])]))
"""
_COMPILED_COLUMNS = {
    "solve_s": ("without compiled code: first frontier, CPU s", ".1f"),
    "plan_s": ("first plan, CPU s", ".1f"),
    "budget_s": ("first plan with few changes, CPU s", ".1f"),
    "all_s": ("all three, CPU s", ".1f"),
}
_COMPILED = """
import json, sys, time
from perseus_planner import Frontier
from perseus_planner.solver.frontier import solve_dag
dag = Frontier.load(sys.argv[1]).dag
t = [time.process_time()]
frontier = solve_dag(dag)
t.append(time.process_time())
frontier.plan_until(float(sys.argv[2]))
t.append(time.process_time())
frontier.plan_until(float(sys.argv[2]), max_changes=4)
t.append(time.process_time())
print(json.dumps([b - a for a, b in zip(t, t[1:])]))
"""
_WARM_UP = 1.03  #: a deadline different from the measured ones


def measure(size: Size) -> Section:
    """Save, load, and plan at every deadline, of the longest iteration of each profile."""
    microbatches = max(size.microbatches)
    with tempfile.TemporaryDirectory() as folder:
        saved = [(case, Path(folder) / f"{case.device}.npz") for case in size.cases]
        for case, path in saved:
            frontier_of(case, microbatches).save(path)
        rows = [_row(case, microbatches, path, size) for case, path in saved]
        fresh = [_fresh_row(case, microbatches, path, size) for case, path in saved]
        baseline_s = frontier_of(size.cases[0], microbatches).baseline_time_s
        compiled = [_compiled_row(saved[0][1], baseline_s)] if size.compiles else []
    return Section(
        5,
        "A plan from a loaded frontier",
        f"Time measured on this machine: `plan_for` at the {len(size.slowdowns)} deadlines of "
        "number 3, each new to a frontier loaded from its file, after one other plan in the same "
        "process; then each deadline again, 100 times. The second table is the first plan of a "
        "new process, with compiled code in Numba's cache; the third is what a process takes that "
        "has to compile it. To reach: 300 ms, 1 ms when asked again, and 12 CPU seconds with "
        "compiling.",
        [Table(_COLUMNS, rows), Table(_FRESH_COLUMNS, fresh), Table(_COMPILED_COLUMNS, compiled)],
        [
            Check(
                "plans of the loaded frontier equal those of the solved one",
                all(row["equal"] for row in rows),
            ),
            Check("no plan is past its deadline", all(row["in_time"] for row in rows)),
        ],
    )


def _row(case: Case, microbatches: int, path: Path, size: Size) -> dict[str, Any]:
    solved, loaded = frontier_of(case, microbatches), Frontier.load(path)
    loaded.plan_until(_WARM_UP * loaded.baseline_time_s)
    deadlines_s = [slowdown * loaded.baseline_time_s for slowdown in size.slowdowns]
    taken_s = [
        seconds(lambda deadline_s=d: loaded.plan_until(deadline_s), 1)[0] for d in deadlines_s
    ]  # type: ignore[misc]
    again_s = [
        t
        for d in deadlines_s
        for t in seconds(lambda deadline_s=d: loaded.plan_until(deadline_s), 100)
    ]  # type: ignore[misc]
    plans = [loaded.plan_until(deadline_s) for deadline_s in deadlines_s]
    return {
        "profile": case.name,
        "microbatches": microbatches,
        "median_ms": 1e3 * statistics.median(taken_s),
        "most_ms": 1e3 * max(taken_s),
        "gap": 100 * max(plan.energy_j / plan.bound_j - 1 for plan in plans),
        "again_us": 1e6 * statistics.median(again_s),
        "again_most_us": 1e6 * max(again_s),
        "equal": all(plan == solved.plan_until(plan.deadline_s) for plan in plans),
        "in_time": all(plan.time_s <= plan.deadline_s for plan in plans),
    }


def _fresh_row(case: Case, microbatches: int, path: Path, size: Size) -> dict[str, Any]:
    baseline_s = frontier_of(case, microbatches).baseline_time_s
    deadlines = [repr(slowdown * baseline_s) for slowdown in size.slowdowns[:2]]
    begin_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, str(path), *deadlines],
        capture_output=True,
        text=True,
        check=True,
    )
    process_s = time.perf_counter() - begin_s
    parts = dict(
        zip(("import_s", "load_s", "plan_s", "second_s"), json.loads(done.stdout), strict=True)
    )
    return {"profile": case.name, **parts, "process_s": process_s}


def _compiled_row(path: Path, baseline_s: float) -> dict[str, Any]:
    """Return what the first frontier and plans take in a process that finds no compiled code."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _COMPILED, str(path), repr(1.02 * baseline_s)],
            env=os.environ | {"NUMBA_CACHE_DIR": folder},
            capture_output=True,
            text=True,
            check=True,
        )
    taken_s = json.loads(done.stdout)
    return dict(zip(("solve_s", "plan_s", "budget_s"), taken_s, strict=True)) | {
        "all_s": sum(taken_s)
    }
