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

from data import STAGES, Case, Size, frontier_of, profile_of
from large_pipeline import repeated
from noisy_plans import default_plan
from results import Check, Section, Table
from timing import seconds

from perseus_planner import Frontier, schedules, solve
from perseus_planner.solver import compiling

_COLUMNS = {
    "profile": ("profile", ""),
    "stages": ("stages", "d"),
    "microbatches": ("microbatches", "d"),
    "default_s": ("first default plan, CPU s", ".2f"),
    "measured_s": ("as measured, CPU s", ".2f"),
    "ratio": ("ratio", ".1f"),
    "again_us": ("asked again: median, us", ".1f"),
}
_SLOWDOWNS = (1.00, 1.05)
_MOST = 2.5  #: times a plan as measured
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
    "compile_s": ("all kernels compiled at installation, CPU s", ".1f"),
    "solve_s": ("then: first frontier of a process, CPU s", ".1f"),
    "plan_s": ("first plan, CPU s", ".1f"),
    "budget_s": ("first plan with few changes, CPU s", ".1f"),
    "all_s": ("all four, CPU s", ".1f"),
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


def measure(size: Size) -> Section:
    """Save, load, and plan: pipelines of each profile, a larger one, and in fresh processes."""
    microbatches = max(size.microbatches)
    with tempfile.TemporaryDirectory() as folder:
        saved = [(case, Path(folder) / f"{case.device}.npz") for case in size.cases]
        for case, path in saved:
            frontier_of(case, microbatches).save(path)
        rows = [_row(case, *counts, Path(folder)) for case in size.cases for counts in size.planned]
        fresh = [_fresh_row(case, microbatches, path, size) for case, path in saved]
        baseline_s = frontier_of(size.cases[0], microbatches).baseline_time_s
        compiled = [_compiled_row(saved[0][1], baseline_s)] if size.compiles else []
    worst = max(row["ratio"] for row in rows)
    return Section(
        5,
        "A plan from a loaded frontier",
        "CPU time measured on this machine: the first plan of a frontier loaded from its file, in "
        f"a process that has planned before; mean of {_SLOWDOWNS[0]}x and {_SLOWDOWNS[1]}x. "
        f"*Default*: what people get; *as measured*: `on_time=None`. {STAGES} stages are those of "
        "the profile, more repeat them, each changed by up to 5 %. The second table is the first "
        "plan of a new process; the third is what the first process takes after an installation, "
        f"and what that compiles. To reach: {_MOST} times a plan as measured, 1 ms when asked "
        "again, and 3 CPU seconds of compiling.",
        [Table(_COLUMNS, rows), Table(_FRESH_COLUMNS, fresh), Table(_COMPILED_COLUMNS, compiled)],
        [
            Check(
                "plans of the loaded frontier equal those of the solved one",
                all(row["equal"] for row in rows),
            ),
            Check("no plan is past its deadline", all(row["in_time"] for row in rows)),
            *(
                [Check(f"at most {worst:.1f} times (limit {_MOST})", worst <= _MOST)]
                if size == Size()
                else []
            ),
        ],
    )


def _row(case: Case, stages: int, microbatches: int, folder: Path) -> dict[str, Any]:
    profile = profile_of(case) if stages == STAGES else repeated(stages, "scaled", case)
    solved = solve(profile, schedules.one_f_one_b(stages, microbatches))
    path = folder / f"{case.device}-{stages}-{microbatches}.npz"
    solved.save(path)
    default_plan(solved, 1.03 * solved.baseline_time_s)
    taken_s, plans, again_s = dict[str, float](), [], []
    makes = {
        "default_s": default_plan,
        "measured_s": lambda frontier, deadline_s: frontier.plan_for(deadline_s, on_time=None),
    }
    for deadline_s in [slowdown * solved.baseline_time_s for slowdown in _SLOWDOWNS]:
        for name, make in makes.items():
            loaded = Frontier.load(path)
            begin_s = time.process_time()
            plans.append((make, deadline_s, make(loaded, deadline_s)))
            taken_s[name] = taken_s.get(name, 0.0) + time.process_time() - begin_s
            again_s += seconds(lambda m=make, f=loaded, d=deadline_s: m(f, d), 3)  # type: ignore[misc]
    return {
        "profile": case.name,
        "stages": stages,
        "microbatches": microbatches,
        **{name: each_s / len(_SLOWDOWNS) for name, each_s in taken_s.items()},
        "ratio": taken_s["default_s"] / taken_s["measured_s"],
        "again_us": 1e6 * statistics.median(again_s),
        "equal": all(make(solved, deadline_s) == plan for make, deadline_s, plan in plans),
        "in_time": all(plan.time_s <= plan.deadline_s for _, _, plan in plans),
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
    """Return what compiling takes, and then the first frontier and plans of a process."""
    begin_s = _children_s()
    with tempfile.TemporaryDirectory() as target:
        for folder in compiling.folders():
            compiling.compile_into(folder, Path(target, folder.parent.name))
    compile_s = _children_s() - begin_s
    done = subprocess.run(
        [sys.executable, "-c", _COMPILED, str(path), repr(1.02 * baseline_s)],
        capture_output=True,
        text=True,
        check=True,
    )
    taken_s = [compile_s, *json.loads(done.stdout)]
    return dict(zip(("compile_s", "solve_s", "plan_s", "budget_s"), taken_s, strict=True)) | {
        "all_s": sum(taken_s)
    }


def _children_s() -> float:
    """Return the CPU time of the processes that this one has started, seconds."""
    times = os.times()
    return times.children_user + times.children_system
