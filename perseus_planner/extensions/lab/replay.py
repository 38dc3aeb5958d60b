"""Replays a job on a cluster: data-parallel pipelines that end every iteration together, some
slower for a while; under policies, which say what clocks each pipeline runs, given the stragglers
that are known.

All pipelines are alike. An iteration takes as long as its slowest pipeline; the GPUs of the others
wait at the blocking power. The stragglers of an iteration are those that are active when it begins.
A policy learns of them late, by the reaction delay, and its decisions take effect at the beginning
of an iteration.

Time is simulated, and iterations are replayed from the profile. Between two events (a straggler
begins or ends, or the policy learns of it) all iterations are equal, so the replay goes from event
to event and its cost does not depend on the number of iterations. Moments are exact fractions, so
that no rounding moves an event to another iteration.

The file of stragglers has the columns `start,end,slowdown,pipeline,stage`. Start and end are
seconds after the start of the first iteration; leave the end empty for a straggler that lasts. The
slowdown is a factor of all times. Pipeline and stage are numbers from 0; leave the stage empty if
the whole pipeline is slow.

The target is a slowdown of the iteration time with all clocks at maximum. T' is the iteration time
of the slowest straggling pipeline, at the clocks that it keeps.

| policy          | clocks for the target | straggling pipeline | others, if T' is above it    |
|-----------------|-----------------------|---------------------|------------------------------|
| `max`           | all at maximum        | keeps them          | keep them                    |
| `one-clock`     | one for the whole job | keeps them          | one clock for T'             |
| `per-stage`     | one per stage (Zeus)  | keeps them          | one per stage for T'         |
| `envpipe`       | EnvPipe's; no target  | keeps them          | keep them: only one point    |
| `planner-fixed` | `Frontier.plan_until` | keeps them          | keep them                    |
| `planner`       | `Frontier.plan_for`   | solved again if a   | `plan_beside_straggler(T')`  |
|                 |                       | stage is slow       |                              |

Reacting to T' was published for Perseus (SOSP'24). Zeus chooses along a curve of time and energy,
so it can be asked for another time; one clock is treated the same way, so that only the plans
differ. A pipeline with a slow stage is solved again for the target if it can still meet it, and
otherwise for its own time with all clocks at maximum.

A job whose microbatches differ has a file of lengths, and other policies.

The file is a CSV of one of two sorts:

* `step,pipeline,microbatch,length` has a row for each sequence, with its tokens. Sequences that are
  packed into one microbatch have a row each.
* `step,pipeline,microbatch_0,microbatch_1,...` has a row for each pipeline and step, with the work
  of each microbatch, in any unit: measured seconds, say, or tokens.

All pipelines end each iteration together, with the slowest. A computation takes as long as
measured for a microbatch of mean work, and for others in proportion.

| policy          | clocks                                                                         |
|-----------------|--------------------------------------------------------------------------------|
| `max`           | all at maximum                                                                 |
| `planner-fixed` | the plan for microbatches that are alike, in every iteration                   |
| `on-time`       | the same, made to be on time for 95 % of such iterations: `Profile.jitter`     |
| `own-time`      | plans of the batch, each for the time of its own pipeline at maximum clocks    |
| `one-clock`     | one for each pipeline and iteration, which ends with the slowest pipeline      |
| `batch`         | plans of the batch, which end with the slowest pipeline                        |
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perseus_planner import Frontier, PipelineDag, solve_dag
from perseus_planner.base.errors import UsageError, shown
from perseus_planner.base.fields import Checked
from perseus_planner.base.tables import CsvFile, CsvRow
from perseus_planner.base.units import COUNT, FACTOR, INDEX, SHARE, STAGE, TIME, WAIT, Count, Wait
from perseus_planner.extensions.lab import baselines
from perseus_planner.plans.clock_replay import Task
from perseus_planner.plans.replay import all_maximum, replay_changes
from perseus_planner.profiles.groups import slowed
from perseus_planner.profiles.measurement import ClockChange

if TYPE_CHECKING:
    from perseus_planner.extensions.autopilot.batches.solver import BatchPlan

_COLUMNS = ("start", "end", "slowdown", "pipeline", "stage")
_HEADER = ",".join(_COLUMNS)
_START = WAIT._replace(wanted="a start: write finite seconds of 0 or more, such as 120.5")
_END = TIME._replace(
    wanted="an end: write finite seconds above 0, such as 180, or nothing for one that stays"
)
_SLOWDOWN = FACTOR._replace(
    wanted="a slowdown: write how many times as long it takes, 1 or more, such as 1.15", least=1.0
)
_PIPELINE = STAGE._replace(
    wanted="a pipeline: write 0 for the first one, 1 for the next, and so on"
)
_STAGE = STAGE._replace(
    wanted="a stage: write 0 for the first one, or nothing for the whole pipeline"
)


@dataclass(frozen=True)
class Straggler:
    """A pipeline, or one stage of it, that is slow for a while."""

    start_s: float  #: when it begins, seconds after the start of the first iteration, 0 or more
    end_s: float  #: when it ends, seconds, above `start_s`; infinite if it lasts
    #: factor of all times, 1 or more. Power does not change, so energies grow as times do.
    slowdown: float
    pipeline: int  #: number of the pipeline
    stage: int | None = None  #: number of the slow stage, or None if the whole pipeline is slow


class Condition(NamedTuple):
    """How slow a pipeline is at some moment."""

    slowdown: float = 1.0  #: factor of all its times
    #: (stage, further factor of the times of its computations), in the order of the stages.
    stages: tuple[tuple[int, float], ...] = ()


UNDISTURBED = Condition()  #: the condition of a pipeline without a straggler


def condition_of(stragglers: Iterable[Straggler]) -> Condition:
    """Return the condition of a pipeline with these stragglers; slowdowns of the same stage are
    multiplied.
    """
    slowdown = 1.0
    stages: dict[int, float] = {}
    for straggler in stragglers:
        if straggler.stage is None:
            slowdown *= straggler.slowdown
        else:
            stages[straggler.stage] = stages.get(straggler.stage, 1.0) * straggler.slowdown
    return Condition(
        slowdown, tuple(sorted((stage, slow) for stage, slow in stages.items() if slow != 1.0))
    )


def read_stragglers(path: Path, pipelines: int, stages: int) -> tuple[Straggler, ...]:
    """Read stragglers from the CSV file at `path`, in its order. Columns other than those five are
    ignored.

    Args:
        path: the file.
        pipelines: number of pipelines of the cluster.
        stages: number of stages of each pipeline.

    Raises:
        UsageError: If the file cannot be read or a row is wrong. The text names file, line, column
            and remedy.
    """
    table = CsvFile(path, UsageError, f"the header {_HEADER} and a row for each straggler")
    table.need(_COLUMNS, _HEADER)
    table.refuse_twice(_COLUMNS)
    stragglers = []
    for row in table:
        stragglers.append(_straggler(row))
        # The table knows no cluster, so whether such a pipeline or stage exists is checked here.
        counts = {"pipeline": pipelines, "stage": stages}
        for column, count in counts.items():
            if (value := getattr(stragglers[-1], column)) is not None and value >= count:
                raise UsageError(
                    f"{row.place(column)}: there is no {column} {value}; {column}s are 0 to "
                    f"{count - 1}"
                )
    return tuple(stragglers)


def _straggler(row: CsvRow) -> Straggler:
    start_s = row.read("start", _START)
    end_s = row.read("end", _END) if row["end"] else math.inf
    if end_s <= start_s:
        raise UsageError(
            f"{row.place('end')}: {shown(row['end'])} is not after the start "
            f"{shown(row['start'])}; correct one of them"
        )
    slowdown = row.read("slowdown", _SLOWDOWN)
    stage = row.read("stage", _STAGE) if row["stage"] else None
    return Straggler(start_s, end_s, slowdown, row.read("pipeline", _PIPELINE), stage)


Clocks = tuple[int, ...]  #: the clock of each of `dag.computations`, MHz


class ReplayedIteration(NamedTuple):
    """One replayed iteration of one pipeline."""

    time_s: float  #: iteration time with the calibrated overhead, seconds
    busy_s: NDArray[np.float64]  #: (ranks,) time for which the GPUs of each rank work, seconds
    busy_j: NDArray[np.float64]  #: (ranks,) energy of that work over all GPUs of the rank, joules


class IterationReplays:
    """Replays iterations of one pipeline, each combination of clocks and slow stages once.

    The slowdown of a stage applies to its computations. The slowdown of a pipeline applies to
    everything: computations, fixed operations, transfers and overhead. The power of a GPU does not
    change, so energies grow as times do.
    """

    def __init__(self, dag: PipelineDag) -> None:
        self.dag = dag
        self._rank_of = np.array(dag.iteration.rank_of)
        self._replayed = cache(self._replay)

    def replay(self, clocks: Clocks, condition: Condition) -> ReplayedIteration:
        """Return an iteration at `clocks` of a pipeline in `condition`.

        Complexity: one replay for each new pair of clocks and slow stages, and a look-up after
        that.
        """
        time_s, busy_s, busy_j = self._replayed(clocks, condition.stages)
        slowdown = condition.slowdown
        return ReplayedIteration(time_s * slowdown, busy_s * slowdown, busy_j * slowdown)

    def _replay(self, clocks: Clocks, stages: SlowStages) -> ReplayedIteration:
        """Replay with the time that clock changes take, which no slowdown applies to."""
        # Slow stages are in the rows, so that the replay itself knows nothing of stragglers.
        profile = slowed(self.dag.profile, dict(stages))
        iteration = self.dag.iteration
        tables = {
            key: {row.clock_mhz: row for row in profile.measurements[key]}
            for key in dict.fromkeys(iteration.keys)
        }
        tasks = [Task(tables[key], mhz) for key, mhz in zip(iteration.keys, clocks, strict=True)]
        # Without a measured cost, changes are free, as in the plan.
        change = profile.clock_change or ClockChange(0.0)
        waiting_w = self.dag.rank_waiting_w
        replayed = replay_changes(iteration, tasks, change, waiting_w, profile.gpus_per_stage)
        # The overhead of an iteration is on no rank's path, so it is added to the longest.
        time_s = max(replayed.ends_s) + profile.overhead_s
        return ReplayedIteration(
            time_s, self._per_rank(replayed.durations_s), self._per_rank(replayed.energies_j)
        )

    def _per_rank(self, values: Sequence[float]) -> NDArray[np.float64]:
        ranks = len(self.dag.schedule.ranks)
        per_node = np.array(values)
        return np.array([math.fsum(per_node[self._rank_of == rank]) for rank in range(ranks)])


SlowStages = tuple[tuple[int, float], ...]
Policy = Callable[[frozenset[Condition]], Mapping[Condition, Clocks]]
"""Returns the clocks for each of the conditions that pipelines are known to be in."""
ClockRule = Callable[[PipelineDag, float], Mapping[str, int]]

#: In the order of the table above
POLICIES = ("max", "one-clock", "per-stage", "envpipe", "planner-fixed", "planner")


def make_policy(
    name: str, frontier: Frontier, slowdown: float, replays: IterationReplays
) -> Policy:
    """Make the policy called `name`.

    Args:
        name: one of `POLICIES`.
        frontier: the frontier of a pipeline without a straggler.
        slowdown: the target, as a multiple of the iteration time with all clocks at maximum.
        replays: the replayed iterations of `frontier.dag`.

    Raises:
        InfeasibleError: If no iteration is as fast as the target.
        UsageError: If there is no such policy, or it does not apply to this schedule or profile.
    """
    if name not in POLICIES:
        raise UsageError(f"policy {shown(name)} is unknown; choose from {', '.join(POLICIES)}")
    target_s = slowdown * frontier.baseline_time_s
    # Rules of other planners may be asked for any deadline, so they react to stragglers.
    if name in _RULES:
        # Few deadlines come again and again, and each takes a search.
        @cache
        def clocks_for(deadline_s: float) -> Clocks:
            return _checked_clocks(frontier, _RULES[name](frontier.dag, deadline_s))

        # A straggling pipeline keeps the clocks of the target.
        kept = clocks_for(target_s)
        return _reacting(replays, target_s, clocks_for, lambda _: kept)
    if name == "planner-fixed":
        kept = _planned(frontier, target_s)
    elif name != "planner":
        rule = all_maximum if name == "max" else baselines.envpipe
        kept = _checked_clocks(frontier, rule(frontier.dag))
    else:
        kept = _planned(frontier, target_s)

        @cache
        def with_slow_stages(stages: SlowStages) -> Clocks:
            # Without a slow stage nothing is to be solved again.
            if not stages:
                return kept
            profile = slowed(frontier.profile, dict(stages))
            # Slow stages change the critical path, so the pipeline is solved again with their
            # times.
            again = solve_dag(frontier.dag.with_profile(profile))
            # If it cannot meet the target any more, its own time at full clocks is the best that it
            # can do.
            return _planned(again, max(again.baseline_time_s, target_s))

        return _reacting(replays, target_s, partial(_planned, frontier), with_slow_stages)
    return lambda conditions: dict.fromkeys(conditions, kept)


def _reacting(
    replays: IterationReplays,
    target_s: float,
    clocks_for: Callable[[float], Clocks],
    straggler_clocks: Callable[[SlowStages], Clocks],
) -> Policy:
    """Return the policy that slows pipelines without a straggler down to the slowest with one.

    Args:
        replays: the replayed iterations of a pipeline.
        target_s: the iteration time to meet without stragglers, seconds.
        clocks_for: returns the clocks of a pipeline without a straggler for an iteration time,
            seconds.
        straggler_clocks: returns the clocks of a straggling pipeline for its slow stages; () if all
            of it is slow.
    """

    def clocks_in(conditions: frozenset[Condition]) -> Mapping[Condition, Clocks]:
        clocks = {condition: straggler_clocks(condition.stages) for condition in conditions}
        slowest_s = max(
            replays.replay(own_clocks, condition).time_s for condition, own_clocks in clocks.items()
        )
        if UNDISTURBED in clocks and slowest_s > target_s:
            clocks[UNDISTURBED] = clocks_for(slowest_s)
        return clocks

    return clocks_in


def _planned(frontier: Frontier, deadline_s: float) -> Clocks:
    """Return the clocks of the plan for a deadline; all deadlines beyond `max_time_s` share one
    plan. The rows are what the simulated cluster runs by, so plans take them for the truth.
    """
    plan = frontier.plan_until(min(deadline_s, frontier.max_time_s), on_time=None)
    return tuple(plan.clocks.values())


def _checked_clocks(frontier: Frontier, clocks: Mapping[str, int]) -> Clocks:
    return tuple(frontier.plan_of(clocks).clocks.values())


_RULES: Mapping[str, ClockRule] = {
    "one-clock": baselines.one_clock,
    "per-stage": baselines.one_per_stage,
}


Floats = NDArray[np.float64]


_MOST_GPUS = 2**24
"""GPUs of a cluster: more than there are anywhere, and results of 130 MB for each policy."""


@dataclass(frozen=True, eq=False)
class Cluster(Checked):
    """A training job on a cluster, with its stragglers.

    Raises:
        UsageError: If a number is out of range.
    """

    frontier: Frontier  #: the frontier of each pipeline; all pipelines are alike
    pipelines: Count  #: number of data-parallel pipelines
    iterations: Count  #: number of iterations that the job runs
    #: in any order. The slowdowns of stragglers that hit the same stage at once are multiplied.
    stragglers: Sequence[Straggler] = ()
    delay_s: Wait = 1.0  #: how late a policy learns of a change, seconds, 0 or more

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frontier.dag.has_open_modes:
            raise UsageError(
                "modes: a cluster is replayed in one way of running; leave the other modes out of "
                "the profile"
            )
        if self.gpus > _MOST_GPUS:
            raise UsageError(
                f"pipelines: {self.pipelines:,} of {self.gpus // self.pipelines} GPUs are more "
                f"than {_MOST_GPUS:,} GPUs; give fewer, as a result has a row for each"
            )

    @cached_property
    def replays(self) -> IterationReplays:
        """The replayed iterations of a pipeline."""
        return IterationReplays(self.frontier.dag)

    @property
    def gpus(self) -> int:
        """The number of GPUs in the cluster."""
        return (
            self.pipelines
            * len(self.frontier.schedule.ranks)
            * self.frontier.profile.gpus_per_stage
        )


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a job under one policy. All GPUs of a rank do the same."""

    policy: str  #: name of the policy
    iterations: int  #: number of iterations
    time_s: float  #: time of all iterations, seconds
    #: (pipelines, ranks) time for which each GPU of a rank works, seconds. It is idle for the rest.
    busy_s: Floats
    #: (pipelines, ranks) energy of each GPU of a rank, waiting included, joules.
    energy_per_gpu_j: Floats
    gpus_per_stage: int  #: number of GPUs of a rank

    @property
    def idle_s(self) -> Floats:
        """(pipelines, ranks) time for which each GPU of a rank waits, seconds."""
        return self.time_s - self.busy_s

    @property
    def energy_j(self) -> float:
        """Energy of all GPUs, waiting included, joules."""
        return math.fsum(self.energy_per_gpu_j.flat) * self.gpus_per_stage

    @property
    def power_w(self) -> float:
        """Average power of all GPUs, watts."""
        return self.energy_j / self.time_s


