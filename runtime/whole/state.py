"""What training without a pipeline has learnt, in a file from which the next start goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from perseus_planner.base.documents import load, read_document
from perseus_planner.base.errors import PlannerError, UsageError
from perseus_planner.base.files import write_file
from perseus_planner.base.units import LIMIT
from perseus_planner.runtime.whole.search import ValueRow

_FORMAT, _VERSION = "planner-iterations", 1


class IterationState:
    """The file.

    Args:
        path: The file; None to keep nothing.
        gpu: Name of the GPUs.
        unit: Unit of the values: "MHz" or "W".
        ranks: Number of ranks.
    """

    def __init__(self, path: Path | None, gpu: str, unit: str, ranks: int) -> None:
        self._path = path
        self._job = {"gpu": gpu, "unit": unit, "ranks": ranks}

    def save(self, rows: Mapping[int, ValueRow]) -> None:
        """Replace the file; rows are by value.

        Raises:
            UsageError: If it cannot be written.
        """
        if self._path is None or not rows:
            return
        import yaml

        entries = [
            {"value": value, **row.to_dict()} for value, row in sorted(rows.items(), reverse=True)
        ]
        content = {"format": _FORMAT, "version": _VERSION, **self._job, "rows": entries}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_file(
            self._path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True), UsageError
        )

    def load(self) -> tuple[dict[int, ValueRow], str]:
        """Return the rows by value, none if there is no file of this job, and what there is to
        say of it.
        """
        if self._path is None or not self._path.exists():
            return {}, ""
        try:
            document = read_document(
                self._path, _FORMAT, _VERSION, (*self._job, "rows"), (), UsageError
            )
            if any(document.values[name] != value for name, value in self._job.items()):
                return (
                    {},
                    f"what was learnt before is not used: {self._path} is of other GPUs or as many "
                    "others",
                )
            entries = document.sections("rows", ("value", "time_s", "windows"), ("energy_j",))
            rows = {entry.number("value", LIMIT): load(ValueRow, entry) for entry in entries}
        except PlannerError as error:
            return {}, f"what was learnt before is not used: {error}"
        return (
            rows,
            f"training begins with {len(rows)} values that were learnt before, from {self._path}",
        )
