"""Make a `Stage` from a torch module with a sample input.

Forward (F) is the module with its loss, in training mode; its graph is freed each time. Backward
(B) is measured apart from it, on the kept graph of one forward. What a module recomputes in its
backward (activation recomputation) counts as part of B, as in training. Gradients accumulate as
from microbatch to microbatch.

On a simulated GPU each kind runs once, on the device of the module. Its FLOPs are counted by
torch's FlopCounterMode and its bytes by `counted`, and this `OpCost` is spent on the simulated GPU:
the profile then holds the modelled time and energy of the real shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.microbatch import Microbatch, count_op_cost
from perseus_planner.engines.torch_state import first_device, preserve_state, regathers_weights
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.profiler.stage import Block, Repeating, Run, Stage, TimedRun

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu

# Time of a kind that launches nothing, on a simulated GPU: about what Python needs to reach the
# next one, seconds.
_NOTHING_S = 10e-6


@dataclass(frozen=True)
class _Step:
    """How to run one kind once."""

    run: Callable[[], object]  #: Runs it once
    #: Runs before the first of several runs; not part of the kind.
    prepare: Callable[[], object] = lambda: None
    includes: str | None = None  #: As in `TimedRun`


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
    repeating: Repeating = nullcontext,
) -> Iterator[Stage]:
    """Yield the stage of `module`; on leaving, restore its gradients, mode and buffers, and the
    random state.

    Args:
        gpu: The GPU to measure on; a CUDA module must be on that device.
        module: The stage.
        inputs: The inputs of one microbatch: a tensor, a tuple or list of arguments, or a dict of
            named arguments. The backward includes the gradients of the inputs that require one. If
            none does, it includes those of all floating-point inputs, except in the `first` stage,
            which sends no gradients back.
        loss: In the last stage, maps the module's output to a scalar; part of the forward.
        first: Whether this is the first stage of the pipeline.
        split_backward: Whether to measure the gradients of inputs (I) and of weights (W) apart too,
            as `torch.distributed.pipelining` runs them: in the first stage I does nothing and W is
            the whole backward.
        forward: Called with the inputs instead of `module`.
        block: As in `Stage`. On a simulated GPU it is called with 0 seconds, and the GPU then
            blocks in virtual time.
        repeating: Watches each repetition.

    Raises:
        UsageError: If the module cannot run forward or backward on these inputs, or its backward
            cannot be split.
    """
    microbatch = Microbatch(module, forward or module, inputs, loss, first=first)
    with preserve_state(module):
        try:
            with repeating():
                steps = _steps(microbatch, split_backward)
            device = first_device((list(module.parameters()), inputs))
            yield _stage(gpu, steps, device, block, repeating)
        finally:
            microbatch.forget()


def _steps(microbatch: Microbatch, split_backward: bool) -> dict[str, _Step]:
    keeps_graph = microbatch.can_keep_graph() and not regathers_weights(microbatch.module)
    backward = (
        _Step(microbatch.backward, microbatch.keep)
        if keeps_graph
        else _forward_and_backward(microbatch)
    )
    steps = {"F": _Step(microbatch.forward, microbatch.forget), "B": backward}
    if not split_backward:
        return steps
    if microbatch.first:
        return steps | {"I": _Step(lambda: None), "W": backward}
    if not keeps_graph:
        raise UsageError(
            "the backward of this module cannot be split: an autograd function in it frees what "
            "it saved after one backward, or its weights are gathered again for each backward; "
            "measure it without split_backward"
        )
    return steps | {
        "I": _Step(microbatch.input_gradient, microbatch.keep),
        "W": _Step(microbatch.weight_gradient, microbatch.keep_input_gradient),
    }


def _forward_and_backward(microbatch: Microbatch) -> _Step:
    """Return a backward that runs a forward each time, to be subtracted."""

    def both() -> None:
        microbatch.forward()
        microbatch.free_backward()

    return _Step(both, includes="F")


def _stage(
    gpu: Gpu,
    steps: Mapping[str, _Step],
    device: torch.device,
    block: Block | None,
    repeating: Repeating,
) -> Stage:
    if isinstance(gpu, EmulatedGpu):
        raise UsageError(
            f"{gpu.text} runs in real time; profile {gpu.simulated_text!r}, which is the same GPU"
        )
    if isinstance(gpu, SimulatedGpu):
        return _simulated_stage(gpu, steps, block, repeating)
    if gpu.origin == "simulated":
        raise UsageError(
            f"{gpu.text} cannot run a torch module; open {gpu.text.removeprefix('dry-run:')!r} "
            "itself"
        )
    synchronize = synchronizer(device)

    def watched() -> None:
        with repeating():
            synchronize()

    runs = {kind: TimedRun(_repeat(step, repeating), step.includes) for kind, step in steps.items()}
    return Stage(runs, watched, block)


def _repeat(step: _Step, repeating: Repeating) -> Run:
    def run(times: int) -> None:
        with repeating():
            step.prepare()
        for _ in range(times):
            with repeating():
                step.run()

    return run


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return a function that returns when `device` has finished everything that was launched."""
    import torch

    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _simulated_stage(
    gpu: SimulatedGpu, steps: Mapping[str, _Step], block: Block | None, repeating: Repeating
) -> Stage:
    def timed_run(step: _Step) -> TimedRun:
        with repeating():
            step.prepare()
            cost = count_op_cost(step.run)
        if not cost.flops and not cost.bytes:
            return TimedRun(lambda times: gpu.wait(times * _NOTHING_S), step.includes)
        return TimedRun(lambda times: gpu.run(cost, times), step.includes)

    def blocked(duration_s: float) -> None:
        if block is not None:
            block(0.0)
        gpu.block(duration_s)

    return Stage({kind: timed_run(step) for kind, step in steps.items()}, lambda: None, blocked)
