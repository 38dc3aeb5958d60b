"""The price of a report beside a plain echo that keeps it: the part of number 18 that one client
makes alone, in a minute.

Run as `python benchmarks/report_price.py`, on a machine that does nothing else.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from data import FULL
from service_load import alone
from service_processes import echo, service


def main(spell_s: float) -> None:
    """Print the CPU time of a report and of its echo; each spell lasts so many seconds."""
    size = replace(FULL, load_alone_s=spell_s)
    with (
        tempfile.TemporaryDirectory() as folder,
        service(Path(folder) / "service.sqlite") as server,
        echo(Path(folder) / "echo.sqlite") as plain,
    ):
        for what, (ours, theirs) in alone(size, server, plain).reported.items():
            own_ms, echo_ms = (1e3 * each.server_s / len(each.rows) for each in (ours, theirs))
            refused = sum(row.status != 202 for row in ours.rows)
            print(
                f"{what}: {own_ms:.2f} ms, echo {echo_ms:.2f} ms, ratio {own_ms / echo_ms:.2f}; "
                f"{len(ours.rows)} reports, {refused} refused"
            )


if __name__ == "__main__":
    main(float(sys.argv[1]) if sys.argv[1:] else 6.0)
