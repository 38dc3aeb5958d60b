"""What the planner needs of a training engine, and how adapters attach to an engine's objects and
detach again; and the adapter of training without a pipeline.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from perseus_planner.base.errors import ISSUES, EngineChanged, UsageError
from perseus_planner.engines.guard import HookGuard, IterationHook
from perseus_planner.engines.releases import tested_releases

if TYPE_CHECKING:
    import torch

    from perseus_planner.schedules import Computation

_LOG = logging.getLogger("perseus_planner.runtime")
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
    #: The object and the name of its method that the engine calls instead of `module`, with the
    #: same arguments, where forwards and backwards overlap; None where it calls `module`.
    planned: tuple[Any, str] | None = None
    #: Preserves further state that `forward` changes.
    preserve_state: Callable[[], AbstractContextManager[None]] = nullcontext


class Engine(Protocol):
    """A training engine on this rank."""

    @property
    def name(self) -> str:
        """Name of the engine in messages, for example "DeepSpeed"."""

    @property
    def packages(self) -> Sequence[str]:
        """The packages that it is made of, as in `releases.TESTED`."""

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


class _Replacement:
    """See `replaced`."""

    def __init__(self, owner: object, attributes: dict[str, Any]) -> None:
        self._owner = owner
        self._attributes = attributes

    def __enter__(self) -> None:
        namespace = vars(self._owner)
        self._before = {name: namespace[name] for name in self._attributes if name in namespace}
        for name, value in self._attributes.items():
            self._set(name, value)

    def __exit__(self, *_: object) -> None:
        namespace = vars(self._owner)
        for name, value in self._attributes.items():
            # Somebody else has replaced it since, and may call it: it is not ours to undo.
            if namespace.get(name) is not value:
                say_left(self._owner, name)
            elif name in self._before:
                self._set(name, self._before[name])
            # It was inherited before, and is again.
            elif isinstance(self._owner, type):
                delattr(self._owner, name)
            else:
                del namespace[name]

    def _set(self, name: str, value: Any) -> None:
        if isinstance(self._owner, type):
            setattr(self._owner, name, value)
        else:
            vars(self._owner)[name] = value


def replaced(owner: object, **attributes: Any) -> AbstractContextManager[None]:
    """Set attributes of one instance, module or class while a block runs; restore what was there
    afterwards.

    An attribute that something else has set meanwhile, for example a profiler, stays as it is,
    which is said once. So what is set here must do no more than pass on when the block has ended.
    What is returned may be entered again after its block.
    """
    return _Replacement(owner, attributes)


@contextmanager
def preserved(owner: object, name: str) -> Iterator[None]:
    """Restore an attribute of one instance after the block, whatever has set it."""
    namespace = vars(owner)
    before = {name: namespace[name]} if name in namespace else {}
    try:
        yield
    finally:
        namespace.pop(name, None)
        namespace.update(before)


_said_left: set[str] = set()  #: attributes of which was said that they stay as they are


def say_left(owner: object, name: str) -> None:
    """Say once that an attribute stays as something else has set it."""
    kind = owner if isinstance(owner, type) else type(owner)
    attribute = f"{getattr(owner, '__name__', kind.__name__)}.{name}"
    if attribute not in _said_left:
        _said_left.add(attribute)
        _LOG.warning(
            "planner: %s was replaced by something else while the planner had replaced it; it "
            "stays as it is, and the planner's part of it does nothing any more",
            attribute,
        )


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


def has_pairs(engine: Engine) -> bool:
    """Whether an engine runs overlapped pairs of a forward and a backward, each as one."""
    pairs: bool = getattr(engine, "has_pairs", False)
    return pairs


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
        EngineChanged: If an attribute is missing; names the first.
    """
    missing = next((name for name in names if not hasattr(owner, name)), None)
    if missing is not None:
        raise EngineChanged(
            f"{type(owner).__name__} has no {missing}, which the runtime needs; use {supported}"
        )


def current_device() -> torch.device:
    """Return the current CUDA device, or the CPU if there is none."""
    import torch

    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextmanager
def as_tested() -> Iterator[None]:
    """Use names of an engine inside the block.

    Raises:
        EngineChanged: If one is missing.
    """
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise EngineChanged(
            f"the engine is not as in the releases that the planner was tested with ({error}); use "
            f"one of those ({tested_releases()}), or report it at {ISSUES}"
        ) from error


class WholeTraining:
    """A rank that trains without a pipeline: a pipeline of one stage, which runs an iteration as
    one computation; or a rank of a pipeline whose engine is not known. The training says where its
    iterations begin and end.

    Args:
        peers: The ranks of its pipeline in the whole job, in order; None without a pipeline.
    """

    name = "training without a pipeline"
    packages = ("torch",)
    splits_backward = False
    tensor_rank = 0

    def __init__(self, peers: Sequence[int] | None = None) -> None:
        from perseus_planner.schedules import WHOLE  # an engine that does not train loads little

        self._peers = None if peers is None else tuple(peers)
        self._whole = WHOLE
        self._guard: HookGuard | None = None

    @property
    def pipeline_rank(self) -> PipelineRank:
        """See `Engine.pipeline_rank`; each rank is a pipeline, unless it has peers."""
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        peers = self._peers
        if peers is None:
            return PipelineRank(0, 1, rank, (rank,))
        return PipelineRank(peers.index(rank), len(peers), None, peers)

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

    def order(self) -> tuple[Computation, ...] | None:
        """See `Engine.order`; that of a pipeline is not known."""
        return self._whole.ranks[0] if self._peers is None else None

    def check(self) -> None:
        """See `Engine.check`.

        Raises:
            UsageError: If this rank is none of its peers.
        """
        import torch.distributed as dist

        rank = dist.get_rank() if dist.is_initialized() else 0
        if self._peers is not None and rank not in self._peers:
            raise UsageError(
                f"peers: {', '.join(map(str, self._peers))} does not have this rank, {rank}; give "
                "the ranks of its own pipeline, first stage to last"
            )

    @contextmanager
    def attached(self, hook: IterationHook) -> Iterator[None]:
        """See `Engine.attached`."""
        guard = HookGuard(hook)
        self._guard = guard
        try:
            yield
        finally:
            guard.close()
            self._guard = None

    def begin(self, microbatches: int | None = None) -> None:
        """Begin an iteration.

        Args:
            microbatches: How many it has, if that is known.
        """
        # Outside of a block there is nobody to show it to.
        if self._guard is not None:
            self._guard.begin_iteration(self._show, self._guard, microbatches)

    def _show(self, guard: HookGuard, microbatches: int | None) -> None:
        guard.show(1 if self._peers is None else microbatches)
        guard.begin(*self._whole.ranks[0][0])

    def end(self) -> None:
        """End the iteration, if one has begun."""
        if self._guard is not None and self._guard.is_inside:
            self._guard.call(self._guard.end)
            self._guard.end_iteration()

    def abandon(self) -> None:
        """End the iteration because it raises."""
        if self._guard is not None:
            self._guard.abandon_iteration()
