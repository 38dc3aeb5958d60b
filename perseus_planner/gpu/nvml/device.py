"""Calls of NVML on one GPU, whose answers are whole numbers in NVML's units, or an error.

A library may answer that all went well and write nothing, or write what stands for "unknown". Neither is a reading:
both become `GpuNotSupported`, so that the next way to read the same thing is tried.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from perseus_planner.errors import GpuError, GpuLost, GpuNotSupported
from perseus_planner.gpu.nvml.library import NVML, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Answer = TypeVar("Answer")

MOST_MHZ = 100_000
"""No clock is above it: a greater number is none."""

UNKNOWN = (0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
"""What NVML writes where it does not know a number of 32 or 64 bits."""

_NO_SUCH_FIELD = (2, 3, 6, 13, 25, 26)
"""Codes by which libraries say that they do not know a field; they differ in that."""

_INTEGERS = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
"""Where a field's number lies, by its type. Type 0, a real number, is also that of an entry never written."""


@dataclass(frozen=True)
class Quantity:
    """Something that NVML says as a whole number.

    Attributes:
        what: what is done to learn it, for errors: "cannot" stands before it.
        least: no GPU that works has less.
        most: none has more.
        instead: what to do where it is not supported; empty: what suits every quantity.
    """

    what: str
    most: int
    least: int = 1
    instead: str = ""


class NvmlDevice:
    """One GPU as NVML sees it; from any thread, and in forked children.

    Every method raises a `GpuError` that says what was asked, what NVML answered and what to do.

    Attributes:
        uuid: NVML's UUID of it.
        who: how errors call it; the text that opens it.
    """

    def __init__(self, uuid: str, handle: Any) -> None:
        self.uuid = uuid
        self.who = f"nvml:{uuid}"
        self._handle, self._generation = handle, NVML.generation
        self._lock = threading.Lock()

    def call(self, function: str, *arguments: Any, what: str, instead: str = "") -> Any:
        """What the binding's `function` returns for this GPU; `what` and `instead` as in `Nvml.call`."""
        return NVML.call(function, self._current_handle(), *arguments, who=self.who, what=what, instead=instead)

    def text(self, function: str, what: str) -> str:
        """A text that is not empty."""
        said = self.call(function, what=what)
        text = (said.decode(errors="replace") if isinstance(said, bytes) else str(said)).strip()
        if not text:
            raise self.no_reading(what, "an empty text", function)
        return text

    def number(self, quantity: Quantity, function: str, *arguments: int) -> int:
        """A number that the quantity can have."""
        value = int(self.call(function, *arguments, what=quantity.what, instead=quantity.instead))
        return self._plausible(quantity, value, function)

    def number_of_field(self, quantity: Quantity, field: int, scope: int = 0) -> int:
        """The same from a field value; scope 0 is the GPU, 1 the module of a GPU and its CPU."""
        # Scope 0 is not spelt out: older versions of the binding know no scopes.
        (value,) = self.fields([(field, scope) if scope else field], quantity.what)
        return self._plausible(quantity, value, f"field {field} of nvmlDeviceGetFieldValues")

    def clocks(self, function: str, *arguments: int, what: str, instead: str) -> tuple[int, ...]:
        """A list of clocks, MHz, highest first, each once: the order of NVML's lists is not specified."""
        listed = self.call(function, *arguments, what=what, instead=instead)
        clocks = tuple(sorted({int(clock) for clock in listed if 0 < clock <= MOST_MHZ}, reverse=True))
        if not clocks:
            raise GpuNotSupported(f"{self.who}: cannot {what}: {function} lists none; {instead}")
        return clocks

    def fields(self, fields: Sequence[int | tuple[int, int]], what: str) -> list[int]:
        """The numbers of some fields, each a field or (field, scope), read in one call."""
        return [self._written(entry, what) for entry in self.call("nvmlDeviceGetFieldValues", list(fields), what=what)]

    def no_reading(self, what: str, said: str, function: str) -> GpuNotSupported:
        """The error for an answer that is none."""
        return GpuNotSupported(
            f"{self.who}: cannot {what}: NVML answers {said} to {function}, which is no reading; update the NVIDIA "
            "driver, and see which libnvidia-ml.so.1 is loaded"
        )

    def _plausible(self, quantity: Quantity, value: int, function: str) -> int:
        if not quantity.least <= value <= quantity.most or value in UNKNOWN:
            raise self.no_reading(quantity.what, str(value), function)
        return value

    def _written(self, entry: Any, what: str) -> int:
        """The number in one entry of field values, which has a return code of its own."""
        asked = f"field {entry.fieldId} of nvmlDeviceGetFieldValues"
        if entry.nvmlReturn != 0:
            error = refusal(entry.nvmlReturn, "no value", asked, self.who, what)
            raise GpuNotSupported(str(error)) if entry.nvmlReturn in _NO_SUCH_FIELD else error
        member = _INTEGERS.get(entry.valueType)
        number = int(getattr(entry.value, member)) if member else None
        if number is None or number in UNKNOWN:
            raise self.no_reading(what, "nothing" if number is None else hex(number), asked)
        return number

    def _current_handle(self) -> Any:
        NVML.ready()
        if self._generation != NVML.generation:  # a forked child: handles are of the process that asked for them
            with self._lock:
                self._handle = NVML.call("nvmlDeviceGetHandleByUUID", self.uuid, who=self.who, what="find it again")
                self._generation = NVML.generation
        return self._handle


def answer(read: Callable[[], Answer]) -> Answer | None:
    """What `read` returns; None where NVML has no answer, unless that is since the GPU is lost.

    Raises:
        GpuLost: the GPU has fallen off the bus.
    """
    try:
        return read()
    except GpuLost:
        raise
    except GpuError:
        return None


class Reading:
    """The first of several ways to read a quantity that the GPU supports, and from then on only that way.

    Two ways may count different things, so differences between what they say would mean nothing.

    """

    def __init__(self, *ways: Callable[[], int]) -> None:
        self._ways = ways
        self._way: Callable[[], int] | None = None

    @property
    def last_way(self) -> bool:
        """Whether all ways but the last were found not to be supported."""
        return self._way is self._ways[-1]

    def __call__(self) -> int:
        """The quantity now.

        Raises:
            GpuNotSupported: no way is supported; the text is that of the first.
            GpuError: as a way raises it.
        """
        if self._way is not None:
            return self._way()
        errors = []
        for way in self._ways:
            try:
                value = way()
            except GpuNotSupported as error:
                errors.append(error)
            else:
                self._way = way
                return value
        raise errors[0]
