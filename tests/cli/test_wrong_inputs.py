"""Wrong inputs over all commands, as of a first hour with each: each is
refused with exit code 2 and one sentence that names what is wrong; nothing is printed or written.

Where the shape of a command line is wrong, how it is used stands before that sentence.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import contents
from made_runs import write_run
from strategies import smooth_profile

from perseus_planner import schedules, solve
from perseus_planner.cli import main

NOBODY = "--service http://127.0.0.1:9"  #: where nothing listens
WRONG = {
    "doctor simulated:a100-smx": (
        "GPU 'simulated:a100-smx': there is no simulated GPU 'a100-smx'; did you mean"
    ),
    "doctor simulated:a100-sxm --measure-latency --json extra": (
        "GPU 'extra': there is no back-end 'extra'; choose one of: nvml, cuda, zeusd,"
    ),
    "doctor simulated:a100-sxm?noise=2": (
        "GPU 'simulated:a100-sxm?noise=2': '2' is not a noise: write a share from 0 to 0.2,"
    ),
    "profile --gpu simulated:a100-sxm --stages 0 -o p.yaml": (
        "stages: 0 is not a whole number of at least 1"
    ),
    "profile --gpu simulated:a100-sxm --stages two -o p.yaml": (
        "Invalid value for '--stages': 'two' is not a valid integer."
    ),
    "profile --gpu simulated:a100-sxm --stages 2 -o /no/such/folder/p.yaml": (
        "--output /no/such/folder/p.yaml: there is no folder /no/such/folder; make it, or"
    ),
    "profile --gpu simulated:a100-sxm --stages 2 -o p.txt": (
        "--output p.txt: must end in .yaml or .yml; rename it"
    ),
    "profile --gpu simulated:a100-sxm --stages 2 --minutes 0 -o p.yaml": (
        "--minutes: '0' is not a time limit: write minutes above 0, or a number with s, m, h"
    ),
    "profile --gpu simulated:a100-sxm --stages 2 --saving-within 200% -o p.yaml": (
        "--saving-within: '200%' is not a share: write a percentage above 0% and up to 100%,"
    ),
    "profile nothere.yaml": "nothere.yaml: no such file; check the path",
    "explore --gpus many": "Invalid value for '--gpus': 'many' is not a valid whole number.",
    "trace nothere.json": "nothere.json: no such file; check the path",
    "solve profile.yaml --schedule 1f2b --microbatches 4 -o f.npz": (
        "there is no schedule '1f2b'; did you mean 1f1b?"
    ),
    "solve profile.yaml --schedule 1f1b --microbatches 0 -o f.npz": (
        "microbatches: 0 is not a whole number of at least 1"
    ),
    "solve profile.yaml --schedule 1f1b --microbatches 1.5 -o f.npz": (
        "Invalid value for '--microbatches': '1.5' is not a valid integer."
    ),
    "solve profile.yaml --schedule 1f1b --microbatches 4 -o profile.yaml": (
        "--output profile.yaml: must end in .npz; rename it"
    ),
    "solve profile.csv --schedule 1f1b --microbatches 4 -o f.npz": (
        "profile.csv: a CSV does not hold the blocking power, what a GPU draws while it"
    ),
    "solve frontier.npz -o f.npz": "frontier.npz: is a frontier; name a profile or a job file",
    "solve profile.yaml --schedule 1f1b --microbatches 4 --slow 7=1.2 -o f.npz": (
        "slow stage 7: does not exist; stages are 0 to 1"
    ),
    "solve profile.yaml --schedule 1f1b --microbatches 4 --slow 1=zero -o f.npz": (
        "--slow: '1=zero' is not a slow stage: write stage and slowdown, such as 3=1.15"
    ),
    "solve profile.yaml --schedule interleaved --microbatches 4 --virtual-stages 0 -o f.npz": (
        "virtual_stages: 0 is not a whole number of at least 1"
    ),
    "solve profile.yaml --schedule 1f1b --microbatches 4 --gpu-power-limit 1W -o f.npz": (
        "stage 0 forward: draws 162 W at its least clock, and the power limit of its GPU is"
    ),
    "solve profile.yaml --schedule 1f1b --microbatches 4 --gpu-spread 300% -o f.npz": (
        "--gpu-spread: '300%' is not a spread: write a percentage from 0% to 100%, such as 2%"
    ),
    "plan frontier.npz -o n.yaml": (
        "give exactly one of --deadline, --slowdown, --straggler-time, --least-energy,"
    ),
    "plan frontier.npz --slowdown 5% -o n.yaml": (
        "--slowdown: '5%' is not a slowdown: write a number above 0, where 1 is as fast as"
    ),
    "plan frontier.npz --deadline 0s -o n.yaml": (
        "--deadline: '0s' is not a duration: write seconds above 0, or a number with us, ms,"
    ),
    "plan frontier.npz --deadline 1s --slowdown 1.1 -o n.yaml": (
        "give exactly one of --deadline, --slowdown, --straggler-time, --least-energy,"
    ),
    "plan frontier.npz --power-budget 1mW -o n.yaml": (
        "--power-budget: '1mW' is not a power: write watts above 0, or a number with W, kW"
    ),
    "plan frontier.npz --slowdown 1.0 --max-changes -1 -o n.yaml": (
        "Invalid value for '--max-changes': -1 is not in the range x>=0."
    ),
    "plan frontier.npz --slowdown 1.0 --on-time 100% -o n.yaml": (
        "--on-time: '100%' is not a certainty: write a percentage above 0% and up to 99%,"
    ),
    "plan frontier.npz --slowdown 1.0 --replicas 2,2 -o n.yaml": (
        "replicas: 2 counts for 1 kinds of pipelines; give one for each"
    ),
    "plan plan.yaml --slowdown 1.0 -o n.yaml": "plan.yaml: is a plan; name a frontier",
    "show .": ".: is a folder, but not a run folder; name a folder that a training run has",
    "show empty.yaml": "empty.yaml: is empty; write one `key: value` a line",
    "show notyaml.yaml": (
        "notyaml.yaml, line 2, column 1: is not valid YAML: did not find expected node"
    ),
    "show plan.yaml --plot plan.jpg": (
        "--plot plan.jpg: figures are written as .png, .svg, .pdf; end the name with one of"
    ),
    "show profile.yaml --perfetto t.json": (
        "--perfetto t.json: profile.yaml has no timeline; name a plan or a run"
    ),
    "show plan.yaml --csv t.csv": "--csv t.csv: plan.yaml has no iterations; name a run folder",
    "show run plan.yaml": "plan.yaml: is a plan; name the folder of a run",
    "report -o r.html": "Missing argument 'SOURCE...'.",
    "report plan.yaml -o r.pdf": "--output r.pdf: must end in .html or .htm; rename it",
    "report plan.yaml --pue 0.5 -o r.html": (
        "pue: 0.5 is not a PUE: give what the building draws over what the GPUs draw, at"
    ),
    "report plan.yaml --price free -o r.html": (
        "Invalid value for '--price': 'free' is not a valid float."
    ),
    "report plan.yaml --carbon 400 -o r.html": (
        "--carbon: '400' is not what a kWh emits: give g or kg of CO2e with the unit, such"
    ),
    "calibrate profile.yaml": "give a profile or job and a plan or run, or --kernels and a model",
    "calibrate profile.yaml plan.yaml --measured 0s -o c.yaml": (
        "--measured: '0s' is not a duration: write seconds above 0, or a number with us, ms,"
    ),
    "calibrate profile.yaml plan.yaml --measured 1h -o c.yaml": (
        "--measured: 3600 s is more than twice the 0.819001 s of the replay; give the mean"
    ),
    "simulate frontier.npz --pipelines 0": "pipelines: 0 is not a whole number of at least 1",
    "simulate frontier.npz --pipelines 4 --stragglers profile.csv": (
        "profile.csv, line 1: no column 'start', 'end', 'slowdown', 'pipeline' in the header"
    ),
    "run": "Missing argument 'COMMAND...'.",
    "run -- nosuchprogram-at-all": (
        "nosuchprogram-at-all: cannot be run: No such file or directory; write the command"
    ),
    "run --slowdown 0.5 -- python3 -c pass": (
        "slowdown: 0.5 is not a slowdown: give the longest iteration as a multiple of one at"
    ),
    "inference run": "Missing argument 'COMMAND...'.",
    "serve --port 99999": (
        "--port 99999: is not a port; give one from 1 to 65535, or 0 for any free port"
    ),
    "serve --host 0.0.0.0": (
        "--host 0.0.0.0: other machines can reach it, so clients need tokens; give --tokens"
    ),
    "serve --tls-cert cert.pem": "TLS: give both --tls-cert and --tls-key",
    "status --service ftp://host": (
        "the service's address 'ftp://host' is malformed; write http://host:port,"
    ),
    f"status {NOBODY}": (
        "there is no answer from the service at http://127.0.0.1:9 (Connection refused);"
    ),
    f"straggler --job gpt {NOBODY}": (
        "name what is slow in one way: --pipeline, --stage, --rank, --gpu or --node"
    ),
    f"straggler --job gpt --pipeline 3 --slowdown 0.5 {NOBODY}": (
        "slowdown 0.5 is not a number of 1 or more; 1 means recovered"
    ),
    f"straggler --job gpt --pipeline 3 --slowdown 1.2 --cause cosmic {NOBODY}": (
        "Invalid value for '--cause': 'cosmic' is not one of 'compute', 'communication',"
    ),
    f"straggler --job gpt --pipeline 3 --slowdown 1.2 --score 0.9 {NOBODY}": (
        "a report says how slow in one way: give a slowdown, an iteration time or a score,"
    ),
    f"budget --job gpt --power 0W {NOBODY}": (
        "--power: '0W' is not a power: write watts above 0, or a number with W, kW or MW,"
    ),
    f"budget --power lots {NOBODY}": (
        "--power: 'lots' is not a power: write watts above 0, or a number with W, kW or MW,"
    ),
    "run --gpu simulated:a10000 -- python3 -c pass": (
        "GPU 'simulated:a10000': there is no simulated GPU 'a10000'; did you mean"
    ),
    "explore gpt3-175b --gpus 0 --gpu a100-sxm": (
        "Invalid value for '--gpus': 0 is not in the range x>=1."
    ),
    "show cut.yaml": "cut.yaml: has no key ",
    "calibrate profile.yaml nothere": "nothere: there is no such plan or run folder; name ",
    "inference simulate profile.csv nothere.csv": "Missing option '--gpus'.",
    "inference read x=nothere.json -o i.csv": (
        "'x=nothere.json' is no result; write MHZ=FILE or MHZ@WATTS=FILE"
    ),
}
"""Command line -> how its sentence begins."""


@pytest.fixture
def work(folder: Path) -> Path:
    """A folder with a profile, its frontier, a plan, a run, and files that are nothing."""
    profile = smooth_profile(2)
    frontier = solve(profile, schedules.one_f_one_b(2, 4))
    plan = frontier.plan_for(frontier.baseline_time_s)
    profile.save("profile.yaml")
    frontier.save("frontier.npz")
    plan.save("plan.yaml")
    write_run(Path("run"), plan, 4)
    Path("empty.yaml").write_text("")
    lines = Path("plan.yaml").read_text().splitlines(keepends=True)
    Path("cut.yaml").write_text("".join(lines[: len(lines) // 2]))
    Path("notyaml.yaml").write_text("{[")
    return folder


@pytest.mark.needs("explore", "inference", "lab", "service", "traces")
def test_a_wrong_input_gets_one_sentence_and_changes_nothing(work: Path):
    """One test, as making the files takes longer than all refusals."""
    assert len(WRONG) >= 64
    before = contents()
    for command, begins in WRONG.items():
        result = CliRunner().invoke(main, shlex.split(command), prog_name="planner")
        assert (result.exit_code, result.stdout) == (2, ""), (command, result.output)
        usage, _, said = result.stderr.rpartition("Error: ")
        assert said.count("\n") == 1, command
        assert said.startswith(begins), (command, said)
        assert usage == "" or usage.startswith("Usage: planner "), command
        assert contents() == before, command
