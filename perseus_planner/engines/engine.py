"""What the planner needs of a training engine, and how adapters attach to an engine's objects and
detach again; and the adapter of training without a pipeline.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perseus_planner.base.errors import UsageError

if TYPE_CHECKING:
    import torch

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


@dataclass(frozen=True)
class EngineStage:
    """A stage of the pipeline as its engine runs it."""

    number: int  #: Its number in the pipeline, from 0
    module: torch.nn.Module  #: It holds the weights, and the engine calls it
    #: Runs a microbatch with the arguments of `module`, and nothing that the engine does besides.
    forward: Callable[..., Any]
    #: In the last stage, the object and the name of its attribute that is the loss function. None
    #: if `module` returns the loss, or `loss_with_output`.
    loss: tuple[Any, str] | None = None
    #: Whether this is the last stage of Megatron-core, whose loss function comes with each output.
    loss_with_output: bool = False
    #: The module whose `set_input_tensor` takes what the stage before has sent; None if `forward`
    #: takes it.
    receiver: Any = None
    #: Preserves further state that `forward` changes.
    preserve_state: Callable[[], AbstractContextManager[None]] = nullcontext


Microbatches = Callable[[], Iterable[Any]]
"""Returns the microbatches of an iteration, for another thread to look at."""


class IterationHook(Protocol):
    """What an engine's iterations are shown to."""

    def begin_iteration(
        self, microbatches: int | None = None, batch: Microbatches | None = None
    ) -> None:
        """Begin a training iteration.

        Args:
            microbatches: How many it has, if the engine knows.
            batch: Returns them, on a rank that has them: each as the model takes it. It may read
                them ahead from where they come from, in their order; the iteration then gets those.
        """

    def note_evaluation(self) -> None:
        """Note that the engine evaluates, between two iterations: the next one begins while other
        ranks still do, and may hold what the engine has to do again after it.
        """

    def begin(self, stage: int, kind: str, microbatch: int) -> None:
        """Begin a computation."""

    def end(self) -> None:
        """End the computation."""

    def begin_update(self) -> None:
        """Begin the update of the weights, if it is a part of the iteration."""

    def end_iteration(self) -> None:
        """End the iteration."""

    def abandon_iteration(self) -> None:
        """End the iteration because it raises."""

    def stop_following(self, problem: str) -> None:
        """Nothing more is shown, because the engine runs what its adapter does not see.

        Args:
            problem: What it runs, and what to do.
        """


class Engine(Protocol):
    """A training engine on this rank."""

    @property
    def name(self) -> str:
        """Name of the engine in messages, for example "DeepSpeed"."""

    @property
    def pipeline_rank(self) -> PipelineRank:
        """Which rank of which pipeline this process is."""

    @property
    def tensor_rank(self) -> int:
        """Its rank among the GPUs that share its stages."""

    @property
    def device(self) -> torch.device:
        """The device that this process computes on."""

    @property
    def splits_backward(self) -> bool:
        """Whether it computes the gradients of inputs and of weights separately."""

    def stages(self) -> list[EngineStage]:
        """Return the stages that this rank holds, first to last.

        Raises:
            UsageError: If they cannot be measured.
        """

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that this rank trains."""

    def microbatches(self) -> int | None:
        """Return how many microbatches the iteration in progress runs through each stage; None if
        that is not known.
        """

    def iteration(self, forwards: int) -> Mapping[str, str | int]:
        """Return how its schedule is generated, as `Profile.iteration`, after an iteration with so
        many forwards of the first stage.
        """

    def order(self) -> tuple[Computation, ...] | None:
        """Return what this rank runs in a training iteration; None if that is only known when it
        runs.
        """

    def check(self) -> None:
        """Refuse an engine that cannot be followed, or that is followed already.

        Raises:
            UsageError: If it lacks an attribute that is used here, or a runtime is attached to it.
        """

    def attached(self, hook: IterationHook) -> AbstractContextManager[None]:
        """Call `hook` in every training iteration while the block runs; in an evaluation only its
        `note_evaluation`, where the engine shows it.

        On leaving, all that was wrapped is as it was before.

        Raises:
            UsageError: If another hook is attached.
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


def sharded_torch(engine: Engine) -> str | None:
    """Return the version of torch, if it is torch that decides when the weights of this rank's
    stages are gathered and their gradients reduced (`profiles.sharding`); None for other stages.
    """
    version: str | None = getattr(engine, "sharded_torch", None)
    return version


def are_same(parts: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether two lists have the same objects."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


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


def current_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


class WholeTraining:
    """A rank that trains without a pipeline: a pipeline of one stage, which runs an iteration as
    one computation. The training says where its iterations begin and end.
    """

    name = "training without a pipeline"
    splits_backward = False
    tensor_rank = 0

    def __init__(self) -> None:
        from perseus_planner.schedules import WHOLE  # an engine that does not train loads little

        self._whole = WHOLE
        self._hook: IterationHook | None = None
        self._is_inside = False  #: an iteration has begun

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`; each rank is a pipeline."""
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        return PipelineRank(0, 1, rank, (rank,))

    @property
    def device(self) -> torch.device:
        """See `Engine.device`."""
        return current_device()

    def stages(self) -> list[EngineStage]:
        """See `Engine.stages`; nothing is measured alone."""
        return []

    def parameters(self) -> Iterator[torch.Tensor]:
        """See `Engine.parameters`."""
        return iter(())

    def microbatches(self) -> int:
        """See `Engine.microbatches`."""
        return 1

    def iteration(self, forwards: int) -> Mapping[str, str | int]:
        """See `Engine.iteration`."""
        return {"schedule": self._whole.name, "microbatches": 1}

    def order(self) -> tuple[Computation, ...]:
        """See `Engine.order`."""
        return self._whole.ranks[0]

    def check(self) -> None:
        """See `Engine.check`; there is nothing to refuse."""

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`."""
        self._hook = hook
        try:
            yield
        finally:
            self._hook = None

    def begin(self) -> None:
        """Begin an iteration."""
        if self._hook is not None:
            self._is_inside = True
            self._hook.begin_iteration(1)
            self._hook.begin(*self._whole.ranks[0][0])

    def end(self) -> None:
        """End the iteration, if one has begun."""
        if self._hook is not None and self._is_inside:
            self._is_inside = False
            self._hook.end()
            self._hook.end_iteration()

    def abandon(self) -> None:
        """End the iteration because it raises."""
        self._is_inside = False
        if self._hook is not None:
            self._hook.abandon_iteration()
