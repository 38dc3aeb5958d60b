"""The measured profiles and reference results of the benchmarks, and how much of them a run
uses.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from perseus_planner import Frontier, Profile, schedules, solve
from perseus_planner.schedules.dag import PipelineDag


class MissingError(Exception):
    """Data that the benchmarks need is missing on this machine; the text names it."""


@dataclass(frozen=True)
class Case:
    """A measured profile with reference results.

    Attributes:
        name: as it is written in results.
        model: its name in the data.
        device: its name in the data.
        profile_file: CSV of the measurements, below the data folder.
        blocking_power_w: what a GPU draws while it waits for its neighbour, watts.
        reference_unit_s: the step in time of the reference frontiers, seconds.
    """

    name: str
    model: str
    device: str
    profile_file: str
    blocking_power_w: float
    reference_unit_s: float


CASES = (
    Case(
        "GPT-3 175B, A100 SXM", "gpt3-175b", "a100_sxm", "gpt3-175b+a100_sxm_bf16.csv", 83.64, 1e-3
    ),
    Case("Bloom 176B, A40", "bloom", "a40", "bloom+a40_bf16.csv", 70.38, 1e-4),
)
STAGES = 8


@dataclass(frozen=True)
class Size:
    """How much one run measures.

    Attributes:
        cases: the profiles.
        microbatches: per iteration, on the measured stages.
        slowdowns: deadlines, as multiples of the time with all clocks at their maximum.
        lowtime_microbatches: those for which lowtime itself is run.
        lowtime_unit_s: its step in time, seconds.
        reference_microbatches: those for which the reference frontiers are compared.
        reference_points: how many plans of each reference frontier are replayed.
        planned: stages and microbatches of the plans that are timed.
        large: stages and microbatches of the large pipelines.
        measured_runs: how many of the training jobs that were run are replayed.
        budget_microbatches: of the plans with a switch budget.
        budget_cases: how many small pipelines have a proved optimum.
        budget_slowdowns: their deadlines.
        costly_slowdowns: deadlines of the plans in which clock changes cost time.
        interleaved: ranks, virtual stages and microbatches.
        slowed_microbatches: of the pipeline in which a stage becomes slower.
        setting_s: for how long clocks are asked for, at each rate and in each way, seconds.
        setting_rates_per_s: how many each rank asks for.
    setting_ranks: how many ranks do.
        repetitions: how often a short measurement is repeated.
        hook_microbatches: of the iteration in which the runtime's hook is timed.
        hook_iterations: how often its calls are.
        engine_iterations: how often an engine with it is.
        hook_engines: how many of the engines are.
        row_errors: kinds of errors of rows and their relative standard errors.
        noise_seeds: how many data sets have each of them.
        compiles: whether compilation is timed, which takes all of it.
    load_jobs: how many jobs the service has under load.
        load_pipelines: how many pipelines each has.
        load_microbatches: of their frontiers.
        load_leaders: how many of their pipelines have a long poll open.
        load_per_s: how many reports it gets in a second.
        load_s: for how long, seconds.
        load_pipelines_large: how many pipelines the jobs have that are registered meanwhile.
        load_peak_s: for how long it then gets as many as it can answer, seconds.
        load_taken_per_s: how many jobs say in a second which version of their plans they run.
        load_wide: how many pipelines the job has whose reports are compared with the echo beside
            those of a job of `load_pipelines`.
        load_pending: how many reports begin later for a third one.
        load_alone_s: for how long one client then posts to each, seconds; twice.
    """

    cases: tuple[Case, ...] = CASES
    microbatches: tuple[int, ...] = (12, 24, 48, 96)
    slowdowns: tuple[float, ...] = (1.00, 1.01, 1.02, 1.05, 1.10, 1.20)
    lowtime_microbatches: tuple[int, ...] = (12, 24)
    lowtime_unit_s: float = 1e-3
    reference_microbatches: tuple[int, ...] = (12, 24, 48, 96)
    reference_points: int = 101
    planned: tuple[tuple[int, int], ...] = ((8, 24), (8, 96), (16, 128))
    large: tuple[tuple[int, int], ...] = ((16, 256), (32, 256), (64, 256), (32, 1024))
    measured_runs: int = 2
    budget_microbatches: int = 96
    budget_cases: int = 20
    budget_slowdowns: tuple[float, ...] = (1.00, 1.02, 1.05, 1.10)
    costly_slowdowns: tuple[float, ...] = (1.00, 1.05)
    interleaved: tuple[int, int, int] = (8, 4, 64)
    slowed_microbatches: int = 96
    setting_s: float = 4.0
    setting_rates_per_s: tuple[int, ...] = (10, 20)
    setting_ranks: int = 8
    repetitions: int = 7
    hook_microbatches: int = 16
    hook_iterations: int = 500
    engine_iterations: int = 200
    hook_engines: int = 2
    compiles: bool = True
    load_jobs: int = 200
    load_pipelines: int = 64
    row_errors: tuple[tuple[str, float], ...] = (
        *(("", noise) for noise in (0.0, 0.001, 0.005, 0.01, 0.02)),
        *((kind, 0.005) for kind in ("tails", "outlier", "missing", "hot")),
        *(("jitter", jitter) for jitter in (0.013, 0.03)),
    )
    noise_seeds: int = 4
    load_microbatches: tuple[int, ...] = (12, 24, 48, 96)
    load_leaders: int = 400
    load_per_s: float = 50.0
    load_s: float = 600.0
    load_pipelines_large: int = 2048
    load_peak_s: float = 6.0
    load_taken_per_s: float = 30.0
    load_wide: int = 1024
    load_pending: int = 2000
    load_alone_s: float = 6.0


FULL = Size()
SMOKE = Size(
    cases=CASES[:1],
    microbatches=(12,),
    slowdowns=(1.00, 1.10),
    lowtime_microbatches=(12,),
    lowtime_unit_s=4e-3,
    reference_microbatches=(12,),
    reference_points=11,
    planned=((8, 12),),
    large=((16, 24),),
    measured_runs=1,
    budget_microbatches=12,
    budget_cases=1,
    budget_slowdowns=(1.05,),
    costly_slowdowns=(1.05,),
    interleaved=(8, 2, 8),
    slowed_microbatches=12,
    setting_s=0.2,
    setting_rates_per_s=(10,),
    setting_ranks=2,
    repetitions=2,
    hook_microbatches=4,
    hook_iterations=5,
    engine_iterations=5,
    hook_engines=1,
    row_errors=(("", 0.005),),
    noise_seeds=1,
    compiles=False,
    load_jobs=6,
    load_pipelines=8,
    load_microbatches=(12,),
    load_leaders=12,
    load_per_s=100.0,
    load_s=1.0,
    load_pipelines_large=64,
    load_peak_s=0.5,
    load_wide=16,
    load_pending=20,
    load_alone_s=0.3,
)


@cache
def folder() -> Path:
    """Return the folder of measured data: $PLANNER_DATA, or shared/data beside the checkout.

    Raises:
        MissingError: If it, or a profile in it, does not exist.
    """
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    found = Path(os.environ.get("PLANNER_DATA", beside)) / "perseus_sosp24"
    for wanted in (found, *(found / "stage_profile" / case.profile_file for case in CASES)):
        if not wanted.exists():
            raise MissingError(
                f"no measured profiles: {wanted} does not exist; name their folder in PLANNER_DATA"
            )
    return found


@cache
def profile_of(case: Case) -> Profile:
    """Return the measurements of `case`."""
    return Profile.load(
        folder() / "stage_profile" / case.profile_file, blocking_power_w=case.blocking_power_w
    )


@cache
def dag_of(case: Case, microbatches: int) -> PipelineDag:
    """Return one 1F1B iteration of `case`."""
    return PipelineDag.from_schedule(profile_of(case), schedules.one_f_one_b(STAGES, microbatches))


@cache
def frontier_of(case: Case, microbatches: int) -> Frontier:
    """Return the exact frontier of that iteration."""
    return solve(profile_of(case), schedules.one_f_one_b(STAGES, microbatches))


def reference_frontier(case: Case, microbatches: int) -> list[tuple[float, float]]:
    """Return (seconds, joules) along the frontier that the reference solver printed, slowest first.

    Raises:
        MissingError: If it is not in the data folder.
    """
    path = folder() / "reference_frontier" / case.device / f"{case.model}_bf16_mb{microbatches}.csv"
    if not path.exists():
        raise MissingError(f"no reference frontier: {path} does not exist")
    with path.open(newline="") as file:
        return [(float(row["time"]), float(row["energy"])) for row in csv.DictReader(file)]


def envpipe_points(case: Case) -> Iterator[tuple[int, float, float]]:
    """Yield (microbatches, seconds, joules over the pipeline) of EnvPipe's plans for `case`.

    Raises:
        MissingError: If they are not in the data folder.
    """
    path = folder() / "envpipe_result.csv"
    if not path.exists():
        raise MissingError(f"no EnvPipe results: {path} does not exist")
    time_scale, energy_scale = (
        10,
        10 * 8,
    )  # the file has ten steps of time, and of all 8 GPUs of a stage
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["model"], row["device"]) == (case.model, case.device):
                time_s, energy_j = (
                    float(row["iteration_time"]) / time_scale,
                    float(row["energy"]) / energy_scale,
                )
                yield int(row["num_microbatches"]), time_s, energy_j
