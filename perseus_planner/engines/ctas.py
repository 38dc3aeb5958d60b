"""Modes in which the collectives of a group run on other numbers of CTAs, and so of SMs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import UsageError
from perseus_planner.profiles.modes import OWN, ModeFunction

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def new_nccl_group(ranks: Sequence[int], ctas: int) -> Any:
    """Return an NCCL communicator of its own that uses so many CTAs."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = ctas
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
    groups = {f"ctas-{each}": new_group(ranks, each) for each in ctas}
    # A group keeps one backend for each type, and any type may serve a device.
    types = dist.ProcessGroup.BackendType
    free = types.CUSTOM, types.UCC, types.MPI, types.XCCL
    devices = {device for each in groups.values() for device in each._device_types}
    modes = {}
    for (name, each), kind in zip({OWN: group, **groups}.items(), free, strict=False):
        backends = [(device, kind, each._get_backend(device)) for device in devices]
        serve, reorders = partial(_serve, group, backends), name != OWN
        modes[name] = ModeFunction(serve, reorders=reorders, is_of_group=True)
    return modes


def _serve(group: ProcessGroup, backends: list[tuple[Any, Any, Any]]) -> None:
    for device, kind, backend in backends:
        group._register_backend(device, kind, backend)
