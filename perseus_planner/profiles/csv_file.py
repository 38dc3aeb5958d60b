"""Read and write the CSV file of a profile: one row for each stage, instruction and clock."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from perseus_planner.base.errors import ProfileError, shown
from perseus_planner.base.fields import rules
from perseus_planner.base.files import by_column, csv_rows
from perseus_planner.base.units import CLOCK, ENERGY, LIMIT, STAGE, TIME, Rule
from perseus_planner.profiles.measurement import Evidence

CONTROLS = MappingProxyType(
    {"clock": "frequency", "power-limit": "power_limit", "observed": "observed_frequency"}
)
"""What was set for each measurement -> the column of its value, in MHz or watts."""
_HEADER = "stage,instruction,frequency,time,energy"
_RULES = MappingProxyType({"stage": STAGE, "time": TIME, "energy": ENERGY})
_CONTROL_RULES = MappingProxyType(
    {"frequency": CLOCK, "power_limit": LIMIT, "observed_frequency": CLOCK}
)
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
_INSTRUCTIONS = (
    "forward or backward (or input-gradient, weight-gradient; with a suffix such as backward.sync)"
)


class Row(NamedTuple):
    """One measured computation: its stage, kind such as "F" or "B.sync", clock in MHz (or limit
    in watts), s and J.
    """

    stage: int
    kind: str
    clock_mhz: int
    time_s: float
    energy_j: float
    evidence: Evidence | None = None


def word_of(kind: str) -> str:
    """Return the instruction in the CSV for a kind: "backward" for "B", "backward.sync" for
    "B.sync".
    """
    return WORDS[kind[0]] + kind[1:]


def parse_kind(instruction: str) -> str | None:
    """Return the kind of an instruction such as "backward.sync"; kinds are read too, and other
    texts give None.
    """
    word, dot, suffix = instruction.strip().partition(".")
    kind = _KINDS.get(word)
    return None if kind is None or _SUFFIX.fullmatch(dot + suffix) is None else kind + dot + suffix


def csv_bytes(rows: Sequence[Row], control: str = "clock") -> bytes:
    """Return the CSV file that holds `rows`; reading it gives the same floats."""
    columns = ["stage", "instruction", CONTROLS[control], "time", "energy"]
    with_evidence = any(row.evidence is not None for row in rows)
    lines = [",".join([*columns, *(_EVIDENCE.values() if with_evidence else [])])]
    for row in rows:
        cells = [
            str(row.stage),
            word_of(row.kind),
            str(row.clock_mhz),
            repr(row.time_s),
            repr(row.energy_j),
        ]
        lines.append(",".join([*cells, *(_evidence_cells(row.evidence) if with_evidence else [])]))
    return "".join(f"{line}\n" for line in lines).encode()


def _evidence_cells(evidence: Evidence | None) -> list[str]:
    if evidence is None:
        return [""] * len(_EVIDENCE)
    numbers = (repr(getattr(evidence, name)) for name in rules(Evidence))
    return [*numbers, "+".join(evidence.throttle)]


def read_table(path: Path) -> tuple[list[Row], str]:
    """Read the rows of the CSV at `path`, and the control that its header names.

    Each number is within its range, and each stage, instruction and clock is there once. Unknown
    columns and lines that begin with `#` are ignored. Whether the stages are complete is not
    checked here.

    Raises:
        ProfileError: If the file cannot be read, or a row is wrong.
    """
    lines = csv_rows(path, ProfileError)
    where, header = next(lines, ("", []))
    if not header:
        raise ProfileError(
            f"{path}: is empty; write the header {_HEADER} and a row for each measurement"
        )
    control = _checked_header(where, header)
    rows = []
    seen: dict[tuple[int, str, int], str] = {}
    for where, cells in lines:
        row = _row(where, CONTROLS[control], by_column(where, header, cells, ProfileError))
        earlier = seen.setdefault(row[:3], where)
        if earlier != where:
            place = f"stage {row.stage} {word_of(row.kind)} at {row.clock_mhz} {unit_of(control)}"
            raise ProfileError(
                f"{where}: {place} is on {earlier.removeprefix(f'{path}, ')} too; keep one of them"
            )
        rows.append(row)
    return rows, control


def _checked_header(where: str, header: list[str]) -> str:
    """Return the control that the header names."""
    controls = [control for control, column in CONTROLS.items() if column in header]
    columns = [
        "stage",
        "instruction",
        CONTROLS[controls[0]] if controls else "frequency",
        "time",
        "energy",
    ]
    missing = [column for column in columns if column not in header]
    if missing:
        raise ProfileError(
            f"{where}: no column {', '.join(map(repr, missing))} in the header "
            f"{shown(','.join(header))}; write {_HEADER}, separated by commas"
        )
    if len(controls) > 1:
        both = " and ".join(repr(CONTROLS[control]) for control in controls)
        raise ProfileError(f"{where}: has the columns {both}; keep the one that was set")
    for column in [*columns, *_EVIDENCE.values()]:
        if header.count(column) > 1:
            raise ProfileError(f"{where}: column {column!r} is there twice; keep one of them")
    return controls[0]


def _row(place: str, control_column: str, cells: Mapping[str, str]) -> Row:
    found = {column: _number(place, column, rule, cells) for column, rule in _RULES.items()}
    setting = _number(place, control_column, _CONTROL_RULES[control_column], cells)
    kind = parse_kind(cells["instruction"])
    if kind is None:
        word = shown(cells["instruction"])
        raise ProfileError(
            f"{place}, column 'instruction': {word} is not an instruction: write {_INSTRUCTIONS}"
        )
    return Row(
        found["stage"], kind, setting, found["time"], found["energy"], _evidence(place, cells)
    )


def _evidence(place: str, cells: Mapping[str, str]) -> Evidence | None:
    """Return the evidence of a row, or None if one of its cells is missing or empty."""
    if not all(cells.get(_EVIDENCE[name], "").strip() for name in rules(Evidence)):
        return None
    numbers = {
        name: _number(place, _EVIDENCE[name], field.rule, cells)
        for name, field in rules(Evidence).items()
    }
    return Evidence(
        **numbers, throttle=tuple(filter(None, cells.get("throttle", "").strip().split("+")))
    )


def _number(place: str, column: str, rule: Rule, cells: Mapping[str, str]) -> Any:
    return rule.read(cells[column], f"{place}, column {column!r}", ProfileError)


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
