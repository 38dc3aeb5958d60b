"""The input of a report: files that are recognized, read, and checked against each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perseus_planner.base import extensions
from perseus_planner.base.errors import UsageError
from perseus_planner.base.file_kinds import kind_of
from perseus_planner.base.files import STATE_FILE
from perseus_planner.plans.job import Job
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views.context import (
    Context,
    context_of_plan,
    context_of_profile,
)
from perseus_planner.views.run import RunSummary, summarize_run
from perseus_planner.views.unplanned import UnplannedRun, summarize_unplanned

if TYPE_CHECKING:
    from perseus_planner.schedules.iteration import Iteration


_WRONG = "was made from another profile", "has another schedule, transfers or operations"
_ONE_KIND = "make a report for each kind of pipeline, from files that belong together"


@dataclass(frozen=True)
class Sources:
    """The input of a report, all of it for pipelines of one kind.

    Raises:
        UsageError: If nothing is given, or the files do not belong together.
    """

    profile: Profile | None = None  #: the profile; if none is given, that of the frontier
    #: the frontier; without it the report has no bound, no other planners and no iteration before
    #: the plan.
    frontier: Frontier | None = None
    #: name -> plan; the report is about the first one.
    plans: Mapping[str, Plan] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)  #: name -> run
    job: Job | None = None  #: the job file
    #: plans of Kareus, as the offer "kareus" of `base.extensions` returns them.
    kareus: tuple[Any, ...] = ()
    names: tuple[str, ...] = ()  #: names of the files, in the order in which they were given

    def __post_init__(self) -> None:
        if self.profile is None and self.frontier is not None:
            object.__setattr__(self, "profile", self.frontier.profile)
        if self.profile is None and not (self.plans or self.runs or self.kareus):
            raise UsageError(
                "a report needs a profile, a frontier, a plan or the folder of a run; name at "
                "least one"
            )
        # Numbers of different profiles or schedules must not stand in one table.
        for number, wrong in enumerate(_WRONG):
            values = {
                name: part[number] for name, part in self._parts.items() if part[number] is not None
            }
            first = next(iter(values), "")
            for name, value in values.items():
                if value != values[first]:
                    raise UsageError(f"{name}: {wrong} than {first}; {_ONE_KIND}")
        # Read once here, so that a job file that does not fit is refused at once.
        _ = self.pipelines

    @cached_property
    def _parts(self) -> dict[str, tuple[str, Iteration | None]]:
        """A name for each source -> the digest of the profile that it comes from, and its
        iteration.
        """
        parts: dict[str, tuple[str, Iteration | None]] = {}
        if self.frontier is not None:
            parts["the frontier"] = self.frontier.profile.digest, self.frontier.dag.iteration
        # Modes are chosen by a plan, so plans with others are still of one iteration.
        for name, plan in self.plans.items():
            parts[name] = plan.profile_digest, plan.iteration.without_modes
        if self.profile is not None:
            parts["the profile"] = self.profile.digest, None
        for name, run in self.planned_runs.items():
            for plan in run.plans.values():
                parts[name] = plan.profile_digest, plan.iteration.without_modes
        return parts

    @cached_property
    def before(self) -> Plan | None:
        """The plan with all clocks at maximum; None without a frontier."""
        return None if self.frontier is None else self.frontier.baseline_plan

    @cached_property
    def planned_runs(self) -> dict[str, Run]:
        """Name -> run, of those by plans."""
        return {name: run for name, run in self.runs.items() if run.versions}

    @cached_property
    def summaries(self) -> dict[str, RunSummary]:
        """Name -> the run beside its plans, of those by plans."""
        return {name: summarize_run(run) for name, run in self.planned_runs.items()}

    @cached_property
    def unplanned(self) -> dict[str, UnplannedRun]:
        """Name -> the run as it ran, of those without a plan."""
        return {
            name: summarize_unplanned(run) for name, run in self.runs.items() if not run.versions
        }

    @property
    def unlike_plan(self) -> str | None:
        """Why no saving of a run by its plan can be stated, in a sentence; None if all can be."""
        return next(
            filter(None, (summary.unlike_plan for summary in self.summaries.values())), None
        )

    @property
    def any_plan(self) -> Plan | None:
        """The first plan, or else one of a run; all plans agree on everything but clocks and
        deadline.
        """
        of_runs = (plan for run in self.planned_runs.values() for plan in run.plans.values())
        return next(chain(self.plans.values(), of_runs), None)

    @property
    def context(self) -> Context | None:
        """The profile and the iteration of the files; None if there are only plans of Kareus."""
        if self.profile is not None:
            return context_of_profile(self.profile, self.iteration)
        return None if self.any_plan is None else context_of_plan(self.any_plan)

    @property
    def iteration(self) -> Iteration | None:
        """The iteration of the files, or None if there is only a profile."""
        if self.frontier is not None:
            return self.frontier.dag.iteration
        return None if self.any_plan is None else self.any_plan.iteration

    @property
    def digest(self) -> str:
        """The digest of the profile that all files come from."""
        return next(iter(self._parts.values()))[0]

    @property
    def pipelines(self) -> int:
        """The number of pipelines of this kind by the job file; 1 without a job file."""
        return 1 if self.job is None else self.job.counts[self._kind(self.job)]

    @property
    def share_of_pipelines(self) -> Fraction:
        """The share of these pipelines in the job's pipelines, and so in its tokens."""
        return Fraction(1) if self.job is None else Fraction(self.pipelines, sum(self.job.counts))

    def _kind(self, job: Job) -> int:
        for number, profile in enumerate(job.profiles):
            if profile.digest == self.digest:
                return number
        raise UsageError(
            "the job file has another profile than the other files, or changes it (overhead_s, "
            "clock_change, slow_stages, tensor_parallel); solve and plan again with this job "
            "file, or leave it out"
        )


