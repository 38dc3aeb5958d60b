"""What each constant of the guarantee changes when it is halved and doubled, in virtual time.

The ledger and audits: 2,000 iterations in independent noise of 1 %, of which clocks make each 1 %
longer, and without that, the mean of 12 runs (`guarantee_world`). The reference, the margin and
what is charged at first: a run of number 31 in real noise, of 60 iterations.

    python benchmarks/guarantee_tuning.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
from autopilot_noise import short
from guarantee_world import guarded

from perseus_planner.runtime.guarantee import Tuning

_RUNS = 12
_OF_RUNS = (
    *("references", "remembered", "burst", "unjudged", "allowed", "gain", "gain_if_owed"),
    *("most_late", "most_margin", "most_less", "kept"),
)
"""Constants that show in a run of number 31 alone; the others show in audits."""


def main() -> None:
    """Print a table."""
    print("| constant | value | change |")
    print("|---|---|---|")
    for part, change in ((_audits, "audits"), (_run, "run")):
        print(f"| as they are, {change} | | {part(Tuning())} |", flush=True)
    for field in fields(Tuning):
        part = _run if field.name in _OF_RUNS else _audits
        for value in _values(field.name):
            tuning = replace(Tuning(), **{field.name: value})
            print(f"| `{field.name}` | {value:g} | {part(tuning)} |", flush=True)


def _values(name: str) -> Iterator[float]:
    """Yield half a constant and twice it; of a part, its square and its root."""
    value = getattr(Tuning(), name)
    if name == "kept":
        yield from (value**2, value**0.5)
    elif isinstance(value, int):
        yield from (max(1, value // 2), 2 * value)
    else:
        yield from (value / 2, 2 * value)


def _audits(tuning: Tuning) -> str:
    parts = []
    for effect in (0.01, 0.0):
        runs = [
            guarded(lambda _, effect=effect: effect, "independent", 0.01, seed, tuning)  # type: ignore[misc]
            for seed in range(_RUNS)
        ]
        longer = 100 * np.mean([run.longer for run in runs])
        audited = 100 * np.mean([run.audited for run in runs])
        parts.append(f"{longer:.2f} % longer, {audited:.1f} % audited")
    return f"{parts[0]}; without an effect {parts[1]}"


def _run(tuning: Tuning) -> str:
    row = short(tuning)
    return f"saved {row['saved']:.2f} %, {row['slower']:+.2f} % longer, {row['paid']:.1f} % forced"


if __name__ == "__main__":
    main()
