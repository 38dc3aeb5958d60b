"""The files in deploy/ start the service, and reset what killed jobs left; what they name
exists.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from command_options import ROOT, check_shell
from documents import check_unit
from fake_nvml import UUIDS, StandIn
from gpu_owners import LOCKS_AND_WAITS, files, guardians, kill, owner

from perseus_planner.base import __version__

DEPLOY = ROOT / "deploy"
SERVICE = DEPLOY / "perseus-planner.service"
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.fixture
def state(nvml: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLANNER_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def slurm(script: str, **variables: str) -> str:
    """Run the prolog or epilog in Slurm's environment, which has few variables, and return what
    it prints.
    """
    environment = {
        **os.environ,
        "PLANNER": str(Path(sys.executable).with_name("planner")),
        **variables,
    }
    command = [DEPLOY / f"slurm-{script}.sh"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    ).stdout


def epilog(**variables: str) -> str:
    return slurm("epilog", **variables)


def test_the_epilog_resets_what_the_killed_job_left(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
        assert nvml.locked_mhz(0) == (1500, 1500)
        assert "Reset nvml:" in epilog()
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]
    assert files(state) == []


def test_the_epilog_resets_the_gpus_of_a_job_whose_leases_it_cannot_see(
    nvml: StandIn, state: Path, monkeypatch: pytest.MonkeyPatch
):
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
    monkeypatch.setenv("PLANNER_STATE_DIR", str(state.with_name("of the node")))
    epilog(SLURM_JOB_GPUS="1")
    assert [nvml.locked_mhz(index) for index in range(2)] == [(1500, 1500), None]
    epilog(SLURM_JOB_GPUS="0,1")
    assert nvml.locked_mhz(0) is None


def test_the_epilog_leaves_what_another_job_has_leased_and_succeeds(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS, ["nvml:0"]):
        assert "leased to process" in epilog(SLURM_JOB_GPUS="0")
        assert nvml.locked_mhz(0) == (1500, 1500)


def test_the_prolog_resets_what_is_left_and_says_what_the_gpus_of_the_job_can_do(
    nvml: StandIn, state: Path
):
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
        text = slurm("prolog", SLURM_JOB_GPUS="1")
    assert "Reset nvml:" in text
    assert UUIDS[1] in text.partition("What works here:")[0]
    assert [nvml.locked_mhz(index) for index in range(2)] == [None, None]


def checked(*command: object) -> str:
    """What a checker says that finds nothing wrong; it is skipped where it is not installed."""
    found = shutil.which(str(command[0]), path=PATH)
    if found is None:
        pytest.skip(f"{command[0]} is not installed")
    ran = subprocess.run(
        [found, *map(str, command[1:])], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("unit", sorted(DEPLOY.glob("*.service")), ids=lambda unit: unit.stem)
def test_the_units_start_commands_that_exist(unit: Path, tmp_path: Path):
    check_unit(unit.read_text())
    here = unit.read_text().replace("/opt/perseus-planner/bin", str(Path(sys.executable).parent))
    (tmp_path / unit.name).write_text(here)
    assert checked("systemd-analyze", "verify", tmp_path / unit.name) == ""


def test_the_unit_of_the_service_may_do_little():
    said = checked(
        "systemd-analyze", "security", "--offline=true", "--threshold=20", f"{SERVICE}"
    )  # tenths of the exposure from 0 to 10; a unit without settings has 96
    assert "OK" in said.splitlines()[-1]
    unit = SERVICE.read_text()
    loaded = re.findall(r"^LoadCredential=(.+):/etc/planner/\1$", unit, re.MULTILINE)
    assert loaded == re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/(\S+)", unit)


TRAINING = f"""#!{sys.executable}
import signal
from contextlib import ExitStack
from perseus_planner.gpu import open_gpu
from perseus_planner.gpu.lease.lease import lease_gpus

with ExitStack() as stack:
    gpu = stack.enter_context(open_gpu("nvml:0"))
    stack.enter_context(lease_gpus([gpu]))
    gpu.set_clock_mhz(1500)
    print("set", flush=True)
    signal.pause()