def simulate(cluster: Cluster, name: str, slowdown: float = 1.0) -> Outcome:
    """Replay the job under the policy called `name`.

    Args:
        cluster: the job.
        name: one of `policies.POLICIES`.
        slowdown: the target, as a multiple of the iteration time with all clocks at maximum.

    Raises:
        InfeasibleError: If no iteration is as fast as the target.
        UsageError: If there is no such policy, or it does not apply to this schedule or profile.
    """
    policy = make_policy(name, cluster.frontier, slowdown, cluster.replays)
    return replay_under(cluster, name, policy)


def replay_under(cluster: Cluster, name: str, policy: Policy) -> Outcome:
    """Replay the job under `policy`, called `name`."""
    waiting_w = np.array(cluster.frontier.dag.rank_waiting_w)
    busy_s = np.zeros((cluster.pipelines, len(waiting_w)))
    energy_j = np.zeros_like(busy_s)
    # An exact fraction, so that rounding moves no event to another iteration.
    time_s = Fraction(0)
    for count, groups in _equal_iterations(cluster, policy):
        # All pipelines end an iteration together, with the slowest.
        longest_s = max(iteration.time_s for iteration, _ in groups)
        for iteration, members in groups:
            # A count of equal iterations costs as much as one, so the length of the job does not
            # matter.
            busy_s[members] += count * iteration.busy_s
            energy_j[members] += count * (
                # Waiting GPUs draw their power until the slowest pipeline has ended.
                iteration.busy_j + waiting_w * (longest_s - iteration.busy_s)
            )
        time_s += count * Fraction(longest_s)
    gpus = cluster.frontier.profile.gpus_per_stage
    return Outcome(name, cluster.iterations, float(time_s), busy_s, energy_j / gpus, gpus)


