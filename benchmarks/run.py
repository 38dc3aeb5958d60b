"""Run the benchmarks: measure, check the answers, write a result file. See README.md."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import attention_kernels
import autopilot
import autopilot_noise
import batches
import budget_optima
import budgets_in_doubt
import by_time
import cluster_replay
import controller_latency
import emulated_training
import emulation
import estimates
import explorations
import frontier_times
import hook_cost
import inference_caps
import iteration_times
import jitter_parts
import kernel_classes
import large_jobs
import large_pipeline
import learning_training
import learnt_modes
import lowtime_ratio
import measured_again
import measured_runs
import model_fit
import modes
import noisy_plans
import other_gpus
import other_pipelines
import pair_optima
import plan_gaps
import plan_times
import power_cap
import references
import service_load
import serving_pools
import small_optima
import stated_savings
import sweep_quality
import switch_budgets
import traced
import unlike_stages
import whole_training
from data import FULL, SMOKE, MissingError, Size, folder
from effort import reduce_effort
from results import Section, environment, failed, write

SECTIONS: dict[int, Callable[[Size], Section]] = {
    1: frontier_times.measure,
    2: lowtime_ratio.measure,
    3: plan_gaps.measure,
    4: large_pipeline.measure,
    5: plan_times.measure,
    6: references.measure,
    7: measured_runs.measure,
    8: switch_budgets.measure,
    9: other_pipelines.measure,
    10: cluster_replay.measure,
    11: emulation.measure,
    12: model_fit.measure,
    13: estimates.measure,
    14: sweep_quality.measure,
    15: controller_latency.measure,
    16: hook_cost.measure,
    17: emulated_training.measure,
    18: service_load.measure,
    19: noisy_plans.measure,
    20: unlike_stages.measure,
    21: budget_optima.measure,
    autopilot.NUMBER: autopilot.measure,
    autopilot_noise.NUMBER: autopilot_noise.measure,
    learning_training.NUMBER: learning_training.measure,
    24: iteration_times.measure,
    25: power_cap.measure,
    26: explorations.measure,
    27: serving_pools.measure,
    inference_caps.NUMBER: inference_caps.measure,
    large_jobs.NUMBER: large_jobs.measure,
    whole_training.NUMBER: whole_training.measure,
    batches.NUMBER: batches.measure,
    modes.NUMBER: modes.measure,
    learnt_modes.NUMBER: learnt_modes.measure,
    stated_savings.NUMBER: stated_savings.measure,
    other_gpus.NUMBER: other_gpus.measure,
    traced.NUMBER: traced.measure,
    small_optima.NUMBER: small_optima.measure,
    by_time.NUMBER: by_time.measure,
    measured_again.NUMBER: measured_again.measure,
    jitter_parts.NUMBER: jitter_parts.measure,
    attention_kernels.NUMBER: attention_kernels.measure,
    kernel_classes.NUMBER: kernel_classes.measure,
    pair_optima.NUMBER: pair_optima.measure,
    budgets_in_doubt.NUMBER: budgets_in_doubt.measure,
}
_RESULTS = Path(__file__).resolve().parent / "results"


def main() -> int:
    """Return the exit status: 1 if an answer is wrong, whatever the times are."""
    options = _options()
    try:
        folder()
    except MissingError as error:
        print(f"skipped: {error}")
        return 0
    size, about = SMOKE if options.smoke else FULL, environment()
    if options.smoke:
        reduce_effort()
    sections = [_section(number, size) for number in sorted(set(options.only or SECTIONS))]
    for section in sections:
        print(section.markdown(), end="\n\n")
    whole = not options.only and not options.smoke
    if options.output or whole:
        name = "smoke" if options.smoke else "planning" if whole else "part"
        paths = write(name, sections, size, about, options.output or _RESULTS)
        for section in sections:
            if section.number == switch_budgets.NUMBER and section.tables:
                paths.append(paths[0].with_name(f"{paths[0].stem}_switch-budgets.png"))
                switch_budgets.draw(section.tables[0].rows, paths[-1])
        for path in paths:
            print(f"wrote {path}")
    wrong = failed(sections)
    for check in wrong:
        print(check, file=sys.stderr)
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Run the benchmarks of the planner on measured profiles."
    )
    parser.add_argument(
        "--only",
        type=int,
        action="append",
        choices=SECTIONS,
        metavar="N",
        help="this number alone; may be repeated",
    )
    parser.add_argument(
        "--smoke", action="store_true", help="small sizes, seconds: does everything still run?"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="write the result files there; without it a whole run writes to benchmarks/results, a "
        "part of one nowhere",
    )
    return parser.parse_args()


def _section(number: int, size: Size) -> Section:
    begin_s = time.perf_counter()
    try:
        section = SECTIONS[number](size)
    except MissingError as error:
        section = Section(number, "Skipped", f"skipped: {error}")
    print(f"{number}. {section.title}: {time.perf_counter() - begin_s:.0f} s", file=sys.stderr)
    return section


if __name__ == "__main__":
    sys.exit(main())
