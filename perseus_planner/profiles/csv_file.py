"""Read and write the CSV file of a profile: one row for each stage, instruction and clock."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from perseus_planner.base.errors import ProfileError, shown
from perseus_planner.base.fields import rules
from perseus_planner.base.tables import CsvFile, CsvRow, Text, csv_text
from perseus_planner.base.units import CLOCK, COMPUTED, ENERGY, INDEX, LIMIT, STAGE, TIME
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Evidence
from perseus_planner.profiles.modes import OWN, is_mode_name

CONTROLS = MappingProxyType(
    {"clock": "frequency", "power-limit": "power_limit", "observed": "observed_frequency"}
)
"""What was set for each measurement -> the column of its value, in MHz or watts."""
_HEADER = "stage,instruction,frequency,time,energy"
_EVIDENCE = MappingProxyType(
    {
        "achieved_mhz": "achieved_frequency",
        "time_stderr_s": "time_stderr",
        "energy_stderr_j": "energy_stderr",
        "windows": "windows",
        "temperature_c": "temperature",
        "throttle": "throttle",
    }
)
"""Field of `Evidence` -> its column."""
WORDS = MappingProxyType(
    {"F": "forward", "B": "backward", "I": "input-gradient", "W": "weight-gradient"}
)
_KINDS = MappingProxyType(
    {**{word: kind for kind, word in WORDS.items()}, **{kind: kind for kind in WORDS}}
)
_SUFFIX = re.compile(r"(\.[a-z0-9_-]+)?")
_FEW_GHZ = re.compile(r"[0-9]\.[0-9]+")  #: how a clock in GHz is written
_ORDER = "order"  #: the column of `Evidence.order`, which only swept profiles have
_MODE = "mode"  #: the column, which only a profile with modes has


class Row(NamedTuple):
    """One measured computation: its key, clock in MHz (or limit in watts), s and J."""

    key: Key
    clock_mhz: int
    time_s: float
    energy_j: float
    evidence: Evidence | None = None


class Table(NamedTuple):
    """The rows of a CSV, and where they stand."""

    rows: list[Row]
    control: str  #: what was set, as the header says
    places: dict[tuple[Key, int], str]  #: key and clock -> file and line
    cut: str | None  #: the place of the last row if the file ends without its end of line


def word_of(kind: str) -> str:
    """Return the instruction in the CSV for a kind: "backward" for "B", "backward.sync" for
    "B.sync"; and for people "backward@recompute" for the `Key.name` "B@recompute".
    """
    return WORDS[kind[0]] + kind[1:]


def parse_kind(instruction: str) -> str | None:
    """Return the kind of an instruction such as "backward.sync"; kinds are read too, and other
    texts give None.
    """
    word, dot, suffix = instruction.strip().partition(".")
    kind = _KINDS.get(word)
    return None if kind is None or _SUFFIX.fullmatch(dot + suffix) is None else kind + dot + suffix


_INSTRUCTION = Text(
    parse_kind,
    "an instruction: write forward or backward (or input-gradient, weight-gradient; with a suffix "
    "such as backward.sync)",
)

_MODE_NAME = Text(
    lambda text: text.strip() if is_mode_name(text.strip()) else None,
    "the name of a mode: write lower-case letters, digits, - and _, such as recompute, or own for "
    "how training runs without a plan",
)


def csv_bytes(rows: Sequence[Row], control: str = "clock") -> bytes:
    """Return the CSV file that holds `rows`; reading it gives the same floats."""
    columns = _columns(rows, control)
    lines: list[list[object]] = [list(columns)]
    lines += [[cell(row) for cell in columns.values()] for row in rows]
    return csv_text(lines).encode()


def _columns(rows: Sequence[Row], control: str) -> dict[str, Callable[[Row], object]]:
    """Return the columns of the file, in their order: the name of each, and what a row has there.

    Columns that no row would fill are left out, so that a plain profile has a plain table.
    """
    columns: dict[str, Callable[[Row], object]] = {
        "stage": lambda row: row.key.stage,
        "instruction": lambda row: word_of(row.key.kind),
    }
    if any(row.key.mode != OWN for row in rows):
        columns[_MODE] = lambda row: row.key.mode
    columns[CONTROLS[control]] = lambda row: row.clock_mhz
    columns["time"] = lambda row: row.time_s
    columns["energy"] = lambda row: row.energy_j
    if any(row.evidence is not None for row in rows):
        for field, column in _EVIDENCE.items():
            columns[column] = partial(_evidence_cell, field)
    # The order of measuring comes last, as older files do not have it.
    if any(row.evidence and row.evidence.order is not None for row in rows):
        columns[_ORDER] = partial(_evidence_cell, "order")
    return columns


def _evidence_cell(field: str, row: Row) -> object:
    if row.evidence is None:
        return None
    if field == "throttle":
        return "+".join(row.evidence.throttle)
    return getattr(row.evidence, field)


def read_table(path: Path) -> Table:
    """Read the rows of the CSV at `path`, and the control that its header names.

    Each number is within its range, and each stage, instruction and clock is there once. Unknown
    columns and lines that begin with `#` are ignored. Whether the stages are complete is not
    checked here.

    Raises:
        ProfileError: If the file cannot be read, or a row is wrong.
    """
    table = CsvFile(path, ProfileError, f"the header {_HEADER} and a row for each measurement")
    # The column of the setting says what was set, so there must be one of them.
    controls = [control for control, column in CONTROLS.items() if column in table.header]
    setting = CONTROLS[controls[0] if controls else "clock"]
    columns = ["stage", "instruction", setting, "time", "energy"]
    table.need(columns, _HEADER)
    if len(controls) > 1:
        listed = " and ".join(repr(CONTROLS[control]) for control in controls)
        raise ProfileError(f"{table.where}: has the columns {listed}; keep the one that was set")
    # A column that is there twice could be read either way.
    table.refuse_twice([*columns, _MODE, _ORDER, *_EVIDENCE.values()])
    (control,) = controls
    rows = []
    seen: dict[tuple[Key, int], str] = {}
    cut: str | None = None
    for cells in table:
        row = _row(cells, setting)
        earlier = seen.setdefault((row.key, row.clock_mhz), cells.where)
        if earlier != cells.where:
            name = word_of(row.key.name)
            what = f"stage {row.key.stage} {name} at {row.clock_mhz} {unit_of(control)}"
            raise ProfileError(
                f"{cells.where}: {what} is on {earlier.removeprefix(f'{path}, ')} too; keep one of "
                "them"
            )
        rows.append(row)
        # Only the last row can be cut, and whether it was is known once there is no next one.
        cut = cells.where if cells.is_cut else None
    return Table(rows, control, seen, cut)


def _row(cells: CsvRow, setting: str) -> Row:
    # A decimal number with a few digits is most likely GHz, which the rule alone would not say.
    number = _FEW_GHZ.fullmatch(cells[setting])
    if number is not None and setting != "power_limit":
        raise ProfileError(
            f"{cells.place(setting)}: {shown(cells[setting])} is not {CLOCK.wanted}; is it GHz?"
        )
    stage, time_s, energy_j, value = (
        cells.read(column, rule)
        for column, rule in (
            ("stage", STAGE),
            ("time", COMPUTED),
            ("energy", ENERGY),
            (setting, LIMIT if setting == "power_limit" else CLOCK),
        )
    )
    # Zero seconds are allowed for computations without work alone.
    if energy_j:
        cells.read("time", TIME)
    kind = cells.read("instruction", _INSTRUCTION)
    mode = cells.read(_MODE, _MODE_NAME) if cells.cells.get(_MODE) else OWN
    return Row(Key(stage, kind, mode), value, time_s, energy_j, _evidence(cells))


def _evidence(cells: CsvRow) -> Evidence | None:
    """Return the evidence of a row, or None if one of its cells is missing or empty."""
    # Evidence counts only as a whole.
    if not all(cells.cells.get(_EVIDENCE[name]) for name in rules(Evidence)):
        return None
    fields = rules(Evidence).items()
    numbers = {name: cells.read(_EVIDENCE[name], field.rule) for name, field in fields}
    throttle = tuple(filter(None, cells.cells.get("throttle", "").split("+")))
    order = cells.read(_ORDER, INDEX) if cells.cells.get(_ORDER) else None
    return Evidence(**numbers, throttle=throttle, order=order)


def unit_of(control: str) -> str:
    """Return the unit of the setting of `control`."""
    return "W" if control == "power-limit" else "MHz"


def setting_of(control: str) -> str:
    """Return the name of the setting of `control`, with its unit: clock_mhz, power_limit_w or
    observed_clock_mhz.
    """
    return {"clock": "clock_mhz", "power-limit": "power_limit_w", "observed": "observed_clock_mhz"}[
        control
    ]
