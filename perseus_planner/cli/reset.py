"""`planner reset`: GPUs that somebody left set, set back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from perseus_planner.cli import console
from perseus_planner.errors import GpuError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from perseus_planner.gpu.lease.lease import Recovery


@dataclass(frozen=True)
class ResetGpu:
    """A GPU that was reset, or not.

    Attributes:
        gpu: what `open_gpu` opens.
        name: its name; None where it could not be opened.
        left_by: the dead process that left it set; None where nothing says so.
        problem: why it is not reset, and what to do; None: it is.
    """

    gpu: str
    name: str | None
    left_by: str | None
    problem: str | None


@dataclass(frozen=True)
class ResetGpus:
    """What `planner reset` did.

    Attributes:
        gpus: each GPU that it meant.
        remarks: what is wrong with files among the records that are none.
    """

    gpus: tuple[ResetGpu, ...]
    remarks: tuple[str, ...] = ()


@click.command(
    epilog=console.examples("planner reset", "planner reset nvml:0 nvml:1", "planner reset --all --power-limit")
)
@click.argument("gpus", nargs=-1, metavar="[GPU]...")
@click.option("--all", "every", is_flag=True, help="Reset every GPU that NVML shows on this node.")
@click.option("--power-limit", is_flag=True, help="Set the power limit of these GPUs back to its default, too.")
@click.option("--force", is_flag=True, help="Reset also a GPU that a living process sets.")
@console.as_json
def reset(gpus: tuple[str, ...], every: bool, power_limit: bool, force: bool, as_json: bool) -> None:
    """Reset locked clocks.

    Without GPU, resets what processes that died have left set. With GPUs, such as nvml:0, or with --all, resets
    these, unless a living process sets them.
    """
    if gpus and every:
        raise UsageError("--all: means every GPU; name none beside it")
    if not gpus and not every and (power_limit or force):
        raise UsageError(f"{'--force' if force else '--power-limit'}: name the GPUs to reset, or give --all")
    if every or gpus:
        done = ResetGpus(tuple(_reset_one(text, power_limit, force) for text in (_every_text() if every else gpus)))
        nothing = "Nothing to reset: NVML shows no GPU on this node."
    else:
        done = _reset_left_behind()
        nothing = "Nothing to reset: no process that died has left a GPU set."
    problems = [each.problem for each in done.gpus if each.problem is not None]
    if as_json or len(problems) < len(done.gpus) or not problems:
        console.report(done, _text(done, nothing), [], as_json=as_json)
    if problems:
        raise GpuError("; ".join(problems))


def _every_text() -> Sequence[str]:
    from perseus_planner.gpu.nvml.discovery import visible_gpus

    return [gpu.text for gpu in visible_gpus()]


def _reset_left_behind() -> ResetGpus:
    from perseus_planner.gpu.lease.lease import recover
    from perseus_planner.gpu.lease.records import read_records

    return ResetGpus(tuple(_recovered(recovery) for recovery in recover()), tuple(read_records()[1]))


def _recovered(recovery: Recovery) -> ResetGpu:
    record = recovery.record
    return ResetGpu(record.gpu, record.name, str(record.owner), recovery.problem)


def _reset_one(text: str, power_limit: bool, force: bool) -> ResetGpu:
    from perseus_planner.gpu import open_gpu
    from perseus_planner.gpu.lease.lease import reset_gpu

    name = None
    try:
        with open_gpu(text) as gpu:
            name = gpu.name
            left = reset_gpu(gpu, power_limit=power_limit, force=force)
    except GpuError as error:
        return ResetGpu(text, name, None, str(error))
    return ResetGpu(gpu.text, name, str(left[0].owner) if left else None, None)


def _text(done: ResetGpus, nothing: str) -> str:
    lines = [
        f"Reset {each.gpu} ({each.name})" + (f", left set by {each.left_by}" if each.left_by else "")
        for each in done.gpus
        if each.problem is None
    ]
    return "\n".join([*(lines if done.gpus else [nothing]), *done.remarks])
