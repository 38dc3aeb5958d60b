"""`planner reset`: reset GPUs that other processes left set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import click

from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.cli import console


@dataclass(frozen=True)
class GpuReset:
    """The result for one GPU."""

    gpu: str  #: Text that opens the GPU
    name: str | None  #: Name of the GPU; None if it cannot be opened
    left_by: str | None  #: Dead process that left the GPU set; None if there is no record of one
    problem: str | None  #: Why the GPU is not reset, and what to do; None if it is reset


@click.command(
    epilog=console.examples(
        "planner reset", "planner reset nvml:0 nvml:1", "planner reset --all --power-limit"
    )
)
@click.argument("gpus", nargs=-1, metavar="[GPU]...")
@click.option(
    "--all", "every", is_flag=True, help="Reset all GPUs that NVML and AMD SMI show on this node."
)
@click.option(
    "--power-limit",
    is_flag=True,
    help="Also set the power limit of these GPUs back to its default.",
)
@click.option("--force", is_flag=True, help="Also reset GPUs that a living process has leased.")
@console.as_json
def reset(
    gpus: tuple[str, ...], every: bool, power_limit: bool, force: bool, as_json: bool
) -> None:
    """Reset locked clocks.

    Without GPU, this resets what dead processes left set. With GPUs, such as nvml:0, or with --all,
    it resets these, unless a living process has leased them.
    """
    if gpus and every:
        raise UsageError("--all: resets every GPU; do not name GPUs as well")
    if not gpus and not every and (power_limit or force):
        raise UsageError(
            f"{'--force' if force else '--power-limit'}: name the GPUs to reset, or give --all"
        )
    if every:
        from perseus_planner.gpu import all_gpus

        gpus = tuple(gpu.text for gpu in all_gpus())
    if every or gpus:
        results, invalid = [_reset_one(text, power_limit, force) for text in gpus], list[str]()
        nothing = "Nothing to reset: NVML shows no GPU on this node."
    else:
        results, invalid = _reset_stale()
        nothing = "Nothing to reset: no dead process has left a GPU set."
    problems = [result.problem for result in results if result.problem is not None]
    if as_json or len(problems) < len(results) or not problems:
        text = "\n".join([*(_texts(results) if results else [nothing]), *invalid])
        console.report({"gpus": results, "invalid_records": invalid}, text, [], as_json=as_json)
    if problems:
        raise GpuError("; ".join(problems))


def _reset_stale() -> tuple[list[GpuReset], list[str]]:
    """Reset what dead processes left set; return what is wrong with invalid files among the
    lease records, too.
    """
    from perseus_planner.gpu.lease.lease import recover
    from perseus_planner.gpu.lease.records import read_records

    results = [
        GpuReset(found.record.gpu, found.record.name, str(found.record.owner), found.problem)
        for found in recover()
    ]
    return results, read_records()[1]


def _reset_one(text: str, power_limit: bool, force: bool) -> GpuReset:
    from perseus_planner.gpu import open_gpu
    from perseus_planner.gpu.lease.lease import reset_gpu

    name = None
    try:
        with open_gpu(text) as gpu:
            name = gpu.name
            removed = reset_gpu(gpu, power_limit=power_limit, force=force)
    except GpuError as error:
        return GpuReset(text, name, None, str(error))
    return GpuReset(gpu.text, name, str(removed[0].owner) if removed else None, None)


def _texts(results: Sequence[GpuReset]) -> list[str]:
    return [
        f"Reset {result.gpu} ({result.name})"
        + (f", left set by {result.left_by}" if result.left_by else "")
        for result in results
        if result.problem is None
    ]
