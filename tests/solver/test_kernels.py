"""Kernels: Python and C agree on what they hand over, wrong arrays are refused, libraries are made
whole and of what is there now, and nothing is read or written beside an array.
"""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from house import ROOT
from strategies import job

from perseus_planner.base.errors import UsageError
from perseus_planner.solver import compiling, kernels
from perseus_planner.solver.clock_search import max_changes
from perseus_planner.solver.point_problem import PointProblem, compute_ends, point_problem

_CORE = ROOT / "perseus_planner/solver/c"
_STRUCT = re.compile(r"typedef struct \{\n((?:(?!typedef).)*?)\n\} (\w+);", re.DOTALL)
_FIELD = re.compile(r"^ {4}(\w+) (\w+);", re.MULTILINE)
_KERNEL = re.compile(r"^KERNEL (\w+) (\w+)\((.*?)\);", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(r"(const )?(\w+) (\*?)(\w+)")
_SCALARS = {"int": "int64_t", "float": "double", "bool": "bool", "None": "void"}
_ARRAYS = {"Integers": "int64_t", "Indices": "int32_t", "Floats": "double"}


def problem_of(seed: int = 1) -> PointProblem:
    return point_problem(job(seed, 2, 3, 4))


def in_c(annotation: str, is_changed: bool) -> tuple[str, str, str]:
    """An argument as C declares it: constant or not, type, and whether it is an address."""
    name = annotation.removesuffix(" | None")
    if name in _SCALARS:
        return "", _SCALARS[name], ""
    return "" if is_changed else "const ", _ARRAYS.get(name, name.lstrip("_")), "*"


@pytest.mark.needs("autopilot")
def test_python_and_c_declare_the_same():
    sources = [file for folder in compiling.folders() for file in sorted(folder.glob("*.h"))]
    text = "\n".join(file.read_text() for file in sources)
    structs = {name: _FIELD.findall(body) for body, name in _STRUCT.findall(text)}
    of_c = {
        name: (result, _ARGUMENT.findall(" ".join(arguments.split())))
        for result, name, arguments in _KERNEL.findall(text)
    }
    for module in ("clock_search", "drawn_replay", "mincut", "planner"):
        importlib.import_module(f"perseus_planner.solver.{module}")
    importlib.import_module("perseus_planner.extensions.autopilot.batches.solver")
    of_python = {}
    for function, changed in kernels.DECLARED:
        annotated = dict(function.__annotations__)
        result = _SCALARS[annotated.pop("return")]
        arguments = [(*in_c(text, name in changed), name) for name, text in annotated.items()]
        of_python[function.__name__.lstrip("_")] = (result, arguments)
        for argument in kernels.declared(function, changed).arguments:
            if isinstance(argument, kernels.Struct):
                wanted = [
                    (text if text in _ARRAYS else _SCALARS[text], name)
                    for name, text in kernels.fields(argument.kind)
                ]
                assert structs[argument.kind.__name__.lstrip("_")] == wanted
    assert of_python == of_c
    assert len(of_c) == 17


def refused(problem: PointProblem, *arguments: np.ndarray) -> str:
    with pytest.raises(TypeError) as error:
        compute_ends(problem, *arguments)
    return str(error.value)


def test_a_wrong_array_is_refused():
    problem = problem_of()
    count = len(problem.member)
    chosen = problem.point_start[problem.member]
    end_s = np.empty(count)
    assert compute_ends(problem, chosen, end_s) > 0.0
    wanted = "give an array of int64 in one piece"
    assert refused(problem, chosen.astype(np.int32), end_s) == (
        f"compute_ends: chosen: is an array of int32; {wanted}"
    )
    assert refused(problem, chosen.tolist(), end_s) == f"compute_ends: chosen: is list; {wanted}"
    assert refused(problem, np.repeat(chosen, 2)[::2], end_s) == (
        f"compute_ends: chosen: is an array with gaps, or column by column; {wanted}"
    )
    end_s.flags.writeable = False
    assert refused(problem, chosen, end_s) == (
        "compute_ends: end_s: is an array that may not be written on; give a copy"
    )
    single = problem._replace(time_s=problem.time_s.astype(np.float32))
    assert refused(single, chosen, np.empty(count)) == (
        "compute_ends: problem.time_s: is an array of float32; give an array of float64 in one "
        "piece"
    )
    assert refused(None, chosen, np.empty(count)) == (
        "compute_ends: problem: is NoneType; give PointProblem"
    )
    assert refused(problem, chosen) == "compute_ends: takes 3 arguments, not 2"
    with pytest.raises(TypeError):
        max_changes(chosen, chosen, 0.5, 1, 0)  # no whole number


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the sources of the core, with the library."""
    copy = tmp_path / "perseus_planner/solver/c"
    shutil.copytree(_CORE, copy)
    monkeypatch.setattr(compiling, "_CORE", copy)
    return copy


def test_a_library_is_loaded_only_if_it_was_made_of_what_is_there(folder: Path):
    assert kernels.library_of(folder).compute_ends
    kernels.library_of.cache_clear()
    with (folder / "polish.c").open("a") as file:
        file.write("/* changed */\n")
    remedy = "type `make compiled` in the folder of perseus-planner, or install it again with pip"
    with pytest.raises(UsageError) as error:
        kernels.library_of(folder)
    assert str(error.value) == (f"{folder}: the kernels were compiled from other sources; {remedy}")
    made = compiling.library(folder)
    made.write_text("no library")
    with pytest.raises(UsageError, match=rf"cannot be loaded: .*; {re.escape(remedy)}"):
        kernels.library_of(folder)
    assert compiling.compile_into(folder, folder) == made
    assert [*folder.glob("*.so")] == [made]
    assert kernels.library_of(folder).compute_ends
    kernels.library_of.cache_clear()
    made.unlink()
    with pytest.raises(UsageError) as error:
        kernels.library_of(folder)
    assert str(error.value) == f"{folder}: the kernels are not compiled; {remedy}"
    kernels.library_of.cache_clear()


def clone_of(folder: Path) -> Path:
    """A clone that holds what compiling needs, and no library."""
    for name in ("__init__.py", "base/__init__.py", "solver"):
        source = ROOT / "perseus_planner" / name
        target = folder / "perseus_planner" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "kernels-*.so")
            shutil.copytree(source, target, ignore=ignored)
        else:
            shutil.copy(source, target)
    return folder


def test_several_processes_may_compile_at_once(tmp_path: Path):
    clone = clone_of(tmp_path)
    command = [sys.executable, "-m", "perseus_planner.solver.compiling"]
    environment = {**os.environ, "PYTHONPATH": str(clone)}
    running = [
        subprocess.Popen(
            command, cwd=clone, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for _ in range(3)
    ]
    for process in running:
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0, printed
    made = [*clone.rglob("*.so"), *clone.rglob(".kernels-*")]
    assert [file.name for file in made] == [compiling.library(_CORE).name]
    assert ctypes.CDLL(str(made[0])).compute_ends
    again = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True)
    assert (again.returncode, again.stdout) == (0, "Everything is compiled already.\n")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine without a C compiler."""
    (tmp_path / "programs").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiling, "ZIG", "ziglang_absent")
    compiling.find_compiler.cache_clear()
    yield
    compiling.find_compiler.cache_clear()


