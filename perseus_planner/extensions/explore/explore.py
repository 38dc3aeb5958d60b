"""Find the configurations in which a model can be trained on some GPUs, compare all of them by time
and energy, keep those that can win, and say what a training run in them takes.

Every configuration has a lower bound on its time-energy curve, which costs microseconds. The exact
curve is computed in the order of the bounds, until no bound is below what has been found: neither
for the objective, nor anywhere on the frontier of all of them. Iterations of up to six times the
least time are compared. Up to there each computation has ten operating points; the configurations
that remain are solved again with all clocks, or 16 of them in large jobs.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from perseus_planner.base.errors import ScheduleError, UsageError, shown
from perseus_planner.base.prefixes import si
from perseus_planner.extensions.explore.bounds import bound_of
from perseus_planner.extensions.explore.configuration import Configuration
from perseus_planner.extensions.explore.curves import Curve, CurveMaker
from perseus_planner.extensions.explore.memory import (
    Candidate,
    Memory,
    balanced,
    memory,
    slowest_rank_s,
)
from perseus_planner.extensions.explore.operations import LayerTimes, kernel_key, layer_times
from perseus_planner.extensions.explore.transformer import Transformer, shared_by, split_layers
from perseus_planner.schedules.layouts import Layout, balance, read_layout

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from perseus_planner.extensions.explore.operations import System

RECOMPUTATIONS = ("none", "selective", "full")
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")
_MAX_MICROBATCH = 64
_VIRTUAL_STAGES = (2, 3, 4, 6, 8)
_RANKS = (*range(1, 17), 18, 20, 21, 24, 27, 28, 30, 32, 36, 40, 42, 48)
_MAX_STAGES = 64
_MAX_TENSOR = 16
_ALIKE = 1e-9  # ranks whose times differ by less, relative to each other, are equal in floats
_CONTEXT = 4096  # tokens on a GPU from which on sequences are divided
_DOUBLINGS = 12  # of the GPUs at most, to find how many have enough memory


@dataclass(frozen=True)
class Choices:
    """What may be chosen; everything else follows from the model, the GPUs and the batch.

    Tensor groups divide norms too, the optimizer's state is shared, and gradients are summed during
    the backward. Without a pipeline weights may be shared too.
    """

    gpus: int  #: GPUs of the job. Configurations that leave some of them unused count too.
    batch: int  #: Sequences of an iteration
    recomputations: tuple[str, ...] = RECOMPUTATIONS  #: Kinds of recomputation
    schedules: tuple[str, ...] = SCHEDULES  #: Names of schedules
    #: The layout to compare with, as `schedules.layouts.read_layout` reads it: only pipelines that
    #: can have it are considered. None for all pipelines, which are compared with even layers.
    layout: str | None = None


def candidates(model: Transformer, system: System, choices: Choices) -> list[Candidate]:
    """Return all configurations that fit in memory.

    Raises:
        UsageError: If there are none; the text names the memory that is missing, or the option that
            allows none.
    """
    # Narrow products need hardware that is faster with them.
    speedup = {"fp8": system.fp8_speedup, "nvfp4": system.fp4_speedup}
    if model.precision == "mxfp8":  # what has FP4 has scales of blocks too
        speedup["mxfp8"] = system.fp4_speedup
    if speedup.get(model.precision, 2.0) <= 1:
        raise UsageError(
            f"--precision: {system.gpu.name} has no {model.precision}; give bf16 or fp16"
        )
    # Flash attention keeps no scores, so there is nothing to recompute selectively.
    if model.attention != "plain" and tuple(choices.recomputations) == ("selective",):
        raise UsageError(
            f"--recompute: {model.attention} attention keeps no scores that selective could "
            "recompute; give none or full, or --attention plain"
        )
    # A layout by hand is checked before pipelines are, as an error in it fits none.
    if choices.layout is not None and "=" not in choices.layout:
        read_layout(choices.layout, layers=model.layers)
    fitting = list[Candidate]()
    least = None
    unmeasured = bool(system.kernels)
    for job, times in _configurations(model, system, choices):
        unmeasured = unmeasured and kernel_key(job.shape) not in system.kernels
        job, needed = _shared_to_fit(job, system)
        if needed.fits:
            fitting.append(Candidate(job, times, needed))
        # If nothing fits, the one that needs the least tells how much is missing.
        elif least is None or needed.total < least[1].total:
            least = job, needed
    # Without any configuration, kernels have none to be of.
    if not fitting and least is None:
        raise UsageError(
            f"--layout: no pipeline on {choices.gpus} GPUs with such a schedule has stages for "
            f"{shown(choices.layout)}; give another layout, or more GPUs"
        )
    # Kernels that were measured for another model would be silently unused.
    if unmeasured:
        raise UsageError(
            f"--system: its kernels are of no configuration of this model in {model.precision}, "
            f"with {model.attention} attention and {model.sequence} tokens; measure "
            f"them by planner calibrate --kernels MODEL --gpu {system.gpu.name} -o FILE"
        )
    if not fitting and least is not None:
        job, needed = least
        raise UsageError(
            f"--gpus: {choices.gpus} GPUs of {si(system.memory_bytes, 'B', 3)} are too few: "
            f"{job.name} needs least, {si(needed.total, 'B', 3)} on a GPU "
            f"({_memory_text(needed)}); {_enough(model, system, choices)}"
        )
    return fitting


def _shared_to_fit(job: Configuration, system: System) -> tuple[Configuration, Memory]:
    """Return the configuration with gradients, then weights shared among replicas, if it does not
    fit in memory otherwise and has no pipeline; and its memory.
    """
    needed = memory(job, system)
    # Each saves memory and sends more, so it is tried only if less does not fit.
    for sharding in (2, 3) if job.ranks == 1 and job.replicas > 1 else ():
        if not needed.fits:
            job = replace(job, sharding=sharding)
            needed = memory(job, system)
    return job, needed


def split_choices(
    job: Configuration, system: System, times: LayerTimes, given: Layout | None = None
) -> list[Configuration]:
    """Return the splits of its layers to try: as even as possible, and with fewer layers beside
    embedding and head.

    The latter make the slowest stage, and the slowest rank, as fast as whole layers allow. If the
    last of these does not fit in memory, the fastest split that fits is tried too. A given layout
    comes first, and keeps its modules of multi-token prediction.
    """
    if given is not None:
        # A layout that is given keeps its modules of prediction.
        predictions = given.predictions if any(given.predictions) else ()
        job = replace(job, split=given.layers, predictions=predictions)
        even = [job]
    else:
        even = [replace(job, split=split_layers(job.shape.layers, len(job.split)))]
    if len(job.split) == 1:
        return even
    # Embedding and head take time, so stages with them should have fewer layers.
    parts_s = times.training_s(system.top_mhz)
    by_stage = [] if given else [_balanced(job.shape.layers, len(job.split), *parts_s)]
    choices = [*even, *(replace(job, split=split) for split in by_stage)]
    # Ranks with several stages are balanced by their sums, without regard to memory first.
    if job.predictions:
        by_rank = balanced(job, system, times, within_memory=False)
        split = None if by_rank is None else by_rank.split
    else:
        split = _balanced_ranks(job.shape.layers, job.stage_ranks, *parts_s)
    if split is not None:
        # Of equally fast slowest ranks, stages that are alike come first.
        by_rank = replace(job, split=split)
        least_s = (1 - _ALIKE) * min(slowest_rank_s(choice, system, times) for choice in choices)
        if slowest_rank_s(by_rank, system, times) < least_s:
            choices.append(by_rank)
    # A rank with more layers may not fit, so the best split that does is tried as well.
    if not memory(choices[-1], system).fits:
        fitting = balanced(job, system, times)
        choices += [] if fitting is None else [fitting]
    return list(dict.fromkeys(choices))


@lru_cache(maxsize=4096)
def _balanced_ranks(
    layers: int, stage_ranks: tuple[int, ...], layer_s: float, first_s: float, last_s: float
) -> tuple[int, ...] | None:
    """Return the split whose slowest rank is fastest, with so many seconds of a layer and beside
    the layers.
    """
    beside_s = [0.0] * len(stage_ranks)
    beside_s[0] += first_s
    beside_s[-1] += last_s
    return balance(layers, stage_ranks, layer_s, beside_s)


@lru_cache(maxsize=4096)
def _balanced(
    layers: int, stages: int, layer_s: float, first_s: float, last_s: float
) -> tuple[int, ...]:
    """Return the split whose slowest stage is fastest, with so many seconds of a layer and
    beside the layers.
    """
    # Of equally fast stages the last one gets the next layer: it keeps fewer microbatches.
    free = [
        (layer_s + beside_s, -stage)
        for stage, beside_s in enumerate([first_s, *[0.0] * (stages - 2), last_s])
    ]
    heapq.heapify(free)
    # Every stage has a layer, and the others go to the stage that is the fastest so far.
    split = [1] * stages
    for _ in range(layers - stages):
        least_s, stage = free[0]
        split[-stage] += 1
        heapq.heapreplace(free, (least_s + layer_s, stage))
    return tuple(split)


def _configurations(
    model: Transformer, system: System, choices: Choices
) -> Iterator[tuple[Configuration, LayerTimes]]:
    """Yield the configurations of at most so many GPUs, and the times of their layers.

    Which ones does not depend on the number of GPUs otherwise, so that more never make it worse.
    """
    for tensor, context, expert in _groups(model, system, choices.gpus):
        shared = shared_by(model, tensor, context_degree=context, expert_degree=expert)
        for microbatch in _divisors(choices.batch):
            if microbatch > (_MAX_MICROBATCH if context == 1 else 1):
                continue  # more sequences need less traffic than parts of one
            for recomputation in choices.recomputations:
                if recomputation == "selective" and model.attention != "plain":
                    continue  # flash attention keeps no scores
                shape = replace(shared, microbatch=microbatch, recomputation=recomputation)
                # Times depend on the shape alone, so they are computed once for all pipelines.
                times = layer_times(shape, system)
                yield from ((job, times) for job in _pipelines(shape, system, times, choices))


def _groups(model: Transformer, system: System, gpus: int) -> Iterator[tuple[int, int, int]]:
    """Yield tensor, context and expert degrees, the latter powers of 2."""
    for tensor in range(1, min(gpus, system.gpus_per_node, _MAX_TENSOR) + 1):
        if not _shares(model, tensor):
            continue
        # Sequences are divided from some thousand tokens on, and evenly.
        for context in _powers(min(gpus // tensor, model.sequence // _CONTEXT)):
            if model.sequence % context == 0:
                for expert in _powers(min(gpus, model.experts)):
                    if max(1, model.experts) % expert == 0:
                        yield tensor, context, expert


def _pipelines(
    shape: Transformer, system: System, times: LayerTimes, choices: Choices
) -> Iterator[Configuration]:
    group = shape.tensor_degree * shape.context_degree
    for ranks in _RANKS:
        if ranks > min(shape.layers, choices.gpus // group):
            break
        # Data-parallel pipelines have equal numbers of microbatches, so they divide the batch.
        for data in _divisors(choices.batch // shape.microbatch):
            if group * ranks * data > choices.gpus:
                break
            if group * data % shape.expert_degree:
                continue
            count = choices.batch // (data * shape.microbatch)
            # State is shared and sums are overlapped wherever there are replicas.
            shared = data * shape.context_degree > 1
            kinds = [("1f1b", 1)]
            # Without a pipeline all schedules are one.
            if ranks > 1:
                kinds = [(name, 1) for name in choices.schedules if name != "interleaved-1f1b"]
                # Interleaved pipelines need microbatches in multiples of the ranks.
                if "interleaved-1f1b" in choices.schedules and count % ranks == 0:
                    kinds += [
                        ("interleaved-1f1b", virtual_stages)
                        for virtual_stages in _VIRTUAL_STAGES
                        if virtual_stages * ranks <= min(shape.layers, _MAX_STAGES)
                    ]
            for name, virtual in kinds:
                given = None
                # Only pipelines that can have the given layout are compared with it.
                if choices.layout is not None:
                    given = _given(choices.layout, shape.layers, ranks * virtual, virtual)
                    if given is None:
                        continue
                even = split_layers(shape.layers, ranks * virtual)
                job = Configuration(shape, even, data, count, name, virtual, int(shared), shared)
                yield from split_choices(job, system, times, given)


@lru_cache(maxsize=4096)
def _given(text: str, layers: int, stages: int, virtual_stages: int) -> Layout | None:
    """Return a given layout of such a pipeline; None if it is not of one."""
    try:
        return read_layout(text, layers=layers, stages=stages, virtual_stages=virtual_stages)
    except ScheduleError:
        return None


def _shares(model: Transformer, tensor: int) -> bool:
    """Return whether so many GPUs can share a layer."""
    groups = model.kv_heads % tensor == 0 or tensor % model.kv_heads == 0
    return model.heads % tensor == 0 and model.ffn % tensor == 0 and groups


@lru_cache(maxsize=4096)
def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _powers(most: int) -> list[int]:
    """Return the powers of 2 up to a number; 1 if there are none."""
    return [1 << step for step in range(max(1, most.bit_length()))]


def _enough(model: Transformer, system: System, choices: Choices) -> str:
    """Return the first doubling of the GPUs that has enough memory, as advice."""
    for times in range(1, _DOUBLINGS + 1):
        gpus = choices.gpus << times
        if any(
            _shared_to_fit(job, system)[1].fits
            for job, _ in _configurations(model, system, replace(choices, gpus=gpus))
        ):
            return f"give --gpus {gpus}"
    return "give more GPUs and a larger batch"


def _memory_text(needed: Memory) -> str:
    parts = ("parameters", "gradients", "optimizer", "activations", "reserve")
    return ", ".join(f"{name} {si(getattr(needed, name), 'B', 3)}" for name in parts)


FIRST = 3
"""Configurations to measure, as no estimate ranks them surely."""
_POINTS = 10  # operating points of a computation while configurations are compared
_GRID = 64  # times at which bounds are compared
_SLOWEST = 6.0  # of the least time, up to which the frontier is explored
_WORTH = 1.3  # of the best value, up to which the best of another tensor degree is worth measuring
_GAIN = 3e-3  # by which a configuration must be able to lower the frontier
_MOST_COMPUTATIONS = 50_000  # of all iterations whose exact curves are computed


@dataclass(frozen=True)
class Objective:
    """What the best configuration is: the fastest, unless one of the others is given."""

    deadline_s: float | None = None  #: Least energy with iterations of at most that time
    power_w: float | None = None  #: The fastest whose mean power over all GPUs is at most that
    least_energy: bool = False  #: Least energy, whatever it takes

    def point(self, curve: Curve) -> tuple[float, float] | None:
        """Return the time and energy of the best point of a curve, or None if it has none."""
        times_s = curve.times_s
        energies_j = curve.energies_j
        # Bounds are infinite where an iteration is too short.
        finite = np.isfinite(energies_j)
        times_s = times_s[finite]
        energies_j = energies_j[finite]
        if len(times_s) == 0:
            return None
        if self.deadline_s is not None:
            if times_s[0] > self.deadline_s:
                return None
            # The deadline itself is a point too, as energy is linear between points.
            until = np.append(
                times_s[times_s <= self.deadline_s], min(self.deadline_s, times_s[-1])
            )
            values = np.interp(until, times_s, energies_j)
            best = int(np.argmin(values))
            return float(until[best]), float(values[best])
        if self.power_w is not None:
            return _within_power(times_s, energies_j, self.power_w)
        best = int(np.argmin(energies_j)) if self.least_energy else 0
        return float(times_s[best]), float(energies_j[best])

    def value(self, curve: Curve) -> tuple[float, float]:
        """Return what is to be small: energy before time, or time before energy.

        If no point of the curve is allowed, the first is infinite, and the second the least
        deadline or power that is.
        """
        point = self.point(curve)
        if point is not None:
            return point[::-1] if self.least_energy or self.deadline_s is not None else point
        wanted = curve.times_s if self.deadline_s is not None else curve.energies_j / curve.times_s
        return math.inf, float(wanted.min(initial=math.inf))


@dataclass(frozen=True, eq=False)
class Row:
    """A configuration at one point of its exact time-energy curve."""

    candidate: Candidate  #: The configuration
    curve: Curve  #: All of its curve
    time_s: float  #: Seconds of an iteration
    energy_j: float  #: Joules of an iteration over all GPUs

    @property
    def tokens_per_s(self) -> float:
        """Tokens that the job trains on in a second."""
        return self.candidate.job.tokens / self.time_s

    @property
    def j_per_token(self) -> float:
        """Energy of all GPUs for a token, joules."""
        return self.energy_j / self.candidate.job.tokens

    @property
    def power_w(self) -> float:
        """Mean power over all GPUs, watts."""
        return self.energy_j / self.time_s


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
            given = _given(self.layout, job.shape.layers, stages, job.virtual_stages)
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
    search = _Search(
        candidates(model, system, choices), CurveMaker(system, _POINTS), objective or Objective()
    )
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


def worth_measuring(degrees: Sequence[int], wide: int) -> list[int]:
    """Return which of ranked configurations to measure, by their tensor degrees: the best of each,
    and of the degree that is as wide as a node two.

    What an estimate knows least are the kernels of each tensor degree, whose errors go together.
    """
    chosen: list[int] = []
    for number, degree in enumerate(degrees):
        if sum(degrees[earlier] == degree for earlier in chosen) < 1 + (degree == wide):
            chosen.append(number)
    return chosen[:FIRST]


class _Search:
    """Which exact curves are computed."""

    def __init__(self, found: list[Candidate], maker: CurveMaker, objective: Objective) -> None:
        self.found = found
        self.maker = maker
        self.objective = objective
        bounds = [bound_of(candidate, maker.operating) for candidate in found]
        fastest_s = min(bound.least_s for bound in bounds)
        # A deadline may lie beyond what is compared otherwise.
        slowest_s = max(_SLOWEST * fastest_s, objective.deadline_s or 0.0)
        self.grid_s = np.geomspace(fastest_s, slowest_s, _GRID)
        bounds_j = np.array([bound.at(self.grid_s) for bound in bounds])
        # An iteration may always take longer at no more energy than a shorter one.
        self.least_j = np.minimum.accumulate(bounds_j, axis=1)
        self.curves: dict[int, Curve] = {}
        self.exact_values: dict[int, tuple[float, float]] = {}
        self.envelope_j = np.full(_GRID, np.inf)
        # A bound has a value by the objective like a curve, so both can be ranked.
        self.values = [
            objective.value(_bound_curve(bound.least_s, self.grid_s, row))
            for bound, row in zip(bounds, bounds_j, strict=True)
        ]
        self.order = sorted(range(len(found)), key=self.values.__getitem__)

    def run(self, progress: Callable[[int, int], None]) -> None:
        """Compute exact curves until no bound is below what was found."""
        computed = 0
        while computed < _MOST_COMPUTATIONS:
            number = self._next()
            if number is None:
                return
            progress(len(self.curves), len(self.found))
            computed += self.maker.size(self.found[number].job)
            curve = self._solve(number)
            at_grid_j = curve.at(self.grid_s)
            # Slower than its least energy a job waits, or runs at its least energy: it does the
            # latter.
            self.envelope_j = np.minimum(self.envelope_j, np.minimum.accumulate(at_grid_j))

    def solve_again(self, maker: CurveMaker) -> None:
        """Compute the curves of the first and of the frontier once more by `maker`, and forget
        the others.
        """
        kept = dict.fromkeys([*self.first(), *(number for _, _, number in self._frontier())])
        self.maker = maker
        self.curves = {}
        self.exact_values = {}
        for number in kept:
            self._solve(number)

    def _solve(self, place: int) -> Curve:
        curve = self.maker.exact(self.found[place])
        self.curves[place] = curve
        self.exact_values[place] = self.objective.value(curve)
        return curve

    def _next(self) -> int | None:
        """Return the configuration whose bound is best, if it can still be among the first, or
        on the frontier.
        """
        open_places = [number for number in self.order if number not in self.curves]
        if not open_places:
            return None
        # The nearest bound may beat what was found, so it is next.
        nearest = open_places[0]
        exact = self.exact_values.values()
        if not exact or self.values[nearest] < min(exact):
            return nearest
        # The best of another tensor degree is worth measuring too, if it is near.
        near = {self._degree(number): number for number in reversed(open_places)}
        for number in sorted(near.values(), key=self.values.__getitem__):
            if number in self._picked(number):
                return number
        # Too few are known to measure three.
        if len(self.first()) < FIRST and math.isfinite(self.values[nearest][0]):
            return nearest
        # Last, whatever could lower the frontier by enough.
        with np.errstate(invalid="ignore"):
            bounds_j = self.least_j
            gains = np.where(np.isfinite(bounds_j), 1 - bounds_j / self.envelope_j, -np.inf).max(
                axis=1
            )
        gains[list(self.curves)] = -np.inf
        most = int(np.argmax(gains))
        return most if gains[most] > _GAIN else None

    def first(self) -> list[int]:
        """Return the configurations to measure."""
        chosen = list(dict.fromkeys([*self._picked(), *self._ranked()]))
        return sorted(chosen[:FIRST], key=self._value)

    def _picked(self, *others: int) -> list[int]:
        """Return which of those near the best are worth measuring, if others meet their bounds."""
        ranked = self._ranked(*others)
        values = [self._value(number)[0] for number in ranked]
        near = [
            number
            for number, value in zip(ranked, values, strict=True)
            if value <= _WORTH * values[0]
        ]
        wide = self.maker.system.gpus_per_node
        return [near[k] for k in worth_measuring([self._degree(number) for number in near], wide)]

    def _ranked(self, *others: int) -> list[int]:
        """Return what the objective allows of exact curves and of others, the best first."""
        allowed = [
            number for number in (*self.curves, *others) if math.isfinite(self._value(number)[0])
        ]
        return sorted(allowed, key=self._value)

    def _value(self, place: int) -> tuple[float, float]:
        return self.exact_values.get(place, self.values[place])

    def rows(self) -> tuple[Row, ...]:
        """Return `first` at the best points of their curves."""
        curves = [(self.found[number], self.curves[number]) for number in self.first()]
        return tuple(
            Row(candidate, curve, *point)
            for candidate, curve in curves
            if (point := self.objective.point(curve)) is not None
        )

    def _degree(self, place: int) -> int:
        return self.found[place].job.shape.tensor_degree

    def gap(self) -> float:
        """Return by how much a configuration without an exact curve may be better than the best
        one.
        """
        best = min(self.exact_values.values())[0]
        others = [value[0] for number, value in enumerate(self.values) if number not in self.curves]
        return max(0.0, 1 - min(others, default=best) / best)

    def out_of_reach(self) -> str:
        """Return why there is no first configuration, and the least deadline or power with one."""
        least = min(self.exact_values.values())[1] * 1.0005  # four digits of it are no less
        option, problem, unit = (
            ("--deadline", "is that fast", "s")
            if self.objective.deadline_s is not None
            else ("--power-budget", "draws that little", "W")
        )
        return (
            f"{option}: no configuration {problem}; give {si(least, unit).replace(' ', '')} or more"
        )

    def frontier(self) -> tuple[Row, ...]:
        """Return the points of all curves that no other point beats in both time and energy,
        fastest first.
        """
        return tuple(
            Row(self.found[number], self.curves[number], time_s, energy_j)
            for time_s, energy_j, number in self._frontier()
        )

    def _frontier(self) -> list[tuple[float, float, int]]:
        """Return time, energy and configuration of the points of the frontier."""
        # Sorted by time, so a point stays only if it is cheaper than all faster ones.
        kept: list[tuple[float, float, int]] = []
        for point in sorted(
            (float(time_s), float(energy_j), number)
            for number, curve in self.curves.items()
            for time_s, energy_j in zip(
                np.append(self.grid_s, curve.times_s[0]),
                np.append(curve.at(self.grid_s), curve.energies_j[0]),
                strict=True,
            )
            if math.isfinite(energy_j)
        ):
            if not kept or point[1] < kept[-1][1] * (1 - 1e-9):
                kept.append(point)
        return kept


def _bound_curve(
    least_s: float, grid_s: NDArray[np.float64], bounds_j: NDArray[np.float64]
) -> Curve:
    """Return the bound as a curve; between its least time and the next time of the grid it may
    be as low as there.
    """
    finite = np.isfinite(bounds_j)
    times_s = grid_s[finite]
    energies_j = bounds_j[finite]
    if len(times_s) == 0 or least_s >= times_s[0]:
        return Curve(times_s, energies_j)
    return Curve(np.insert(times_s, 0, least_s), np.insert(energies_j, 0, energies_j[0]))


def _within_power(
    times_s: NDArray[np.float64], energies_j: NDArray[np.float64], power_w: float
) -> tuple[float, float] | None:
    """Return the fastest point of at most that mean power."""
    powers_w = energies_j / times_s
    within = np.nonzero(powers_w <= power_w)[0]
    if len(within) == 0:
        return None
    # Points rise in time, and power falls along them.
    first = int(within[0])
    if first == 0:
        return float(times_s[0]), float(energies_j[0])
    low_s, high_s = times_s[first - 1 : first + 1]
    low_j, high_j = energies_j[first - 1 : first + 1]
    # Between two points energy is linear, so the time at which power is met follows.
    slope_w = (high_j - low_j) / (high_s - low_s)
    time_s = float((low_j - slope_w * low_s) / (power_w - slope_w))
    return time_s, power_w * time_s


_J_PER_KWH = 3.6e6


def forecast(
    row: Row, system: System, *, tokens: float, pue: float, price: float, carbon: float
) -> dict[str, Any]:
    """Return what training on `tokens` tokens takes in the configuration of a row.

    Energy at the meter, its price and its emissions are the least and the most: with the rest of
    the nodes and the data center's share.

    Args:
        row: The configuration.
        system: The GPUs.
        tokens: Tokens to train on.
        pue: Energy of the data center for each joule of its computers (power usage effectiveness).
        price: Price of a kWh at the meter, in any currency.
        carbon: CO2e of a kWh at the meter, grams.
    """
    job = row.candidate.job
    seconds = tokens / row.tokens_per_s
    gpu_kwh = tokens * row.j_per_token / _J_PER_KWH
    beside_w = system.node_overhead_w, system.node_overhead_most_w
    nodes = job.gpus / system.gpus_per_node  # parts of a node count as such
    # The power beside GPUs is known as least and most, so all that follows is too.
    kwh = [(gpu_kwh + w * nodes * seconds / _J_PER_KWH) * pue for w in beside_w]
    return {
        "tokens": tokens,
        "hours": seconds / 3600,
        "gpu_kwh": gpu_kwh,
        "meter_kwh": kwh,
        "cost": [meter_kwh * price for meter_kwh in kwh],
        "co2e_kg": [meter_kwh * carbon / 1e3 for meter_kwh in kwh],
        "node_overhead_w": beside_w,
        "pue": pue,
    }
