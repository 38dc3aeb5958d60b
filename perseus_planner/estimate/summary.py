"""What `planner estimate` says: plain values, for its text and its JSON alike, and that text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from perseus_planner.estimate.op_costs import Workload, stage_op_costs, stage_traffic
from perseus_planner.profiles.csv_file import word_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from perseus_planner.profiles.profiles import Profile


@dataclass(frozen=True)
class EstimatedComputation:
    """What one GPU of a stage does in one computation of a kind.

    Attributes:
        stage: from 0.
        instruction: as a profile's CSV writes it.
        layers: of the stage.
        flops: of matrix products.
        bytes: moved to and from memory while no arithmetic hides them.
        sent_bytes: sent to the tensor group.
        time_s: seconds at the top clock.
        energy_j: joules at the top clock.
        time_ratio: the seconds over those of the stage where this kind takes least.
    """

    stage: int
    instruction: str
    layers: int
    flops: float
    bytes: float
    sent_bytes: float
    time_s: float
    energy_j: float
    time_ratio: float


@dataclass(frozen=True)
class Efficiency:
    """What a kind reaches at the top clock, over all stages."""

    instruction: str
    flops_per_s: float
    flops_per_j: float


@dataclass(frozen=True)
class EstimateSummary:
    """An estimated profile; the fields that a profile has are as `Profile` has them.

    Attributes:
        model: its name.
        parameters: of the whole model.
        tokens: of a microbatch.
        top_clock_mhz: the highest clock, for which times and energies are given.
        imbalance: forward and backward of the slowest stage over those of the fastest.
        computations: by stage and kind.
        efficiencies: by kind.
        remarks: what a reader must know.
    """

    model: str
    parameters: int
    tokens: int
    origin: str
    gpu: str | None
    stages: int
    gpus_per_stage: int
    blocking_power_w: float | tuple[float, ...]
    digest: str
    top_clock_mhz: int
    imbalance: float
    computations: tuple[EstimatedComputation, ...]
    efficiencies: tuple[Efficiency, ...]
    remarks: tuple[str, ...]


def summarize_estimate(profile: Profile, workload: Workload, calibrated_by: Sequence[str]) -> EstimateSummary:
    """What `planner estimate` says of `profile`, which it estimated for `workload`."""
    computations = _computations(profile, workload)
    both_s = [
        sum(each.time_s for each in computations if each.stage == stage and each.instruction in ("forward", "backward"))
        for stage in range(profile.stages)
    ]
    return EstimateSummary(
        model=workload.name,
        parameters=workload.transformer.parameters,
        tokens=workload.transformer.tokens,
        origin=profile.origin,
        gpu=profile.gpu,
        stages=profile.stages,
        gpus_per_stage=profile.gpus_per_stage,
        blocking_power_w=profile.blocking_power_w,
        digest=profile.digest,
        top_clock_mhz=profile.measurements[0, "F"][0].clock_mhz,
        imbalance=max(both_s) / min(both_s),
        computations=computations,
        efficiencies=tuple(_efficiencies(computations)),
        remarks=tuple(_remarks(profile, workload, calibrated_by)),
    )


def estimate_text(summary: EstimateSummary) -> str:
    """The estimate, a line for each stage and kind."""
    size = f"{summary.parameters / 1e9:.2f} billion parameters, {summary.tokens} tokens a microbatch"
    lines = [
        f"Estimate of {summary.model} ({size}) on {summary.stages} stages of {summary.gpus_per_stage} GPUs, "
        f"{summary.gpu}.",
        "SIMULATED: FLOPs and bytes in closed form, on a model of the GPU; no GPU was touched.",
        f"Each GPU of a stage, for a microbatch, at {summary.top_clock_mhz} MHz:",
        "",
        f"stage  layers  {'computation':<15}  {'TFLOPs':>9}  {'GB':>8}  {'ms':>9}  {'J':>9}  x least",
    ]
    lines += [
        f"{each.stage:>5}  {each.layers:>6}  {each.instruction:<15}  {each.flops / 1e12:>9.4f}  "
        f"{each.bytes / 1e9:>8.3f}  {each.time_s * 1e3:>9.3f}  {each.energy_j:>9.3f}  {each.time_ratio:>7.3f}"
        for each in summary.computations
    ]
    reached = [
        f"{each.instruction} {each.flops_per_s / 1e12:.1f} TFLOPS and {each.flops_per_j / 1e9:.1f} GFLOPs a joule"
        for each in summary.efficiencies
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"Imbalance: the slowest stage takes {summary.imbalance:.3f}x as long as the fastest, both ways.",
            f"Reached: {'; '.join(reached)}.",
            *summary.remarks,
            "",
        ]
    )


def _computations(profile: Profile, workload: Workload) -> tuple[EstimatedComputation, ...]:
    works = stage_op_costs(workload.transformer, workload.split)
    sent = stage_traffic(workload.transformer, workload.split)
    tops = {key: rows[0] for key, rows in profile.measurements.items()}
    least_s = {kind: min(top.time_s for (_, of), top in tops.items() if of == kind) for _, kind in tops}
    return tuple(
        EstimatedComputation(
            stage=stage,
            instruction=word_of(kind),
            layers=workload.split[stage],
            flops=works[stage][kind].flops,
            bytes=works[stage][kind].bytes,
            sent_bytes=sent[stage][kind],
            time_s=top.time_s,
            energy_j=top.energy_j / profile.gpus_per_stage,
            time_ratio=top.time_s / least_s[kind],
        )
        for (stage, kind), top in tops.items()
    )


def _efficiencies(computations: Sequence[EstimatedComputation]) -> Iterable[Efficiency]:
    for word in dict.fromkeys(each.instruction for each in computations):
        those = [each for each in computations if each.instruction == word]
        flops = sum(each.flops for each in those)
        yield Efficiency(word, flops / sum(each.time_s for each in those), flops / sum(each.energy_j for each in those))


def _remarks(profile: Profile, workload: Workload, calibrated_by: Sequence[str]) -> Iterable[str]:
    if calibrated_by:
        yield f"Calibrated by {' and '.join(calibrated_by)}."
    else:
        yield (
            "Not calibrated: times and energies may be far off, all by about as much; measure one stage and give it "
            "with --calibrate."
        )
    if workload.transformer.tensor_degree > 1 and workload.link_bytes_per_s is None:
        yield "What a GPU sends to its tensor group takes no time here; give the bandwidth with --link to count it in."
    if profile.gpus_per_stage > 1:
        yield f"The profile holds the joules of all {profile.gpus_per_stage} GPUs of a stage."
