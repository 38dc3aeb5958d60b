"""An engine of which only the begin and the end of each iteration are shown, as one computation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.engines.guard import IterationHook, Microbatches


@runtime_checkable
class Capturing(Protocol):
    """What looks inside iterations that are replayed as one CUDA graph, before they are: compares
    what runs, and marks computations in the graph while it is captured.
    """

    def capture(self, position: int) -> None:
        """Mark that the computation at a position is next."""

    def end_eager(self, order: Sequence[tuple[int, str, int]], microbatches: int | None) -> None:
        """Take what an iteration has run, before there is a graph: as in `end_capture`."""

    def end_capture(self, order: Sequence[tuple[int, str, int]]) -> None:
        """Take what the graph runs: stage, kind and microbatch of each computation."""


class EdgesOnly:
    """An engine whose computations are not shown, or cannot be.

    Args:
        engine: Its adapter, which answers everything else. Where it has `attached_to_edges`, that
            is how it shows the iterations, instead of `attached`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`."""
        attached: Any = getattr(self._engine, "attached_to_edges", self._engine.attached)
        block: AbstractContextManager[None] = attached(EdgeHook(hook))
        with block:
            yield


class EdgeHook:
    """Shows each iteration to another hook as one computation, from its begin to the update of the
    weights or, where the engine does not show that, to its end.

    Args:
        hook: The other hook.
    """

    lane = None

    def __init__(self, hook: IterationHook) -> None:
        from perseus_planner.schedules import WHOLE  # an engine that does not train loads little

        self._hook = hook
        self._whole = WHOLE.ranks[0][0]
        self._is_inside = False

    @property
    def iteration(self) -> int:
        """See `IterationHook.iteration`."""
        return self._hook.iteration

    def begin_iteration(
        self,
        microbatches: int | None = None,
        batch: Microbatches | None = None,
        number: int | None = None,
    ) -> None:
        """See `IterationHook.begin_iteration`."""
        self._is_inside = True
        self._hook.begin_iteration(microbatches, batch, number)
        self._hook.begin(*self._whole)

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Do nothing: a computation is not shown."""

    def end(self) -> None:
        """Do nothing: a computation is not shown."""

    def begin_update(self) -> None:
        """See `IterationHook.begin_update`; the computation that is shown ends."""
        self._end()
        self._hook.begin_update()

    def end_iteration(self) -> None:
        """See `IterationHook.end_iteration`."""
        self._end()
        self._hook.end_iteration()

    def note_evaluation(self) -> None:
        """See `IterationHook.note_evaluation`."""
        self._hook.note_evaluation()

    def abandon_iteration(self) -> None:
        """See `IterationHook.abandon_iteration`."""
        self._is_inside = False
        self._hook.abandon_iteration()

    def stop_following(self, problem: str) -> None:
        """See `IterationHook.stop_following`."""
        self._is_inside = False
        self._hook.stop_following(problem)

    def pass_iteration(self, number: int) -> None:
        """See `IterationHook.pass_iteration`."""
        self._hook.pass_iteration(number)

    def take_fault(self, error: Exception) -> IterationHook | None:
        """See `IterationHook.take_fault`."""
        self._is_inside = False
        return self._hook.take_fault(error)

    def end_fault(self) -> None:
        """See `IterationHook.end_fault`."""
        self._hook.end_fault()

    @property
    def capturing(self) -> Capturing | None:
        """What looks inside iterations before they are a graph; None if nothing does."""
        return self._hook if isinstance(self._hook, Capturing) else None

    def _end(self) -> None:
        if self._is_inside:
            self._is_inside = False
            self._hook.end()
