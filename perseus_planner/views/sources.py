"""The input of a report: files that are recognized, read, and checked against each other. What
plans and runs save against all clocks at maximum: energy, money and carbon, and energy per token or
sample; where the energy of an iteration goes, per rank and phase, computing apart from waiting; and
why, in sentences.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from perseus_planner.base import extensions
from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.file_kinds import kind_of
from perseus_planner.base.files import STATE_FILE
from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.units import COUNT, Rule
from perseus_planner.plans.job import Job
from perseus_planner.plans.plan import Plan
from perseus_planner.plans.replay import ALL_MAXIMUM, end_times
from perseus_planner.profiles.profiles import Profile
from perseus_planner.runs.run import Run
from perseus_planner.schedules.layouts import CONDITION, Layout, read_layout, rebalance
from perseus_planner.solver.frontier import Frontier
from perseus_planner.views.context import (
    Comparison,
    Context,
    compare,
    context_of_plan,
    context_of_profile,
    origin_label,
    share,
)
from perseus_planner.views.run import RunSummary, summarize_run, time_text
from perseus_planner.views.unplanned import UnplannedRun, summarize_unplanned

if TYPE_CHECKING:
    from perseus_planner.plans.replay import Span
    from perseus_planner.schedules.dag import PipelineDag
    from perseus_planner.schedules.iteration import Iteration

AS_LONG = f"{ALL_MAXIMUM}, in as much time"
"""The baseline of a run, whose iterations take longer or shorter than a replay says."""

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


_DAY_S = 86400.0
_J_PER_KWH = 3.6e6
_PUE = Rule(
    float,
    False,
    "a PUE: give what the building draws over what the GPUs draw, at least 1, such as 1.2",
    least=1.0,
)
_Size = Annotated[float, Rule(float, False, "a number above 0 that a float can hold; give one")]
_Whole = Annotated[int, COUNT._replace(wanted=f"{COUNT.wanted}; give one")]
_Rate = Annotated[
    float, Rule(float, True, "a rate: give a finite number of 0 or more, such as 0.12")
]


@dataclass(frozen=True)
class EnergyRates(Checked):
    """What a kilowatt-hour costs. The defaults are assumptions; replace them by the rates where the
    GPUs are.

    Raises:
        UsageError: If a number is negative or not finite, or the PUE is below 1.
    """

    price_usd_per_kwh: _Rate = 0.12  #: price of electricity, US dollars
    #: power usage effectiveness, the energy at the meter over the energy at the GPUs; 1 adds
    #: nothing.
    pue: Annotated[float, _PUE] = 1.2
    #: emissions of the grid, kilograms of CO2 equivalent.
    carbon_kg_per_kwh: _Rate = 0.40

    def cost(self, energy_j: float) -> EnergyCost:
        """Return the cost of `energy_j` joules at the GPUs, which may be negative."""
        kwh = energy_j * self.pue / _J_PER_KWH
        return EnergyCost(energy_j, kwh, kwh * self.price_usd_per_kwh, kwh * self.carbon_kg_per_kwh)


@dataclass(frozen=True)
class EnergyCost:
    """An energy and its cost: joules at the GPUs; kWh, US dollars and kg CO2e at the meter, with
    the PUE.
    """

    gpu_j: float
    kwh: float
    usd: float
    co2e_kg: float


@dataclass(frozen=True)
class IterationSize(Checked):
    """The size of one iteration of all pipelines that a report is about.

    Raises:
        UsageError: If a number is not a count.
    """

    pipelines: _Whole = 1  #: number of equal pipelines, whose energies are added up
    tokens: _Size | None = None  #: tokens that an iteration of them trains on, or None if not known
    #: samples that an iteration of them trains on, or None if not known.
    samples: _Size | None = None
    iterations: _Whole | None = None  #: number of iterations of the planned run, if known


@dataclass(frozen=True, kw_only=True)
class Saving(Comparison):
    """An iteration of a plan or run compared with all clocks at maximum, all pipelines together."""

    name: str  #: name of the plan or the run
    #: whether it is a run; then its time is the mean over the iterations that count, on the slowest
    #: rank, and it is compared with `AS_LONG`, which takes the same time.
    is_run: bool
    pipelines: int  #: number of pipelines; for a run, as many as its GPUs make up
    #: where the time comes from, such as "measured" or "replayed, measured profile".
    time_origin: str
    energy_origin: str  #: where the energy comes from; for a run also "simulated"
    baseline_origin: str  #: where the baseline comes from
    per_iteration: EnergyCost  #: saved per iteration
    #: seconds that the energies are of: for a run the mean from the begin of an iteration to that
    #: of the next, over all its iterations and ranks; for a plan `time_s`.
    window_s: float
    #: iteration time by the plan of a run, seconds; None for a plan and for a dry run.
    planned_time_s: float | None
    #: that time over the one with all clocks at maximum, by the profile; None where that is.
    planned_ratio: float | None
    per_day: EnergyCost  #: saved in a day of such iterations, around the clock
    #: number of iterations of the planned run, or of all attempts of a run; None if not known.
    iterations: int | None
    #: saved in that many iterations, or None if not known; by a run, against all clocks at maximum
    #: in as much time as each iteration took.
    per_run: EnergyCost | None
    #: `joules_per_token` and `samples_per_s_per_w`, which is samples per joule; None if not known.
    efficiency: dict[str, float | None]
    baseline_efficiency: dict[str, float | None]  #: the same with all clocks at maximum


def savings_of(sources: Sources, rates: EnergyRates, size: IterationSize) -> tuple[Saving, ...]:
    """Return what each run saves by its newest plan if its energy is known, then what each plan
    saves.

    No saving is stated if that of a run cannot be; see `why_no_saving`.
    """
    if sources.unlike_plan:
        return ()
    of_runs = (
        saving
        for name, run in sources.planned_runs.items()
        for saving in _run_saving(name, run, sources.summaries[name], rates, size)
    )
    of_plans = (_plan_saving(name, plan, rates, size) for name, plan in sources.plans.items())
    return (*of_runs, *of_plans)


def _plan_saving(name: str, plan: Plan, rates: EnergyRates, size: IterationSize) -> Saving:
    origin = origin_label(plan.origin)
    energies_j = size.pipelines * plan.energy_j, size.pipelines * plan.baseline_energy_j
    compared = compare(plan.time_s, energies_j[0], plan.baseline_time_s, energies_j[1])
    return _saving(name, compared, (origin, origin, origin), rates, size)


def _run_saving(
    name: str, run: Run, summary: RunSummary, rates: EnergyRates, size: IterationSize
) -> Iterator[Saving]:
    """Yield the saving of a run, if the energy of an iteration is known."""
    current = summary.current
    # Without an energy or a judged part, no saving can be stated.
    share = run.total.saved_share
    if current.time_s is None or current.energy_j is None or share is None:
        return
    plan = run.plan(summary.version, summary.ranks[0].pipeline)
    total = run.total
    # The energy is known of a part of the time, and is scaled to the whole.
    part = total.gpu_s / total.metered_s / total.iterations
    energy_j = part * total.energy_j
    # The share was judged iteration by iteration, so the baseline follows from it.
    time_s = current.time_s
    compared = compare(time_s, energy_j, time_s, energy_j / (1.0 - share), AS_LONG)
    origins = ("measured", summary.gpu_origin or "not known", origin_label(plan.origin))
    # The number of pipelines follows from the run, whatever the size says.
    pipelines = summary.pipelines_of_plan
    # Tokens are of all pipelines, of which these are a part.
    part = pipelines / size.pipelines
    of_run = IterationSize(
        pipelines,
        None if size.tokens is None else size.tokens * part,
        None if size.samples is None else size.samples * part,
        run.total.iterations,
    )
    # Ranks begin their first iteration at different times, and energies are of all ranks.
    window_s = total.gpu_s / total.windows
    saving = _saving(name, compared, origins, rates, of_run, window_s)
    # What was saved in all was added up, and is no mean times a number.
    saving = replace(saving, is_run=True, per_run=rates.cost(total.saved_j))
    # A dry run sets no clock, so that its plan says nothing of its time.
    if summary.dry_run is None:
        planned_s = current.planned_time_s
        ratio = planned_s / plan.baseline_time_s
        saving = replace(saving, planned_time_s=planned_s, planned_ratio=ratio)
    yield saving


def _saving(
    name: str,
    compared: Comparison,
    origins: tuple[str, str, str],
    rates: EnergyRates,
    size: IterationSize,
    window_s: float | None = None,
) -> Saving:
    """Return a saving of energies that are of `window_s` seconds; None for the iteration's own."""
    iterations = size.iterations
    if window_s is None:
        window_s = compared.time_s
    return Saving(
        **vars(compared),
        name=name,
        is_run=False,
        pipelines=size.pipelines,
        time_origin=origins[0],
        energy_origin=origins[1],
        baseline_origin=origins[2],
        per_iteration=rates.cost(compared.saved_j),
        window_s=window_s,
        planned_time_s=None,
        planned_ratio=None,
        # A day has whole iterations, with what passes between them.
        per_day=rates.cost(compared.saved_j * _DAY_S / window_s),
        iterations=iterations,
        per_run=None if iterations is None else rates.cost(compared.saved_j * iterations),
        efficiency=_efficiency(size, compared.energy_j),
        baseline_efficiency=_efficiency(size, compared.baseline_energy_j),
    )


