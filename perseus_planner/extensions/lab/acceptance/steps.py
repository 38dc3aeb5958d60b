"""The checks of `planner doctor --acceptance`, in order. Every rank runs them, and all of them have
the same result.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from statistics import median
from threading import Event
from typing import TYPE_CHECKING, Any

import psutil
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from perseus_planner import Plan, Profile, Run, solve
from perseus_planner.base.checks import Check, Finding, NotCheckedError
from perseus_planner.base.errors import GpuError, RankError
from perseus_planner.base.loops import in_background
from perseus_planner.base.prefixes import si
from perseus_planner.base.processes import child_environment
from perseus_planner.extensions.lab.acceptance.ranks import (
    DETERMINISTIC,
    STAGES,
    Layout,
    Trained,
    Training,
    size_on,
)
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.inspection import (
    CLOCKS,
    inspect,
    measure_latency,
    measure_parallel_latency,
    privilege,
)
from perseus_planner.gpu.lease.lease import lease_gpus
from perseus_planner.gpu.lease.records import read_records
from perseus_planner.gpu.simulated.emulated import EmulatedGpu
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.ranks.group import RankGroup
from perseus_planner.profiler.ranks.neighbours import connect_neighbour
from perseus_planner.profiler.rehearsal import rehearse_gpu, surroundings, unlocked_mhz
from perseus_planner.profiler.sweep import SweepSettings
from perseus_planner.profiles.keys import Key
from perseus_planner.profiles.measurement import ClockChange, Measurement

if TYPE_CHECKING:
    from perseus_planner.extensions.lab.acceptance.ranks import Rank
    from perseus_planner.gpu.inspection import Inspection, Latency, ParallelLatency
    from perseus_planner.gpu.lease.records import FoundRecord
    from perseus_planner.profiler.rehearsal import LoadRun, RankRehearsal

Span = tuple[float, float]  #: begin and end, seconds
Times = dict[Key, float]  #: seconds of one computation

MARK_ERROR_S = 50e-6
"""How far a mark may be from the begin or end of what the GPU runs, seconds."""
ADDED = 0.02
"""By how much the runtime may make an iteration longer, as a share."""

_CONNECTIONS = (1, 32)  #: values of CUDA_DEVICE_MAX_CONNECTIONS
_BLOCKED_S = 0.2  #: how long two neighbours wait for each other
_PROFILED = 3  #: iterations under torch's profiler
_BY_PLAN = 20  #: iterations
_SLOW_S = 600.0  #: the longest step
_POLL_S = 0.02
_LEASED_S = 120.0  #: until a training has leased its GPUs
_RESET_S = 15.0  #: until a guardian has reset what its controller had set
_NUMBERS = 4096  #: float32 numbers of an all-reduce
_READ_ONLY = "--read-only sets nothing"
_PACKAGES = ("torch", "nvidia-ml-py", "megatron-core", "deepspeed")


@dataclass
class Acceptance:
    """What the checks share, on each rank."""

    rank: Rank
    nodes: Sequence[Inspection] = ()  #: Each rank's GPU
    remarks: Sequence[str] = ()  #: What may spoil a profile, and what to do
    change: ClockChange | None = None  #: What a clock change costs
    runs: Sequence[RankRehearsal] = ()  #: Each rank's GPU under load
    times: Times = field(default_factory=dict)  #: Of the computations of an iteration
    profile: Profile | None = None
    plan: Path | None = None

    @property
    def layout(self) -> Layout:
        """How the ranks share the pipelines."""
        return Layout.of(self.rank.size)

    def refuse_to_set(self) -> None:
        """Leave a check out if nothing may be set.

        Raises:
            NotCheckedError: If so.
        """
        if self.rank.read_only:
            raise NotCheckedError(_READ_ONLY)

    def need(self, value: Any, name: str) -> Any:
        """Return what an earlier check has found.

        Raises:
            NotCheckedError: If it has not.
        """
        if not value:
            raise NotCheckedError(f"it needs what {name!r} finds")
        return value


def alike(texts: Iterable[str]) -> str:
    """Return the different texts, each once and with how often it is there."""
    counts = Counter(texts)
    is_single = counts.total() == 1
    return "; ".join(text if is_single else f"{n} x {text}" for text, n in counts.items())


# The node


def _check_node(acceptance: Acceptance) -> Finding:
    looks: list[tuple[Inspection, str, list[str]]] = acceptance.rank.everywhere(_look)
    nodes = [seen for seen, *_ in looks]
    # A GPU in use, or a counter that cannot be read, spoils all that follows.
    for seen in nodes:
        if problem := seen.leased_by or seen.energy.problem:
            raise GpuError(f"{seen.gpu}: {problem}")
    # Two ranks on one GPU would set each other's clocks.
    uuids = [seen.uuid for seen in nodes]
    if len(set(uuids)) < len(uuids):
        raise GpuError(
            f"two ranks use the same GPU, {max(uuids, key=uuids.count)}; name the back-end alone, "
            "such as nvml, and each rank uses the GPU that it computes on"
        )
    # From now on each rank names its own GPU, which a back-end alone did not.
    acceptance.nodes = nodes
    acceptance.rank.gpu = nodes[acceptance.rank.rank].gpu
    # Ranks of a node say the same, so each remark is kept once.
    acceptance.remarks = [*dict.fromkeys(text for *_, texts in looks for text in texts)]
    values = {"gpus": [asdict(seen) for seen in nodes]}
    texts = [alike(block for _, block, _ in looks), *acceptance.remarks]
    return Finding("; ".join(texts), values)


def _look(rank: Rank) -> tuple[Inspection, str, list[str]]:
    """Return this rank's GPU, what equal GPUs have in common, and remarks."""
    versions = {"Python": sys.version.split()[0]}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    # A build without CUDA has neither, and is no error on an emulated GPU.
    if torch.version.cuda is not None:
        versions["CUDA"] = torch.version.cuda
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with open_gpu(gpu_text(rank.gpu, rank.device)) as gpu:
        seen = inspect(gpu)
    origin = "" if seen.origin == "measured" else f", {seen.origin}"
    clocks = next(reading.text for reading in seen.readings if reading.name == CLOCKS)
    installed = ", ".join(f"{name} {number}" for name, number in versions.items())
    remarks = [privilege(seen.gpu.removeprefix("dry-run:")), *seen.stale_leases, *surroundings()]
    # A dry run was asked for, so that it sets nothing is no remark.
    remarks += [text for text in seen.warnings if not text.startswith("nothing is set")]
    return seen, f"{seen.name}, driver {seen.driver}{origin}; clocks {clocks}; {installed}", remarks


