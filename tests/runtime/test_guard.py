"""A fault of the planner on the training thread ends no training, changes no loss, and is said
once; what the training raises passes through.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from perseus_planner.base.errors import ISSUES, fault_text
from perseus_planner.base.loops import FIRST_PAUSE_S
from perseus_planner.engines import releases
from perseus_planner.engines.engine import replaced
from perseus_planner.engines.guard import Guard, HookGuard
from perseus_planner.engines.releases import TESTED, untested

SHARE = float(os.environ.get("PLANNER_FAULT_SHARE", "0.08"))
"""Share of the faults that are tried; 1 for all."""
SEED = os.environ.get("PLANNER_FAULT_SEED", "1")
SUPPORT = Path(__file__).parents[1] / "support"
ENGINES = ["torch", "deepspeed", "megatron", "whole"]
WAYS = [*ENGINES, "torch autopilot", "torch work", "deepspeed work"]


def _imports(way: str) -> list[str]:
    """Return what the ranks of a way import, which takes them long if each does so."""
    engines = {"deepspeed": ["deepspeed.pipe"], "megatron": ["tiny_gpt"]}
    return engines.get(way.partition(" ")[0], [])


def _needs(way: str) -> None:
    engine = way.partition(" ")[0]
    pytest.importorskip("torch")
    if engine == "deepspeed":
        pytest.importorskip("deepspeed")
    if engine == "megatron":
        pytest.importorskip("megatron.core")


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize("way", WAYS)
def test_faults_in_whatever_the_training_thread_enters_end_no_training(way: str, tmp_path: Path):
    _needs(way)
    from launching import results_of

    everyone = results_of(
        "guard_programs:runtime", 2, tmp_path, way, str(SHARE), SEED, imports=_imports(way)
    )
    for each in everyone:
        assert each["equal"]
        assert each["raised"] > 0
        assert len(each["functions"]) > 20
        if not way.endswith("work"):  # which counts by itself
            assert each["counted"] == each["steps"]


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    ("way", "where"),
    [
        *((way, "on_end") for way in ENGINES),
        # The background thread calls it, and each kind of decider has its own.
        *((way, "look") for way in ("torch", "torch autopilot", "torch work", "deepspeed")),
    ],
)
def test_a_fault_that_stays_is_said_once_in_the_job(way: str, where: str, tmp_path: Path):
    _needs(way)
    from launching import results_of

    everyone = results_of(
        "guard_programs:said_once", 2, tmp_path, way, where, imports=_imports(way)
    )
    assert all(each["equal"] for each in everyone)
    (warning,) = [text for each in everyone for text in each["warnings"]]
    assert f"a fault of the planner, please report it at {ISSUES}: KeyError: 'broken'" in warning
    assert "guard_programs.py, line" in warning
    assert all("fault of the planner" in each["problem"] for each in everyone)
    assert [each["locked_mhz"] for each in everyone] == [None, None]


@pytest.mark.parametrize("way", ["torch", "deepspeed"])
def test_faults_of_a_recording_end_no_training_and_say_why_there_is_no_profile(
    way: str, tmp_path: Path
):
    _needs(way)
    from launching import results_of

    everyone = results_of(
        "guard_programs:profiling", 2, tmp_path, way, str(SHARE), SEED, imports=_imports(way)
    )
    for each in everyone:
        assert each["equal"]
        assert each["unsaid"] == []
        assert each["first"] == ""
    assert sum(each["raised"] for each in everyone) > 0


class FakeHook:
    """Counts what it is shown; its methods in `broken` raise."""

    lane = None
    wants_batch = True

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.calls: list[str] = []
        self.passed: list[int] = []
        self.numbers: list[int] = []
        self.iteration = -1
        self.substitute: Any = None

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise KeyError(name)

    def begin_iteration(self, _: Any, __: Any, number: int) -> None:
        self.numbers.append(number)
        self._call("begin_iteration")

    def pass_iteration(self, number: int) -> None:
        self.passed.append(number)

    def take_fault(self, _: Exception) -> Any:
        self._call("take_fault")
        return self.substitute

    def __getattr__(self, name: str) -> Any:
        return lambda *_: self._call(name)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _iterate(guard: HookGuard, count: int = 1) -> None:
    def compute(_: int) -> str:
        return "result"

    for _ in range(count):
        run = guard.computing(compute, lambda _: guard.begin())
        begin = lambda _: guard.show(1)  # noqa: E731
        assert guard.run(lambda run=run: run(1), begin) == "result"
        assert not guard.is_inside


METHODS = ["begin_iteration", "begin", "end", "end_iteration"]


@pytest.mark.parametrize("method", METHODS)
def test_a_hook_is_tried_again_after_pauses_that_double_and_counts_on(method: str):
    hook, clock = FakeHook(), Clock()
    guard = HookGuard(hook, clock)  # type: ignore[arg-type]
    _iterate(guard)
    hook.broken = {method}
    due_s = 0.0
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S):
        clock.now_s = due_s
        hook.calls.clear()
        _iterate(guard)
        assert hook.calls[-2:] == [method, "take_fault"]
        clock.now_s = due_s + pause_s - 0.1
        hook.calls.clear()
        _iterate(guard, 3)
        assert hook.calls == []
        due_s += pause_s
    hook.broken, clock.now_s = set(), due_s
    _iterate(guard, 2)
    assert hook.calls == [
        *["begin_iteration", "begin", "end", "end_iteration", "end_fault"],
        *["begin_iteration", "begin", "end", "end_iteration"],
    ]
    assert sorted(hook.numbers + hook.passed) == list(range(1 + 3 * 4 + 2))


def test_modes_go_on_after_a_fault():
    hook, modes, clock = FakeHook(), FakeHook(), Clock()
    hook.substitute, hook.broken = modes, {"end"}
    guard = HookGuard(hook, clock)  # type: ignore[arg-type]
    _iterate(guard, 2)
    assert hook.calls == ["begin_iteration", "begin", "end", "take_fault"]
    assert modes.calls == ["end_iteration", "begin", "end", "end_iteration"]


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_what_the_training_raises_passes_through_and_leaves_nothing_behind(kind: Any):
    hook = FakeHook()
    guard = HookGuard(hook, Clock())  # type: ignore[arg-type]
    error = kind("of the training")

    def fail() -> None:
        raise error

    with pytest.raises(kind) as raised:
        guard.run(fail, lambda _: guard.show(1))
    assert raised.value is error
    assert error.__context__ is None
    assert hook.calls == ["begin_iteration", "abandon_iteration"]
    _iterate(guard)
    assert hook.calls[2:] == ["begin_iteration", "begin", "end", "end_iteration"]


def test_a_guard_whose_report_fails_still_says_it(caplog: pytest.LogCaptureFixture):
    def report(_: Exception) -> None:
        raise RuntimeError("and this too")

    guard = Guard(report)
    assert guard.call(lambda: 1 // 0) is None
    assert not guard.is_on
    assert [fault_text(ZeroDivisionError())[:20] in text for text in caplog.messages] == [True]


def test_issues_are_reported_where_pyproject_says():
    assert f'"{ISSUES}"' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


class Step:
    def step(self) -> str:
        return "own"


@pytest.mark.parametrize("owner", [Step, SimpleNamespace(step=Step().step)])
def test_what_something_else_has_set_meanwhile_stays(owner: Any, caplog: Any):
    before, ours, theirs = vars(owner)["step"], lambda *_: "ours", lambda *_: "theirs"
    try:
        with replaced(owner, step=ours):
            assert vars(owner)["step"] is ours
        assert vars(owner)["step"] is before
        for _ in range(2):
            with replaced(owner, step=ours):
                owner.step = theirs
            assert vars(owner)["step"] is theirs
        assert len([text for text in caplog.messages if "step was replaced" in text]) == 1
    finally:
        owner.step = before


def test_tested_releases_are_those_that_tests_install():
    folder = Path(__file__).parents[2]
    newest = (folder / "tests/worlds/newest.txt").read_text()
    makefile = (folder / "Makefile").read_text()
    for package, (first, last) in TESTED.items():
        (release,) = re.findall(rf"^{package}==(\d+)\.(\d+)", newest, re.MULTILINE)
        assert tuple(map(int, release)) == last
        for pinned in re.findall(rf"{package}==(\d+\.\d+\.\d+)", makefile):
            assert not untested(package, pinned)
        assert not untested(package, f"{first[0]}.{first[1]}.0")
        assert untested(package, f"{last[0]}.{last[1] + 1}.0a0+git")
        assert untested(package, "0.1")


def test_an_untested_release_is_named_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    with (
        mock.patch.dict(TESTED, torch=((99, 0), (99, 1))),
        mock.patch.object(releases, "_said", set()),
    ):
        for _ in range(2):
            releases.name_untested(["torch", "megatron-core"])
    (text,) = caplog.messages
    assert "no test has trained with torch" in text
    assert "(tested: 99.0 to 99.1)" in text


@pytest.mark.parametrize("lost", ["name of a schedule", "class"])
def test_a_name_that_an_upgrade_took_away_is_refused_or_one_warning(lost: str, tmp_path: Path):
    _needs("torch")
    from launching import results_of

    everyone = results_of("guard_programs:upgraded", 2, tmp_path, lost)
    for each in everyone:
        assert each["strict"] == "EngineChanged"
        assert each["equal"]
        assert each["problem"]
    (warning,) = [text for each in everyone for text in each["warnings"]]
    assert "releases that" in warning or "use torch 2.6 or later" in warning


def test_a_second_engine_of_a_process_is_refused_by_name_of_the_first(tmp_path: Path):
    _needs("torch")
    from launching import results_of

    for each in results_of("guard_programs:twice", 2, tmp_path):
        assert "plans another engine already" in each["refused"], each["refused"]
        assert "leave the block" in each["refused"]
        assert each["problem"] is None


def test_an_iteration_that_raised_is_recorded_as_that(tmp_path: Path):
    _needs("torch")
    from launching import results_of

    from perseus_planner import Run
    from perseus_planner.runtime.hook import RAISED

    (result,) = results_of("guard_programs:raises", 1, tmp_path, "6", "3")
    assert result["raised"] == 1
    (rank,) = Run.load(tmp_path / "run").ranks
    said = [row.deviation for row in rank.iterations]
    assert said == [RAISED if number == 3 else None for number in range(6)]


OFTEN = {"torch", "torch work", "deepspeed"}
"""Ways of running whose standard error is looked at each time; the others are soaks."""
DOCUMENTED = {
    " run": "planner: autopilot: ",
    "megatron work": "planner, rank 0: the engine does not show the batch of an iteration; ",
}
"""End of the name of a way -> lines that are documented for it: `planner run` writes the log, and
Megatron shows no batch, which is said once.
"""
QUIET = [
    *(f"{engine}{by}" for engine in ENGINES[:3] for by in ("", " autopilot", " work", " run")),
    "whole",
]


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in OFTEN else pytest.mark.soak) for way in QUIET]
)
def test_stderr_of_a_run_is_that_of_its_script(way: str, tmp_path: Path):
    """Also of what torch itself prints while ranks wait for each other."""
    _needs(way)
    ran = _ran_by_the_command if way.endswith(" run") else _ran_in_a_block
    lines = []
    for planned in (False, True):
        everyone = ran(way, tmp_path, planned=planned)
        assert [each.code for each in everyone] == [0, 0], everyone
        # Numbers of processes, sockets and times differ.
        texts = [re.sub(r"\d+", "0", each.stderr) for each in everyone]
        lines.append([set(text.splitlines()) for text in texts])
    more = [line for alone, planned in zip(*lines, strict=True) for line in planned - alone]
    documented = [text for end, text in DOCUMENTED.items() if way.endswith(end)]
    more = [line for line in more if not any(line.startswith(text) for text in documented)]
    assert more == []


def _ran_in_a_block(way: str, folder: Path, *, planned: bool) -> list[Any]:
    from launching import ranks

    arguments = (str(folder / "state"), way, "planned" if planned else "alone")
    return ranks("guard_programs:quiet", 2, folder, *arguments, torch_says="WARNING")


def _ran_by_the_command(way: str, folder: Path, *, planned: bool) -> list[Any]:
    """Run a script that knows nothing of the planner, by itself or by `planner run`."""
    import sys

    from launching import by_themselves

    (folder / "state").mkdir(exist_ok=True)
    script = [str(SUPPORT / "tiny_training.py"), way.partition(" ")[0], str(folder)]
    options = ["--gpu", "emulated:a100-sxm?call=0"]
    command = ["-m", "perseus_planner", "run", *options, "--", sys.executable] if planned else []
    state = {"PLANNER_STATE_DIR": str(folder / "state"), "TORCH_CPP_LOG_LEVEL": "WARNING"}
    return by_themselves(2, folder, *command, *script, **state)
