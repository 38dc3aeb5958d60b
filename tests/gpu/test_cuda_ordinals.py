"""CUDA ordinals, which differ from NVML indices."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import done
from fake_nvml import CUDA_SOURCE, UUIDS, StandIn, compiled
from nvml_exercise import check_refused

from perseus_planner.base.errors import GpuError, GpuNotSupported
from perseus_planner.gpu import inspection, open_gpu

DIGITS = [uuid.removeprefix("GPU-").replace("-", "") for uuid in UUIDS]
INSTANCE = "f" * 32


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("cuda"), source=CUDA_SOURCE)


@pytest.fixture
def cuda(cuda_library: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the UUIDs that CUDA shows, in order, and the library."""

    def shows(*digits: str, library: Path = cuda_library) -> None:
        load = ctypes.CDLL
        monkeypatch.setattr(
            ctypes, "CDLL", lambda name: load(str(library) if name == "libcuda.so.1" else name)
        )
        monkeypatch.setenv("FAKE_CUDA_UUIDS", ",".join(digits))

    return shows


def test_an_ordinal_is_mapped_by_uuid_where_the_orders_differ(nvml: StandIn, cuda):
    cuda(DIGITS[1], DIGITS[0])
    with open_gpu("cuda:0") as first, open_gpu("cuda:1") as second:
        assert (first.text, second.text) == (f"nvml:{UUIDS[1]}", f"nvml:{UUIDS[0]}")
        first.set_clock_mhz(1200)
    assert (nvml.locked_mhz(0), nvml.locked_mhz(1)) == (None, (1200, 1200))


def test_doctor_shows_all_gpus_that_cuda_shows(
    nvml: StandIn, cuda, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inspection, "_WATCH_S", 0.1)
    cuda(DIGITS[1], DIGITS[0])
    text = done("doctor cuda")
    assert text.index(UUIDS[1]) < text.index(UUIDS[0])


def test_the_loader_finds_the_cuda_driver(nvml: StandIn, cuda_library: Path):
    environment = nvml.environment()
    environment["LD_LIBRARY_PATH"] = f"{cuda_library.parent}:{environment['LD_LIBRARY_PATH']}"
    environment["FAKE_CUDA_UUIDS"] = DIGITS[1]
    script = (
        "from perseus_planner.gpu import inspection, open_gpu\nwith open_gpu('cuda:0') as "
        "gpu: print(gpu.text)"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd="/",
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"nvml:{UUIDS[1]}\n"


def test_an_old_driver_is_asked_the_older_way(nvml: StandIn, cuda, tmp_path: Path):
    cuda(
        DIGITS[1],
        library=compiled(tmp_path / "old", without=("cuDeviceGetUuid_v2",), source=CUDA_SOURCE),
    )
    with open_gpu("cuda:0") as gpu:
        assert gpu.uuid == UUIDS[1]


def test_a_mig_instance_is_refused(nvml: StandIn, cuda):
    cuda(f"{DIGITS[0]}/{INSTANCE}")
    check_refused("cuda:0", GpuNotSupported, r"cuda:0: .*MIG instance.*`nvidia-smi -mig 0`")


def test_a_mig_instance_is_refused_where_an_old_driver_tells_the_whole_gpu(
    nvml: StandIn, cuda, tmp_path: Path
):
    nvml.set("mig", 1, gpu=0)
    old = compiled(tmp_path / "old", without=("cuDeviceGetUuid_v2",), source=CUDA_SOURCE)
    cuda(f"{DIGITS[0]}/{INSTANCE}", library=old)
    check_refused("cuda:0", GpuNotSupported, r"cuda:0: MIG is on.*`nvidia-smi -mig 0`")
    assert nvml.calls("nvmlInitWithFlags") == nvml.calls("nvmlShutdown")


def test_an_ordinal_that_cuda_does_not_show_is_refused(
    nvml: StandIn, cuda, monkeypatch: pytest.MonkeyPatch
):
    cuda(*DIGITS)
    said = r"^cuda:2: CUDA shows 2 GPUs, cuda:0 to cuda:1 here.*; see `planner doctor`$"
    check_refused("cuda:2", GpuError, said)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("FAKE_CUDA_INIT", "100")
    said = r"^cuda:0: CUDA shows no GPU here \(CUDA_VISIBLE_DEVICES=''\); see `planner doctor`$"
    check_refused("cuda:0", GpuError, said)


@pytest.mark.parametrize("which", ["x", "-1", "GPU-1", "0,1", "9" * 5000])
def test_what_is_no_ordinal_is_refused(which: str):
    check_refused(f"cuda:{which}", GpuError, "is not a CUDA ordinal; write cuda:0")


def test_a_cuda_driver_that_does_not_start_is_said(
    nvml: StandIn, cuda, monkeypatch: pytest.MonkeyPatch
):
    cuda(*DIGITS)
    monkeypatch.setenv("FAKE_CUDA_INIT", "803")
    said = r"cuda:0: the CUDA driver returns error 803 .* from cuInit.*; check that `nvidia-smi`"
    check_refused("cuda:0", GpuError, said)


def test_without_the_cuda_driver_what_brings_it_is_said(cuda, tmp_path: Path):
    cuda(library=tmp_path / "libcuda.so.1")
    check_refused("cuda:0", GpuError, r"cannot load libcuda\.so\.1.*comes with the NVIDIA driver")


@pytest.mark.parametrize("absent", ["cuInit", "cuDeviceGetCount", "cuDeviceGet"])
def test_a_cuda_library_without_a_function_is_refused(cuda, tmp_path: Path, absent: str):
    cuda(*DIGITS, library=compiled(tmp_path / "poor", without=(absent,), source=CUDA_SOURCE))
    check_refused("cuda:0", GpuNotSupported, f"has no {absent}; update the NVIDIA driver")
