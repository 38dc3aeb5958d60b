"""Keep finished rows on disk during a sweep, so that an interrupted sweep can resume.

The file says what was measured, such as the GPU. It is replaced as a whole after each row: at any
moment it either holds all finished rows or does not exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perseus_planner.base.errors import ProfileError
from perseus_planner.base.files import reading, write_file
from perseus_planner.base.wires import Record, decode, encode
from perseus_planner.profiles.measurement import Measurement

Visits = dict[str, dict[int, list[Measurement]]]
"""Kind -> setting -> its rows, one for each time that it was measured."""


class _Kept(Record, frozen=True):
    subject: dict[str, str]
    rows: Visits


class RowFile:
    """The finished rows of one stage, in a file.

    Attributes:
        finished: The rows of the interrupted sweep.

    Args:
        path: The file.
        subject: What is measured, as names and texts. Only sweeps that agree in all of them share
            rows.
        resume: Whether to read the rows of an interrupted sweep. If not, they are deleted.

    Raises:
        ProfileError: If the file cannot be read, or `subject` differs; names the first difference.
    """

    def __init__(self, path: Path, subject: Mapping[str, str], *, resume: bool) -> None:
        self._path, self._subject = path, dict(subject)
        self.finished: Visits = {}
        for part in _unfinished_writes(path):
            part.unlink(missing_ok=True)
        if not resume:
            path.unlink(missing_ok=True)
        elif path.exists():
            self.finished = self._read()

    def write(self, rows: Visits) -> None:
        """Replace the rows by `rows`; they are on disk on return.

        Raises:
            ProfileError: If the file cannot be written.
        """
        write_file(self._path, encode(_Kept(self._subject, rows)), ProfileError)

    def _read(self) -> Visits:
        with reading(self._path, ProfileError):
            data = self._path.read_bytes()
        try:
            kept = decode(data, _Kept)
        except ValueError as error:
            raise ProfileError(
                f"{self._path}: cannot be read ({error}); measure from the start without --resume"
            ) from None
        for name in dict.fromkeys([*self._subject, *kept.subject]):
            there, wanted = (of.get(name, "nothing") for of in (kept.subject, self._subject))
            if there != wanted:
                raise ProfileError(
                    f"{self._path}: its rows were measured with {name}: {there}, and now it is "
                    f"{wanted}; resume with {name} as before, or measure from the start without "
                    "--resume"
                )
        return kept.rows


def rows_path(output: Path, stage: int) -> Path:
    """Return the file beside the profile `output` that keeps the stage's finished rows until
    `output` is written.
    """
    return output.with_suffix(f".rows-{stage}.json")


def delete_rows(output: Path, stages: int) -> None:
    """Delete the kept rows of all stages, and what interrupted writes left beside them; `output`
    is written.
    """
    for path in (rows_path(output, stage) for stage in range(stages)):
        for file in (path, *_unfinished_writes(path)):
            file.unlink(missing_ok=True)


def _unfinished_writes(path: Path) -> list[Path]:
    return [part for part in path.parent.glob(".*.part") if part.name.startswith(f".{path.name}.")]
