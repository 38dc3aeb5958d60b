"""What ranks run to train under a plan: all of it here, so that one process imports what it
needs for all of them.
"""

from __future__ import annotations

from runtime_entries import beside_another_job, refusals, without
from runtime_faults import (
    clocks_come_back,
    clocks_go_on,
    fewer_changes,
    no_clocks_any_more,
    no_permission_any_more,
    store_gone,
)
from runtime_runs import changes, deepspeed_engine, dry_run, pipelines, torch_schedules

__all__ = [
    "beside_another_job",
    "changes",
    "clocks_come_back",
    "clocks_go_on",
    "deepspeed_engine",
    "dry_run",
    "fewer_changes",
    "no_clocks_any_more",
    "no_permission_any_more",
    "pipelines",
    "refusals",
    "store_gone",
    "torch_schedules",
    "without",
]
