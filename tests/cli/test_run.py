"""`planner run` becomes the command, with the options in its environment."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest
from commands import refused, run
from strategies import smooth_profile

from perseus_planner import runtime, schedules, solve
from perseus_planner.cli.run import run as run_command
from perseus_planner.runtime.options import OptionKeywords, Options
from perseus_planner.runtime.unmodified.options import read_options, variable, write_options

STARTUP = str(Path(runtime.__file__).absolute().parent / "unmodified" / "startup")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    frontier = solve(smooth_profile(2), schedules.one_f_one_b(2, 2))
    frontier.plan_for(frontier.baseline_time_s).save(tmp_path / "plan.yaml")
    frontier.save(tmp_path / "frontier.npz")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for name in [each for each in os.environ if each.startswith("PLANNER_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], dict[str, str]]]:
    """The commands that replaced this process, and the variables that are new in their
    environments.
    """
    found = []

    def execute(file: str, words: tuple[str, ...], environment: dict[str, str]) -> None:
        assert file == words[0]
        found.append(
            (
                words,
                {key: value for key, value in environment.items() if os.environ.get(key) != value},
            )
        )
        raise click.exceptions.Exit(0)  # stands for the end of this process

    monkeypatch.setattr("os.execvpe", execute)
    return found


def run_to_the_end(command: str) -> str:
    """Return what a command prints until it becomes another."""
    result = run(command)
    assert result.exit_code == 0, result.output
    return result.output


def test_options_become_variables_with_whole_paths(became, folder: Path):
    run_to_the_end(
        "run --plan plan.yaml --record run --gpu zeusd --dry-run -- torchrun --plan x train.py"
    )
    assert became == [
        (
            ("torchrun", "--plan", "x", "train.py"),
            {
                "PLANNER_PLAN": f"{folder}/plan.yaml",
                "PLANNER_RECORD": f"{folder}/run",
                "PLANNER_GPU": "zeusd",
                "PLANNER_DRY_RUN": "1",
                "PYTHONPATH": STARTUP,
            },
        )
    ]


def test_variables_are_options_and_options_come_first(
    became, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    (folder / "other.yaml").write_text((folder / "plan.yaml").read_text())
    monkeypatch.setenv("PLANNER_PLAN", "other.yaml")
    monkeypatch.setenv("PLANNER_DRY_RUN", "0")
    monkeypatch.setenv("PLANNER_MAX_CHANGES", "4")
    for given, expected in (("", "other"), ("--plan plan.yaml", "plan")):
        run_to_the_end(f"run {given} torchrun train.py")
        environment = {**os.environ, **became.pop()[1]}
        assert read_options(environment) == {
            "plan": f"{folder}/{expected}.yaml",
            "dry_run": False,
            "max_changes": 4,
        }


def test_training_may_plan_itself(became, folder: Path):
    run_to_the_end("run --slowdown 1.05x --max-slowdown 0.002 --no-learn --state learnt.yaml true")
    options = {
        "slowdown": 1.05,
        "max_slowdown": 0.002,
        "learn": False,
        "state": f"{folder}/learnt.yaml",
    }
    assert read_options(became.pop()[1]) == options
    run_to_the_end("run --work lengths:work --no-learn --state learnt.yaml true")
    options = {"work": "lengths:work", "learn": False, "state": f"{folder}/learnt.yaml"}
    assert read_options(became.pop()[1]) == options
    run_to_the_end("run --learn true")
    assert read_options(became.pop()[1]) == {"learn": True}
    run_to_the_end("run true")
    assert read_options(became.pop()[1]) == {}


def test_options_are_read_as_they_were_written():
    options = {"plan": Path("/a/plan.yaml"), "dry_run": True, "max_changes": 0, "service": None}
    assert read_options(write_options(options)) == {
        "plan": "/a/plan.yaml",
        "dry_run": True,
        "max_changes": 0,
    }


def test_every_option_is_one_of_the_runtime_and_each_but_eight_is_an_option():
    arguments = {each.name for each in fields(Options)}
    scripts_only = {
        "max_changes_per_s",
        "on_straggling",
        "modes",
        "may_reorder",
        "log",
        "strict",
        "decider",
        "peers",
    }
    options = arguments - scripts_only
    parameters = run_command.get_params(click.Context(run_command))
    named = {each.name for each in parameters if "--help" not in each.opts}
    assert named - {"command"} == options
    given = {variable(name): "1" for name in arguments} | {"PLANNER_FOLLOW": "time"}
    assert {*read_options(given)} == options


def test_type_checkers_know_each_option_with_the_type_that_it_has():
    keywords = inspect.get_annotations(OptionKeywords)
    own = {*inspect.signature(runtime.planner_runtime).parameters} & {"plan", "decider"}
    for each in fields(Options):
        if each.name in own:
            continue
        declared = each.type
        if each.name == "modes":  # a script may give None too
            declared = f"{declared} | None"
        assert keywords.pop(each.name).__forward_arg__ == declared
    assert not keywords


def test_the_service_of_other_commands_is_not_that_of_the_job(
    became, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PLANNER_SERVICE", "http://localhost:8400")
    run_to_the_end("run --plan plan.yaml true")
    assert "service" not in read_options({**os.environ, **became.pop()[1]})
    run_to_the_end("run --plan plan.yaml --job a --frontier frontier.npz true")
    assert read_options({**os.environ, **became.pop()[1]})["service"] == "http://localhost:8400"


def test_other_modules_on_the_path_stay_behind_ours_which_comes_once(
    became, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", STARTUP, "/b"]))
    run_to_the_end("run --plan plan.yaml true")
    assert became[0][1]["PYTHONPATH"] == os.pathsep.join([STARTUP, "/a", "/b"])


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("python -I train.py", "-I"),
        ("/usr/bin/python3.11 -u -Es train.py", "-Es"),
        ("python -m package -E", None),
        ("python -c pass -S", None),
        ("python train.py -E", None),
        ("torchrun -S train.py", None),
    ],
)
def test_a_python_that_ignores_the_path_is_told_beforehand(command: str, flag: str | None, became):
    line = (
        f"planner: {command.split()[0]} {flag} ignores PYTHONPATH, so its training has no planner\n"
    )
    assert run_to_the_end(f"run --plan plan.yaml -- {command}") == ("" if flag is None else line)


def test_the_exit_code_is_that_of_the_command():
    script = "import sys; sys.exit(f'ended' if 'PLANNER_PLAN' in __import__('os').environ else 3)"
    command = [
        *["-m", "perseus_planner", "run", "--plan", "plan.yaml", "--"],
        sys.executable,
        "-c",
        script,
    ]
    result = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout, result.stderr) == (1, "", "ended\n")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "--plan plan.yaml -- no-such-command",
            "no-such-command: cannot be run: No such file or directory; write the command after "
            "`--`",
        ),
        (
            "--plan plan.yaml ./plan.yaml",
            "./plan.yaml: cannot be run: Permission denied; write the command after `--`",
        ),
        (
            "--plan plan.yaml ''",
            ": cannot be run: execve: argv first element cannot be empty; write the command after "
            "`--`",
        ),
        ("--plan absent.yaml true", "absent.yaml: no such file; check the path"),
        (
            "--plan plan.yaml --service http://localhost:8400 true",
            "--service http://localhost:8400: needs --job; give it, or leave out the service",
        ),
        (
            "--service http://localhost:8400 --job a --frontier frontier.npz true",
            "--frontier: is for --plan; without a plan the frontier is learnt, so leave it out",
        ),
        (
            "--work lengths:work --plan plan.yaml true",
            "work: clocks follow each batch, and not plan 'plan.yaml'; leave out one of them",
        ),
        (
            "--work lengths:work --state profile.yaml true",
            "work: what clocks cost is not learnt while they follow the batch; turn learn off, and "
            "give a profile as state",
        ),
        (
            "--slowdown 0.9 true",
            "slowdown: 0.9 is not a slowdown: give the longest iteration as a multiple of one at "
            "full clocks, such as 1 or more",
        ),
        (
            "--max-slowdown x true",
            "--max-slowdown: 'x' is not a share: give a number of 0 or more, such as 0.001",
        ),
        (
            "--plan plan.yaml --service http://localhost:8400 --job a true",
            "--service http://localhost:8400: needs --frontier; give it, or leave out the service",
        ),
    ],
)
def test_what_cannot_be_run_is_refused(command: str, message: str):
    assert refused(f"run {command}") == message


def test_a_switch_that_is_neither_on_nor_off_is_refused():
    with pytest.raises(
        Exception, match="PLANNER_DRY_RUN: 'perhaps' is neither on nor off; write 1 or 0"
    ):
        read_options({"PLANNER_DRY_RUN": "perhaps"})
