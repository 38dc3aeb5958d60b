"""Make the iteration that an engine runs from a schedule: dependencies, transfers, fixed
operations and variants; and the parts of an iteration that files hold beside its schedule.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from perseus_planner.base.errors import PlannerError, ScheduleError, shown
from perseus_planner.base.fields import Checked
from perseus_planner.base.units import STAGE, Wait
from perseus_planner.profiles.keys import Key
from perseus_planner.schedules import Computation, Schedule, check_pipeline, dependency_of
from perseus_planner.schedules.iteration import Iteration, Operation, parse_operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_VARIANT = re.compile(r"[FBIW]\.[a-z0-9_-]+")
_WHEN = re.compile(r"start|end|(before|after) [FBIW]")


@dataclass(frozen=True)
class Transfer(Checked, error=ScheduleError, prefix="transfer, "):
    """The time that activations and gradients take between two stages on different ranks.

    Raises:
        ScheduleError: If a time is not finite seconds of 0 or more.
    """

    #: seconds that an activation takes to the next stage, 0 or more; or one number for each
    #: boundary between stages, first to last.
    forward_s: Wait | tuple[Wait, ...] = 0.0
    #: seconds that a gradient takes to the previous stage, or one for each boundary, as above.
    backward_s: Wait | tuple[Wait, ...] = 0.0

    def later(self, latency_s: float) -> Transfer:
        """Return the transfers that take `latency_s` seconds more, each."""
        if latency_s == 0.0:
            return self

        # Each boundary, or the one number of all.
        def more(value: float | tuple[float, ...]) -> float | tuple[float, ...]:
            return (
                tuple(wait_s + latency_s for wait_s in value)
                if isinstance(value, tuple)
                else value + latency_s
            )

        return Transfer(more(self.forward_s), more(self.backward_s))

    def lag_s(self, schedule: Schedule, source: Computation, target: Computation) -> float:
        """Return the seconds from the end of `source` to the arrival of its result at `target`."""
        ranks = schedule.stage_ranks
        if ranks[source.stage] == ranks[target.stage]:
            return 0.0
        # An activation and a gradient between the same two stages cross the same boundary.
        value = self.forward_s if target.kind == "F" else self.backward_s
        return value[min(source.stage, target.stage)] if isinstance(value, tuple) else value

    def check(self, stages: int) -> None:
        """Check that a list has a number for each boundary between `stages` stages.

        Raises:
            ScheduleError: If it has more or fewer.
        """
        for name in ("forward_s", "backward_s"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != stages - 1:
                raise ScheduleError(
                    f"transfer, {name}: has {len(value)} numbers for {stages - 1} boundaries "
                    "between stages; give one for each, or one for all"
                )


@dataclass(frozen=True)
class FixedOperation:
    """An operation of fixed time and energy, and where in the programs it runs.

    Raises:
        ScheduleError: If `when` or `where` is malformed.
    """

    name: str  #: lower-case letters and hyphens, such as "load" or "optimizer"
    #: "start" (before everything else on a rank), "end" (after everything else), or "before K" or
    #: "after K": next to every computation of kind K, which is F, B, I or W. Operations at the same
    #: point run in the given order.
    when: str
    time_s: float  #: seconds of each, above 0, at any clock
    #: joules of each over the GPUs of the rank; None for what they draw while they wait.
    energy_j: float | None = None
    #: ranks if `when` is "start" or "end", else stages; None for all.
    where: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.when, str) or _WHEN.fullmatch(self.when) is None:
            raise ScheduleError(
                f"operation {self.name}, when: {shown(self.when)} is unknown; write start, end, "
                "or before or after and a kind, such as before F"
            )
        if self.where is not None:
            object.__setattr__(self, "where", _numbers(f"operation {self.name}, where", self.where))

    def is_at(self, number: int) -> bool:
        """Return whether it runs on that rank, or that stage."""
        return self.where is None or number in self.where


@dataclass(frozen=True)
class Variant:
    """Computations that are measured apart, such as the backward of the last microbatch with its
    gradient sync.

    Raises:
        ScheduleError: If a value is malformed.
    """

    kind: str  #: their kind in the profile, such as "B.sync": a kind of the schedule and a suffix
    #: their microbatches; "first" and "last" are those that a stage runs first and last.
    microbatches: tuple[int, ...] | Literal["first", "last", "all"]
    stages: tuple[int, ...] | None = None  #: their stages; None for all

    def __post_init__(self) -> None:
        # Variants come from files, so all that can be malformed is refused here.
        if not isinstance(self.kind, str) or not _VARIANT.fullmatch(self.kind):
            raise ScheduleError(
                f"variant: {shown(self.kind)} is not a kind with a suffix; write one, such as "
                "B.sync"
            )
        if isinstance(self.microbatches, str) and self.microbatches not in ("first", "last", "all"):
            raise ScheduleError(
                f"variant {self.kind}, microbatches: {shown(self.microbatches)} is unknown; write "
                "first, last, all or a list of numbers"
            )
        if not isinstance(self.microbatches, str):
            numbers = _numbers(f"variant {self.kind}, microbatches", self.microbatches)
            object.__setattr__(self, "microbatches", numbers)
        if self.stages is not None:
            object.__setattr__(
                self, "stages", _numbers(f"variant {self.kind}, stages", self.stages)
            )

    def chosen(self, program: Sequence[Computation]) -> Iterable[Computation]:
        """Yield the computations of a rank's `program` that are of this variant."""
        # Each stage has microbatches of its own that come first and last.
        for stage in sorted({c.stage for c in program}):
            if self.stages is None or stage in self.stages:
                same = [c for c in program if c.stage == stage and c.kind == self.kind[0]]
                ends = {"first": same[:1], "last": same[-1:], "all": same}
                if isinstance(self.microbatches, str):
                    yield from ends[self.microbatches]
                else:
                    yield from (c for c in same if c.microbatch in self.microbatches)


