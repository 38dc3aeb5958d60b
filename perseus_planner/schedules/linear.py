"""Schedules with one stage per rank: GPipe, 1F1B and ZB-H1."""

from __future__ import annotations

from perseus_planner.schedules.computation import Computation
from perseus_planner.schedules.schedule import Schedule
from perseus_planner.schedules.sizes import alternating_order, check_sizes


def gpipe(stages: int, microbatches: int) -> Schedule:
    """GPipe: every rank runs all forwards, then all backwards (Huang et al., NeurIPS'19, section
    2.3).

    Backwards run in the order of the forwards, as in torch's ScheduleGPipe. A rank keeps the
    activations of all microbatches.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    stages, microbatches = check_sizes(stages=stages, microbatches=microbatches)
    return Schedule(
        "gpipe",
        tuple(
            alternating_order(
                _row(stage, "F", microbatches), _row(stage, "B", microbatches), microbatches
            )
            for stage in range(stages)
        ),
    )


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Non-interleaved 1F1B, as DeepSpeed's TrainSchedule and Megatron-core run it.

    Rank s runs `stages - 1 - s` warm-up forwards, then one forward and one backward in turn, then
    the remaining backwards (PipeDream-Flush; Narayanan et al., SC'21, section 2.2). It keeps the
    activations of at most `stages - s` microbatches.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    stages, microbatches = check_sizes(stages=stages, microbatches=microbatches)
    return Schedule(
        "1f1b",
        tuple(
            alternating_order(
                _row(stage, "F", microbatches), _row(stage, "B", microbatches), stages - 1 - stage
            )
            for stage in range(stages)
        ),
    )


def zb_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with backwards in two parts; the weight gradients of rank s come `s` microbatches
    late.

    Qi et al., Zero Bubble Pipeline Parallelism, ICLR'24, section 2.2. The later a rank starts, the
    more weight gradients it delays to the end, where 1F1B waits. So every rank keeps the
    activations of at most `stages` microbatches, which is the maximum of 1F1B; and if F, I and W
    take equally long, a rank waits a third as long as in 1F1B.

    Raises:
        ScheduleError: If a size is not a whole number of at least 1, or the iteration is too large.
    """
    stages, microbatches = check_sizes(stages=stages, microbatches=microbatches)
    ranks = []
    for stage in range(stages):
        forwards, backwards, weights = (_row(stage, kind, microbatches) for kind in "FIW")
        ranks.append(
            alternating_order(forwards, backwards, stages - 1 - stage, weights, delay=stage)
        )
    return Schedule("zb-h1", tuple(ranks))


def _row(stage: int, kind: str, microbatches: int) -> list[Computation]:
    return [Computation(stage, kind, microbatch) for microbatch in range(microbatches)]