def _efficiency(size: IterationSize, energy_j: float) -> dict[str, float | None]:
    per_j = None if size.samples is None or energy_j <= 0 else size.samples / energy_j
    per_token_j = None if size.tokens is None else energy_j / size.tokens
    return {"joules_per_token": per_token_j, "samples_per_s_per_w": per_j}


PHASES = ("warm-up", "steady state", "drain")
"""A rank's warm-up lasts until its first backward begins; its drain begins when its last forward
has ended.
"""

_ALIKE = 0.005  #: ranks whose times differ by less, relative to each other, are not told apart
_LOW = 0.995  #: of the highest clock; a rank below it runs at lower clocks


@dataclass(frozen=True)
class EnergyUse:
    """Joules of computing, with operations of fixed time, and joules of waiting."""

    computing_j: float
    waiting_j: float

    @property
    def energy_j(self) -> float:
        """Both together, joules."""
        return self.computing_j + self.waiting_j


@dataclass(frozen=True)
class IterationEnergy:
    """Where the energy of one iteration of one pipeline goes."""

    name: str  #: what the iteration is of
    kind: str  #: "baseline", "plan" or "run"
    origin: str  #: where the numbers come from
    time_s: float  #: iteration time, seconds
    ranks: tuple[EnergyUse, ...]  #: the energy of all GPUs of each rank
    #: the energy of each of `PHASES`, all ranks together; empty for a run, whose phases are not
    #: recorded.
    phases: tuple[EnergyUse, ...]
    busy_s: tuple[float, ...]  #: seconds of computations and operations of each rank
    #: mean clock of each rank over its computations, weighted by time, MHz or watts; empty for a
    #: run.
    clocks: tuple[float, ...]

    @property
    def computing_j(self) -> float:
        """Joules of computing of all ranks."""
        return math.fsum(rank.computing_j for rank in self.ranks)

    @property
    def waiting_j(self) -> float:
        """Joules of waiting of all ranks."""
        return math.fsum(rank.waiting_j for rank in self.ranks)


