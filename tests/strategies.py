"""Hypothesis strategies that draw whole planning problems: profiles, graphs of computations, pipelines.

Hypothesis draws the sizes, and so shrinks a failure to a small one; a seed settles the rest, for variety.
"""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from perseus_planner.dag import PipelineDag
from perseus_planner.frontier import Frontier
from perseus_planner.iteration import Iteration
from perseus_planner.profiles import Measurement, Profile
from perseus_planner.schedules import Computation, Schedule, one_f_one_b

NOISE = (0.0, 0.0, 1e-2, 1e-4)  #: relative; none most often, as then there are ties
WAITING_W = (0.0, 10.0, 83.64, 83.64, 300.0, 1e4)  #: from free waiting to a wait so dear that no slowdown pays


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
        Measurement(1410 - 15 * i, slow * 1e-4 * rng.uniform(1, 1 + noise), dear * 1e-2 * rng.uniform(1, 1 + noise))
        for i, (slow, dear) in enumerate(points)
    )


def _profile(rng: Random, stages: int, max_options: int) -> Profile:
    keys = [(stage, kind) for stage in range(stages) for kind in "FB"]
    return Profile({key: _measurements(rng, max_options) for key in keys}, rng.choice(WAITING_W))


def smooth_profile(stages: int, step_mhz: int = 15) -> Profile:
    """Much like a measured one of an A100: 38 clocks, energy falling steeply below the highest, stages uneven."""
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
    return Profile(points, 83.64, gpu="smooth")


def dag(seed: int, count: int, max_options: int) -> PipelineDag:
    """An acyclic graph of `count` computations of the given seed."""
    rng = Random(seed)
    stages = rng.randint(1, min(3, count))
    groups = [*range(stages), *(rng.randrange(stages) for _ in range(count - stages))]
    ranks = tuple(
        tuple(Computation(stage, "FB"[i % 2], i // 2) for i in range(groups.count(stage))) for stage in range(stages)
    )
    places = rng.sample(range(count), count)
    before: list[tuple[int, ...]] = [()] * count
    for i, place in enumerate(places):
        before[place] = tuple(rng.sample(places[:i], min(i, rng.randint(0, 3))))
    return PipelineDag(_profile(rng, stages, max_options), Iteration(Schedule("any", ranks), tuple(before)))


def pipeline(seed: int, stages: int, microbatches: int, max_options: int) -> tuple[Profile, Schedule]:
    """A profile of the given seed and a 1F1B schedule of as many stages."""
    return _profile(Random(seed), stages, max_options), one_f_one_b(stages, microbatches)


_SEEDS = st.integers(0, 2**32 - 1)

fixed = settings(derandomize=True, deadline=None)  #: the same problems in every run


def profiles(max_stages: int = 3, max_options: int = 6) -> st.SearchStrategy[Profile]:
    """Profiles: convex and not, with plateaus, ties, noise, single clocks, and any blocking power."""
    return st.builds(_profile, _SEEDS.map(Random), st.integers(1, max_stages), st.just(max_options))


def dags(most: int, least: int = 1, max_options: int = 6) -> st.SearchStrategy[PipelineDag]:
    """Any acyclic graph of `least` to `most` computations, connected or not, each stage with some.

    Their order need not be topological, and a stage may have forwards alone.
    """
    return st.builds(dag, _SEEDS, st.integers(least, most), st.just(max_options))


def pipelines(
    max_stages: int = 4, max_microbatches: int = 6, max_options: int = 6
) -> st.SearchStrategy[tuple[Profile, Schedule]]:
    """A profile and a 1F1B schedule of as many stages."""
    return st.builds(
        pipeline, _SEEDS, st.integers(1, max_stages), st.integers(1, max_microbatches), st.just(max_options)
    )


def shares() -> st.SearchStrategy[float]:
    """Where a deadline lies between the fast end of a frontier, 0, and its slow end, 1."""
    return st.sampled_from((0.0, 1.0)) | st.floats(0.0, 1.0)


def deadline_s(frontier: Frontier, share: float) -> float:
    """The deadline at that share."""
    slowest_s = frontier.min_time_s + share * (frontier.max_time_s - frontier.min_time_s)
    return min(max(slowest_s, frontier.min_time_s), frontier.max_time_s)