"""


def test_a_pod_that_is_stopped_leaves_no_gpu_set(nvml: StandIn, state: Path, tmp_path: Path):
    (container,) = yaml.safe_load((DEPLOY / "kubernetes-pod.yaml").read_text())["spec"][
        "containers"
    ]
    main, stop = (
        [word.replace("/tmp/training.pid", str(tmp_path / "training.pid")) for word in words]
        for words in (container["command"], container["lifecycle"]["preStop"]["exec"]["command"])
    )
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "torchrun").write_text(TRAINING)
    (tmp_path / "bin" / "torchrun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{PATH}"}
    with subprocess.Popen(
        main, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as pod:
        try:
            assert pod.stdout.readline() == "set\n"
            assert nvml.locked_mhz(0) == (1500, 1500)
            subprocess.run(stop, env=environment, capture_output=True, timeout=300, check=True)
            assert nvml.locked_mhz(0) is None
            assert pod.wait(300) == 128 + signal.SIGTERM
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)
    assert files(state) == []


def manifests(name: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a Kubernetes manifest, by kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / name).read_text())}


@pytest.mark.parametrize("name", ["kubernetes-service.yaml", "kubernetes-daemonset.yaml"])
def test_the_parts_of_a_manifest_fit_together(name: str):
    objects = manifests(name)
    workload = objects.get("Deployment") or objects["DaemonSet"]
    pod = workload["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = pod["spec"]["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [
        each["name"] for each in pod["spec"]["volumes"]
    ]
    if "Service" in objects:
        service = objects["Service"]["spec"]
        assert service["selector"].items() <= labels.items()
        (port,) = service["ports"]
        ports = {each["name"]: each["containerPort"] for each in container["ports"]}
        assert ports[port["targetPort"]] == port["port"] == 8400
        assert container["readinessProbe"]["httpGet"]["port"] in ports
        check_shell(shlex.join([*container["command"], *container["args"]]))
        folders = [mount["mountPath"] for mount in container["volumeMounts"]]
        files = [each for each in container["args"] if each.startswith("/")]
        assert {str(Path(file).parent) for file in files} <= {*folders}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert workload["spec"]["replicas"] == 2
        assert [each["name"] for each in container["env"]] == ["PLANNER_SERVICE_DATABASE"]
        policy = objects["NetworkPolicy"]["spec"]
        assert policy["podSelector"]["matchLabels"].items() <= labels.items()
        assert {each["port"] for each in policy["ingress"][0]["ports"]} == {*ports}


@pytest.mark.parametrize(
    "manifest", sorted(DEPLOY.glob("kubernetes-*.yaml")), ids=lambda each: each.stem
)
def test_manifests_are_valid_and_pods_get_no_more_than_they_need(manifest: Path):
    for each in manifests(manifest.name).values():
        pod = (
            each["spec"] if each["kind"] == "Pod" else each["spec"].get("template", {}).get("spec")
        )
        if pod is None:
            continue
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            name, _, tag = container["image"].partition(":")
            assert tag == (__version__ if name.endswith("/perseus-planner") else "1")
            if name.endswith("/perseus-planner"):
                assert container["resources"]["limits"]["memory"]
                assert container["securityContext"]["readOnlyRootFilesystem"] is True
    checked("kubernetes-validate", "--strict", manifest)


def test_the_daemon_set_resets_what_a_killed_pod_left(nvml: StandIn, state: Path):
    with owner(LOCKS_AND_WAITS) as process:
        kill(*(guardian.pid for guardian in guardians(process)), process.pid)
        process.wait()
    (container,) = manifests("kubernetes-daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"][
        "containers"
    ]
    command, environment = container["command"], {**os.environ, "PATH": PATH}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as pod:
        try:
            assert "Reset nvml:" in pod.stdout.readline()
            assert nvml.locked_mhz(0) is None
            while "set clocks" not in pod.stdout.readline():  # the last line of the doctor
                pass
            pod.terminate()
            assert pod.wait(300) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(pod.pid, signal.SIGKILL)


def test_the_image_is_made_of_files_that_exist_and_starts_the_service():
    lines = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    of = {name: [rest for step, rest in steps if step == name] for name, _ in steps}
    assert steps[0][0] == "FROM"
    copied = [
        source
        for rest in of["COPY"]
        for source in rest.split()[:-1]
        if not rest.startswith("--from=build ")
    ]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    made_of = {"pyproject.toml", "setup.py", "build_backend.py", "perseus_planner", "profiler"}
    assert made_of | {"runtime"} <= {*copied}  # what the wheel is made of
    admitted = (ROOT / ".dockerignore").read_text().splitlines()
    assert admitted[1] == "*"
    assert {*copied} == {line[1:] for line in admitted if line.startswith("!")}
    # The wheel is made in a stage with a compiler, and installed in one without.
    assert [step[1] for step in steps if step[0] == "FROM"] == [
        "python:3.12-bookworm AS build",
        "python:3.12-slim-bookworm",
    ]
    made, installed = of["RUN"]
    assert made.startswith("pip wheel ")
    assert "install -d -o 10001 -g 10001 /var/lib/planner" in installed
    pod = manifests("kubernetes-service.yaml")["Deployment"]["spec"]["template"]["spec"]
    context = pod["securityContext"]
    assert {context["runAsUser"], context["runAsGroup"], context["fsGroup"]} == {10001}
    extras = re.search(r"\[([a-z,]+)\]", installed)[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*extras} <= {*project["optional-dependencies"]}
    start = json.loads(of["ENTRYPOINT"][0]) + json.loads(of["CMD"][0])
    check_shell(shlex.join(start))
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    assert (
        DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]
    ).resolve() == DEPLOY / "Dockerfile"
    assert service["image"] == f"perseus-planner:{__version__}"
    assert service["ports"] == [f"{of['EXPOSE'][0]}:{of['EXPOSE'][0]}"]
    mounts = {volume.split(":")[1] for volume in service["volumes"]}
    assert mounts == {*of["VOLUME"], start[start.index("--tokens") + 1]}


def test_hadolint_finds_nothing_in_the_image():
    assert checked("hadolint", DEPLOY / "Dockerfile") == ""


@pytest.mark.parametrize("script", sorted(DEPLOY.glob("*.sh")), ids=lambda script: script.stem)
def test_the_scripts_are_those_of_a_plain_shell(script: Path):
    assert script.read_text().startswith("#!/bin/sh\n")
    subprocess.run(["sh", "-n", script], check=True, timeout=300)