def _equal_iterations(
    cluster: Cluster, policy: Policy
) -> Iterator[tuple[int, list[tuple[ReplayedIteration, list[int]]]]]:
    """Yield a number of equal iterations, with each distinct iteration in them and the pipelines
    that run it.
    """
    # What is, and what the policy knows, are two views of the same events, one of them late.
    actual = _DelayedView(cluster.stragglers, 0.0)
    delayed = _DelayedView(cluster.stragglers, cluster.delay_s)
    plans: dict[frozenset[Condition], Mapping[Condition, Clocks]] = {}
    now = Fraction(0)
    left = cluster.iterations
    while left:
        actual.move_to(now)
        delayed.move_to(now)
        # Pipelines in the same state run the same, so each state is replayed once.
        groups = _groups(cluster.pipelines, actual.conditions, delayed.conditions)
        seen = frozenset(belief for _, belief in groups)
        # Equal beliefs have equal plans, and each takes a solve.
        if seen not in plans:
            plans[seen] = policy(seen)
        running = [
            # Clocks follow what is believed, and times what is true.
            (cluster.replays.replay(plans[seen][belief], truth), pipelines)
            for (truth, belief), pipelines in groups.items()
        ]
        longest_s = Fraction(max(iteration.time_s for iteration, _ in running))
        # Until the next event of either view all iterations are equal.
        upcoming = [moment for moment in (actual.upcoming, delayed.upcoming) if moment is not None]
        # An event counts from the first iteration that begins after it, so the count is rounded up.
        count = min([left, *(math.ceil((moment - now) / longest_s) for moment in upcoming)])
        yield count, running
        now = now + count * longest_s
        left = left - count


