"""The commands say what the library says, as text and as JSON, and refuse bad input in one line."""

from __future__ import annotations

import io
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from commands import done, loaded, run
from fake_nvml import StandIn
from http_stand_in import stand_in
from inference_cases import PROFILE as INFERENCE
from inference_cases import RATES, steady, write_trace
from made_runs import write_run
from made_traces import Made
from service_answers import api
from strategies import smooth_profile

import perseus_planner
from perseus_planner import Frontier, Plan, Profile, schedules
from perseus_planner.cli import console, main
from perseus_planner.profiler import simulated_pipeline
from perseus_planner.views.frontier import frontier_text, summarize_frontier
from perseus_planner.views.plan import plan_text, summarize_plan, summarize_timeline, timeline_text

SCRIPT = Path(sys.executable).with_name("planner")
PLANNER = (
    [str(SCRIPT)]
    if SCRIPT.exists()
    else [sys.executable, "-c", "from perseus_planner.cli import main; main()"]
)
SOLVE = "solve profile.yaml --schedule 1f1b --microbatches 3 -o frontier.npz"
CSV = """stage,instruction,frequency,time,energy
0,forward,1400,1.0,300
0,forward,1000,1.25,250
0,backward,1400,2.0,600
0,backward,1000,2.5,500
1,forward,1400,1.25,375
1,forward,1000,1.5,320
1,backward,1400,2.5,750
1,backward,1000,3.0,640
"""
YAML = """format: perseus-planner/profile
version: 1
measurements: profile.csv
blocking_power_w: 100.0
gpu: test GPU
origin: measured
"""
JOB = """format: perseus-planner/job
version: 1
profile: profile.yaml
schedule: 1f1b
microbatches: 16
"""
TRANSFORMER = """format: perseus-planner/transformer
version: 1
layers: 24
hidden: 2048
heads: 16
vocabulary: 50304
sequence: 2048
"""


@pytest.fixture
def work(folder: Path) -> Path:
    """A working folder with a profile."""
    (folder / "profile.csv").write_text(CSV)
    (folder / "profile.yaml").write_text(YAML)
    return folder


@pytest.fixture
def frontier(work: Path) -> Frontier:
    """What `planner solve` made of it, as frontier.npz."""
    done(SOLVE)
    return Frontier.load(work / "frontier.npz")


