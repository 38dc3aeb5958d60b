"""The ranks of an acceptance. Each step runs in a process of its own on every rank, which the rank
forks, waits for, and kills if it hangs.

So a step that hangs or dies ends with a sentence, and the next ones go on; each has the environment
that it asks for, which CUDA reads when it begins; and a training can be killed while the rank
looks at what is left of it. A rank itself never begins CUDA, as its children could not use it then.
"""

from __future__ import annotations

import faulthandler
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from perseus_planner.base.errors import PlannerError, RankError
from perseus_planner.base.loops import in_background
from perseus_planner.engines.microbatch import describe_error

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    import torch
    from torch.distributed import Store

_IMPORTED = (
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.utils.flop_counter",
    "perseus_planner.profiler.pipeline",
    "perseus_planner.profiler.rehearsal",
    "perseus_planner.runtime",
    "perseus_planner.runtime.emulation",
)  #: by the rank, so that the process of each step has them
_POLL_S = 0.05
_OTHERS_S = 10.0  #: how long a step goes on after it has failed on another rank
_ANSWER_S = 60.0  #: how much later than its limit another rank may answer
_DUMP_S = 1.0  #: for a process that hangs to write its stacks
NO_ENVIRONMENT: Mapping[str, str] = MappingProxyType({})


@dataclass
class Outcome:
    """What the process of a step ended with."""

    value: Any = None  #: What the step returned
    problem: str | None = None  #: Why it returned nothing
    #: Whether it was ended only because it had failed on another rank.
    is_collateral: bool = False