def test_without_a_compiler_a_sentence_says_what_to_install(
    no_compiler: None, folder: Path, tmp_path: Path
):
    assert compiling.find_compiler() is None
    with pytest.raises(compiling.CompileError) as error:
        compiling.compile_into(folder, tmp_path / "target")
    assert str(error.value).startswith(
        "there is no C compiler that works (looked for $CC, cc, gcc, clang and the Python package "
    )
    assert "; install one, e.g. `apt install gcc libc6-dev` or `pip install " in str(error.value)


def test_a_compiler_that_cannot_compile_is_not_taken(
    no_compiler: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """As gcc without the headers of the C library."""
    program = tmp_path / "programs" / "cc"
    program.write_text("#!/bin/sh\necho 'fatal error: math.h: No such file' >&2\nexit 1\n")
    program.chmod(0o755)
    assert compiling.find_compiler() is None
    compiling.find_compiler.cache_clear()
    # One that is named is no choice of ours.
    monkeypatch.setenv("CC", "cc -m64")
    with pytest.raises(compiling.CompileError) as error:
        compiling.find_compiler()
    assert str(error.value).startswith("CC=cc -m64: cannot compile C: cc -m64 -fPIC -shared ")
    assert str(error.value).endswith("fatal error: math.h: No such file; mend or unset it")


#: Solves and plans in the ways that have kernels.
PROGRAM = """
import numpy as np
import perseus_planner
from strategies import any_schedule, extras, furnished, job, deadline_s
from perseus_planner.base.errors import PlannerError
from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, Law
from perseus_planner.extensions.autopilot.job import AutopilotJob
from perseus_planner.extensions.autopilot.planning import Costs, Searcher
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import solve_dag

change = ClockChange(0.0045, 0.0009)
for seed in range(4):
    frontier = solve_dag(job(seed, 1 + seed % 3, 2 + seed % 4, 4))
    for most in (None, 0, 3):
        try:
            frontier.plan_until(deadline_s(frontier, 0.4), max_changes=most, on_time=None)
        except PlannerError:
            continue
    schedule = any_schedule(seed, 2, 3)
    profile = furnished(seed, schedule, 4).profile
    dag = PipelineDag.from_schedule(profile, schedule, **extras(seed, schedule))
    modes = ("own", "other")[: 1 + seed % 2]
    searcher = Searcher(AutopilotJob(dag.iteration, (1400, 1200), 1, change, modes=modes), 3)
    ones = np.ones((len(searcher.keys), 2 * len(modes)))
    ones[:, 1] = 1.1
    costs = Costs(ones, 200.0 / ones**3, np.full(len(schedule.ranks), 80.0))
    searcher.polish(searcher.full(), costs, 100.0, 1)
    laws = {key: Law(0.0, (rows[0].time_s,)) for key, rows in profile.measurements.items()}
    planner = BatchPlanner(dag, laws, max_changes=2)
    work = np.linspace(0.5, 1.5, schedule.microbatches)[:, None]
    planner.best_order(work)
    plan = planner.plan(work, 1.1 * planner.full_clocks_s(work))
    planner.replay(plan, np.ones(len(dag.computations)), change, is_catching_up=True)
print(perseus_planner.__file__)
"""


@pytest.mark.soak
@pytest.mark.needs("autopilot")
def test_no_access_is_beside_an_array_and_nothing_is_undefined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """With AddressSanitizer and UndefinedBehaviorSanitizer, where the compiler has them."""
    compiler = shutil.which("gcc") or pytest.skip("no gcc")
    libraries = [
        subprocess.run(
            [compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True
        ).stdout.strip()
        for name in ("asan", "ubsan")
    ]
    if not all(map(os.path.isabs, libraries)):
        pytest.skip("gcc has no sanitizers")
    clone = tmp_path / "clone"
    ignored = shutil.ignore_patterns("__pycache__", "kernels-*.so")
    shutil.copytree(ROOT / "perseus_planner", clone / "perseus_planner", ignore=ignored)
    # Without -fwrapv, so that sums that overflow are told as well.
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-wrapv", "-g")
    for folder in compiling.folders():
        compiling.compile_into(folder, clone / folder.relative_to(ROOT), *checks)
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=clone,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(clone), str(ROOT / "tests/support")]),
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0",  # Python ends without giving back what it has
            "PYTHONMALLOC": "malloc",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (ran.returncode, ran.stdout) == (0, f"{clone}/perseus_planner/__init__.py\n"), (
        ran.stderr[-3000:]
    )


def test_threads_may_call_a_kernel_for_the_first_time_at_once(monkeypatch: pytest.MonkeyPatch):
    problem = problem_of()
    count = len(problem.member)
    chosen = problem.point_start[problem.member]
    makespan_s = compute_ends(problem, chosen, np.empty(count))
    monkeypatch.setattr(kernels, "DECLARED", [])
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            for _ in range(40):
                never_called = kernels.kernel("end_s")(inspect.unwrap(compute_ends))
                together = threading.Barrier(8)

                def called(door=never_called, together=together) -> float:
                    together.wait()
                    return door(problem, chosen, np.empty(count))

                made = [pool.submit(called) for _ in range(8)]
                assert [each.result() for each in made] == [makespan_s] * 8
    finally:
        sys.setswitchinterval(interval_s)
