"""Find the configurations in which a model can be trained on some GPUs (`candidates.py`), compare
all of them by time and energy, and keep those that can win (`search.py`).

Iterations of up to six times the least time are compared. Up to there each computation has ten
operating points; the configurations that remain are solved again with all clocks, or 16 of them in
large jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from perseus_planner.base.errors import UsageError
from perseus_planner.extensions.explore.candidates import Choices, candidates, given_layout
from perseus_planner.extensions.explore.curves import CurveMaker
from perseus_planner.extensions.explore.memory import Candidate, memory
from perseus_planner.extensions.explore.objective import Objective
from perseus_planner.extensions.explore.search import Row, Search
from perseus_planner.extensions.explore.transformer import split_layers

if TYPE_CHECKING:
    from collections.abc import Callable

    from perseus_planner.extensions.explore.operations import System
    from perseus_planner.extensions.explore.transformer import Transformer
    from perseus_planner.schedules.layouts import Layout


@dataclass(frozen=True)
class Balance:
    """What another split of the layers brings to a configuration, and clocks after it."""

    is_given: bool  #: Whether the layout to compare with was given; else it has even layers
    before: Layout  #: The layout to compare with
    before_fits: bool  #: Whether it fits in memory, by the estimate
    after: Layout  #: The layout of the configuration
    before_s: float  #: Least seconds of an iteration with the layout to compare with
    after_s: float  #: Least seconds of an iteration
    before_saved_share: float  #: Of the energy at full clocks, saved by clocks in `before_s`
    after_saved_share: float  #: The same in `after_s`

    @property
    def time_share(self) -> float:
        """The share of time that the layout brings."""
        return 1 - self.after_s / self.before_s


@dataclass(frozen=True, eq=False)
class Exploration:
    """All configurations, compared."""

    maker: CurveMaker  #: What made the curves, and makes profiles
    configurations: int  #: Number of configurations that fit in memory
    solved: int  #: Number of exact curves
    #: Share by which the bound of a configuration without an exact curve is below the first of
    #: `first`, if it is; 0 if it is certain that this is the best by the estimate.
    gap: float
    #: The best configuration by the objective, and the best of other tensor degrees; at most
    #: `FIRST`; see `worth_measuring`.
    first: tuple[Row, ...]
    frontier: tuple[Row, ...]  #: The frontier of all configurations, fastest first
    layout: str | None = None  #: The layout to compare with

    def balance(self, row: Row) -> Balance | None:
        """Return what the split of a row's layers brings; None without a pipeline."""
        candidate = row.candidate
        job = candidate.job
        stages = len(job.split)
        if stages == 1:
            return None
        given = None
        if self.layout is not None:
            given = given_layout(self.layout, job.shape.layers, stages, job.virtual_stages)
        # Without a layout of one's own, the comparison is with even layers.
        even = job.layout.with_layers(split_layers(job.shape.layers, stages))
        before = given or even
        # Everything else stays, so that only the split makes the difference.
        compared = replace(job, split=before.layers)
        needed = memory(compared, self.maker.system)
        reference = Candidate(compared, candidate.times, needed)
        curve = self.maker.exact(reference)
        return Balance(
            is_given=given is not None,
            before=before,
            before_fits=needed.fits,
            after=job.layout,
            before_s=float(curve.times_s[0]),
            after_s=float(row.curve.times_s[0]),
            before_saved_share=self.maker.saved_share(reference, 1.0),
            after_saved_share=self.maker.saved_share(candidate, 1.0),
        )


def explore(
    model: Transformer,
    system: System,
    choices: Choices,
    objective: Objective | None = None,
    progress: Callable[[int, int], None] = lambda solved, total: None,
) -> Exploration:
    """Return the best configurations and the frontier of all.

    Args:
        model: The model; its tensor degree, microbatch and recomputation are chosen.
        system: The GPUs and their links.
        choices: What may be chosen.
        objective: What is best; the fastest if None.
        progress: Called before each exact curve with their number, and that of configurations.

    Raises:
        UsageError: If no configuration uses the GPUs, fits in memory, or meets the objective; names
            what would.
    """
    search = Search(candidates(model, system, choices), system, objective or Objective())
    search.run(progress)
    if not search.first():
        raise UsageError(search.out_of_reach())
    solved = len(search.curves)
    gap = search.gap()
    # Few points suffice to compare, and what remains is solved with all clocks.
    search.solve_again(CurveMaker(system))
    return Exploration(
        maker=search.maker,
        configurations=len(search.found),
        solved=solved,
        gap=gap,
        first=search.rows(),
        frontier=search.frontier(),
        layout=choices.layout,
    )
