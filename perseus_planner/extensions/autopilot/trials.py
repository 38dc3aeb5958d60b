"""Which operating points the autopilot tries beside its plans, to learn what they cost.

A trial is an option of a rank: in an iteration it takes the place of the planned ones in a few of
the rank's computations. `Searcher` finds a place for it where the iteration stays short enough;
`Trials` says which ones are worth it. Options that the best plan might use come first: this plan is
the target, found as if all rows cost what is hoped.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from perseus_planner.extensions.autopilot.planning import Limit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from perseus_planner.extensions.autopilot.learning import Learner
    from perseus_planner.extensions.autopilot.planning import Costs, Searcher
    from perseus_planner.extensions.autopilot.running_plans import Outlook
    from perseus_planner.extensions.autopilot.tuning import PlanTuning
    from perseus_planner.runtime.guarantee import Guarantee

    Floats = NDArray[np.float64]
    Integers = NDArray[np.int64]
    Flags = NDArray[np.bool_]

# By hand: without a common divisor, so that sweeps of ranks and pipelines seldom meet.
_RANK_STEP = 5
"""How many options further each rank begins in the sweep over all of them."""
_PIPELINE_STEP = 3
"""How many options further each pipeline begins in it."""


class _Limits(NamedTuple):
    """How long an iteration with trials may be, and what it is judged by."""

    safe: Sequence[Costs]  #: of each pipeline, what rows take at most in all likelihood
    safe_s: float  #: how long the iteration may be then
    doubt: Sequence[Costs]  #: likewise even if rows are over the physical bound
    doubt_s: float  #: by how much longer it may be then


class _Candidates(NamedTuple):
    """The options that a rank may try, none of them twice."""

    hoped: list[int]  #: those that the target uses, most used first
    others: list[int]  #: all others, in an order that spreads over all clocks


class Trials:
    """Chooses the trials of each iteration.

    Args:
        search: what finds a place for each trial.
        learner: what knows which rows are known.
        guarantee: what knows how much may be owed.
        slowdown: the agreed time of an iteration, as a multiple of one at full clocks.
        tuning: how many trials there are, and how long they may be.
        random: the source of chance.
    """

    def __init__(
        self,
        search: Searcher,
        learner: Learner,
        guarantee: Guarantee,
        slowdown: float,
        tuning: PlanTuning,
        random: np.random.Generator,
    ) -> None:
        self._search = search
        self._learner = learner
        self._guarantee = guarantee
        self._slowdown = slowdown
        self._tuning = tuning
        self._random = random
        #: the last iteration in which a mode was tried for the first time, which may be late
        self.costly_iteration = -1
        #: (rank, option) -> the iteration of its last trial
        self._tried: dict[tuple[int, int], int] = {}
        #: what the plan would be if all rows cost what is hoped; None before the first `aim`
        self._target: Integers | None = None
        #: how many rows were measured when the target was solved for
        self._target_rows = 0

    def aim(self, outlook: Outlook, plan: Integers) -> None:
        """Find the target anew: by what rows are expected to cost, or a little less.

        Args:
            outlook: what is known of the iteration.
            plan: the plan of the first pipeline, the target where none is found.
        """
        # The target names rows worth a trial, so the doubt of each row's power counts in its
        # favour.
        margin = self._guarantee.margin.value or 0.0
        hopeful = self._learner.costs("mean", 1.0, margin)[0]
        deadline_s = max(outlook.deadlines_s)
        enough_rows = self._tuning.target_growth * self._target_rows
        if self._target is None or outlook.measured_rows >= enough_rows:
            self._target_rows = outlook.measured_rows
            self._target = self._search.solve(hopeful, deadline_s, outlook.iteration)
        # Rows change between solutions, so the target follows them by polishing.
        start = plan if self._target is None else self._target
        self._target, _ = self._search.best_polished([start], hopeful, deadline_s, self._random)

    def add(self, outlook: Outlook, plans: Sequence[Integers]) -> tuple[list[Integers], int]:
        """Return the plan of each pipeline with trials of rows that are not settled, and how many
        rows these are. `aim` comes first.
        """
        limits = self._limits(outlook)
        settled = self._settled(outlook)
        programs = []
        rows = 0
        is_costly = False
        for pipeline, plan in enumerate(plans):
            is_open = self._open(plan, settled, outlook.iteration)
            # A mode is measured alone, because nothing is known of what it costs, and no other
            # pipeline may be late for it.
            spare_s = 0.0
            wanted = self._new_modes(outlook, pipeline)
            if wanted:
                spare_s = self._spare_s()
            else:
                wanted = self._wanted(outlook, pipeline, is_open)
            most_s = max(limits.safe_s, outlook.waits_s[pipeline]) + spare_s
            program, tried = self._search.with_trials(
                plan,
                (
                    Limit(limits.safe[pipeline], most_s),
                    Limit(limits.doubt[pipeline], most_s + limits.doubt_s),
                ),
                wanted,
                is_open,
                settled,
                self._random,
            )
            programs.append(program)
            is_costly |= bool(tried) and spare_s > 0.0
            for rank, option in tried:
                self._tried[rank, option] = outlook.iteration
                rows += self._unsettled(rank, option, settled)
        if is_costly:
            self.costly_iteration = outlook.iteration
        return programs, rows

    def _limits(self, outlook: Outlook) -> _Limits:
        """Return how long an iteration with trials may be, by what rows take at most."""
        # A trial may be longer than a plan, as it runs once and the ledger charges it.
        tuning = self._tuning
        longer = tuning.trial if outlook.is_early else tuning.late_trial
        safe_s = outlook.reference_s * (self._slowdown + longer)
        # Trials that were not observed yet may fail the physical bound as well, so less is risked
        # on top of them.
        are_all_seen = max(self._tried.values(), default=-1) <= outlook.observed
        doubt = tuning.doubt if are_all_seen else tuning.more_doubt
        margin = max(outlook.margin, 0.0)
        return _Limits(
            self._learner.costs("safe", margin=margin),
            safe_s,
            self._learner.costs("doubt", margin=margin),
            outlook.reference_s * doubt,
        )

    def _settled(self, outlook: Outlook) -> Flags:
        """(classes, options) whether a trial would tell little more of a row."""
        settled = self._learner.settled()
        # Full clocks count as settled but in one iteration of so many, which checks them for
        # comparisons.
        check = self._tuning.check if outlook.is_early else 2 * self._tuning.check
        settled[:, 0] = outlook.iteration % check > 0
        return settled

    def _unsettled(self, rank: int, option: int, settled: Flags) -> int:
        """Return of how many rows a trial tells: full clocks, which are known, count as none."""
        if option == 0:
            return 0
        return int((~settled[self._search.classes[rank], option]).sum())

    def _open(self, plan: Integers, settled: Flags, iteration: int) -> Flags:
        """(ranks, options) whether a rank may try an option."""
        search = self._search
        options = settled.shape[1]
        is_open = np.zeros((search.job.ranks, options), dtype=bool)
        for rank, classes in enumerate(search.classes):
            # A plan that has full clocks measures them without a trial.
            has_full = not plan[self._nodes(rank)].all()
            is_open[rank, 0] = not settled[classes, 0].all() and not has_full
            for option in range(1, options):
                # A clock that was tried lately may not be observed yet.
                was_tried = self._was_tried_lately(rank, option, iteration)
                is_open[rank, option] = not was_tried and not settled[classes, option].all()
        return is_open

    def _wanted(self, outlook: Outlook, pipeline: int, is_open: Flags) -> list[list[int]]:
        """Return the options that each rank should try, best first.

        Args:
            outlook: what is known of the iteration.
            pipeline: the pipeline.
            is_open: (ranks, options) whether a rank may try an option.
        """
        tuning = self._tuning
        wanted = []
        for rank, of_rank in enumerate(is_open):
            # Ranks, pipelines and iterations begin elsewhere in the sweep, so that they measure
            # different rows.
            begin = rank * _RANK_STEP + pipeline * _PIPELINE_STEP + outlook.iteration
            hoped, others = self._candidates(rank, of_rank, begin)
            options: list[int] = []
            # Early on every rank tries; later only some of them, so that trials fade out.
            if outlook.is_early:
                options = _alternating(hoped[: tuning.early_wanted], others[: tuning.early_wanted])
            elif (outlook.iteration + rank) % outlook.turn == 0:
                options = [*hoped[: tuning.late_hoped], *others[: tuning.late_others]]
            # Full clocks come first, as lower ones are compared with them.
            if of_rank[0]:
                options = [0, *(option for option in options if option)]
            wanted.append(options)
        return wanted

    def _candidates(self, rank: int, is_open: Flags, begin: int) -> _Candidates:
        """Return the options that a rank may try, from a place of the sweep on."""
        options = len(is_open)
        # Bit-reversed, so that few trials already spread over all clocks.
        sweep = _bit_reversed(options)
        # The first search of plans comes before the first trial, and it finds the target.
        assert self._target is not None
        used = np.bincount(self._target[self._nodes(rank)], minlength=options)
        by_use = np.argsort(-used, kind="stable").tolist()
        hoped = [option for option in by_use if used[option] and is_open[option]]
        turned = [sweep[(begin + step) % options] for step in range(options)]
        others = [option for option in turned if is_open[option] and option not in hoped]
        return _Candidates(hoped, others)

    def _new_modes(self, outlook: Outlook, pipeline: int) -> list[list[int]]:
        """Return what each rank should try if one is to run for the first time in a mode: at full
        clocks, of which its others tell. Empty if none is.
        """
        # Only in every second iteration, as the others try clocks; and nothing new before the last
        # costly one was observed, as what it owed is not known until then.
        if outlook.iteration % 2 or self.costly_iteration > outlook.observed:
            return []
        ranks = range(self._search.job.ranks)
        # One mode at a time, at full clocks.
        due = [
            (rank, mode)
            for mode, classes in enumerate(self._learner.untried())
            for rank in ranks
            if classes[self._search.classes[rank]].any()
            and not self._was_tried_lately(rank, mode, outlook.iteration)
        ]
        if not due:
            return []
        # Pipelines begin at different ranks, so that they do not all measure the same.
        trying_rank, mode = due[(outlook.iteration + pipeline) % len(due)]
        return [[mode] if rank == trying_rank else [] for rank in ranks]

    def _spare_s(self) -> float:
        """Return what the first computations in a mode may cost: half of what may be owed."""
        return self._guarantee.spare_s / 2

    def _was_tried_lately(self, rank: int, option: int, iteration: int) -> bool:
        """Whether a rank tried an option so lately that it is not to be tried again yet."""
        last = self._tried.get((rank, option))
        return last is not None and iteration - last < self._tuning.repeat

    def _nodes(self, rank: int) -> slice:
        """Return where the computations of a rank stand in a program."""
        first, stop = self._search.problem.rank_start[rank : rank + 2]
        return slice(first, stop)


def _alternating(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """Return the items of both in turn, and then what is left of the longer one."""
    pairs = zip_longest(first, second)
    return [item for pair in pairs for item in pair if item is not None]


def _bit_reversed(count: int) -> list[int]:
    """Return 0 to `count` - 1 in the order of their reversed bits, so that any few of them are
    spread out.
    """
    bits = max(1, (count - 1).bit_length())
    order = sorted(range(2**bits), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [i for i in order if i < count]
