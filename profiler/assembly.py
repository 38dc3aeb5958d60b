"""Put the measured stages of a pipeline together to its profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from perseus_planner.base import __version__
from perseus_planner.base.errors import ProfileError
from perseus_planner.profiles.profiles import Profile

if TYPE_CHECKING:
    from perseus_planner.profiler.stage import StageRows


def assemble_profile(
    stages: Sequence[StageRows],
    *,
    blocking_power_w: float | None = None,
    iteration: Mapping[str, str | int] | None = None,
    conditions: Mapping[str, str] | None = None,
) -> Profile:
    """Return the profile of a pipeline.

    Args:
        stages: The rows of each stage, in any order.
        blocking_power_w: Power of one waiting GPU, watts, instead of what was measured. Without it,
            a stage whose power was not measured gets the mean, per GPU, of the others.
        iteration: As in `Profile.iteration`.
        conditions: Conditions to record besides those of the stages, such as the date.

    Raises:
        ProfileError: If a stage is missing or measured twice, if stages were measured in different
            ways, or if no blocking power is known.
    """
    stages = sorted(stages, key=lambda each: each.stage)
    _check_stages(stages)
    powers_w = _powers_w(stages, blocking_power_w)
    return Profile(
        {(each.stage, kind): rows for each in stages for kind, rows in each.measurements.items()},
        powers_w[0] if len(set(powers_w)) == 1 else powers_w,
        gpu=" + ".join(dict.fromkeys(each.gpu for each in stages)),
        origin="simulated" if any(each.origin == "simulated" for each in stages) else "measured",
        gpus_per_stage=stages[0].gpus,
        control=stages[0].control,
        iteration=iteration or {},
        conditions={**(conditions or {}), "planner": __version__, **_merge_conditions(stages)},
    )


def with_one_power(rows: Sequence[StageRows]) -> list[StageRows]:
    """Return the rows of the stages of one GPU, which waits for all of them at the mean of the
    measured powers.
    """
    powers_w = [each.blocking_power_w for each in rows if each.blocking_power_w is not None]
    return [
        replace(each, blocking_power_w=math.fsum(powers_w) / len(powers_w) if powers_w else None)
        for each in rows
    ]


def _check_stages(stages: Sequence[StageRows]) -> None:
    if not stages:
        raise ProfileError("no stage was measured; give at least one")
    for each in stages:
        for name in ("control", "gpus"):
            if getattr(each, name) != getattr(stages[0], name):
                raise ProfileError(
                    f"stage {stages[0].stage} and stage {each.stage} differ in {name}; measure "
                    "both alike"
                )
    numbers = [each.stage for each in stages]
    twice = next((number for number in numbers if numbers.count(number) > 1), None)
    if twice is not None:
        raise ProfileError(f"stage {twice} was measured twice; give it once")


def _powers_w(stages: Sequence[StageRows], blocking_power_w: float | None) -> tuple[float, ...]:
    """Return the power of each stage's GPUs while they wait."""
    if blocking_power_w is not None:
        return tuple(blocking_power_w * each.gpus for each in stages)
    known = [
        each.blocking_power_w / each.gpus for each in stages if each.blocking_power_w is not None
    ]
    if not known:
        raise ProfileError(
            "the blocking power was not measured, as no stage has a neighbour to wait for; "
            "give it with --blocking-power W (in Python blocking_power_w=)"
        )
    mean_w = math.fsum(known) / len(known)
    return tuple(
        mean_w * each.gpus if each.blocking_power_w is None else each.blocking_power_w
        for each in stages
    )


def _merge_conditions(stages: Sequence[StageRows]) -> dict[str, str]:
    """Return the conditions of all stages: once where they agree, else stage by stage."""
    merged = {}
    for name in dict.fromkeys(name for each in stages for name in each.conditions):
        texts = {each.stage: each.conditions[name] for each in stages if name in each.conditions}
        agree = len(set(texts.values())) == 1 and len(texts) == len(stages)
        by_stage = "; ".join(f"stage {stage}: {text}" for stage, text in texts.items())
        merged[name] = next(iter(texts.values())) if agree else by_stage
    return merged