# Clocks


def _check_clocks(acceptance: Acceptance) -> Finding:
    acceptance.need(acceptance.nodes, "node")
    locks = not acceptance.rank.read_only
    loads = acceptance.rank.everywhere(_run_load, locks, limit_s=_SLOW_S)
    seen: list[RankRehearsal] = [rehearsal for rehearsal, _ in loads]
    # A GPU that cannot be read or locked fails the check, and others are not looked at.
    for rehearsal in seen:
        if rehearsal.problems:
            raise GpuError(f"rank {rehearsal.rank}: {'; '.join(rehearsal.problems)}")
        if locks and not rehearsal.locks:
            raise GpuError(f"rank {rehearsal.rank}: {'; '.join(rehearsal.remarks)}")
    acceptance.runs = seen
    texts = []
    # After a reset the GPU must be as fast as before any lock, or the reset has not worked.
    for rehearsal, after_mhz in loads:
        ran = ", ".join(
            f"{'unlocked' if run.locked_mhz is None else run.locked_mhz} -> {run.achieved_mhz:.0f} "
            "MHz"
            for run in rehearsal.runs
        )
        if after_mhz is not None and _is_below(after_mhz, rehearsal.runs[0]):
            raise GpuError(
                f"rank {rehearsal.rank}: its GPU ran at {after_mhz:.0f} MHz after it was reset, "
                f"and at {rehearsal.runs[0].achieved_mhz:.0f} MHz before; run `planner reset --all`"
            )
        texts.append(ran if after_mhz is None else f"{ran}, reset -> {after_mhz:.0f} MHz")
    steps = sorted({si(rehearsal.counter_step_s or 0.0, "s", 2) for rehearsal in seen})
    not_checked = "" if locks else f"; locks: not checked, as {_READ_ONLY}"
    # What the first check has said already is not said again.
    remarks = {text for rehearsal in seen for text in rehearsal.remarks} - {*acceptance.remarks}
    remarks = {text for text in remarks if not text.startswith("nothing is set")}
    not_checked += "".join(f"; {text}" for text in sorted(remarks))
    return Finding(
        f"under a matrix product on all GPUs at once: {alike(texts)}; the energy counter moves "
        f"every {' or '.join(steps)}{not_checked}",
        {"ranks": [asdict(rehearsal) for rehearsal in seen]},
    )


