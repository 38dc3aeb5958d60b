"""`planner doctor`: what can be read and set on the GPUs of this node, and what to do about what is missing."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import click

from perseus_planner.cli import console
from perseus_planner.errors import GpuError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from perseus_planner.gpu.inspection import EnergyWatch, Inspection
    from perseus_planner.gpu.latency import Latency, Together
    from perseus_planner.gpu.protocol import Gpu


@dataclass(frozen=True)
class GpuDiagnosis:
    """One GPU: what was seen of it, and how long changing its clock takes; None where that was not measured."""

    inspection: Inspection
    latency: Latency | None


@dataclass(frozen=True)
class Diagnosis:
    """What `planner doctor` found.

    Attributes:
        gpus: those that could be opened.
        together: what changing the clocks of all takes; None where that was not measured, or there is one.
        clock_change: what a job file may say of it; empty where it was not measured.
        remarks: what stands in the way of seeing more GPUs, or files that are no records.
    """

    gpus: tuple[GpuDiagnosis, ...]
    together: Together | None
    clock_change: dict[str, float]
    remarks: tuple[str, ...]


@click.command(epilog=console.examples("planner doctor", "planner doctor nvml:0", "planner doctor --measure-latency"))
@click.argument("gpus", nargs=-1, metavar="[GPU]...")
@click.option(
    "--measure-latency",
    is_flag=True,
    help="Set clocks for some seconds, to see whether that is permitted and how long it takes; then reset them.",
)
@console.as_json
def doctor(gpus: tuple[str, ...], measure_latency: bool, as_json: bool) -> None:
    """Say what can be read and set here, on every GPU that NVML shows, or on those named.

    Changes nothing, unless --measure-latency is given.
    """
    from perseus_planner.gpu import open_gpu
    from perseus_planner.gpu.lease.records import read_records

    texts, remarks = (gpus, ()) if gpus else _visible()
    with ExitStack() as stack:
        opened = [stack.enter_context(open_gpu(text)) for text in texts]
        found = _diagnosis(opened, measure_latency)
    found = replace(found, remarks=(*remarks, *found.remarks, *read_records()[1]))
    console.report(found, _text(found), [], as_json=as_json)


def _visible() -> tuple[Sequence[str], tuple[str, ...]]:
    """The GPUs that NVML shows and that can be opened, and why there are no others."""
    from perseus_planner.gpu.nvml.discovery import visible_gpus

    try:
        shown = visible_gpus()
    except GpuError as error:
        return (), (f"No GPU: {error}",)
    if not shown:
        return (), ("No GPU: NVML shows none on this node; `planner profile --gpu simulated:a100-sxm` needs none",)
    return [gpu.text for gpu in shown if not gpu.problem], tuple(gpu.problem for gpu in shown if gpu.problem)


def _diagnosis(gpus: Sequence[Gpu], measure: bool) -> Diagnosis:
    """What is found of each GPU; one that is lost hides no other."""
    from perseus_planner.gpu.inspection import inspect

    found: list[GpuDiagnosis] = []
    settable: list[Gpu] = []
    problems = []
    for gpu in gpus:
        try:
            seen = inspect(gpu)
        except GpuError as error:
            problems.append(str(error))
            continue
        found.append(_measured(gpu, seen) if measure else GpuDiagnosis(seen, None))
        settable += [gpu] if found[-1].latency is not None else []
    latencies = [each.latency for each in found if each.latency is not None]
    try:
        together = _measured_together(settable, latencies)
    except GpuError as error:
        together = None
        problems.append(str(error))
    return Diagnosis(tuple(found), together, _clock_change(latencies, together), tuple(problems))


def _measured_together(gpus: Sequence[Gpu], latencies: Sequence[Latency]) -> Together | None:
    """What setting all at once takes; None for fewer than two."""
    from perseus_planner.gpu.latency import measure_together
    from perseus_planner.gpu.lease.lease import lease_gpus

    if len(gpus) < 2:
        return None
    with lease_gpus(gpus, power_limit=False):
        return measure_together(gpus, median(latency.call_p50_s for latency in latencies))


def _measured(gpu: Gpu, seen: Inspection) -> GpuDiagnosis:
    """The same GPU, with what setting shows."""
    from perseus_planner.gpu.inspection import NOT_TRIED, Setting, refused
    from perseus_planner.gpu.latency import measure_latency, try_power_limit
    from perseus_planner.gpu.lease.lease import lease_gpus

    latency = None
    limit = Setting("power limit", NOT_TRIED, "the GPU could not be taken")
    try:
        with lease_gpus([gpu]):
            limit = try_power_limit(gpu)
            latency = measure_latency(gpu)
            clock = Setting("clock", "permitted", "")
    except GpuError as error:
        clock = refused("clock", error)
    return GpuDiagnosis(replace(seen, settings=(clock, limit)), latency)


def _clock_change(latencies: Sequence[Latency], together: Together | None) -> dict[str, float]:
    """What `clock_change` of a job file should be; without what was not seen."""
    if not latencies:
        return {}
    call_s = median(latency.call_p50_s for latency in latencies)
    settles_s = [latency.settle_p50_s for latency in latencies if latency.settle_p50_s is not None]
    change: dict[str, float] = {"call_s": float(f"{call_s:.3g}")}
    if settles_s:
        change["settle_s"] = float(f"{median(settles_s):.3g}")
    if together is not None:
        change["gpus_per_node"] = together.gpus if together.queue else 1
    return change


def _text(found: Diagnosis) -> str:
    parts = [_gpu_text(each) for each in found.gpus]
    if found.together is not None:
        parts.append(_together_text(found.together))
    if found.clock_change:
        change = ", ".join(f"{name}: {value:g}" for name, value in found.clock_change.items())
        parts.append(f"For a job file:\n\nclock_change: {{{change}}}")
    return "\n\n".join([*parts, *found.remarks])


def _gpu_text(found: GpuDiagnosis) -> str:
    seen = found.inspection
    origin = "" if seen.origin == "measured" else f", {seen.origin}"
    rows = [(reading.name, reading.value or f"cannot be read: {reading.problem}") for reading in seen.readings]
    rows += list(_energy_rows(seen.energy))
    rows += [(f"setting the {each.name}", _joined(each.answer, each.remark)) for each in seen.settings]
    rows += [("changing the clock", text) for text in _latency_texts(found.latency)]
    rows += [("held", seen.held_by or "by no process")]
    rows += [("left behind", text) for text in seen.left_behind]
    rows += [("note", text) for text in seen.warnings]
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join([f"{seen.gpu}: {seen.name}, driver {seen.driver}{origin}", *lines])


def _energy_rows(energy: EnergyWatch) -> Iterator[tuple[str, str]]:
    if energy.step_s is not None and energy.step_j is not None and energy.counter_w is not None:
        yield "counter steps", f"every {1000 * energy.step_s:.3g} ms, by {energy.step_j:.3g} J"
        sensor = "the power sensor cannot be read"
        if energy.sensor_w:
            share = 100 * (energy.counter_w / energy.sensor_w - 1)
            sensor = f"{energy.sensor_w:.1f} W by the power sensor; the counter says {share:+.1f} %"
        yield "power over a while", f"{energy.counter_w:.1f} W by the counter, {sensor}, in {energy.watched_s:.1f} s"
    if energy.problem is not None:
        yield "counter", energy.problem


def _latency_texts(latency: Latency | None) -> Iterator[str]:
    if latency is None:
        return
    call_ms = [f"{1000 * each:.3g}" for each in (latency.call_p50_s, latency.call_p99_s, latency.call_max_s)]
    yield f"a call takes {call_ms[0]} ms (median; p99 {call_ms[1]} ms, longest {call_ms[2]} ms; {latency.calls} calls)"
    if latency.settle_p50_s is not None:
        reached = f"{latency.settled} of {latency.waited} were reached"
        yield f"the clock is there {1000 * latency.settle_p50_s:.3g} ms after the call (median; {reached})"
    else:
        patience = f"within {latency.patience_s:g} s"
        yield f"the clock that was set was not reached {patience}, as where the GPU idles: measure while it works"


def _together_text(together: Together) -> str:
    verdict = "they run one after another" if together.queue else "they do not wait for each other"
    return (
        f"Setting {together.gpus} GPUs at once: {1000 * together.slowest_s:.3g} ms until the last call returns, "
        f"{1000 * together.alone_s:.3g} ms for one alone: {verdict}"
    )


def _joined(answer: str, remark: str) -> str:

    return f"{answer}: {remark}" if remark else answer
