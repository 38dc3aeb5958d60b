"""Keep finished rows on disk during a sweep, so that an interrupted sweep can resume.

The file is a profile's CSV below comment lines that say what was measured, such as
`# gpu: GPU-8f6b…`. It is replaced as a whole after each row: at any moment it either holds all
finished rows or does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.files import reading, write_file
from perseus_planner.profiles.csv_file import Row, csv_bytes, read_table
from perseus_planner.profiles.measurement import Measurement

_MARK = "# "


class RowFile:
    """The finished rows of one stage, in a file.

    Attributes:
        finished: Kind -> setting -> its row.

    Args:
        path: The file.
        stage: The number of the stage.
        control: What is set for each row, as in `SweepSettings`.
        subject: What is measured, as names and texts. Only sweeps that agree in all of them share
            rows.
        resume: Whether to read the rows of an interrupted sweep. If not, they are deleted.

    Raises:
        ProfileError: If the file cannot be read, or `subject` differs; names the first difference.
    """

    def __init__(
        self, path: Path, stage: int, control: str, subject: Mapping[str, str], *, resume: bool
    ) -> None:
        self._path, self._stage, self._control, self._subject = path, stage, control, dict(subject)
        self.finished: dict[str, dict[int, Measurement]] = {}
        for part in _unfinished_writes(path):
            part.unlink(missing_ok=True)
        if resume and path.exists():
            self._check_subject()
            for row in read_table(path)[0]:
                measurement = Measurement(row.clock_mhz, row.time_s, row.energy_j, row.evidence)
                self.finished.setdefault(row.kind, {})[row.clock_mhz] = measurement
        elif not resume:
            path.unlink(missing_ok=True)

    def add(self, kind: str, row: Measurement) -> None:
        """Add a row; it is on disk on return.

        Raises:
            ProfileError: If the file cannot be written.
        """
        self.finished.setdefault(kind, {})[row.clock_mhz] = row
        rows = [
            Row(self._stage, kind, row.clock_mhz, row.time_s, row.energy_j, row.evidence)
            for kind, table in self.finished.items()
            for row in table.values()
        ]
        head = "".join(f"{_MARK}{name}: {text}\n" for name, text in self._subject.items())
        write_file(self._path, head.encode() + csv_bytes(rows, self._control), ProfileError)

    def _check_subject(self) -> None:
        earlier = _read_subject(self._path)
        for name in dict.fromkeys([*self._subject, *earlier]):
            if earlier.get(name) != self._subject.get(name):
                there, wanted = earlier.get(name, "nothing"), self._subject.get(name, "nothing")
                raise ProfileError(
                    f"{self._path}: its rows were measured with {name}: {there}, and now it is "
                    f"{wanted}; resume with {name} as before, or measure from the start without "
                    "--resume"
                )


def rows_path(output: Path, stage: int) -> Path:
    """Return the file beside the profile `output` that keeps the stage's finished rows until
    `output` is written.
    """
    return output.with_suffix(f".rows-{stage}.csv")


def delete_rows(output: Path, stages: int) -> None:
    """Delete the kept rows of all stages, and what interrupted writes left beside them; `output`
    is written.
    """
    for path in (rows_path(output, stage) for stage in range(stages)):
        for file in (path, *_unfinished_writes(path)):
            file.unlink(missing_ok=True)


def _unfinished_writes(path: Path) -> list[Path]:
    return [part for part in path.parent.glob(".*.part") if part.name.startswith(f".{path.name}.")]


def _read_subject(path: Path) -> dict[str, str]:
    subject: dict[str, str] = {}
    with reading(path, ProfileError), path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if not line.startswith(_MARK):
                break
            name, _, text = line.removeprefix(_MARK).rstrip("\n").partition(": ")
            subject[name] = text
    return subject
