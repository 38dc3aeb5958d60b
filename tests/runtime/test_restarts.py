"""Jobs of which some or all processes are killed, and that are started again, go on by their
plan as if undisturbed.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from gpu_owners import files, has_not_ended, planner_processes
from launching import free_port, ranks, started
from waiting import LONG_S, eventually

from perseus_planner import Run
from perseus_planner.base.errors import RunError
from perseus_planner.gpu.simulated.emulated import EmulatedGpu, open_emulated
from perseus_planner.runs.recording import attempt_path, attempts_in

pytest.importorskip("torch")

SCRIPT = Path(__file__).parents[1] / "support" / "restarted_training.py"
CHECKPOINT_EVERY = 4  #: iterations
FIRST_MHZ = 1410  #: clock of the first computation of a rank; no other has it
"""In which whatever is to come must come; longer is to hang."""

# Otherwise ranks that torchrun starts again may read addresses of the ranks before them, and not
# reach each other.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

TORCHRUN = ("-m", "torch.distributed.run")
STARTS_TWICE = (
    "import subprocess, sys; sys.exit(all(subprocess.call(sys.argv[1:]) for attempt in range(2)))"
)


class Job:
    """A job of two ranks in two attempts; the first one waits for its end amid an iteration.

    Args:
        folder: What both attempts share.
        launchers: The processes that started it, by the state folders of their nodes.
        gpus: The GPUs of its ranks.
        killed_at: The iteration that its first attempt waits in.
    """

    def __init__(
        self,
        folder: Path,
        launchers: dict[Path, subprocess.Popen[str]],
        gpus: Sequence[EmulatedGpu],
        killed_at: int,
    ) -> None:
        self.folder, self.launchers, self.gpus, self.killed_at = folder, launchers, gpus, killed_at

    @property
    def locked_mhz(self) -> list[int | None]:
        return [gpu.locked_mhz for gpu in self.gpus]

    def read(self, name: str) -> list[dict[str, Any]]:
        """Return the lines that the ranks have written to a file."""
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def ranks(self) -> list[psutil.Process]:
        """Return the ranks, once they wait for their end and have written what they recorded."""
        eventually(
            (self.folder / "amid").exists,
            lambda: str([each.poll() for each in self.launchers.values()]),
        )
        # The row of the last iteration may wait for a sample of the GPU.
        eventually(self._has_recorded, lambda: str(self.recorded()))
        assert not {*self.locked_mhz} & {None, FIRST_MHZ}
        return [psutil.Process(self.read(f"attempts-{rank}")[-1]["process"]) for rank in range(2)]

    def _has_recorded(self) -> bool:
        counts = [count for attempt in self.recorded() for count in attempt]
        return len(counts) == 2 and min(counts) >= self.killed_at - 1

    def recorded(self) -> list[list[int]]:
        """Return how many iterations each rank has recorded in each attempt."""
        folder = self.folder / "run"
        with suppress(RunError):  # what an attempt has written is not enough yet
            attempts = [Run.load(attempt_path(folder, each)) for each in attempts_in(folder)]
            return [[len(rank.iterations) for rank in attempt.ranks] for attempt in attempts]
        return []

    def planner_processes(self) -> list[psutil.Process]:
        return [each for state in self.launchers for each in planner_processes(str(state))]

    def check_goes_on(self, undisturbed: list[Any]) -> None:
        """Check that it ends well, as one that went on from its last checkpoint."""
        killed_at = self.killed_at
        for launcher in self.launchers.values():
            _, errors = launcher.communicate(timeout=LONG_S)
            assert launcher.returncode == 0, errors
        first = killed_at - killed_at % CHECKPOINT_EVERY
        for rank in range(2):
            attempts = self.read(f"attempts-{rank}")
            assert [attempt["first"] for attempt in attempts] == [0, first]
            assert {attempt["locked_mhz"] for attempt in attempts} <= {None, FIRST_MHZ}
        losses = self.read("losses")
        assert [each["iteration"] for each in losses] == [
            *range(killed_at),
            *range(first, len(undisturbed)),
        ]
        assert all(each["losses"] == undisturbed[each["iteration"]] for each in losses)
        before, after = self.recorded()
        assert all(
            abs(each - killed_at) <= 1 for each in before
        )  # a rank that lost its peer records the iteration too
        assert after == 2 * [len(undisturbed) - first]
        assert Run.load(self.folder / "run").total.iterations == max(before) + after[0]
        assert self.locked_mhz == [None, None]
        eventually(lambda: not self.planner_processes())
        assert [files(state) for state in self.launchers] == [[] for _ in self.launchers]


@contextmanager
def job(folder: Path, *commands: Sequence[str], gpus: int, killed_at: int) -> Iterator[Job]:
    """Start a job with one launcher for each of its nodes, and kill all of it on leaving.

    Args:
        folder: A folder with its plan.
        commands: The command of each launcher, without that of the ranks.
        gpus: Number of GPUs of a node.
        killed_at: The iteration that its first attempt waits in.
    """
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        launchers: dict[Path, subprocess.Popen[str]] = {}
        opened: list[EmulatedGpu] = []
        for number, command in enumerate(commands):
            state = folder / f"node-{number}"
            patch.setenv("PLANNER_STATE_DIR", str(state))
            texts = [f"a100-sxm/{gpu}?call=1ms" for gpu in range(gpus)]
            opened += [stack.enter_context(closing(open_emulated(text))) for text in texts]
            launchers[state] = started(
                [*command, str(SCRIPT), str(folder), str(killed_at)], folder, **OWN_STORE
            )
        begun = Job(folder, launchers, opened, killed_at)
        try:
            yield begun
        finally:
            for launcher in launchers.values():
                kill(
                    []
                    if launcher.poll() is not None
                    else [*descendants(launcher), psutil.Process(launcher.pid)]
                )
                launcher.communicate()
            kill(begun.planner_processes())


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def plan_and_losses(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Return the plan's file, and the losses of each iteration of a job that nobody kills."""
    folder = tmp_path_factory.mktemp("undisturbed")
    everyone = ranks("restarted_training:undisturbed", 2, folder, str(folder))
    assert [each.code for each in everyone] == [0, 0], everyone
    return folder / "plan.yaml", [
        json.loads(line)["losses"] for line in (folder / "losses").read_text().splitlines()
    ]


