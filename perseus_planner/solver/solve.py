"""Compute the exact frontier from a profile and a schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.schedules import generate_for_stages
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    from perseus_planner.profiles.profiles import Profile
    from perseus_planner.schedules import Schedule


def solve(
    profile: Profile,
    schedule: Schedule | str,
    *,
    microbatches: int | None = None,
    ranks: int | None = None,
    virtual_stages: int | None = None,
    group: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **extras: Any,
) -> Frontier:
    """Compute the exact frontier of an iteration: `solve(profile, "1f1b", microbatches=96)`.

    Args:
        profile: measurements of as many stages as the schedule has.
        schedule: the computations of an iteration, rank by rank; or the name of a schedule, as
            `planner solve --schedule` takes it, which then has the stages of the profile.
        microbatches: microbatches of one iteration; for a name, and required there.
        ranks: ranks of the pipeline; for a name. One for each stage, or as the virtual stages tell,
            unless given.
        virtual_stages: stages that each rank holds; for the name of an interleaved schedule.
        group: microbatches that go through a stage at a time, as `schedules.generate` takes it; for
            a name.
        progress: called with (parts done, all parts) from time to time.
        extras: `transfer`, `operations` and `variants`, as `pipeline_iteration` takes them.

    Raises:
        ProfileError: If the profile has other stages than the schedule.
        ScheduleError: If the name is unknown, or the schedule cannot run.
        UsageError: If `microbatches` is missing for a name, or sizes are given with a schedule that
            has its own.
    """
    sizes = {
        "microbatches": microbatches,
        "ranks": ranks,
        "virtual_stages": virtual_stages,
        "group": group,
    }
    if isinstance(schedule, str):
        if microbatches is None:
            raise UsageError(
                f'microbatches: is missing; write solve(profile, "{schedule}", microbatches=8)'
            )
        schedule = generate_for_stages(schedule, profile.stages, **sizes)  # type: ignore[arg-type]
    elif given := [name for name, size in sizes.items() if size is not None]:
        raise UsageError(
            f"{given[0]}: the schedule has its sizes; leave it out, or name the schedule"
        )
    return solve_dag(PipelineDag.from_schedule(profile, schedule, **extras), progress=progress)


def solve_dag(dag: PipelineDag, *, progress: Callable[[int, int], None] | None = None) -> Frontier:
    """Compute the exact frontier of any graph of computations, from its slow end to its fast one,
    by minimum cuts.

    Raises:
        ProfileError: If the overhead leaves nothing of an iteration, or the measurements cannot be
            scaled.
    """
    return Frontier.of(dag, progress)
