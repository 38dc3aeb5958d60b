"""Bad input on the command line: exit code 2, one line that says what to do, nothing printed,
nothing written.
"""

from __future__ import annotations

import re
import shlex
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import contents, done, refused

from perseus_planner import Profile, schedules, solve
from perseus_planner.cli import main
from perseus_planner.profiles.measurement import Measurement

PROFILE = "profile --gpu simulated:a100-sxm --stages 2 -o new.yaml"
SOLVE = "solve profile.yaml --schedule 1f1b --microbatches 3 -o new.npz"
PLAN = "plan frontier.npz -o new.yaml"
TO_REPORT = (
    "name a profile, a frontier, a plan, a job file, the folder of a run or a plan of inference "
    "pools"
)
NAME_ONE = "name a profile, a frontier, a plan, a job file or the folder of a run"
TARGETS = "--deadline, --slowdown, --straggler-time, --least-energy, --power-budget"

# A later option of the same name wins over the one in PROFILE, SOLVE or PLAN.
REFUSED = {
    f"{PROFILE} --gpu simulated:h100": (
        "GPU 'simulated:h100': there is no simulated GPU 'h100'; did you mean simulated:h100-sxm "
        "or simulated:h100-nvl?"
    ),
    f"{PROFILE} --gpu simulated:p4": (
        "GPU 'simulated:p4': there is no simulated GPU 'p4'; choose one of: simulated:v100, "
        "simulated:a100-pcie, simulated:a100-sxm, simulated:a40, simulated:l40s, "
        "simulated:h100-sxm, simulated:h200, simulated:b200, simulated:h100-nvl, simulated:h20, "
        "simulated:gb200, simulated:b300, simulated:gb300, simulated:mi300x"
    ),
    f"{PROFILE} --gpu nvml:0": (
        "the stages are missing; give --stage MODULE:FUNCTION, or profile a small GPT on a "
        "simulated GPU with --gpu simulated:a100-sxm"
    ),
    f"{PROFILE} --gpu simulated": (
        "the stages are missing; give --stage MODULE:FUNCTION, or profile a small GPT on a "
        "simulated GPU with --gpu simulated:a100-sxm"
    ),
    f"{PROFILE} --resume": "--resume needs a stage that can run; add --stage MODULE:FUNCTION",
    f"{PROFILE} --tensor-parallel 2": "--tensor-parallel needs a stage that can run; add --stage "
    "MODULE:FUNCTION",
    f"{PROFILE} --blocking-power 85": "--blocking-power needs a stage that can run; add --stage "
    "MODULE:FUNCTION",
    f"{PROFILE} --for plan.yaml": (
        "--for: joins rows to a profile, and new.yaml does not exist; name the profile that the "
        "plan was made from with --output"
    ),
    f"{PROFILE} --for plan.yaml --full": (
        "--for: says what is measured, and how; leave out --full"
    ),
    f"{PROFILE} --observe --control clock": "--observe does not set anything; leave out --control",
    f"{PROFILE} --full --minutes 5": (
        "minutes and saving_within choose what is measured; leave out --full and --observe (in "
        "Python full and control='observed')"
    ),
    f"{PROFILE} --observe --saving-within 1%": (
        "minutes and saving_within choose what is measured; leave out --full and --observe (in "
        "Python full and control='observed')"
    ),
    f"{PROFILE} --saving-within 0": (
        "--saving-within: '0' is not a share: write a percentage above 0% and up to 100%, such as "
        "0.3%"
    ),
    f"{PROFILE} --minutes 0": (
        "--minutes: '0' is not a time limit: write minutes above 0, or a number with s, m, h or d, "
        "such as 30m"
    ),
    "profile --gpu simulated:a100-sxm -o new.yaml": "the number of pipeline stages is missing; "
    "give --stages S",
    "profile --gpu simulated:a100-sxm --stages 2": "the file to write is missing; give --output "
    "FILE",
    "profile several.yaml": "the job has several profiles; give --output FILE",
    "profile nowhere.yaml": (
        "nowhere.yaml, key 'profile' absent/p.yaml: there is no folder absent; make it, or name "
        "another"
    ),
    f"{PROFILE} --stages 0": "stages: 0 is not a whole number of at least 1",
    f"{PROFILE} -o new.txt": "--output new.txt: must end in .yaml or .yml; rename it",
    f"{PROFILE} -o absent/new.yaml": (
        "--output absent/new.yaml: there is no folder absent; make it, or name another"
    ),
    SOLVE.replace("profile.yaml", "absent.yaml"): "absent.yaml: no such file; check the path",
    SOLVE.replace("profile.yaml", "profile.csv"): (
        "profile.csv: a CSV does not hold the blocking power, what a GPU draws while it waits; "
        "give it with --blocking-power W (in Python blocking_power_w=), or load profile.yaml, "
        "which holds it"
    ),
    f"{SOLVE} --microbatches 0": "microbatches: 0 is not a whole number of at least 1",
    f"{SOLVE} --stages 8": (
        "the profile has 2 stages and the schedule 8; profile the stages of this schedule, or make "
        "the schedule for 2"
    ),
    f"{SOLVE} --stages 0": "stages: 0 is not a whole number of at least 1",
    f"{SOLVE} --blocking-power low": "--blocking-power: 'low' is not the power of one GPU that "
    "waits: write watts of 0 to 5000, such as 83.64",
    f"{SOLVE} --blocking-power=-1": "--blocking-power: '-1' is not the power of one GPU that "
    "waits: write watts of 0 to 5000, such as 83.64",
    f"{SOLVE} -o absent/new.npz": "--output absent/new.npz: there is no folder absent; make it, or "
    "name another",
    f"{SOLVE} -o folder": "--output folder: is a folder; name a file in it",
    f"{SOLVE} -o profile.yaml": "--output profile.yaml: must end in .npz; rename it",
    PLAN: f"give exactly one of {TARGETS}; got none",
    f"{PLAN} --json": f"give exactly one of {TARGETS}; got none",
    f"{PLAN} --slowdown 1 --deadline 9s": f"give exactly one of {TARGETS}; got --deadline and "
    "--slowdown",
    f"{PLAN} --least-energy --slowdown 1": f"give exactly one of {TARGETS}; got --slowdown and "
    "--least-energy",
    f"{PLAN} --deadline 9parsecs": (
        "--deadline: '9parsecs' is not a duration: write seconds above 0, or "
        "a number with us, ms, s, m, h or d, such as 2.95s"
    ),
    f"{PLAN} --straggler-time 9y": (
        "--straggler-time: '9y' is not a duration: write seconds above 0, or "
        "a number with us, ms, s, m, h or d, such as 2.95s"
    ),
    f"{PLAN} --slowdown 5%": (
        "--slowdown: '5%' is not a slowdown: write a number above 0, where 1 is as fast as all "
        "clocks at maximum, such as 1.05"
    ),
    f"{PLAN} --power-budget 5GW": (
        "--power-budget: '5GW' is not a power: write watts above 0, or a number with W, kW or MW, "
        "such as 5kW"
    ),
    f"{PLAN} --deadline 9s": "no plan finishes an iteration within 9 s: the fastest takes 15 s; "
    "ask for that or more",
    f"{PLAN} --slowdown 0.6": "--slowdown 0.6: no plan is that fast: the fastest takes 1.0000x the "
    "time of all clocks at maximum; ask for that or more",
    f"{PLAN} --least-energy -o frontier.npz": "--output frontier.npz: must end in .yaml or .yml; "
    "rename it",
    f"{PLAN} --least-energy -o absent/new.yaml": (
        "--output absent/new.yaml: there is no folder absent; make it, or name another"
    ),
    "plan profile.yaml --least-energy -o new.yaml": ("profile.yaml: is a profile; name a frontier"),
    "solve frontier.npz -o new.npz": "frontier.npz: is a frontier; name a profile or a job file",
    "run --record /proc/self/run -- true": "--record /proc/self/run: /proc/self cannot be written "
    "to; change its permissions, or name another",
    "run --state /proc/self/a.yaml -- true": "--state /proc/self/a.yaml: /proc/self cannot be "
    "written to; change its permissions, or name another",
    "doctor --acceptance --into /proc/self/a": "--into /proc/self/a: /proc/self cannot be written "
    "to; change its permissions, or name another",
    "report lengths.csv -o new.html": f"lengths.csv: is a table of microbatches; {TO_REPORT}",
    "show events.csv": f"events.csv: is a table of straggler events; {NAME_ONE}",
    "show budget.csv": f"budget.csv: is a schedule of power budgets; {NAME_ONE}",
    "report serving.csv -o new.html": f"serving.csv: is an inference profile; {TO_REPORT}",
    "report rates.csv -o new.html": f"rates.csv: is a table of request rates; {TO_REPORT}",
    "solve trace.csv -o new.npz": "trace.csv: is a trace of requests; name a profile or a job file",
    "profile.yaml": "profile.yaml: is a profile; name a job file",
    "run --record profile.yaml -- true": "--record profile.yaml: profile.yaml is a file; name a "
    "folder",
    "run --record profile.yaml/run -- true": "--record profile.yaml/run: profile.yaml is a file; "
    "name a folder",
    "run --frontier frontier.npz -- true": "--frontier: is for --service; give both, or leave out "
    "the frontier",
    "run --gpu foo -- true": "GPU 'foo': there is no back-end 'foo'; choose one of: nvml, cuda, "
    "zeusd, command, amd, dry-run, memory, simulated, emulated",
    "run --frontier profile.yaml -- true": "profile.yaml: is a profile; name a frontier",
    "explore gpt3-1.3b --gpus 8 --system profile.yaml": "profile.yaml: is a profile; name a system "
    "file",
    "calibrate frontier.npz profile.yaml": "frontier.npz: is a frontier; name a profile or a job "
    "file",
    "solve profile.yaml --schedule 1f1b --microbatches 4 -o /proc/self/new.npz": (
        "--output /proc/self/new.npz: the folder /proc/self cannot be written to; change its "
        "permissions, or name another"
    ),
    "plan absent.npz --least-energy -o new.yaml": "absent.npz: no such file; check the path",
    "show absent.yaml": "absent.yaml: no such file; check the path",
    "show folder": "folder: is empty; try again when an iteration by a plan has ended",
    "show profile.yaml --perfetto a.json": "--perfetto a.json: profile.yaml has no timeline; name "
    "a plan or a run",
    "show profile.yaml --figure points": "--figure: chooses what --plot draws; add --plot FIGURE",
    "show frontier.npz --plot figure.gif": (
        "--plot figure.gif: figures are written as .png, .svg, .pdf; end the name with one of them"
    ),
    "show frontier.npz --plot absent/figure.png": (
        "--plot absent/figure.png: there is no folder absent; make it, or name another"
    ),
}

