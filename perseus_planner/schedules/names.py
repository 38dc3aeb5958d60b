"""Every schedule that has a generator, by its name on the command line."""

from __future__ import annotations

import difflib
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.errors import ScheduleError, shown
from perseus_planner.schedules.interleaved import interleaved_1f1b, interleaved_zero_bubble
from perseus_planner.schedules.linear import gpipe, one_f_one_b, zb_h1
from perseus_planner.schedules.v_shaped import dualpipe_v, zbv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perseus_planner.schedules.schedule import Schedule


class Named(NamedTuple):
    """A generator and how many stages per rank it makes.

    Attributes:
        generate: called with ranks, virtual stages where `virtual_stages` is None, and microbatches.
        virtual_stages: stages per rank; None when the caller chooses.
    """

    generate: Callable[..., Schedule]
    virtual_stages: int | None


#: name -> its generator
NAMES: Mapping[str, Named] = MappingProxyType(
    {
        "gpipe": Named(gpipe, 1),
        "1f1b": Named(one_f_one_b, 1),
        "interleaved-1f1b": Named(interleaved_1f1b, None),
        "zb-h1": Named(zb_h1, 1),
        "interleaved-zb": Named(interleaved_zero_bubble, None),
        "zbv": Named(zbv, 2),
        "dualpipe-v": Named(dualpipe_v, 2),
    }
)


def named(
    name: str, *, ranks: int, microbatches: int, virtual_stages: int | None = None, group: int | None = None
) -> Schedule:
    """The schedule of that name.

    Args:
        name: one of `NAMES`.
        ranks: how many ranks the pipeline has; each holds as many stages as the schedule has virtual stages.
        microbatches: of one iteration.
        virtual_stages: stages per rank. Needed for the interleaved schedules; the others have a number of their own.

        group: how many microbatches go through a stage before those of the rank's next one, as Megatron's
            `microbatch_group_size_per_vp_stage`; of interleaved-1f1b alone.

    Raises:
        ScheduleError: there is no such name, `virtual_stages` is missing or not the schedule's own, it has no groups,
            or the generator refuses the sizes.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        advice = f"did you mean {near[0]}?" if near else f"give one of {', '.join(NAMES)}"
        raise ScheduleError(f"there is no schedule {shown(name)}; {advice}")
    generate, own = NAMES[name]
    if group is not None and generate is not interleaved_1f1b:
        raise ScheduleError(f"schedule {name}: has no groups of microbatches; leave the group out")
    if own is None:
        if virtual_stages is None:
            raise ScheduleError(f"schedule {name}: how many virtual stages a rank holds is missing; give 2 or more")
        groups = {} if group is None else {"group": group}
        return generate(ranks, virtual_stages, microbatches, **groups)
    if virtual_stages not in (None, own):
        each = f"{own} stage" + "s" * (own > 1)
        raise ScheduleError(f"schedule {name}: has {each} per rank, not {virtual_stages}; leave virtual stages out")
    return generate(ranks, microbatches)
