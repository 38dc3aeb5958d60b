"""A small GPT for `planner doctor --acceptance`: a pipeline of two stages beside others that train
on other data, with an optimizer that is distributed over them, and gradients that are reduced while
the last backward goes on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from perseus_planner.acceptance.ranks import Rank
    from perseus_planner.gpu import Gpu
    from perseus_planner.runtime import Runtime

STAGES = 2
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment in which equal trainings give equal losses."""


@dataclass(frozen=True)
class Size:
    """The size of the GPT and of its data."""

    layers: int  #: Of a stage
    hidden: int
    heads: int
    sequence: int  #: Tokens of a sequence
    vocabulary: int = 256
    rows: int = 4  #: Sequences of a microbatch
    microbatches: int = 8


ON_GPU = Size(layers=4, hidden=1024, heads=16, sequence=512)
ON_CPU = Size(layers=1, hidden=32, heads=2, sequence=16, rows=2, microbatches=4)


def size_on(device: torch.device) -> Size:
    """Return the size of the training on a device."""
    return ON_GPU if device.type == "cuda" else ON_CPU


@dataclass(frozen=True)
class Layout:
    """How ranks share the pipelines."""

    ranks: int  #: Of one pipeline: 2, or 1 that has both stages
    pipelines: int  #: Side by side

    @classmethod
    def of(cls, size: int) -> Layout:
        """Return the layout for so many ranks."""
        return cls(1, size) if size % STAGES else cls(STAGES, size // STAGES)

    def __str__(self) -> str:
        virtual = "" if self.ranks == STAGES else f", with {STAGES} virtual stages on each rank"
        return f"{self.ranks} x {self.pipelines} (pipeline x data parallel){virtual}"


@dataclass(frozen=True)
class Trained:
    """What some iterations took."""

    time_s: float  #: Of one iteration
    energy_j: float | None  #: Of one iteration and this GPU; None if it was not read
    losses: tuple[float, ...]  #: Of all microbatches, in order; empty on other stages than the last


class Training:
    """This rank's part of the training, which is the same each time that it is made, on all ranks
    together, inside torch's process group.

    Attributes:
        engine: The schedule.
        size: The size of the model.
    """

    def __init__(self, rank: Rank) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import pipelining
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._rank, self.device = rank, rank.device
        self.size = size_on(self.device)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(1)
        layout = Layout.of(rank.size)
        self._pipeline = rank.rank % layout.pipelines
        numbers = range(STAGES) if layout.ranks == 1 else [rank.rank // layout.pipelines]
        across = [
            dist.new_group([*range(first, rank.size, layout.pipelines)])
            for first in range(layout.pipelines)
        ]
        beside = [
            dist.new_group([*range(first, first + layout.pipelines)])
            for first in range(0, rank.size, layout.pipelines)
        ]
        self._group = beside[rank.rank // layout.pipelines]
        self._replicas = layout.pipelines
        torch.manual_seed(numbers[0])
        modules = torch.nn.ModuleList(
            _stage(self.size, number).to(self.device) for number in numbers
        )
        received, sent, logits = _examples(self.size, self.device)
        stages = [
            pipelining.PipelineStage(
                module,
                number,
                STAGES,
                self.device,
                sent if number else received,
                logits if number == STAGES - 1 else sent,
                group=across[self._pipeline],
            )
            for module, number in zip(modules, numbers, strict=True)
        ]
        # The schedule would scale gradients that are being reduced.
        count, options = self.size.microbatches, {"loss_fn": _loss, "scale_grads": False}
        if len(stages) == 1:
            self.engine: Any = pipelining.Schedule1F1B(stages[0], count, **options)
        else:
            self.engine = pipelining.ScheduleInterleaved1F1B(stages, count, **options)
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        parameters = list(modules.parameters())
        self._optimizer: Any = (
            torch.optim.AdamW(parameters, lr=1e-4)
            if self._replicas == 1
            else ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, process_group=self._group, lr=1e-4
            )
        )
        self._awaited: dict[Any, int] = {}  #: parameter -> backwards until it is reduced
        self._works: list[Any] = []  #: that reduce
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._reduce)
        self._parameters = parameters
        self._steps = 0

    def iterate(self) -> list[Any]:
        """Run one iteration; return its losses on the last stage."""
        import torch

        size, losses = self.size, list[Any]()
        generator = torch.Generator().manual_seed(1000 * self._steps + self._pipeline)
        shape = (size.microbatches * size.rows, size.sequence + 1)
        tokens = torch.randint(size.vocabulary, shape, generator=generator).to(self.device)
        inputs = [tokens[:, :-1].contiguous()] if self._is_first else []
        last = {"target": tokens[:, 1:].contiguous(), "losses": losses} if self._is_last else {}
        # In the first iteration an emulated GPU repeats computations to count them.
        if self._steps:
            self._awaited = dict.fromkeys(self._parameters, size.microbatches)
        self.engine.step(*inputs, **last)
        self._awaited = {}
        if not self._steps:
            for parameter in self._parameters:
                self._begin_to_reduce(parameter)
        for work in self._works:
            work.wait()
        self._works = []
        for parameter in self._parameters:
            parameter.grad.div_(size.microbatches * self._replicas)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return losses

    def train(self, iterations: int, gpu: Gpu | None = None, *, warm_up: int = 1) -> Trained:
        """Run iterations; the first ones are not counted, but their losses are."""
        import torch
        import torch.distributed as dist

        losses = [loss for _ in range(warm_up) for loss in self.iterate()]
        self._synchronize()
        dist.barrier()
        begin_s, begin_j = time.perf_counter(), None if gpu is None else gpu.energy_j()
        for _ in range(iterations):
            losses += self.iterate()
        self._synchronize()
        time_s = (time.perf_counter() - begin_s) / iterations
        energy_j = None
        if gpu is not None and begin_j is not None:
            energy_j = (gpu.energy_j() - begin_j) / iterations
        values = torch.stack([loss.detach() for loss in losses]).tolist() if losses else []
        return Trained(time_s, energy_j, tuple(values))

    @contextmanager
    def running(self, plan: Path | None = None, **options: Any) -> Iterator[Runtime | None]:
        """Have computations take as long as on an emulated GPU, if there is one, inside the block;
        with a plan, by the runtime with these options.
        """
        from perseus_planner.runtime import planner_runtime
        from perseus_planner.runtime.emulation import emulate

        gpu = self._rank.gpu
        with ExitStack() as stack:
            if self._rank.is_emulated:
                stack.enter_context(emulate(self.engine, gpu.removeprefix("dry-run:")))
            runtime = planner_runtime(self.engine, plan=plan, gpu=gpu, **options)
            yield None if plan is None else stack.enter_context(runtime)

    def _reduce(self, parameter: Any) -> None:
        """Begin to reduce a gradient after the last backward of an iteration."""
        if parameter in self._awaited:  # otherwise the profiler repeats a backward
            self._awaited[parameter] -= 1
            if not self._awaited[parameter]:
                self._begin_to_reduce(parameter)

    def _begin_to_reduce(self, parameter: Any) -> None:
        import torch.distributed as dist

        if self._replicas > 1:
            work = dist.all_reduce(parameter.grad, group=self._group, async_op=True)
            self._works.append(work)

    def _synchronize(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _stage(size: Size, number: int) -> nn.Module:
    """Return a stage: the first has the embedding, the last the head."""
    from torch import nn

    def layer() -> Any:
        """Return a layer in which no token sees later ones."""
        module = nn.TransformerEncoderLayer(
            size.hidden, size.heads, 4 * size.hidden, 0.0, batch_first=True, norm_first=True
        )
        mask = nn.Transformer.generate_square_subsequent_mask(size.sequence)
        module.register_buffer("mask", mask)
        module.register_forward_pre_hook(
            lambda module, inputs, _: (inputs, {"src_mask": module.mask, "is_causal": True}),
            with_kwargs=True,
        )
        return module

    first = [nn.Embedding(size.vocabulary, size.hidden)] if number == 0 else []
    last = [nn.Linear(size.hidden, size.vocabulary)] if number == STAGES - 1 else []
    return nn.Sequential(*first, *(layer() for _ in range(size.layers)), *last)


def _examples(size: Size, device: torch.device) -> tuple[Any, Any, Any]:
    """Return what the first stage gets, what it sends, and what the last one makes."""
    import torch

    shape = (size.rows, size.sequence)
    return (
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.empty(*shape, size.hidden, device=device, requires_grad=True),
        torch.empty(*shape, size.vocabulary, device=device, requires_grad=True),
    )


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next token, in nats."""
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