TABLES = {
    "events.csv": "start,end,slowdown,pipeline,stage",
    "budget.csv": "start,carbon",
    "serving.csv": "input,output,tensor_degree,clock_mhz,tokens_per_s,energy_j,idle_w",
    "lengths.csv": "step,pipeline,microbatch,length",
    "rates.csv": "input,output,requests_per_s,tokens_per_s",
    "trace.csv": "TIMESTAMP,ContextTokens,GeneratedTokens",
}

# What click itself refuses; above these lines it says how to get help.
MISUSED = {
    f"{SOLVE} --microbatches many": "Invalid value for '--microbatches': 'many' is not a valid "
    "integer.",
    "plan frontier.npz --least-energy": "Missing option '--output' / '-o'.",
    "frobnicate": "No such command 'frobnicate'.",
}


@pytest.fixture
def work(folder: Path) -> Path:
    """A working folder with a profile, a frontier and a folder."""
    rows = (Measurement(1400, 2.5, 750.0), Measurement(1000, 3.0, 600.0))
    profile = Profile(
        {(stage, kind): rows for stage in range(2) for kind in "FB"}, blocking_power_w=100.0
    )
    profile.save("profile.yaml")
    solve(profile, schedules.one_f_one_b(stages=2, microbatches=2)).save("frontier.npz")
    job = "format: perseus-planner/job\nversion: 1\nstages: 2\nprofile: "
    (folder / "several.yaml").write_text(f"{job}[a.yaml, b.yaml]\n")
    (folder / "nowhere.yaml").write_text(f"{job}absent/p.yaml\n")
    for name, header in TABLES.items():
        (folder / name).write_text(f"# a comment\n\n{header}\n")
    (folder / "folder").mkdir()
    return folder


