"""Run the `planner` command as `python -m perseus_planner`, as launchers of ranks such as
torchrun do.
"""

from __future__ import annotations

import sys

from perseus_planner.cli import main

if __name__ == "__main__":
    # The deepspeed launcher puts this option before all others; LOCAL_RANK has the same value.
    main(
        [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")],
        prog_name="planner",
    )
