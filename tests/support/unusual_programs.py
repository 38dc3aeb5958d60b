"""Programs of ranks that profile, plan and train pipelines with unusual stages: frozen, empty, an
embedding or a loss alone, adapters, further tokens; each prints its findings as JSON.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from profile_programs import MICROBATCHES, Megatron, planned
from runtime_training import job
from tiny_training import WIDTH, DeepSpeed, Layer, Torch
from torch import nn
from torch.utils.checkpoint import checkpoint

RANK = 2  #: of an adapter


class Frozen(Layer):
    """A layer that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)


class Ungraded(Layer):
    """A layer that runs without gradients, as a vision tower does."""

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            return super().forward(x)


class Asked(nn.Module):
    """A layer whose result is made to require gradients, which DeepSpeed wants of each stage."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layer = make()

    def forward(self, x: Any) -> Any:
        return self.layer(x).requires_grad_()


class Adapted(Frozen):
    """A layer that does not train, with an adapter of low rank that does."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, RANK, bias=False)
        self.up = nn.Linear(RANK, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return super().forward(x) + self.up(self.down(x))


class Recomputed(Layer):
    """A layer that computes its activations again in its backward."""

    def forward(self, x: Any) -> Any:
        return checkpoint(super().forward, x, use_reentrant=False)


class FrozenRecomputed(Recomputed, Frozen):
    """One that does not train."""


class Freeing(torch.autograd.Function):
    """Doubles, and frees what it saved in its first backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.factor = torch.full((1,), 2.0)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        factor, ctx.factor = ctx.factor, None
        return gradient * factor


class Once(nn.Module):
    """A stage without weights whose backward runs once."""

    def forward(self, x: Any) -> Any:
        return Freeing.apply(x)


class Embedded(nn.Module):
    """An embedding alone; its input is the sign of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.table((x > 0).long()).mean(dim=-2)


class FrozenEmbedded(Embedded):
    """One that does not train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(requires_grad=False)


Make = Callable[[], nn.Module]

TORCH: dict[str, tuple[str, Mapping[int, Make]]] = {
    "frozen first": ("1f1b", {0: Frozen}),
    "vision tower": ("1f1b", {0: Ungraded}),
    "frozen last": ("1f1b", {1: Frozen}),
    "embedding alone": ("1f1b", {0: Embedded}),
    "frozen embedding": ("gpipe", {0: FrozenEmbedded}),
    "adapters": ("1f1b", {0: Adapted, 1: Adapted}),
    "loss alone": ("1f1b", {1: nn.Identity}),
    "recomputed": ("1f1b", {0: FrozenRecomputed, 1: Recomputed}),
    "backward once": ("1f1b", {1: Once}),
    "frozen but for the last": (
        "interleaved-1f1b",
        {0: Frozen, 1: Frozen, 2: Frozen},
    ),
    "empty middle": ("interleaved-1f1b", {1: nn.Identity}),
    "frozen first, split": ("interleaved-zb", {0: Frozen}),
    "frozen middle, split": ("zbv", {1: Frozen, 2: Adapted}),
    "frozen halves": ("looped-bfs", {0: FrozenEmbedded, 1: Frozen}),
}
"""Name -> the schedule, and the number of each unusual stage of its two ranks."""

DEEPSPEED: dict[str, tuple[tuple[Make, ...], dict[str, Any]]] = {
    "frozen first": ((partial(Asked, Frozen), Layer), {}),
    "vision tower": ((partial(Asked, Ungraded), Layer), {}),
    "frozen last": ((Layer, Frozen), {}),
    "adapters": ((Adapted, Adapted), {}),
    "embedding alone": ((Embedded, Layer), {}),
    "frozen embedding": ((partial(Asked, FrozenEmbedded), Adapted), {}),
    "loss alone": ((Layer, nn.Identity), {}),
    "recomputed": ((Recomputed, Frozen, FrozenRecomputed, Recomputed), {}),
    "half frozen": ((Frozen, Layer, Frozen, Layer), {}),
}
"""Name -> the layers of two stages, and options of the model."""


def _freeze(frozen: Callable[[int, str], bool], number: int, chunk: nn.Module) -> None:
    for name, parameter in chunk.named_parameters():
        if frozen(number, name):
            parameter.requires_grad_(requires_grad=False)


def _adapt(number: int, chunk: nn.Module) -> None:
    """Freeze a chunk, and add adapters of low rank to its attention."""
    chunk.requires_grad_(requires_grad=False)
    for name, part in list(chunk.named_modules()):
        if name.endswith("linear_proj"):
            part.register_forward_hook(_Adapter(part))


class _Adapter:
    """A hook that adds what an adapter computes to the result of a layer."""

    def __init__(self, layer: Any) -> None:
        outputs, inputs = layer.weight.shape
        layer.down = nn.Parameter(torch.randn(RANK, inputs) / inputs)
        layer.up = nn.Parameter(torch.zeros(outputs, RANK))

    def __call__(self, layer: Any, args: Any, result: Any) -> Any:
        output, bias = result
        return output + args[0] @ layer.down.T @ layer.up.T, bias


def _layout(text: str, layers: int, **options: Any) -> dict[str, Any]:
    return {"pipeline_model_parallel_layout": text, "num_layers": layers, **options}


MEGATRON: dict[str, tuple[int | None, dict[str, Any]]] = {
    "frozen first": (None, {"adapt": partial(_freeze, lambda number, _: number == 0)}),
    "frozen embedding": (None, {"adapt": partial(_freeze, lambda _, name: "embedding" in name)}),
    "frozen last": (None, {"adapt": partial(_freeze, lambda number, _: number == 1)}),
    "adapters": (None, {"adapt": _adapt}),
    "loss alone": (None, _layout("Ett|L", 2)),
    "embedding alone": (None, _layout("E|ttL", 2)),
    "empty": (2, _layout("E|tt||L", 2)),
    "empty rank": (2, _layout("Et||tL|", 2)),
    "frozen, interleaved": (2, {"adapt": partial(_freeze, lambda number, _: number <= 1)}),
    "further tokens": (None, _layout("Et|tmL", 2, mtp_num_layers=1)),
}
"""Name -> the number of chunks of each of two ranks, and options of the training."""


def torch_stages(state: str, *names: str) -> None:
    """Profile, plan and train pipelines of torch."""
    with job(state) as result:
        for name in names:
            schedule, others = TORCH[name]
            made = partial(Torch, schedule, MICROBATCHES, others=others, has_shapes=True)
            result[name] = planned(
                made, _file(name), emulated=schedule not in ("interleaved-zb", "zbv")
            )


def deepspeed_stages(state: str, *names: str) -> None:
    """Profile, plan and train pipelines of DeepSpeed."""

    def make(layers: tuple[Make, ...], options: dict[str, Any]) -> DeepSpeed:
        each = iter(layers)
        return DeepSpeed(
            MICROBATCHES,
            layer=lambda: next(each)(),
            # DeepSpeed clips gradients by default, and fails on a rank that has none.
            settings={"gradient_clipping": 0.0},
            layers=len(layers),
            num_stages=2,
            **options,
        )

    with job(state) as result:
        for name in names:
            result[name] = planned(partial(make, *DEEPSPEED[name]), _file(name), emulated=True)


def megatron_stages(state: str, *names: str) -> None:
    """Profile, plan and train pipelines of Megatron-core."""
    from tiny_gpt import parallel

    with job(state) as result:
        for name in names:
            virtual, options = MEGATRON[name]
            with parallel(virtual):
                made = partial(Megatron, virtual, None, **options)
                result[name] = planned(made, _file(name), emulated=True)


def _file(name: str) -> str:
    return name.replace(" ", "-").replace(",", "")
