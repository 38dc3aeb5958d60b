"""A frontier for who registers a job with a profile: solved by a process of its own, one at a time."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from perseus_planner.errors import ProfileError, UsageError
from perseus_planner.processes import child_environment
from perseus_planner.profiles.profiles import profile_document
from perseus_planner.schedules import NAMES

_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Unsolved:
    """What `planner solve` makes a frontier of.

    Attributes:
        profile_csv, profile_yaml: the texts of the two files of a profile.
        schedule: the name of a schedule, or the text grid of one.
        microbatches: of one iteration; None with a text grid, which says it.
    """

    profile_csv: str
    profile_yaml: str
    schedule: str
    microbatches: int | None


class Solver:
    """Runs `planner solve`, so that a large schedule delays nobody and takes no memory for good."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._one = asyncio.Semaphore(1)

    async def frontier(self, unsolved: Unsolved) -> bytes:
        """The frontier's file.

        Raises:
            UsageError: it is no profile or no schedule, they do not fit each other, or it takes too long.
        """
        async with self._one:
            with tempfile.TemporaryDirectory(prefix="planner-solve-") as folder:
                options = await asyncio.to_thread(_written, unsolved, Path(folder))
                complaint = await self._solve(folder, options)
                if complaint is not None:
                    raise UsageError(complaint)
                return await asyncio.to_thread((Path(folder) / "frontier.npz").read_bytes)

    async def _solve(self, folder: str, options: list[str]) -> str | None:
        """What the command complains of; None: nothing."""
        command = ["-P"] if sys.version_info >= (3, 11) else []
        command += ["-m", "perseus_planner", "solve", "profile.yaml", *options, "--output", "frontier.npz"]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *command,
            cwd=folder,
            env=child_environment(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, said = await asyncio.wait_for(process.communicate(), self._most_s)
        except asyncio.TimeoutError:
            return (
                f"solving takes longer than {self._most_s:g} s; "
                "run `planner solve` yourself and register its frontier instead"
            )
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return None
        lines = said.decode(errors="replace").splitlines()
        return (lines[-1] if lines else "it was killed").removeprefix("Error: ")


def _written(unsolved: Unsolved, folder: Path) -> list[str]:
    """Write the profile, and the schedule if it is a grid, into `folder`; the options that name the schedule."""
    document = folder / "profile.yaml"
    document.write_text(unsolved.profile_yaml, encoding="utf-8", newline="")
    try:
        table = profile_document(document).values["measurements"]
    except ProfileError as error:
        raise UsageError(str(error).replace(str(document), document.name)) from error
    if not isinstance(table, str) or not _FILE_NAME.fullmatch(table) or table == document.name:
        raise UsageError("profile.yaml: measurements: is not a plain file name; write profile.csv there")
    (folder / table).write_text(unsolved.profile_csv, encoding="utf-8", newline="")
    count = [] if unsolved.microbatches is None else [f"--microbatches={unsolved.microbatches}"]
    if unsolved.schedule in NAMES:
        return [f"--schedule={unsolved.schedule}", *count]
    (folder / "schedule.txt").write_text(unsolved.schedule, encoding="utf-8", newline="")
    return ["--schedule=schedule.txt", *count]