def _run_load(rank: Rank, locks: bool) -> tuple[RankRehearsal, float | None]:
    text = rank.gpu
    device = rank.device
    if rank.is_emulated:  # measured in virtual time
        with open_gpu(text.removeprefix("dry-run:")) as gpu:
            assert isinstance(gpu, EmulatedGpu)
            text = gpu.simulated_text
    seen = rehearse_gpu(rank.rank, text, device, locks)
    return seen, unlocked_mhz(text, device) if seen.locks else None


def _is_below(achieved_mhz: float, top: LoadRun) -> bool:
    return achieved_mhz < 0.95 * top.achieved_mhz


# Latency


def _check_latency(acceptance: Acceptance) -> Finding:
    acceptance.refuse_to_set()
    gpus = [node.gpu for node in acceptance.need(acceptance.nodes, "node")]
    latency: Latency
    parallel: ParallelLatency | None
    latency, parallel = acceptance.rank.everywhere(_time_calls, gpus)[0]

    # Calls queue if several at once take longer, and then all GPUs of the node share a lock.
    acceptance.change = ClockChange(
        latency.call_p50_s,
        latency.settle_p50_s or 0.0,
        len(gpus) if parallel is not None and parallel.queue else 1,
    )
    text = "; ".join([*latency.texts, *([parallel.text] if parallel is not None else [])])
    # All ranks reduce while calls are timed, as they would in training.
    running = " while an all-reduce runs" if len(gpus) > 1 else ""
    values = {"call": asdict(latency), "at once": parallel and asdict(parallel)}
    return Finding(f"{text}{running}", values)


def _time_calls(rank: Rank, gpus: Sequence[str]) -> tuple[Latency, ParallelLatency | None] | None:
    """Time calls on rank 0 while all ranks reduce."""
    with rank.process_group():
        # One rank times all GPUs, and the others only reduce.
        if rank.rank:
            _reduce_until(Event(), rank)
            return None
        done = Event()
        reducing = in_background(lambda: _reduce_until(done, rank), "planner all-reduce")
        with ExitStack() as stack:
            # Other ranks end when this one says so, also if timing fails.
            stack.callback(reducing.result)
            stack.callback(done.set)
            opened = [stack.enter_context(open_gpu(text)) for text in gpus]
            stack.enter_context(lease_gpus(opened, power_limit=False))
            latency = measure_latency(opened[0])
            parallel = (
                measure_parallel_latency(opened, latency.call_p50_s) if len(opened) > 1 else None
            )
        return latency, parallel


def _reduce_until(done: Event, rank: Rank) -> None:
    """Reduce over all ranks until one of them is done."""
    device = rank.device
    while True:
        numbers = torch.full((_NUMBERS,), float(done.is_set()), device=device)
        dist.all_reduce(numbers)
        if numbers[0].item():
            return


# Neighbours


