"""A stand-in for `libnvidia-ml.so.1`, compiled from `fake_nvml.c`, for tests of code that uses
NVML.

    def test_a_clock_is_locked(nvml):              # the fixture: two GPUs, in this process
        with open_gpu("nvml:1") as gpu:
            gpu.set_clock_mhz(1500)
            assert nvml.locked_mhz(1) == (1500, 1500)

    nvml.set("temperature_c", 71, gpu=0)           # from now on, in every process
    nvml.fail("nvmlDeviceGetPowerUsage", 15)       # with that error code, on every GPU
    subprocess.run(command, env=nvml.environment())

What a driver would keep (locks, limits, energy) and every call made lie in one file, so that they
outlive the processes that use them. `nvml.locked_mhz`, `limit_w`, `calls` and `settings` read it
from any process.

The script is lines of `GPU KEY VALUE`; GPU is an index or `*`, and of several lines that fit the
last holds:

    gpus 2                          how many there are
    driver 570.86.15                version of the driver
    name NVIDIA H100
    uuid GPU-…
    pci 0000:3B:00.0
    clocks 1980 1965 …              SM clocks, in the order listed
    clocks_at_1593 …                the same at that memory clock
    memory_clocks 2619 1593
    memory_mhz 1593                 clock of the memory
    idle_w 60, w_per_mhz 0.2        power = idle_w + w_per_mhz * clock; the clock is the highest
                                    listed that neither the lock nor the power limit forbids
    power_w 300                     power whatever the clock
    clock_mhz 990                   achieved clock whatever is locked
    energy_mj 1000000               the energy counter at the start
    energy_step_ms 100              it moves in such steps
    now_s 12.5                      time by which energy is counted; without it, CLOCK_MONOTONIC
    temperature_c 40
    throttle 0x4                    bits of the clocks event reasons; SwPowerCap is added where the
                                    limit bites
    limit_mw 100000 700000 700000   least, greatest and default power limit
    mig 1, persistence 0, virtualization 2
    reloads 1                       how often the driver was reloaded, after which each process must
                                    initialise anew
    computing 1234 1235             processes that compute on it
    profiles 0x80                   bits of the workload power profiles that are enforced
    field_251 1                     a field value (scope 0); `error 3`: its nvmlReturn; `untouched`:
                                    nothing is written
    field_186_1 420000              the same for scope 1
    module 1                        there is a module scope for power and energy
    error FUNCTION CODE [N [M]]     calls N to M (without: all) on that GPU answer CODE and do
                                    nothing; FUNCTION `*` is all that name a GPU; CODE 0: success is
                                    said, but nothing is written
    latency_us_FUNCTION 4500        how long it takes; settings of all GPUs and processes queue
                                    behind one lock, and take effect half-way
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
CUDA_SOURCE = Path(__file__).with_name("fake_cuda.c")
UUIDS = ("GPU-11111111-aaaa-bbbb-cccc-000000000000", "GPU-22222222-aaaa-bbbb-cccc-000000000001")
PCI = ("0000:3B:00.0", "0000:AF:00.0")
CLOCKS_MHZ = tuple(range(1980, 209, -15))

_GPUS, _FUNCTIONS, _SETS = 16, 64, 4096


class _Gpu(ctypes.Structure):
    _fields_ = (
        ("locked_min_mhz", ctypes.c_uint32),
        ("locked_max_mhz", ctypes.c_uint32),
        ("memory_mhz", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("limit_mw", ctypes.c_uint32),
        ("limit_known", ctypes.c_uint32),
        ("energy_at_ns", ctypes.c_int64),
        ("energy_uj", ctypes.c_double),
    )


class _Calls(ctypes.Structure):
    _fields_ = (("function", ctypes.c_char * 64), ("made", ctypes.c_uint32 * (_GPUS + 1)))


class _Set(ctypes.Structure):
    _fields_ = (
        ("function", ctypes.c_char * 48),
        ("gpu", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("pid", ctypes.c_uint32),
        ("low", ctypes.c_uint32),
        ("high", ctypes.c_uint32),
        ("begun_ns", ctypes.c_int64),
        ("ended_ns", ctypes.c_int64),
    )


class _State(ctypes.Structure):
    _fields_ = (
        ("script_version", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("sets", ctypes.c_uint64),
        ("gpu", _Gpu * _GPUS),
        ("calls", _Calls * _FUNCTIONS),
        ("set", _Set * _SETS),
    )


@dataclass(frozen=True)
class Setting:
    """One call that set something: (low, high) are MHz, (0, 0) for a reset, or mW twice; times
    are CLOCK_MONOTONIC.
    """

    function: str
    gpu: int
    code: int
    pid: int
    low: int
    high: int
    begun_s: float
    ended_s: float


def compiled(folder: Path, without: tuple[str, ...] = (), source: Path = SOURCE) -> Path:
    """Compile the library without some functions into `folder`, under its real name; skip
    without a compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler (cc or gcc) to make a stand-in for NVIDIA's libraries with")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / ("libnvidia-ml.so.1" if source == SOURCE else "libcuda.so.1")
    absent = [f"-D{name}=absent_{name}" for name in without]
    shared = [
        "-O1",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-shared",
        "-fPIC",
        f"-Wl,-soname,{library.name}",
    ]
    subprocess.run([compiler, *shared, *absent, "-o", str(library), str(source)], check=True)
    return library


