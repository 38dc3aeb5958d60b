"""What a report is made from: files told apart, read, and checked against each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, TypeVar

from perseus_planner.documents import kind_of
from perseus_planner.errors import UsageError
from perseus_planner.jobs.job import Job
from perseus_planner.plans.plan import Plan
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.solver.frontier import Frontier

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from perseus_planner.schedules.iteration import Iteration

T = TypeVar("T")
_ONE_KIND = "make a report for each kind of pipeline, from files that belong together"


@dataclass(frozen=True)
class Sources:
    """What a report is made from, all of it of pipelines of one kind.

    Attributes:
        profile: what was measured; that of the frontier, where none is given.
        frontier: of an iteration; without it there are no bound, no peers and no pipeline before the plan.
        plans: name -> plan, the one that the report is about first.
        runs: name -> what a training job measured.
        job: the job file.
        names: of the files, in the order in which they were given.

    Raises:
        UsageError: nothing is given, or what is given does not belong together.
    """

    profile: Profile | None = None
    frontier: Frontier | None = None
    plans: Mapping[str, Plan] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    job: Job | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.profile is None and self.frontier is not None:
            object.__setattr__(self, "profile", self.frontier.profile)
        if self.profile is None and not self.plans and not self.runs:
            raise UsageError("a report needs a profile, a frontier, a plan or the folder of a run; name at least one")
        _check_digests(self)
        _check_iterations(self)
        _ = self.pipelines

    @property
    def any_plan(self) -> Plan | None:
        """The first plan, or else one that a run ran by; they agree on all but clocks and deadline."""
        of_runs = (plan for run in self.runs.values() for plan in run.plans.values())
        return next(iter([*self.plans.values(), *of_runs]), None)

    @property
    def iteration(self) -> Iteration | None:
        """What all but a profile is of; None: there is only a profile."""
        if self.frontier is not None:
            return self.frontier.dag.iteration
        return None if self.any_plan is None else self.any_plan.iteration

    @property
    def digest(self) -> str:
        """Of the profile that all of it comes from."""
        return next(iter(_digests(self).values()))

    @property
    def pipelines(self) -> int:
        """How many pipelines of this kind the job file says there are; 1 without one."""
        return 1 if self.job is None else self.job.counts[self._kind(self.job)]

    @property
    def of_all_pipelines(self) -> Fraction:
        """Which part of the job's pipelines, and so of its tokens, these are."""
        return Fraction(1) if self.job is None else Fraction(self.pipelines, sum(self.job.counts))

    def _kind(self, job: Job) -> int:
        for number, profile in enumerate(job.profiles):
            if profile.digest == self.digest:
                return number
        raise UsageError(
            "the job file is of another profile than the other files, or says of it what they do not (overhead_s, "
            "clock_change, slow_stages, tensor_parallel); solve and plan again with this job file, or leave it out"
        )


def read_sources(paths: Iterable[Path], blocking_power_w: float | None = None) -> Sources:
    """Read files and folders of any kind that a report is made from.

    Args:
        paths: profiles, frontiers, plans, job files, and folders of runs.
        blocking_power_w: what a GPU draws while it waits, for a profile that is a CSV.

    Raises:
        PlannerError: one cannot be read, there are two of which one can be, or they do not belong together.
    """
    profiles, frontiers, jobs = dict[str, Profile](), dict[str, Frontier](), dict[str, Job]()
    plans, runs, names = dict[str, Plan](), dict[str, Run](), list[str]()
    for path in paths:
        names.append(name := _own_name(path, names))
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
    """The one that was found, if any."""
    if len(found) > 1:
        raise UsageError(f"{' and '.join(found)}: are {len(found)} of a kind; name one {what}")
    return next(iter(found.values()), None)


def _own_name(path: Path, taken: list[str]) -> str:
    """Its last part, or all of it where another one ends alike."""
    name = path.resolve().name
    return str(path) if name in taken else name


def _only_profile(job: Job) -> Profile:
    if len(job.profiles) > 1:
        raise UsageError(f"the job file has {len(job.profiles)} kinds of pipelines; {_ONE_KIND}")
    return job.profiles[0]


def _digests(sources: Sources) -> dict[str, str]:
    """What -> the digest of the profile that it comes from."""
    found = {} if sources.frontier is None else {"the frontier": sources.frontier.profile.digest}
    found |= {name: plan.profile_digest for name, plan in sources.plans.items()}
    found |= {} if sources.profile is None else {"the profile": sources.profile.digest}
    found |= {name: plan.profile_digest for name, run in sources.runs.items() for plan in run.plans.values()}
    return found


def _check_digests(sources: Sources) -> None:
    digests = _digests(sources)
    first, digest = next(iter(digests.items()))
    for name, other in digests.items():
        if other != digest:
            raise UsageError(f"{name}: was made from another profile than {first}; {_ONE_KIND}")


def _check_iterations(sources: Sources) -> None:
    iterations = {} if sources.frontier is None else {"the frontier": sources.frontier.dag.iteration}
    iterations |= {name: plan.iteration for name, plan in sources.plans.items()}
    iterations |= {name: plan.iteration for name, run in sources.runs.items() for plan in run.plans.values()}
    for name, iteration in iterations.items():
        first = next(iter(iterations))
        if iteration != iterations[first]:
            raise UsageError(f"{name}: is of another schedule, transfers or operations than {first}; {_ONE_KIND}")
