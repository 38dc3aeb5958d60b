#!/bin/sh
# Slurm prolog: before a job, resets what killed jobs left on this node, and logs what can be read and set on its GPUs.
# Set `Prolog=` in slurm.conf to this file. It always succeeds: Slurm drains a node whose prolog fails.

planner=${PLANNER:-/opt/perseus-planner/bin/planner}

log() {
    while read -r line; do
        echo "$line"
        logger -t planner-prolog "job ${SLURM_JOB_ID:-?}: $line" 2> /dev/null
    done
}

"$planner" reset 2>&1 | log
if [ -n "$SLURM_JOB_GPUS" ]; then
    # shellcheck disable=SC2046  # one word for each GPU
    "$planner" doctor $(echo "$SLURM_JOB_GPUS" | tr ',' '\n' | sed 's/^/nvml:/') 2>&1 | log
fi
exit 0
