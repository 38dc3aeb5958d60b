"""The ranks of an acceptance, and the small GPT that they train.

Each step runs in a process of its own on every rank, which the rank forks, waits for, and kills if
it hangs. So a step that hangs or dies ends with a sentence, and the next ones go on; each has the
environment that it asks for, which CUDA reads when it begins; and a training can be killed while
the rank looks at what is left of it. A rank itself never begins CUDA, as its children could not use
it then.

The GPT is a pipeline of two stages beside others that train on other data, with an optimizer that
is distributed over them, and gradients that are reduced while the last backward goes on.
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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn import functional

from perseus_planner.base.errors import PlannerError, RankError
from perseus_planner.base.loops import in_background
from perseus_planner.engines.microbatch import describe_error
from perseus_planner.profiler.build import torch_device
from perseus_planner.runs.verdict import rank_names
from perseus_planner.runtime import planner_runtime
from perseus_planner.runtime.emulation import emulate

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

    from torch.distributed import Store

    from perseus_planner.gpu import Gpu
    from perseus_planner.runtime import Runtime

_IMPORTED = (
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.utils.flop_counter",
)
"""What the rank imports, so that the process of each step has it."""
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
        # Imported once here, as each step runs in a fork of this process.
        for module in _IMPORTED:
            import_module(module)
        # Without torchrun there is one rank, and a store of its own on a free port.
        if "RANK" not in os.environ:
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store = store
            self._address = ("127.0.0.1", store.port)
            self.rank = 0
            self.size = 1
        else:
            try:
                self._store, self.rank, self.size = next(rendezvous("env://"))
            except (RuntimeError, ValueError) as error:
                raise RankError(
                    f"the ranks cannot reach each other: {describe_error(error)}; start them with "
                    "torchrun"
                ) from error
            self._address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        # A prefix, as torch and the user may keep keys in the same store.
        self._store = dist.PrefixStore("perseus-planner/acceptance", self._store)

    @property
    def is_emulated(self) -> bool:
        """Whether its GPU is emulated, so that the CPU computes."""
        return "emulated:" in self.gpu

    @property
    def device(self) -> torch.device:
        """The device that the process of a step computes on, which becomes torch's current one."""
        return torch_device(self.gpu.replace("emulated:", "simulated:"))

    @contextmanager
    def process_group(self) -> Iterator[None]:
        """Join torch's process group of all ranks inside the block, in the process of a step."""
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
        # Each step is forked anew, so one that hangs or dies leaves the others as they are.
        process, receiver = self.start(step, *arguments, environment=environment)
        outcomes = self.gather(self._outcome(process, receiver, limit_s), limit_s + _ANSWER_S)
        problems: dict[str, list[int]] = {}
        # A rank that ended only because of another one is not to blame.
        for rank, outcome in enumerate(outcomes):
            if outcome.problem is not None and not outcome.is_collateral:
                problems.setdefault(outcome.problem, []).append(rank)
        if problems:
            raise RankError("; ".join(f"{rank_names(at)}: {text}" for text, at in problems.items()))
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
        # Ranks call in the same order, so the number of the call is a key that all have in common.
        self._gathered += 1
        keys = [f"values/{self._gathered}/{rank}" for rank in range(self.size)]
        # A rank that has died never sets its key, so the wait has a limit.
        until_s = time.monotonic() + limit_s
        try:
            self._store.set(keys[self.rank], pickle.dumps(value))
            while not self._store.check(keys):
                if time.monotonic() > until_s:
                    # Named one by one, as the user has to know where to look.
                    late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                    raise RankError(
                        f"{rank_names(late)}: no answer within {limit_s:.0f} s; see why, and start "
                        "again"
                    )
                time.sleep(_POLL_S)
            return [pickle.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise RankError(
                f"the store of the ranks is gone: {describe_error(error)}; see why it ended"
            ) from error

    def meet_last(self) -> None:
        """Wait for all ranks, before each ends.

        Without torchrun rank 0 holds the store, so it leaves only when no other asks it any more.

        Raises:
            RankError: If one does not answer in time, or the store is gone.
        """
        self.gather(None)
        if self.rank:
            self._store.add("left", 1)
            return
        until_s = time.monotonic() + _ANSWER_S
        while self._store.add("left", 0) < self.size - 1 and time.monotonic() < until_s:
            time.sleep(_POLL_S)

    def _outcome(self, process: BaseProcess, receiver: Connection, limit_s: float) -> Outcome:
        """Wait for the outcome of the process of a step, and for its end."""
        until_s = time.monotonic() + limit_s
        failed = f"failed/{self._turn}"
        outcome = Outcome()
        # Polled and not awaited, as the failure of another rank shows in the store alone.
        while not receiver.poll(_POLL_S) and time.monotonic() < until_s:
            # Others wait for the failed rank, so they get a moment for an error of their own, and
            # then end.
            if not outcome.is_collateral and self._store.check([failed]):
                until_s = min(until_s, time.monotonic() + _OTHERS_S)
                outcome.is_collateral = True
        where = f"in its log in {self.folder}"
        # Stacks are all that tells where a hung process stands, so they are written before it is
        # killed.
        if not receiver.poll():
            os.kill(int(process.pid or 0), signal.SIGUSR1)  # it writes its stacks
            receiver.poll(_DUMP_S)
            process.kill()
            outcome.problem = f"did not end within {limit_s:.0f} s; its stacks are {where}"
        else:
            try:
                outcome.value, outcome.problem = receiver.recv()
            # The process ended without a word, so its exit status and its log must do.
            except EOFError:
                process.join()
                outcome.problem = (
                    f"its process ended with status {process.exitcode}; what it said is {where}"
                )
        process.join()
        receiver.close()
        # The failure is told even if it is collateral, which the others know already.
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
        # The rank's own output stays a list of checks; what a step and its libraries say goes to a
        # log.
        log = (self.folder / f"rank-{self.rank}.log").open("a", buffering=1)
        sys.stdout = sys.stderr = log
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        print(f"--- step {self._turn}: {step.__name__}")
        logging.basicConfig(stream=log, force=True)
        # The rank asks for the stacks by this signal, if the step hangs.
        faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
        # The process must not outlive the rank, which would leave a GPU in use.
        in_background(_end_with_parent, "planner parent")
        value = problem = None
        try:
            value = step(self, *arguments)
        # A planner's error is a sentence for the user; of others the traceback is in the log.
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


STAGES = 2
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Environment in which equal trainings give equal losses."""


@dataclass(frozen=True)
class Size:
    """The size of the GPT and of its data."""

    layers: int  #: Of a stage
    hidden: int
    heads: int
    sequence: int  #: Tokens of a sequence
    vocabulary: int = 256
    rows: int = 4  #: Sequences of a microbatch
    microbatches: int = 8


ON_GPU = Size(layers=4, hidden=1024, heads=16, sequence=512)
ON_CPU = Size(layers=1, hidden=32, heads=2, sequence=16, rows=2, microbatches=4)


def size_on(device: torch.device) -> Size:
    """Return the size of the training on a device."""
    return ON_GPU if device.type == "cuda" else ON_CPU


@dataclass(frozen=True)
class Layout:
    """How ranks share the pipelines."""

    ranks: int  #: Of one pipeline: 2, or 1 that has both stages
    pipelines: int  #: Side by side

    @classmethod
    def of(cls, size: int) -> Layout:
        """Return the layout for so many ranks."""
        return cls(1, size) if size % STAGES else cls(STAGES, size // STAGES)

    def __str__(self) -> str:
        virtual = "" if self.ranks == STAGES else f", with {STAGES} virtual stages on each rank"
        return f"{self.ranks} x {self.pipelines} (pipeline x data parallel){virtual}"


@dataclass(frozen=True)
class Trained:
    """What some iterations took."""

    time_s: float  #: Of one iteration
    energy_j: float | None  #: Of one iteration and this GPU; None if it was not read
    losses: tuple[float, ...]  #: Of all microbatches, in order; empty on other stages than the last


class Training:
    """This rank's part of the training, which is the same each time that it is made, on all ranks
    together, inside torch's process group.

    Attributes:
        engine: The schedule.
        size: The size of the model.
    """

    def __init__(self, rank: Rank) -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer  # it warns

        self._rank = rank
        self.device = rank.device
        self.size = size_on(self.device)
        # Losses with and without the runtime are compared bit by bit.
        torch.use_deterministic_algorithms(True)
        # One thread, so that ranks on one CPU do not take cores from each other.
        torch.set_num_threads(1)
        layout = Layout.of(rank.size)
        # Ranks of one stage lie side by side, and those of one pipeline are a stride apart.
        self._pipeline = rank.rank % layout.pipelines
        numbers = range(STAGES) if layout.ranks == 1 else [rank.rank // layout.pipelines]
        # Each column of the grid is a pipeline, and each row the replicas of a stage.
        grid = torch.arange(rank.size).view(-1, layout.pipelines)
        across, _ = dist.new_subgroups_by_enumeration(grid.T.tolist())
        self._group, _ = dist.new_subgroups_by_enumeration(grid.tolist())
        self._replicas = layout.pipelines
        # Replicas of a stage begin with equal weights.
        torch.manual_seed(numbers[0])
        modules = torch.nn.ModuleList(
            _stage(self.size, number).to(self.device) for number in numbers
        )
        received, sent, logits = _examples(self.size, self.device)
        from torch.distributed import pipelining  # slow to import, so only where it is run

        stages = [
            pipelining.PipelineStage(
                module,
                number,
                STAGES,
                self.device,
                sent if number else received,
                logits if number == STAGES - 1 else sent,
                group=across,
            )
            for module, number in zip(modules, numbers, strict=True)
        ]
        # The schedule would scale gradients that are being reduced.
        count = self.size.microbatches
        options = {"loss_fn": _loss, "scale_grads": False}
        # A rank with both stages interleaves them.
        if len(stages) == 1:
            self.engine: Any = pipelining.Schedule1F1B(stages[0], count, **options)
        else:
            self.engine = pipelining.ScheduleInterleaved1F1B(stages, count, **options)
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        parameters = list(modules.parameters())
        self._optimizer: Any = (
            torch.optim.AdamW(parameters, lr=1e-4)
            if self._replicas == 1
            else ZeroRedundancyOptimizer(
                parameters, torch.optim.AdamW, process_group=self._group, lr=1e-4
            )
        )
        self._awaited: dict[Any, int] = {}  #: parameter -> backwards until it is reduced
        self._works: list[Any] = []  #: that reduce
        # Gradients are reduced while the last backward goes on, from within it.
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._reduce)
        self._parameters = parameters
        self._steps = 0

    def iterate(self) -> list[Any]:
        """Run one iteration; return its losses on the last stage."""
        size = self.size
        losses = list[Any]()
        # Seeded by step and pipeline, so that each training sees the same data again.
        generator = torch.Generator().manual_seed(1000 * self._steps + self._pipeline)
        shape = (size.microbatches * size.rows, size.sequence + 1)
        tokens = torch.randint(size.vocabulary, shape, generator=generator).to(self.device)
        # Only the first stage reads tokens, and only the last one compares with them.
        inputs = [tokens[:, :-1].contiguous()] if self._is_first else []
        last = {"target": tokens[:, 1:].contiguous(), "losses": losses} if self._is_last else {}
        # In the first iteration an emulated GPU repeats computations to count them.
        if self._steps:
            self._awaited = dict.fromkeys(self._parameters, size.microbatches)
        self.engine.step(*inputs, **last)
        self._awaited = {}
        # They were not awaited in the first iteration, so they are reduced after it.
        if not self._steps:
            for parameter in self._parameters:
                self._begin_to_reduce(parameter)
        for work in self._works:
            work.wait()
        self._works = []
        for parameter in self._parameters:
            # The schedule does not scale, so sums over microbatches and replicas become means here.
            parameter.grad.div_(size.microbatches * self._replicas)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._steps += 1
        return losses

    def train(self, iterations: int, gpu: Gpu | None = None, *, warm_up: int = 1) -> Trained:
        """Run iterations; the first ones are not counted, but their losses are."""
        # The first iterations compile and allocate, so they are not timed.
        losses = [loss for _ in range(warm_up) for loss in self.iterate()]
        # The device and all ranks are waited for, so that the time begins on all of them at once.
        self._synchronize()
        dist.barrier()
        begin_s = time.perf_counter()
        begin_j = None if gpu is None else gpu.energy_j()
        for _ in range(iterations):
            losses += self.iterate()
        self._synchronize()
        time_s = (time.perf_counter() - begin_s) / iterations
        energy_j = None
        if gpu is not None and begin_j is not None:
            energy_j = (gpu.energy_j() - begin_j) / iterations
        # Losses are read at the end, as each reading would wait for the device.
        values = torch.stack([loss.detach() for loss in losses]).tolist() if losses else []
        return Trained(time_s, energy_j, tuple(values))

    @contextmanager
    def running(self, plan: Path | None = None, **options: Any) -> Iterator[Runtime | None]:
        """Have computations take as long as on an emulated GPU, if there is one, inside the block;
        with a plan, by the runtime with these options.
        """
        gpu = self._rank.gpu
        with ExitStack() as stack:
            if self._rank.is_emulated:
                stack.enter_context(emulate(self.engine, gpu.removeprefix("dry-run:")))
            runtime = planner_runtime(self.engine, plan=plan, gpu=gpu, **options)
            yield None if plan is None else stack.enter_context(runtime)

    def _reduce(self, parameter: Any) -> None:
        """Begin to reduce a gradient after the last backward of an iteration."""
        if parameter in self._awaited:  # otherwise the profiler repeats a backward
            self._awaited[parameter] -= 1
            if not self._awaited[parameter]:
                self._begin_to_reduce(parameter)

    def _begin_to_reduce(self, parameter: Any) -> None:
        if self._replicas > 1:
            work = dist.all_reduce(parameter.grad, group=self._group, async_op=True)
            self._works.append(work)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _stage(size: Size, number: int) -> nn.Module:
    """Return a stage: the first has the embedding, the last the head."""

    def layer() -> Any:
        """Return a layer in which no token sees later ones."""
        module = nn.TransformerEncoderLayer(
            size.hidden, size.heads, 4 * size.hidden, 0.0, batch_first=True, norm_first=True
        )
        # Kept as a buffer, so that it moves to the device with the layer.
        mask = nn.Transformer.generate_square_subsequent_mask(size.sequence)
        module.register_buffer("mask", mask)
        module.register_forward_pre_hook(
            lambda module, inputs, _: (inputs, {"src_mask": module.mask, "is_causal": True}),
            with_kwargs=True,
        )
        return module

    # The ends of the model, which make its stages unlike as real ones are.
    first = [nn.Embedding(size.vocabulary, size.hidden)] if number == 0 else []
    last = [nn.Linear(size.hidden, size.vocabulary)] if number == STAGES - 1 else []
    return nn.Sequential(*first, *(layer() for _ in range(size.layers)), *last)


def _examples(size: Size, device: torch.device) -> tuple[Any, Any, Any]:
    """Return what the first stage gets, what it sends, and what the last one makes."""
    shape = (size.rows, size.sequence)
    return (
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.empty(*shape, size.hidden, device=device, requires_grad=True),
        torch.empty(*shape, size.vocabulary, device=device, requires_grad=True),
    )


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next token, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
