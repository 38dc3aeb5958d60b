"""What modes of a plan can switch: activation recompute, for each microbatch, and on how many CTAs,
and so SMs, the collectives of a group run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.engines import engine_of
from perseus_planner.profiles.modes import OWN, ModeFunction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Recompute:
    """Switches the activation recompute of this rank's stages, as the training has set it up.

        recompute = Recompute(engine)
        modes = {"own": recompute.on, "keep": recompute.off}

    A forward recomputes or keeps its activations as the switch stands when it begins, and its
    backward goes by that. Losses are the same to the last bit. What it switches:

    - layers inside torch's `checkpoint_wrapper`, with any engine;
    - `activation_checkpoint_interval` of a DeepSpeed `PipelineModule`;
    - `recompute_granularity` "full" of Megatron-core.

    Args:
        engine: As for `planner_runtime`.

    Attributes:
        is_on: Whether activations are recomputed now.
        on: Has the next forwards recompute their activations.
        off: Has them keep their activations.

    Raises:
        UsageError: If nothing of this rank recomputes its activations.
    """

    def __init__(self, engine: Any) -> None:
        self._find(stage.module for stage in engine_of(engine, "Recompute").stages())

    @classmethod
    def of_modules(cls, modules: Iterable[Any]) -> Recompute:
        """Return the switch of the stages that are these torch modules."""
        switch = cls.__new__(cls)
        switch._find(modules)
        return switch

    def _find(self, stages: Iterable[Any]) -> None:
        """Find all that recomputes in these stages, and how each of it is switched."""
        self.is_on = True
        self.on = ModeFunction(partial(self._set, True), "microbatch")
        self.off = ModeFunction(partial(self._set, False), "microbatch", takes_memory=True)
        #: (owner, attribute, value that recomputes, value that does not).
        self._parts: list[tuple[Any, str, Any, Any]] = []
        configs: dict[int, Any] = {}
        for stage in stages:
            for module in stage.modules():
                if any(base.__name__ == "CheckpointWrapper" for base in type(module).__mro__):
                    self._parts.append((module, "checkpoint_fn", module.checkpoint_fn, _call))
                elif getattr(module, "activation_checkpoint_interval", 0) > 0:
                    # Not the interval: engines make inputs ready for it before a forward begins.
                    function = module.activation_checkpoint_func
                    self._parts.append((module, "activation_checkpoint_func", function, _call))
                config = getattr(module, "config", None)
                if getattr(config, "recompute_granularity", None) == "full":
                    # Modules share a config, which is switched once.
                    configs[id(config)] = config
        name = "recompute_granularity"
        self._parts += [(config, name, "full", None) for config in configs.values()]
        if not self._parts:
            raise UsageError(
                "nothing of this rank recomputes activations, so there is nothing to switch: wrap "
                "layers in torch's checkpoint_wrapper, or train with DeepSpeed's "
                "activation_checkpoint_interval or Megatron-core's recompute_granularity full"
            )

    def _set(self, is_on: bool) -> None:
        self.is_on = is_on
        for owner, attribute, recomputing, keeping in self._parts:
            setattr(owner, attribute, recomputing if is_on else keeping)


def recompute_modes(module: Any) -> dict[str, Callable[[], None]]:
    """Return the modes of a stage that recomputes activations: its own, and "keep"."""
    switch = Recompute.of_modules([module])
    return {OWN: switch.on, "keep": switch.off}


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def new_nccl_group(ranks: Sequence[int], ctas: int) -> Any:
    """Return an NCCL communicator of its own that uses so many CTAs."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = ctas
    options.config.max_ctas = ctas
    return dist.new_group(
        list(ranks), backend="nccl", pg_options=options, use_local_synchronization=True
    )


def ctas_modes(
    group: ProcessGroup, *ctas: int, new_group: Callable[[Sequence[int], int], Any] = new_nccl_group
) -> dict[str, ModeFunction]:
    """Return modes in which the collectives of a tensor group run on other numbers of CTAs: "own",
    and "ctas-8" for each number. Call it on all ranks of the group, in the same order.

    Each mode has a communicator of its own. The group itself gets it, so that an engine which holds
    the group calls it without a change. All ranks of the group must be of one stage and pipeline.

    Args:
        group: the group.
        ctas: the numbers, up to three.
        new_group: makes the group of a mode.

    Raises:
        UsageError: If there are more numbers.
    """
    import torch.distributed as dist

    if len(ctas) > 3:
        raise UsageError(f"ctas_modes: {ctas} are more than three numbers; give the best of them")
    ranks = dist.get_process_group_ranks(group)
    groups = {f"ctas-{count}": new_group(ranks, count) for count in ctas}
    # A group keeps one backend for each type, and any type may serve a device.
    types = dist.ProcessGroup.BackendType
    free = types.CUSTOM, types.UCC, types.MPI, types.XCCL
    # Any device that the groups serve, each by the backend of the mode.
    devices = {device for mode_group in groups.values() for device in mode_group._device_types}
    modes = {}
    for (name, mode_group), kind in zip({OWN: group, **groups}.items(), free, strict=False):
        backends = [(device, kind, mode_group._get_backend(device)) for device in devices]
        serve = partial(_serve, group, backends)
        reorders = name != OWN
        modes[name] = ModeFunction(serve, reorders=reorders, is_of_group=True)
    return modes


def _serve(group: ProcessGroup, backends: list[tuple[Any, Any, Any]]) -> None:
    for device, kind, backend in backends:
        group._register_backend(device, kind, backend)