def _groups(
    pipelines: int, actual: Mapping[int, Condition], known: Mapping[int, Condition]
) -> dict[tuple[Condition, Condition], list[int]]:
    """Group the pipelines by their actual and their known condition."""
    groups: dict[tuple[Condition, Condition], list[int]] = {}
    for number in range(pipelines):
        groups.setdefault(
            (actual.get(number, UNDISTURBED), known.get(number, UNDISTURBED)), []
        ).append(number)
    return groups


class _DelayedView:
    """The stragglers as an observer sees them who is `late_s` seconds late.

    `conditions` maps each pipeline in which a straggler was seen to its condition.
    """

    def __init__(self, stragglers: Sequence[Straggler], late_s: float) -> None:
        self._stragglers = stragglers
        events = [
            (Fraction(moment_s) + Fraction(late_s), number)
            for number, straggler in enumerate(stragglers)
            for moment_s in (straggler.start_s, straggler.end_s)
            if moment_s != math.inf
        ]
        self._events = sorted(events, reverse=True)
        self._seen: dict[int, set[int]] = {}
        self.conditions: dict[int, Condition] = {}

    @property
    def upcoming(self) -> Fraction | None:
        """The moment of the next change."""
        return self._events[-1][0] if self._events else None

    def move_to(self, now: Fraction) -> None:
        """Apply all changes up to `now`. Successive moments must rise."""
        changed = set()
        while self._events and self._events[-1][0] <= now:
            number = self._events.pop()[1]
            pipeline = self._stragglers[number].pipeline
            # A straggler begins at its first event and ends at its second.
            self._seen.setdefault(pipeline, set()).symmetric_difference_update({number})
            changed.add(pipeline)
        for pipeline in changed:
            self.conditions[pipeline] = condition_of(self._in_order(self._seen[pipeline]))

    def _in_order(self, places: Iterable[int]) -> list[Straggler]:
        return [self._stragglers[number] for number in sorted(places)]


