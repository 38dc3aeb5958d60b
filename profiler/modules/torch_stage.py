"""A `Stage` from a torch module with a sample input, or from two callables.

Forward (F) is the module with its loss, in training mode, its graph freed each time. Backward (B) is measured apart
from it, on a graph that one forward left and that is kept; what a module computes again in its backward (activation
recomputation) is then part of B, as in training. Gradients accumulate as from microbatch to microbatch.

On a simulated GPU each kind really runs once, on the device where the module is; its FLOPs are counted by torch's
FlopCounterMode and its bytes by `counted`, and that `OpCost` is spent on the simulated GPU: what is measured there is
the model's time and energy of the real shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.errors import UsageError
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.profiler.stage import Run, Stage, Timed
from perseus_planner.training.microbatch import Microbatch
from perseus_planner.training.op_cost import counted
from perseus_planner.training.state import as_found
from perseus_planner.training.values import first_device

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu

Block = Callable[[float], None]

# What a simulated GPU idles for a kind that launches nothing: about what Python needs to come to the next one, seconds.
_NOTHING_S = 10e-6


@dataclass(frozen=True)
class _Step:
    """How one kind is run once.

    Attributes:
        run: runs it once.
        prepare: does what must be there before the first of several runs; not part of the kind.
        less: as in `Timed`.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    less: str | None = None


@contextmanager
def torch_stage(
    gpu: Gpu,
    module: torch.nn.Module,
    inputs: object,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    first: bool = False,
    split_backward: bool = False,
    forward: Callable[..., Any] | None = None,
    block: Block | None = None,
) -> Iterator[Stage]:
    """The stage that `module` is; on leaving, gradients, random state, mode and buffers are again as they were.

    Args:
        gpu: what it is measured on; a CUDA module must be on that device.
        module: the stage.
        inputs: of one microbatch: a tensor, a tuple or list of arguments, or a dict of named arguments. The gradients
            of those that require one are part of the backward; where none does, all floating-point ones, except in
            the `first` stage, which sends no gradients back.
        loss: of the last stage: from the module's output to a scalar; part of the forward.
        first: whether it is the pipeline's first stage.
        split_backward: measure the gradients of inputs (I) and of weights (W) apart too, as
            `torch.distributed.pipelining` runs them: in the first stage I does nothing and W is the whole backward.
        forward: called with the inputs instead of `module`.
        block: as in `Stage`; on a simulated GPU it is called for 0 seconds, and the GPU then blocks in virtual time.

    Raises:
        UsageError: the module cannot be run forward or backward on these inputs, or torch cannot split the backward.
    """
    microbatch = Microbatch(module, forward or module, inputs, loss, first=first)
    with as_found(module):
        try:
            steps = _steps(microbatch, split_backward)
            yield _stage(gpu, steps, first_device((list(module.parameters()), inputs)), block)
        finally:
            microbatch.forget()


def callables_stage(
    gpu: Gpu,
    forward: Callable[[], object],
    backward: Callable[[], object],
    *,
    backward_needs_forward: bool = False,
    input_gradient: Callable[[], object] | None = None,
    weight_gradient: Callable[[], object] | None = None,
    device: torch.device | None = None,
    block: Block | None = None,
) -> Stage:
    """The stage of which `forward` and `backward` each run one microbatch; they put back what they change themselves.

    Args:
        gpu: what it is measured on.
        forward: runs one.
        backward: runs one; any number of times in a row, unless it needs its forward.
        backward_needs_forward: each backward needs a forward before it. They are then measured together, and the
            forward's time and energy are taken off.
        input_gradient: runs the gradient of the inputs alone, any number of times in a row.
        weight_gradient: runs the gradient of the weights alone, any number of times in a row.
        device: where they compute; torch's current CUDA device, if there is one, where None.
        block: as in `torch_stage`.

    Raises:
        UsageError: one of `input_gradient` and `weight_gradient` is given without the other.
    """
    import torch

    if (input_gradient is None) != (weight_gradient is None):
        raise UsageError("a split backward has two parts: give both input_gradient and weight_gradient, or neither")
    steps = {"F": _Step(forward), "B": _Step(backward, forward)}
    if backward_needs_forward:
        steps["B"] = _after(forward, backward)
    if input_gradient is not None and weight_gradient is not None:
        steps |= {"I": _Step(input_gradient, forward), "W": _Step(weight_gradient, input_gradient)}
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return _stage(gpu, steps, device, block)


def _steps(microbatch: Microbatch, split_backward: bool) -> dict[str, _Step]:
    """How a module's kinds are run."""
    kept = microbatch.can_keep_graph()
    whole = _after(microbatch.forward, microbatch.free_backward)
    backward = _Step(microbatch.backward, microbatch.keep) if kept else whole
    steps = {"F": _Step(microbatch.forward, microbatch.forget), "B": backward}
    if not split_backward:
        return steps
    if microbatch.first:
        return steps | {"I": _Step(lambda: None), "W": backward}
    if not kept:
        raise UsageError(
            "the backward of this module cannot be split: an autograd function in it frees what it saved after one "
            "backward; measure it without split_backward"
        )
    return steps | {
        "I": _Step(microbatch.input_gradient, microbatch.keep),
        "W": _Step(microbatch.weight_gradient, microbatch.keep_input_gradient),
    }


def _after(forward: Callable[[], object], backward: Callable[[], object]) -> _Step:
    """A backward that has a forward before it each time, which is taken off."""

    def both() -> None:
        forward()
        backward()

    return _Step(both, less="F")


def _stage(gpu: Gpu, steps: Mapping[str, _Step], device: torch.device, block: Block | None) -> Stage:
    if isinstance(gpu, SimulatedGpu):
        return _simulated(gpu, steps, block)
    if isinstance(gpu, EmulatedGpu):
        raise UsageError(f"{gpu.text} is in real time; profile {gpu.simulated_text!r}, which is the same GPU")
    if gpu.origin == "simulated":
        raise UsageError(f"{gpu.text} cannot run a torch module; open {gpu.text.removeprefix('dry-run:')!r} itself")
    timed = {kind: Timed(_repeated(step), step.less) for kind, step in steps.items()}
    return Stage(timed, _synchronizing(device), block)


def _repeated(step: _Step) -> Run:
    def run(times: int) -> None:
        step.prepare()
        for _ in range(times):
            step.run()

    return run


def _synchronizing(device: torch.device) -> Callable[[], None]:
    import torch

    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _simulated(gpu: SimulatedGpu, steps: Mapping[str, _Step], block: Block | None) -> Stage:
    def timed(step: _Step) -> Timed:
        step.prepare()
        work = counted(step.run)
        if not work.flops and not work.bytes:
            return Timed(lambda times: gpu.wait(times * _NOTHING_S), step.less)
        return Timed(lambda times: gpu.run(work, times), step.less)

    def blocked(duration_s: float) -> None:
        if block is not None:
            block(0.0)
        gpu.block(duration_s)

    return Stage({kind: timed(step) for kind, step in steps.items()}, lambda: None, blocked)
