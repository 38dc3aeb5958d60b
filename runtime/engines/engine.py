"""What the runtime needs of a training engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from perseus_planner.runtime.hook import Hook
    from perseus_planner.schedules import Computation


@dataclass(frozen=True)
class Seat:
    """Where this process stands in the job.

    Attributes:
        rank: of its pipeline, from 0: which rank of the plan's schedule it is.
        ranks: how many its pipeline has.
        pipeline: which of the data-parallel pipelines it is in; None where the engine does not say.
        peers: the ranks of its pipeline in the whole job, in their order; they tell pipelines apart.
    """

    rank: int
    ranks: int
    pipeline: int | None
    peers: tuple[int, ...]


class Engine(Protocol):
    """One engine, on this rank."""

    @property
    def name(self) -> str:
        """As messages name it, e.g. "DeepSpeed"."""

    @property
    def seat(self) -> Seat:
        """Where this process stands."""

    @property
    def device(self) -> torch.device:
        """Where it computes."""

    def order(self) -> tuple[Computation, ...] | None:
        """What this rank runs in a training iteration; None where that is only known when it runs."""

    def attached(self, hook: Hook) -> AbstractContextManager[None]:
        """While the block runs, `hook` is told of every training iteration, and of no evaluation.

        On leaving, all that was wrapped is as it was found.
        """
