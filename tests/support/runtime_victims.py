"""Trains under a plan until a file asks it to stop, or until it is killed.

As a script it runs as one rank, under a launcher; or, called with `serve`, it starts whole jobs,
launcher included, from one process that has imported all that they need.
"""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch.distributed as dist
from runtime_training import FAST, Torch, Watch, any_rank, plan_of, schedule_of

from perseus_planner.base.files import replacing
from perseus_planner.runtime import Runtime, attachment, planner_runtime, rendezvous

PLAN = plan_of(schedule_of("1f1b", 2, 4))
VICTIM_GPU = "emulated:a100-sxm?call=1ms"
SLOW_S = 0.02  #: how long a computation waits for its clock; it need not come


def train(folder: str) -> None:
    """Train until a file `stop` exists; without a plan if a file `unplanned` does."""
    os.environ["PLANNER_STATE_DIR"] = f"{folder}/state"
    # Do not wait long for ranks that are killed at the start.
    rendezvous.RENDEZVOUS_S, attachment.ATTACH_S = 3.0, 10.0
    dist.init_process_group("gloo")
    with replacing(Path(folder, f"met-{dist.get_rank()}")) as file:
        file.write(str(os.getpid()).encode())
    watch = Watch(VICTIM_GPU)
    pipeline = Torch("1f1b", 4, lambda *computation: _follow(watch, runtime, *computation))
    stop = Path(folder, "stop")
    plan = None if Path(folder, "unplanned").exists() else PLAN
    with planner_runtime(
        pipeline.engine, plan=plan, gpu=VICTIM_GPU, max_changes_per_s=FAST
    ) as runtime:
        if not os.fork():  # as a loader of data is, and lives on when its rank is killed
            while not stop.exists():
                time.sleep(0.05)
            os._exit(0)
        while not any_rank(stop.exists()):
            pipeline.step()
    os._exit(0)  # without waiting for ranks that may be gone


def _follow(watch: Watch, runtime: Runtime, stage: int, kind: str, microbatch: int) -> None:
    """Take some time for a computation, so that clocks can be set."""
    deadline_s = time.monotonic() + SLOW_S
    wanted_mhz = None if runtime.plan is None else runtime.plan.clocks[f"{stage}{kind}{microbatch}"]
    while (
        watch.gpu.locked_mhz != wanted_mhz
        and runtime.problem is None
        and time.monotonic() < deadline_s
    ):
        time.sleep(0.0005)


def _launch(request: dict[str, str]) -> None:
    """Start two ranks and end with them, like a launcher; if one fails, end the others."""
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    folder, ranks = Path(request["folder"]), []
    os.chdir(folder)
    for rank in range(2):
        child = os.fork()
        if not child:
            os.dup2(os.open(f"stderr-{rank}", os.O_WRONLY | os.O_CREAT), 2)
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
            }
            os.environ.update(variables, MASTER_PORT=request["port"])
            try:
                train(str(folder))
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        ranks.append(child)
    _, status = os.wait()
    if status:
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
    os.wait()
    os._exit(0)


def _serve() -> None:
    """For each line on standard input, start a launcher and print its process number."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            try:
                _launch(json.loads(line))
            finally:
                os._exit(1)
        print(child, flush=True)


if __name__ == "__main__":
    arguments = [
        each for each in sys.argv[1:] if not each.startswith("--local_rank")
    ]  # passed by DeepSpeed's launcher
    if arguments == ["serve"]:
        _serve()
    else:
        train(*arguments)