@dataclass(frozen=True)
class Bottleneck:
    """The ranks whose computations take longest with all clocks at maximum."""

    ranks: tuple[int, ...]  #: their numbers; empty if most ranks are about as busy
    busy_s: float  #: seconds of computations and operations of the busiest rank
    #: by how much that is more than the mean of the other ranks; 0 if there are none.
    excess_share: float
    balanced_time_s: float  #: iteration time if every rank were as busy as the mean of all, seconds
    time_s: float  #: iteration time as it is, seconds
    #: the layout of the profile, and the balanced one; None if it is not known.
    layouts: tuple[Layout, Layout] | None = None
    moved_time_s: float = 0.0  #: iteration time with the balanced layout, seconds


@dataclass(frozen=True)
class WhereEnergyGoes:
    """The first picture of a report."""

    #: all clocks at maximum, the first plan, and the first run, as far as they are known.
    iterations: tuple[IterationEnergy, ...]
    bottleneck: Bottleneck | None  #: the busiest rank, or None if it is not known
    #: what the picture shows, in words; the first one says what is saved, and why.
    sentences: tuple[str, ...]


def where_energy_goes(sources: Sources, savings: Sequence[Saving]) -> WhereEnergyGoes:
    """Return where the energy goes before, by the first plan, and in the first run.

    It is not known if the saving of a run cannot be stated.

    Args:
        sources: what the report is made of.
        savings: what each run and plan saves; the sentences are about the first.
    """
    # Without a comparison no picture of what was saved can be right.
    if sources.unlike_plan:
        return WhereEnergyGoes((), None, ())
    before = bottleneck = None
    # Only a frontier has the iteration at full clocks with its computations.
    if sources.frontier is not None and sources.before is not None:
        before = energy_of_plan(ALL_MAXIMUM, sources.before, "baseline")
        bottleneck = find_bottleneck(sources.frontier, sources.before, before)
    planned = next((energy_of_plan(name, plan) for name, plan in sources.plans.items()), None)
    runs = (
        _energy_of_run(name, run, sources.summaries[name])
        for name, run in sources.planned_runs.items()
    )
    # The first run whose energy is known, as not every one has it.
    ran = next(filter(None, runs), None)
    parts = _parts_saved(sources, savings[0], before, planned) if savings and before else None
    sentences = _sentences(savings, parts, before, planned, bottleneck)
    iterations = tuple(filter(None, (before, planned, ran)))
    return WhereEnergyGoes(iterations, bottleneck, tuple(sentences))


