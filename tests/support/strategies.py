"""Hypothesis strategies that draw whole planning problems: profiles, graphs of computations,
pipelines, jobs.

Hypothesis draws the sizes, and so shrinks a failure to a small one; a seed settles the rest, for
variety."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import wraps
from inspect import Parameter, Signature, signature
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perseus_planner import schedules
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import Measurement
from perseus_planner.profiles.profiles import Profile
from perseus_planner.schedules import Computation, Schedule, one_f_one_b
from perseus_planner.schedules.dag import PipelineDag
from perseus_planner.schedules.iteration import Iteration, Operation
from perseus_planner.schedules.pipeline import FixedOperation, Transfer, Variant, pipeline_iteration
from perseus_planner.solver.frontier import Frontier

NOISE = (0.0, 0.0, 1e-2, 1e-4)  #: relative; none most often, as then there are ties
WAITING_W = (
    0.0,
    10.0,
    83.64,
    83.64,
    300.0,
    1e4,
)  #: from free waiting to a wait so dear that no slowdown pays


def _convex(rng: Random, count: int) -> list[tuple[int, int]]:
    """Slower and cheaper, ever less so: (0.1 ms, 10 mJ), as all shapes here."""
    steps = [(rng.randint(1, 60), rng.randint(1, 60)) for _ in range(count - 1)]
    steps.sort(key=lambda step: step[1] / step[0], reverse=True)
    points = [(rng.randint(1, 400), sum(cheaper for _, cheaper in steps) + rng.randint(0, 400))]
    for slower, cheaper in steps:
        points.append((points[-1][0] + slower, points[-1][1] - cheaper))
    return points


def _scattered(rng: Random, count: int) -> list[tuple[int, int]]:
    """Anything: slower may cost more, equal times may cost differently."""
    return [(rng.randint(1, 30), rng.randint(0, 30)) for _ in range(count)]


def _plateau(rng: Random, count: int) -> list[tuple[int, int]]:
    """The highest clocks all alike, as under a power cap; convex below."""
    convex = _convex(rng, (count + 1) // 2)
    return [convex[0]] * (count // 2) + convex


def _measurements(rng: Random, max_options: int) -> tuple[Measurement, ...]:
    noise = rng.choice(NOISE)
    points = rng.choice((_convex, _scattered, _plateau))(rng, rng.randint(1, max_options))
    return tuple(
        Measurement(
            1410 - 15 * i,
            slow * 1e-4 * rng.uniform(1, 1 + noise),
            dear * 1e-2 * rng.uniform(1, 1 + noise),
        )
        for i, (slow, dear) in enumerate(points)
    )


def _profile(rng: Random, stages: int, max_options: int) -> Profile:
    keys = [(stage, kind) for stage in range(stages) for kind in "FB"]
    return Profile({key: _measurements(rng, max_options) for key in keys}, rng.choice(WAITING_W))


def smooth_profile(stages: int, step_mhz: int = 15) -> Profile:
    """Much like a measured one of an A100: 38 clocks, energy falling steeply below the highest,
    stages uneven.
    """
    points = {}
    for stage in range(stages):
        for kind, work in (("F", 1.0), ("B", 2.0)):
            work *= 1 + 0.02 * ((3 * stage) % 5)
            clocks = range(1410, 840, -step_mhz)
            times_s = [work * (0.006 + 65.0 / clock) for clock in clocks]
            powers_w = [110 + 190 * (clock / 1410) ** 2.6 for clock in clocks]
            points[stage, kind] = tuple(
                Measurement(clock, time_s, time_s * power_w)
                for clock, time_s, power_w in zip(clocks, times_s, powers_w, strict=True)
            )
    return Profile(points, 83.64, gpu="smooth", origin="measured")


def _seconds(rng: Random, most: int = 60) -> float:
    """Of a lag or a fixed operation, in the size of a computation."""
    return rng.randint(1, most) * 1e-4 * rng.uniform(1, 1 + rng.choice(NOISE))


def _joules(rng: Random) -> float | None:
    return rng.choice((None, 0.0, rng.randint(0, 60) * 1e-2))


def _furnished(rng: Random, iteration: Iteration, max_options: int) -> Profile:
    """A profile that has all that `iteration` runs, any power on each rank, and an overhead;
    changes cost nothing.
    """
    keys = set(iteration.keys)
    for stage in range(iteration.schedule.stages):
        split = keys & {Key(stage, "I"), Key(stage, "W")}
        keys |= {Key(stage, kind) for kind in ("FIW" if split else "FB")}
    power_w: float | tuple[float, ...] = rng.choice(WAITING_W)
    if rng.random() < 0.5:
        of_rank = [rng.choice(WAITING_W) for _ in iteration.schedule.ranks]
        power_w = tuple(of_rank[rank] for rank in iteration.schedule.stage_ranks)
    points = {key: _measurements(rng, max_options) for key in sorted(keys)}
    shortest_s = min(point.time_s for options in points.values() for point in options)
    overhead_s = rng.choice((0.0, _seconds(rng, 1000), 12.3, -shortest_s * rng.random()))
    return Profile(points, power_w, gpus_per_stage=rng.choice((1, 8)), overhead_s=overhead_s)


def _operations(rng: Random, stages: int, iteration: Iteration) -> tuple[Iteration, list[int]]:
    """`iteration` with fixed operations here and there, and their places in a topological order."""
    order, before, added = list(iteration.order), [*map(list, iteration.predecessors)], []
    for number in range(rng.randint(0, 4)):
        at, place = rng.randint(0, len(order)), len(before)
        before.append(rng.sample(order[:at], min(at, rng.randint(0, 2))))
        for other in rng.sample(order[at:], min(len(order) - at, rng.randint(0, 2))):
            before[other].append(place)
        order.insert(at, place)
        microbatch, rank = rng.choice((None, number)), rng.randrange(len(iteration.schedule.ranks))
        name = "abcd"[number] * rng.randint(1, 3)
        added.append(
            Operation(
                rng.randrange(stages), name, microbatch, rank, _seconds(rng, 400), _joules(rng)
            )
        )
    return replace(
        iteration, predecessors=tuple(map(tuple, before)), operations=tuple(added)
    ), order


def _with_extras(rng: Random, plain: PipelineDag, max_options: int) -> PipelineDag:
    """The same computations with fixed operations, lags, kinds with a suffix, and a profile with
    all there can be.
    """
    iteration, _ = _operations(rng, plain.schedule.stages, plain.iteration)
    lags_s: tuple[tuple[float, ...], ...] = ()
    if rng.random() < 0.7:
        lags_s = tuple(
            tuple(rng.choice((0.0, _seconds(rng, 400))) for _ in each)
            for each in iteration.predecessors
        )
    own = rng.choice(([""], ["", "", ".sync"], ["", ".sync", ".re-compute_1"]))
    kinds = tuple(computation.kind + rng.choice(own) for computation in iteration.computations)
    iteration = replace(iteration, lags_s=lags_s, kinds=rng.choice(((), kinds)))
    return PipelineDag(_furnished(rng, iteration, max_options), iteration)


def dag(seed: int, count: int, max_options: int) -> PipelineDag:
    """An acyclic graph of `count` computations of the given seed."""
    rng = Random(seed)
    stages = rng.randint(1, min(3, count))
    groups = [*range(stages), *(rng.randrange(stages) for _ in range(count - stages))]
    ranks = tuple(
        tuple(Computation(stage, "FB"[i % 2], i // 2) for i in range(groups.count(stage)))
        for stage in range(stages)
    )
    places = rng.sample(range(count), count)
    before: list[tuple[int, ...]] = [()] * count
    for i, place in enumerate(places):
        before[place] = tuple(rng.sample(places[:i], min(i, rng.randint(0, 3))))
    return PipelineDag(
        _profile(rng, stages, max_options), Iteration(Schedule("any", ranks), tuple(before))
    )


def graph(seed: int, count: int, max_options: int) -> PipelineDag:
    """`dag`, every other one with all that an iteration may have beside forwards and backwards."""
    rng, plain = Random(seed), dag(seed, count, max_options)
    return plain if rng.random() < 0.5 else _with_extras(rng, plain, max_options)


def pipeline(
    seed: int, stages: int, microbatches: int, max_options: int
) -> tuple[Profile, Schedule]:
    """A profile of the given seed and a 1F1B schedule of as many stages."""
    return _profile(Random(seed), stages, max_options), one_f_one_b(stages, microbatches)


def any_schedule(seed: int, ranks: int, microbatches: int) -> Schedule:
    """One of every kind there is, on as many ranks, of about as many microbatches: not all sizes
    are one's own.
    """
    rng = Random(seed)
    virtual, rounds = rng.randint(1, 3), max(1, microbatches // ranks)
    makers = (
        lambda: schedules.gpipe(ranks, microbatches),
        lambda: one_f_one_b(ranks, microbatches),
        lambda: schedules.interleaved_1f1b(ranks, virtual, ranks * rounds),
        lambda: schedules.zb_h1(ranks, microbatches),
        lambda: schedules.interleaved_zero_bubble(ranks, virtual, ranks * rounds),
        lambda: schedules.zbv(ranks, microbatches),
        lambda: schedules.dualpipe_v(ranks, max(2 * ranks, microbatches)),
    )
    return rng.choice(makers)()


def _transfer(rng: Random, stages: int) -> Transfer | None:
    def either() -> float | tuple[float, ...]:
        each = tuple(rng.choice((0.0, _seconds(rng))) for _ in range(stages - 1))
        return rng.choice((0.0, _seconds(rng, 400), each))

    return rng.choice((None, Transfer(either(), either())))


def _fixed_operations(rng: Random, schedule: Schedule) -> Iterable[FixedOperation]:
    names = ["load", "sync", "optimizer", "gather-all"]
    for name in rng.sample(names, rng.randint(0, 3)):
        one = rng.choice(tuple(schedule.computations()))
        when = rng.choice(("start", "end", f"before {one.kind}", f"after {one.kind}"))
        number = schedule.stage_ranks[one.stage] if when in ("start", "end") else one.stage
        yield FixedOperation(
            name, when, _seconds(rng, 400), _joules(rng), rng.choice((None, (number,)))
        )


def _variants(rng: Random, schedule: Schedule) -> Iterable[Variant]:
    for kind in rng.sample(schedule.kinds, rng.randint(0, 2)):
        one = rng.choice(
            [computation for computation in schedule.computations() if computation.kind == kind]
        )
        which = rng.choice(("first", "last", "all", (one.microbatch, one.microbatch + 1)))
        yield Variant(
            f"{kind}.{rng.choice(('sync', 'recompute'))}", which, rng.choice((None, (one.stage,)))
        )


def extras(seed: int, schedule: Schedule) -> dict[str, Any]:
    """What `pipeline_iteration` takes beside the schedule."""
    rng = Random(seed)
    return {
        "transfer": _transfer(rng, schedule.stages),
        "operations": tuple(_fixed_operations(rng, schedule)),
        "variants": tuple(_variants(rng, schedule)),
    }


def job(seed: int, ranks: int, microbatches: int, max_options: int) -> PipelineDag:
    """A pipeline of any schedule, with transfers, fixed operations and variants, and a profile
    that has them.
    """
    return furnished(seed, any_schedule(seed, ranks, microbatches), max_options)


def furnished(seed: int, schedule: Schedule, max_options: int) -> PipelineDag:
    """`schedule` with transfers, fixed operations and variants, and a profile that has them."""
    iteration = pipeline_iteration(schedule, **extras(seed, schedule))
    return PipelineDag(_furnished(Random(seed), iteration, max_options), iteration)


_SEEDS = st.integers(0, 2**32 - 1)

fixed = settings(derandomize=True, deadline=None)  #: the same problems in every run


def drawn(
    few: int,
    many: int,
    *strategies: st.SearchStrategy[Any],
    anew: bool = False,
    **named: st.SearchStrategy[Any],
) -> Callable[[Callable[..., None]], Any]:
    """Decorate a property: `few` examples are tried in every run of the tests, and `many` in a
    soak of the same property. Other parameters of the property are fixtures. The examples are the
    same in every run, unless they are drawn `anew`.
    """

    def decorate(check: Callable[..., None]) -> Any:
        of_count = {}
        for count in (few, many):
            chosen = settings(max_examples=count) if anew else settings(fixed, max_examples=count)
            of_count[count] = chosen(given(*strategies, **named)(check))

        @wraps(check)
        def run(examples: int, **fixtures: Any) -> None:
            of_count[examples](**fixtures)

        own = signature(of_count[few]).parameters.values()
        added = Parameter("examples", Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = Signature([added, *own])  # type: ignore[attr-defined]
        return few_and_many("examples", few, many)(run)

    return decorate


def few_and_many(name: str, few: Any, many: Any) -> pytest.MarkDecorator:
    """Give a test a parameter that is `few` in every run of the tests, and `many` in a soak."""
    return pytest.mark.parametrize(name, [few, *soaks(many)])


def soaks(*values: Any, unpacked: bool = False) -> list[Any]:
    """Return values of a test's parameter that are for soaks alone; or, `unpacked`, tuples of
    values of several parameters.
    """
    rows = values if unpacked else [(value,) for value in values]
    return [pytest.param(*row, marks=pytest.mark.soak) for row in rows]


def profiles(max_stages: int = 3, max_options: int = 6) -> st.SearchStrategy[Profile]:
    """Profiles: convex and not, with plateaus, ties, noise, single clocks, and any blocking
    power.
    """
    return st.builds(_profile, _SEEDS.map(Random), st.integers(1, max_stages), st.just(max_options))


def dags(most: int, least: int = 1, max_options: int = 6) -> st.SearchStrategy[PipelineDag]:
    """Any acyclic graph of `least` to `most` computations, connected or not, each stage with some.

    Their order need not be topological, and a stage may have forwards alone.
    """
    return st.builds(dag, _SEEDS, st.integers(least, most), st.just(max_options))


def graphs(most: int, least: int = 1, max_options: int = 6) -> st.SearchStrategy[PipelineDag]:
    """`dags`, every other one with fixed operations, lags, kinds with a suffix, several powers
    and an overhead.
    """
    return st.builds(graph, _SEEDS, st.integers(least, most), st.just(max_options))


def pipelines(
    max_stages: int = 4, max_microbatches: int = 6, max_options: int = 6
) -> st.SearchStrategy[tuple[Profile, Schedule]]:
    """A profile and a 1F1B schedule of as many stages."""
    return st.builds(
        pipeline,
        _SEEDS,
        st.integers(1, max_stages),
        st.integers(1, max_microbatches),
        st.just(max_options),
    )


def jobs(
    max_ranks: int = 3, max_microbatches: int = 4, max_options: int = 6
) -> st.SearchStrategy[PipelineDag]:
    """Pipelines of any schedule with all that a job may have beside it."""
    return st.builds(
        job,
        _SEEDS,
        st.integers(1, max_ranks),
        st.integers(1, max_microbatches),
        st.just(max_options),
    )


def problems(most: int, max_options: int = 6) -> st.SearchStrategy[PipelineDag]:
    """`jobs`, and `graphs` of at most so many computations."""
    return jobs(max_options=max_options) | graphs(most, max_options=max_options)


def shares() -> st.SearchStrategy[float]:
    """Where a deadline lies between the fast end of a frontier, 0, and its slow end, 1."""
    return st.sampled_from((0.0, 1.0)) | st.floats(0.0, 1.0)


def deadline_s(frontier: Frontier, share: float) -> float:
    """The deadline at that share."""
    slowest_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
    return min(max(slowest_s, frontier.min_time_s), frontier.max_time_s)
