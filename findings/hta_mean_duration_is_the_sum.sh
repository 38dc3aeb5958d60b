#!/usr/bin/env bash
# HolisticTraceAnalysis 0.5.0: the mean duration of a kernel is the sum of its durations, if a trace has
# more kernels than the table shows.
#
# Behaviour: `get_gpu_kernel_breakdown` and `get_gpu_user_annotation_breakdown` return sum, mean, minimum,
# maximum and standard deviation of the durations of each name. Where there are more names than
# `num_kernels` (10 by default; 1,000 for annotations) the rest is grouped into "others", and the five are
# then taken of the sums: mean, minimum and maximum of each name become its total, and the deviation 0.
# All but toy trainings run more than ten kernels. Whoever takes the time of a kernel, or of a
# computation of a pipeline that is annotated, from the column "mean (us)" gets it too long by the number
# of its calls; which of the two meanings the columns have depends on what else is in the trace.
#
# Seen: "10 kernels: gemm sum 500, mean 100, max 120, std 15.8", "11 kernels: gemm sum 500, mean 500,
# max 500, std 0.0".
#
# Usage: findings/hta_mean_duration_is_the_sum.sh
#        PYTHON=venv/bin/python findings/hta_mean_duration_is_the_sum.sh   # has HolisticTraceAnalysis
set -eu

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
python="${PYTHON:-}"
if [ -z "$python" ]; then
    python3 -m venv "$work/venv"
    python="$work/venv/bin/python"
    pip="$python -m pip install --quiet --disable-pip-version-check"
    # JupyterLab and others that it requires are not needed for tables.
    $pip networkx numpy "pandas==3.1.1" plotly psutil pyyaml
    $pip --no-deps "HolisticTraceAnalysis==0.5.0"
fi

"$python" -W ignore - "$work" <<'PYTHON'
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path

logging.disable(logging.CRITICAL)

from hta.trace_analysis import TraceAnalysis

DURATIONS_US = [80, 90, 100, 110, 120]


def breakdown(kernels):
    """The table's row of `gemm`, in a trace in which each of `kernels` kernels runs five times."""
    names = ["gemm", *(f"small_{number}" for number in range(1, kernels))]
    events = []
    ts = 1_000
    for call, duration in enumerate(DURATIONS_US):
        for kernel, name in enumerate(names):
            correlation = call * kernels + kernel + 1
            common = {"ph": "X", "ts": ts, "pid": 0}
            launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "dur": 5}
            ran = {"cat": "kernel", "name": name, "tid": 7, "dur": 10 if kernel else duration}
            args = {"correlation": correlation}
            events.append(common | launch | {"args": args})
            events.append(common | ran | {"args": args | {"stream": 7, "device": 0}})
            ts += 200
    path = Path(sys.argv[1], f"rank0-{kernels}.json")
    path.write_text(json.dumps({"distributedInfo": {"rank": 0}, "traceEvents": events}))
    _, table = TraceAnalysis(trace_files={0: str(path)}).get_gpu_kernel_breakdown(visualize=False)
    row = table[table["name"] == "gemm"].iloc[0]
    return [float(row[column]) for column in ("sum (us)", "mean (us)", "max (us)", "stddev")]


assert version("HolisticTraceAnalysis") == "0.5.0", version("HolisticTraceAnalysis")
seen = {}
for kernels in (10, 11):
    seen[kernels] = breakdown(kernels)
    total, mean, longest, std = seen[kernels]
    print(f"{kernels} kernels: gemm sum {total:g}, mean {mean:g}, max {longest:g}, std {std:.1f}")
if seen[10][:3] != [500, 100, 120] or seen[11] != [500, 500, 500, 0]:
    sys.exit("the behaviour has changed")
PYTHON