LENGTH_POLICIES = ("max", "planner-fixed", "on-time", "own-time", "one-clock", "batch")
MOST_CHANGES = 8  #: of a rank's clock in an iteration, if changes cost time
_LENGTHS_HEADER = (
    "step,pipeline,microbatch,length, or step,pipeline,microbatch_0,microbatch_1 and so on"
)
_WORK = SHARE._replace(wanted="a work: write a number of 0 or more")
#: work of a squared length, in tokens: hidden size 4096, causal attention
_SQUARE = 1 / (12 * 4096)
WORK_OF_LENGTHS = "tokens + squared lengths / 49152, as in a transformer of hidden size 4096"


@dataclass(frozen=True, eq=False)
class Lengths:
    """The work of each microbatch of a job."""

    #: (iterations, pipelines, microbatches) as multiples of the mean.
    work: NDArray[np.float64]
    of_sequences: bool  #: whether it was computed from lengths of sequences

    @property
    def spread(self) -> float:
        """The standard deviation of a microbatch's work, as a part of its mean."""
        return float(self.work.std())

    @cached_property
    def of_pipelines(self) -> NDArray[np.float64]:
        """(iterations, pipelines) mean work of each pipeline's microbatches."""
        return np.asarray(self.work.mean(axis=2), dtype=np.float64)

    @property
    def slowest(self) -> float:
        """How many times the mean the pipeline with the most work has, on average."""
        return float((self.of_pipelines.max(axis=1) / self.of_pipelines.mean(axis=1)).mean())

    @property
    def moves(self) -> float:
        """The share of iterations in which another pipeline than before has the most work."""
        most = self.of_pipelines.argmax(axis=1)
        return float((most[1:] != most[:-1]).mean()) if len(most) > 1 else 0.0

    def first(self, iterations: int) -> Lengths:
        """Return the first iterations alone."""
        return replace(self, work=self.work[:iterations])


