#!/usr/bin/env bash
# zeus 0.16.0 (PyPI, extra `pfo-server`): two trainings of one shape that start in the same second are
# one job to its pipeline frequency server.
#
# Behaviour: the server makes a job's id of the time in whole seconds, the degrees of parallelism, the
# scheduler's name and the optional `job_metadata`. A second registration with the same id is accepted,
# and begins the job anew: the ranks that the first training had registered are forgotten. Launchers
# that start replicas or the tasks of a sweep together meet this. Different `job_metadata` avoid it.
#
# Seen: "ids equal: True", "ranks of the first job, before and after the second registers: 1 0".
#
# Ends with 0 while this is so, and with 1 once it has changed. Downloads torch.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" -q --disable-pip-version-check install "zeus[pfo-server]==0.16.0" fastapi==0.125.0 pydantic==1.10.27 torch
cd "$work"
cat > plan.py <<'PLAN'
[[("forward", 1200), ("backward", 1200)], [("forward", 1410), ("backward", 1410)]]
PLAN
export ZEUS_PFO_SCHEDULER=PointSolution
export ZEUS_PFO_SCHEDULER_ARGS='{"solution_path": "plan.py"}'
export ZEUS_PFO_LOG_LEVEL=ERROR
venv/bin/python - <<'PROGRAM' | tee seen
from fastapi.testclient import TestClient

from zeus.optimizer.pipeline_frequency.server import job_manager
from zeus.optimizer.pipeline_frequency.server.router import app

SHAPE = {"pp_degree": 2, "dp_degree": 1, "tp_degree": 1, "world_size": 2}
RANK = {"rank": 0, "dp_rank": 0, "pp_rank": 0, "tp_rank": 0, "available_frequencies": [1410, 1200]}

with TestClient(app) as client:
    for _ in range(5):  # a new second may begin between the two
        first = client.post("/register_job", json=SHAPE).json()
        client.post(f"/register_rank/{first}", json=RANK).raise_for_status()
        before = len(job_manager.GLOBAL_JOB_MANAGER._job_rank_infos[first])
        answer = client.post("/register_job", json=SHAPE)
        answer.raise_for_status()
        second = answer.json()
        after = len(job_manager.GLOBAL_JOB_MANAGER._job_rank_infos[first])
        if first == second:
            break
print("ids equal:", first == second)
print("ranks of the first job, before and after the second registers:", before, after)
PROGRAM
grep -qx "ids equal: True" seen && grep -qx ".*second registers: 1 0" seen
