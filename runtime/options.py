"""What a user says of how to train: the options of `planner_runtime` and of `planner run`.

A new option is one field of `Options`, which its docstring tells of, and the same name in
`OptionKeywords` for type checkers. With a `said` beside its default it is an option of `planner
run` and an environment variable too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypedDict

from perseus_planner.base.errors import UsageError
from perseus_planner.base.fields import Checked
from perseus_planner.base.files import STATE_FILE
from perseus_planner.base.units import (
    CHANGES,
    SHARE,
    SLOWDOWN,
    Changes,
    Index,
    Quantity,
    Rule,
    Wait,
)
from perseus_planner.gpu import DRY_RUN, is_dry_run
from perseus_planner.gpu.torch_device import gpu_text
from perseus_planner.runtime.guarantee import Slowdown

if TYPE_CHECKING:
    import torch

    from perseus_planner.profiles.modes import ModeFunctions
    from perseus_planner.runs.verdict import StragglerDetection
    from perseus_planner.runtime.sending import GivenPlan

Work: TypeAlias = "float | Sequence[float]"
"""The work of a microbatch."""

WorkFunction: TypeAlias = "Callable[[Any], Work]"
"""Returns the work of a microbatch."""

MAX_CHANGES_PER_S = 100.0
"""Default limit of the clock changes of one node: a call holds the driver's lock for about 6 ms
(measured on A800).
"""


@dataclass(frozen=True)
class AutopilotSettings(Checked):
    """What a decider that makes its own plans may do.

    Raises:
        UsageError: If a value is out of range.
    """

    #: the agreed iteration time, as a multiple of one at full clocks; at least 1.
    slowdown: Slowdown = 1.0
    #: how much longer iterations may be on average, as a share of one at full clocks: the ledger.
    max_slowdown: Wait = 0.005
    #: how often a GPU may change its clock in an iteration, trials included; None for any number.
    max_changes: Changes | None = 8
    #: whether to run trials of clocks that were not measured. Without, it plans on the profile that
    #: it is given and on what it sees by itself.
    learn: bool = True
    seed: Index = 0  #: of all random choices: equal observations, equal decisions


HOOKS: Literal["hooks"] = "hooks"
TIME: Literal["time"] = "time"
GRAPH: Literal["graph"] = "graph"
FOLLOW = (HOOKS, TIME, GRAPH)
"""How a plan may be followed: at each computation that the engine shows, by time, or at marks that
are captured in a CUDA graph.
"""


class Said(NamedTuple):
    """How `planner run` says an option."""

    help: str
    word: str = ""  #: What its value is called; empty for a switch, which is on or off
    rule: Rule | Quantity | None = None  #: Of a number
    names_file: bool = False  #: Whether it names a file or folder, which is written as a whole path
    kind: str = ""  #: The kind of file that is read there; empty for any
    choices: tuple[str, ...] = ()  #: The texts that it may be; empty for any
    has_opposite: bool = False  #: Whether a switch has `--no-NAME` too


def said(text: str, word: str = "", **more: Any) -> dict[str, Said]:
    """Return the metadata of an option that `planner run` has too; the arguments are those of
    `Said`.
    """
    return {"said": Said(text, word, **more)}


@dataclass(frozen=True)
class Options:
    """How to train: each is an argument of `planner_runtime`.

    Attributes:
        plan: A plan or its file for all pipelines, or one for each pipeline by its number; None for
            the autopilot. The plan of rank 0 counts and is sent to all ranks.
        gpu: GPU of each rank, as for `open_gpu`, or only a back-end: "cuda", "nvml", "zeusd",
            "command".
        dry_run: Do everything except setting clocks.
        record: A folder in which the ranks record the run, for `planner show` and
            `planner calibrate`. Give each job its own, and again when it is restarted: the folder
            keeps the totals of all attempts, and stays small.
        max_changes_per_s: Limit of the clock changes of one node per second.
        on_straggling: Called on a background thread when this rank's GPU turns out slow or
            throttled, and when it has recovered.
        service: Address of a planner service, such as "http://10.0.0.5:8400" or
            "unix:/run/planner.sock". Its plans are followed, and slow ranks are reported to it; the
            autopilot makes its own plans, as long as the service lets pipelines wait for a slower
            one. Training whose clocks follow the batch does so too, as slow as a budget or a
            deadline lets it be. Only rank 0 connects to it, with the token in the environment
            variable PLANNER_TOKEN. Training goes on while the service is away.
        job: Name of this training in the service.
        frontier: The file that `planner solve` wrote, from which the service plans. Without a plan
            it plans from what the autopilot has learnt.
        max_changes: Switch budget, as for `planner plan`: how often a GPU may change its clock in
            an iteration, by the autopilot or by the service's plans. None for 8 with the autopilot,
            and for any number with the service.
        slowdown: For the autopilot: the iteration time that you accept, as a multiple of that at
            full clocks.
        max_slowdown: For the autopilot: how much longer iterations may be on average, as a share of
            the time at full clocks, while it learns and because times vary.
        learn: Whether the autopilot tries clocks that it does not know; otherwise it plans on
            `state` alone.
        state: For the autopilot: the file of what it has learnt, a profile, from which the next
            start goes on. A relative path is in the folder `record`, or else where rank 0 was
            started. None to keep nothing.
        work: Where microbatches differ: returns the work of one, a number or a few of 0 or more,
            such as `sequence_work`; or the name of such a function, "module:function". Clocks then
            follow each batch, and neither a plan nor the autopilot: a pipeline that has less to do
            than the slowest one runs at lower clocks, in that iteration. It is called with each
            microbatch before an iteration, on the first rank of a pipeline; data are read ahead for
            it, in their order. Give `learn=False` and a profile as `state`.
        modes: For a plan with modes: mode -> a function that has the next computations run in it,
            such as `Recompute(engine).off`; with "own" for the way in which training runs without a
            plan. It is called on the training thread before a computation whose mode differs from
            that of the one before. Between iterations training runs in its own way, unless all
            computations of a rank run in one mode. For the autopilot: "own" and one other mode,
            which it tries as it tries clocks; all ranks give the same. Each computation may then
            have a mode of its own, unless a `ModeFunction` says `shared_by="microbatch"`.
        may_reorder: For the autopilot: whether it may try a mode that may change the order of a sum
            (`ModeFunction.reorders`), and so the last bits of losses.
        log: Where the seconds, joules, watts, saving and verdict of each iteration of this rank's
            GPU go: a SummaryWriter of TensorBoard, a run of wandb, the module `mlflow` with an
            active run, a function of the number of the iteration and its values by name, or a list
            of these. Each rank may give its own, or None. They are called on a thread of their own,
            some iterations later; a fault of theirs is one warning.
        strict: Whether an engine that lacks a name which the planner uses, as another release may,
            is refused. Otherwise, as by `planner run`, one warning is given and training goes on at
            full clocks.
        trust_traced: Whether a plan of a traced profile is applied, which is an expectation: its
            rows at all clocks but one are estimates (`planner trace`). Otherwise it is refused.
        decider: What decides the clocks instead, on all ranks: the name of one that an extension
            brings, or a `runtime.decider.Decider` of each rank's own.
        follow: How a plan is followed: "hooks" sets the clock of each computation as the engine
            comes to it. "time" needs no more than the begin and the end of an iteration: it changes
            clocks at offsets from the begin, at most 4 times, and runs each rank at one clock where
            iterations are too short for that. None for "hooks", unless the engine shows only whole
            iterations, as Megatron-core's graphs of them do, or there is none. "graph" captures
            marks in these graphs, so that each computation has its clock again; it has not been
            tried on a GPU yet.
        peers: Without an engine: the ranks of this rank's pipeline in the whole job, first stage to
            last, such as `torch.distributed.get_process_group_ranks` returns. None if the stages of
            a pipeline are as far apart as can be: with a plan of 4 ranks and a job of 8, ranks 0,
            2, 4 and 6 are one, and 1, 3, 5 and 7 the other.
    """

    plan: GivenPlan | None = field(
        default=None,
        metadata=said(
            "Plan to train with; without one, training plans itself.",
            "FILE",
            names_file=True,
            kind="plan",
        ),
    )
    slowdown: float = field(
        default=1.0,
        metadata=said(
            "Without a plan: how long an iteration may take, as a multiple of that at full clocks."
            "  [default: 1.00]",
            "RATIO",
            rule=SLOWDOWN,
        ),
    )
    max_slowdown: float = field(
        default=0.005,
        metadata=said(
            "Without a plan: how much longer iterations may be on average while training learns.  "
            "[default: 0.005]",
            "SHARE",
            rule=SHARE,
        ),
    )
    max_changes: int | None = field(
        default=None,
        metadata=said(
            "The most clock changes of a GPU per iteration, without a plan or in the service's "
            "plans.  [default: 8]",
            "N",
            rule=CHANGES,
        ),
    )
    learn: bool = field(
        default=True,
        metadata=said(
            "Without a plan: whether to try clocks, or plan on what is known.  [default: learn]",
            has_opposite=True,
        ),
    )
    state: str | os.PathLike[str] | None = field(
        default=STATE_FILE,
        metadata=said(
            "Without a plan: profile of what was learnt, from which the next start continues.  "
            f"[default: {STATE_FILE}]",
            "FILE",
            names_file=True,
        ),
    )
    work: WorkFunction | str | None = field(
        default=None,
        metadata=said(
            "Without a plan: have clocks follow each batch, by the work of a microbatch that this "
            "function returns.",
            "MODULE:FUNCTION",
        ),
    )
    gpu: str = field(
        default="cuda",
        metadata=said("GPU of each rank, or only a back-end.  [default: cuda]", "GPU"),
    )
    dry_run: bool = field(default=False, metadata=said("Do everything except setting clocks."))
    trust_traced: bool = field(
        default=False,
        metadata=said(
            "Apply a --plan of a traced profile, which is estimated at all clocks but one.",
        ),
    )
    follow: Literal["hooks", "time", "graph"] | None = field(
        default=None,
        metadata=said(
            "With a --plan: set each computation's clock as it comes, or all of an iteration by "
            "time.  [default: hooks, and time where only whole iterations show]",
            "HOW",
            choices=FOLLOW,
        ),
    )
    record: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "Folder in which to record the run, for `planner show` and `planner calibrate`.",
            "FOLDER",
            names_file=True,
        ),
    )
    job: str | None = field(
        default=None, metadata=said("Name of this training in a service.", "NAME")
    )
    service: str | None = field(default=None, metadata=said("Follow this service.", "URL"))
    frontier: str | os.PathLike[str] | None = field(
        default=None,
        metadata=said(
            "With a plan: frontier from which the service plans.",
            "FILE",
            names_file=True,
            kind="frontier",
        ),
    )
    max_changes_per_s: float = MAX_CHANGES_PER_S
    on_straggling: Callable[[StragglerDetection], None] | None = None
    modes: ModeFunctions = field(default_factory=dict)
    may_reorder: bool = False
    log: Any = None
    strict: bool = True
    decider: object = None  #: A `Decider`, the name of one, or None
    peers: Sequence[int] | None = None

    @property
    def autopilot(self) -> AutopilotSettings:
        """What a decider that makes its own plans may do.

        Raises:
            UsageError: If a number is out of range.
        """
        most = AutopilotSettings.max_changes if self.max_changes is None else self.max_changes
        return AutopilotSettings(self.slowdown, self.max_slowdown, most, self.learn)

    @property
    def folder(self) -> Path | None:
        """The folder of the record; None for no record."""
        return None if self.record is None else Path(self.record)

    @property
    def state_file(self) -> Path | None:
        """The file of what is learnt; None to keep nothing."""
        return None if self.state is None else Path.cwd() / (self.record or "") / self.state

    def gpu_of(self, device: torch.device) -> str:
        """Return the text that opens the GPU of a torch device.

        Raises:
            UsageError: As in `gpu_text`.
        """
        text = gpu_text(self.gpu, device)
        return f"{DRY_RUN}{text}" if self.dry_run and not is_dry_run(text) else text


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keywords of `planner_runtime`, for type checkers; without those
    that are arguments of their own there.
    """

    gpu: str
    dry_run: bool
    record: str | os.PathLike[str] | None
    max_changes_per_s: float
    on_straggling: Callable[[StragglerDetection], None] | None
    service: str | None
    job: str | None
    frontier: str | os.PathLike[str] | None
    max_changes: int | None
    slowdown: float
    max_slowdown: float
    learn: bool
    state: str | os.PathLike[str] | None
    work: WorkFunction | str | None
    modes: ModeFunctions | None
    may_reorder: bool
    log: Any
    strict: bool
    trust_traced: bool
    follow: Literal["hooks", "time", "graph"] | None
    peers: Sequence[int] | None


def said_options() -> dict[str, Said]:
    """Return how `planner run` says the options that it has, by their names."""
    return {option.name: option.metadata["said"] for option in fields(Options) if option.metadata}


def check_work(*, plan: object, learn: bool, state: object) -> None:
    """Refuse options that exclude clocks that follow the batch.

    Args:
        plan: A plan; None for none.
        learn: Whether clocks are to be tried.
        state: The profile; None for none.

    Raises:
        UsageError: If there are some; names the first.
    """
    if plan is not None:
        raise UsageError(
            f"work: clocks follow each batch, and not plan {str(plan)!r}; leave out one of them"
        )
    if learn or state is None:
        raise UsageError(
            "work: what clocks cost is not learnt while they follow the batch; turn learn off, "
            "and give a profile as state"
        )
