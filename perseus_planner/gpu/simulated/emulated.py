"""Emulated GPUs: they compute nothing, but work takes as long in real time as the model says.

    emulated:a100-sxm/0?slower=2000

is GPU 0 of those that this user emulates on this node; other options make a different GPU. It
behaves like `simulated:a100-sxm?slower=2000`, but in real time, and its state is shared: one
process computes on it, others read and set it, and a clock stays locked after the process that
locked it has ended. Emulated GPUs make it possible to run a training job under a plan, with
stragglers and failures, on a machine without GPUs.

The options are those of `options.py`, but without any there are no disturbances: no noise, no
drift, and an exact energy counter. Times of faults count from when a process opens the GPU that no
other has open. The power sensor shows instant power.

While nothing runs, the GPU waits for a message from a neighbour, as in a pipeline.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, replace
from typing import Any
from urllib.parse import quote

from perseus_planner.base.errors import GpuError, GpuLost
from perseus_planner.base.processes import boot_id
from perseus_planner.gpu.lease.records import open_state_folder
from perseus_planner.gpu.simulated.gpu import SETTLE_S, Chip, SimulatedGpu
from perseus_planner.gpu.simulated.model import GpuModel, Load, OpCost, find_model
from perseus_planner.gpu.simulated.options import SimulationOptions, parse_options

_TIME_BYTES = 32
_MAX_QUEUE_S = 60.0  # of calls; a later time was written before the node was rebooted
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class StateFile:
    """The file of one GPU, which this process has open.

    The files are in the folder `emulated.<uid>` of the state folder, which only that user may open:
    a lease record may name any GPU, and root may open it, but then it opens root's file, never one
    that another user has made.

    A file is replaced by a new one and never changed, so readers need no lock, and a writer that
    dies has written nothing. Writers share one lock for all GPUs of the folder, and hold it for
    microseconds. The locked file says until when driver calls are reserved: a process adds its
    call, and then waits without a lock. So a process that is stopped or killed in a call delays no
    other.

    Args:
        name: Name of the GPU, any text.
        first: Returns the state to begin with if no other process has the file open; its argument
            is the last state, empty if there is none.

    Raises:
        GpuError: If the file or its folder cannot be used; so do the methods.
    """

    def __init__(self, name: str, first: Callable[[bytes], bytes]) -> None:
        self._name = name
        self._file = quote(name, safe="")
        self._folder = self._owners = -1
        # Both are set before anything can fail, so that `close` finds them.
        with self._explained():
            self._folder = _open_user_folder()
            self._owners = self._open(f"{self._file}.open", _CREATE)
            try:
                # Whoever gets the lock alone is the first: state that a dead process left is begun
                # anew.
                fcntl.flock(self._owners, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # all processes that have it open share its lock
                fcntl.flock(self._owners, fcntl.LOCK_SH)
                # Empty if the first process has died between its lock and its first state.
                if self.read():
                    return
            self.change(first)
            fcntl.flock(self._owners, fcntl.LOCK_SH)

    def read(self) -> bytes:
        """Return the state."""
        with self._explained():
            return self._read(self._file)

    def version(self) -> object:
        """Return what differs for another state, without reading it."""
        with self._explained():
            status = os.stat(self._file, dir_fd=self._folder)
        return status.st_ino, status.st_mtime_ns

    def change(self, function: Callable[[bytes], bytes]) -> None:
        """Replace the state by what `function` returns for it; other changes wait meanwhile."""
        with self._locked():
            self._write(self._file, function(self._read(self._file)))

    def call_end_s(self, now_s: float, duration_s: float) -> float:
        """Reserve a driver call; calls for all GPUs of the folder run one after another.

        Returns:
            When the call ends, seconds of the monotonic clock, as `now_s` is.
        """
        with self._locked() as lock:
            until_s = _time_s(os.pread(lock, _TIME_BYTES, 0))
            # Calls wait for each other, as in a driver with one lock for the node.
            start_s = until_s if now_s < until_s < now_s + _MAX_QUEUE_S else now_s
            os.pwrite(lock, repr(start_s + duration_s).ljust(_TIME_BYTES).encode(), 0)
        return start_s + duration_s

    def close(self) -> None:
        """Close the file; harmless if repeated."""
        for descriptor in (self._owners, self._folder):
            with suppress(OSError):
                os.close(descriptor)
        self._owners = self._folder = -1

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise GpuError(
                f"the state of {self._name} cannot be shared: {error.strerror}; check "
                "PLANNER_STATE_DIR"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Hold the folder's lock; opened again each time, because threads and forked children
        share open files.
        """
        with self._explained():
            lock = self._open("node", _CREATE)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield lock
            finally:
                os.close(lock)

    def _open(self, file: str, flags: int) -> int:
        return os.open(file, flags, 0o600, dir_fd=self._folder)

    def _read(self, file: str) -> bytes:
        try:
            with os.fdopen(self._open(file, _READ), "rb") as opened:
                return opened.read()
        except FileNotFoundError:
            return b""

    def _write(self, file: str, content: bytes) -> None:
        # Written beside it and renamed, so that readers see the old or the new state.
        with os.fdopen(self._open("next", _CREATE | os.O_TRUNC), "wb") as opened:
            opened.write(content)
        os.replace("next", file, src_dir_fd=self._folder, dst_dir_fd=self._folder)