def _numbers(name: str, value: object) -> tuple[int, ...]:
    numbers = tuple(map(STAGE.accept, value)) if isinstance(value, (tuple, list)) else (None,)
    if None in numbers:
        raise ScheduleError(
            f"{name}: {shown(value)} is not a list of whole numbers of 0 or more; write one, such "
            "as (0, 3)"
        )
    return numbers


def pipeline_iteration(
    schedule: Schedule,
    *,
    transfer: Transfer | None = None,
    operations: Sequence[FixedOperation] = (),
    variants: Sequence[Variant] = (),
) -> Iteration:
    """Return the iteration that a pipeline engine runs.

    Every computation waits for the previous one on its rank and for the one whose output it takes
    as input (see `dependency_of`).

    Args:
        schedule: the computations of each rank.
        transfer: the time of transfers between stages; none by default.
        operations: operations that run beside the computations.
        variants: computations that are measured apart.

    Raises:
        ScheduleError: If the schedule cannot run, or an operation or a variant applies to nothing
            in it.
    """
    transfer = transfer or Transfer()
    # An engine would hang on a wrong schedule, so it is refused before anything is planned.
    check_pipeline(schedule)
    transfer.check(schedule.stages)
    computations = tuple(schedule.computations())
    place_of: dict[object, int] = {computation: i for i, computation in enumerate(computations)}
    waits: dict[int, list[tuple[int, float]]] = {i: [] for i in range(len(computations))}
    added = _add_programs(schedule, operations, place_of, waits)
    # A pair stands at its backward's place, and waits for what both of its computations need.
    for forward, backward in schedule.pairs:
        place_of[forward] = place_of[backward]
    present = {*computations, *schedule.forward_of.values()}
    for cell in chain.from_iterable(schedule.cells):
        for computation in cell:
            needed = dependency_of(computation, present, schedule.stages - 1)
            if needed is not None:
                _add(
                    waits[place_of[cell[-1]]],
                    place_of[needed],
                    transfer.lag_s(schedule, needed, computation),
                )
    predecessors = tuple(
        tuple(predecessor for predecessor, _ in waits[i]) for i in range(len(waits))
    )
    lags_s = tuple(tuple(lag_s for _, lag_s in waits[i]) for i in range(len(waits)))
    lagging = any(lag_s for node_lags_s in lags_s for lag_s in node_lags_s)
    kinds = _kinds(schedule, variants)
    return Iteration(schedule, predecessors, lags_s if lagging else (), tuple(added), kinds)


