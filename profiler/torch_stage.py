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
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from perseus_planner.base.errors import UsageError
from perseus_planner.engines.microbatch import Microbatch, count_op_cost
from perseus_planner.engines.overlapped import OverlappedMicrobatch
from perseus_planner.engines.torch_state import (
    first_device,
    preserve_state,
    regathers_weights,
    tensors,
)
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.simulated.gpu import SimulatedGpu
from perseus_planner.profiler.stage import Block, Repeating, Run, Stage, TimedRun
from perseus_planner.profiles.keys import name_of
from perseus_planner.profiles.modes import (
    OWN,
    ModeFunctions,
    is_mode_name,
    reordering,
    shared_by,
)

if TYPE_CHECKING:
    import torch

    from perseus_planner.gpu import Gpu

Repeated: TypeAlias = Microbatch | OverlappedMicrobatch
"""A microbatch that is repeated."""

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
    modes: ModeFunctions | None = None,
    microbatch: OverlappedMicrobatch | None = None,
    pairs: Mapping[str, OverlappedMicrobatch] | None = None,
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
            as `torch.distributed.pipelining` runs them: in the first stage I has no work and W is
            the whole backward.
        forward: Called with the inputs instead of `module`.
        block: As in `Stage`. On a simulated GPU it is called with 0 seconds, and the GPU then
            blocks in virtual time.
        repeating: Watches each repetition.
        modes: As `planner_runtime` takes them; each kind is measured in every one. None for one way
            of running.
        microbatch: Runs the microbatch, where forwards and backwards overlap.
        pairs: Kind of each pair whose backward is of this stage -> the microbatch of its forward.

    Raises:
        UsageError: If the module cannot run forward or backward on these inputs, its backward
            cannot be split, or the modes have no own way.
    """
    repeated = microbatch or Microbatch(module, forward or module, inputs, loss, first=first)
    ways = {OWN: _nothing} if modes is None else modes
    if OWN not in ways or not all(map(is_mode_name, ways)):
        raise UsageError(
            f"modes: {', '.join(map(str, ways))} are not modes: give names of lower-case letters, "
            f"digits, - and _, with {OWN} for how training runs without a plan"
        )
    with preserve_state(module):
        entered = _Entered(ways, repeated)
        try:
            device = first_device((list(module.parameters()), inputs))
            steps: dict[str, _Step | None] = {}
            memory: dict[str, tuple[float, float]] = {}
            # The training's own way first, as the module is in it already.
            for mode in sorted(ways, key=lambda mode: mode != OWN):
                entered.enter(mode)
                with repeating():
                    steps |= {
                        name_of(kind, mode): entered.step(mode, step)
                        for kind, step in _all_steps(repeated, split_backward, pairs).items()
                    }
                    if device.type == "cuda" and modes is not None:
                        # Only CUDA's allocator counts, and only modes need the bytes.
                        memory[mode] = _memory(repeated, inputs)
            stage = _stage(gpu, steps, device, block, repeating)
            yield replace(
                stage, memory=memory, shared_by=shared_by(ways), reordering=reordering(ways)
            )
        finally:
            # Also after an error the module is as the training left it.
            entered.enter(OWN)
            repeated.forget()


class _Entered:
    """Enters a mode before its steps, without a graph of another one."""

    def __init__(self, modes: ModeFunctions, microbatch: Repeated) -> None:
        self._modes = modes
        self._microbatch = microbatch
        self._now = OWN

    def enter(self, mode: str) -> None:
        if mode != self._now:
            self._microbatch.forget()
            self._modes[mode]()
            self._now = mode

    def step(self, mode: str, step: _Step | None) -> _Step | None:
        """Return a step that enters its mode first; None if there is none."""
        if step is None:
            return None

        def prepare() -> None:
            self.enter(mode)
            step.prepare()

        includes = None if step.includes is None else name_of(step.includes, mode)
        return _Step(step.run, prepare, includes)


def _memory(microbatch: Repeated, inputs: object) -> tuple[float, float]:
    """Return the bytes that a microbatch keeps from its forward to its backward, with its inputs,
    and what the backward takes besides, at most.
    """
    import torch

    microbatch.forget()
    before = torch.cuda.memory_allocated()
    microbatch.forward()
    after = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    microbatch.free_backward()
    more = torch.cuda.max_memory_allocated() - after
    # Inputs were there before; they too are kept until the backward.
    kept = after - before + sum(tensor.nbytes for tensor in tensors(inputs))
    return float(max(kept, 0)), float(max(more, 0))


def _all_steps(
    microbatch: Repeated,
    split_backward: bool,
    pairs: Mapping[str, OverlappedMicrobatch] | None,
) -> dict[str, _Step | None]:
    """Return how to run each kind, pairs too; None for a kind without work."""
    if isinstance(microbatch, Microbatch):
        return _steps(microbatch, split_backward)
    # An overlapped step frees its graph, so each backward has a forward of its own.
    microbatch.can_keep_graph()  # fails here if it cannot run
    return {
        "F": _Step(microbatch.forward, microbatch.forget),
        "B": _forward_and_backward(microbatch),
        **{kind: _pair(microbatch, other) for kind, other in (pairs or {}).items()},
    }


def _pair(microbatch: OverlappedMicrobatch, other: OverlappedMicrobatch) -> _Step:
    """Return how to run a pair: the forward of one is that of the next pair's backward, or, of
    another chunk, one is run each time, to be subtracted.
    """
    if other is microbatch:
        return _Step(partial(microbatch.pair, other), microbatch.forward)

    def both() -> None:
        microbatch.forward()
        microbatch.pair(other)
        other.forget()

    return _Step(both, includes="F")


def _steps(microbatch: Microbatch, split_backward: bool) -> dict[str, _Step | None]:
    """Return how to run each kind; None for a kind without work."""
    can_repeat = microbatch.can_keep_graph()
    # Where weights are gathered again for each backward, a forward comes before each.
    keeps_graph = can_repeat and not regathers_weights(microbatch.module)
    backward: _Step | None
    if can_repeat and not microbatch.has_backward():
        # Nothing has a gradient: the backward takes no work.
        backward = None
    elif keeps_graph:
        backward = _Step(microbatch.backward, microbatch.keep)
    else:
        backward = _forward_and_backward(microbatch)
    steps: dict[str, _Step | None] = {
        "F": _Step(microbatch.forward, microbatch.forget),
        "B": backward,
    }
    if not split_backward:
        return steps
    # The first stage sends no gradient back, so all of its backward is W.
    if microbatch.first or backward is None:
        return steps | {"I": None, "W": backward}
    if not keeps_graph:
        raise UsageError(
            "the backward of this module cannot be split: an autograd function in it frees what "
            "it saved after one backward, or its weights are gathered again for each backward; "
            "measure it without split_backward"
        )
    weight_gradient = None
    if any(weight.requires_grad for weight in microbatch.module.parameters()):
        weight_gradient = _Step(microbatch.weight_gradient, microbatch.keep_input_gradient)
    return steps | {
        "I": _Step(microbatch.input_gradient, microbatch.keep),
        "W": weight_gradient,
    }


def _forward_and_backward(microbatch: Repeated) -> _Step:
    """Return a backward that runs a forward each time, to be subtracted."""

    def both() -> None:
        microbatch.forward()
        microbatch.free_backward()

    return _Step(both, includes="F")


def _stage(
    gpu: Gpu,
    steps_of_kinds: Mapping[str, _Step | None],
    device: torch.device,
    block: Block | None,
    repeating: Repeating,
) -> Stage:
    """Return the stage of these steps on a real or a simulated GPU; those that are None are kinds
    without work.
    """
    if isinstance(gpu, EmulatedGpu):
        raise UsageError(
            f"{gpu.text} runs in real time; profile {gpu.simulated_text!r}, which is the same GPU"
        )
    steps = {kind: step for kind, step in steps_of_kinds.items() if step is not None}
    without_work = tuple(kind for kind, step in steps_of_kinds.items() if step is None)
    if isinstance(gpu, SimulatedGpu):
        # In virtual time: nothing is launched but once.
        stage = _simulated_stage(gpu, steps, block, repeating)
        return replace(stage, without_work=without_work)
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
    return Stage(runs, watched, block, without_work)


def _repeat(step: _Step, repeating: Repeating) -> Run:
    def run(times: int) -> None:
        with repeating():
            step.prepare()
        for _ in range(times):
            with repeating():
                step.run()

    return run


def _nothing() -> None:
    pass


def synchronizer(device: torch.device) -> Callable[[], None]:
    """Return a function that returns when `device` has finished everything that was launched."""
    import torch

    if device.type != "cuda":
        return lambda: None
    return lambda: torch.cuda.synchronize(device)


def _simulated_stage(
    gpu: SimulatedGpu, steps: Mapping[str, _Step], block: Block | None, repeating: Repeating
) -> Stage:
    """Return a stage that runs each step once, to count what it costs, and spends that on the
    simulated GPU each time.
    """

    def timed_run(step: _Step) -> TimedRun:
        with repeating():
            step.prepare()
            cost = count_op_cost(step.run)
        # What moves and computes nothing still takes Python's time.
        if not cost.flops and not cost.bytes:
            return TimedRun(lambda times: gpu.wait(times * _NOTHING_S), step.includes)
        return TimedRun(lambda times: gpu.run(cost, times), step.includes)

    def blocked(duration_s: float) -> None:
        if block is not None:
            block(0.0)
        gpu.block(duration_s)

    return Stage({kind: timed_run(step) for kind, step in steps.items()}, lambda: None, blocked)
