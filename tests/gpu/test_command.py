"""The back-end `command:`; test_contract.py tests what all back-ends have in common."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import UUIDS, nvml, nvml_library  # noqa: F401  # fixtures
from nvml_exercise import refusal_of

from perseus_planner.base.errors import GpuError, GpuLost, GpuNotPermitted, GpuNotSupported
from perseus_planner.gpu import command as command_module
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.command import CommandTemplate, read_template

SET, RESET, POWER = "PLANNER_SET_CLOCK", "PLANNER_RESET_CLOCK", "PLANNER_SET_POWER"


def script(body: str) -> str:
    """Return a command that runs `body` in Python with its arguments in `sys.argv[1:]`."""
    return f"{shlex.quote(sys.executable)} -c {shlex.quote('import os, sys, time; ' + body)}"


def run(command: str, **values: str) -> None:
    CommandTemplate(SET, tuple(shlex.split(command))).run(**values)


def failure(command: str, kind: type[GpuError]) -> str:
    """Run a command that fails with an error of exactly that class, and return its text."""
    with pytest.raises(GpuError) as error:
        run(command)
    assert type(error.value) is kind
    return str(error.value)


# --- templates


@pytest.fixture
def recorded(nvml, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:  # noqa: F811
    """Return the file to which each command appends its arguments."""
    write = (
        script("open('words', 'a').write(repr(sys.argv[1:]) + chr(10))")
        .replace("{", "{{")
        .replace("}", "}}")
    )
    monkeypatch.setenv(
        SET, f"{write} 'set a clock' {{gpu}} {{uuid}} {{min}}-{{max}} '{{{{}}}} $HOME; * `'"
    )
    monkeypatch.setenv(RESET, f"{write} reset {{gpu}}")
    monkeypatch.setenv(POWER, f"{write} power {{watts}}W")
    return folder / "words"


def test_fields_are_filled_word_by_word_and_no_shell_sees_them(recorded: Path):
    with open_gpu("command:1") as gpu:
        gpu.set_clock_mhz(1200)
        gpu.reset_clocks()
        for limit_w in (300.0, 287.125):
            with pytest.raises(
                GpuError, match=f"its power limit was set to {limit_w:g} W, and is 700 W"
            ):
                gpu.set_power_limit_w(limit_w)
    assert recorded.read_text().splitlines() == [
        f"['set a clock', '1', '{UUIDS[1]}', '1200-1200', '{{}} $HOME; * `']",
        "['reset', '1']",
        "['power', '300W']",
        "['power', '287.125W']",
    ]


def test_a_value_with_spaces_stays_one_word(folder: Path):
    run(
        script("open('words', 'w').write(repr(sys.argv[1:]))") + " {uuid}",
        uuid="GPU-1; rm -rf / {max}",
    )
    assert (folder / "words").read_text() == "['GPU-1; rm -rf / {max}']"


def test_the_power_limit_goes_back_to_the_default_by_the_same_command(recorded: Path, nvml):  # noqa: F811
    with open_gpu("command:0") as gpu:
        gpu.reset_power_limit()
        assert not recorded.exists()  # NVML says that the default is in force
        nvml.set("limit_mw", "100000 700000 650000", gpu=0)
        with open_gpu("nvml:0") as direct:
            direct.set_power_limit_w(300.0)
        with pytest.raises(GpuError, match="its power limit was set to 650 W, and is 300 W"):
            gpu.reset_power_limit()
    assert recorded.read_text() == "['power', '650W']\n"


def test_the_defaults_are_those_of_nvidia_smi(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(SET, raising=False)
    found = read_template(SET, "sudo -n nvidia-smi -i {uuid} -lgc {min},{max}", "min", "max")
    assert found.words == ("sudo", "-n", "nvidia-smi", "-i", "{uuid}", "-lgc", "{min},{max}")


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        (
            SET,
            "",
            f"{SET} is empty; unset it to use `sudo -n nvidia-smi -i {{uuid}} -lgc "
            f"{{min}},{{max}}`",
        ),
        (RESET, "  ", f"{RESET} is empty; unset it to use `sudo -n nvidia-smi -i {{uuid}} -rgc`"),
        (
            SET,
            "smi {max",
            (
                f"{SET} is 'smi {{max', which is not a command: expected '}}' before end of "
                "string; quote it as for a shell"
            ),
        ),
        (
            SET,
            "smi '{max}",
            f"""{SET} is "smi '{{max}}", which is not a command: No closing quotation; quote it as for a shell""",  # noqa: E501
        ),
        *(
            (
                SET,
                f"smi {{{field}}} {{max}}",
                f"{SET} is 'smi {{{field}}} {{max}}' with the unknown field {{{field}}}; choose "
                f"from {{gpu}}, {{uuid}}, {{min}}, {{max}}",
            )
            for field in (
                "",
                "0",
                "watts",
                "max.real",
                "max[0]",
                "max!r",
                "max:>9",
                "max!r:>9",
                "max.__class__",
            )
        ),
        (
            RESET,
            "smi {max}",
            f"{RESET} is 'smi {{max}}' with the unknown field {{max}}; choose from {{gpu}}, "
            f"{{uuid}}",
        ),
        (
            POWER,
            "smi {min}",
            f"{POWER} is 'smi {{min}}' with the unknown field {{min}}; choose from {{gpu}}, "
            f"{{uuid}}, {{watts}}",
        ),
        (
            SET,
            "smi -i {gpu} -lgc 900",
            (
                f"{SET} is 'smi -i {{gpu}} -lgc 900', which does not contain the value to set; "
                f"put {{min}} or {{max}} into it"
            ),
        ),
        (
            POWER,
            "smi {{watts}}",
            f"{POWER} is 'smi {{{{watts}}}}', which does not contain the value to set; put "
            f"{{watts}} into it",
        ),
    ],
)
def test_a_template_that_cannot_be_one_is_refused_at_opening(
    nvml,  # noqa: F811
    monkeypatch,
    variable,
    text,
    said,
):
    monkeypatch.setenv(variable, text)
    assert refusal_of("command:0") == said


# --- commands that fail


def test_a_command_that_is_not_there():
    assert failure("no-such-command -x", GpuError) == (
        "'no-such-command' cannot be run (No such file or directory); install it, or set "
        "PLANNER_SET_CLOCK to another command"
    )


def test_a_file_that_cannot_be_executed(folder: Path):
    (folder / "data").write_text("")
    assert failure("./data", GpuError) == (
        "'./data' cannot be run (Permission denied); install it, or set PLANNER_SET_CLOCK to "
        "another command"
    )


@pytest.mark.parametrize(
    ("status", "kind", "advice"),
    [
        (1, GpuError, "run it by hand to see why, or set PLANNER_SET_CLOCK to another command"),
        (2, GpuError, "run it by hand to see why, or set PLANNER_SET_CLOCK to another command"),
        (3, GpuNotSupported, "use the other control (SM clock or power limit), or observe mode"),
        (
            4,
            GpuNotPermitted,
            "allow this user to run it without a password (NOPASSWD in sudoers), or run as root",
        ),
        (13, GpuNotSupported, "use the other control (SM clock or power limit), or observe mode"),
        (15, GpuLost, "reset the GPU, or reboot the node"),
    ],
)
def test_the_statuses_of_nvidia_smi(status: int, kind: type[GpuError], advice: str):
    command = script(
        f"print('out', flush=True); print('a \\x1b[31mline', file=sys.stderr); sys.exit({status})"
    )
    said = failure(command, kind)
    assert said.startswith("`")
    assert said.endswith(f"` failed with status {status} and printed 'out a [31mline'; {advice}")


def test_a_setting_of_which_nvidia_smi_only_warns_is_not_supported():
    warning = (
        "Setting locked GPU clocks is not supported for GPU 0.\nTreating as warning and "
        "moving on.\nAll done."
    )
    said = failure(script(f"print({warning!r}); sys.exit(0)"), GpuNotSupported)
    assert said.endswith("; use the other control (SM clock or power limit), or observe mode")
    assert "Treating as warning and moving on" in said


@pytest.mark.parametrize(
    "said",
    [
        "sudo: a password is required",
        "sudo: a terminal is required to read the password; either use the -S option ...",
        "alice is not in the sudoers file.",
        "Sorry, user alice is not allowed to execute '/usr/bin/nvidia-smi' as root on node7.",
    ],
)
def test_sudo_that_refuses(said: str):
    advice = "allow this user to run it without a password (NOPASSWD in sudoers), or run as root"
    assert failure(script(f"sys.exit({said!r})"), GpuNotPermitted).endswith(
        f" failed with status 1 and printed {said!r}; {advice}"
    )


def test_a_command_that_is_killed_says_by_which_signal():
    said = failure(script("os.kill(os.getpid(), 9)"), GpuError)
    assert said.endswith(
        " failed with status -9 and printed ''; run it by hand to see why, or set "
        "PLANNER_SET_CLOCK to another command"
    )


def test_only_the_end_of_a_long_output_is_quoted():
    said = failure(script("sys.exit('x' * 100000 + ' the end')"), GpuError)
    assert len(said) < 700
    assert "xxx the end'; run it by hand" in said


def test_a_command_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch, folder: Path):
    monkeypatch.setattr(command_module, "TIMEOUT_S", 0.5)
    popen, started = subprocess.Popen, []
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *given, **named: started.append(popen(*given, **named)) or started[-1],
    )
    command = script("time.sleep(1000)")
    assert failure(command, GpuError) == (
        f"`{command}` did not end within 0.5 s, and may or may not have taken effect; run it by "
        "hand to see why, or set PLANNER_SET_CLOCK to another command"
    )
    assert [each.returncode for each in started] == [-signal.SIGKILL]


def test_a_child_that_a_command_leaves_behind_is_not_waited_for(folder: Path):
    """The child keeps the output of the command open; a reader of a pipe would wait for it."""
    run(script("pid = os.fork(); open('pid', 'w').write(str(pid)) if pid else time.sleep(1000)"))
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


def test_a_command_is_given_no_input():
    run(script("sys.exit(sys.stdin.read() != '')"))