def test_help_loads_nothing_heavy(tmp_path: Path):
    heavy = ("matplotlib", "networkx", "numpy", "rich", "scipy", "yaml")
    code = f"""
import sys
from perseus_planner.cli import main
try:
    main(["--help"])
finally:
    print(sorted(set({heavy}) & set(sys.modules)), file=sys.stderr)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stderr) == (0, "[]\n")
    assert "Usage:" in result.stdout


@pytest.mark.parametrize(("command", "threads"), [("solve", "1"), ("run", None)])
def test_matrices_have_one_thread_but_not_in_programs_that_are_run(
    command: str, threads: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "environ", {**os.environ})
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    done(f"{command} --help")
    assert os.environ.get("OPENBLAS_NUM_THREADS") == threads


@pytest.mark.parametrize("name", [None, *main.commands])
def test_help_describes_every_option_and_ends_with_an_example(name: str | None):
    command = main if name is None else main.commands[name]
    assert [
        option.name
        for option in command.get_params(click.Context(command))
        if isinstance(option, click.Option) and not option.help
    ] == []
    text = done("--help" if name is None else f"{name} --help")
    assert command.epilog is not None
    assert text.endswith(command.epilog.replace("\b\n", "  ").replace("\n", "\n  ") + "\n")


def test_the_examples_of_all_helps_work_in_order(
    work: Path, nvml: StandIn, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANNER_STATE_DIR", str(work / "state"))
    monkeypatch.setattr(console, "_LINE_S", math.inf)  # a slow machine says how far it is
    for name, text in {
        "measured.csv": CSV,
        "one.csv": CSV,
        "measured.yaml": YAML.replace("profile.csv", "one.csv"),
        "job.yaml": JOB,
        "mine.yaml": TRANSFORMER,
        "system.yaml": "format: perseus-planner/system\nversion: 1\ngpu: a100-sxm\n",
        "stragglers.csv": "start,end,slowdown,pipeline,stage\n60,600,1.2,3,\n",
        "inference.csv": INFERENCE,
        "rates.csv": RATES,
        "budget.csv": "start,power\n2026-01-01T00:00Z,40kW\n",
    }.items():
        (work / name).write_text(text)
    write_trace(work / "trace.csv", steady(60))
    Made(schedules.one_f_one_b(2, 4), (0.02, 0.03)).write(work, zipped=True)
    silent = [
        "show",
        "doctor",
        "reset",
        "straggler",
        "status",
        "budget",
    ]  # they write no file
    examples = [
        (each, line)
        for each in (main, *main.commands.values())
        for line in str(each.epilog).splitlines()
    ]
    with stand_in(api) as service:
        monkeypatch.setenv("PLANNER_SERVICE", service.address)
        for command, line in examples:
            # Those do not end, or run another program; kernels are measured on GPUs.
            skipped = command.name in ("serve", "run", "measure") or {"--watch", "--kernels"} & {
                *line.split()
            }
            if line.startswith("  planner ") and not skipped:
                for run in re.findall(r"\brun(?:-\d)?\b", line):
                    write_run(work / run, Plan.load("plan.yaml"), 3)
                if "lengths.csv" in line:
                    microbatches = Frontier.load(work / "frontier.npz").schedule.microbatches
                    rows = (f"0,{m % 2},{m // 2},{100 + m}\n" for m in range(2 * microbatches))
                    text = "step,pipeline,microbatch,length\n" + "".join(rows)
                    (work / "lengths.csv").write_text(text)
                # An hour of a simulated GPU takes ten seconds of this CPU.
                line = line.replace("--minutes 60", "--minutes 6")
                text = done(line.strip().removeprefix("planner "))
                is_silent = command.name in silent or "show" in line or "--lengths" in line
                assert "Wrote" in text or is_silent
            elif "torchrun" in line and command.name not in (
                "run",
                "measure",
            ):  # the examples are what runs that
                assert line.partition(" -m perseus_planner ")[2].split()[0] in main.commands


def test_the_version_is_the_package_s():
    assert done("--version") == f"planner {perseus_planner.__version__}\n"


@pytest.mark.parametrize(
    "command", [PLANNER, [sys.executable, "-m", "perseus_planner", "--local_rank=1"]]
)
def test_the_installed_command_and_the_module_answer_where_a_launcher_adds_a_rank(
    command: list[str], tmp_path: Path
):
    result = subprocess.run(
        [*command, "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"planner {perseus_planner.__version__}\n"


def test_profile_says_that_it_is_simulated_and_what_it_wrote(folder: Path):
    text = done("profile --gpu simulated:a100-sxm --stages 2 -o profile.yaml")
    assert text.startswith(
        "Profile of 2 stages, simulated a100-sxm (simulated: no GPU was touched); blocking power "
    )
    assert text.endswith("\nWrote profile.yaml\nWrote profile.csv\n")
    assert Profile.load("profile.yaml").origin == "simulated"


def test_profile_as_json_holds_the_ends_of_every_curve(folder: Path):
    found = loaded("profile --gpu simulated:a100-sxm?seed=7 --stages 2 -o profile.yaml")
    profile = Profile.load("profile.yaml")
    assert [
        found["context"][key] for key in ("origin", "stages", "blocking_power_w", "profile_digest")
    ] == ["simulated", 2, profile.blocking_power_w, profile.digest]
    assert found["files"] == ["profile.yaml", "profile.csv"]
    rows = profile.measurements[1, "B"]
    assert found["computations"][-1] == {
        "stage": 1,
        "instruction": "backward",
        "clocks": len(rows),
        "highest": json.loads(json.dumps(asdict(rows[0]))),
        "lowest": json.loads(json.dumps(asdict(rows[-1]))),
        **{
            name: found["computations"][-1][name]
            for name in ("time_error", "energy_error", "throttled")
        },
    }


def test_solve_as_json_holds_what_the_frontier_file_holds(work: Path):
    found = loaded(SOLVE)
    frontier = Frontier.load(work / "frontier.npz")
    for name in [
        "baseline_time_s",
        "baseline_energy_j",
        "min_time_s",
        "least_energy_time_s",
        "max_time_s",
    ]:
        assert found[name] == getattr(frontier, name)
    for point in found["points"]:
        assert point["energy_j"] == frontier.bound_j(point["time_s"])
        assert point["saved_j"] == frontier.baseline_energy_j - point["energy_j"]
    times_s = [point["time_s"] for point in found["points"]]
    assert times_s == sorted(times_s)
    assert (times_s[0], times_s[-1]) == (frontier.min_time_s, frontier.max_time_s)
    assert (found["context"]["origin"], found["context"]["gpu"]) == ("measured", "test GPU")
    assert found["files"] == ["frontier.npz"]


def test_a_csv_is_read_with_the_blocking_power_beside_it_and_never_called_measured(work: Path):
    csv = "profile.csv --blocking-power 0.1kW --schedule 1f1b --microbatches 3"
    said = [
        done(f"solve {csv} -o of-csv.npz"),
        done("plan of-csv.npz --slowdown 1.05 -o of-csv.yaml"),
    ]
    done("report of-csv.yaml -o of-csv.html")
    assert Frontier.load("of-csv.npz").profile.blocking_power_w == 100.0
    for text in (*said, Path("of-csv.html").read_text()):
        assert "profile of unknown origin" in text
        assert "measured profile" not in text


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("--deadline 16.5s", lambda frontier: frontier.plan_for(16.5)),
        ("--deadline 16500ms", lambda frontier: frontier.plan_for(16.5)),
        ("--slowdown 1.0", lambda frontier: frontier.plan_for(frontier.baseline_time_s)),
        ("--slowdown 1.05x", lambda frontier: frontier.plan_for(1.05 * frontier.baseline_time_s)),
        ("--straggler-time 0.3min", lambda frontier: frontier.plan_beside_straggler(18.0)),
        ("--least-energy", lambda frontier: frontier.plan_for_least_energy()),
        ("--power-budget 0.4kW", lambda frontier: frontier.plan_within_power(400.0)),
    ],
)
def test_plan_writes_the_library_s_plan_for_each_target(
    frontier: Frontier, target: str, wanted: Callable[[Frontier], Plan]
):
    found = loaded(f"plan frontier.npz {target} -o plan.yaml")
    plan = Plan.load("plan.yaml")
    assert plan == wanted(frontier)
    assert found["context"]["origin"] == plan.origin
    for name in [
        "deadline_s",
        "time_s",
        "energy_j",
        "bound_j",
        "baseline_time_s",
        "baseline_energy_j",
    ]:
        assert found[name] == getattr(plan, name)
    assert found["time_ratio"] == plan.time_s / frontier.baseline_time_s
    assert found["saved_j"] == frontier.baseline_energy_j - plan.energy_j
    assert sum(rank["energy_j"] for rank in found["per_rank"]) == pytest.approx(
        plan.energy_j, rel=1e-12
    )


def test_beside_a_straggler_both_wait_for_it(frontier: Frontier):
    found = loaded("plan frontier.npz --straggler-time 30s -o plan.yaml")
    plan = Plan.load("plan.yaml")
    gpus, blocking_w = 2, 100.0
    waiting_j = gpus * blocking_w * (30.0 - plan.time_s)
    baseline_j = plan.baseline_energy_j + gpus * blocking_w * (30.0 - plan.baseline_time_s)
    assert found["beside_straggler"] == {
        "time_s": 30.0,
        "energy_j": plan.energy_j + waiting_j,
        "baseline": "all clocks at maximum, both waiting for a straggler of 30 s",
        "baseline_time_s": 30.0,
        "baseline_energy_j": baseline_j,
        "time_ratio": 1.0,
        "saved_j": baseline_j - (plan.energy_j + waiting_j),
        "saved_share": (baseline_j - (plan.energy_j + waiting_j)) / baseline_j,
    }
    text = done("plan frontier.npz --straggler-time 30s -o plan.yaml")
    assert "\nBeside a straggler of 30 s it saves " in text


def test_show_tells_a_frontier_from_a_plan_by_content(frontier: Frontier, work: Path):
    done("plan frontier.npz --slowdown 1 -o plan.yaml")
    (work / "frontier.npz").rename(work / "a.yaml")
    (work / "plan.yaml").rename(work / "b.npz")
    assert done("show a.yaml").startswith(
        "Frontier of 1f1b, 2 stages x 3 microbatches on test GPU; 12 computations"
    )
    assert done("show b.npz").startswith(
        "Plan for 1f1b, 2 stages x 3 microbatches on test GPU, within "
    )


def test_the_text_of_a_file_is_printed_when_it_is_written_and_shown(work: Path):
    text = done(SOLVE)
    solved = frontier_text(summarize_frontier(Frontier.load("frontier.npz")))
    assert text == f"{solved}\nWrote frontier.npz\n"
    text = done("plan frontier.npz --slowdown 1.05 --bound -o plan.yaml")
    plan = Plan.load("plan.yaml")
    assert plan.point_bound_j is not None
    assert text == f"{plan_text(summarize_plan(plan))}\nWrote plan.yaml\n"
    assert done("show plan.yaml") == f"{timeline_text(summarize_timeline(plan))}\n"


def test_show_as_json_places_every_computation(frontier: Frontier):
    done("plan frontier.npz --slowdown 1.05 -o plan.yaml")
    found, plan = loaded("show plan.yaml"), Plan.load("plan.yaml")
    assert {each["computation"]: each["clock_mhz"] for each in found["computations"]} == plan.clocks
    assert max(each["end_s"] for each in found["computations"]) == plan.time_s
    busy_j = sum(
        (each["end_s"] - each["start_s"]) * each["power_w"] for each in found["computations"]
    )
    waiting_s = 2 * plan.time_s - sum(
        each["end_s"] - each["start_s"] for each in found["computations"]
    )
    assert busy_j + 100.0 * waiting_s == pytest.approx(plan.energy_j, rel=1e-12)
    assert loaded("show frontier.npz")["points"] == loaded(SOLVE)["points"]


@pytest.mark.parametrize("file", ["frontier.npz", "plan.yaml"])
def test_show_draws_either(frontier: Frontier, work: Path, file: str):
    done("plan frontier.npz --slowdown 1.05 -o plan.yaml")
    assert done(f"show {file} --plot figure.png").endswith("\nWrote figure.png\n")
    assert (work / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert loaded(f"show {file} --plot figure.svg")["files"] == ["figure.svg"]


def test_a_fault_of_the_planner_exits_with_1_and_asks_for_a_report(
    work: Path, monkeypatch: pytest.MonkeyPatch
):
    def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(Profile, "load", faulty)
    result = run(SOLVE)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Traceback (most recent call last):\n")
    assert result.stderr.endswith(
        "\nRuntimeError: a bug\n"
        "Error: this is a bug in the planner, not an error in your input; please report it with "
        "the lines above\n"
    )


def test_an_interrupt_exits_with_130_and_leaves_nothing(
    frontier: Frontier, work: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    before = sorted(work.iterdir())
    monkeypatch.setattr("os.fsync", interrupted)  # the file is written, but not yet renamed
    result = run("plan frontier.npz --slowdown 1 -o plan.yaml")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")
    assert sorted(work.iterdir()) == before


def test_a_reader_that_goes_away_is_no_error(frontier: Frontier, work: Path):
    command = subprocess.Popen(
        [*PLANNER, "show", "frontier.npz"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert command.stdout is not None
    command.stdout.close()
    _, complaint = command.communicate(timeout=300)
    assert complaint == b""


@pytest.mark.parametrize("arguments", ["--help", "show frontier.npz", "show frontier.npz --json"])
def test_output_that_cannot_be_written_is_said_in_a_line(
    frontier: Frontier, work: Path, arguments: str
):
    with open("/dev/full", "w") as full:
        command = subprocess.run(
            [*PLANNER, *arguments.split()], stdout=full, stderr=subprocess.PIPE, timeout=300
        )
    assert command.stderr == b"Error: the output cannot be written: No space left on device\n"
    assert command.returncode == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(terminal: bool, monkeypatch: pytest.MonkeyPatch):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(sys, "stderr", stderr)
    with console.progress("Solving") as progress:
        if progress is not None:
            progress(1, 2)
    assert ("Solving" in stderr.getvalue()) is terminal


def test_progress_in_a_log_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(console, "_LINE_S", 20.0)
    now_s = iter((0.0, 1.0, 21.0, 21.0, 22.0))
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    with console.progress("Profiling") as progress:
        for done in range(1, 4):
            progress(done, 12)
    assert capsys.readouterr().err == "Profiling: 2 of 12\n"


def test_work_that_cannot_say_how_far_it_is_says_for_how_long(monkeypatch: pytest.MonkeyPatch):
    lines = []
    has_told = threading.Event()

    def echo(text: str, *, err: bool) -> None:
        lines.append((text, err))
        has_told.set()

    monkeypatch.setattr(console, "_LINE_S", 0.01)
    monkeypatch.setattr(console.click, "echo", echo)
    with console.progress("Planning"):
        assert has_told.wait(60)
    assert lines[0] == ("Planning: for 0 s so far", True)


def test_a_profile_unlike_the_training_is_written_and_exits_with_2(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    unlike = replace(smooth_profile(2), conditions={"unlike training": "stage 0: F took longer"})
    monkeypatch.setattr(simulated_pipeline, "profile_simulated", lambda *_, **__: unlike)
    result = run("profile --gpu simulated:a100-sxm --stages 2 -o profile.yaml")
    assert (result.exit_code, "Unlike training: stage 0: F took" in result.stdout) == (2, True)
    assert result.stderr.startswith("Error: profile.yaml: stage 0: F took longer, over 10% apart")
    assert Profile.load("profile.yaml").conditions == unlike.conditions


@pytest.mark.parametrize(
    ("stage", "what", "said"),
    [
        ("", "simulated_pipeline.measure_stage", ""),
        (
            "--stage steps:build",
            "build.profile_stages",
            "Interrupted; clocks are reset. Finished rows are kept: continue with --resume.\n",
        ),
    ],
)
def test_an_interrupted_profile_says_how_to_go_on_where_it_can(
    folder: Path, monkeypatch: pytest.MonkeyPatch, stage: str, what: str, said: str
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"perseus_planner.profiler.{what}", interrupted)
    result = run(f"profile --gpu simulated:a100-sxm --stages 2 -o profile.yaml {stage}")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", said)
    assert list(folder.iterdir()) == []
