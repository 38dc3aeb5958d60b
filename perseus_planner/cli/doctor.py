"""`planner doctor`: what can be read and set on the GPUs of this node, and what to do about what
is missing; and `planner doctor --rehearse`: what a profile needs, tried on all ranks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import click

from perseus_planner.base import registry
from perseus_planner.base.checks import PASSED, CheckResult, failure, run_check
from perseus_planner.base.errors import GpuError, UsageError
from perseus_planner.base.prefixes import counted, si
from perseus_planner.base.units import COUNT
from perseus_planner.cli import console
from perseus_planner.cli.options import (
    AsJson,
    Option,
    Stages,
    check_folder,
    command,
    complete,
    gpu_names,
)

if TYPE_CHECKING:
    from perseus_planner.gpu.inspection import EnergyWatch, Inspection, Latency, ParallelLatency
    from perseus_planner.gpu.protocol import Gpu
    from perseus_planner.profiler.rehearsal import LoadRun, RankRehearsal, Rehearsal


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


@dataclass(frozen=True)
class RehearsalOptions:
    """How to rehearse a profile."""

    rehearse: Annotated[
        bool,
        "Try everything that a profile needs, in about a minute, under torchrun on all ranks: "
        "clocks under load, energy, memory, precision, and messages between neighbours. GPU is "
        "that of each rank, as in `planner profile`.",
    ]
    no_locks: Annotated[bool, "Rehearse without locking clocks."]
    stages: Annotated[
        Stages | None,
        "Number of stages to rehearse with.  [default: one on each rank]",
    ]


@dataclass(frozen=True)
class AcceptanceOptions:
    """How to accept a node."""

    acceptance: Annotated[
        bool,
        "Try every part of the planner on this node, under torchrun with one rank for each "
        "GPU: locks, latency, neighbours, and a small GPT that is profiled and trained with a "
        "plan. Writes acceptance.json and acceptance.html.",
    ]
    read_only: Annotated[bool, "Run the acceptance without setting anything."]
    into: Annotated[
        Path | None,
        "Folder for what the acceptance writes.  [default: acceptance]",
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
    rehearsal: RehearsalOptions,
    acceptance: AcceptanceOptions,
    as_json: AsJson,
) -> None:
    """Show what can be read and set on all GPUs that NVML shows, or on the GPUs that you name.

    `cuda` names all GPUs that CUDA shows to this process.

    The command changes nothing without --measure-latency, --rehearse or --acceptance, which reset
    what they set. The output ends with what works here. The exit status is 1 if GPUs can neither be
    measured nor set, or if a rehearsal or an acceptance fails.
    """
    from perseus_planner.gpu import open_gpu
    from perseus_planner.gpu.lease.records import read_records

    if acceptance.acceptance:
        if measure_latency or rehearsal.rehearse or rehearsal.no_locks or len(gpus) > 1:
            raise UsageError(
                "--acceptance takes one GPU, and no other option than --read-only, --into and "
                "--json; it tries all of them"
            )
        accept = registry.load(registry.ACCEPT)
        folder = acceptance.into or Path("acceptance")
        check_folder(folder, "--into")
        accept(*gpus, read_only=acceptance.read_only, folder=folder, as_json=as_json)
        return
    if acceptance.read_only or acceptance.into is not None:
        raise UsageError("--read-only and --into are about an acceptance; add --acceptance")
    if rehearsal.rehearse:
        if measure_latency or len(gpus) > 1:
            raise UsageError(
                "--rehearse takes one GPU, and no --measure-latency; run them one after the other"
            )
        locks, stages = not rehearsal.no_locks, rehearsal.stages
        rehearse_and_report(*gpus, locks=locks, stages=stages, as_json=as_json)
        return
    if rehearsal.no_locks or rehearsal.stages is not None:
        raise UsageError("--no-locks and --stages are about a rehearsal; add --rehearse")
    if gpus == ("cuda",):
        from perseus_planner.gpu.nvml.cuda import count_devices

        gpus = tuple(f"cuda:{number}" for number in range(count_devices()))
    texts, count, remarks = _visible() if gpus in ((), ("nvml",)) else (list(gpus), len(gpus), [])
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
    console.report(diagnosis, _text(diagnosis), [], as_json=as_json)
    if not verdict.observe and not verdict.set_clocks:
        click.get_current_context().exit(1)


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
    parallel, problems = None, []
    for gpu, inspection in zip(gpus, _inspect_all(gpus), strict=True):
        if isinstance(inspection, GpuError):
            problems.append(str(inspection))
            continue
        diagnoses.append(_measure(gpu, inspection) if measure else GpuDiagnosis(inspection, None))
        if (latency := diagnoses[-1].latency) is not None:
            measured[gpu] = latency
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

    limit = CheckResult(POWER_LIMIT.name, NOT_TRIED, "the GPU could not be leased")
    try:
        with lease_gpus([gpu]):
            limit, clock = run_check(POWER_LIMIT, gpu), run_check(CLOCK, gpu)
    except GpuError as error:
        clock = failure(CLOCK, error)
    latency = clock.values.get("latency")
    settings = (replace(clock, values={}), limit)
    return GpuDiagnosis(replace(inspection, settings=settings), latency)


def _verdict(inspections: Sequence[Inspection], gpus: int) -> Verdict:
    can_set = [inspection.can_set_clocks for inspection in inspections]
    return Verdict(
        gpus,
        observe=sum(inspection.can_observe for inspection in inspections),
        set_clocks=None if None in can_set else sum(map(bool, can_set)),
        profile=sum(
            inspection.can_observe and inspection.can_set_clocks is not False
            for inspection in inspections
        ),
    )


def _clock_change(
    measured: Iterable[Latency | None], parallel: ParallelLatency | None
) -> dict[str, float]:
    """Return the values for `clock_change` in a job file that were measured."""
    latencies = [latency for latency in measured if latency is not None]
    settles_s = [latency.settle_p50_s for latency in latencies if latency.settle_p50_s is not None]
    change: dict[str, float] = {}
    if latencies:
        change["call_s"] = float(f"{median(latency.call_p50_s for latency in latencies):.3g}")
    if settles_s:
        change["settle_s"] = float(f"{median(settles_s):.3g}")
    if parallel is not None:
        change["gpus_per_node"] = parallel.gpus if parallel.queue else 1
    return change


def _text(diagnosis: dict[str, Any]) -> str:
    parts = [_gpu_text(gpu) for gpu in diagnosis["gpus"]]
    if diagnosis["parallel"] is not None:
        parts.append(_parallel_text(diagnosis["parallel"]))
    if diagnosis["clock_change"]:
        change = ", ".join(
            f"{name}: {value:g}" for name, value in diagnosis["clock_change"].items()
        )
        parts.append(f"For a job file:\n\nclock_change: {{{change}}}")
    return "\n\n".join([*parts, *diagnosis["remarks"], _verdict_text(diagnosis["verdict"])])


def _verdict_text(verdict: Verdict) -> str:
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
        set_clocks = "not tried; `planner doctor --measure-latency` tries it"
        profile += ", where setting clocks is permitted" if verdict.profile else ""
    return (
        "What works here:\n"
        "  plan        works, with or without GPUs\n"
        f"  observe     {works(verdict.observe)}\n"
        f"  profile     {profile}\n"
        f"  set clocks  {set_clocks}"
    )


def _gpu_text(diagnosis: GpuDiagnosis) -> str:
    seen = diagnosis.inspection
    origin = "" if seen.origin == "measured" else f", {seen.origin}"
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
        *(("changing the clock", text) for text in _latency_texts(diagnosis.latency)),
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


def _latency_texts(latency: Latency | None) -> Iterator[str]:
    if latency is None:
        return
    p50, p99, longest = (
        si(s, "s", 3) for s in (latency.call_p50_s, latency.call_p99_s, latency.call_max_s)
    )
    yield f"a call takes {p50} (median; p99 {p99}, longest {longest}; {latency.calls} calls)"
    if latency.settle_p50_s is not None:
        reached = f"{latency.settled} of {latency.waited} were reached"
        yield (
            f"the clock is reached {si(latency.settle_p50_s, 's', 3)} after the call (median; "
            f"{reached})"
        )
    else:
        yield (
            f"the clock was not reached within {latency.timeout_s:g} s, as on an idle GPU: "
            "measure while it works"
        )


def _parallel_text(parallel: ParallelLatency) -> str:
    verdict = "they run one after another" if parallel.queue else "they do not wait for each other"
    return (
        f"Setting {parallel.gpus} GPUs at once: {si(parallel.slowest_s, 's', 3)} until the last "
        f"call returns, {si(parallel.alone_s, 's', 3)} for a call that is alone: {verdict}"
    )


def rehearse_and_report(
    gpu: str = "cuda", *, locks: bool, stages: int | None, as_json: bool
) -> None:
    """Rehearse on this rank, print the result on rank 0, and exit with 1 on all ranks if one has
    a problem.
    """
    from perseus_planner.profiler.rehearsal import rehearse

    if stages is not None:
        COUNT.check(stages, "--stages")
    with rehearse(gpu, locks=locks, stages=stages) as result:
        if os.environ.get("RANK", "0") == "0":
            console.report(result, _rehearsal_text(result), [], as_json=as_json)
        if result.is_stuck:  # destroying the process group would wait for the same message
            sys.stdout.flush()
            os._exit(1)
    if not result.has_passed:
        click.get_current_context().exit(1)


def _rehearsal_text(result: Rehearsal) -> str:
    nodes = len({rank.node for rank in result.ranks})
    sizes = sorted({rank.size for rank in result.ranks} - {0})
    head = f"Rehearsal on {counted(len(result.ranks), 'rank')} of {counted(nodes, 'node')}"
    if sizes:
        head += f"; the load is a matrix product of {', '.join(f'{n} x {n}' for n in sizes)}"
    texts = [head, _table(result.ranks)]
    for title, lines in (
        ("Problems:", [(rank.rank, text) for rank in result.ranks for text in rank.problems]),
        ("Remarks:", [(rank.rank, text) for rank in result.ranks for text in rank.remarks]),
    ):
        if lines:
            texts.append("\n".join([title, *_by_ranks(lines)]))
    return "\n\n".join([*texts, _rehearsal_verdict(result)])


def _table(ranks: Sequence[RankRehearsal]) -> str:
    from perseus_planner.base.tables import Column, lay_out, table

    def time(precision: str) -> Callable[[RankRehearsal], str | None]:
        return lambda rank: next(
            (si(run.time_s, "s", 3) for run in rank.runs if run.precision == precision), None
        )

    cells: dict[str, Callable[[RankRehearsal], object]] = {
        "rank": lambda rank: rank.rank,
        "node": lambda rank: rank.node,
        "GPU": lambda rank: rank.name,
        "locked -> achieved": lambda rank: ", ".join(map(_clock, _bf16(rank))),
        "power": lambda rank: ", ".join(si(run.power_w, "W", 3) for run in _bf16(rank)),
        "counter": lambda rank: rank.counter_step_s and si(rank.counter_step_s, "s", 3),
        "fp32": time("fp32"),
        "bf16": time("bf16"),
        "free memory": _memory,
        "messages from": lambda rank: ", ".join(
            f"{message.sender}: {si(message.size_bytes / message.time_s, 'B/s', 3)}"
            for message in rank.received
        ),
    }
    columns = [Column(name, cell, "<") for name, cell in cells.items()]
    return table([[cell or "-" for cell in column] for column in lay_out(ranks, *columns)])


def _bf16(rank: RankRehearsal) -> list[LoadRun]:
    return [run for run in rank.runs if run.precision == "bf16"]


def _clock(run: LoadRun) -> str:
    locked = "-" if run.locked_mhz is None else run.locked_mhz
    throttle = f" ({', '.join(run.throttle)})" if run.throttle else ""
    return f"{locked} -> {run.achieved_mhz:.0f} MHz{throttle}"


def _memory(rank: RankRehearsal) -> str | None:
    if rank.free_bytes is None or rank.total_bytes is None:
        return None
    return f"{rank.free_bytes / 2**30:.1f} of {rank.total_bytes / 2**30:.1f} GiB"


def _by_ranks(lines: Sequence[tuple[int, str]]) -> list[str]:
    """Return each text once, after the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in lines:
        ranks.setdefault(text, []).append(rank)
    return [
        f"  rank{'s' * (len(having) > 1)} {', '.join(map(str, having))}: {text}"
        for text, having in ranks.items()
    ]


def _rehearsal_verdict(result: Rehearsal) -> str:
    ranks = counted(len(result.ranks), "rank")
    failed = sum(bool(rank.problems) for rank in result.ranks)
    if failed:
        return f"Verdict: no profile can be made here yet, for problems on {failed} of {ranks}."
    observed = sum(rank.locks is False for rank in result.ranks)
    if observed:
        return (
            f"Verdict: a profile can be made with --observe; clocks cannot be set on {observed} "
            f"of {ranks}."
        )
    if any(rank.locks is None for rank in result.ranks):
        return "Verdict: a profile can be made with --observe; setting clocks was not tried."
    return "Verdict: a profile can be made here."