@pytest.fixture
def losses(plan_and_losses: tuple[Path, list[Any]], tmp_path: Path) -> list[Any]:
    plan, losses = plan_and_losses
    shutil.copy(plan, tmp_path)
    return losses


def test_a_node_whose_training_is_killed_trains_again_with_the_other_node(
    losses: list[Any], tmp_path: Path
):
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d"]
    command = [*TORCHRUN, *options, f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    with job(tmp_path, command, command, gpus=1, killed_at=6) as begun:
        rank = begun.ranks()[1]
        # The controller and its guardian go first, so that nobody resets the GPU before the next
        # attempt.
        kill([*reversed(planner_processes(rank.environ()["PLANNER_STATE_DIR"])), rank])
        begun.check_goes_on(losses)


@pytest.mark.soak  # the test above has restarts, test_kills.py deaths of whole jobs
def test_a_job_that_is_killed_as_a_whole_is_started_again_by_its_supervisor(
    losses: list[Any], tmp_path: Path
):
    command = ["-c", STARTS_TWICE, sys.executable, *TORCHRUN, "--standalone", "--nproc-per-node=2"]
    with job(tmp_path, command, gpus=2, killed_at=2) as begun:
        begun.ranks()
        (supervisor,) = begun.launchers.values()
        killed = [*reversed(begun.planner_processes()), *descendants(supervisor)]
        kill(killed)
        eventually(lambda: not any(map(has_not_ended, killed)))
        begun.check_goes_on(losses)