def _time_s(content: bytes) -> float:
    """Return the time in a lock file; 0 if another version of the planner has written there."""
    try:
        return float(content or 0)
    except ValueError:
        return 0.0


def _open_user_folder() -> int:
    """Open this user's folder.

    Raises:
        GpuError: If it belongs to another user, or is not a folder.
    """
    user = os.geteuid()
    with open_state_folder(create=True) as folder:
        assert folder is not None  # it has been created
        path = folder / f"emulated.{user}"
        with suppress(FileExistsError):
            path.mkdir(0o700)
        # The check is of what was opened: another could be put at this path in between.
        descriptor = os.open(path, _READ | os.O_DIRECTORY)
    status = os.fstat(descriptor)
    if status.st_uid != user or status.st_mode & 0o077:
        os.close(descriptor)
        raise GpuError(
            f"{path.name} in the planner's state folder is open to other users; remove it"
        )
    return descriptor


UNDISTURBED = SimulationOptions(noise=0.0, step_s=0.0, drift=0.0)
"""Default options of an emulated GPU."""

# A clock takes effect SETTLE_S after it is set, so polling more often than that sees it in time.
_SLICE_S = 0.9 * SETTLE_S
# before the end, poll without sleeping: a sleep may take this much longer than asked for
_BUSY_S = 0.2e-3


class _RunningChip(Chip):
    """A chip that goes on between two looks at it, as `Chip` otherwise."""

    def __init__(self, made_by: str, *arguments: Any) -> None:
        #: Version of the planner, and boot of the node, which settings do not outlive.
        self.made_by = made_by
        self.origin_s = time.monotonic()  #: when the chip's time was 0
        #: What it computes: a load, the share that is left, the factors on its time and its power.
        self.work: tuple[Any, ...] | None = None
        self.ended_s = 0.0  #: when it last finished computing, in the chip's time
        super().__init__(*arguments)

    def advance(self, now_s: float) -> None:
        """Advance to `now_s` of the monotonic clock.

        Raises:
            GpuLost: If the GPU falls off the bus before.
        """
        if self.work is not None:
            load, left, slower, hotter = self.work
            # Whatever happened since the last look is caught up with in one go.
            within_s = now_s - self.origin_s - self.now_s
            left = self.execute(Load(*load), left, slower, hotter, within_s)
            self.work = (load, left, slower, hotter)
            if left <= 0:
                self.work = None
                self.ended_s = self.now_s
        # A GPU without work waits for its neighbour, which takes more power than being idle.
        if self.work is None:
            self.block(now_s - self.origin_s - self.now_s)

    def end_s(self) -> float:
        """Return when the work ends or ended, or the GPU falls off the bus, in seconds of the
        monotonic clock.
        """
        # Run on to its end in this copy only: what it computes is known, if no clock changes until
        # then.
        if self.work is not None:
            load, *progress = self.work
            with suppress(GpuLost):
                self.execute(Load(*load), *progress)
            self.ended_s = self.now_s
        return self.origin_s + self.ended_s


