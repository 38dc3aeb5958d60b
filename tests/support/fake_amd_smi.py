"""A stand-in for `libamd_smi.so`, compiled from `fake_amd_smi.c`, for tests of code that uses AMD
SMI.

    def test_a_clock_is_set(amd):              # the fixture: two GPUs, in this process
        with open_gpu("amd:1") as gpu:
            gpu.set_clock_mhz(1500)
            assert amd.range_mhz(1) == (500, 1500)

    with amd.changed() as kept:                # from now on, in every process
        kept.refused = 10

The real binding, amdsmi, calls it: it looks for the library in ROCM_PATH when it is first imported.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from perseus_planner.gpu import amd as amd_gpu

SOURCE = Path(__file__).with_name("fake_amd_smi.c")
UUIDS = ("aaff74a1-0000-1000-8018-000000000001", "bbff74a1-0000-1000-8018-000000000002")
_MANUAL = 3


class _Gpu(ctypes.Structure):
    _fields_ = (
        ("least_mhz", ctypes.c_uint32),
        ("most_mhz", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("violations", ctypes.c_uint32),
        ("cap_uw", ctypes.c_uint64),
        ("at_ns", ctypes.c_int64),
        ("energy_uj", ctypes.c_double),
    )


class _State(ctypes.Structure):
    _fields_ = (
        ("lost", ctypes.c_uint32),
        ("refused", ctypes.c_uint32),
        ("inside", ctypes.c_uint32),
        ("most_inside", ctypes.c_uint32),
        ("call_us", ctypes.c_uint32),
        ("hotspot_missing", ctypes.c_uint32),
        ("unit_error", ctypes.c_double),
        ("gpu", _Gpu * 2),
    )


class AmdStandIn:
    """The GPUs of the stand-in library; any process that has `FAKE_AMD_STATE` and `ROCM_PATH`
    can use them.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        state = _State(unit_error=1.0)
        for gpu in state.gpu:
            gpu.cap_uw, gpu.energy_uj = 750_000_000, 1e9
        path.write_bytes(bytes(state))

    @contextmanager
    def changed(self) -> Iterator[_State]:
        """Give what the library keeps, and write it back at the end of the block."""
        state = self.kept()
        yield state
        with self.path.open("r+b") as file:
            file.write(bytes(state))

    def kept(self) -> _State:
        """Return what the library keeps."""
        return _State.from_buffer_copy(self.path.read_bytes())

    def range_mhz(self, gpu: int) -> tuple[int, int] | None:
        """Return the range of clocks that was set; None if the driver chooses them."""
        kept = self.kept().gpu[gpu]
        return (kept.least_mhz, kept.most_mhz) if kept.level == _MANUAL else None

    def limit_w(self, gpu: int) -> float:
        """Return the power limit."""
        return float(self.kept().gpu[gpu].cap_uw / 1e6)


@pytest.fixture(scope="session")
def rocm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library into lib/ of a folder that is like ROCm's."""
    found = importlib.util.find_spec("amdsmi")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if found is None or not found.submodule_search_locations or compiler is None:
        pytest.skip("amdsmi is not installed, or there is no C compiler")
    wrapper = Path(found.submodule_search_locations[0], "amdsmi_wrapper.py").read_text(
        encoding="utf-8"
    )
    source = SOURCE.read_text(encoding="utf-8")
    looked_up = set(re.findall(r"_libraries\['libamd_smi\.so'\]\.(\w+)", wrapper))
    missing = looked_up - set(re.findall(r"^int (amdsmi_\w+)\(", source, re.MULTILINE))
    folder = tmp_path_factory.mktemp("rocm")
    (folder / "lib").mkdir()
    (folder / "amd.c").write_text(
        source + "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(missing))
    )
    shared = ["-O1", "-w", "-shared", "-fPIC", "-o", str(folder / "lib" / "libamd_smi.so")]
    subprocess.run([compiler, *shared, str(folder / "amd.c")], check=True)
    return folder


@pytest.fixture
def amd(rocm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AmdStandIn:
    """Two GPUs of amdsmi in this process; their energy counters are compared for a moment only."""
    monkeypatch.setenv("ROCM_PATH", str(rocm))
    monkeypatch.setenv("FAKE_AMD_STATE", str(tmp_path / "amd.state"))
    monkeypatch.setattr(amd_gpu, "CHECK_S", 0.01)
    return AmdStandIn(tmp_path / "amd.state")