def _add_programs(
    schedule: Schedule,
    operations: Sequence[FixedOperation],
    place_of: dict[object, int],
    waits: dict[int, list[tuple[int, float]]],
) -> list[Operation]:
    """Have each node wait for the one before it on its rank, and return the operations, which get
    places behind all computations.

    Raises:
        ScheduleError: If an operation applies to nothing in the schedule.
    """
    # Operations get places as they come, behind all computations.
    added: list[Operation] = []
    for rank, program in enumerate(schedule.ranks):
        previous: int | None = None
        for node in _program(rank, program, operations):
            node_place = place_of.setdefault(node, len(place_of))
            if isinstance(node, Operation):
                added.append(node)
                waits[node_place] = []
            # A rank runs one after the other, so each node waits for the one before it.
            if previous is not None:
                waits[node_place].append((previous, 0.0))
            previous = node_place
    # An operation that applies to nothing is an error of its text, and would be missing silently.
    for fixed_operation in operations:
        if fixed_operation.name not in {operation.name for operation in added}:
            raise ScheduleError(
                f"operation {fixed_operation.name}: applies to nothing in the schedule; "
                "correct when or where, or remove it"
            )
    return added


def pair_kind(forward: Computation, backward: Computation) -> str:
    """Return the kind in the profile of an overlapped pair: that of its backward with the suffix
    ".pair", and with the forward's stage if that is another one, such as "B.pair-3".
    """
    stage = "" if forward.stage == backward.stage else f"-{forward.stage}"
    return f"{backward.kind}.pair{stage}"


def _add(waits: list[tuple[int, float]], other: int, lag_s: float) -> None:
    # A node may be needed twice: as the one before on the rank and for its output, or for both
    # outputs of a pair. Then the longer lag counts.
    for place, (already, already_s) in enumerate(waits):
        if already == other:
            waits[place] = (other, max(already_s, lag_s))
            return
    waits.append((other, lag_s))


def _program(
    rank: int, program: Sequence[Computation], operations: Sequence[FixedOperation]
) -> Iterable[Computation | Operation]:
    """Yield the computations and operations of a rank in order."""
    for operation in operations:
        if operation.when == "start" and operation.is_at(rank):
            yield Operation(rank, operation.name, None, rank, operation.time_s, operation.energy_j)
    for computation in program:
        yield from _beside(rank, computation, "before", operations)
        yield computation
        yield from _beside(rank, computation, "after", operations)
    for operation in operations:
        if operation.when == "end" and operation.is_at(rank):
            yield Operation(rank, operation.name, None, rank, operation.time_s, operation.energy_j)


def _beside(
    rank: int, computation: Computation, side: str, operations: Sequence[FixedOperation]
) -> Iterable[Operation]:
    stage, kind, microbatch = computation
    for operation in operations:
        if operation.when == f"{side} {kind}" and operation.is_at(stage):
            yield Operation(
                stage, operation.name, microbatch, rank, operation.time_s, operation.energy_j
            )


def _kinds(schedule: Schedule, variants: Sequence[Variant]) -> tuple[str, ...]:
    """Return the kind of every computation with the suffix of its variant; empty if there are no
    variants.
    """
    # Pairs are variants that the schedule itself brings.
    renamed = {backward: pair_kind(forward, backward) for forward, backward in schedule.pairs}
    for variant in variants:
        chosen = [c for program in schedule.ranks for c in variant.chosen(program)]
        if not chosen:
            raise ScheduleError(
                f"variant {variant.kind}: applies to nothing in the schedule; correct or remove it"
            )
        for computation in chosen:
            if computation in renamed:
                raise ScheduleError(
                    f"{computation} is both {renamed[computation]} and {variant.kind}; keep one of "
                    "the variants"
                )
            renamed[computation] = variant.kind
    return tuple(renamed.get(c, c.kind) for c in schedule.computations()) if renamed else ()