def read_lengths(path: Path) -> Lengths:
    """Read a file of lengths.

    Raises:
        UsageError: If the file cannot be read or a row is wrong; names the file, the line and the
            column. Or if iterations do not have the same pipelines, or pipelines not the same
            microbatches.
    """
    table = CsvFile(path, UsageError, f"the header {_LENGTHS_HEADER}")
    # The header tells which of the two sorts the file is.
    columns = [name for name in table.header if name.startswith("microbatch_")]
    of_sequences = not columns
    needed = ["step", "pipeline", *(["microbatch", "length"] if of_sequences else columns)]
    table.need(needed, _LENGTHS_HEADER)
    table.refuse_twice(needed)
    work: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)
    for row in table:
        key = row.read("step", INDEX), row.read("pipeline", INDEX)
        if of_sequences:
            microbatch = row.read("microbatch", INDEX)
            length = row.read("length", COUNT)
            # Sequences of one microbatch are packed, so their work adds up.
            before = work[key].get(microbatch, 0.0)
            # Attention costs the square of a length, whatever it is packed with.
            work[key][microbatch] = before + length + _SQUARE * length**2
        elif key in work:
            raise UsageError(
                f"{row.where}: this step and pipeline are there twice; keep one of the rows"
            )
        else:
            work[key] = {i: row.read(name, _WORK) for i, name in enumerate(columns)}
    if not work:
        raise UsageError(f"{path}: has no rows below its header; write what each step had")
    # Numbers in the file may have gaps, so they are ranked.
    steps, pipelines = (sorted({key[i] for key in work}) for i in range(2))
    microbatches = sorted(
        {microbatch for microbatch_work in work.values() for microbatch in microbatch_work}
    )
    for step in steps:
        for pipeline in pipelines:
            # Every step needs every microbatch, as one schedule is replayed for all.
            missing = [m for m in microbatches if m not in work.get((step, pipeline), {})]
            if missing:
                raise UsageError(
                    f"{path}: step {step} has no microbatch {missing[0]} of pipeline {pipeline}; "
                    "give all steps the same pipelines and microbatches"
                )
    table_of_work = np.array(
        [[[work[s, p][m] for m in microbatches] for p in pipelines] for s in steps]
    )
    if not table_of_work.mean() > 0.0:
        raise UsageError(f"{path}: has no work at all; write numbers above 0")
    # Only ratios count, as the profile's times are those of mean work.
    return Lengths(table_of_work / table_of_work.mean(), of_sequences)


