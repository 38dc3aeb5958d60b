"""Compare repeated computations with those of the training iteration that they repeat."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from perseus_planner.base.prefixes import si

if TYPE_CHECKING:
    from perseus_planner.profiler.stage import Stage

UNLIKE_TRAINING = (
    "over 10% apart, so the profile is not that of the training; profile an iteration after "
    "the first ones, of several microbatches, while nothing else runs on the GPU"
)
"""What `difference_from_training` means, and what to do."""

_TOLERANCE = 0.10

# The same on all GPUs of a stage, which may wait for each other in each repetition.
_ROUNDS, _REPETITIONS = 3, 3


def difference_from_training(stage: Stage, trained_s: Mapping[str, float]) -> str:
    """Run kinds of a stage again, and return how their times differ from those in training; empty
    if they do not.

    Args:
        stage: The stage, at the clock at which the iteration ran.
        trained_s: Kind -> its time in the iteration, seconds.
    """
    texts = []
    for kind, before_s in trained_s.items():
        repeated_s = _repeated_s(stage, kind)
        if abs(repeated_s - before_s) > _TOLERANCE * before_s:
            texts.append(
                f"{kind} took {si(before_s, 's')} in the iteration and takes {si(repeated_s, 's')} "
                "when it is repeated"
            )
    return "; ".join(texts)


def _repeated_s(stage: Stage, kind: str) -> float:
    """Return the time of one repetition in the fastest of some rounds, seconds."""
    timed = stage.runs[kind]
    timed.run(1)  # gets ready
    least_s = min(_round_s(stage, kind) for _ in range(_ROUNDS))
    return least_s - (0.0 if timed.includes is None else _repeated_s(stage, timed.includes))


def _round_s(stage: Stage, kind: str) -> float:
    stage.synchronize()
    begin_s = time.perf_counter()
    stage.runs[kind].run(_REPETITIONS)
    stage.synchronize()
    return (time.perf_counter() - begin_s) / _REPETITIONS
