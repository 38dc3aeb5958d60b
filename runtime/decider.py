"""Who says which clock each computation of a rank gets while training: the seam between the
runtime, which follows an engine and sets clocks, and what decides about them.

A fixed plan is a decider (`fixed_plan`); others are found by name among the extensions, or given to
`planner_runtime`. The runtime knows nothing else of them. A decider's programs reach all ranks at
one iteration in one of two ways: it proposes them to the job's `Agreement`, which hands each to
`program_of`; or each rank's decider knows its own, and `program_for` returns it.

This is the interface only. `joining.decider_of` chooses the decider of a training, and the decider
chooses clocks. Who writes them as requests: `hook`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perseus_planner.base.wires import Message
from perseus_planner.runs.status import DeciderStatus

if TYPE_CHECKING:
    from perseus_planner.engines.engine import Engine
    from perseus_planner.engines.guard import Microbatches
    from perseus_planner.runtime.controller.protocol import (
        AttachReply,
        Control,
        LatestStarts,
        ToRank,
    )
    from perseus_planner.runtime.job import JobWarnings, NodePart, RankPart, TrainingJob
    from perseus_planner.runtime.marks import IterationTimes
    from perseus_planner.runtime.modes import ModeSwitch
    from perseus_planner.runtime.options import Options
    from perseus_planner.runtime.program import Order, Program
    from perseus_planner.runtime.sending import Plans
    from perseus_planner.runtime.switching import Agreement
    from perseus_planner.schedules.dag import PipelineDag


class Learnt(Message, frozen=True):
    """What a decider has learnt of a job, as a service plans on it."""

    profile_csv: str  #: Text of the table of the profile
    profile_yaml: str  #: Text of the file that names it
    schedule: str  #: What a pipeline runs, as a text grid
    rows: int  #: Number of measured rows
    time_s: float  #: Seconds of an iteration at full clocks, replayed from the profile

    @classmethod
    def of(cls, dag: PipelineDag, schedule: str) -> Learnt:
        """Return what is told of the profile of a pipeline that runs a text grid."""
        from perseus_planner.plans.replay import time_and_energy

        rows = sum(map(len, dag.profile.measurements.values()))
        time_s, _ = time_and_energy(dag, dag.baseline_measurements())
        return cls(*dag.profile.texts(), schedule, rows, time_s)


class ServiceExchange:
    """What rank 0's decider and its part in a service give each other. Each attribute is set by one
    side as a whole, and read by the other.

    Attributes:
        learnt: By the decider: what it has learnt, or was given; None for nothing yet.
        status: By the decider: what it knew last.
        waits_s: By the service: for each pipeline, how long it may take beside a slower one; empty
            if all have to be as fast as agreed.
        calm_s: By the service: likewise if no pipeline were slow, for budgets and deadlines alone.
    """

    def __init__(self) -> None:
        self.learnt: Learnt | None = None
        self.status = DeciderStatus("watching", "watching")
        self.waits_s: tuple[float, ...] = ()
        self.calm_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Seat:
    """Where a rank trains, which it knows once all have met."""

    engine: Engine  #: The adapter of its engine
    job: TrainingJob  #: All ranks
    own: RankPart  #: What rank 0 has told this rank
    part: NodePart  #: What rank 0 has told its node
    control: Control  #: What is set on its GPU
    gpu: AttachReply | None  #: Its GPU; None if nothing can be set
    options: Options  #: Of this rank
    warnings: JobWarnings  #: Gives warnings


@dataclass(frozen=True)
class Context:
    """What a decider works with while training runs."""

    seat: Seat
    #: On rank 0, for each rank of the job its pipeline and its rank there; None for absent ranks.
    positions: Sequence[tuple[int, int] | None]
    agreement: Agreement  #: Of all ranks, on programs
    ended_s: Callable[[], float | None]  #: Seconds of the iteration that ended last, if known
    latest: LatestStarts | None  #: Where the controller reads by when computations must start
    service: ServiceExchange | None  #: With rank 0's part in a service; None without one
    on_status: Callable[[DeciderStatus], None]  #: Records what the decider knows, on rank 0


class Decider:
    """Decides which program each iteration of a rank runs by.

    Methods are listed in the order of their first call. Those marked *training* are called on the
    training thread: they must not wait, and what they raise is caught once, warned of, and ends the
    program of that iteration. All others are called on the background thread.

    Attributes:
        name: What people see it called; empty for the name of its class.
        makes_plans: Whether it makes plans of its own, so that a service learns from it.
        is_continual: Whether its programs follow each other within a few iterations. Then ranks
            look for the next one in each, and one that does not fit a rank is no problem: the next
            one will.
        keeps_modes: Whether computations have the modes of its program also while no clock can be
            set.
        wants_batches: Whether its clocks follow the batch: `show` and `take_work` are called.
        needs_rank_0: Whether it decides nothing in a job whose rank 0 is missing.
        no_switch: Why `Runtime.switch_to` takes no plan; empty if it does.
    """

    name = ""
    makes_plans = True
    is_continual = False
    keeps_modes = True
    wants_batches = False
    needs_rank_0 = False
    no_switch = "the clocks of this training are decided while it runs; begin it with a plan"

    def check(self, options: Options, job: TrainingJob) -> None:
        """Refuse options; on rank 0, send the others what they need. Before the ranks meet.

        Raises:
            PlannerError: If the options cannot be used; ends all ranks.
        """

    def join(self, seat: Seat) -> None:
        """Take a seat. All have met, and the GPU of this rank is attached.

        Raises:
            PlannerError: If it cannot decide here; ends all ranks.
        """

    def take_switch(self, switch: ModeSwitch) -> None:
        """Take what enters this rank's modes, where the training has some."""

    def begin(self, context: Context) -> None:
        """Begin, before the first iteration."""

    def show(self, count: int | None, microbatches: Microbatches | None) -> None:
        """*Training.* Take the microbatches of the iteration that begins.

        Args:
            count: How many there are; None if the engine does not know.
            microbatches: Returns them; None if the engine does not show them.
        """

    def program_of(self, version: int, data: bytes) -> Program:
        """Return this rank's program, given what was proposed to all ranks.

        Args:
            version: Its number in this job.
            data: What was proposed.

        Raises:
            PlanError: If it does not fit this rank.
        """
        raise NotImplementedError

    def followed(self, program: Program) -> Program:
        """Return this rank's part of the plan that the job begins with as it is followed.

        Raises:
            PlanError: If it cannot be.
        """
        return program

    def program_of_plans(self, version: int, plans: Plans) -> Program:
        """Return this rank's part of other plans, for one whose `no_switch` is empty.

        Args:
            version: Their number in this job; 0 to ask only whether they fit.
            plans: Of all pipelines.

        Raises:
            PlanError: If they do not fit what this rank runs, or its GPU.
        """
        raise NotImplementedError

    def check_pipelines(self, plans: Plans) -> None:
        """Refuse plans that do not fit all pipelines of the job, likewise.

        Raises:
            PlanError: If they do not.
        """
        raise NotImplementedError

    def program_for(self, iteration: int, agreed: Program | None) -> Program | None:
        """*Training.* Return what an iteration runs by; None to run without clocks. After a program
        that `awaits`, it is asked again while the iteration runs.

        Args:
            iteration: Its number.
            agreed: The program that all ranks have agreed on; None for none.
        """
        return agreed

    def on_end(
        self,
        iteration: int,
        program: Program | None,
        deviation: str | None,
        order: Order | None,
    ) -> None:
        """*Training.* Take note of an iteration that has ended; see `ProgramSource.on_end`."""

    def lose_modes(self) -> None:
        """*Training.* A function that enters a mode has failed, so all computations run in the
        training's own way from now on.
        """

    def take_work(self, work: Sequence[Any], *, order: bool) -> tuple[int, ...]:
        """*Training.* Take the work of each microbatch of the next iteration, where it
        `wants_batches`; see `Runtime.batch`.
        """
        return tuple(range(len(work)))

    def descriptors(self) -> list[int]:
        """Return the descriptors that wake the background thread."""
        return []

    def look(self, times: Sequence[IterationTimes], messages: Sequence[ToRank]) -> None:
        """Do one round, with the times of iterations and the messages of the controller that are
        new in it; about every 50 ms.
        """

    def busy_s(self, iteration: int, program: Program) -> float | None:
        """Return how long the rank had computed in an iteration, were its GPU as fast as at first,
        at the clocks that it had, seconds; None if that is not known.
        """
        return program.expected.busy_s

    @property
    def status(self) -> DeciderStatus | None:
        """What it knows now, for `Runtime.autopilot`; any thread reads it. None for nothing."""
        return None

    def stop(self, limit_s: float) -> None:
        """*Training.* Training has ended: end own threads, within so many seconds."""

    def end(self) -> None:
        """Write what is to be kept; the last call."""
