"""Training jobs in virtual time, with an autopilot and a ledger on each rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopilot_world import Physics, Programs, Ran, World

from perseus_planner import Profile, schedules
from perseus_planner.extensions.autopilot import Autopilot, AutopilotJob, Decision
from perseus_planner.profiles.measurement import ClockChange
from perseus_planner.profiles.modes import OWN
from perseus_planner.runtime.guarantee import Ledger
from perseus_planner.runtime.options import AutopilotSettings
from perseus_planner.schedules.pipeline import pipeline_iteration

CHANGE = ClockChange(0.0045, 0.0009)


@dataclass
class Training:
    """What ran: each iteration's decision, programs, and outcome; and what the ranks' ledgers
    are at the end.
    """

    autopilot: Autopilot
    decisions: list[Decision] = field(default_factory=list)
    programs: list[Programs] = field(default_factory=list)
    modes: list[list[list[tuple[str, ...]]]] = field(default_factory=list)
    ran: list[Ran] = field(default_factory=list)
    ledgers: list[Ledger | None] = field(default_factory=list)


def job_of(truth: Profile, microbatches: int, pipelines: int = 1) -> AutopilotJob:
    iteration = pipeline_iteration(schedules.one_f_one_b(truth.stages, microbatches))
    clocks, modes = tuple(m.clock_mhz for m in truth.measurements[0, "F"]), truth.modes
    job = AutopilotJob(iteration, clocks, pipelines, CHANGE, gpu=truth.gpu)
    if modes is None:
        return job
    shares = modes.shared_by == "microbatch"
    return replace(job, modes=tuple(modes.ways), shares_microbatch=shares)


def train(
    truth: Profile,
    iterations: int,
    *,
    microbatches: int = 6,
    late: int = 1,
    pipelines: int = 1,
    settings: AutopilotSettings | None = None,
    prior: Profile | None = None,
    physics: Physics | None = None,
    before: Callable[[int, World], None] = lambda _number, _world: None,
) -> Training:
    """Run a job; `before` is called before each iteration, to change the world."""
    job = job_of(truth, microbatches, pipelines)
    world = World(truth, job.iteration, physics or Physics(), pipelines, seed=1)
    done = Training(Autopilot(job, settings or AutopilotSettings(), prior))
    ledgers: list[Ledger | None] = [None] * (pipelines * job.ranks)
    waiting = []
    for number in range(iterations):
        before(number, world)
        while len(waiting) >= late:
            done.autopilot.observe(waiting.pop(0))
        decision = done.autopilot.decide(number)
        programs, is_full, modes = [], [], [list(ranks) for ranks in decision.modes]
        for pipeline, ranks in enumerate(decision.clocks):
            programs.append(list(ranks))
            for rank, clocks in enumerate(ranks):
                gpu = pipeline * job.ranks + rank
                own = ledgers[gpu]
                if decision.ledger is not None:
                    own = ledgers[gpu] = (
                        decision.ledger if own is None else own.renewed(decision.ledger)
                    )
                overdrawn = own is not None and own.is_overdrawn
                is_full.append(overdrawn or decision.version == 0)
                if overdrawn:
                    programs[-1][rank] = (job.clocks_mhz[0],) * len(clocks)
                    if modes:
                        modes[pipeline][rank] = (OWN,) * len(clocks)
        world.set_modes(modes)
        ran = world.run(programs)
        done.modes.append(modes)
        seen = tuple(
            each._replace(version=0 if full else decision.version)
            for each, full in zip(ran.observations, is_full, strict=True)
        )
        waiting.append(seen)
        for gpu, full in enumerate(is_full):
            own = ledgers[gpu]
            if own is not None:
                ledgers[gpu] = own.add(ran.time_s, full_clocks=full, iteration=number)
        done.decisions.append(decision)
        done.programs.append(programs)
        done.ran.append(ran)
    done.ledgers = ledgers
    return done
