"""The layout of the repository and of the installed package follows CONTRIBUTING.md."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from house import (
    CORE,
    EDGE,
    FOLDERS,
    LEAVES,
    LONG_FUNCTION,
    ROOMS,
    ROOT,
    Graph,
    Legibility,
    Source,
    circles,
    import_graph,
    imported,
    legibility_of,
    room_of,
    sources_of_product,
)
from strategies import smooth_profile

from perseus_planner import schedules, solve
from perseus_planner.base import extensions

HEAVY = ("deepspeed", "matplotlib", "pynvml", "scipy", "torch")


@cache
def graph_of_product() -> Graph:
    return import_graph(sources_of_product())


def sources(*folders: str) -> list[Path]:
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def python(code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a new interpreter, which finds modules in `cwd` first."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=300
    )


def printed(code: str, cwd: Path) -> object:
    result = python(code, cwd)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", ["profiler", "runtime"])
def test_a_generic_folder_is_refused_under_its_bare_name(name: str):
    result = python(f"import {name}", cwd=ROOT)
    assert result.returncode == 1
    expected = (
        f"'{name}' is not a package of its own; install perseus-planner, import "
        f"perseus_planner.{name}"
    )
    assert result.stderr.splitlines()[-1] == f"ImportError: {expected}"


@pytest.mark.parametrize("name", ["profiler", "runtime"])
def test_a_generic_folder_is_part_of_the_package(name: str, tmp_path: Path):
    # A source distribution holds a copy in place of the symbolic link.
    assert (ROOT / "perseus_planner" / name).resolve() == ROOT / name or not (
        ROOT / ".git"
    ).exists()
    assert python(f"import perseus_planner.{name}", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize("room", [*ROOMS, "profiler", "runtime"])
def test_a_folder_imports_only_folders_above_it(room: str):
    folder = room if room in FOLDERS else f"perseus_planner/{room}"
    names = [name for file in sources(folder) for name in imported(ast.parse(file.read_text()))]
    reached = {name.split(".")[1] for name in names if name.startswith("perseus_planner.")}
    below = {*ROOMS[ROOMS.index(room) + 1 :], *LEAVES} if room in ROOMS else {*LEAVES}
    assert reached & (below - {room}) == set()


def test_the_core_imports_no_extension():
    graph = graph_of_product()
    pairs = {(room_of(module), room_of(other)) for module in graph for other in graph[module]}
    assert {(room, other) for room, other in pairs if room in CORE and other in EDGE} == set()


def test_what_extensions_name_is_there():
    assert {f"extensions.{name}" for name in extensions.extensions()} == set(EDGE)
    offered = extensions.places("offers")
    assert offered.keys() == extensions.OFFERS.keys()
    for name, (extension, _) in extensions.OFFERS.items():
        assert offered[name].startswith(f"perseus_planner.extensions.{extension}.")
        assert extensions.load(offered[name])
    for kind in ("shown", "reported", "gpus", "schedules", "deciders"):
        assert all(map(extensions.load, extensions.places(kind).values()))


def test_no_files_import_each_other_in_a_circle():
    # Imports in functions and for type checkers are arrows, too.
    found = circles(graph_of_product())
    assert found == [], "\n".join(map(" ".join, found))


@pytest.mark.parametrize(
    "code",
    [
        "import perseus_planner",
        "from perseus_planner import Frontier, Job, Plan, Profile",
        "from perseus_planner.runtime import planner_runtime",
        "from perseus_planner import Client",
        'from perseus_planner.cli import main; main(["--help"], standalone_mode=False)',
        'from perseus_planner.cli import main; main(["show", "profile.yaml"], '
        "standalone_mode=False)",
        'from perseus_planner.cli import main; main(["show", "frontier.npz"], '
        "standalone_mode=False)",
        'from perseus_planner.cli import main; main(["show", "plan.yaml"], standalone_mode=False)',
        'from perseus_planner.cli import main; main(["status"])',
        'from perseus_planner.cli import main; main(["profile", "absent.yaml"])',
    ],
)
def test_commands_that_only_show_and_training_ranks_load_nothing_heavy(code: str, tmp_path: Path):
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 2))
    frontier.profile.save(tmp_path / "profile.yaml")
    frontier.save(tmp_path / "frontier.npz")
    frontier.plan_for(frontier.baseline_time_s).save(tmp_path / "plan.yaml")
    loaded = f"""
import json, sys
try:
    {code}
except SystemExit as end:
    assert end.code in (0, 2), end.code
print(json.dumps(sorted(set({HEAVY}) & set(sys.modules))))
"""
    result = python(loaded, tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_public_names_are_the_listed_ones_in_order(tmp_path: Path):
    code = """
import json
import perseus_planner as package
public = [name for name in dir(package) if not name.startswith("_")]
[getattr(package, name) for name in public]
print(json.dumps([package.__all__, sorted(public)]))
"""
    listed, public = printed(code, tmp_path)
    assert listed == public
    assert listed == [
        *(
            "Client",
            "Frontier",
            "Job",
            "Monitor",
            "PipelineDag",
            "Plan",
            "Profile",
            "Replicas",
            "Run",
        ),
        *("errors", "planner_runtime", "schedules", "solve", "solve_dag"),
    ]


def is_for_types(node: ast.stmt) -> bool:
    """Whether it is the block of imports that only type checkers read."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@pytest.mark.parametrize(
    "file",
    [*sources("perseus_planner/cli"), *ROOT.glob("perseus_planner/extensions/**/*command*.py")],
    ids=lambda file: f"{file.parent.name}-{file.stem}",
)
def test_a_command_loads_profiler_and_runtime_only_when_it_runs(file: Path):
    body = ast.parse(file.read_text())
    body.body = [
        node
        for node in body.body
        if not isinstance(node, ast.FunctionDef) and not is_for_types(node)
    ]
    reached = [
        name
        for name in imported(body)
        if name.startswith(("perseus_planner.profiler", "perseus_planner.runtime"))
    ]
    assert reached == []


def test_no_file_hides_a_module_that_cprofile_needs():
    assert [
        file for file in sources(*FOLDERS, "tests", "benchmarks") if file.name == "profile.py"
    ] == []


def test_the_tests_mirror_the_tree():
    folders = {file.parent.name for file in sources("tests")} - {
        "tests",
        "support",
        "project",
        "worlds",
    }
    assert folders <= {*ROOMS, *LEAVES, *(room.rpartition(".")[2] for room in EDGE)}
    assert [file for file in sources("tests") if file.name == "__init__.py"] == []


def test_what_is_slow_to_read_is_counted():
    long = "\n".join(f"    x{number} = {number}" for number in range(LONG_FUNCTION))
    text = f'''
# of the module, so it does not count
def short(self, a, b, c, d, e, f):
    """Six parameters, and a docstring of
    two lines.
    """
    # why the two belong together
    a, b = b, a
    c = d  # type: ignore[assignment]

def long(a, b, c, d, e, f, g):
{long}
'''
    counts = legibility_of(Source("made", text, list(ast.walk(ast.parse(text)))))
    assert counts == Legibility(counts.tokens, 1, 1, 1, 0, 1)
    assert counts.per_thousand(1) == f"{1000 / counts.tokens:.2f}"
