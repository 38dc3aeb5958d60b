"""What `planner doctor --acceptance` and `--rehearse` run, print and write."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perseus_planner.base import __version__
from perseus_planner.base.checks import FAILED, NOT_CHECKED, CheckResult, run_check
from perseus_planner.base.errors import UsageError
from perseus_planner.base.files import write_file
from perseus_planner.base.tables import Column, Sheet, lay_out
from perseus_planner.cli import console

if TYPE_CHECKING:
    from perseus_planner.extensions.lab.acceptance.steps import Acceptance

_MOST_RANKS = 8


def accept(gpu: str = "cuda", *, rehearses: bool, read_only: bool, folder: Path) -> None:
    """Accept this node, on all ranks together; rank 0 prints and writes the result, and all exit
    with 1 if a check fails.

    Args:
        gpu: Each rank's GPU, as in `gpu_text`.
        rehearses: Whether to check only what a profile needs, on any number of nodes.
        read_only: Whether to set nothing.
        folder: Where to write.

    Raises:
        UsageError: If the GPU cannot train, or the folder cannot be written.
        RankError: If another rank has ended.
    """
    from perseus_planner.profiler.build import require_torch

    require_torch()
    # Otherwise a look for devices would begin CUDA here.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    from perseus_planner.extensions.lab.acceptance.ranks import Rank
    from perseus_planner.extensions.lab.acceptance.steps import CHECKS, REHEARSED, Acceptance

    # A simulated GPU has a time of its own, which no training can wait for.
    if gpu.removeprefix("dry-run:").startswith("simulated:"):
        emulated = gpu.replace("simulated:", "emulated:")
        raise UsageError(f"GPU {gpu!r} has a time of its own; train on {emulated}")
    # A dry run of the GPU and a wish to set nothing mean the same, so either brings both.
    read_only = read_only or gpu.startswith("dry-run:")
    if read_only:
        gpu = f"dry-run:{gpu.removeprefix('dry-run:')}"
    # The folder is made before anything runs, as results that cannot be written are worth nothing.
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; give another folder with --into") from error
    rank = Rank(gpu, read_only, folder.resolve())
    is_one_node = os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
    if not (rehearses or (is_one_node and rank.size <= _MOST_RANKS)):
        raise UsageError(
            f"--acceptance is about one node of 1 to {_MOST_RANKS} GPUs; start it on each node by "
            "itself, with `torchrun --standalone`"
        )
    acceptance = Acceptance(rank)
    results = list[CheckResult]()
    checks = [check for check in CHECKS if not rehearses or check.name in REHEARSED]
    for number, check in enumerate(checks, 1):
        # Every rank runs every check, as the ranks meet in each of them.
        results.append(run_check(check, acceptance))
        if rank.rank == 0 and not console.is_json():
            click.echo(_line(number, results[-1]))
    report = _report(acceptance, results)
    # All ranks have the same results, so one of them writes.
    if rank.rank == 0:
        files = {
            folder / "acceptance.json": json.dumps(
                {**report, "checks": [*map(asdict, results)]}, indent=2, default=str
            ),
            folder / "acceptance.html": page(report),
        }
        for path, text in files.items():
            write_file(path, text.encode(), UsageError)
        console.report(report, _verdict(report), [*files])
    rank.meet_last()  # torchrun ends all others as soon as one ends with an error
    if not report["has_passed"]:
        click.get_current_context().exit(1)


def _report(acceptance: Acceptance, results: Sequence[CheckResult]) -> dict[str, Any]:
    nodes = acceptance.nodes
    return {
        "planner": __version__,
        "gpu": ", ".join(dict.fromkeys(node.name for node in nodes)) or "unknown GPU",
        "ranks": acceptance.rank.size,
        "layout": str(acceptance.layout),
        "origin": nodes[0].origin if nodes else "unknown",
        "read_only": acceptance.rank.read_only,
        "has_passed": not any(_has_failed(result) for result in results),
        "checks": results,
    }


def _has_failed(result: CheckResult) -> bool:
    return result.result in (FAILED, "not permitted", "not supported")


def _line(number: int, result: CheckResult) -> str:
    return f"{number}. {result.name}: {result.result}: {result.text}"


def _verdict(report: dict[str, Any]) -> str:
    gpus = f"{report['ranks']} x {report['gpu']} ({report['origin']})"
    failed = [result.name for result in report["checks"] if _has_failed(result)]
    if failed:
        return (
            f"\nThe planner does not work on {gpus} yet: {', '.join(failed)} failed. Do what the "
            "lines above say, or send us the folder that this has written."
        )
    left = [result.name for result in report["checks"] if result.result == NOT_CHECKED]
    not_checked = f"; not checked: {', '.join(left)}" if left else ""
    return f"\nThe planner works on {gpus}, as far as it was checked{not_checked}."


def page(report: dict[str, Any]) -> str:
    """Return the result as one HTML page."""
    from perseus_planner.views.report import page_of_sheets

    checks = lay_out(
        report["checks"],
        Column("check", "name", "<"),
        Column("result", "result", "<"),
        Column("what was found", "text", "<"),
    )
    sheets = [Sheet("Checks", f"{report['layout']}; {report['origin']}", checks)]
    values = {result.name: result.values for result in report["checks"]}
    if rows := values.get("plan", {}).get("rows"):
        # Rows are there only if the check came to them, as a check before may have failed.
        columns: tuple[Column, ...] = (
            Column("", "name", "<"),
            *(Column("predicted {}", "planned_s", "s"), Column("measured {}", "time_s", "s")),
            *(Column("predicted {}", "planned_j", "J"), Column("measured {}", "energy_j", "J")),
        )
        sheets.append(Sheet("An iteration", "All GPUs.", lay_out(rows, *columns)))
    # Likewise of the profile.
    if beside := values.get("profile", {}).get("beside"):
        columns = (
            Column("stage and kind", lambda item: item[0], "<"),
            Column("profile {}", lambda item: item[1][0], "s4"),
            Column("iteration {}", lambda item: item[1][1], "s4"),
        )
        source = "At the highest clock: by the profiler, and by the marks of an iteration."
        sheets.append(Sheet("Computations", source, lay_out(beside.items(), *columns)))
    first = (
        "Does the planner work here?",
        _verdict(report).strip(),
        f"Planner {report['planner']}.",
    )
    return page_of_sheets("Acceptance of a node", "Acceptance of a node", first, sheets)
