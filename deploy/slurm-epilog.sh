#!/bin/sh
# Slurm epilog: resets the GPUs of a job that was killed with its guardian. Set `Epilog=` in slurm.conf to this file.
#
# Where jobs share the state folder, `planner reset` finds what they left. Where the folder is private to each job
# (job_container/tmpfs), nobody sees its leases, so the GPUs of the job that has just ended are reset by name, unless
# another job has leased them. It always succeeds: Slurm drains a node whose epilog fails. The log says what failed.

planner=${PLANNER:-/opt/perseus-planner/bin/planner}

reset_gpus() {
    "$planner" reset "$@" 2>&1 | while read -r line; do
        echo "$line"
        logger -t planner-epilog "job ${SLURM_JOB_ID:-?}: $line" 2> /dev/null
    done
}

reset_gpus
if [ -n "$SLURM_JOB_GPUS" ]; then
    # shellcheck disable=SC2046  # one word for each GPU
    reset_gpus $(echo "$SLURM_JOB_GPUS" | tr ',' '\n' | sed 's/^/nvml:/')
fi
# A training job that is registered as `slurm-` and its number ends at the planner's service, if the environment names it.
if [ -n "$PLANNER_SERVICE" ] && [ -n "$SLURM_JOB_ID" ]; then
    curl -sS -m 5 -o /dev/null -X DELETE ${PLANNER_TOKEN:+-H "Authorization: Bearer $PLANNER_TOKEN"} \
        "$PLANNER_SERVICE/v1/jobs/slurm-$SLURM_JOB_ID" 2>&1 | logger -t planner-epilog
fi
exit 0
