"""What an engine holds on this rank, found while it runs an iteration: what its adapters share.

For each engine a context manager in which the iteration runs, that yields a function; called after it, this gives what
the iteration ran. No engine is imported that is not in use.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.profiler.modules.torch_stage import torch_stage
from perseus_planner.profiler.ranks.together import Block, LocalStage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    import torch

    from perseus_planner.gpu import Gpu
    from perseus_planner.profiler.engines.recorder import Recorded
    from perseus_planner.profiler.stage import Stage


@dataclass(frozen=True)
class Held:
    """What this rank holds of the pipeline.

    Attributes:
        stages: its stages, first to last.
        tensor_rank: which of the GPUs that share them it has.
        device: where it computes.
    """

    stages: tuple[LocalStage, ...]
    tensor_rank: int
    device: torch.device


def local_stage(
    number: int,
    module: torch.nn.Module,
    forward: Callable[..., Any],
    inputs: Mapping[str, Any],
    loss: Callable[[Any], Any] | None,
    *,
    split_backward: bool = False,
    state: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> LocalStage:
    """A stage as an engine runs it.

    Args:
        number: in the pipeline.
        module: whose weights it has.
        forward: called with `inputs` by name.
        inputs: of one microbatch.
        loss: from what `forward` returns to a scalar, in the last stage.
        split_backward: as in `torch_stage`.
        state: what else is put back after it was measured.
    """

    @contextmanager
    def opened(gpu: Gpu, block: Block | None) -> Iterator[Stage]:
        stage = torch_stage(
            gpu,
            module,
            dict(inputs),
            loss,
            first=number == 0,
            split_backward=split_backward,
            forward=forward,
            block=block,
        )
        with state(), stage as result:
            yield result

    return LocalStage(number, opened)


def called(recorded: Recorded, what: str) -> dict[str, Any]:
    """The arguments that were recorded, by the names args and kwargs.

    Raises:
        UsageError: there was no call.
    """
    if recorded.args is None:
        raise UsageError(
            f"{what} did not run inside the block of profile_pipeline; run one whole training iteration there"
        )
    return {"args": recorded.args, "kwargs": recorded.kwargs}


def loss_of(function: Callable[..., Any], recorded: Recorded) -> Callable[[Any], Any]:
    """`function` of an output alone, with the further arguments that were recorded.

    Raises:
        UsageError: it was not called.
    """
    call = called(recorded, "the loss")
    _, *rest = call["args"]
    return lambda output: function(output, *rest, **call["kwargs"])


def by_name(module: Callable[..., Any]) -> Callable[..., Any]:
    """`module`, called with its arguments by the names args and kwargs."""
    return lambda args, kwargs: module(*args, **kwargs)
