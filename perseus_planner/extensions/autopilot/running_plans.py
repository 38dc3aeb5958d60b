"""The plans that pipelines run while the autopilot learns, and when they are searched again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.learning import Learner
    from perseus_planner.extensions.autopilot.planning import Costs, Searcher
    from perseus_planner.extensions.autopilot.tuning import PlanTuning

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]

Group: TypeAlias = "tuple[tuple[float, ...], float]"
"""Pipelines of one group have one plan: how much slower each of their GPUs is than usual, to
percents, and how long they may take beside a slower pipeline, seconds."""


class Outlook(NamedTuple):
    """What is known of an iteration ahead when its clocks are decided."""

    iteration: int  #: its number
    observed: int  #: the number of the last iteration that was observed
    is_early: bool  #: whether so little is known that every rank tries something
    #: one in so many ranks tries something in it; 1 while it is early.
    turn: int
    measured_rows: int  #: how many rows were measured
    margin: float  #: by how much lower clocks are planned longer, as times spread; a share
    reference_s: float  #: seconds of an iteration at full clocks, replayed from expected costs
    waits_s: tuple[float, ...]  #: of each pipeline: how long it may take beside a slower one
    deadlines_s: tuple[float, ...]  #: of each pipeline: how long its plan may take


class _Searched(NamedTuple):
    """When plans were searched, and for what."""

    iteration: int
    measured_rows: int = 0
    times_s: Floats | None = None  #: (pipelines, classes, options) seconds of rows


class RunningPlans:
    """The plan of each pipeline, kept until it is worth searching it again.

    Args:
        search: what searches plans.
        learner: what knows how fast each GPU is.
        tuning: when plans are searched.
        random: the source of chance.
    """

    def __init__(
        self,
        search: Searcher,
        learner: Learner,
        tuning: PlanTuning,
        random: np.random.Generator,
    ) -> None:
        self._search = search
        self._learner = learner
        self._tuning = tuning
        self._random = random
        self._plans: dict[Group, Integers] = {}
        # So long ago that the first iteration is due.
        #: when fresh plans were solved for last
        self._solved = _Searched(-tuning.again)
        #: when plans were polished or solved for last
        self._searched = _Searched(-tuning.again)

    def programs(
        self, outlook: Outlook, costs: Sequence[Costs], expected: Sequence[Costs]
    ) -> tuple[list[Integers], bool]:
        """Return the plan of each pipeline, and whether all plans were searched again for this
        iteration.

        Args:
            outlook: what is known of the iteration.
            costs: of each pipeline, what rows are planned to cost.
            expected: of each pipeline, what they are expected to cost.
        """
        is_to_solve = self._is_to_solve(outlook)
        is_to_search = is_to_solve or self._is_to_polish(outlook, costs)
        plans: dict[Group, Integers] = {}
        programs = []
        for pipeline, deadline_s in enumerate(outlook.deadlines_s):
            group = self._group(pipeline, outlook.waits_s[pipeline])
            # Equal pipelines share a plan, so each group is searched once.
            if group not in plans:
                if group in self._plans and not is_to_search:
                    plans[group] = self._plans[group]
                else:
                    starts = self._starts(
                        group, costs[pipeline], deadline_s, outlook.iteration, solve=is_to_solve
                    )
                    plans[group] = self._best(
                        starts, costs[pipeline], expected[pipeline], deadline_s
                    )
            programs.append(plans[group])
        # Groups that are gone take their plans with them.
        self._plans = plans
        if is_to_search:
            times_s = _times_s(costs)
            self._searched = _Searched(outlook.iteration, outlook.measured_rows, times_s)
        if is_to_solve:
            self._solved = self._searched
        return programs, is_to_search

    def _is_to_solve(self, outlook: Outlook) -> bool:
        """Whether fresh plans are due: many more rows were measured, or the last ones are old."""
        if outlook.measured_rows >= self._tuning.growth * self._solved.measured_rows:
            return True
        age = outlook.iteration - self._solved.iteration
        return age >= self._tuning.again * self._rest(outlook.iteration)

    def _is_to_polish(self, outlook: Outlook, costs: Sequence[Costs]) -> bool:
        """Whether running plans are due to be polished: the last search is old, or a row costs
        something else since.
        """
        age = outlook.iteration - self._searched.iteration
        if age >= self._rest(outlook.iteration):
            return True
        before_s = self._searched.times_s
        return before_s is None or not np.allclose(
            _times_s(costs), before_s, rtol=self._tuning.same, atol=0.0
        )

    def _rest(self, iteration: int) -> int:
        """Return for how many iterations searches rest while costs stay the same: later for
        longer, so that they take a bounded share of the time.
        """
        return max(1, int(iteration * self._tuning.rest))

    def _group(self, pipeline: int, wait_s: float) -> Group:
        ranks = self._search.job.ranks
        factors = self._learner.times.factor[pipeline * ranks : (pipeline + 1) * ranks]
        return tuple(round(factor, 2) for factor in factors.tolist()), wait_s

    def _starts(
        self, group: Group, costs: Costs, deadline_s: float, iteration: int, *, solve: bool
    ) -> list[Integers]:
        """Return the programs from which the plan of a group is searched: the running one, and a
        fresh one if it is due and there is one in time.
        """
        search = self._search
        running = self._plans.get(group)
        if running is None:
            # A new group has no plan of its own yet, so it begins with that of another, beside a
            # fresh one.
            running = next(iter(self._plans.values()), search.full())
            solve = solve or bool(self._plans)
        # Rows may have become unusable since, so the running plan is repaired before it competes.
        starts = [search.repaired(running, costs)]
        fresh = search.solve(costs, deadline_s, iteration) if solve else None
        if fresh is not None:
            # The fresh plan knows nothing of clock changes, so it is polished before it is
            # compared.
            polishes = self._tuning.fresh
            for again in range(polishes):
                seed = polishes * iteration + again
                fresh, _, _ = search.polish(fresh, costs, deadline_s, seed)
            starts.append(fresh)
        return starts

    def _best(
        self, starts: Sequence[Integers], costs: Costs, expected: Costs, deadline_s: float
    ) -> Integers:
        """Return the best of programs, each polished; full clocks if none is cheaper than these."""
        best, worth_j = self._search.best_polished(starts, costs, deadline_s, self._random)
        # Beside what full clocks are expected to cost, so nothing is risked for a plan that saves
        # nothing.
        full = self._search.full()
        return full if worth_j >= self._search.replay(full, expected)[1] else best


def _times_s(costs: Sequence[Costs]) -> Floats:
    """(pipelines, classes, options) seconds of rows."""
    return np.array([of_pipeline.time_s for of_pipeline in costs])
