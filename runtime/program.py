"""Programs: what one rank runs in an iteration and at which clocks. Deciders make them, and the
hook follows them.

What the hook needs stands in a program itself. What an iteration is expected to take and use is its
`Expected`; whatever else a decider remembers with it is that decider's own note.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from perseus_planner.base.errors import PlanError
from perseus_planner.profiles.measurement import changes_per_rank, with_fewer_changes
from perseus_planner.profiles.modes import OWN
from perseus_planner.runtime.marks import clock_request
from perseus_planner.schedules import overlapped

if TYPE_CHECKING:
    from perseus_planner.plans.plan import Plan
    from perseus_planner.runs.savings import RankCosts
    from perseus_planner.schedules import Computation

Order = Sequence[tuple[int, str, int]]
"""What a rank ran in an iteration: stage, kind and microbatch of each computation."""


class Sent(Protocol):
    """What all ranks of a job run, as they were sent it."""

    @property
    def number(self) -> int | None:
        """What a service counts it by; None if it is not of one."""

    def rank_clocks(self, pipeline: int) -> Sequence[float]:
        """Return the mean clock of each rank of a pipeline."""


@dataclass(frozen=True)
class Expected:
    """What an iteration by a program is expected to take and use: what people see, and what its
    measurements are compared with. The hook asks for nothing of it.
    """

    time_s: float = 0.0  #: Time of an iteration, seconds; 0 if it is not known
    top: int = 0  #: The value that counts as full clocks
    #: The plan that the program is a part of; None for a program that a decider has made.
    plan: Plan | None = None
    #: Seconds that the rank computes, were its GPU as fast as at first; None if that is not known.
    busy_s: float | None = None
    #: What rows say of the iteration; None if that is not known, or its plan says it.
    costs: RankCosts | None = field(default=None, repr=False)
    sent: Sent | None = field(default=None, repr=False, compare=False)  #: What all ranks were sent


class Table(NamedTuple):
    """What the controller looks clocks up in (`LatestStarts`)."""

    number: int  #: Its number
    #: Whether it has clocks by time, for an iteration of which only begin and end are seen.
    by_time: bool = False


class Inside(NamedTuple):
    """What runs in an iteration that is shown as one computation."""

    microbatches: int  #: How many it has
    runs: tuple[Computation, ...] = ()  #: In order, as the engine would show it
    is_captured: bool = False  #: Whether its computations are marked in a CUDA graph


@dataclass(frozen=True)
class Program:
    """What one rank runs in an iteration, and the clock of each computation: its part of a plan, or
    what its decider has decided.
    """

    #: Number of the program in this job: 1 for the first, 2 for the next, and so on. Elsewhere 0
    #: stands for no program yet.
    version: int
    computations: tuple[Computation, ...] = field(repr=False)  #: What the rank runs, in order
    #: The value for each computation: MHz, or watts of a power limit.
    clocks: tuple[int, ...] = field(repr=False)
    #: The mode of each computation; empty if all run in the training's own way.
    modes: tuple[str, ...] = field(default=(), repr=False)
    #: The value to go on with after its last computation, as another program is next; 0 for that of
    #: its first one.
    then: int = 0
    #: Whether the source may have another one of the same computations while the iteration runs.
    awaits: bool = False
    table: Table | None = None  #: By which this rank catches up; None if it does not
    inside: Inside | None = None  #: Of an iteration that is shown as one computation
    expected: Expected = Expected()  #: What measurements are compared with
    note: object = None  #: What else its decider remembers with it

    @classmethod
    def of_plan(cls, version: int, plan: Plan, rank: int, sent: Sent | None = None) -> Program:
        """Return what a rank of the plan's schedule runs, with all that was sent with the plan.

        Raises:
            PlanError: If the schedule has no such rank.
        """
        ranks = plan.schedule.ranks
        if not 0 <= rank < len(ranks):
            raise PlanError(
                f"the plan is for pipelines of {len(ranks)} ranks, and this is rank {rank} of a "
                "pipeline; make the plan for the schedule that you train with"
            )
        clocks = tuple(plan.clocks[str(computation)] for computation in ranks[rank])
        modes = tuple(plan.modes.get(str(c), OWN) for c in ranks[rank]) if plan.modes else ()
        expected = Expected(plan.time_s, plan=plan, sent=sent)
        return cls(version, ranks[rank], clocks, modes, expected=expected)

    @cached_property
    def shown(self) -> tuple[Computation, ...]:
        """`computations` as the engine shows them: an overlapped pair with its forward."""
        plan = self.expected.plan
        forward_of = {} if plan is None else plan.schedule.forward_of
        return tuple(
            overlapped(forward_of[computation], computation)
            if computation in forward_of
            else computation
            for computation in self.computations
        )

    @cached_property
    def changes(self) -> int:
        """How often the clock changes in an iteration, including the change back to the first
        one.
        """
        return changes_per_rank(self.clocks)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of an iteration."""
        if self.inside is not None:
            return self.inside.microbatches
        return 1 + max(computation.microbatch for computation in self.computations)

    @cached_property
    def requests(self) -> tuple[int, ...]:
        """The clock request of each computation; in a program of one computation another one for
        the same, and at the end that of `then`, if there is one.
        """
        table = self.table or Table(0)
        of_all = partial(clock_request, table=table.number, by_time=table.by_time)
        requests = [of_all(i, clock) for i, clock in enumerate(self.clocks)]
        # An equal number would not be seen as a new one, so one computation takes turns between
        # two.
        if len(requests) == 1:
            requests.append(of_all(0, self.clocks[0], again=True))
        if self.then:
            requests.append(clock_request(0, self.then))
        return tuple(requests)

    def at(self, clocks: tuple[int, ...], *, costs: RankCosts | None = None) -> Program:
        """Return the program at other clocks, of which rows say `costs`."""
        expected = replace(self.expected, busy_s=None, costs=costs)
        return replace(self, clocks=clocks, expected=expected)

    def with_changes(self, most: int) -> Program:
        """Return the program with at most so many changes in an iteration, at the same clocks or
        higher ones.
        """
        clocks = with_fewer_changes(self.clocks, most)
        return self.at(clocks)

    def check_order(self, order: tuple[Computation, ...], engine: str) -> None:
        """Refuse a plan whose order of computations is not that of the engine.

        Args:
            order: What the engine runs on this rank.
            engine: Name of the engine.

        Raises:
            PlanError: If the orders differ; names the first difference.
        """
        plan = self.expected.plan
        if order == self.shown or plan is None:
            return
        both = list(zip(order, self.shown, strict=False))
        # The first difference tells the most; if one order is only longer, it is where the other
        # ends.
        position = next(
            (i for i, (actual, planned) in enumerate(both) if actual != planned), len(both)
        )
        schedule = plan.schedule
        raise PlanError(
            f"the plan ({schedule}) is not what {engine} runs on rank "
            f"{schedule.ranks.index(self.computations)} of the pipeline: computation "
            f"{position + 1} is {_at(order, position)} there and "
            f"{_at(self.shown, position)} in the plan; solve for the schedule and the "
            "number of microbatches that you train with"
        )


def _at(order: tuple[Computation, ...], position: int) -> str:
    return str(order[position]) if position < len(order) else "missing"