def _check_neighbours(acceptance: Acceptance) -> Finding:
    acceptance.need(acceptance.nodes, "node")
    if acceptance.rank.size == 1:
        raise NotCheckedError("one rank has no neighbours; start one for each GPU with torchrun")
    for connections in _CONNECTIONS:
        try:
            acceptance.rank.everywhere(
                _wait_for_neighbours,
                limit_s=_SLOW_S,
                environment={"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)},
            )
        except RankError as error:
            raise RankError(f"with CUDA_DEVICE_MAX_CONNECTIONS={connections}: {error}") from error
    tried = " and ".join(map(str, _CONNECTIONS))
    return Finding(
        f"all neighbours wait for each other's messages, both ways, with "
        f"CUDA_DEVICE_MAX_CONNECTIONS {tried}"
    )


def _wait_for_neighbours(rank: Rank) -> None:
    """Wait for a message of the rank after this one, then of the one before."""
    order = range(rank.size)
    with rank.process_group():
        for ranks in (order, order[::-1]):
            with (
                RankGroup() as group,
                connect_neighbour(group, [ranks], rank.device) as neighbour,
            ):
                neighbour.block(_BLOCKED_S)


# Training


@dataclass
class _Trainings:
    """A rank's trainings without the runtime and with it."""

    plain: list[Trained] = field(default_factory=list)
    by_plan: list[Trained] = field(default_factory=list)
    #: Calls that wait for the device in each training, in turn; empty without CUDA.
    waits: list[int] = field(default_factory=list)
    kernels: list[Span] = field(default_factory=list)  #: What the GPU ran in the last one
    problem: str | None = None  #: Why clocks were not set


def _check_training(acceptance: Acceptance) -> Finding:
    acceptance.need(acceptance.nodes, "node")
    plan = acceptance.rank.folder / "made-up-plan.yaml"
    acceptance.rank.everywhere(_make_up, plan)
    folder = acceptance.rank.folder / "dry-run"
    # Many changes a second, as the plan that was made up changes at every computation.
    options = {"dry_run": True, "record": folder, "max_changes_per_s": 1e4}
    modes = _trainings(acceptance, plan, options, in_turn=True)
    marks_s, acceptance.times = _recorded(folder)
    # Losses were compared while training, so only times are left.
    times_s = [[run.time_s for run in runs] for runs in (modes[0].plain, modes[0].by_plan)]
    plain_s, planned_s = map(median, times_s)
    text = (
        f"{acceptance.layout}: with the runtime, {100 * plain_s / planned_s:.1f} % of the "
        "throughput without, "
        "and equal losses; "
    )
    # Without a trace of kernels, nothing is known of that rank's marks.
    errors_s = [
        mark_error_s(marks_s[rank], mode.kernels) if mode.kernels else None
        for rank, mode in enumerate(modes)
    ]
    values = {
        "times_s": times_s,
        "throughput_ratio": plain_s / planned_s,
        "waits": [mode.waits[-2:] for mode in modes],
        "mark_error_s": errors_s,
    }
    # Without CUDA no call waits, and marks are of the CPU alone.
    if not modes[0].waits:
        text += "waiting and marks: not checked, as there is no CUDA here"
        return Finding(text, values)
    # Of the last two trainings one was without the runtime and one with it.
    more = max(after - before for before, after in (mode.waits[-2:] for mode in modes))
    if more > 0:
        raise RankError(f"with the runtime {more} calls more wait for the GPU")
    # What the noise hides is said, so that a good figure is not taken for proof.
    text += throughput_problem(*times_s)
    known_s = [error_s for error_s in errors_s if error_s is not None]
    if not known_s:
        marks = "not checked, as torch's profiler does not say when kernels ran"
    elif max(known_s) > MARK_ERROR_S:
        raise RankError(f"a mark is {si(max(known_s), 's')} inside of what the GPU runs")
    else:
        marks = f"right within {si(max(known_s), 's')}"
    return Finding(f"{text}no call more waits for the GPU; marks: {marks}", values)


def throughput_problem(plain_s: Sequence[float], planned_s: Sequence[float]) -> str:
    """Return why it cannot be told whether the runtime takes more than `ADDED`; empty if it does
    not.

    Args:
        plain_s: Seconds of an iteration of each training without the runtime.
        planned_s: The same with it, in turn with the others.

    Raises:
        RankError: If it does.
    """
    if median(planned_s) * (1 - ADDED) <= median(plain_s):
        return ""
    plain, planned = (", ".join(si(time_s, "s") for time_s in row) for row in (plain_s, planned_s))
    seen = f"iterations took {plain} without the runtime, and {planned} with it"
    is_steady = max(plain_s) < min(plain_s) * (1 + ADDED)
    if is_steady or min(planned_s) * (1 - ADDED) > max(plain_s):
        raise RankError(f"the runtime takes more than {ADDED:.0%} of the throughput: {seen}")
    return f"the difference: not checked, as equal trainings differ too: {seen}; "


def _trainings(
    acceptance: Acceptance, plan: Path, options: Mapping[str, Any], *, in_turn: bool
) -> list[_Trainings]:
    """Train without the runtime and with it on all ranks; return each rank's trainings.

    Raises:
        RankError: If the losses with the runtime are others.
    """
    trainings: list[_Trainings] = acceptance.rank.everywhere(
        _train, plan, options, in_turn, limit_s=_SLOW_S, environment=DETERMINISTIC
    )
    for trained in trainings:
        if _are_others(trained.plain):
            raise RankError("the losses of equal trainings differ, even without the runtime")
        if _are_others((*trained.plain, *trained.by_plan)):
            raise RankError("the losses with the runtime are others than without")
    return trainings


def _are_others(trainings: Sequence[Trained]) -> bool:
    """Whether the trainings have different losses, as far as all of them went."""
    iterations = min(len(run.losses) for run in trainings)
    return len({run.losses[:iterations] for run in trainings}) > 1


def _train(rank: Rank, plan: Path, options: Mapping[str, Any], in_turn: bool) -> _Trainings:
    """Train without the runtime and by a plan; several times in turn on CUDA."""
    trainings = _Trainings()
    on_cuda = rank.device.type == "cuda"
    iterations = _BY_PLAN
    # In turn, several trainings of a few iterations tell more than one of many.
    if in_turn:
        iterations = 10 if on_cuda else 3
    # In turn, without and with, so that a steady drift counts little.
    turns = (False, True, True, False, False, True) if in_turn and on_cuda else (False, True)
    with rank.process_group(), open_gpu(rank.gpu) as gpu:
        for by_plan in turns:
            # A new training each time, so that all begin with equal weights.
            training = Training(rank)
            with training.running(plan if by_plan else None, **options) as runtime:
                runs = trainings.by_plan if by_plan else trainings.plain
                runs.append(training.train(iterations, gpu))
                if in_turn and on_cuda:
                    waited, trainings.kernels = _traced(training)
                    trainings.waits.append(waited)
                trainings.problem = None if runtime is None else runtime.problem
    return trainings


def _make_up(rank: Rank, path: Path) -> None:
    """Write a plan by which every computation requests another clock than the one before."""
    with open_gpu(rank.gpu) as gpu:
        high_mhz, low_mhz, *_ = gpu.supported_clocks_mhz
    rows = {
        Key(stage, kind): (Measurement(clock_mhz, time_s, time_s),)
        for stage in range(STAGES)
        for kind, clock_mhz, time_s in (("F", high_mhz, 1.0), ("B", low_mhz, 2.0))
    }
    _solve(rank, Profile(rows, 0.0), path)


def _traced(training: Training) -> tuple[int, list[Span]]:
    """Return how often CUDA was waited for, and when the GPU computed, in seconds since the epoch;
    empty if torch's profiler does not say it.
    """
    # What was queued before the trace is none of its kernels.
    torch.cuda.synchronize(training.device)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(_PROFILED):
            training.iterate()
    events = trace.profiler.kineto_results.events()
    # Names are those of CUDA's calls that wait, such as cudaStreamSynchronize.
    waits = sum(event.name().startswith("cu") and "ynchronize" in event.name() for event in events)
    spans = [
        (event.start_ns() / 1e9, (event.start_ns() + event.duration_ns()) / 1e9)
        # Copies and collectives are no computations, so marks need not lie around them.
        for event in events
        if event.device_type() == torch.autograd.DeviceType.CUDA
        and not any(name in event.name().lower() for name in ("nccl", "memset", "memcpy"))
    ]
    return waits, spans


def mark_error_s(marks: Iterable[float], kernels: Sequence[Span]) -> float | None:
    """Return how far the worst mark is inside what the GPU ran; 0 if all are between kernels.

    Args:
        marks: When computations began and ended, in seconds.
        kernels: What the GPU ran, in seconds of the same clock.

    Returns:
        Seconds; None if no mark is in the time of the kernels.
    """
    begin_s = min(kernels)[0]
    end_s = max(end for _, end in kernels)
    inside = [at_s for at_s in marks if begin_s <= at_s <= end_s]
    if not inside:
        return None
    return max(
        max((min(at_s - first, last - at_s) for first, last in kernels), default=0.0)
        for at_s in inside
    )


def _recorded(folder: Path) -> tuple[dict[int, list[float]], Times]:
    """Return when the last recorded computations of each rank began and ended, and the median time
    of each kind.
    """
    marks: dict[int, list[float]] = {}
    durations: dict[Key, list[float]] = {}
    for record in Run.load(folder).ranks:
        of_rank = marks[record.rank] = []
        for computed in (computed for row in record.computations.values() for computed in row):
            key = Key(computed.computation.stage, computed.computation.kind)
            durations.setdefault(key, []).append(computed.duration_s)
            of_rank += [computed.begin_s, computed.end_s]
    return marks, {key: median(values) for key, values in durations.items()}


# The profile


def _check_profile(acceptance: Acceptance) -> Finding:
    acceptance.need(acceptance.times, "training")
    path = acceptance.rank.folder / "profile.yaml"
    peaks_of_ranks = acceptance.rank.everywhere(
        _profile, path, limit_s=_SLOW_S, environment=DETERMINISTIC
    )
    acceptance.profile = profile = Profile.load(path)
    rows = {key: points[0] for key, points in profile.measurements.items()}
    beside = {
        f"{key.stage} {key.name}": (row.time_s, acceptance.times[key])
        for key, row in rows.items()
        if key in acceptance.times
    }
    worst = max(beside, key=lambda name: abs(beside[name][0] / beside[name][1] - 1))
    alone_s, trained_s = beside[worst]
    clocks = sorted(
        {point.clock_mhz for points in profile.measurements.values() for point in points}
    )
    # Peaks before the profile and in it; 0 where the device does not count.
    before, after = (
        max((peaks[number] for peaks in peaks_of_ranks), default=0) for number in (0, 1)
    )
    memory = f"; peak memory {si(before, 'B')} before and {si(after, 'B')} after" if after else ""
    observed = f"; clocks: not checked, as {_READ_ONLY}" if acceptance.rank.read_only else ""
    # Nothing is waited for on one rank, so the power of waiting is that of an idle GPU.
    if acceptance.layout.ranks < STAGES:
        observed += "; the power of waiting: not checked, as no stage has a neighbour"
    return Finding(
        f"{len(profile.measurements)} computations at {len(clocks)} clock{'s' * (len(clocks) > 1)} "
        f"({clocks[-1]} to {clocks[0]} MHz); beside the iteration they differ by at most "
        f"{100 * (alone_s / trained_s - 1):+.1f} % (stage {worst}: {si(alone_s, 's')} and "
        f"{si(trained_s, 's')}){memory}{observed}",
        {"beside": beside, "clocks_mhz": clocks, "peak_bytes": [before, after]},
    )


def _profile(rank: Rank, path: Path) -> tuple[int, int]:
    """Profile the training; return the peak memory of an iteration before it and of it, bytes."""
    control = "observed" if rank.read_only else "clock"
    minutes: float | None = 1.0
    if rank.read_only:
        minutes = None
    elif rank.is_emulated:
        minutes = 0.2
    settings = SweepSettings(control=control, window_s=1.0, cool_down_s=1.0, minutes=minutes)
    with rank.process_group():
        training = Training(rank)
        # Until a GPU at its power limit has slowed down.
        training.train(20 if rank.device.type == "cuda" else 1)
        before = _peak(training)
        waiting_w = None
        if Layout.of(rank.size).ranks < STAGES:  # without a neighbour to wait for
            with open_gpu(rank.gpu) as gpu:
                waiting_w = gpu.power_w()
        with profile_pipeline(
            training.engine,
            gpu=rank.gpu,
            output=path,
            settings=settings,
            blocking_power_w=waiting_w,
        ) as profiling:
            training.iterate()
        if profiling.problem is not None:
            raise GpuError(profiling.problem)
        return before, _peak(training)


def _peak(training: Training) -> int:
    if training.device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(training.device)
    torch.cuda.reset_peak_memory_stats(training.device)
    return int(peak)


# The plan


def _check_plan(acceptance: Acceptance) -> Finding:
    acceptance.refuse_to_set()
    profile = acceptance.need(acceptance.profile, "profile")
    path = acceptance.rank.folder / "plan.yaml"
    # Planned with what clock changes cost here, if that was measured.
    if acceptance.change is not None:
        profile = replace(profile, clock_change=acceptance.change)
    acceptance.rank.everywhere(_solve, profile, path)
    acceptance.plan = path
    predicted = Plan.load(path)
    trainings = _trainings(
        acceptance, path, {"record": acceptance.rank.folder / "run"}, in_turn=False
    )
    # A plan that was not followed is no measurement of it.
    if problems := {trained.problem for trained in trainings if trained.problem is not None}:
        raise GpuError("; ".join(sorted(problems)))
    before = [trained.plain[0] for trained in trainings]
    by_plan = [trained.by_plan[0] for trained in trainings]
    pipelines = acceptance.layout.pipelines
    rows = [
        _beside(
            "full clocks", before, predicted.baseline_time_s, predicted.baseline_energy_j, pipelines
        ),
        _beside("by the plan", by_plan, predicted.time_s, predicted.energy_j, pipelines),
    ]
    texts = [
        f"{row['name']} {si(row['planned_s'], 's')} and {si(row['planned_j'], 'J')} are predicted, "
        f"{si(row['time_s'], 's')} and {si(row['energy_j'], 'J')} measured"
        for row in rows
    ]
    saved = [1 - rows[1][key] / rows[0][key] for key in ("planned_j", "energy_j")]
    return Finding(
        f"{_BY_PLAN} iterations, losses equal to the last bit; {'; '.join(texts)}; saved "
        f"{100 * saved[1]:.1f} % of {100 * saved[0]:.1f} % predicted",
        {"rows": rows},
    )


def _beside(
    name: str, runs: Sequence[Trained], planned_s: float, planned_j: float, pipelines: int
) -> dict[str, Any]:
    return {
        "name": name,
        "planned_s": planned_s,
        "time_s": max(run.time_s for run in runs),
        "planned_j": pipelines * planned_j,
        "energy_j": sum(run.energy_j or 0.0 for run in runs),
    }


def _solve(rank: Rank, profile: Profile, path: Path) -> None:
    """Solve on rank 0, and write the plan that is as fast as all clocks at maximum."""
    if rank.rank:
        return
    count = size_on(rank.device).microbatches
    if Layout.of(rank.size).ranks == STAGES:
        frontier = solve(profile, "1f1b", microbatches=count)
    else:
        frontier = solve(
            profile,
            "interleaved-1f1b",
            microbatches=count,
            virtual_stages=STAGES,
            ranks=1,
            group=1,
        )
    frontier.plan_for(frontier.baseline_time_s).save(path)


# Deaths


def _check_deaths(acceptance: Acceptance) -> Finding:
    acceptance.refuse_to_set()
    acceptance.need(acceptance.runs, "clocks")
    acceptance.need(acceptance.plan, "plan")
    rank = acceptance.rank
    uuids = [seen.uuid for seen in acceptance.nodes]
    # A training of its own for each death, as the first one goes on and the second does not.
    with _training_by_plan(acceptance) as iterations:
        begin_s = time.monotonic()
        begin = iterations()
        # One controller serves all GPUs of the node, so rank 0 kills it for all.
        if rank.rank == 0:
            _kill(_owners(uuids[0])[:1])
        # The guardian outlives its controller, and must reset what that had set.
        reset_s = _all(
            rank,
            _after(lambda: not _records(uuids), begin_s),
            "was not reset by the guardian of a killed controller; run `planner reset`",
        )
        # Training needs no controller, so it must go on at full clocks.
        goes_on = _after(lambda: iterations() > begin + 1, begin_s)
        _all(rank, goes_on, "trains no longer, as its controller was killed")
    with _training_by_plan(acceptance):
        if rank.rank == 0:
            # Without guardian and controller nobody resets, so a record is all that is left.
            _kill(_owners(uuids[0])[::-1])  # the guardian first, so that it resets nothing
        rank.gather(None)
    # A command of its own, as a user would type it.
    if rank.rank == 0:
        command = [sys.executable, "-m", "perseus_planner", "reset"]
        subprocess.run(command, env=child_environment(), stdout=subprocess.DEVNULL, check=False)
    rank.gather(None, _LEASED_S)
    if left := _records(uuids):
        raise GpuError(f"`planner reset` left {left[0]}; run it again, and see what it says")
    clocks_mhz = rank.everywhere(_look_unlocked)
    # No record left does not yet mean that no clock is locked, so GPUs run under load again.
    for seen, clock_mhz in zip(acceptance.runs, clocks_mhz, strict=True):
        if _is_below(clock_mhz, seen.runs[0]):
            raise GpuError(f"{seen.gpu} still runs at {clock_mhz:.0f} MHz; run `planner reset`")
    return Finding(
        f"the controller was killed: its guardian reset {len(uuids)} GPU{'s' * (len(uuids) > 1)} "
        f"within {si(max(reset_s), 's')}, and the training went on; all were killed at once: "
        "`planner reset` reset them, and none is locked",
        {"reset_s": reset_s, "clocks_mhz": clocks_mhz},
    )


@contextmanager
def _training_by_plan(acceptance: Acceptance) -> Iterator[Callable[[], int]]:
    """Train by the plan on all ranks, inside the block; yield how many iterations this rank has run
    once all GPUs are leased. All processes of the training are killed on leaving.
    """
    rank = acceptance.rank
    progress = rank.folder / f"progress-{rank.rank}"

    def iterations() -> int:
        with suppress(FileNotFoundError, ValueError):
            return int(progress.read_text())
        return 0

    process, _ = rank.start(_train_on, acceptance.plan, progress)
    # Also after an error, as the training never ends by itself.
    try:
        uuid = acceptance.nodes[rank.rank].uuid
        # Leased and begun, so that there is something to reset.
        begun = _after(lambda: bool(_records([uuid])) and iterations() > 1, 0.0, _LEASED_S)
        _all(rank, begun, "was not leased by a training")
        yield iterations
    finally:
        process.kill()
        process.join()
        progress.unlink(missing_ok=True)


def _train_on(rank: Rank, plan: Path, progress: Path) -> None:
    """Train by a plan until this process is killed; write how many iterations have run."""
    with rank.process_group():
        training = Training(rank)
        with training.running(plan):
            for number in count(1):
                training.iterate()
                progress.write_text(str(number))


def _records(uuids: Collection[str]) -> list[FoundRecord]:
    return [record for record in read_records()[0] if record.uuid in uuids]


def _owners(uuid: str) -> list[int]:
    """Return the process that holds the lease of a GPU, and its guardian."""
    (record,) = _records([uuid])
    children = psutil.Process(record.owner.pid).children(recursive=True)
    return [record.owner.pid, *(child.pid for child in children)]


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _after(is_so: Callable[[], bool], begin_s: float, limit_s: float = _RESET_S) -> float | None:
    """Wait until something is so; return how long after `begin_s` that was, None if too long."""
    until_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > until_s:
            return None
        time.sleep(_POLL_S)
    return time.monotonic() - begin_s


def _all(this: Rank, took_s: float | None, problem: str) -> list[float]:
    """Return what all ranks took; raise an error if it was too long on one."""
    everyone: list[Any] = this.gather(took_s, _LEASED_S)
    for rank, other_s in enumerate(everyone):
        if other_s is None:
            raise GpuError(f"the GPU of rank {rank} {problem}")
    return everyone


def _look_unlocked(rank: Rank) -> float:
    """Return the clock at which the GPU runs under load, MHz."""
    if rank.is_emulated:
        with open_gpu(rank.gpu) as gpu:
            return gpu.clock_mhz()
    return unlocked_mhz(rank.gpu, rank.device)


CHECKS: tuple[Check[Acceptance], ...] = (
    Check("node", _check_node),
    Check("clocks", _check_clocks),
    Check("latency", _check_latency),
    Check("neighbours", _check_neighbours),
    Check("training", _check_training),
    Check("profile", _check_profile),
    Check("plan", _check_plan),
    Check("deaths", _check_deaths),
)
REHEARSED = ("node", "clocks", "neighbours")
"""What a rehearsal checks: what a profile needs, in about a minute, on any number of nodes."""
