"""GPUs that are taken together, until the last of their ranks is gone."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from perseus_planner.errors import GpuError, GpuInUse
from perseus_planner.gpu.lease.lease import lease_gpus, recover

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.runtime.controller.rank import Rank


class Hold:
    """Takes the GPUs of ranks, which are open, after what dead jobs left is reset.

    A GPU that is only read is not taken, so that this needs no privilege.

    Raises:
        GpuError: one cannot be taken; none is.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._members = list(ranks)
        self._gpus = [gpu for rank in ranks if (gpu := rank.gpu) is not None]
        self._taken = ExitStack()
        to_set = [gpu for rank in ranks if (gpu := _set_gpu(rank)) is not None]
        if any(gpu.keeps_settings for gpu in to_set):
            recover()
        power_limit = any(rank.hello.control == "power-limit" for rank in ranks)
        self._taken.enter_context(lease_gpus(to_set, power_limit=power_limit))

    def leave(self, rank: Rank) -> str | None:
        """Reset the GPU of one rank, and give all back if it is the last; what went wrong."""
        self._members.remove(rank)
        return rank.reset() if self._members else self.release()

    def release(self) -> str | None:
        """Reset all GPUs and give them back; what went wrong."""
        try:
            self._taken.close()
        except GpuError as error:
            return str(error)
        finally:
            for gpu in self._gpus:
                gpu.close()
        return None


def shared(ranks: Iterable[Rank]) -> dict[Rank, GpuInUse]:
    """Those of `ranks` whose GPU is that of another one too, and what to tell them."""
    by_uuid: dict[str, list[Rank]] = {}
    for rank in ranks:
        gpu = _set_gpu(rank)
        if gpu is not None and gpu.keeps_settings:
            by_uuid.setdefault(gpu.uuid, []).append(rank)
    return {
        rank: GpuInUse(
            f"ranks {', '.join(str(each.hello.rank) for each in sharing)} have one GPU, {uuid}; name one of its own "
            "for each rank, by UUID where CUDA_VISIBLE_DEVICES differs between ranks"
        )
        for uuid, sharing in by_uuid.items()
        if len(sharing) > 1
        for rank in sharing
    }


def _set_gpu(rank: Rank) -> Gpu | None:
    """The GPU of a rank, if it is to be set."""
    return None if rank.hello.control == "observed" else rank.gpu
