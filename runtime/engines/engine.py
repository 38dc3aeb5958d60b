"""What the runtime needs of a training engine, and how adapters attach to an engine's objects
and detach again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch

    from perseus_planner.runtime.hook import Hook
    from perseus_planner.schedules import Computation

_MARK = "_perseus_planner_attached"


@dataclass(frozen=True)
class PipelineRank:
    """Which rank of which pipeline this process is."""

    rank: int  #: Rank within the pipeline, from 0; a rank of the plan's schedule
    ranks: int  #: Number of ranks of the pipeline
    pipeline: int | None  #: Number of the data-parallel pipeline; None if the engine does not know
    #: The ranks of the pipeline in the whole job, in order; they tell pipelines apart.
    peers: tuple[int, ...]


class Engine(Protocol):
    """A training engine on this rank."""

    @property
    def name(self) -> str:
        """Name of the engine in messages, for example "DeepSpeed"."""

    @property
    def pipeline_rank(self) -> PipelineRank:
        """Which rank of which pipeline this process is."""

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that this rank trains."""

    def order(self) -> tuple[Computation, ...] | None:
        """Return what this rank runs in a training iteration; None if that is only known when it
        runs.
        """

    def attached(self, hook: Hook) -> AbstractContextManager[None]:
        """Call `hook` in every training iteration, but in no evaluation, while the block runs.

        On leaving, all that was wrapped is as it was before.
        """


@contextmanager
def replaced(owner: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of one instance, never of its class, while the block runs; restore what was
    there afterwards.
    """
    instance = vars(owner)
    before = {name: instance[name] for name in attributes if name in instance}
    instance.update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            instance.pop(name, None)
        instance.update(before)


@contextmanager
def attached_once(owner: object, **attributes: Any) -> Iterator[None]:
    """Do what `replaced` does, and refuse a second runtime meanwhile.

    Raises:
        UsageError: If another runtime is attached.
    """
    check_free(owner)
    with replaced(owner, **{_MARK: True}, **attributes):
        yield


def check_free(owner: object) -> None:
    """Refuse an engine inside the block of `attached_once`.

    Raises:
        UsageError: If a runtime is attached.
    """
    if _MARK in vars(owner):
        raise UsageError(
            f"a runtime is attached to this {type(owner).__name__} already; leave its block before "
            "you enter another"
        )


def check_has(owner: object, names: tuple[str, ...], supported: str) -> None:
    """Refuse an engine that lacks an attribute that its adapter uses.

    Args:
        owner: The object that should have the attributes.
        names: Names of the attributes.
        supported: The engine and its supported versions.

    Raises:
        UsageError: If an attribute is missing; names the first.
    """
    missing = next((name for name in names if not hasattr(owner, name)), None)
    if missing is not None:
        raise UsageError(
            f"{type(owner).__name__} has no {missing}, which the runtime needs; use {supported}"
        )
