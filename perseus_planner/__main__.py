"""`python -m perseus_planner` is the `planner` command; launchers of ranks, such as torchrun, start modules so."""

from __future__ import annotations

import sys

from perseus_planner.cli import main

if __name__ == "__main__":
    # The deepspeed launcher puts this before all other arguments; LOCAL_RANK says it too.
    main([each for each in sys.argv[1:] if not each.startswith("--local_rank=")], prog_name="planner")