class StandIn:
    """GPUs of a stand-in library, which are scripted here; any process with `environment()` can
    use them.
    """

    def __init__(self, library: Path, folder: Path, gpus: int = 2) -> None:
        self.library = library
        self.script = folder / "nvml.script"
        self.state = folder / "nvml.state"
        self.state.write_bytes(bytes(ctypes.sizeof(_State)))
        self._lines: list[str] = []
        clocks = " ".join(map(str, CLOCKS_MHZ))
        self.add(f"* gpus {gpus}", "* name NVIDIA H100 80GB HBM3", f"* clocks {clocks}")
        for index, (uuid, pci) in enumerate(zip(UUIDS, PCI, strict=True)):
            self.add(f"{index} uuid {uuid}", f"{index} pci {pci}")
        for index in range(len(UUIDS), gpus):
            self.add(
                f"{index} uuid GPU-{index:08x}-aaaa-bbbb-cccc-{index:012x}",
                f"{index} pci 0000:{index:02X}:00.0",
            )

    def environment(self) -> dict[str, str]:
        """Return an environment in which a process finds these GPUs."""
        paths = [str(self.library.parent), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(paths), **self.variables()}

    def variables(self) -> Mapping[str, str]:
        """Return the variables that the library reads."""
        return {"FAKE_NVML_STATE": str(self.state), "FAKE_NVML_SCRIPT": str(self.script)}

    def add(self, *lines: str) -> None:
        """Add lines to the script, which apply to all later calls in every process."""
        self._lines += lines
        self._write()

    def set(self, key: str, value: object, gpu: int | str = "*") -> None:
        """Add one line to the script."""
        self.add(f"{gpu} {key} {value}")

    def fail(
        self,
        function: str,
        code: int,
        *,
        gpu: int | str = "*",
        after: int = 0,
        times: int | None = None,
    ) -> None:
        """Let some calls pass, then some (None: all) return `code`; counted for each GPU.

        A call counts for the GPU it names; where several are meant by "*", they must have been
        called equally often."""
        first = (
            self.calls(function, 0 if gpu == "*" and _names_a_gpu(function) else gpu) + after + 1
        )
        last = "" if times is None else f" {first + times - 1}"
        self.add(f"{gpu} error {function} {code}" + (f" {first}{last}" if after or times else ""))

    @contextmanager
    def saying(self, *lines: str) -> Iterator[None]:
        """Add lines to the script inside the block."""
        before = list(self._lines)
        self.add(*lines)
        try:
            yield
        finally:
            self._lines = before
            self._write()

    def heal(self) -> None:
        """Undo every `fail`."""
        self._lines = [line for line in self._lines if line.split(" ")[1] != "error"]
        self._write()

    def locked_mhz(self, gpu: int) -> tuple[int, int] | None:
        """Return the smallest and the largest clock of the lock; None if no clock is locked."""
        kept = self._kept().gpu[gpu]
        return (kept.locked_min_mhz, kept.locked_max_mhz) if kept.locked_max_mhz else None

    def memory_mhz(self, gpu: int) -> int | None:
        """Return the memory clock that is locked, or None."""
        return self._kept().gpu[gpu].memory_mhz or None

    def limit_w(self, gpu: int) -> float | None:
        """Return the power limit that was set; None if none was."""
        kept = self._kept().gpu[gpu]
        return kept.limit_mw / 1000 if kept.limit_known else None

    def calls(self, function: str, gpu: int | str | None = None) -> int:
        """Return how often a function was called by all processes, on one GPU or in total."""
        for calls in self._kept().calls:
            if calls.function.decode() == function:
                return int(calls.made[gpu] if isinstance(gpu, int) else sum(calls.made))
        return 0

    def called(self) -> set[str]:
        """Return the functions that any process has called."""
        return {calls.function.decode() for calls in self._kept().calls} - {"", "*"}

    def settings(self) -> list[Setting]:
        """Return the last 4096 calls that set something, in order, including failed ones."""
        kept = self._kept()
        order = range(max(0, kept.sets - _SETS), kept.sets)
        return [_setting(kept.set[position % _SETS]) for position in order]

    def _kept(self) -> _State:
        return _State.from_buffer_copy(self.state.read_bytes())

    def _write(self) -> None:
        self.script.with_suffix(".new").write_text("\n".join(self._lines) + "\n", encoding="utf-8")
        self.script.with_suffix(".new").replace(self.script)
        with self.state.open(
            "r+b"
        ) as file:  # says that the script is new, also within one tick of the file's clock
            version = int.from_bytes(file.read(4), "little") + 1
            file.seek(0)
            file.write(version.to_bytes(4, "little"))