@pytest.mark.needs("explore", "lab", "service")
@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
def test_the_planner_refuses_in_one_line(work: Path, command: str, message: str):
    assert refused(command) == message


@pytest.mark.parametrize(("command", "message"), MISUSED.items(), ids=MISUSED)
def test_misuse_is_refused_with_a_hint_at_the_help(work: Path, command: str, message: str):
    before = contents()
    result = CliRunner().invoke(main, shlex.split(command), prog_name="planner")
    assert (result.exit_code, result.stdout) == (2, "")
    usage, hint, _, error = result.stderr.splitlines()
    assert usage.startswith("Usage: planner ")
    assert hint.startswith("Try 'planner ")
    assert error == f"Error: {message}"
    assert contents() == before


def test_a_power_budget_that_is_too_low_is_refused_with_one_that_is_not(work: Path):
    named = re.fullmatch(
        r"no plan draws 1 W or less on average: the most frugal draws (\S+) W; ask for that or "
        "more",
        refused(f"{PLAN} --power-budget 1W"),
    )
    assert named is not None
    done(f"{PLAN} --power-budget {named[1]}")


def test_a_frontier_that_unpacks_to_more_than_fits_in_memory_is_refused_unread(work: Path):
    with (
        zipfile.ZipFile(work / "frontier.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("times.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(500):
            member.write(bytes(10**6))
    assert (work / "frontier.npz").stat().st_size < 10**6
    for command in (f"{PLAN} --least-energy", "show frontier.npz"):
        assert refused(command) == (
            "frontier.npz: unpacks to 500000000 bytes, more than 400000000; is it a frontier?"
        )


@pytest.mark.needs("lab")
def test_more_gpus_than_there_are_anywhere_are_refused(work: Path):
    assert refused("simulate frontier.npz --pipelines 1000000000").startswith(
        "pipelines: 1,000,000,000 of "
    )


@pytest.mark.needs("explore")
def test_a_config_that_nests_too_deeply_is_refused(work: Path):
    (work / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    assert refused("explore config.json --gpus 8") == (
        "config.json: nests lists or objects too deeply; give the config.json of a model"
    )


def test_a_damaged_frontier_is_refused(work: Path):
    whole = (work / "frontier.npz").read_bytes()
    (work / "frontier.npz").write_bytes(whole[: len(whole) // 2])
    for command in (f"{PLAN} --least-energy", "show frontier.npz"):
        message = refused(command)
        assert message.startswith("frontier.npz: is damaged or cut short")
        assert message.endswith("; make it again with `planner solve`")