class EmulatedGpu(SimulatedGpu):
    """One emulated GPU, opened by this process.

    Args:
        model: The GPU from the catalog.
        number: Number of the GPU on this node.
        seed: Seed of the noise, if any.
        options: Slowdown, noise, faults.

    Raises:
        GpuError: If its state cannot be shared.
    """

    keeps_settings = True

    def __init__(
        self,
        model: GpuModel,
        number: int,
        seed: int = 0,
        options: SimulationOptions = UNDISTURBED,
    ) -> None:
        super().__init__(model, seed, options)
        self.number = number
        self._made_by = f"{self.driver}, boot {boot_id()}"
        # The power sensor shows instant power, as the module's docstring says.
        instant = replace(self.model, sensor_s=0.0)
        self._chip_arguments = (self._made_by, instant, options, self._counter_phase_s())
        self._shared = StateFile(self.uuid, self._first_state)
        # The chip's time may have begun in another process.
        self._origin_s = self._restored(self._shared.read()).origin_s

    @property
    def text(self) -> str:
        """Text that opens this GPU in any process of this user on this node, e.g.
        "emulated:a100-sxm/0".
        """
        return self._with_options(f"emulated:{self.model.name}/{self.number}", "?", UNDISTURBED)

    @property
    def uuid(self) -> str:
        """User, model, number and options, e.g. "emulated-1000-a100-sxm-0"."""
        name = f"emulated-{os.geteuid()}-{self.model.name}-{self.number}"
        return self._with_options(name, "-", UNDISTURBED)

    def now_s(self) -> float:
        """Monotonic clock of this node, seconds."""
        return time.monotonic()

    def run(self, work: OpCost | Load, repetitions: int = 1) -> None:
        """Run `work`, and return when it is done: `start`, then `finish`. Only one process may
        compute on a GPU.
        """
        for _ in range(repetitions):
            self.start(work)
            self.finish()

    def start(self, work: OpCost | Load) -> None:
        """Launch `work`, and drop what is left of earlier work."""
        # Before the shared file is waited for: work begins when it is launched.
        now_s = time.monotonic()
        self._count_call()

        def begin(chip: _RunningChip) -> None:
            load = self._load(work, chip)
            if load.memory_s <= 0 and load.megacycles <= 0:
                raise GpuError(f"{self.name} got work without FLOPs or bytes; give it some")
            chip.work = (astuple(load), 1.0, *self._noise(chip, work, 1))

        self._change(begin, now_s)

    def finish(self) -> float:
        """Wait until the work is done.

        Any process may change the clock meanwhile: each part of the work runs at the clock then in
        force. After the work the GPU waits, however late this method returns.

        Returns:
            How late the method returns, seconds.

        Raises:
            GpuLost: If the GPU falls off the bus meanwhile.
        """
        version = None
        end_s = 0.0
        while True:
            # Another process may set the clock meanwhile, which moves the end.
            if (latest := self._shared.version()) != version:
                version = latest
                end_s = self._restored(self._shared.read()).end_s()
            late_s = time.monotonic() - end_s
            if late_s >= 0:
                self._count_call()
                return late_s
            # Sleeps end late by chance, so the last moment is polled.
            if late_s < -_BUSY_S:
                time.sleep(min(-late_s - _BUSY_S, _SLICE_S))

    def block(self, duration_s: float) -> None:
        """Wait for `duration_s` seconds: a GPU without work waits for a neighbour's message."""
        self.wait(duration_s)

    def close(self) -> None:
        """Close the shared file; harmless if repeated."""
        self._shared.close()

    @property
    def _chip(self) -> Chip:
        chip = self._restored(self._shared.read())
        chip.advance(time.monotonic())
        return chip

    def _call_end_s(self, now_s: float, duration_s: float) -> float:
        return self._shared.call_end_s(now_s, duration_s)

    def _pass(self, duration_s: float) -> None:
        # A driver call is not undone once it is made: a process that is stopped meanwhile stops
        # after it.
        time.sleep(max(0.0, duration_s))

    def _change(self, change: Callable[[_RunningChip], None], now_s: float | None = None) -> None:
        """Change the GPU at `now_s`, or at the time of the last change if that is later."""

        def changed(state: bytes) -> bytes:
            chip = self._restored(state)
            chip.advance(time.monotonic() if now_s is None else now_s)
            change(chip)
            return _state(chip)

        self._shared.change(changed)

    def _first_state(self, state: bytes) -> bytes:
        """Return the state of a GPU that no process had open; `state` is its last one."""
        # What another version wrote, or what was set before the node was booted, is gone.
        chip = self._restored(state if self._is_own(state) else b"{}")
        chip.work = None  # the process that launched it has died
        with suppress(GpuLost):  # the GPU is there again
            chip.advance(time.monotonic())
        # Its time begins anew, from which the faults count; everything else stays.
        chip.before = (chip.before[0] - chip.now_s, chip.before[1])
        chip.origin_s = time.monotonic()
        chip.now_s = 0.0
        chip.ended_s = 0.0
        return _state(chip)

    def _is_own(self, state: bytes) -> bool:
        """Whether this version of the planner has written a state since the node was booted."""
        try:
            return bool(json.loads(state)["made_by"] == self._made_by)
        except (ValueError, LookupError, TypeError):  # another version may have written anything
            return False

    def _restored(self, state: bytes) -> _RunningChip:
        return _RunningChip(*self._chip_arguments, json.loads(state))


def _state(chip: Chip) -> bytes:
    return json.dumps(chip.saved(), separators=(",", ":")).encode()


def open_emulated(which: str) -> EmulatedGpu:
    """Open an emulated GPU: a name of the catalog, a number and options, e.g.
    "a100-sxm/0?slower=2000".

    Raises:
        GpuError: If there is no such GPU or option, or its state cannot be shared.
    """
    text = f"emulated:{which}"
    name, _, number = which.partition("?")[0].partition("/")
    model = find_model(name, text, "GPU", "emulated:{}/0")
    if not re.fullmatch("[0-9]{1,4}", number):
        raise GpuError(f"GPU {text!r}: the number is missing; write one, such as emulated:{name}/0")
    return EmulatedGpu(model, int(number), *parse_options(text, UNDISTURBED))
