"""`python -m perseus_planner` is the `planner` command; launchers of ranks, such as torchrun, start modules so."""

from __future__ import annotations

from perseus_planner.cli import main

if __name__ == "__main__":
    main(prog_name="planner")
