"""Measure the time and energy of every pipeline stage's computations over the GPU's clocks, as a
`Profile`.

Entry points: `pipeline.profile_pipeline` measures the stages of a training engine inside a training
script, `build.profile_stages` the stages that a function of yours builds, and
`simulated_pipeline.profile_simulated` those of a small GPT on a simulated GPU.
`sweep.SweepSettings` says how to measure. In the repository this folder is `profiler/`; it is
installed as `perseus_planner.profiler`.
"""

from __future__ import annotations

# Other packages, and folders of training scripts, may be called `profiler` too.
if __name__ != "perseus_planner.profiler":
    raise ImportError(
        f"{__name__!r} is not a package of its own; install perseus-planner, import "
        "perseus_planner.profiler"
    )
