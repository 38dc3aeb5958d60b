"""Programs of ranks on which something fails while they train under a plan."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.distributed as dist
from gpu_owners import CONTROLLER, planner_processes
from runtime_training import (
    FAST,
    GPU,
    LONG_S,
    Torch,
    WarningLog,
    Watch,
    any_rank,
    equal,
    every_rank,
    job,
    outcome,
    plan_of,
    planned,
    schedule_of,
    trained,
)

from perseus_planner.base.loops import LONGEST_PAUSE_S, Backoff
from perseus_planner.runtime import Runtime, background, options, planner_runtime, telemetry
from perseus_planner.runtime.switching import Rejection

PLAN = plan_of(schedule_of("1f1b", 2, 4))


def no_clocks_any_more(state: str) -> None:
    """Let failures end the setting of clocks on all ranks."""
    with job(state) as result:
        warning_log = WarningLog()
        result["killed"] = _survived(
            warning_log, lambda _: _signal_controller(state, signal.SIGKILL)
        )
        with mock.patch.object(background, "HUNG_S", 0.5):
            result["stopped"] = _survived(
                warning_log, lambda _: _signal_controller(state, signal.SIGSTOP)
            )
        result["lost"] = _survived(warning_log, lambda _: None, f"{GPU}&fault=lost@200calls")
        result["fault"] = _survived(warning_log, _break_background)
        result["lost"]["locked_mhz later"] = Watch(f"{GPU}&fault=lost@200calls").gpu.locked_mhz


def fewer_changes(state: str) -> None:
    """Train on a node that makes too few changes, until a rank makes fewer."""
    with job(state) as result:
        result["slow"] = _survived(WarningLog(), lambda _: None, max_changes_per_s=20.0)


def _survived(
    warning_log: WarningLog,
    inject: Callable[[Runtime], None],
    gpu: str = GPU,
    *,
    max_changes_per_s: float = FAST,
) -> dict[str, Any]:
    """Train, let something fail, go on until every rank knows, or one makes fewer changes, and
    then two iterations.
    """
    watch = Watch(gpu)
    pipeline, losses = Torch("1f1b", 4, watch), []
    with planned(pipeline, PLAN, gpu=gpu, max_changes_per_s=max_changes_per_s) as runtime:
        is_fast = max_changes_per_s == FAST
        watch.planned = (lambda: runtime.plan) if is_fast else None
        steps = 2
        for _ in range(steps):
            losses += pipeline.step()
        inject(runtime)
        watch.planned, watch.takes_s = None, 0.005
        while not every_rank(runtime.problem is not None) and every_rank(
            not _has_fewer_changes(runtime)
        ):
            losses += pipeline.step()
            steps += 1
        watch.takes_s = 0.0
        if is_fast and "lost" not in gpu:  # whose clock stays what it was
            watch.planned = lambda: None
        for _ in range(2):
            losses += pipeline.step()
    expected = trained(Torch("1f1b", 4), steps + 2)
    return {
        "equal": equal(expected, [*losses, *pipeline.state()]),
        **outcome(runtime, warning_log, watch),
    }


def _has_fewer_changes(runtime: Runtime) -> bool:
    return runtime._follower._reduced_program is not None


def clocks_come_back(state: str) -> None:
    """Kill the controller, train until a new one sets all clocks, and do so again."""
    resumed: list[None] = []
    resume = background.BackgroundWork._resume

    def resume_noted(this: background.BackgroundWork, key: str) -> None:
        was_lost = key in this._problems
        resume(this, key)
        if was_lost:
            resumed.append(None)

    short = mock.patch.object(Backoff.__init__, "__defaults__", (0.1, LONGEST_PAUSE_S, None))
    with (
        job(state) as result,
        short,
        mock.patch.object(background.BackgroundWork, "_resume", resume_noted),
    ):
        warning_log, watch = WarningLog(), Watch()
        pipeline = Torch("1f1b", 4, watch)
        losses: list[list[Any]] = []
        with planned(pipeline, PLAN) as runtime:
            for times in (1, 2):
                watch.planned, watch.takes_s = (lambda: runtime.plan), 0.0
                losses.append(pipeline.step())
                dist.barrier()
                _signal_controller(state, signal.SIGKILL)
                watch.planned, watch.takes_s = None, 0.005
                while not every_rank(len(resumed) == times):
                    losses.append(pipeline.step())
                losses.append(
                    pipeline.step()
                )  # begins with the plan, after which every clock is in force
            watch.planned, watch.takes_s = (lambda: runtime.plan), 0.0
            losses.append(pipeline.step())
        expected = trained(Torch("1f1b", 4), len(losses))
        result["equal"] = equal(
            expected, [*(loss for step in losses for loss in step), *pipeline.state()]
        )
        result.update(outcome(runtime, warning_log, watch))


def _signal_controller(state: str, number: signal.Signals) -> None:
    if dist.get_rank() == 0:
        planner_processes(state, CONTROLLER)[-1].send_signal(number)


def _break_background(runtime: Runtime) -> None:
    def look() -> None:
        raise ValueError("a test breaks it")

    runtime._follower.look = look


def no_permission_any_more(state: str, environment: str, script: str) -> None:
    """Let the driver refuse to set clocks from some point on."""
    os.environ.update(json.loads(environment))
    gpu = f"nvml:{os.environ['RANK']}"
    with job(state) as result, mock.patch.object(options, "gpu_text", return_value=gpu):
        warning_log, watch = WarningLog(), Watch()
        watch.takes_s = 0.005
        pipeline = Torch("1f1b", 4, watch)
        plan = plan_of(schedule_of("1f1b", 2, 4), gpu=None)
        with planned(pipeline, plan, gpu=None) as runtime:
            pipeline.step()
            dist.barrier()
            if dist.get_rank() == 0:
                with Path(script).open("a") as file:
                    file.write("* error nvmlDeviceSetGpuLockedClocks 4\n")
            while not every_rank(runtime.problem is not None):
                pipeline.step()
            pipeline.step()
        result.update(outcome(runtime, warning_log))


def clocks_go_on(state: str) -> None:
    """Failures outside the clocks, or a rank that leaves, do not affect the clocks of others."""
    with job(state) as result:
        warning_log = WarningLog()
        with mock.patch.object(telemetry, "WRITTEN_AFTER_S", 0.1):
            result["trace removed"] = _recorded(warning_log, Path("removed"), _removed)
            result["trace full"] = _recorded(warning_log, Path("full"), _full)
        result["left early"] = _left_early(warning_log)
        result["forked"] = _forked(warning_log)
        with mock.patch.object(background, "HUNG_S", 1.0):
            result["suspended"] = _suspended(warning_log, state)


def _recorded(
    warning_log: WarningLog, folder: Path, spoilt: Callable[[Path], Any]
) -> dict[str, Any]:
    """Make the run folder unwritable during training."""
    watch = Watch()
    pipeline = Torch("1f1b", 4, watch)
    with planned(pipeline, PLAN, record=folder) as runtime, ExitStack() as stack:
        watch.planned = lambda: runtime.plan
        while not every_rank(bool(list(folder.glob(f"*/iterations-{dist.get_rank()}.csv")))):
            pipeline.step()
        stack.enter_context(spoilt(folder))
        dist.barrier()
        texts: list[str] = []
        while not any_rank(bool(texts)):
            pipeline.step()
            texts += warning_log.taken()
        before = runtime.iterations[-1].iteration
        while not every_rank(runtime.iterations[-1].iteration > before + 2):
            pipeline.step()
    ended = outcome(runtime, warning_log, watch)
    return {**ended, "warnings": texts + ended["warnings"]}


@contextmanager
def _removed(folder: Path) -> Iterator[None]:
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    yield


@contextmanager
def _full(folder: Path) -> Iterator[None]:
    """Limit the size of files to that of this one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    (path,) = folder.glob(f"*/iterations-{dist.get_rank()}.csv")
    size = -1
    while path.stat().st_size != size:  # rows may be written meanwhile
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 64, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def _left_early(warning_log: WarningLog) -> dict[str, Any]:
    """Let rank 1 leave the runtime and train on, with too many open files for `select`."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, most))  # many systems allow 1,024
    files = [os.dup(2) for _ in range(1100)]
    watch = Watch()
    pipeline = Torch("1f1b", 4, watch)
    with ExitStack() as stack:
        runtime = stack.enter_context(planned(pipeline, PLAN))
        watch.planned = lambda: runtime.plan
        pipeline.step()
        if dist.get_rank() == 1:
            stack.close()
            watch.planned = lambda: None
            assert isinstance(runtime.switch_to(PLAN).outcome, Rejection)
        while not every_rank(len(runtime.iterations) > 2 or dist.get_rank() == 1):
            pipeline.step()
    for file in files:
        os.close(file)
    return outcome(runtime, warning_log, watch)


def _forked(warning_log: WarningLog) -> dict[str, Any]:
    """Fork during training: one child leaves the block by an exception, one outlives it."""
    watch = Watch()
    pipeline = Torch("1f1b", 4, watch)
    stays = 0
    try:
        with planned(pipeline, PLAN) as runtime:
            watch.planned = lambda: runtime.plan
            pipeline.step()
            stays = os.fork()
            if not stays:
                signal.pause()
            leaves = os.fork()
            if not leaves:
                raise KeyError  # noqa: TRY301
            assert os.waitpid(leaves, 0)[1] == 0
            pipeline.step()
            pipeline.step()
    except KeyError:
        os._exit(0)
    ended = outcome(runtime, warning_log, watch)
    os.kill(stays, signal.SIGKILL)
    os.waitpid(stays, 0)
    return ended


def _suspended(warning_log: WarningLog, state: str) -> dict[str, Any]:
    """Suspend the whole job for longer than a controller may be silent; the controller continues
    last.
    """
    watch = Watch()
    pipeline = Torch("1f1b", 4, watch)
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    with planned(pipeline, PLAN) as runtime:
        watch.planned = lambda: runtime.plan
        pipeline.step()
        dist.barrier()
        if dist.get_rank() == 0:
            _suspend([planner_processes(state, CONTROLLER)[-1].pid, *(int(pid) for pid in pids)])
        dist.barrier()
        for _ in range(3):
            pipeline.step()
    return outcome(runtime, warning_log, watch)


def _suspend(pids: list[int]) -> None:
    """Suspend processes from a child, because this process is one of them."""
    child = os.fork()
    if not child:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        for pid in reversed(pids):
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.waitpid(child, 0)


def store_gone(state: str) -> None:
    """Kill the process that holds the job's store and is not a rank."""
    os.environ["PLANNER_STATE_DIR"] = state
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    host = _host(port) if rank == 0 else 0
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LONG_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    warning_log, watch = WarningLog(), Watch()
    pipeline = Torch("1f1b", 4, watch)
    with planned(pipeline, PLAN) as runtime:
        watch.planned = lambda: runtime.plan
        pipeline.step()
        dist.barrier()
        if rank == 0:
            os.kill(host, signal.SIGKILL)
        while not any_rank(
            runtime._follower.agreement.lost is not None
        ):  # that of the rank that looks
            pipeline.step()
        refused = runtime.switch_to(PLAN).wait(LONG_S)
        pipeline.step()
    result = {"refused": str(refused), **outcome(runtime, warning_log, watch)}
    print(json.dumps(result), flush=True)
    os._exit(0)  # torch would talk to the store on exit