@dataclass
class Rank:
    """This rank of all; every rank calls the same methods in the same order. The process of a step
    gets a copy.
    """

    gpu: str  #: Text that opens its GPU, or a back-end alone
    read_only: bool  #: Whether nothing may be set
    folder: Path  #: Where results are written
    rank: int = field(init=False)  #: Its number, from 0
    size: int = field(init=False)  #: Number of ranks
    _store: Store = field(init=False)
    _address: tuple[str, int] = field(init=False)
    _turn: int = 0  #: number of the step
    _gathered: int = 0

    def __post_init__(self) -> None:
        import torch.distributed as dist
        from torch.distributed.rendezvous import rendezvous

        # Otherwise a look for devices would begin CUDA here.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        for module in _IMPORTED:
            import_module(module)
        if "RANK" not in os.environ:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store, self._address = store, ("127.0.0.1", store.port)
            self.rank, self.size = 0, 1
        else:
            try:
                self._store, self.rank, self.size = next(rendezvous("env://"))
            except (RuntimeError, ValueError) as error:
                raise RankError(
                    f"the ranks cannot reach each other: {describe_error(error)}; start them with "
                    "torchrun"
                ) from error
            self._address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self._store = dist.PrefixStore("perseus-planner/acceptance", self._store)

    @property
    def is_emulated(self) -> bool:
        """Whether its GPU is emulated, so that the CPU computes."""
        return "emulated:" in self.gpu

    @property
    def device(self) -> torch.device:
        """The device that the process of a step computes on, which becomes torch's current one."""
        from perseus_planner.profiler.build import torch_device

        return torch_device(self.gpu.replace("emulated:", "simulated:"))

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """Join torch's process group of all ranks inside the block, in the process of a step."""
        import torch.distributed as dist

        client = dist.TCPStore(*self._address, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(f"step/{self._turn}", client)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)
        yield
        dist.destroy_process_group()  # after an error it would wait for the other ranks

    def everywhere(
        self,
        step: Callable[..., Any],
        *arguments: Any,
        limit_s: float = 120.0,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
    ) -> list[Any]:
        """Run a step on all ranks, each in a process of its own; return what they return, by rank.

        Args:
            step: Called with this rank and the arguments.
            arguments: Of the step.
            limit_s: How long it may take, seconds.
            environment: Environment variables of the process.

        Raises:
            RankError: If the step fails or hangs on a rank; the text is the same on all ranks.
        """
        process, receiver = self.start(step, *arguments, environment=environment)
        outcomes = self.gather(self._outcome(process, receiver, limit_s), limit_s + _ANSWER_S)
        problems: dict[str, list[int]] = {}
        for rank, outcome in enumerate(outcomes):
            if outcome.problem is not None and not outcome.is_collateral:
                problems.setdefault(outcome.problem, []).append(rank)
        if problems:
            raise RankError("; ".join(f"{ranks_text(at)}: {text}" for text, at in problems.items()))
        return [outcome.value for outcome in outcomes]

    def start(
        self,
        step: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] = NO_ENVIRONMENT,
    ) -> tuple[BaseProcess, Connection]:
        """Start the process of a step on this rank; return it, and where its outcome comes from."""
        self._turn += 1
        receiver, sender = multiprocessing.Pipe(duplex=False)
        run = partial(self._run, step, arguments, environment, sender)
        process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        process.start()
        sender.close()
        return process, receiver

    def gather(self, value: Any, limit_s: float = _ANSWER_S) -> list[Any]:
        """Return the values of all ranks, by rank.

        Raises:
            RankError: If one does not answer in time, or the store is gone.
        """
        self._gathered += 1
        keys = [f"values/{self._gathered}/{rank}" for rank in range(self.size)]
        until_s = time.monotonic() + limit_s
        try:
            self._store.set(keys[self.rank], pickle.dumps(value))
            while not self._store.check(keys):
                if time.monotonic() > until_s:
                    late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise RankError(
                        f"{ranks_text(late)}: no answer within {limit_s:.0f} s; see why, and start "
                        "again"
                    )
                time.sleep(_POLL_S)
            return [pickle.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise RankError(
                f"the store of the ranks is gone: {describe_error(error)}; see why it ended"
            ) from error

    def _outcome(self, process: BaseProcess, receiver: Connection, limit_s: float) -> Outcome:
        """Wait for the outcome of the process of a step, and for its end."""
        until_s, failed = time.monotonic() + limit_s, f"failed/{self._turn}"
        outcome = Outcome()
        while not receiver.poll(_POLL_S) and time.monotonic() < until_s:
            if not outcome.is_collateral and self._store.check([failed]):
                until_s, outcome.is_collateral = min(until_s, time.monotonic() + _OTHERS_S), True
        where = f"in its log in {self.folder}"
        if not receiver.poll():
            os.kill(int(process.pid or 0), signal.SIGUSR1)  # it writes its stacks
            receiver.poll(_DUMP_S)
            process.kill()
            outcome.problem = f"did not end within {limit_s:.0f} s; its stacks are {where}"
        else:
            try:
                outcome.value, outcome.problem = receiver.recv()
            except EOFError:
                process.join()
                outcome.problem = (
                    f"its process ended with status {process.exitcode}; what it said is {where}"
                )
        process.join()
        receiver.close()
        if outcome.problem is not None:
            self._store.set(failed, "")
        return outcome

    def _run(
        self,
        step: Callable[..., Any],
        arguments: tuple[Any, ...],
        environment: Mapping[str, str],
        sender: Connection,
    ) -> None:
        """Run a step in a new process, send what it returns or why it does not, and end."""
        os.environ.update(RANK=str(self.rank), WORLD_SIZE=str(self.size))
        os.environ.setdefault("LOCAL_RANK", str(self.rank))
        os.environ.update(environment)
        log = (self.folder / f"rank-{self.rank}.log").open("a", buffering=1)
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        print(f"--- step {self._turn}: {step.__name__}")
        logging.basicConfig(stream=log, force=True)
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        in_background(_end_with_parent, "planner parent")
        value = problem = None
        try:
            value = step(self, *arguments)
        except PlannerError as error:
            problem = str(error)
        except BaseException as error:
            traceback.print_exc()
            problem = f"{describe_error(error)}; more is in its log in {self.folder}"
        sender.send((value, problem))
        print(f"took {time.process_time():.1f} s of the processor")
        log.flush()
        os._exit(0)  # threads of a step may wait for what does not come any more


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def ranks_text(ranks: list[int]) -> str:
    """Name ranks, such as "ranks 0, 1"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