def _names_a_gpu(function: str) -> bool:
    return function not in (
        "nvmlInitWithFlags",
        "nvmlShutdown",
        "nvmlSystemGetDriverVersion",
        "nvmlDeviceGetCount_v2",
    )


def _setting(kept: _Set) -> Setting:
    function = kept.function.decode()
    return Setting(
        function,
        kept.gpu,
        kept.code,
        kept.pid,
        kept.low,
        kept.high,
        kept.begun_ns / 1e9,
        kept.ended_ns / 1e9,
    )


@pytest.fixture(scope="session")
def nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the stand-in library with all functions."""
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def nvml(nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Two GPUs of nvidia-ml-py in this process and in those that inherit its environment."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    stand_in = StandIn(nvml_library, tmp_path)
    for name, value in stand_in.environment().items():
        if os.environ.get(name) != value:
            monkeypatch.setenv(name, value)
    with loaded(nvml_library):
        yield stand_in


@contextmanager
def loaded(library: object) -> Iterator[None]:
    """Make nvidia-ml-py in this process use a library (a path, or a ctypes.CDLL) inside the
    block.
    """
    import pynvml

    before = pynvml.nvmlLib
    # What CDLL("libnvidia-ml.so.1") gives where LD_LIBRARY_PATH leads there; set, since a process
    # finds only one so.
    pynvml.nvmlLib = ctypes.CDLL(str(library)) if isinstance(library, Path) else library
    pynvml._nvmlGetFunctionPointer_cache.clear()
    try:
        yield
    finally:
        pynvml.nvmlLib = before
        pynvml._nvmlGetFunctionPointer_cache.clear()