def _host(port: int) -> int:
    """Fork a process that holds the store."""
    child = os.fork()
    if not child:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        while store:
            signal.pause()
    return child


# Ranks that end or come later than rank 0, which holds the store


def _begin_together(state: str) -> Callable[[], None]:
    """Begin, and return a function in which all ranks but 0 wait until rank 0 has ended, for
    four seconds at most.
    """
    os.environ["PLANNER_STATE_DIR"] = state
    dist.init_process_group("gloo")
    pids = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(pids, torch.tensor([os.getpid()]))
    first = psutil.Process(int(pids[0]))

    def stay() -> None:
        deadline_s = time.monotonic() + 4.0
        while (
            first.is_running()
            and first.status() != psutil.STATUS_ZOMBIE
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.01)

    return (lambda: None) if dist.get_rank() == 0 else stay


def trains(state: str) -> None:
    """Train; the ranks other than 0 end later, and use the store until then."""
    stay, count = _begin_together(state), dist.get_world_size()
    pipeline, plan = Torch("1f1b", count), plan_of(schedule_of("1f1b", count, count))
    with planner_runtime(pipeline.engine, plan=plan, gpu=GPU) as runtime:
        for _ in range(3):
            pipeline.step()
        stay()
        if dist.get_rank() > 0:
            runtime.switch_to(plan).wait(60.0)
    os._exit(0)


def has_no_plan(state: str) -> None:
    """Have no plan on rank 0; the others come later."""
    stay, engine = _begin_together(state), Torch("1f1b", 3).engine
    stay()
    with planner_runtime(engine, plan="absent.yaml", gpu=GPU):
        pass