@dataclass(frozen=True)
class _PartsSaved:
    """What one pipeline saves in an iteration, by what its GPUs do; the sum is the saving."""

    computing_j: float
    waiting_j: float
    #: mean clocks of its ranks, as in `IterationEnergy`; empty for a run, whose are not recorded.
    clocks: tuple[float, ...]


def _parts_saved(
    sources: Sources, saving: Saving, before: IterationEnergy, planned: IterationEnergy | None
) -> _PartsSaved | None:
    """Return the parts of a saving; None if there is nothing to take apart."""
    if not saving.is_run:
        if planned is None:
            return None
        computing_j = before.computing_j - planned.computing_j
        waiting_j = before.waiting_j - planned.waiting_j
        return _PartsSaved(computing_j, waiting_j, planned.clocks)
    # What was saved is of iterations as long as those of the run, and not of those in `before`.
    if not saving.saved_j:
        return None
    summary = sources.summaries[saving.name]
    plan = sources.runs[saving.name].plan(summary.version, summary.ranks[0].pipeline)
    by_plan = energy_of_plan(saving.name, plan)
    waiting_j = 0.0
    for number, waiting_w in enumerate(plan.rank_waiting_w):
        ranks = [rank for rank in summary.ranks if rank.pipeline_rank == number]
        busy_s = fmean(rank.busy_s or 0.0 for rank in ranks)
        # At full clocks its computations are shorter by as much as the profile says; it waits then.
        full_share = share(before.busy_s[number], by_plan.busy_s[number])
        waiting_j += waiting_w * busy_s * (1.0 - full_share)
    # The rest was saved by computing, as in the energy of a run.
    return _PartsSaved(saving.saved_j / saving.pipelines - waiting_j, waiting_j, ())


def energy_of_plan(name: str, plan: Plan, kind: str = "plan") -> IterationEnergy:
    """Return where the energy of a replayed iteration goes; its sum is the plan's energy."""
    iteration = plan.iteration
    time_s = plan.timeline.time_s
    spans = list(plan.timeline.spans.values())
    uses: list[list[EnergyUse]] = []
    busy_s = []
    clocks = []
    for program, waiting_w in zip(iteration.programs, plan.rank_waiting_w, strict=True):
        in_order = [spans[node] for node in program]
        # Operations of fixed time have no clock and no kind, so phases are told by computations.
        computed = [
            (iteration.computations[node].kind, plan.clocks[iteration.names[node]], spans[node])
            for node in program
            if node < len(iteration.computations)
        ]
        ends_s = _phase_ends_s([(kind, span) for kind, _, span in computed], time_s)
        uses.append(list(_phases(in_order, ends_s, waiting_w)))
        # Busy is all that runs, and clocks are of computations alone.
        busy_s.append(math.fsum(span.time_s for span in in_order))
        computed_s = math.fsum(span.time_s for _, _, span in computed)
        clocks.append(math.fsum(clock * span.time_s for _, clock, span in computed) / computed_s)
    return IterationEnergy(
        name=name,
        kind=kind,
        origin=origin_label(plan.origin),
        time_s=time_s,
        ranks=tuple(map(_sum, uses)),
        phases=tuple(map(_sum, zip(*uses, strict=True))),
        busy_s=tuple(busy_s),
        clocks=tuple(clocks),
    )


