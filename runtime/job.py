"""The job that this process is a rank of, as far as the runtime needs it: its store, and who is on which node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from perseus_planner.processes import this_process

if TYPE_CHECKING:
    from torch.distributed import Store

_runtimes = count()


@dataclass(frozen=True)
class Job:
    """What all ranks share.

    Attributes:
        store: of the job's own torch.distributed, under a prefix that no other runtime has; no other service is used.
        rank: of this process, from 0.
        ranks: how many there are.
    """

    store: Store
    rank: int
    ranks: int


def this_job() -> Job:
    """The job of this process, which all ranks ask for equally often; of this rank alone if it is not distributed."""
    import torch.distributed as dist

    number = next(_runtimes)
    if not dist.is_initialized():
        return Job(dist.HashStore(), 0, 1)
    from torch.distributed.distributed_c10d import _get_default_store  # torch has no public way to it

    # What ranks said before an elastic restart is not for those that came after it.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"perseus-planner/runtime/{restart}/{number}", _get_default_store())
    return Job(store, dist.get_rank(), dist.get_world_size())


def node() -> str:
    """What is equal for two processes that can share a clock controller, and for no others."""
    process = this_process()
    return f"{process.boot_id}/{process.pid_namespace}/{os.readlink('/proc/self/ns/net')}/{os.geteuid()}"


def launcher() -> int | None:
    """The process that started this rank, whose death ends the job; None where no launcher says that it did."""
    return os.getppid() if "LOCAL_RANK" in os.environ or "RANK" in os.environ else None
