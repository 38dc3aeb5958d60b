"""The input of a report: files that are recognized, read, and checked against each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from perseus_planner.base.documents import kind_of
from perseus_planner.base.errors import UsageError
from perseus_planner.plans.job import Job
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views.context import Context, context_of_plan, context_of_profile

if TYPE_CHECKING:
    from perseus_planner.schedules.iteration import Iteration

T = TypeVar("T")
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
    names: tuple[str, ...] = ()  #: names of the files, in the order in which they were given

    def __post_init__(self) -> None:
        if self.profile is None and self.frontier is not None:
            object.__setattr__(self, "profile", self.frontier.profile)
        if self.profile is None and not self.plans and not self.runs:
            raise UsageError(
                "a report needs a profile, a frontier, a plan or the folder of a run; name at "
                "least one"
            )
        _check_digests(self)
        _check_iterations(self)
        _ = self.pipelines

    @property
    def any_plan(self) -> Plan | None:
        """The first plan, or else one of a run; all plans agree on everything but clocks and
        deadline.
        """
        return next(self._all_plans(), None)

    def _all_plans(self) -> Iterator[Plan]:
        yield from self.plans.values()
        yield from (plan for run in self.runs.values() for plan in run.plans.values())

    @property
    def context(self) -> Context:
        """The profile and the iteration of the files."""
        if self.profile is not None:
            return context_of_profile(self.profile, self.iteration)
        return context_of_plan(next(self._all_plans()))

    @property
    def iteration(self) -> Iteration | None:
        """The iteration of the files, or None if there is only a profile."""
        if self.frontier is not None:
            return self.frontier.dag.iteration
        return None if self.any_plan is None else self.any_plan.iteration

    @property
    def digest(self) -> str:
        """The digest of the profile that all files come from."""
        return next(iter(_digests(self).values()))

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
        paths: profiles, frontiers, plans, job files, and folders of runs.
        blocking_power_w: power of a waiting GPU, watts, for a profile that is a CSV.

    Raises:
        PlannerError: If a file cannot be read, there are two of a kind of which only one can be
            given, or the files do not belong together.
    """
    profiles, frontiers, jobs = dict[str, Profile](), dict[str, Frontier](), dict[str, Job]()
    plans, runs, names = dict[str, Plan](), dict[str, Run](), list[str]()
    for path in paths:
        names.append(name := _short_name(path, names))
        match kind_of(path):
            case "run":
                runs[name] = Run.load(path)
            case "frontier":
                frontiers[name] = Frontier.load(path)
            case "profile":
                profiles[name] = Profile.load(path, blocking_power_w)
            case "job":
                jobs[name] = Job.load(path)
            case _:  # a plan, or a file that Plan.load refuses with the reason
                plans[name] = Plan.load(path)
    job, profile = _only(jobs, "job file"), _only(profiles, "profile")
    if profile is None and job is not None and not (frontiers or plans or runs):
        profile = _only_profile(job)
    return Sources(profile, _only(frontiers, "frontier"), plans, runs, job, tuple(names))


def _only(found: Mapping[str, T], what: str) -> T | None:
    """Return the only entry, or None if there is none."""
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)}: only one {what} can be given; name one of them")
    return next(iter(found.values()), None)


def _short_name(path: Path, taken: list[str]) -> str:
    """Return the last part of the path, or the whole path if that name is taken."""
    name = path.resolve().name
    return str(path) if name in taken else name


def _only_profile(job: Job) -> Profile:
    if len(job.profiles) > 1:
        raise UsageError(f"the job file has {len(job.profiles)} kinds of pipelines; {_ONE_KIND}")
    return job.profiles[0]


def _digests(sources: Sources) -> dict[str, str]:
    """Return a name for each source -> the digest of the profile that it comes from."""
    found = {} if sources.frontier is None else {"the frontier": sources.frontier.profile.digest}
    found |= {name: plan.profile_digest for name, plan in sources.plans.items()}
    found |= {} if sources.profile is None else {"the profile": sources.profile.digest}
    found |= {
        name: plan.profile_digest
        for name, run in sources.runs.items()
        for plan in run.plans.values()
    }
    return found


def _check_digests(sources: Sources) -> None:
    digests = _digests(sources)
    first, digest = next(iter(digests.items()))
    for name, other in digests.items():
        if other != digest:
            raise UsageError(f"{name}: was made from another profile than {first}; {_ONE_KIND}")


def _check_iterations(sources: Sources) -> None:
    iterations = (
        {} if sources.frontier is None else {"the frontier": sources.frontier.dag.iteration}
    )
    iterations |= {name: plan.iteration for name, plan in sources.plans.items()}
    iterations |= {
        name: plan.iteration for name, run in sources.runs.items() for plan in run.plans.values()
    }
    for name, iteration in iterations.items():
        first = next(iter(iterations))
        if iteration != iterations[first]:
            raise UsageError(
                f"{name}: has another schedule, transfers or operations than {first}; {_ONE_KIND}"
            )
