"""`planner warm-up`: compile all kernels, so that no later command of this machine or image has
to.
"""

from __future__ import annotations

import click

from perseus_planner.cli import console


@click.command(
    "warm-up",
    epilog=console.examples(
        "planner warm-up",
        "NUMBA_CACHE_DIR=/opt/planner-cache planner warm-up  # in an image whose containers set it "
        "too",
    ),
)
@console.as_json
def warm_up(as_json: bool) -> None:
    """Compile what solving, planning and training need, once.

    The first command that needs it compiles for about 10 s, and keeps the result beside the package
    or in the home folder. In an image, run this when it is built: its containers then find all
    compiled. They must have the same kind of CPU, the same NUMBA_CACHE_DIR if you set one, and a
    user who may write to that folder.
    """
    from perseus_planner.solver.kernels import when_compiling

    compiled: list[int] = []
    with console.progress("Warming up"), when_compiling(lambda: compiled.append(1)):
        _use_all_kernels()
    text = f"Compiled {len(compiled)} functions." if compiled else "All is compiled already."
    console.report({"compiled": len(compiled)}, text, [], as_json=as_json)


def _use_all_kernels() -> None:
    """Solve, plan in every way, and search as training does, on a small pipeline."""
    import numpy as np

    from perseus_planner.profiler.simulated_pipeline import profile_simulated
    from perseus_planner.profiles.measurement import ClockChange
    from perseus_planner.runtime.autopilot.job import AutopilotJob
    from perseus_planner.runtime.autopilot.planning import Costs, Searcher
    from perseus_planner.schedules import one_f_one_b
    from perseus_planner.solver.frontier import solve

    profile = profile_simulated("simulated:a100-sxm", 2)
    for microbatches in (
        1,
        6,
    ):  # all choices of the first one are tried, the second one is searched
        frontier = solve(profile, one_f_one_b(2, microbatches))
        deadline_s = 1.05 * frontier.baseline_time_s
        frontier.plan_until(deadline_s)
        for most in (0, 2, 8):
            frontier.plan_until(deadline_s, max_changes=most)
    iteration = frontier.dag.iteration
    search = Searcher(
        AutopilotJob(iteration, (1410, 1200, 1000), 1, ClockChange(0.0045, 0.0009)), 8
    )
    classes = (len(search.keys), 3)
    search.polish(
        search.full(),
        Costs(np.full(classes, 0.1), np.full(classes, 300.0), np.full(2, 80.0)),
        10.0,
        1,
    )