def _phase_ends_s(computed: Sequence[tuple[str, Span]], time_s: float) -> tuple[float, ...]:
    """Return when each phase of a rank ends; without backwards, all is steady state."""
    backwards = [span.start_s for kind, span in computed if kind != "F"]
    if not backwards:
        return 0.0, time_s, time_s
    forward_s = max((span.end_s for kind, span in computed if kind == "F"), default=0.0)
    return min(backwards), max(min(backwards), forward_s), time_s


def _phases(
    spans: Sequence[Span], ends_s: Sequence[float], waiting_w: float
) -> Iterator[EnergyUse]:
    begin_s = 0.0
    for number, end_s in enumerate(ends_s, 1):
        # With a negative calibrated overhead, spans begin after the iteration's end.
        before_s = math.inf if number == len(ends_s) else end_s
        inside = [span for span in spans if begin_s <= span.start_s < before_s]
        busy_s = math.fsum(span.time_s for span in inside)
        computing_j = math.fsum(span.energy_j for span in inside)
        yield EnergyUse(computing_j, waiting_w * (end_s - begin_s - busy_s))
        begin_s = end_s


def _sum(uses: Sequence[EnergyUse]) -> EnergyUse:
    return EnergyUse(
        math.fsum(use.computing_j for use in uses), math.fsum(use.waiting_j for use in uses)
    )


def _energy_of_run(name: str, run: Run, summary: RunSummary) -> IterationEnergy | None:
    """Return where the energy of a run's mean iteration goes, or None if it is not known.

    Only the energy of a whole iteration is read from a GPU: that of waiting is the time without
    computations at the blocking power of the plan, and the rest is that of computing.
    """
    time_s = summary.current.time_s
    # Without time or energy there is nothing to divide.
    if time_s is None or summary.current.energy_j is None:
        return None
    plan = run.plan(summary.version, summary.ranks[0].pipeline)
    uses = []
    busy_s = []
    for number, waiting_w in enumerate(plan.rank_waiting_w):
        ranks = [rank for rank in summary.ranks if rank.pipeline_rank == number]
        busy_s.append(fmean(rank.busy_s or 0.0 for rank in ranks))
        # Each rank's own time: it may have waited for less than the slowest one took.
        own_s = fmean(rank.mean("inside_s") or 0.0 for rank in ranks)
        waiting_j = waiting_w * max(0.0, own_s - busy_s[-1])
        energy_j = math.fsum(rank.energy_j or 0.0 for rank in ranks)
        # Ranks of several pipelines are added up, and the picture is of one.
        energy_j /= summary.pipelines_of_plan
        uses.append(EnergyUse(energy_j - waiting_j, waiting_j))
    return IterationEnergy(
        name=name,
        kind="run",
        origin=summary.origin,
        time_s=time_s,
        ranks=tuple(uses),
        phases=(),
        busy_s=tuple(busy_s),
        clocks=(),
    )


def find_bottleneck(frontier: Frontier, plan: Plan, before: IterationEnergy) -> Bottleneck:
    """Return the busiest ranks with all clocks at maximum, and the iteration time if all ranks
    were equally busy.
    """
    # Ranks that are about as busy as the busiest share the bottleneck.
    most_s = max(before.busy_s)
    mean_s = fmean(before.busy_s)
    ranks = tuple(
        rank for rank, busy_s in enumerate(before.busy_s) if busy_s >= (1 - _ALIKE) * most_s
    )
    # A mean with the busiest rank would hide half of it from a pipeline of two.
    others_s = [busy_s for rank, busy_s in enumerate(before.busy_s) if rank not in ranks]
    # Fixed operations keep their time; the computations of a rank are scaled alike.
    balanced_s = [
        plan.measurement(computation).time_s * mean_s / before.busy_s[rank]
        for computation, rank in zip(
            plan.iteration.computations, plan.iteration.rank_of, strict=False
        )
    ]
    # If most ranks are that busy, none of them is to blame.
    bottleneck = Bottleneck(
        ranks if 2 * len(ranks) <= len(before.busy_s) else (),
        most_s,
        most_s / fmean(others_s) - 1 if others_s else 0.0,
        max(end_times(frontier.dag, balanced_s)) + plan.overhead_s,
        before.time_s,
    )
    # The profile says which layout was measured, if its job did.
    text = frontier.dag.profile.conditions.get(CONDITION)
    return bottleneck if text is None else _with_layouts(bottleneck, text, frontier.dag, plan)


