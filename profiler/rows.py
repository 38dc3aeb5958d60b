"""Finished rows, kept on disk while a sweep goes on, so that one that was interrupted goes on where it was.

The file is a profile's CSV below lines that say what it is for, such as `# gpu: GPU-8f6b…`. It is replaced as a whole
after each row: at any moment it is there with all rows that were finished, or not there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perseus_planner.errors import ProfileError
from perseus_planner.files import reading, write_file
from perseus_planner.profiles.csv_file import Row, read_table, written
from perseus_planner.profiles.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MARK = "# "


class Rows:
    """The finished rows of one stage, in a file.

    Attributes:
        finished: kind -> setting -> its row.

    Args:
        path: the file.
        stage: the number of the stage.
        control: what is set for each row.
        about: what the rows are for, as lines of `name: text`; two sweeps that differ in it cannot share rows.
        resume: read the rows that are there; else they are forgotten when the first row is kept.

    Raises:
        ProfileError: the file cannot be read, or its rows are for something else: the first difference is named.
    """

    def __init__(self, path: Path, stage: int, control: str, about: Mapping[str, str], *, resume: bool) -> None:
        self._path, self._stage, self._control, self._about = path, stage, control, dict(about)
        self.finished: dict[str, dict[int, Measurement]] = {}
        for part in _parts(path):
            part.unlink(missing_ok=True)
        if resume and path.exists():
            self._check()
            for row in read_table(path)[0]:
                measurement = Measurement(row.clock_mhz, row.time_s, row.energy_j, row.evidence)
                self.finished.setdefault(row.kind, {})[row.clock_mhz] = measurement
        elif not resume:
            path.unlink(missing_ok=True)

    def keep(self, kind: str, row: Measurement) -> None:
        """Add a row; it is on disk on return.

        Raises:
            ProfileError: the file cannot be written.
        """
        self.finished.setdefault(kind, {})[row.clock_mhz] = row
        rows = [
            Row(self._stage, kind, each.clock_mhz, each.time_s, each.energy_j, each.evidence)
            for kind, table in self.finished.items()
            for each in table.values()
        ]
        head = "".join(f"{_MARK}{name}: {text}\n" for name, text in self._about.items())
        write_file(self._path, head.encode() + written(rows, self._control), ProfileError)

    def _check(self) -> None:
        """Refuse rows that are for something else."""
        found = _head(self._path)
        for name in dict.fromkeys([*self._about, *found]):
            if found.get(name) != self._about.get(name):
                there, wanted = found.get(name, "nothing"), self._about.get(name, "nothing")
                raise ProfileError(
                    f"{self._path}: its rows were measured with {name}: {there}, and now it is {wanted}; "
                    "go on with what it was, or measure anew without --resume"
                )


def forget(path: Path) -> None:
    """Remove the rows that are kept in `path`, and what an interrupted write left beside it."""
    for each in (path, *_parts(path)):
        each.unlink(missing_ok=True)


def _parts(path: Path) -> list[Path]:
    return [each for each in path.parent.glob(".*.part") if each.name.startswith(f".{path.name}.")]


def _head(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    with reading(path, ProfileError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith(_MARK):
                break
            name, _, text = line.removeprefix(_MARK).rstrip("\n").partition(": ")
            found[name] = text
    return found