def read_sources(paths: Iterable[Path], blocking_power_w: float | None = None) -> Sources:
    """Read the files and folders of a report.

    Args:
        paths: profiles, frontiers, plans, job files, folders of runs and of plans of Kareus.
        blocking_power_w: power of a waiting GPU, watts, for a profile that is a CSV and for plans
            of Kareus.

    Raises:
        PlannerError: If a file cannot be read, there are two of a kind of which only one can be
            given, or the files do not belong together.
    """
    # One reader for each kind of file, by which files are grouped.
    readers: dict[str | None, Callable[[Path], Any]] = {
        "run": Run.load,
        "frontier": Frontier.load,
        "profile": partial(Profile.load, blocking_power_w=blocking_power_w),
        "job": Job.load,
        "kareus": lambda path: extensions.offer("kareus")(path, blocking_power_w),
    }
    names = list[str]()
    sources = defaultdict[Any, dict[str, Any]](dict)
    for path in paths:
        name = _short_name(path, names)
        names.append(name)
        reader = readers.get(kind_of(path), Plan.load)  # which refuses other files with the reason
        sources[reader][name] = reader(path)
    # All that is not known is taken for a plan, and the rest are as the readers stand.
    runs, frontiers, profiles, jobs, kareus = (sources[reader] for reader in readers.values())
    plans = sources[Plan.load]
    job = _only(jobs, "job file")
    profile = _only(profiles, "profile")
    is_planned = any(run.versions for run in runs.values())
    # Without anything else, the job's own profile is what there is to report.
    if profile is None and job is not None and not (frontiers or plans or is_planned):
        if len(job.profiles) > 1:
            kinds = len(job.profiles)
            raise UsageError(f"the job file has {kinds} kinds of pipelines; {_ONE_KIND}")
        profile = job.profiles[0]
    if profile is None and not (frontiers or plans or is_planned):
        profile = _learnt(runs)
    configurations = tuple(chain.from_iterable(kareus.values()))
    frontier = _only(frontiers, "frontier")
    return Sources(profile, frontier, plans, runs, job, configurations, tuple(names))


def _learnt(runs: Mapping[str, Run]) -> Profile | None:
    """Return what the only run has learnt; None if there are more, or it keeps that elsewhere."""
    if len(runs) != 1:
        return None
    (run,) = runs.values()
    # An attempt has a folder of its own, below that of the job, which keeps what was learnt.
    for folder in (run.folder, run.folder.resolve().parent):
        path = folder / STATE_FILE
        if path.exists():
            return Profile.load(path)
    return None


def _only(sources: Mapping[str, Any], what: str) -> Any:
    """Return the only one, or None if there is none."""
    if len(sources) > 1:
        names = " and ".join(sources)
        raise UsageError(f"{names}: only one {what} can be given; name one of them")
    return next(iter(sources.values()), None)


def _short_name(path: Path, taken: list[str]) -> str:
    """Return the last part of the path, or the whole path if that name is taken."""
    name = path.resolve().name
    return str(path) if name in taken else name


# --- In words