@dataclass(frozen=True)
class BatchOutcome:
    """What a job of unlike microbatches comes to under one policy."""

    policy: str  #: name of the policy
    times_s: tuple[float, ...]  #: of each iteration, seconds
    energy_j: float  #: over all GPUs, waiting included, joules


class UnlikeJob:
    """A job whose microbatches differ.

    Args:
        frontier: of a pipeline whose microbatches are alike.
        lengths: the work of each microbatch.
        slowdown: the target, as a multiple of the time of the slowest pipeline with all clocks at
            maximum.

    Raises:
        UsageError: If the schedule has other microbatches than the lengths.
    """

    def __init__(self, frontier: Frontier, lengths: Lengths, slowdown: float = 1.0) -> None:
        # Loaded here, as whoever only reads lengths does not need it.
        from perseus_planner.extensions.autopilot.batches.solver import BatchPlanner, Law

        self.frontier = frontier
        self.lengths = lengths
        self._slowdown = slowdown
        microbatches = lengths.work.shape[2]
        # The frontier's schedule is replayed, so its microbatches must be those of the file.
        if frontier.schedule.microbatches != microbatches:
            raise UsageError(
                f"lengths: have {microbatches} microbatches in an iteration, and the schedule "
                f"{frontier.schedule.microbatches}; solve for {microbatches}"
            )
        dag = frontier.dag
        change = frontier.profile.clock_change
        rows = dag.profile.measurements
        # Work is in multiples of the mean, so a law is proportional, with the measured time as
        # slope.
        laws = {key: Law(0.0, (rows[key][0].time_s,)) for key in dict.fromkeys(dag.iteration.keys)}
        # Free changes need no limit.
        self._most_changes = None if change is None else MOST_CHANGES
        self.planner = BatchPlanner(dag, laws, max_changes=self._most_changes)
        self._change = change or ClockChange(0.0)
        self._as_said = np.ones(len(dag.computations))

    def full_clocks_s(self, iteration: int) -> list[float]:
        """Return the seconds of each pipeline in an iteration with all clocks at maximum."""
        return [self.planner.full_clocks_s(work[:, None]) for work in self.lengths.work[iteration]]

    def outcome(self, policy: str) -> BatchOutcome:
        """Replay the job under one of `LENGTH_POLICIES`.

        Raises:
            InfeasibleError: If no iteration is as fast as the target of the policy.
            UsageError: If there is no such policy.
        """
        times_s = []
        effective_j = []
        # A static plan is made once and used for all iterations.
        make = self._maker(policy)
        for iteration, pipelines in enumerate(self.lengths.work):
            # The slowest pipeline at full clocks decides, as all end together.
            target_s = self._slowdown * max(self.full_clocks_s(iteration))
            came = [
                self.planner.replay(
                    make(work, target_s),
                    self._as_said,
                    self._change,
                    # Only plans of the batch tell ranks when they are late.
                    is_catching_up=policy in ("batch", "own-time"),
                )
                for work in pipelines[:, :, None]
            ]
            times_s.append(max(replayed.time_s for replayed in came))
            effective_j += [replayed.effective_j for replayed in came]
        # Effective energy leaves out waiting, which is added for the whole time of all pipelines.
        waiting_w = self.frontier.dag.waiting_w * self.lengths.work.shape[1]
        energy_j = math.fsum([*effective_j, waiting_w * math.fsum(times_s)])
        return BatchOutcome(policy, tuple(times_s), energy_j)

    def _maker(self, policy: str) -> Callable[[NDArray[np.float64], float], BatchPlan]:
        """Return what makes the plan of a pipeline from its work and the target."""
        planner = self.planner
        frontier = self.frontier
        if policy == "batch":
            return planner.plan
        if policy == "one-clock":
            return planner.one_clock
        if policy == "own-time":
            return lambda work, _: planner.plan(work, self._slowdown * planner.full_clocks_s(work))
        if policy == "max":
            return lambda work, target_s: planner.plan_of(work, None, target_s)
        if policy not in LENGTH_POLICIES:
            raise UsageError(
                f"policy {shown(policy)} does not apply to lengths; choose from "
                f"{', '.join(LENGTH_POLICIES)}"
            )
        deadline_s = self._slowdown * frontier.baseline_time_s
        most = self._most_changes
        if policy == "planner-fixed":
            # This plan is for microbatches that are alike, so it has no slack for others.
            plan = frontier.plan_until(deadline_s, max_changes=most, on_time=None)
        else:
            plan = self._wary_frontier().plan_until(deadline_s, max_changes=most)
        # A plan that is on time may have clocks that were not measured: the next higher ones are.
        rows = frontier.profile.measurements
        clocks = [
            min(m.clock_mhz for m in rows[key] if m.clock_mhz >= mhz)
            for key, mhz in zip(frontier.dag.iteration.keys, plan.clocks.values(), strict=True)
        ]
        return lambda work, target_s: planner.plan_of(work, clocks, target_s)

    def _wary_frontier(self) -> Frontier:
        # The cluster is replayed from the very rows of the profile.
        profile = replace(self.frontier.profile, jitter=self.lengths.spread, gpu_spread=0.0)
        return solve_dag(PipelineDag(profile, self.frontier.dag.iteration))

    def reordered_s(self) -> tuple[float, float]:
        """Return the seconds of all iterations at full clocks: as they are, and if each pipeline
        ran its microbatches in the best order that was tried.
        """
        as_is_s = 0.0
        reordered_s = 0.0
        for iteration, pipelines in enumerate(self.lengths.work):
            as_is_s += max(self.full_clocks_s(iteration))
            reordered_s += max(
                self.planner.full_clocks_s(work[list(self.planner.best_order(work))])
                for work in pipelines[:, :, None]
            )
        return as_is_s, reordered_s
