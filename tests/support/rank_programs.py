"""Functions that the ranks of tests run; launching.py starts them by name."""
# ruff: noqa: TID253 - the process in which this runs is there for torch

from __future__ import annotations

import json
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from importlib import import_module
from itertools import count, product
from pathlib import Path
from runpy import run_path
from threading import Event
from typing import Any
from unittest import mock

import tiny_training
import torch
import torch.distributed as dist
from tiny_training import Torch
from torch import nn
from torch.distributed import pipelining
from torch.utils._python_dispatch import TorchDispatchMode

from perseus_planner.base.errors import EndedElsewhere, PlannerError, UsageError
from perseus_planner.cli import main
from perseus_planner.engines import engine_of
from perseus_planner.engines.recording import LossOfSteps, Recording
from perseus_planner.engines.torch_state import tensors
from perseus_planner.profiler.build import profile_stages
from perseus_planner.profiler.pipeline import profile_pipeline
from perseus_planner.profiler.ranks.group import RankGroup, StageGroup, process_group
from perseus_planner.profiler.ranks.neighbours import connect_neighbour
from perseus_planner.profiler.sweep import SweepSettings

OBSERVED = SweepSettings(control="observed")
GPU = "simulated:a100-sxm"
WIDTH = 16


def build_stage(stage: int, stages: int, tensor_parallel: int) -> Any:
    """Build one linear layer with the tensor rank's share of the width."""
    module = nn.Linear(WIDTH, WIDTH // tensor_parallel)
    return (
        module,
        torch.randn(4, WIDTH),
        (lambda output: output.square().mean()) if stage == stages - 1 else None,
    )


def gather_and_block() -> None:
    """Every rank gathers the values of all in order, and blocks on its neighbour for as long as
    it asks.
    """
    with process_group() as found, RankGroup() as group:
        assert found is not None
        rank, size = found
        for turn in range(20):
            assert group.gather((rank, turn)) == [(each, turn) for each in range(size)]
        pair = StageGroup(group, [rank - rank % 2, rank - rank % 2 + 1], 1)
        assert pair.gather(rank) == [rank - rank % 2, rank - rank % 2 + 1]
        with connect_neighbour(group, [[0, 2, 3], [1]], torch.device("cpu")) as neighbour:
            assert neighbour.exists == (rank != 1)
            for duration_s in (0.0, 0.3):
                start_s = time.monotonic()
                if neighbour.exists:
                    neighbour.block(duration_s)
                    assert time.monotonic() - start_s >= duration_s
    print("done")


def refuse() -> None:
    """One rank ends with an error: all end, and one reports why."""

    def body() -> None:
        with process_group() as found, RankGroup() as group:
            assert found is not None
            group.gather(None)
            if found[0] == 1:
                raise UsageError("rank 1 cannot go on")
            group.gather(None)

    _report(body)


def stages(gpu: str, count: str, tensor_parallel: str, output: str) -> None:
    """Profile the stages that `build_stage` builds."""

    def body() -> None:
        profile = profile_stages(
            "rank_programs:build_stage",
            gpu,
            int(count),
            tensor_parallel=int(tensor_parallel),
            settings=OBSERVED,
            output=Path(output),
        )
        print("rank 0" if profile is not None else "another rank")

    _report(body)


def command(folder: str, *arguments: str) -> None:
    """Run the planner command in a folder."""
    os.chdir(folder)
    main(arguments)


def script(path: str, *arguments: str) -> None:
    """Run a script as a launcher does."""
    sys.path.insert(0, str(Path(path).parent))
    sys.argv = [path, *arguments]
    run_path(path, run_name="__main__")


def killed(output: str) -> None:
    """Profile, and kill rank 1 during its sweep."""

    def progress(done: int, _: int) -> None:
        if done and os.environ["RANK"] == "1":
            while not Path("profile.rows-0.json").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def body() -> None:
        profile_stages(
            "rank_programs:build_stage",
            GPU,
            3,
            output=Path(output),
            settings=SweepSettings(repetition_s=2.0),
            progress=progress,
        )

    _report(body)


def sharded() -> None:
    """Profile a pipeline of which one stage cannot be repeated, then go on with the training."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo")
    rank, alone = dist.get_rank(), [dist.new_group([each]) for each in range(2)]
    module: Any = nn.Linear(WIDTH, WIDTH)
    if rank == 1:  # one rank alone must end the profiling of all
        module = FullyShardedDataParallel(module, alone[rank], device_id=torch.device("cpu"))
    stage = pipelining.PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=nn.functional.mse_loss)
    with profile_pipeline(schedule, gpu=GPU, settings=OBSERVED, output="profile.yaml") as profiling:
        _step(schedule, rank == 0, rank == 1)
    _step(schedule, rank == 0, rank == 1)
    print(json.dumps([profiling.profile is None, profiling.problem, Path("profile.yaml").exists()]))
    dist.destroy_process_group()


REPETITION_S = 3.0  #: how long a repetition may take, where one takes longer


class Stuck(tiny_training.Layer):
    """A layer whose repetitions take long, or wait for a rank that does not repeat it."""

    repeats: str | None = None

    def forward(self, x: Any) -> Any:
        if self.repeats == "long" and dist.get_rank():
            self.repeats = None
            Event().wait(2 * REPETITION_S)  # training would end after three times as long
        elif self.repeats == "for ever" and dist.get_rank():
            dist.all_reduce(torch.ones(1))
        return super().forward(x)


def stuck(repeats: str) -> None:
    """Profile a training in which a repetition of the last stage does not come back in time."""
    dist.init_process_group("gloo")
    settings = SweepSettings(control="observed", repetition_s=REPETITION_S)

    def body() -> None:
        plain = tiny_training.Torch("1f1b", 2, layer=Stuck)
        expected = [*plain.step(), *plain.step(), *plain.state()]
        pipeline = tiny_training.Torch("1f1b", 2, layer=Stuck)
        (layer,) = pipeline.layers
        with profile_pipeline(pipeline.engine, gpu=GPU, settings=settings) as profiling:
            results = pipeline.step()
            layer.repeats = repeats
        layer.repeats = None
        results = [*results, *pipeline.step(), *pipeline.state()]
        assert all(map(torch.equal, results, expected))
        print(profiling.problem)

    _report(body)
    dist.destroy_process_group()


def faulty(*names: str) -> None:
    """Profile a training once for each function and rank, with a fault in that function there."""
    dist.init_process_group("gloo")
    settings = SweepSettings(window_s=0.5, cool_down_s=0.0, repetition_s=5.0)
    plain = tiny_training.Torch("1f1b", 2)
    expected = [*plain.step(), *plain.step(), *plain.state()]
    found = []
    for name, at in product(names, range(2)):
        pipeline, fault = tiny_training.Torch("1f1b", 2), _Fault()
        with ExitStack() as stack:
            if dist.get_rank() == at:
                stack.enter_context(fault.injected(name))
            profiled = profile_pipeline(
                pipeline.engine, gpu="simulated:a100-sxm", settings=settings, output="faulty.yaml"
            )
            with profiled as profiling:
                results = pipeline.step()
        results = [*results, *pipeline.step(), *pipeline.state()]
        told = [(profiling.problem or "", fault.is_hit, profiling.profile is not None)] * 2
        dist.all_gather_object(told, told[0])
        found.append(
            {
                "name": name,
                "hit": told[at][1],
                "equal": all(map(torch.equal, results, expected)),
                "problems": [problem for problem, _, _ in told],
                "profiled": told[0][2],
            }
        )
    print(json.dumps(found))
    dist.destroy_process_group()


class _Fault:
    """A fault in a function, `module:function`, or from its third call on, `module:function#3`."""

    is_hit = False

    def injected(self, name: str) -> AbstractContextManager[object]:
        module, _, path = name.partition(":")
        path, _, first = path.partition("#")
        calls = count(1)
        *owner, attribute = path.split(".")
        target: Any = import_module(f"perseus_planner.{module}")
        for part in owner:
            target = getattr(target, part)

        original = getattr(target, attribute)

        def fail(*args: Any, **kwargs: Any) -> Any:
            if next(calls) < int(first or 1):
                return original(*args, **kwargs)
            self.is_hit = True
            raise ZeroDivisionError("injected")

        return mock.patch.object(target, attribute, fail)


class Watched(nn.Linear):
    """A layer that records in which precision it computes, and which attention kernels are
    allowed.
    """

    def __init__(self, modes: set[Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.modes = modes

    def forward(self, x: Any) -> Any:
        output = super().forward(x)
        kernels = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled())
        self.modes.add(
            (
                output.dtype,
                torch.is_autocast_enabled("cpu"),
                torch.is_autocast_cache_enabled(),
                kernels,
            )
        )
        return output


def autocast(cache: str) -> None:
    """Profile a training in bfloat16, by autocast; print the precisions of training and of
    profiling.
    """
    dist.init_process_group("gloo")
    modes: set[Any] = set()
    losses: set[Any] = set()
    module = Watched(modes)

    def loss(output: Any, target: Any) -> Any:
        losses.add(
            (torch.nn.functional.linear(target, target).dtype, torch.is_autocast_enabled("cpu"))
        )
        return (output.float() - target).square().mean()

    example = torch.empty(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    stage = pipelining.PipelineStage(
        module, dist.get_rank(), 2, torch.device("cpu"), example, example
    )
    schedule = pipelining.Schedule1F1B(stage, 4, loss_fn=loss)
    with profile_pipeline(schedule, gpu=GPU, settings=OBSERVED):
        with (
            torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
            torch.autocast("cpu", torch.bfloat16, cache_enabled=cache == "True"),
        ):
            _step(schedule, dist.get_rank() == 0, dist.get_rank() == 1)
        trained = [sorted(map(str, modes)), sorted(map(str, losses))]
        modes.clear()
        losses.clear()
    profiled = [sorted(map(str, modes)), sorted(map(str, losses))]
    print(json.dumps([trained, profiled]))
    dist.destroy_process_group()


class Held(TorchDispatchMode):
    """Counts the bytes of storages at once, and those that were cloned."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[int, Any]] = {}
        self.most = self.cloned = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors(result):
            storage, key = tensor.untyped_storage(), id(tensor.untyped_storage())
            if key not in self._storages:
                forget = weakref.ref(storage, lambda _, key=key: self._storages.pop(key))
                self._storages[key] = storage.nbytes(), forget
            self.cloned += tensor.nbytes * (func is torch.ops.aten.clone.default)
        self.most = max(self.most, sum(size for size, _ in self._storages.values()))
        return result


def memory() -> None:
    """Print what recording adds to the bytes that a step holds at most (less one message), and to
    those that it clones, and the bytes of the inputs of one of its microbatches.
    """
    dist.init_process_group("gloo")
    rank, vocabulary = dist.get_rank(), 4096
    stage = pipelining.PipelineStage(
        nn.Linear(WIDTH, vocabulary if rank else WIDTH), rank, 2, torch.device("cpu")
    )
    schedule = pipelining.Schedule1F1B(stage, 8, loss_fn=nn.functional.cross_entropy)
    data, labels = torch.randn(32, WIDTH), torch.zeros(32, dtype=torch.long)
    steps = []
    for is_recorded in (False, False, True):
        recording = Recording(engine_of(schedule, ""), LossOfSteps())
        with recording.running() if is_recorded else nullcontext(), Held() as held:
            schedule.step(*([] if rank else [data]), **({"target": labels} if rank else {}))
        steps.append(held)
    inputs = (data.nbytes + rank * labels.nbytes) // 8
    _, plain, recorded = steps
    message = data.nbytes // 8  # gloo may hold one that was sent a little longer
    print(
        json.dumps([recorded.most - plain.most - message, recorded.cloned - plain.cloned, inputs])
    )
    dist.destroy_process_group()


def idle() -> None:
    """Run no iteration inside the block."""
    dist.init_process_group("gloo")
    pipeline = Torch("gpipe", 2)

    def body() -> None:
        with profile_pipeline(pipeline.engine, gpu=GPU) as profiling:
            pass
        print(profiling.problem)

    _report(body)


def _step(schedule: Any, first: bool, last: bool) -> list[Any]:
    data = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    losses: list[Any] = []
    arguments = {"target": data[1], "losses": losses} if last else {}
    schedule.step(*([data[0]] if first else []), **arguments)
    return losses


def _report(body: Callable[[], None]) -> None:
    """Run `body`, and report errors as the command does."""
    try:
        body()
    except EndedElsewhere:
        sys.exit(2)
    except PlannerError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