ITERATION_KEYS = ("kinds", "operations", "pairs", "waits")
"""Keys of `iteration_to_dict`; each only if it is not the default."""


def iteration_to_dict(iteration: Iteration) -> dict[str, Any]:
    """Return plain values from which `iteration_from_dict` makes `iteration` again.

    kinds: computation -> its `Key.name`, for those with a suffix or a mode. operations: name ->
    [rank, seconds, joules or null]. pairs: backward -> the forward that overlaps it. waits: node ->
    predecessor -> lag in seconds; left out if they are those of a pipeline without lags.
    """
    # Only what differs from a plain pipeline is written, so most files have none of it.
    content: dict[str, Any] = {}
    if iteration.schedule.pairs:
        content["pairs"] = {
            str(backward): str(forward) for forward, backward in iteration.schedule.pairs
        }
    # Others follow from the schedule.
    kinds = {
        str(computation): key.name
        for computation, key in zip(iteration.computations, iteration.keys, strict=True)
        if key.name != computation.kind
    }
    if kinds:
        content["kinds"] = kinds
    # Each with its time and energy, which no profile has.
    if iteration.operations:
        content["operations"] = {
            str(operation): [operation.rank, operation.time_s, operation.energy_j]
            for operation in iteration.operations
        }
    # By names, so that a person can read who waits for whom.
    if not _is_plain_pipeline(iteration):
        names = iteration.names
        content["waits"] = {
            names[node]: {names[predecessor]: lag_s for predecessor, lag_s in waits}
            for node, waits in enumerate(iteration.waits)
        }
    return content


def iteration_from_dict(schedule: Schedule, content: Mapping[str, Any]) -> Iteration:
    """Return the iteration of `schedule` with the `content` that `iteration_to_dict` returned.

    Raises:
        ScheduleError: If `content` does not describe an iteration of `schedule`.
    """
    # A schedule's grid does not have the forwards that overlap.
    pairs = content.get("pairs", {})
    if pairs:
        parsed = tuple(
            (Computation.parse(pairs[backward]), Computation.parse(backward)) for backward in pairs
        )
        schedule = replace(schedule, pairs=parsed)
    kinds = content.get("kinds", {})
    operations = tuple(
        parse_operation(text, *fixed) for text, fixed in content.get("operations", {}).items()
    )
    # Without waits the iteration is the plain one of its schedule.
    if "waits" not in content:
        plain = pipeline_iteration(schedule)
        predecessors = plain.predecessors
        lags_s = plain.lags_s
    # Names may stand in any order in a file, so places are looked up.
    else:
        names = [*map(str, schedule.computations()), *map(str, operations)]
        place_of = {name: i for i, name in enumerate(names)}
        all_waits = [content["waits"][name] for name in names]
        predecessors = tuple(
            tuple(place_of[predecessor] for predecessor in waits) for waits in all_waits
        )
        lags_s = tuple(tuple(map(float, waits.values())) for waits in all_waits)
        # All lags 0 are stored as none, so that equal iterations compare equal.
        lags_s = lags_s if any(map(any, lags_s)) else ()
    names_in_order = [kinds.get(str(c), c.kind) for c in schedule.computations()] if kinds else []
    return Iteration(schedule, predecessors, lags_s, operations, *kinds_and_modes(names_in_order))


def names_of_keys(iteration: Iteration) -> list[str]:
    """Return the `Key.name` of each computation; none if all follow from the schedule."""
    if iteration.kinds or iteration.modes:
        return [key.name for key in iteration.keys]
    return []


def kinds_and_modes(names: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return `Iteration.kinds` and `Iteration.modes` of computations with these `Key.name`s.

    Raises:
        ProfileError: If one is not such a name.
    """
    # Names are the same in all stages.
    keys = [Key.named(0, name) for name in names]
    return tuple(key.kind for key in keys), tuple(key.mode for key in keys)


def _is_plain_pipeline(iteration: Iteration) -> bool:
    if iteration.operations or iteration.lags_s:
        return False
    try:
        # By doing it: what the engine would run is what a plain pipeline is.
        return pipeline_iteration(iteration.schedule).predecessors == iteration.predecessors
    except PlannerError:
        return False
