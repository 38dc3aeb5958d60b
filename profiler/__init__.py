"""Measures a pipeline stage: time and energy of its forward and backward at every clock, as a Profile.

The folder is `profiler/` in the repository and is installed as `perseus_planner.profiler`.
"""

from __future__ import annotations

# The bare name belongs to other packages and to training scripts' own folders.
if __name__ != "perseus_planner.profiler":
    raise ImportError(
        f"{__name__!r} is not a package of its own; install perseus-planner, import perseus_planner.profiler"
    )