def _with_layouts(found: Bottleneck, text: str, dag: PipelineDag, plan: Plan) -> Bottleneck:
    """Return the bottleneck with the layout of the profile, and the balanced one."""
    schedule = dag.schedule
    computations = plan.iteration.computations
    times_s = [plan.measurement(computation).time_s for computation in computations]
    # Per microbatch, as layers are moved for all of them.
    stage_s = [0.0] * schedule.stages
    kind_s = dict.fromkeys(schedule.kinds, 0.0)
    for computation, time_s in zip(computations, times_s, strict=True):
        # A layer's share of each kind is that of all computations.
        stage_s[computation.stage] += time_s / schedule.microbatches
        kind_s[computation.kind] += time_s / math.fsum(times_s)
    layout = read_layout(text, stages=schedule.stages)
    better = rebalance(layout, stage_s, schedule.stage_ranks)
    # No layout with these layers is faster.
    if better is None:
        return found
    # What a stage gains or loses is layers, whose kinds share time as those of all stages do.
    gained_s = [after - now for after, now in zip(better.stage_s, stage_s, strict=True)]
    moved_s = [
        max(0.0, time_s + gained_s[work.stage] * kind_s[work.kind])
        for work, time_s in zip(computations, times_s, strict=True)
    ]
    return replace(
        found,
        layouts=(layout, better.layout),
        moved_time_s=max(end_times(dag, moved_s)) + plan.overhead_s,
    )


# --- In words


def _sentences(
    savings: Sequence[Saving],
    parts: _PartsSaved | None,
    before: IterationEnergy | None,
    planned: IterationEnergy | None,
    bottleneck: Bottleneck | None,
) -> Iterator[str]:
    # What was measured counts before what was planned.
    if savings:
        yield _run_sentence(savings[0]) if savings[0].is_run else _plan_sentence(savings[0])
    if before is not None and parts is not None:
        yield _parts_sentence(before, parts)
    if before is not None:
        waiting = 100 * share(before.waiting_j, before.waiting_j + before.computing_j)
        yield (
            f"With {ALL_MAXIMUM}, {waiting:.0f} % of the energy is drawn while GPUs wait for "
            f"their neighbours, and {100 - waiting:.0f} % while they compute."
        )
    if bottleneck is not None and before is not None:
        yield from _bottleneck_sentences(bottleneck, before, planned)
        if bottleneck.layouts is not None:
            yield f"{_move_text(bottleneck)}."
    # The phases of a run are not known, so they are told of plans.
    if before is not None and planned is not None and savings:
        yield from _phase_sentences(before, planned)


def _run_sentence(saving: Saving) -> str:
    """Say what a run used and saved, all pipelines together, and then how long it took."""
    time = time_text(saving.time_s, saving.planned_time_s)
    # How much longer it took than planned is not what the plan costs, so that is told apart.
    if saving.planned_ratio is not None:
        than = "as" if _is_as_long(saving.planned_ratio) else "than"
        time += f"; the plan takes {_longer(saving.planned_ratio)} {than} {ALL_MAXIMUM}"
    return (
        f"The run in the folder {saving.name}{_together(saving)} takes "
        f"{si(saving.energy_j, 'J', 3)} per iteration: {_less(saving)} {ALL_MAXIMUM} would have "
        f"taken in as much time. {time}."
    )


def _plan_sentence(saving: Saving) -> str:
    """Say what a plan takes and saves, all pipelines together."""
    return (
        f"{saving.name}{_together(saving)} takes {si(saving.energy_j, 'J', 3)} and "
        f"{si(saving.time_s, 's', 3)} per iteration: {_less(saving)} {saving.baseline}, and "
        f"{_longer(saving.time_ratio)}."
    )


def _together(saving: Saving) -> str:
    return f" ({saving.pipelines} pipelines together)" if saving.pipelines > 1 else ""


def _less(saving: Saving) -> str:
    more = "less" if saving.saved_j >= 0 else "more"
    return f"{100 * abs(saving.saved_share):.1f} % {more} energy than"


def _is_as_long(ratio: float) -> bool:
    """Whether a time differs from another by less than is written of it."""
    return abs(ratio - 1) < 0.0005


