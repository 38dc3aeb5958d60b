"""Runs training under a plan; nothing is here yet.

The folder is `runtime/` in the repository and is installed as `perseus_planner.runtime`.
"""

from __future__ import annotations

# The bare name belongs to other packages and to training scripts' own folders.
if __name__ != "perseus_planner.runtime":
    raise ImportError(
        f"{__name__!r} is not a package of its own; install perseus-planner, import perseus_planner.runtime"
    )
