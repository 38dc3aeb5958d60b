"""Commands about this machine. `planner doctor` says what can be read and set on the GPUs of this
node, and what to do about what is missing; with --rehearse, what a profile needs is tried on all
ranks. `planner reset` resets GPUs that other processes left set.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import click

from perseus_planner.base import extensions
from perseus_planner.base.checks import PASSED, CheckResult, failure, run_check
from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.base.prefixes import counted, si
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    Option,
    check_folder,
    command,
    complete,
    gpu_names,
)

if TYPE_CHECKING:
    from perseus_planner.gpu.inspection import EnergyWatch, Inspection, Latency, ParallelLatency
    from perseus_planner.gpu.protocol import Gpu


@dataclass(frozen=True)
class GpuDiagnosis:
    """One GPU: its inspection, and how long changing its clock takes; None if that was not
    measured.
    """

    inspection: Inspection
    latency: Latency | None


@dataclass(frozen=True)
class Verdict:
    """On how many GPUs what works; planning always does."""

    gpus: int  #: Number of GPUs, with those that cannot be read
    observe: int  #: On how many energy can be measured, as `--observe` and the dashboard need
    set_clocks: int | None  #: On how many clocks can be set; None if that was not tried
    profile: int  #: On how many both; the former alone if setting was not tried
    mig: int = 0  #: On how many MIG is on


@dataclass(frozen=True)
class AcceptanceOptions:
    """How to accept a node."""

    acceptance: Annotated[
        bool,
        "Try every part of the planner on this node, under torchrun with one rank for each "
        "GPU: locks, latency, neighbours, and a small GPT that is profiled and trained with a "
        "plan. Writes acceptance.json and acceptance.html.",
    ]
    rehearse: Annotated[
        bool,
        "Try what a profile needs, likewise, on any number of nodes, in about a minute: clocks "
        "under load, energy counters, and messages between neighbours.",
    ]
    read_only: Annotated[bool, "Accept or rehearse without setting anything."]
    into: Annotated[
        Path | None,
        "Folder for what these two write.  [default: acceptance]",
        Option(metavar="FOLDER"),
    ] = None


@command(
    "planner doctor",
    "planner doctor nvml:0",
    "planner doctor --measure-latency",
    "torchrun --nproc-per-node 8 -m perseus_planner doctor --rehearse",
    "torchrun --nproc-per-node 8 -m perseus_planner doctor --acceptance",
)
def doctor(
    gpus: Annotated[tuple[str, ...], Option(metavar="[GPU]..."), complete(gpu_names)],
    *,
    measure_latency: Annotated[
        bool,
        "Set clocks for some seconds, to see whether this is permitted and how long a call "
        "takes; then reset them.",
    ],
    acceptance: AcceptanceOptions,
) -> None:
    """Show what can be read and set on all GPUs that NVML shows, or on the GPUs that you name.

    `cuda` names all GPUs that CUDA shows to this process.

    The command changes nothing without --measure-latency, --rehearse or --acceptance, which reset
    what they set. The output ends with what works here. The exit status is 1 if GPUs can neither be
    measured nor set, or if a rehearsal or an acceptance fails.
    """
    from perseus_planner.gpu import expanded, open_gpu
    from perseus_planner.gpu.lease.records import read_records

    # Both have checks, a GPU and an output of their own.
    if acceptance.acceptance or acceptance.rehearse:
        _accept(gpus, acceptance, measures_latency=measure_latency)
        return
    # An option without effect would look as if it had one.
    if acceptance.read_only or acceptance.into is not None:
        raise UsageError(
            "--read-only and --into are about an acceptance or a rehearsal; add --acceptance or "
            "--rehearse"
        )
    # Without a name all GPUs are looked at, and those that cannot be opened are counted too.
    if gpus in ((), ("nvml",)):
        texts, count, remarks = _visible()
    else:
        texts = expanded(gpus)
        count = len(texts)
        remarks = []
    # All GPUs stay open, as calls are timed on all of them at once.
    with ExitStack() as stack:
        opened = [stack.enter_context(open_gpu(text)) for text in texts]
        diagnoses, parallel, problems = _diagnose(opened, measure_latency)
    verdict = _verdict([gpu_diagnosis.inspection for gpu_diagnosis in diagnoses], count)
    diagnosis = {
        "verdict": verdict,
        "gpus": diagnoses,
        "parallel": parallel,
        "clock_change": _clock_change(
            [gpu_diagnosis.latency for gpu_diagnosis in diagnoses], parallel
        ),
        "remarks": [*remarks, *problems, *read_records()[1]],
    }
    console.report(diagnosis, _text(diagnosis, gpus), [])
    # The exit status says whether anything works here, for scripts.
    if not verdict.observe and not verdict.set_clocks:
        click.get_current_context().exit(1)


def _accept(
    gpus: tuple[str, ...], acceptance: AcceptanceOptions, *, measures_latency: bool
) -> None:
    """Accept this node, or rehearse a profile, on the GPU of each rank."""
    if measures_latency or len(gpus) > 1 or acceptance.acceptance == acceptance.rehearse:
        raise UsageError(
            "--acceptance and --rehearse take one GPU, and no other option than --read-only, "
            "--into and --json; an acceptance tries all of them"
        )
    # The checks are an extension, which a core alone lacks.
    accept = extensions.offer("acceptance")
    folder = acceptance.into or Path("acceptance")
    check_folder(folder, "--into")
    accept(
        *gpus,
        rehearses=acceptance.rehearse,
        read_only=acceptance.read_only,
        folder=folder,
    )


def _visible() -> tuple[list[str], int, list[str]]:
    """Return the GPUs that can be opened, the number with those that cannot, and why they cannot,
    or why there are none.
    """
    from perseus_planner.gpu import all_gpus

    try:
        shown = all_gpus()
    except GpuError as error:
        return [], 0, [f"No GPU: {error}"]
    if not shown:
        remark = (
            "No GPU: NVML shows none on this node; `planner profile --gpu simulated:a100-sxm` "
            "works without one"
        )
        return [], 0, [remark]
    texts = [gpu.text for gpu in shown if not gpu.problem]
    return texts, len(shown), [gpu.problem for gpu in shown if gpu.problem]


def _diagnose(
    gpus: Sequence[Gpu], measure: bool
) -> tuple[list[GpuDiagnosis], ParallelLatency | None, list[str]]:
    """Diagnose each GPU and all together; return what is wrong last, and continue if one of them
    is lost.
    """
    from perseus_planner.gpu.inspection import measure_parallel_latency
    from perseus_planner.gpu.lease.lease import lease_gpus

    diagnoses: list[GpuDiagnosis] = []
    measured: dict[Gpu, Latency] = {}
    parallel = None
    problems = []
    # One GPU that is lost must not hide what the others can do.
    for gpu, inspection in zip(gpus, _inspect_all(gpus), strict=True):
        if isinstance(inspection, GpuError):
            problems.append(str(inspection))
            continue
        diagnoses.append(_measure(gpu, inspection) if measure else GpuDiagnosis(inspection, None))
        if (latency := diagnoses[-1].latency) is not None:
            measured[gpu] = latency
    # Several at once take longer only if they share the driver's lock.
    if len(measured) > 1:
        try:
            with lease_gpus(list(measured), power_limit=False):
                call_s = median(latency.call_p50_s for latency in measured.values())
                parallel = measure_parallel_latency(list(measured), call_s)
        except GpuError as error:
            problems.append(str(error))
    return diagnoses, parallel, problems


def _inspect_all(gpus: Sequence[Gpu]) -> list[Inspection | GpuError]:
    """Inspect real GPUs all at once, as watching a counter takes seconds; simulated ones may
    share a clock.
    """
    from perseus_planner.gpu.inspection import inspect

    def inspected(gpu: Gpu) -> Inspection | GpuError:
        try:
            return inspect(gpu)
        except GpuError as error:
            return error

    if not all(gpu.keeps_settings for gpu in gpus):
        return [inspected(gpu) for gpu in gpus]
    with ThreadPoolExecutor(max(1, len(gpus))) as pool:
        return list(pool.map(inspected, gpus))


def _measure(gpu: Gpu, inspection: Inspection) -> GpuDiagnosis:
    """Add to the inspection of a GPU what setting it shows."""
    from perseus_planner.gpu.inspection import CLOCK, NOT_TRIED, POWER_LIMIT
    from perseus_planner.gpu.lease.lease import lease_gpus

    # If the lease fails, nothing was tried, and the reading says so.
    limit = CheckResult(POWER_LIMIT.name, NOT_TRIED, "the GPU could not be leased")
    try:
        with lease_gpus([gpu]):
            limit = run_check(POWER_LIMIT, gpu)
            clock = run_check(CLOCK, gpu)
    except GpuError as error:
        clock = failure(CLOCK, error)
    # The latency is shown apart from whether clocks can be set.
    latency = clock.values.get("latency")
    settings = (replace(clock, values={}), limit)
    return GpuDiagnosis(replace(inspection, settings=settings), latency)


def _verdict(inspections: Sequence[Inspection], gpus: int) -> Verdict:
    can_set = [inspection.can_set_clocks for inspection in inspections]
    return Verdict(
        gpus,
        observe=sum(inspection.can_observe for inspection in inspections),
        # Whether a setting is permitted is known only where it was tried, on each GPU.
        set_clocks=None if None in can_set else sum(map(bool, can_set)),
        profile=sum(
            inspection.can_observe and inspection.can_set_clocks is not False
            for inspection in inspections
        ),
        mig=sum(inspection.is_mig_on for inspection in inspections),
    )


def _clock_change(
    measured: Iterable[Latency | None], parallel: ParallelLatency | None
) -> dict[str, float]:
    """Return the values for `clock_change` in a job file that were measured."""
    latencies = [latency for latency in measured if latency is not None]
    settles_s = [latency.settle_p50_s for latency in latencies if latency.settle_p50_s is not None]
    change: dict[str, float] = {}
    if latencies:
        # Three digits, as calls vary by more.
        change["call_s"] = float(f"{median(latency.call_p50_s for latency in latencies):.3g}")
    if settles_s:
        change["settle_s"] = float(f"{median(settles_s):.3g}")
    if parallel is not None:
        # Where calls do not wait for each other, each GPU is a node of its own to the planner.
        change["gpus_per_node"] = parallel.gpus if parallel.queue else 1
    return change


def _text(diagnosis: dict[str, Any], named: Sequence[str]) -> str:
    """Return what the command prints; `named` are the GPUs that were named."""
    parts = [_gpu_text(gpu) for gpu in diagnosis["gpus"]]
    if diagnosis["parallel"] is not None:
        parts.append(diagnosis["parallel"].text)
    if diagnosis["clock_change"]:
        change = ", ".join(
            f"{name}: {value:g}" for name, value in diagnosis["clock_change"].items()
        )
        parts.append(f"For a job file:\n\nclock_change: {{{change}}}")
    return "\n\n".join([*parts, *diagnosis["remarks"], _verdict_text(diagnosis["verdict"], named)])


def _verdict_text(verdict: Verdict, named: Sequence[str]) -> str:
    def works(count: int) -> str:
        if not verdict.gpus:
            return "no GPU"
        if not count:
            return "does not work, for the reasons above"
        return f"works on {count} of {counted(verdict.gpus, 'GPU')}"

    profile = works(verdict.profile)
    if verdict.set_clocks is not None:
        set_clocks = works(verdict.set_clocks)
    else:
        command = shlex.join(("planner", "doctor", *named, "--measure-latency"))
        set_clocks = f"not tried; `{command}` tries it"
        # Profiling sets clocks, so what was not tried may still refuse it.
        profile += ", where setting clocks is permitted" if verdict.profile else ""
    mig = ""
    if verdict.mig:
        mig = (
            f"\n  MIG         is on on {verdict.mig} of {counted(verdict.gpus, 'GPU')}: energy and "
            "clock are those of the whole GPU; turn it off to plan"
        )
    return (
        "What works here:\n"
        "  plan        works, with or without GPUs\n"
        f"  observe     {works(verdict.observe)}\n"
        f"  profile     {profile}\n"
        f"  set clocks  {set_clocks}{mig}"
    )


def _gpu_text(diagnosis: GpuDiagnosis) -> str:
    seen = diagnosis.inspection
    origin = "" if seen.origin == "measured" else f", {seen.origin}"
    # In the order of what can be done: read, then set, then why it may not be set.
    rows = [
        *(
            (
                reading.name,
                f"{'' if reading.result == PASSED else 'cannot be read: '}{reading.text}",
            )
            for reading in seen.readings
        ),
        *_energy_rows(seen.energy),
        *(
            (
                f"setting the {setting.name}",
                ": ".join(filter(None, (setting.result, setting.text))),
            )
            for setting in seen.settings
        ),
        *(
            ("changing the clock", text)
            for text in (diagnosis.latency.texts if diagnosis.latency is not None else ())
        ),
        # Another job's lease explains a clock that is locked.
        ("lease", seen.leased_by or "free"),
        *(("stale lease", text) for text in seen.stale_leases),
        *(("warning", text) for text in seen.warnings),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join([f"{seen.gpu}: {seen.name}, driver {seen.driver}{origin}", *lines])


def _energy_rows(energy: EnergyWatch) -> Iterator[tuple[str, str]]:
    if energy.step_s is not None and energy.step_j is not None and energy.counter_w is not None:
        yield "counter steps", f"every {si(energy.step_s, 's', 3)}, by {si(energy.step_j, 'J', 3)}"
        sensor = "the power sensor cannot be read"
        if energy.sensor_w:
            share = 100 * (energy.counter_w / energy.sensor_w - 1)
            sensor = (
                f"{si(energy.sensor_w, 'W')} by the power sensor; the counter is {share:+.1f} % off"
            )
        yield (
            "mean power",
            f"{si(energy.counter_w, 'W')} by the counter, {sensor}, in "
            f"{si(energy.watched_s, 's', 3)}",
        )
    if energy.problem is not None:
        yield "counter", energy.problem


@dataclass(frozen=True)
class GpuReset:
    """The result for one GPU."""

    gpu: str  #: Text that opens the GPU
    name: str | None  #: Name of the GPU; None if it cannot be opened
    left_by: str | None  #: Dead process that left the GPU set; None if there is no record of one
    problem: str | None  #: Why the GPU is not reset, and what to do; None if it is reset


@command("planner reset", "planner reset nvml:0 nvml:1", "planner reset --all --power-limit")
def reset(
    gpus: Annotated[tuple[str, ...], Option(metavar="[GPU]...")],
    *,
    every: Annotated[
        bool, "Reset all GPUs that NVML and AMD SMI show on this node.", Option("--all")
    ],
    power_limit: Annotated[bool, "Also set the power limit of these GPUs back to its default."],
    force: Annotated[bool, "Also reset GPUs that a living process has leased."],
) -> None:
    """Reset locked clocks.

    Without GPU, this resets what dead processes left set. With GPUs, such as nvml:0, or with --all,
    it resets these, unless a living process has leased them.
    """
    # Options that contradict each other are refused before any GPU is touched.
    if gpus and every:
        raise UsageError("--all: resets every GPU; do not name GPUs as well")
    if not gpus and not every and (power_limit or force):
        raise UsageError(
            f"{'--force' if force else '--power-limit'}: name the GPUs to reset, or give --all"
        )
    from perseus_planner.gpu import all_gpus
    from perseus_planner.gpu.lease.lease import frozen_records, recover
    from perseus_planner.gpu.lease.records import read_records

    invalid: list[str] = []
    # Named GPUs are reset whoever set them, and otherwise only those of dead processes.
    if every or gpus:
        names = [gpu.text for gpu in all_gpus()] if every else gpus
        results = [_reset_one(text, power_limit, force) for text in names]
        nothing = "Nothing to reset: NVML shows no GPU on this node."
    else:
        results = [
            GpuReset(left.record.gpu, left.record.name, str(left.record.owner), left.problem)
            for left in recover()
        ]
        # A stopped process still holds its GPU, and its guardian waits for it.
        for held in frozen_records():
            number = held.owner.pid
            problem = (
                f"GPU {held.gpu} ({held.name}): held by process {number}, stopped; let it go on "
                f"with `kill -CONT {number}`, or end it with `kill -KILL {number}`, and its "
                "guardian resets the GPU"
            )
            results.append(GpuReset(held.gpu, held.name, None, problem))
        invalid = read_records()[1]
        nothing = "Nothing to reset: no dead process has left a GPU set."
    problems = [result.problem for result in results if result.problem is not None]
    # Something was reset, or nothing had to be, so there is a result to print beside the problems.
    if console.is_json() or len(problems) < len(results) or not problems:
        lines = [
            f"Reset {result.gpu} ({result.name})"
            + (f", left set by {result.left_by}" if result.left_by else "")
            for result in results
            if result.problem is None
        ]
        text = "\n".join([*(lines if results else [nothing]), *invalid])
        console.report({"gpus": results, "invalid_records": invalid}, text, [])
    if problems:
        raise GpuError("; ".join(problems))


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