def _longer(ratio: float) -> str:
    """Say how long something takes beside something else."""
    if _is_as_long(ratio):
        return "as long"
    return f"{100 * abs(ratio - 1):.1f} % {'longer' if ratio > 1 else 'shorter'}"


def _parts_sentence(before: IterationEnergy, parts: _PartsSaved) -> str:
    """Say what one pipeline saves while it computes, and while it waits."""
    lower = sum(
        clock < _LOW * most for clock, most in zip(parts.clocks, before.clocks, strict=False)
    )
    because = (
        f", as {lower} of {counted(len(parts.clocks), 'rank')} run at lower clocks" if lower else ""
    )
    return (
        f"Per pipeline, computing takes {_change(parts.computing_j)}{because}; waiting takes "
        f"{_change(parts.waiting_j)}."
    )


def _change(saved_j: float) -> str:
    return f"{si(abs(saved_j), 'J', 3)} {'less' if saved_j >= 0 else 'more'}"


def _bottleneck_sentences(
    found: Bottleneck, before: IterationEnergy, planned: IterationEnergy | None
) -> Iterator[str]:
    busy = f"{si(found.busy_s, 's', 3)} of {si(found.time_s, 's', 3)}"
    if len(before.ranks) == 1:
        return
    # Waiting comes from the schedule then, and not from a rank.
    if not found.ranks:
        yield (
            f"No rank is the bottleneck: most compute for about as long ({busy}). They wait "
            "because the schedule fills and empties the pipeline; more microbatches make that a "
            "smaller part."
        )
        return
    first, *more = found.ranks
    name, verb = (
        (f"Ranks {first} and {len(more)} more are", "they compute")
        if more
        else (f"Rank {first} is", "it computes")
    )
    text = (
        f"{name} the bottleneck: {verb} for {busy}, {100 * found.excess_share:.1f} % longer "
        "than the others on average"
    )
    shorter = 1 - found.balanced_time_s / found.time_s
    if shorter > _ALIKE:
        text += (
            f"; with equal work on all ranks, an iteration would be {100 * shorter:.1f} % shorter"
        )
    # A plan leaves the bottleneck fast and slows the others, which is why it saves.
    if planned is not None:
        parts = [clock / most for clock, most in zip(planned.clocks, before.clocks, strict=True)]
        others = [part for rank, part in enumerate(parts) if rank not in found.ranks]
        kept = fmean(parts[rank] for rank in found.ranks)
        pronoun = "them" if more else "it"
        text += (
            f". The plan runs {pronoun} at {100 * kept:.0f} % of the highest clock on average, "
            "the others at "
        )
        text += f"{100 * fmean(others):.0f} %"
    yield f"{text}."


def _move_text(found: Bottleneck) -> str:
    """Return which layers to move from where to where, and the layout to type."""
    assert found.layouts is not None
    now, better = found.layouts
    if now == better:
        return f"No move of a layer of its layout, {now}, makes the slowest rank faster"
    changes = [after - before for before, after in zip(now.layers, better.layers, strict=True)]
    fewer = _stages_text(stage for stage, change in enumerate(changes) if change < 0)
    more = _stages_text(stage for stage, change in enumerate(changes) if change > 0)
    count = sum(change for change in changes if change > 0)
    shorter = 1 - found.moved_time_s / found.time_s
    return (
        f"Move {counted(count, 'layer')} from {fewer} to {more}: an iteration would be "
        f"{100 * shorter:.1f} % shorter at full clocks, if memory allows; the layout is then "
        f"{better}, now {now}"
    )


def _stages_text(stages: Iterable[int]) -> str:
    numbers = list(stages)
    return f"stage {numbers[0]}" if len(numbers) == 1 else f"stages {', '.join(map(str, numbers))}"


def _phase_sentences(before: IterationEnergy, planned: IterationEnergy) -> Iterator[str]:
    saved_j = [
        was.energy_j - now.energy_j for was, now in zip(before.phases, planned.phases, strict=True)
    ]
    # The phases share what was saved, so parts would mean nothing if nothing was.
    whole_j = math.fsum(saved_j)
    if whole_j <= 0:
        return
    first, second, third = (
        f"{100 * phase_j / whole_j:.0f} % is in the {name}"
        for name, phase_j in zip(PHASES, saved_j, strict=True)
    )
    yield f"Of the plan's saving, {second}, {first} and {third}."
