"""The schedules that have a generator, by their names on the command line."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from perseus_planner.base.errors import ScheduleError, did_you_mean, shown
from perseus_planner.base.prefixes import counted
from perseus_planner.schedules.generators import (
    gpipe,
    interleaved_1f1b,
    interleaved_zero_bubble,
    looped_bfs,
    one_f_one_b,
    zb_h1,
)
from perseus_planner.schedules.schedule import WHOLE
from perseus_planner.schedules.v_shaped import dualpipe_v, zbv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from perseus_planner.schedules.schedule import Schedule


class Generator(NamedTuple):
    """A function that makes a schedule, and how many stages it puts on each rank."""

    #: takes ranks, then virtual stages if `virtual_stages` is None, then microbatches.
    generate: Callable[..., Schedule]
    virtual_stages: int | None  #: stages per rank; None if the caller chooses


#: name -> its generator
NAMES: Mapping[str, Generator] = MappingProxyType(
    {
        "gpipe": Generator(gpipe, 1),
        "1f1b": Generator(one_f_one_b, 1),
        "looped-bfs": Generator(looped_bfs, None),
        "interleaved-1f1b": Generator(interleaved_1f1b, None),
        "zb-h1": Generator(zb_h1, 1),
        "interleaved-zb": Generator(interleaved_zero_bubble, None),
        "zbv": Generator(zbv, 2),
        "dualpipe-v": Generator(dualpipe_v, 2),
    }
)


def generate(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    virtual_stages: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Make the schedule of that name.

    Args:
        name: one of `NAMES`.
        ranks: number of ranks of the pipeline; each holds as many stages as the schedule has
            virtual stages.
        microbatches: number of microbatches of one iteration.
        virtual_stages: stages per rank. Required for looped-bfs and the interleaved schedules; the
            others have a fixed number.
        group: number of microbatches that go through a stage before the rank's next stage gets its
            turn, Megatron's `microbatch_group_size_per_vp_stage`; for interleaved-1f1b only.

    Raises:
        ScheduleError: If the name is unknown, `virtual_stages` is missing or differs from the
            schedule's number, the schedule has no groups, or the generator refuses the sizes.
    """
    make, fixed = _generator(name)
    if group is not None and make is not interleaved_1f1b:
        raise ScheduleError(f"schedule {name}: has no groups of microbatches; leave the group out")
    if fixed is None:
        if virtual_stages is None:
            raise ScheduleError(
                f"schedule {name}: how many virtual stages a rank holds is missing; give 2 or more"
            )
        groups = {} if group is None else {"group": group}
        return make(ranks, virtual_stages, microbatches, **groups)
    if virtual_stages not in (None, fixed):
        per_rank = counted(fixed, "stage")
        raise ScheduleError(
            f"schedule {name}: has {per_rank} per rank, not {virtual_stages}; leave virtual stages "
            "out"
        )
    return make(ranks, microbatches)


def generate_for_stages(
    name: str,
    stages: int,
    *,
    microbatches: int,
    ranks: int | None = None,
    virtual_stages: int | None = None,
    group: int | None = None,
) -> Schedule:
    """Make the schedule of that name for a pipeline of `stages` stages; ranks and virtual stages
    follow from them.

    Args:
        name: one of `NAMES`.
        stages: number of stages of the pipeline.
        microbatches: number of microbatches of one iteration.
        ranks: number of ranks; None if virtual stages, or the schedule, tell it.
        virtual_stages: stages per rank; None if the ranks, or the schedule, tell it.
        group: as `generate` takes it.

    Raises:
        ScheduleError: If the stages cannot be shared equally by ranks, or `generate` refuses the
            sizes.
    """
    fixed = _generator(name).virtual_stages
    if ranks is not None and fixed is None and virtual_stages is None and stages % ranks == 0:
        virtual_stages = stages // ranks
    per_rank = fixed or virtual_stages or 1
    if ranks is None and stages % per_rank:
        raise ScheduleError(
            f"{stages} stages cannot be shared by ranks of {per_rank} stages each; give the number "
            "of ranks"
        )
    ranks = ranks or stages // per_rank or stages
    return generate(
        name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages, group=group
    )


def _whole(ranks: int, microbatches: int) -> Schedule:
    if (ranks, microbatches) != (1, 1):
        raise ScheduleError(
            f"schedule {WHOLE.name}: is one computation of one rank; leave ranks and microbatches "
            "out"
        )
    return WHOLE


def _generator(name: str) -> Generator:
    if name == WHOLE.name:  # of profiles that were learnt without a pipeline
        return Generator(_whole, 1)
    if name not in NAMES:
        advice = did_you_mean(name, NAMES) or f"give one of {', '.join(NAMES)}"
        raise ScheduleError(f"there is no schedule {shown(name)}; {advice}")
    return NAMES[name]
