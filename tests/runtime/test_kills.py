"""Whichever process of a training job is killed, at any time: no clock is locked two seconds
later, nothing hangs.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from commands import run
from gpu_owners import (
    AUTOPILOT,
    CONTROLLER,
    GUARDIAN,
    await_end,
    files,
    has_not_ended,
    owner,
    planner_processes,
)
from launching import deepspeed, launched, results_of, torchrun
from strategies import soaks
from waiting import eventually, idle_s, soon

from perseus_planner.gpu.lease.lease import recover
from perseus_planner.gpu.simulated.emulated import open_emulated

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[1] / "support" / "runtime_victims.py"
GPUS = [f"a100-sxm/{rank}?call=1ms" for rank in range(2)]
WHOLE_S = 3.0  #: about as long as a job takes that is stopped as soon as it trains

STARTS_A_CONTROLLER = """
import sys
from perseus_planner.runtime.controller.client import start_controller
print(start_controller(1, 100.0, 60.0), flush=True)
sys.stdin.read()
"""

BOTH = ("controller", "guardian")
ROLES = ("rank 0", "rank 1", "launcher", *BOTH)


class Job:
    """A job of two ranks that have connected, so that both end if one of them does; and its GPUs.

    Args:
        folder: The folder of the job; a file `stop` in it ends the job.
        launcher: The process that started it.
        gpus: The GPUs of its ranks.
    """

    def __init__(self, folder: Path, launcher: int, gpus: Sequence[psutil.Process]) -> None:
        self.folder, self.gpus = folder, gpus
        met = [folder / f"met-{rank}" for rank in range(2)]
        eventually(lambda: all(path.exists() for path in met))
        self.ranks = [psutil.Process(int(path.read_text())) for path in met]
        self.launchers = [psutil.Process(launcher), *self.ranks[0].parents()[:1]]

    @property
    def locked_mhz(self) -> list[int | None]:
        return [gpu.locked_mhz for gpu in self.gpus]

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the living processes by role."""
        state = str(self.folder / "state")
        found = {
            "launcher": self.launchers,
            "rank 0": self.ranks[:1],
            "rank 1": self.ranks[1:],
            "controller": planner_processes(state, CONTROLLER),
            "guardian": planner_processes(state, GUARDIAN),
            "autopilot": planner_processes(state, AUTOPILOT),
        }
        living = {
            role: [each for each in processes if has_not_ended(each)]
            for role, processes in found.items()
        }
        return {role: processes for role, processes in living.items() if processes}

    def printed(self) -> list[str]:
        """Return what each rank printed on stderr."""
        return [(self.folder / f"stderr-{rank}").read_text() for rank in range(2)]

    def warnings(self) -> list[str]:
        """Return the warnings of its ranks, which go to stderr."""
        return [
            line
            for text in self.printed()
            for line in text.splitlines()
            if line.startswith("planner, rank ")
        ]

    def stop(self) -> None:
        """Stop the job, and wait until none of its processes and none of the planner's is left."""
        (self.folder / "stop").touch()
        eventually(
            lambda: not self.processes().keys() - {"launcher"}, lambda: str(self.processes())
        )


@contextmanager
def job(folder: Path, launcher: int) -> Iterator[Job]:
    """Run a job inside the block, and kill all of it on leaving."""
    with ExitStack() as stack:
        begun = Job(
            folder, launcher, [stack.enter_context(closing(open_emulated(text))) for text in GPUS]
        )
        try:
            yield begun
        finally:
            (folder / "stop").touch()  # for what ranks have forked
            for processes in begun.processes().values():
                kill(processes)


@contextmanager
def forked_job(folder: Path, *, unplanned: bool = False) -> Iterator[Job]:
    """Start a job from a process that has done its imports."""
    folder.mkdir()
    if unplanned:
        (folder / "unplanned").touch()
    with job(folder, launched("runtime_victims:train", 2, folder, str(folder))) as begun:
        yield begun


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


def check_reset_when_killed(job: Job, victims: Sequence[str]) -> None:
    """Kill processes, and check that soon no clock is locked."""
    found = job.processes()
    killed, processes = (
        found.keys() & set(victims),
        [each for role in victims for each in found.get(role, [])],
    )
    kill(processes)
    since_s = idle_s()
    concerned = [rank for rank in range(2) if killed & {"controller", "launcher", f"rank {rank}"}]

    def are_reset() -> bool:
        if {*BOTH} <= killed and not any(map(has_not_ended, [*processes, *job.ranks])):
            recover()  # nobody is left who would: the next command does
        return all(job.locked_mhz[rank] is None for rank in concerned)

    soon(
        are_reset,
        lambda: f"{killed} were killed, and {job.locked_mhz} are locked",
        since_s,
    )


def check_leaves_nothing(job: Job) -> None:
    """Stop the job, and check that nothing is left."""
    job.stop()
    recover()  # a record may be left where nothing was set yet
    assert (job.locked_mhz, files(job.folder / "state")) == ([None, None], [])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "job" / "state"))
    return tmp_path / "job"


def trains(job: Job) -> None:
    """Wait until the clocks of both GPUs are set."""
    eventually(lambda: None not in job.locked_mhz, lambda: f"{job.processes()}: {job.printed()}")


@pytest.mark.parametrize(
    "victims",
    [
        ("rank 1",),
        ("guardian",),
        BOTH,
        ROLES,
        *soaks(("controller",), ("launcher",), ("rank 0", "guardian", "controller")),
    ],
    ids=" and ".join,
)
def test_no_clock_is_locked_two_seconds_after_a_kill(victims: tuple[str, ...], folder: Path):
    killed_ranks = [role for role in victims if "rank" in role]
    with forked_job(folder) as job:
        trains(job)
        assert job.processes().keys() == set(ROLES)
        check_reset_when_killed(job, victims)
        if victims != ("guardian",) and not killed_ranks:
            # before the rank goes by whose store one alone says it
            eventually(lambda: len(job.warnings()) > 0)
        check_leaves_nothing(job)
        if not killed_ranks:  # a rank that has lost another one may say more
            assert len(job.warnings()) == (victims != ("guardian",))
        if victims == BOTH:
            assert re.search("has ended, and (its GPUs are reset|rank . has re)", job.warnings()[0])


@pytest.mark.needs("autopilot")
@pytest.mark.parametrize(
    "victims",
    [("rank 0",), ("autopilot", "controller"), *soaks(("rank 1",), ("launcher",))],
    ids=" and ".join,
)
def test_no_clock_is_locked_two_seconds_after_a_kill_while_training_learns(
    victims: tuple[str, ...], folder: Path
):
    with forked_job(folder, unplanned=True) as job:
        trains(job)
        assert job.processes().keys() == {*ROLES, "autopilot"}
        check_reset_when_killed(job, victims)
        if "rank 0" in victims:  # a child that it has forked holds all that it had open
            eventually(lambda: "autopilot" not in job.processes())
        check_leaves_nothing(job)


def test_training_goes_on_by_the_last_program_when_the_autopilot_is_killed(folder: Path):
    with forked_job(folder, unplanned=True) as job:
        trains(job)
        kill(job.processes()["autopilot"])
        eventually(lambda: len(job.warnings()) > 0)
        trains(job)
        check_leaves_nothing(job)
        (warning,) = job.warnings()
        assert (
            "the process of the autopilot has ended; training goes on with its last program"
            in warning
        )


def test_a_second_job_is_refused_on_all_ranks_for_as_long_as_the_first_one_lives(folder: Path):
    with forked_job(folder) as job:
        trains(job)
        everyone = results_of(
            "runtime_runs:beside_another_job", 2, folder, "emulated:a100-sxm?call=1ms"
        )
        for rank in everyone:
            assert rank["held"]["error"] == "GpuInUse"
            assert "perseus_planner.runtime.controller" in rank["held"]["text"]
        trains(job)
        assert job.processes().keys() == set(ROLES)
        job.stop()
        assert (job.locked_mhz, files(folder / "state")) == ([None, None], [])
        everyone = results_of(
            "runtime_runs:beside_another_job", 2, folder, "emulated:a100-sxm?call=1ms"
        )
        assert [rank["held"]["error"] for rank in everyone] == ["NoneType"] * 2


@pytest.mark.parametrize(
    "launcher", [torchrun, pytest.param(deepspeed, marks=pytest.mark.soak)]
)  # it imports much
def test_when_a_launcher_is_killed_its_ranks_go_on_and_clocks_are_reset(
    launcher: Callable, folder: Path
):
    if launcher is deepspeed:
        pytest.importorskip("deepspeed")
    folder.mkdir()
    with (
        launcher(2, folder, str(SCRIPT), str(folder)) as process,
        job(folder, process.pid) as begun,
    ):
        trains(begun)
        check_reset_when_killed(begun, ["launcher"])
        check_leaves_nothing(begun)


def test_what_is_left_when_all_are_killed_with_their_guardian_is_reset_by_the_next_command(
    folder: Path,
):
    with forked_job(folder) as job:
        trains(job)
        killed = [process for role in reversed(ROLES) for process in job.processes().get(role, [])]
        kill(killed)
        eventually(lambda: not job.processes())
        eventually(
            lambda: not any(map(has_not_ended, killed))
        )  # and their files are closed, which loses their locks
        assert len(files(folder / "state")) == 2
        said = run("show absent.yaml").stderr
        assert said.count("left set by process") == said.count("is reset") == 2
        assert (job.locked_mhz, files(folder / "state")) == ([None, None], [])


def test_a_controller_to_which_no_rank_comes_as_its_starter_was_killed_ends_too(folder: Path):
    with owner(STARTS_A_CONTROLLER) as starter:
        (controller,) = planner_processes(os.environ["PLANNER_STATE_DIR"], CONTROLLER)
        starter.kill()
        await_end([controller])


def kill_at_random_moments(
    folder: Path, times: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> int:
    """Kill processes of new jobs again and again, controller and guardian every other time; return
    how often clocks were set by then.
    """
    moments, set_before = random.Random(seed), 0
    folder.mkdir()
    for number in range(times):
        place = folder / str(number)
        monkeypatch.setenv("PLANNER_STATE_DIR", str(place / "state"))
        victims = moments.sample(ROLES, moments.randint(1, len(ROLES)))
        if number % 2:
            victims = [*BOTH, *moments.sample(ROLES[:3], moments.randint(0, 2))]
            moments.shuffle(victims)
        with forked_job(place) as job:
            if number % 4 in (1, 2):  # however slow the machine is, clocks are set then
                trains(job)
            time.sleep(moments.uniform(0.0, WHOLE_S))  # any moment will do: nothing is waited for
            set_before += None not in job.locked_mhz
            check_reset_when_killed(job, victims)
            check_leaves_nothing(job)
    return set_before


def test_a_job_that_is_killed_at_random_moments_leaves_nothing_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    kill_at_random_moments(folder, 2, 1, monkeypatch)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_jobs_that_are_killed_100_times_leave_nothing_locked(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    assert kill_at_random_moments(folder, 100, 2, monkeypatch) >= 30
